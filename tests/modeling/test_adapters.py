"""Heads on a base with an adapter: one unit that is saved, loaded and merged, never without the adapter."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import AutoModel, AutoModelForCausalLM

from hf_drafthead.hub_upload import Target
from hf_drafthead.hub_upload.staging import stage_folder, stage_model
from hf_drafthead.modeling import EagleForCausalLM, MedusaForCausalLM
from tests.bases import tiny_base

IDS = torch.tensor([[5, 9, 33, 21]])
LORA = {"r": 2, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks
# the second has layers that an adapter could take for its own
families = pytest.mark.parametrize("family", [MedusaForCausalLM, EagleForCausalLM], ids=["medusa", "eagle"])


@pytest.fixture
def adapted(tmp_path):
    """A base, an adapter for it in a folder, and both as PEFT wraps them."""
    tiny_base("llama-gqa").save_pretrained(tmp_path / "base")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**LORA)).eval()
    model.save_pretrained(tmp_path / "lora")
    return model


def layers_of(model) -> list[BaseTunerLayer]:
    return [module for module in model.modules() if isinstance(module, BaseTunerLayer)]


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def check(model, adapted) -> None:
    """The adapter takes part in what the base says, and the heads draft for that."""
    torch.testing.assert_close(logits(model), logits(adapted))
    tokens = model.eval().generate(IDS, max_new_tokens=10, return_dict_in_generate=True)
    assert torch.equal(tokens.sequences, adapted.generate(IDS, max_new_tokens=10))
    assert tokens.accepted_lengths is not None


@pytest.mark.few(1)
@families
@pytest.mark.parametrize("given", ["folder", "PEFT model", "loaded afterwards"])
def test_heads_on_an_adapted_base_are_one_unit(adapted, tmp_path, family, given):
    if given == "loaded afterwards":
        model = family.from_base(tmp_path / "base")
        model.load_adapter(tmp_path / "lora")
    else:
        model = family.from_base(tmp_path / "lora" if given == "folder" else adapted)
    check(model, adapted)
    model.save_pretrained(tmp_path / "heads")
    assert json.loads((tmp_path / "heads" / "config.json").read_text())["base_adapters"] == {"default": True}
    assert not (tmp_path / "heads" / "base" / "model.safetensors").exists()
    shutil.rmtree(tmp_path / "lora")
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    check(loaded, adapted)
    loaded.save_pretrained(tmp_path / "again")
    check(family.from_pretrained(tmp_path / "again"), adapted)


def test_what_is_published_holds_the_adapter(adapted, tmp_path):
    MedusaForCausalLM.from_base(adapted).save_pretrained(tmp_path / "heads")
    (tmp_path / "by model").mkdir()
    stage_model(AutoModel.from_pretrained(tmp_path / "heads"), tmp_path / "by model", Target("org/heads"))
    (tmp_path / "by folder").mkdir()
    shutil.copytree(tmp_path / "lora", tmp_path / "heads" / "base" / "former")  # which was deleted since
    stage_folder(tmp_path / "heads", tmp_path / "by folder", Target("org/heads"))
    for folder in ("by model", "by folder"):
        loaded = MedusaForCausalLM.from_pretrained(tmp_path / folder, base_model=tmp_path / "base")
        check(loaded, adapted)
        assert [path.name for path in (tmp_path / folder / "base").iterdir()] == ["default"]


@pytest.mark.few(1)
@families
def test_an_adapter_lies_beside_an_included_base(adapted, tmp_path, family):
    model = family.from_base(adapted)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path / "whole", include_base=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    shutil.rmtree(tmp_path / "base")
    check(AutoModel.from_pretrained(tmp_path / "whole"), adapted)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "base")
    assert torch.equal(logits(plain), logits(tiny_base("llama-gqa")))


@families
def test_peft_is_shown_no_layer_of_the_heads(tmp_path, family):
    tiny_base("llama-gqa").save_pretrained(tmp_path / "base")
    model = family.from_base(tmp_path / "base").eval()
    heads = {name: tensor.clone() for name, tensor in model.drafter.state_dict().items()}
    wrapped = get_peft_model(model, LoraConfig(**LORA)).eval()
    assert layers_of(model.base) and not layers_of(model.drafter)
    wrapped.save_pretrained(tmp_path / "lora")
    model.save_pretrained(tmp_path / "heads")
    for loaded in (AutoModel.from_pretrained(tmp_path / "heads"), wrapped.merge_and_unload()):
        check(loaded, wrapped.model.base)
        assert all(torch.equal(tensor, heads[name]) for name, tensor in loaded.drafter.state_dict().items())
    plain = family.from_base(tmp_path / "base").eval()
    check(PeftModel.from_pretrained(plain, tmp_path / "lora").merge_and_unload(), model.base)


def test_transformers_methods_for_adapters_are_those_of_the_base(adapted, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18.0")
    model = MedusaForCausalLM.from_base(tmp_path / "base")
    plain = logits(model)
    model.load_adapter(tmp_path / "lora", "one")
    one = logits(model)
    model.add_adapter(LoraConfig(**LORA), "two")
    model.eval()
    model.set_adapter("two")
    two = logits(model)
    assert model.active_adapters() == ["two"] and len({float(out.sum()) for out in (plain, one, two)}) == 3
    model.save_pretrained(tmp_path / "heads")
    again = AutoModel.from_pretrained(tmp_path / "heads")
    for name, wanted in (("two", two), ("one", one)):
        again.set_adapter(name)
        torch.testing.assert_close(logits(again), wanted)
    again.disable_adapters()
    torch.testing.assert_close(logits(again), plain)
    again.enable_adapters()
    again.delete_adapter("two")
    assert list(again.base.peft_config) == ["one"]
    with pytest.raises(ValueError, match="the base has an adapter 'one' already: give the new one another name"):
        again.load_adapter(tmp_path / "lora", "one")


def test_an_adapter_of_the_hub_is_saved_beside_the_heads(adapted, tmp_path):
    place = tmp_path / "hub" / "models--org--lora"
    shutil.copytree(tmp_path / "lora", place / "snapshots" / ("3" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("3" * 40)
    hub = {"cache_dir": str(tmp_path / "hub"), "local_files_only": True}
    model = MedusaForCausalLM.from_base("org/lora", **hub)
    assert model.config.base_model_name_or_path == str(tmp_path / "base")
    model.save_pretrained(tmp_path / "heads")
    check(AutoModel.from_pretrained(tmp_path / "heads"), adapted)
    stored = json.loads((tmp_path / "heads" / "base" / "default" / "adapter_config.json").read_text())
    assert "base_model_name_or_path" not in stored and str(tmp_path) not in str(stored)
    model.save_pretrained(tmp_path / "named", base_model="org/base")  # others may load the adapter alone
    stored = json.loads((tmp_path / "named" / "base" / "default" / "adapter_config.json").read_text())
    assert stored["base_model_name_or_path"] == "org/base"


def test_a_missing_adapter_is_an_error_and_no_plain_base(adapted, tmp_path):
    MedusaForCausalLM.from_base(adapted).save_pretrained(tmp_path / "heads")
    shutil.rmtree(tmp_path / "heads" / "base" / "default")
    with pytest.raises(OSError, match=r"^the adapter 'default' of the base of '.*heads' was not found: copy"):
        AutoModel.from_pretrained(tmp_path / "heads")


def test_a_loaded_base_is_left_as_it_is_and_what_it_lacks_is_said(adapted, tmp_path, caplog):
    MedusaForCausalLM.from_base(adapted).save_pretrained(tmp_path / "heads")
    base = tiny_base("llama-gqa")
    loaded = MedusaForCausalLM.from_pretrained(tmp_path / "heads", base_model=base)
    assert torch.equal(logits(loaded), logits(tiny_base("llama-gqa")))
    assert "trained on a base with the adapter 'default', and the base given has none" in caplog.text
    check(MedusaForCausalLM.from_pretrained(tmp_path / "heads", base_model=adapted), adapted)
    check(MedusaForCausalLM.from_pretrained(tmp_path / "heads", base_model=tmp_path / "lora"), adapted)


def test_an_adapter_of_another_base_is_refused(adapted, tmp_path):
    config = Path(tmp_path / "lora" / "adapter_config.json")
    tiny_base("llama-gqa", num_hidden_layers=1).save_pretrained(tmp_path / "other")
    fields = json.loads(config.read_text())
    config.write_text(json.dumps({**fields, "base_model_name_or_path": str(tmp_path / "other")}))
    with pytest.raises(ValueError, match=r"lora' cannot be put on this base .* of another model"):
        MedusaForCausalLM.from_base(tmp_path / "lora")


def test_adapters_that_cannot_be_one_unit_are_refused(adapted, tmp_path):
    prompt = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="^the base has an adapter of the type PREFIX_TUNING, which is a part of"):
        MedusaForCausalLM.from_base(get_peft_model(tiny_base("llama-gqa"), prompt))
    (tmp_path / "lora" / "adapter_model.safetensors").unlink()
    with pytest.raises(OSError, match="holds an adapter without adapter_model.safetensors; a pickle"):
        MedusaForCausalLM.from_base(tmp_path / "lora")


TOKENS = {"trainable_token_indices": {"embed_tokens": [5, 6]}, "target_modules": ["q_proj"]}
KINDS = {
    "tokens of a tied base": ({"trainable_token_indices": [5, 6], "target_modules": ["q_proj"]}, True),
    "tokens of an untied base": (TOKENS, False),
    "a whole layer": ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, False),
    "AdaLoRA": ({"init_r": 3, "total_step": 9, "target_modules": ["q_proj"]}, True),
    "DoRA": ({"use_dora": True, "target_modules": ["q_proj", "down_proj"]}, True),
    "RS-LoRA on all layers": ({"use_rslora": True, "target_modules": "all-linear"}, True),
}


@pytest.mark.parametrize("include_base", [False, True], ids=["heads", "with base"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_of_any_adapter_loads_as_it_was(kind, include_base, tmp_path):
    fields, tied = KINDS[kind]
    tiny_base("llama-gqa", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    kind_of_config = AdaLoraConfig if "init_r" in fields else LoraConfig
    config = kind_of_config(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "trainable_tokens_delta" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter))
    model = MedusaForCausalLM.from_base(adapted)
    model.save_pretrained(tmp_path / "heads", include_base=include_base)
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    check(loaded, adapted)
    assert not torch.allclose(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(tmp_path / "base")))
