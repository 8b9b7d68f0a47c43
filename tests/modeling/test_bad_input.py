"""What is wrong with a checkpoint, a base or a config is said in one line, before anything is loaded."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoModel, LlamaModel, T5Config, T5ForConditionalGeneration, ViTConfig

from hf_drafthead.modeling import MODEL_CLASSES, HydraConfig, HydraForCausalLM, MedusaConfig, MedusaForCausalLM
from hf_drafthead.modeling.loading import read_heads_config
from tests.bases import tiny_base
from tests.families import FAMILIES

WANTED = "give the folder of a draft-head checkpoint, or its id on the Hub"
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


def test_a_folder_without_a_config(tmp_path):
    with refused(OSError, f"'...' is no draft-head checkpoint (...): {WANTED}; if these are heads in another ...."):
        MedusaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_class", [MedusaForCausalLM, HydraForCausalLM])
def test_a_plain_base_is_no_draft_head_checkpoint(heads, model_class):
    message = f"'...base' holds a 'llama' model without draft heads: {WANTED}; to put new heads ..."
    with refused(ValueError, message):
        model_class.from_pretrained(heads.parent / "base")


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


def test_a_folder_that_is_not_there(heads):
    for path in (heads / "not there", "./nor here"):
        with refused(OSError, f"there is no folder '...': {WANTED}."):
            MedusaForCausalLM.from_pretrained(path)
    message = "the base './nowhere/at all' of '...heads' was not found (...): " + GIVE_BASE
    with refused(OSError, message):
        AutoModel.from_pretrained(heads, base_model="./nowhere/at all")


@pytest.mark.few(5)
@pytest.mark.parametrize("form", ["path", "object", "named"])
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
    place = heads.parent / ("base" if form == "named" else "other")
    other.save_pretrained(place)
    message = (
        f"these heads were trained for '../base' ({words} {trained}); the base at '...' has {words} {given}: load the "
        "first (base_revision= is its commit), or train heads for the second."
    )
    with refused(ValueError, message):
        MedusaForCausalLM.from_pretrained(heads, base_model={"path": place, "object": other}.get(form))


def test_a_revision_for_a_checkpoint_that_has_its_own_base(heads):
    model = MedusaForCausalLM.from_pretrained(heads)
    model.save_pretrained(heads.parent / "whole", include_base=True)
    with refused(ValueError, "'...whole' contains its own base: drop base_revision=."):
        AutoModel.from_pretrained(heads.parent / "whole", base_revision="main")


@pytest.mark.parametrize("name, value", [("dtype", "bfloat16"), ("device_map", "auto")])
def test_loading_arguments_for_a_base_that_is_loaded(heads, name, value):
    base = tiny_base()
    message = (
        f"{name}={value!r} is for loading a base, but the base given is a loaded LlamaForCausalLM: set it when the "
        "base is loaded."
    )
    with refused(TypeError, message):
        MedusaForCausalLM.from_pretrained(heads, base_model=base, **{name: value})
    with refused(TypeError, message):
        MedusaForCausalLM.from_base(base, **{name: value})


def test_a_base_for_new_heads_that_is_not_there(tmp_path):
    for name, what in ((tmp_path, "cannot be read"), (tmp_path / "not there", "was not found"), ("org/not", "...")):
        with refused(OSError, f"the base '...' {what} (...): give the id or path of a causal language model."):
            MedusaForCausalLM.from_base(name, local_files_only=True)
        with refused(TypeError, "from_base has no argument revision=: give base_revision=, which is the base's."):
            MedusaForCausalLM.from_base(name, revision="main")


def test_a_base_without_lm_head():
    with refused(ValueError, "LlamaModel has no lm_head: draft heads need a causal language model."):
        MedusaForCausalLM.from_base(LlamaModel(tiny_base().config))


def test_a_config_without_a_base():
    message = (
        "MedusaConfig has no base_config: give it the config of the base, or use MedusaForCausalLM.from_base(...)."
    )
    with refused(ValueError, message):
        MedusaForCausalLM(MedusaConfig())


def test_a_config_of_another_family_is_refused():
    line = "config is a HydraConfig, but MedusaForCausalLM is configured by a MedusaConfig: give one of these"
    with pytest.raises(TypeError, match=line):
        MedusaForCausalLM.from_base(tiny_base(), config=HydraConfig())
    with pytest.raises(TypeError, match=line):
        MedusaForCausalLM(HydraConfig(base_config=tiny_base().config))


T5 = {"d_model": 16, "num_layers": 1, "d_ff": 16, "num_heads": 2, "vocab_size": 32}
ONLY = ": draft heads need a decoder-only language model, as AutoModelForCausalLM or AutoModelForMultimodalLM loads it."


def test_a_base_that_is_no_decoder_only_language_model(tmp_path):
    model = T5ForConditionalGeneration(T5Config(**T5))
    model.save_pretrained(tmp_path / "t5")
    ViTConfig().save_pretrained(tmp_path / "vit")
    for base, said in (
        (model, "'T5ForConditionalGeneration' is an encoder-decoder model (t5)"),
        (tmp_path / "t5", "'...t5' is an encoder-decoder model (t5)"),
        (tmp_path / "vit", "'...vit' is no language model (vit)"),
    ):
        with refused(ValueError, said + ONLY):
            MedusaForCausalLM.from_base(base)


def test_heads_on_heads(heads):
    for base, name in ((MedusaForCausalLM.from_pretrained(heads), "MedusaForCausalLM"), (heads, "...heads")):
        for load in (
            HydraForCausalLM.from_base,
            lambda base: MedusaForCausalLM.from_pretrained(heads, base_model=base),
        ):
            with refused(ValueError, f"'{name}' has draft heads already: give their base alone."):
                load(base)


@pytest.mark.parametrize("loaded", [True, False], ids=["loaded", "by path"])
def test_a_misspelt_field_of_the_heads(heads, loaded):
    with pytest.raises(TypeError, match="num_heads"):
        MedusaForCausalLM.from_base(tiny_base() if loaded else heads.parent / "base", num_heads=3)


def test_arguments_and_places_with_which_nothing_can_be_loaded_or_saved(heads):
    model = MedusaForCausalLM.from_pretrained(heads)
    with refused(TypeError, "state_dict= is not taken: load the heads, then model.load_state_dict(...)."):
        MedusaForCausalLM.from_pretrained(heads, state_dict=model.state_dict())
    with pytest.raises(TypeError, match="include_code"):
        model.push_to_hub("org/heads", include_code=True)
    for name in ("variant", "push_to_hub", "include_code"):
        with pytest.raises(TypeError, match=f"has no argument {name}=: leave it out; push_to_hub"):
            model.save_pretrained(heads, **{name: True})
    (heads.parent / "file").write_text("mine")
    with refused(OSError, "...File exists: '...file'"):
        model.save_pretrained(heads.parent / "file")
    model.save_pretrained(heads, save_function=print)  # as accelerate hands it on


@pytest.mark.parametrize("fields", [[], "x", {}, {"quant_method": "none"}, {"quant_method": 2}])
def test_a_quantization_that_no_base_can_have_is_one_line(fields, heads):
    file = Path(heads) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_quantization": fields}))
    with pytest.raises(ValueError, match="base_quantization of config.json cannot be used") as error:
        AutoModel.from_pretrained(heads)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("named", [5, {"a": 1}, [["a"]], "LlamaForCausalLM"])
def test_a_config_of_another_model_with_architectures_of_a_wrong_type(named, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": named}))
    with pytest.raises(ValueError, match="holds a 'llama' model without draft heads: give the folder"):
        read_heads_config(str(tmp_path))
