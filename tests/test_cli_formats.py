"""`hf-drafthead convert` and `export`: what they print and write, and how they refuse."""

import json

import pytest

from tests.formats.originals import ORIGINALS
from tests.modeling.golden import golden_base

MEDUSA = ORIGINALS[0]


@pytest.fixture
def folder(tmp_path):
    golden_base().save_pretrained(tmp_path / "base")
    MEDUSA.write(tmp_path / "heads", tmp_path / "base")
    return tmp_path


def test_convert_shows_what_is_there_and_what_it_becomes(folder, command):
    code, out, _ = command("convert", folder / "heads", "--json", folder / "report.json")
    assert code == 0
    for words in (
        "layout   FasterDecoding Medusa",
        "family   medusa",
        f"base     {folder / 'base'}",
        "num_draft_heads=5",
        "{}.{}.linear.weight  1 x [5, 64, 64]  blocks.{}.weight",
        "note: config.json says medusa_num_heads 2, the tensors have 5: the tensors are right.",
    ):
        assert words in out
    report = json.loads((folder / "report.json").read_text())
    assert report["folder"] is None
    assert report["sources"]["projections.up.3.weight"] == ["3.1.weight"]


def test_converted_heads_are_loaded_exported_and_converted_again(folder, command):
    code, out, _ = command("convert", folder / "heads", folder / "ours")
    assert code == 0 and f"the heads are in {folder / 'ours'}" in out
    assert command("info", folder / "ours")[0] == 0
    code, out, _ = command(
        "export", folder / "ours", folder / "theirs", "--to", "tgi", "--json", folder / "report.json"
    )
    assert code == 0 and "15 tensors of the layout FasterDecoding Medusa" in out
    assert json.loads((folder / "report.json").read_text())["weights"] == "medusa_lm_head.safetensors"
    assert command("convert", folder / "theirs", folder / "again")[0] == 0
    weights = [(folder / name / "model.safetensors").read_bytes() for name in ("ours", "again")]
    assert weights[0] == weights[1]


def test_left_out_tensors_are_listed(folder, command):
    hydra = ORIGINALS[3]
    hydra.write(folder / "hydra", folder / "base")
    _, out, _ = command("convert", folder / "hydra")
    assert "left out: input_embed_fn.weight: a copy of the base's input embeddings" in out
    assert "left out: prefix_embeding_layer.embed_tokens.weight: the prefix layer reads hidden states: the" in out


@pytest.mark.parametrize(
    "words, text",
    [
        (["convert", "{folder}/nowhere/at/all"], "there is no file or folder"),
        (["convert", "{folder}/heads", "{folder}/base"], "exists: give a folder that does not, or that is empty."),
        (["convert", "{folder}/heads", "--set", "x"], "--set 'x' is no NAME=VALUE"),
        (["convert", "{folder}/heads", "--set", "wings=2"], "'wings' is no config field of MedusaForCausalLM"),
        (["export", "{folder}/heads", "{folder}/new", "--to", "tgi"], "load them with MedusaForCausalLM.from_pretr"),
        (["export", "{folder}/heads", "{folder}/new", "--to", "owl"], "--to 'owl' is no known target: expected one of"),
        (["export", "{folder}/heads", "{folder}/new"], "Missing option '--to'"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder, command, words, text):
    code, _, err = command(*(word.format(folder=folder) for word in words))
    assert code == 2
    assert err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert text in err
