"""Every published checkpoint can be converted: tiny copies are run, sparse copies of the real size are measured."""

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from hf_drafthead import convert_checkpoint
from hf_drafthead.formats.layouts import BASES
from tests.formats.published import ALL, Published

every = pytest.mark.parametrize("one", ALL, ids=lambda one: one.repo)


@pytest.fixture
def tiny(one: Published, tmp_path):
    """Folder of a tiny copy, and its base."""
    base = one.base(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    one.tiny(tmp_path / "heads", base)
    return tmp_path, base


@every
def test_a_tiny_copy_is_converted_and_drafts(one, tiny):
    folder, base = tiny
    named = None if one.names_base else folder / "base"
    report = convert_checkpoint(folder / "heads", folder / "converted", base_model=named)
    assert report.layout == one.entry["layout"]
    model = AutoModel.from_pretrained(folder / "converted")
    for name, value in one.becomes(tiny=True).items():
        assert getattr(model.config, name) == value
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 12, "eos_token_id": None}
    out = model.generate(ids, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, base.generate(ids, **settings))
    assert out.accepted_lengths is not None


@pytest.mark.slow
@every
def test_the_real_size_is_understood(one, tmp_path):
    one.base_config(tiny=False).save_pretrained(tmp_path / "base")
    one.sparse(tmp_path / "heads", tmp_path / "base")
    inside = one.entry["layout"] == "Medusa 1.0 model"
    report = convert_checkpoint(tmp_path / "heads", base_model=None if inside else tmp_path / "base")
    for name, value in one.becomes(tiny=False).items():
        assert report.fields[name] == value
    if "reads" in one.entry:
        assert report.fields["feature_layers"] == one.entry["reads"]
    used = {source for sources in report.sources.values() for source in sources}
    of_base = {name for name in one.shapes() if inside and not name.startswith("medusa_head.")}
    assert used | set(report.dropped) | of_base == set(one.shapes())


@every
def test_the_manifest_tells_what_is_known_from_what_follows(one):
    assert one.entry["established"] and one.entry["inferred"]


def test_the_docs_list_every_published_checkpoint():
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    for one in ALL:
        if "/" in one.repo:
            assert f"| `{one.repo}` | {one.entry['layout']} |" in page


def test_every_layout_without_a_base_has_it_in_the_table():
    nameless = {one.repo: one.entry["base"] for one in ALL if not one.names_base and "/" in one.repo}
    assert nameless.items() <= BASES.items()


@pytest.mark.parametrize("one", [one for one in ALL if "listed_size" in one.entry], ids=lambda one: one.repo)
def test_the_manifest_is_as_large_as_the_published_file(one):
    kinds = {"d2t": 8, "t2d": 1}
    size = sum(math.prod(shape) * kinds.get(name, 2) for name, shape in one.shapes().items())
    number, unit = one.entry["listed_size"].split()
    assert size == one.entry["expected_bytes"]
    assert float(number) == pytest.approx(size / {"MB": 1e6, "GB": 1e9}[unit], rel=0.005)
