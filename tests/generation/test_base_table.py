"""The table of bases in the documentation says what happens when each of them is tried."""

import pytest

from tests.base_table import BEGIN, DOCS, END, IMAGES, TEXT, row
from tests.bases import EARLIER

# Its rotary embedding takes no positions of two dimensions there, so that heads have other decoder layers.
IN_EARLIER_VERSIONS = {"qwen2_5_vl": ("yes", "a LLaMA's", "")}


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    """The lines of the table, by base."""
    lines = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    return {line.split("`")[1]: line for line in lines}


@pytest.mark.few(24)
@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_the_table_says_what_happens(kind, written):
    found = row(kind)
    if EARLIER and kind in IN_EARLIER_VERSIONS:
        assert found == IN_EARLIER_VERSIONS[kind]
    else:
        assert written[kind] == f"| `{kind}` | {' | '.join(found)} |"


def test_every_line_is_tried(written):
    assert list(written) == [*TEXT, *IMAGES]
