"""A base's published generation config is kept as it is, also where transformers would not write it itself."""

import json

import pytest
import torch
from transformers import AutoModel, GenerationConfig, Trainer, TrainingArguments

from hf_drafthead import MedusaForCausalLM
from tests.bases import tiny_base
from tests.checkpoints import byte_tokenizer, save_base
from tests.families import FAMILIES

VICUNA = {"_from_model_config": True, "max_length": 4096, "temperature": 0.9, "top_p": 0.6}  # vicuna-7b-v1.5


@pytest.fixture
def base(tmp_path):
    """A base with flags that contradict each other in its generation config."""
    folder = save_base(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(VICUNA))
    return folder


def values(config: GenerationConfig) -> dict:
    return {name: getattr(config, name) for name in VICUNA if not name.startswith("_")}


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("include_base", [False, True], ids=["heads", "with base"])
def test_every_family_keeps_the_base_s_flags(family, include_base, tmp_path):
    live = tiny_base("llama-gqa")
    live.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(VICUNA))
    model = family.model_class.from_base(tmp_path / "base", **family.fields)
    model.generation_config.draft_tree = [[0], [0, 0]]
    for turn in range(2):  # what was loaded is saved once more, with a calibration
        folder = tmp_path / f"heads{turn}"
        model.save_pretrained(folder, include_base=include_base)
        model = AutoModel.from_pretrained(folder)
        wanted = values(GenerationConfig(**VICUNA))
        assert values(model.generation_config) == values(model.base.generation_config) == wanted
        assert model.generation_config.draft_tree == [[0], [0, 0]]
        model.generation_config.calibration = [{"tree": [[0]]}]
        model.generation_config.save_pretrained(folder)


def test_a_config_that_was_given_is_kept(base, tmp_path):
    MedusaForCausalLM.from_base(base).save_pretrained(tmp_path / "heads")
    given = GenerationConfig.from_pretrained(base)
    given.draft_tree = [[0]]
    AutoModel.from_pretrained(tmp_path / "heads", generation_config=given).save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/generation_config.json").read_text())["top_p"] == 0.6


def test_a_trainer_writes_its_checkpoints(base, tmp_path):
    model = MedusaForCausalLM.from_base(base, num_draft_heads=1)
    ids = torch.arange(5, 15)
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": ids, "labels": ids}] * 8
    Trainer(model, arguments, train_dataset=rows, processing_class=byte_tokenizer()).train()
    stored = json.loads((tmp_path / "run/checkpoint-1/generation_config.json").read_text())
    assert stored["temperature"] == 0.9 and stored["draft_tree"] == "mc_sim_7b_63"


def test_an_error_is_still_one(base, tmp_path):
    model = MedusaForCausalLM.from_base(base)
    model.generation_config.max_new_tokens = -1
    with pytest.raises(ValueError, match="max_new_tokens"):
        model.save_pretrained(tmp_path / "heads")
