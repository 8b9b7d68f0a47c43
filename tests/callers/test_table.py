"""Every setting and argument of `generate` is tried on base and model, and the docs say what happens with each."""

from pathlib import Path

import pytest
import transformers

from hf_drafthead.bases.releases import NEWEST
from tests.callers import table

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"


@pytest.fixture
def no_deprecated_use_of_transformers():
    """Here calls that transformers deprecates are tried as well."""


def test_every_field_of_the_generation_config_is_decided():
    assert set(table.fields_there_are()) <= set(table.SETTINGS), "decide it in tests/callers/table.py"


def test_every_argument_of_generate_is_decided():
    assert set(table.arguments_there_are()) <= set(table.ARGUMENTS), "decide it in tests/callers/table.py"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own, of settings that it is about to drop
@pytest.mark.parametrize("name", [name for name in table.fields_there_are() if name in table.SETTINGS])
def test_a_setting_gives_what_it_gives_on_the_base(name):
    check(table.outcome(name, table.SETTINGS[name]))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", [name for name in table.arguments_there_are() if name in table.ARGUMENTS])
def test_an_argument_gives_what_it_gives_on_the_base(name):
    check(table.outcome(name, table.ARGUMENTS[name]))


def check(found: table.Outcome) -> None:
    assert not found.differences
    assert found.outcome != "nothing was drafted"
    if transformers.__version__ == NEWEST and not found.name.startswith("_"):
        row = f"| `{found.name}` | {found.tried} | {found.outcome} |"
        assert row in PAGE.read_text(encoding="utf-8").splitlines(), f"run: python -m tests.callers.table {PAGE}"
