"""Checkpoints as earlier releases wrote them are loaded as they were meant, and saved again in the form of today."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.modeling.files import edit_json
from tests.bases import tiny_base
from tests.modeling.test_adapters import LORA, families

IDS = torch.tensor([[5, 9, 33, 21]])

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks


def heads(family, folder: Path):
    """Heads in a folder, beside their base in another."""
    tiny_base("llama-gqa").save_pretrained(folder / "base")
    model = family.from_base(folder / "base").eval()
    model.save_pretrained(folder / "heads")
    return model


def with_base(model, folder: Path) -> None:
    """Base and heads in one file."""
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", base_included=True)


def check(loaded, base) -> None:
    """The model writes the text of a base, and drafts for it."""
    out = loaded.generate(IDS, max_new_tokens=10, return_dict_in_generate=True)
    assert torch.equal(out.sequences, base.generate(IDS, max_new_tokens=10)) and out.accepted_lengths is not None


def saved_again(loaded, folder: Path):
    """What is saved of a model in its own folder, loaded."""
    loaded.save_pretrained(folder)
    return AutoModel.from_pretrained(folder)


@families
def test_base_and_heads_in_one_file(tmp_path, family):
    model = heads(family, tmp_path)
    with torch.no_grad():
        model.base.lm_head.weight.copy_(torch.randn_like(model.base.lm_head.weight))
    model.base.generation_config.eos_token_id = 66
    with_base(model, tmp_path / "heads")
    edit_json(tmp_path / "heads" / "generation_config.json", eos_token_id=66)
    shutil.rmtree(tmp_path / "base")
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    check(loaded, model.base)
    assert loaded.base.generation_config.eos_token_id == loaded.generation_config.eos_token_id == 66
    assert not hasattr(loaded.base.generation_config, "draft_tree")
    again = saved_again(loaded, tmp_path / "heads")
    check(again, model.base)
    assert (tmp_path / "heads" / "base" / "model.safetensors").is_file()
    assert not any(parameter.requires_grad for parameter in again.base.parameters())


def test_a_damaged_base_in_the_file_is_refused(tmp_path):
    model = heads(MedusaForCausalLM, tmp_path)
    with_base(model, tmp_path / "heads")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "base.model.norm.weight"}
    save_file(tensors, tmp_path / "heads" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="heads' does not fit its config: its base and 'model.norm.weight'"):
        AutoModel.from_pretrained(tmp_path / "heads")


@families
@pytest.mark.parametrize("place", ["its folder", "the Hub"])
def test_an_adapter_of_the_base(tmp_path, family, place):
    heads(family, tmp_path)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**LORA)).eval()
    config, hub = tmp_path / "heads" / "config.json", {}
    if place == "its folder":
        adapted.save_pretrained(tmp_path / "heads" / "adapter")
        edit_json(config, adapter_name_or_path="adapter")
    else:
        repository = tmp_path / "hub" / "models--org--lora"
        adapted.save_pretrained(repository / "snapshots" / ("3" * 40))
        edit_json(config, adapter_name_or_path="org/lora", adapter_revision="3" * 40)
        hub = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    loaded = AutoModel.from_pretrained(tmp_path / "heads", **hub)
    check(loaded, adapted)
    check(saved_again(loaded, tmp_path / "heads"), adapted)
    assert json.loads(config.read_text())["base_adapters"] == {"default": True}
