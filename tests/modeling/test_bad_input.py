"""What is wrong with a checkpoint, a base or a config is said in one line, before anything is loaded."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, LlamaModel, T5Config, T5ForConditionalGeneration, ViTConfig

from hf_drafthead.modeling import (
    MODEL_CLASSES,
    AmphistaConfig,
    EagleConfig,
    HydraConfig,
    HydraForCausalLM,
    MedusaConfig,
    MedusaForCausalLM,
)
from hf_drafthead.modeling.checkpoint import read_heads_config
from tests.bases import tiny_base
from tests.families import FAMILIES

GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."


@pytest.fixture
def heads(tmp_path) -> Path:
    """Medusa heads and, beside them, their base."""
    base = tiny_base()
    base.save_pretrained(tmp_path / "base")
    model = MedusaForCausalLM.from_base(tmp_path / "base", num_draft_heads=2)
    model.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


def refused(error: type[Exception], message: str):
    """The whole message, as one line; `...` stands for anything."""
    pattern = ".*".join(map(re.escape, message.split("...")))
    return pytest.raises(error, match=rf"^{pattern}$")


def edit_tensors(heads: Path, change) -> None:
    tensors = load_file(heads / "model.safetensors")
    change(tensors)
    save_file(tensors, heads / "model.safetensors", metadata={"format": "pt"})


def edit_config(heads: Path, **fields) -> None:
    config = json.loads((heads / "config.json").read_text())
    (heads / "config.json").write_text(json.dumps(config | fields))


@pytest.mark.parametrize("loader", [MedusaForCausalLM, AutoModel], ids=["own class", "AutoModel"])
def test_a_missing_tensor(heads, loader):
    edit_tensors(heads, lambda tensors: tensors.pop("drafter.blocks.0.bias"))
    message = (
        "'...heads' lacks the tensor 'drafter.blocks.0.bias' [2, 32] that its config asks for: save the checkpoint "
        "again, or correct config.json."
    )
    with refused(ValueError, message):
        loader.from_pretrained(heads)


def test_an_unknown_tensor(heads):
    edit_tensors(heads, lambda tensors: tensors.update({"base.lm_head.weight": torch.zeros(67, 32)}))
    message = (
        "'...heads' has 1 tensor(s) that its config does not ask for, such as 'base.lm_head.weight': remove them, or "
        "correct config.json."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads)


def test_a_tensor_of_another_shape(heads):
    edit_tensors(heads, lambda tensors: tensors.update({"drafter.blocks.0.bias": torch.zeros(2, 31)}))
    message = (
        "'...heads' has 'drafter.blocks.0.bias' of shape [2, 31], but its config asks for [2, 32]: save the checkpoint "
        "again, or correct config.json."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads)


def test_a_config_that_asks_for_more_heads_than_there_are(heads):
    edit_config(heads, num_draft_heads=3)
    with refused(ValueError, "...of shape [2, 32, 32], but its config asks for [3, 32, 32]: ..."):
        MedusaForCausalLM.from_pretrained(heads)


def test_a_tensor_of_whole_numbers(heads):
    edit_tensors(heads, lambda tensors: tensors.update({"drafter.blocks.0.bias": torch.zeros(2, 32, dtype=torch.int8)}))
    message = (
        "'...heads' has 'drafter.blocks.0.bias' in int8, expected bfloat16 or float16 or float32 or float64: save "
        "it in such a type."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads)


@pytest.mark.parametrize("loader", [MedusaForCausalLM, AutoModel], ids=["own class", "AutoModel"])
@pytest.mark.parametrize("damage", [lambda data: data[:-100], lambda data: b"\xff" * 64, lambda data: b""])
def test_a_corrupt_file(heads, damage, loader):
    file = heads / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    message = "'...model.safetensors' is not a readable safetensors file (...): copy or download it again, "
    message += "and if it stays so, ask its author."
    with refused(OSError, message):
        loader.from_pretrained(heads)


def test_generation_settings_that_are_no_json(heads):
    (heads / "generation_config.json").write_text('{"draft_tree": [[0]')
    with refused(OSError, "'...generation_config.json' is not readable JSON (...): copy or download it again."):
        MedusaForCausalLM.from_pretrained(heads)


def test_no_weights(heads):
    (heads / "model.safetensors").unlink()
    message = (
        "'...heads' holds no model.safetensors: save the model there again, or give the folder that has it (a pickle "
        "such as pytorch_model.bin is never opened, for it can run code)."
    )
    with refused(OSError, message):
        MedusaForCausalLM.from_pretrained(heads)


def test_a_missing_shard(heads):
    MedusaForCausalLM.from_pretrained(heads).save_pretrained(heads.parent / "sharded", max_shard_size="20KB")
    next((heads.parent / "sharded").glob("*-00001-*")).unlink()
    message = (
        "'...sharded' lacks model-00001-of-...safetensors, which its model.safetensors.index.json names: copy or "
        "download the checkpoint again."
    )
    with refused(OSError, message):
        MedusaForCausalLM.from_pretrained(heads.parent / "sharded")


@pytest.mark.parametrize("model_class", [MedusaForCausalLM, HydraForCausalLM])
def test_a_plain_base_is_no_draft_head_checkpoint(heads, model_class):
    message = (
        "'...base' holds a 'llama' model without draft heads: give the folder of a draft-head checkpoint, or its id on "
        "the Hub; to put new heads on a base use from_base; if these are heads in another project's layout, give "
        "convert=True, or convert them once with `hf-drafthead convert`."
    )
    with refused(ValueError, message):
        model_class.from_pretrained(heads.parent / "base")


def test_heads_of_another_family(heads):
    message = (
        "'...heads' holds 'drafthead_medusa' heads, expected drafthead_hydra: load it with AutoModel; a newer "
        "hf_drafthead may know other families."
    )
    with refused(ValueError, message):
        HydraForCausalLM.from_pretrained(heads)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def checkpoint(request, tmp_path_factory) -> Path:
    """Heads of one family, without weights: the config alone must be enough to refuse them."""
    folder = tmp_path_factory.mktemp("one") / "heads"
    request.param.build(tiny_base()).config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("model_class", MODEL_CLASSES)
def test_a_checkpoint_of_one_family_opened_as_another(checkpoint, model_class):
    config_class, found = model_class.config_class, json.loads((checkpoint / "config.json").read_text())["model_type"]
    if found == config_class.model_type:
        assert config_class.from_pretrained(checkpoint).model_type == found
        return
    message = (
        f"'...heads' holds '{found}' heads, expected {config_class.model_type}: load it with AutoModel; a newer "
        "hf_drafthead may know other families."
    )
    with refused(ValueError, message):
        model_class.from_pretrained(checkpoint)
    message = f"the config has model_type '{found}', expected '{config_class.model_type}': read it with AutoConfig."
    with refused(ValueError, message):
        config_class.from_pretrained(checkpoint)


def test_a_folder_without_a_config(tmp_path):
    wanted = "give the folder of a draft-head checkpoint, or its id on the Hub."
    with refused(
        OSError, f"'...' is no draft-head checkpoint (...): {wanted[:-1]}; if these are heads in another ...."
    ):
        MedusaForCausalLM.from_pretrained(tmp_path)
    for path in (tmp_path / "not there", "./nor here"):
        with refused(OSError, f"there is no folder '...': {wanted}"):
            MedusaForCausalLM.from_pretrained(path)


def test_a_base_that_is_not_where_the_config_says(heads):
    (heads.parent / "base").rename(heads.parent / "gone")
    message = "the base of '...heads' was not found at '...base': " + GIVE_BASE
    with refused(OSError, message):
        AutoModel.from_pretrained(heads)


def test_a_base_that_is_not_where_the_user_says(heads):
    message = "the base './nowhere/at all' of '...heads' was not found (...): " + GIVE_BASE
    with refused(OSError, message):
        AutoModel.from_pretrained(heads, base_model="./nowhere/at all")


def test_a_base_that_is_not_on_the_hub(heads):
    edit_config(heads, base_model_name_or_path="org/not-downloaded")
    message = "the base 'org/not-downloaded' of '...heads' cannot be fetched at 'main': it is not in the cache, and ..."
    with refused(OSError, message):
        AutoModel.from_pretrained(heads, local_files_only=True)


def test_heads_that_do_not_say_what_their_base_is(heads):
    edit_config(heads, base_model_name_or_path=None)
    message = "'...heads' does not say which base it was trained for: " + GIVE_BASE
    with refused(OSError, message):
        AutoModel.from_pretrained(heads)


@pytest.mark.parametrize("form", ["path", "object"])
@pytest.mark.parametrize(
    "kind, fields, words, trained, given",
    [
        ("llama", {"hidden_size": 48}, "hidden size", "32", "48"),
        ("llama", {"vocab_size": 70}, "vocabulary", "67", "70"),
        ("qwen2", {}, "model type", "llama", "qwen2"),
    ],
)
def test_heads_for_another_base(heads, form, kind, fields, words, trained, given):
    other = tiny_base(kind, **fields)
    other.save_pretrained(heads.parent / "other")
    message = (
        f"these heads were trained for '../base' ({words} {trained}); the base at '...' has {words} {given}: load the "
        "first, or train heads for the second."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads, base_model=heads.parent / "other" if form == "path" else other)


def test_a_base_that_has_changed(heads):
    config = json.loads((heads / "config.json").read_text())
    base = str((heads / config["base_model_name_or_path"]).resolve())
    config["base_model_name_or_path"] = base
    (heads / "config.json").write_text(json.dumps(config))
    tiny_base("llama-gqa", hidden_size=64, intermediate_size=64).save_pretrained(base)
    message = (
        f"the base {base!r} has changed since these heads were trained for it (hidden size 32 then, 64 now): give the "
        "commit that they were trained on (base_revision=), or train heads for the new one."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads)


def test_a_revision_for_a_checkpoint_that_has_its_own_base(heads):
    model = MedusaForCausalLM.from_pretrained(heads)
    model.save_pretrained(heads.parent / "whole", include_base=True)
    with refused(ValueError, "'...whole' contains its own base: drop base_revision=."):
        AutoModel.from_pretrained(heads.parent / "whole", base_revision="main")


@pytest.mark.parametrize("argument", [{"dtype": "bfloat16"}, {"device_map": "auto"}])
def test_loading_arguments_for_a_base_that_is_loaded(heads, argument):
    base = tiny_base()
    (name, value), *_ = argument.items()
    message = (
        f"{name}={value!r} is for loading a base, but the base given is a loaded LlamaForCausalLM: set it when the "
        "base is loaded."
    )
    with refused(TypeError, message):
        MedusaForCausalLM.from_pretrained(heads, base_model=base, **argument)
    with refused(TypeError, message):
        MedusaForCausalLM.from_base(base, **argument)


def test_a_base_for_new_heads_that_is_not_there(tmp_path):
    give = "...: give the id or path of a causal language model."
    asked = "cannot be fetched at 'main': it is not in the cache, and the Hub cannot be reached..."
    whats = {tmp_path: f"cannot be read{give}", tmp_path / "not there": f"was not found{give}", "org/not": asked}
    for name, what in whats.items():
        with refused(OSError, f"the base '...' {what}"):
            MedusaForCausalLM.from_base(name, local_files_only=True)


def test_a_base_without_lm_head():
    with refused(ValueError, "LlamaModel has no lm_head: draft heads need a causal language model."):
        MedusaForCausalLM.from_base(LlamaModel(tiny_base().config))


def test_resizing_the_vocabulary():
    model = MedusaForCausalLM.from_base(tiny_base(), num_draft_heads=2)
    assert model.resize_token_embeddings() is model.resize_token_embeddings(67) is model.get_input_embeddings()
    message = (
        "the draft heads guess over 67 tokens and cannot be resized to 70 (multiple of 1): resize the base, then train "
        "heads for it (from_base)."
    )
    with refused(ValueError, message):
        model.resize_token_embeddings(70)


def test_a_config_without_a_base():
    message = (
        "MedusaConfig has no base_config: give it the config of the base, or use MedusaForCausalLM.from_base(...)."
    )
    with refused(ValueError, message):
        MedusaForCausalLM(MedusaConfig())


@pytest.mark.parametrize(
    "config_class, fields, message",
    [
        (MedusaConfig, {"num_draft_heads": 0}, "num_draft_heads is 0: expected a whole number from 1 to 64."),
        (MedusaConfig, {"num_draft_heads": 2.5}, "num_draft_heads is 2.5: expected a whole number from 1 to 64."),
        (MedusaConfig, {"num_layers": 0}, "num_layers is 0: expected a whole number from 1 to 32."),
        (HydraConfig, {"num_layers": "4"}, "num_layers is '4': expected a whole number from 1 to 32."),
        (HydraConfig, {"dropout": 1.0}, "dropout is 1.0: expected a number from 0 up to, but not including, 1."),
        (HydraConfig, {"dropout": -0.1}, "dropout is -0.1: expected a number from 0 up to, but not including, 1."),
        (HydraConfig, {"prefix_layer": "no"}, "prefix_layer is 'no': expected True or False."),
        (HydraConfig, {"tie_blocks": 1, "num_layers": 2}, "tie_blocks is 1: expected True or False."),
        (MedusaConfig, {"share_lm_head": None}, "share_lm_head is None: expected True or False."),
        (AmphistaConfig, {"use_sampled_token": 1}, "use_sampled_token is 1: expected True or False."),
        (AmphistaConfig, {"use_head_positions": 0}, "use_head_positions is 0: expected True or False."),
        (AmphistaConfig, {"lm_head_bias": "yes"}, "lm_head_bias is 'yes': expected True or False."),
        (EagleConfig, {"fc_bias": "yes"}, "fc_bias is 'yes': expected True or False."),
        (HydraConfig, {"layer_config": "llama"}, "layer_config is str: expected the config of a model, or its dict."),
        (HydraConfig, {"base_config": 7}, "base_config is int: expected the config of a model, or its dict."),
    ],
)
def test_config_fields_out_of_range(config_class, fields, message):
    with refused(ValueError, message):
        config_class(**fields)


def test_a_config_of_another_family_is_refused():
    line = "config is a HydraConfig, but MedusaForCausalLM is configured by a MedusaConfig: give one of these"
    with pytest.raises(TypeError, match=line):
        MedusaForCausalLM.from_base(tiny_base(), config=HydraConfig())
    with pytest.raises(TypeError, match=line):
        MedusaForCausalLM(HydraConfig(base_config=tiny_base().config))


T5 = {"d_model": 16, "num_layers": 1, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
ONLY = (
    ": draft heads need a decoder-only language model, as AutoModelForCausalLM, "
    "AutoModelForImageTextToText or AutoModelForMultimodalLM loads it."
)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "by path"])
def test_a_base_that_is_no_decoder_only_language_model(loaded, tmp_path):
    model = T5ForConditionalGeneration(T5Config(**T5))
    model.save_pretrained(tmp_path / "t5")
    shown = "T5ForConditionalGeneration" if loaded else "...t5"
    with refused(ValueError, f"'{shown}' is an encoder-decoder model (t5){ONLY}"):
        MedusaForCausalLM.from_base(model if loaded else tmp_path / "t5")


def test_a_base_that_is_no_language_model(tmp_path):
    ViTConfig().save_pretrained(tmp_path / "vit")
    with refused(ValueError, f"'...vit' is no language model (vit){ONLY}"):
        MedusaForCausalLM.from_base(tmp_path / "vit")


def test_heads_on_heads(heads):
    model = MedusaForCausalLM.from_pretrained(heads)
    for base, message in (
        (model, "'MedusaForCausalLM' has draft heads already: give their base (model.base)."),
        (heads, "'...heads' has draft heads already: give their base (...base)."),
    ):
        with refused(ValueError, message):
            HydraForCausalLM.from_base(base)
        with refused(ValueError, message):
            MedusaForCausalLM.from_pretrained(heads, base_model=base)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "by path"])
def test_a_misspelt_field_of_the_heads(heads, loaded):
    base = tiny_base() if loaded else heads.parent / "base"
    message = "num_heads= is no field of these heads and no argument of a base: num_draft_heads= may be meant."
    with refused(TypeError, message):
        MedusaForCausalLM.from_base(base, num_heads=3)


def test_a_pickle_asked_for_in_a_checkpoint_with_its_base(heads):
    whole = heads.parent / "whole"
    MedusaForCausalLM.from_pretrained(heads).save_pretrained(whole, include_base=True)
    with refused(
        ValueError, "'...whole' is only read as safetensors, for a pickle can run code: drop use_safetensors."
    ):
        MedusaForCausalLM.from_pretrained(whole, use_safetensors=False)


def test_neither_a_checkpoint_nor_what_takes_its_place(heads):
    model = MedusaForCausalLM.from_pretrained(heads)
    message = "give the folder or Hub id of the heads, or None with config= and state_dict= in its place."
    for given in ({}, {"config": model.config}, {"state_dict": model.state_dict()}):
        with refused(ValueError, message):
            MedusaForCausalLM.from_pretrained(None, **given)
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads, config=model.config, state_dict=model.state_dict())


@pytest.mark.parametrize("named", [5, {"a": 1}, [["a"]], "LlamaForCausalLM"])
def test_a_config_of_another_model_with_architectures_of_a_wrong_type(named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": named}))
    with pytest.raises(ValueError, match="holds a 'llama' model without draft heads: give the folder"):
        read_heads_config(str(tmp_path))
