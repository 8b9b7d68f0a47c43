"""The build script, with a base and trainings small enough for a test."""

import functools
import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks.zoo_recipe import base as zoo_base
from benchmarks.zoo_recipe import build, heads, trees
from benchmarks.zoo_recipe.corpus import SourceFile
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.families import fresh_heads
from hf_drafthead.trees import calibrate

TEXT = "def add(x, y):\n    return x + y\n\n\nclass Pair:\n    def __init__(self, a, b):\n        self.a = a\n" * 60


@pytest.fixture
def small(monkeypatch):
    """A corpus of two files, a base of seven layers, trainings of a few steps."""
    files = [SourceFile("argparse.py", TEXT), SourceFile("heapq.py", TEXT)]
    monkeypatch.setattr(build, "read_corpus", lambda: files)
    monkeypatch.setattr(trees, "read_corpus", lambda: files)
    monkeypatch.setattr(build, "VOCAB_SIZE", 270)
    monkeypatch.setattr(build, "ROW", 64)
    monkeypatch.setattr(build, "OWN_TEXTS", 8)
    monkeypatch.setattr(zoo_base, "ROW", 64)

    def tiny_config(tokenizer):
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 7, "num_attention_heads": 2}
        return LlamaConfig(vocab_size=270, max_position_embeddings=64, tie_word_embeddings=True, **sizes, **ids)

    monkeypatch.setattr(zoo_base, "base_config", tiny_config)
    for recipe in heads.FAMILIES.values():
        if "draft_vocab_size" in recipe.fields:
            monkeypatch.setitem(recipe.fields, "draft_vocab_size", 200)
    for room, name in ((build, "train_base"), (build, "train_heads")):
        monkeypatch.setattr(room, name, in_two_steps(getattr(room, name)))


def in_two_steps(train):
    @functools.wraps(train)
    def trained(*args, **kwargs):
        return train(*args, **{**kwargs, "steps": 2})

    return trained


def run(folder, *parts):
    given = [word for part in parts for word in ("--part", part)]
    build.main([*given, "--output", str(folder / "assets"), "--work", str(folder / "work")])


def shapes(model):
    return {name: parameter.shape for name, parameter in model.drafter.named_parameters()}


@pytest.mark.slow
def test_every_part_is_built_and_found_again(small, tmp_path, capsys):
    run(tmp_path, "base", *heads.FAMILIES)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "assets" / "base")
    assert base.dtype == torch.float32
    for family in heads.FAMILIES:
        model = AutoModel.from_pretrained(tmp_path / "assets" / family)
        fresh = fresh_heads(heads.FAMILIES[family].family, base, **heads.FAMILIES[family].fields)
        assert type(model) is type(fresh) and shapes(model) == shapes(fresh)
        assert {parameter.dtype for parameter in model.drafter.parameters()} == {torch.float32}
        # two steps teach nothing, so which ranks the tree holds is chance; that it is a tree is not
        assert DraftTree(model.generation_config.draft_tree).paths and len(model.generation_config.draft_tree) < 48
        assert AutoTokenizer.from_pretrained(tmp_path / "assets" / family).padding_side == "left"
        config = json.loads((tmp_path / "assets" / family / "config.json").read_text())
        assert config["base_model_name_or_path"] == "../base"
        summary = json.loads((tmp_path / "assets" / family / "training_summary.json").read_text())
        assert {"command", "seed", "torch", "transformers", "data_sha256", "train_loss", "hours"} <= set(summary)
        held_out = summary["held_out"]
        assert summary["family"] == family and held_out["head0_top1"] <= held_out["head0_top5"]
        assert "tokens_per_step" in summary and summary["license"] == "apache-2.0"
    capsys.readouterr()
    run(tmp_path, "base", *heads.FAMILIES)
    assert capsys.readouterr().out.count("exists, skipped") == 1 + len(heads.FAMILIES)


@pytest.mark.slow
def test_the_zoo_may_be_moved(small, tmp_path):
    run(tmp_path, "base", "medusa")
    shutil.move(tmp_path / "assets", tmp_path / "elsewhere")
    assert AutoModel.from_pretrained(tmp_path / "elsewhere" / "medusa").base.config.vocab_size == 270


@pytest.mark.slow
def test_trees_are_a_part_that_is_measured_after_the_heads(small, tmp_path, monkeypatch, capsys):
    for room, name, value in (
        (trees, "BATCH_SIZES", (1, 2)), (trees, "MORE_PROMPTS", 6), (trees, "NEW_TOKENS", 12), (trees, "BUNDLED", 0),
        (calibrate, "LEAST_POSITIONS", 9), (calibrate, "TIMED_TOKENS", 5), (calibrate, "PAIRS", 2),
    ):  # fmt: skip
        monkeypatch.setattr(room, name, value)
    run(tmp_path, "medusa-trees", "medusa", "base")  # in the order of the parts, whatever the order of the options
    stored = tmp_path / "assets" / "medusa" / "generation_config.json"
    found = json.loads(stored.read_text())["calibration"]
    assert [(entry["batch_size"], entry["execution"], entry["dtype"]) for entry in found] == [
        (1, "eager", "float32"), (2, "eager", "float32")
    ]  # fmt: skip
    capsys.readouterr()
    run(tmp_path, "medusa-trees")
    assert "medusa-trees: exists, skipped" in capsys.readouterr().out
    assert json.loads(stored.read_text())["calibration"] == found


def test_weights_on_disk_are_half_as_large_and_the_same(small, tmp_path):
    run(tmp_path, "base")
    file = tmp_path / "assets" / "base" / "model.safetensors"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "assets" / "base")
    assert file.stat().st_size < 2.2 * sum(parameter.numel() for parameter in base.parameters()) + 4096
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    zoo_base.save_base(base, tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(tensor, before[name]) for name, tensor in again.state_dict().items())


def test_an_unknown_part_is_refused(capsys):
    with pytest.raises(SystemExit) as refusal:
        build.main(["--part", "medussa"])
    assert refusal.value.code == 2
    assert "invalid choice: 'medussa'" in capsys.readouterr().err
