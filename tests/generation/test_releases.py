"""A model takes and gives what the installed release of transformers takes and gives, under the names of its time."""

import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import hf_drafthead
from hf_drafthead.bases import releases
from hf_drafthead.bases.releases import CACHE, cache_argument
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

NAMES = ("cache", "past_key_values")
ROOT = Path(__file__).parents[2]
every_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture
def no_warnings(caplog):
    """Nothing that is done here is deprecated: neither a Python warning nor a line of transformers says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    assert not [record for record in caplog.records if "deprecated" in record.getMessage()]


def model_and_past():
    """A model, a text, and the base's cache of all of it but the last two tokens."""
    model, text = FAMILIES[0].build(shared_base("llama")), prompt()["input_ids"]

    def past():
        with torch.no_grad():
            return model.base(text[:, :-2], use_cache=True)[CACHE]

    return model, text, past


@every_name
def test_a_forward_takes_the_cache_by_either_name(name, no_warnings):
    model, text, past = model_and_past()
    with torch.no_grad():
        expected = model.base(text[:, -2:], **{CACHE: past()})
        got = model(text[:, -2:], **{name: past()})
    assert torch.equal(got.logits, expected.logits)
    assert type(got) is type(expected) and list(got) == list(expected) and CACHE in list(got)
    assert got[CACHE].get_seq_length() == text.shape[1]


@every_name
def test_generate_takes_the_cache_by_either_name(name, no_warnings, fallbacks):
    model, text, past = model_and_past()
    call = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    expected = model.base.generate(text, **{CACHE: past()}, **call)
    got = model.generate(text, **{name: past()}, **call, draft_tree=TREE)
    assert torch.equal(got.sequences, expected.sequences) and got.accepted_lengths is not None
    assert list(got) == [*expected, "accepted_lengths"] and fallbacks == []
    assert getattr(got, CACHE).get_seq_length() == getattr(expected, CACHE).get_seq_length()


def test_two_names_at_once_are_refused_in_one_line():
    model, text, past = model_and_past()
    given = dict.fromkeys(NAMES, past())
    said = "the cache is given under 2 names, cache and past_key_values: give"
    with pytest.raises(TypeError, match=said):
        model(text[:, -2:], **given)
    with pytest.raises(TypeError, match=said):
        model.generate(text, **given)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}], ids=["drafted", "by the base"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_call_uses_a_name_that_is_deprecated(family, settings, no_warnings, caplog):
    caplog.set_level(logging.WARNING)
    output = family.build(shared_base("llama")).generate(
        **prompt(2), **settings, max_new_tokens=8, return_dict_in_generate=True
    )
    assert output[CACHE] is not None


def test_a_new_name_is_known_by_what_it_holds():
    def typed(self, input_ids, memory: transformers.Cache | None = None, cached: int = 0): ...

    def older(self, input_ids, layer_past=None, memory: transformers.Cache | None = None): ...

    typed.__annotations__["memory"] = "Cache | None"  # as a module with postponed annotations has it
    assert cache_argument(typed) == "memory" and cache_argument(older) == "layer_past"
    assert cache_argument(lambda input_ids, cached=0: None) is None


def test_no_other_module_spells_the_cache_or_asks_for_a_version():
    """`forward` of our models names both in its signature, for callers of either."""
    folder, wrong = Path(hf_drafthead.__file__).parent, []
    names = re.compile(
        r"""["'](past_key_values?|cache_params|layer_past|cache)["']|transformers\.__version__|Version\("""
    )
    allowed = {"modeling/base.py": 4, "evaluation/measurement.py": 1, "training/record.py": 1}
    for path in sorted(folder.rglob("*.py")):
        place = path.relative_to(folder).as_posix()
        found = names.findall(path.read_text(encoding="utf-8"))
        if place != "bases/releases.py" and len(found) > allowed.get(place, 0):
            wrong.append((place, len(found)))
    assert not wrong, releases.__doc__


@pytest.mark.few(1)
@pytest.mark.parametrize("installed", ["4.57.1", "5.16.2", "6.0.0.dev0", "6.1.0"])
def test_a_release_that_is_too_old_or_too_new_is_refused_in_one_line(installed, tmp_path):
    """Also where names are missing in it that are imported elsewhere."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(
        f"__version__ = {installed!r}\nclass GenerationConfig: pass\nclass PreTrainedModel: pass\n"
    )
    (tmp_path / "transformers" / "cache_utils.py").write_text("class Cache: pass\nclass CacheLayerMixin: pass\n")
    (tmp_path / "transformers" / "generation.py").write_text("class GenerationMixin: pass\n")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    command = [sys.executable, "-c", "import hf_drafthead"]
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert f"transformers {installed} is installed, and draft heads need a release from 5.17.0 on and below 6" in last
    assert last.endswith("pip install 'transformers>=5.17.0,<6'.")
