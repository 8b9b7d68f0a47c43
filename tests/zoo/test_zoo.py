"""What the bundled zoo holds."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import zoo
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.zoo import chat


def test_an_unknown_model_is_refused_naming_the_known_ones():
    with pytest.raises(ValueError, match=r"the zoo holds no model 'meduse': expected one of base.*build --part NAME"):
        zoo.path("meduse")


def test_families_are_the_folders_with_a_model(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "ASSETS", tmp_path)
    for name in ("medusa", "base", "hydra"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "notes").mkdir()
    assert zoo.families() == ["hydra", "medusa"]
    assert zoo.path("base") == str(tmp_path / "base")


def test_the_assets_leave_room_for_all_families():
    files = [file for file in zoo.ASSETS.rglob("*") if file.is_file()]
    of_chat_model = [file for file in files if file.is_relative_to(zoo.ASSETS / "chat")]
    assert sum(file.stat().st_size for file in files) - sum(file.stat().st_size for file in of_chat_model) <= 20 * 2**20
    assert sum(file.stat().st_size for file in of_chat_model) <= 45_000_000
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (zoo.ASSETS / "LICENSE.PSF").read_text()
    assert {file.suffix for file in files} <= {".json", ".jsonl", ".safetensors", ".md", ".PSF", ".jinja"}


def test_the_base_computes_in_float32_and_was_trained_on_text():
    base = AutoModelForCausalLM.from_pretrained(zoo.path("base"))
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    assert base.dtype == torch.float32 and base.lm_head.weight is base.get_input_embeddings().weight
    assert len(tokenizer) == base.config.vocab_size
    assert base.generation_config.eos_token_id == tokenizer.eos_token_id
    assert base.generation_config.pad_token_id == tokenizer.pad_token_id
    prompts = [json.loads(line)["prompt"] for line in (zoo.ASSETS / "prompts.jsonl").read_text().splitlines()]
    losses = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            losses.append(base(input_ids=ids, labels=ids).loss.item())
    mean = sum(losses) / len(losses)
    summary = json.loads((zoo.ASSETS / "base" / "training_summary.json").read_text())
    assert mean < summary["held_out_loss"] + 0.5  # nats per token; an untrained base has 6.9
    assert summary["tokens"] > 1_000_000 and len(summary["text_sha256"]) == 64


@pytest.mark.parametrize("name", zoo.families())
def test_the_heads_carry_the_trees_that_were_measured_for_them(name):
    model = AutoModelForCausalLM.from_pretrained(zoo.path(name)).eval()
    entries = model.generation_config.calibration
    keys = [CalibrationKey.of_entry(entry) for entry in entries]
    expected = {*((rows, "eager") for rows in (1, 2, 4, 8)), (1, "compiled")}
    assert {(key.batch_size, key.execution) for key in keys} == expected
    assert all(entry["measured"]["identical"] for entry in entries)
    for rows in (1, 2, 4, 8):
        nodes = set()
        ids = torch.full((rows, 4), 70)
        note = lambda record, nodes=nodes: nodes.add(record.drafted) if record.step else None  # noqa: E731
        model.generate(ids, max_new_tokens=4, on_step=note)
        assert max(nodes) <= max(8, 16 // rows)  # the entries are of another machine


@pytest.mark.slow
def test_eagle3_drafts_more_tokens_per_step_than_eagle_and_the_draft_model_more_than_two():
    """On the first held-out prompts; all of them, over three trainings, are in the families' table."""
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    lines = (zoo.ASSETS / "prompts.jsonl").read_text().splitlines()[:4]
    given = tokenizer([json.loads(line)["prompt"] for line in lines], return_tensors="pt", padding=True)
    call = {"max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    found = {}
    for family in ("eagle", "eagle3", "draft-model"):
        model = AutoModelForCausalLM.from_pretrained(zoo.path(family)).eval()
        accepted = model.generate(**given, **call, draft_tree="mc_sim_7b_63").accepted_lengths
        found[family] = float(accepted.sum() / (accepted > 0).sum())
    assert found["eagle3"] > 1.05 * found["eagle"] and found["draft-model"] > 2.2


@pytest.fixture(scope="module")
def like_the_chat_model():
    """A base of the chat model's shape, with weights that were not trained."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(chat.HEADS / "medusa").base_config
    return AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "hydra++", "medusa"])
def test_the_heads_for_the_chat_model_are_whole_and_name_it(name, like_the_chat_model):
    assert name in chat.chat_families()
    config = AutoConfig.from_pretrained(chat.HEADS / name)
    assert (config.base_model_name_or_path, config.dtype) == (chat.HUB_ID, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(chat.HEADS / name, base_model=like_the_chat_model)
    with torch.device("meta"):
        untrained = type(model)(config, like_the_chat_model)
    shapes = {key: tensor.shape for key, tensor in untrained.drafter.state_dict().items()}
    assert {key: tensor.shape for key, tensor in model.drafter.state_dict().items()} == shapes
    assert all(bool(parameter.any()) for parameter in model.drafter.parameters())
    keys = {CalibrationKey.of_entry(entry) for entry in model.generation_config.calibration}
    measured = {(key.batch_size, key.execution, key.dtype) for key in keys}
    assert measured == {(1, "eager", "bfloat16"), (1, "eager", "float32"), (1, "compiled", "bfloat16")}
    assert CalibrationKey.of(model.base, model.drafter, 1, "eager").heads_hash in {key.heads_hash for key in keys}
    call = {"max_new_tokens": 3, "eos_token_id": None, "use_cache": True, "return_dict_in_generate": True}
    written = model.generate(torch.full((1, 4), 70), **call)
    assert written.sequences.shape == (1, 7) and written.accepted_lengths.sum() == 2
