"""A field of config.json that may change what heads compute is read, or refused by name, in every layout."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.formats.disk import Joined
from hf_drafthead.formats.fields import TABLE, half_split, layer_types, rotary_of
from hf_drafthead.formats.layouts import LAYOUTS
from hf_drafthead.modeling import (
    DFlashForCausalLM,
    Eagle3ForCausalLM,
    EagleForCausalLM,
    HydraForCausalLM,
    MedusaForCausalLM,
)
from tests.bases import tiny_base
from tests.families import Family

BLOCK = {"num_layers": 2, "num_draft_heads": 3, "sample_from_anchor": True}
EAGLE = {"layer_config": tiny_base("llama-gqa").config}
HEADS = {  # a family and the layout that its heads are written in
    "EAGLE": (Family("eagle", EagleForCausalLM, EAGLE), "eagle"),
    "EAGLE-3": (Family("eagle3", Eagle3ForCausalLM, {"feature_layers": [1, 3, 5]}), "vllm"),
    "speculators": (Family("eagle3", Eagle3ForCausalLM, {"feature_layers": [1, 3, 5]}), "speculators"),
    "DFlash": (Family("dflash", DFlashForCausalLM, BLOCK), "sglang"),
    "speculators (dflash, dspark)": (Family("dflash", DFlashForCausalLM, BLOCK), "speculators"),
    "Hydra": (Family("hydra", HydraForCausalLM), "hydra"),
    "FasterDecoding Medusa": (Family("medusa", MedusaForCausalLM), "medusa"),
    "vLLM Medusa": (Family("medusa", MedusaForCausalLM), "vllm"),
}
OF_LAYERS = [name for name in HEADS if name.startswith(("EAGLE", "DFlash", "speculators"))]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fields") / "base"
    tiny_base("llama-gqa", dtype=torch.float32, num_hidden_layers=8).save_pretrained(folder)
    return folder


@pytest.fixture
def write(base, tmp_path):
    """A function that writes heads with other fields of the layer, converts them, and gives the model."""

    def call(layout, change=None, beside=None, **fields):
        form, target = HEADS[layout]
        model = form.build(form.model_class.from_base(base, **form.fields).base)
        model.config.base_model_name_or_path = str(base)
        export_checkpoint(model, tmp_path / "theirs", target)
        file = tmp_path / "theirs" / "config.json"
        about = json.loads(file.read_text())
        holder = about.get("transformer_layer_config", about)
        holder |= fields
        about |= beside or {}
        file.write_text(json.dumps(about))
        if change is not None:
            tensors = load_file(tmp_path / "theirs" / "model.safetensors")
            save_file(change(tensors), tmp_path / "theirs" / "model.safetensors")
        convert_checkpoint(tmp_path / "theirs", tmp_path / "new", base_model=base)
        return model

    return call


def test_the_table_has_a_row_for_every_layout_whose_config_is_not_its_base_s():
    assert {layout.name for layout in LAYOUTS} - set(TABLE) == {"Medusa 1.0 model", "a base's modules"}


@pytest.mark.parametrize("layout", HEADS)
def test_a_field_that_is_not_known_is_refused_by_name_unless_it_says_nothing(layout, write):
    with pytest.raises(ValueError, match="says gate_temperature 0.5 in its config.json.*: get a drafter without it"):
        write(layout, gate_temperature=0.5)


def test_what_says_nothing_is_left_alone(write):
    nothing = {"gate": None, "residual_multiplier": 1.0, "experts": 0, "adapters": [], "log_snr_conditioning": False}
    assert write("DFlash", **nothing, _note="by hand", num_anchors=512, torch_dtype="bfloat16")


REFUSED = {
    "a scale": {"attention_multiplier": 0.5},
    "a part of a head": {"partial_rotary_factor": 0.5},
    "experts": {"num_experts": 8},
    "another model's layer": {"model_type": "gemma3_text"},
    "capped scores": {"attn_logit_softcapping": 30.0},
    "a second rotary base": {"rope_local_base_freq": 1e4},
    "a way to scale": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5}},
    "a field of that way": {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "phase": 3}},
}


SLIDES = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "use_sliding_window": None}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CONTRADICTIONS = {
    "a window of no width": (SLIDES | {"sliding_window": None}, "see a window, and no sliding_window: correct"),
    "a window that is off": (SLIDES | {"use_sliding_window": False}, "use_sliding_window False, and the layer_types"),
    "two scalings": (
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_parameters": DEFAULT},
        "says rope_type of its rope_scaling linear and rope_type of its rope_parameters default, of which one can be",
    ),
    "two types": ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "yarn and type of its rop"),
    "a factor of nothing": ({"rope_scaling": {"factor": 2.0}}, "says factor 2.0 and no rope_type: correct"),
    "lost biases": ({"attention_bias": True}, "lacks the tensor 'layers.0.self_attn.q_proj.bias'"),
    "lost biases of Qwen": ({"qkv_bias": True}, "lacks the tensor 'layers.0.self_attn.q_proj.bias'"),
    "lost biases of the MLP": ({"mlp_bias": True}, "lacks the tensor 'layers.0.mlp.gate_proj.bias'"),
    "heads of two sizes": ({"head_dim": 16}, "says num_attention_heads 4 and head_dim 16, its queries have 32 rows"),
    "no activation": ({"hidden_act": "owl"}, "says hidden_act 'owl', which is not known here"),
}


@pytest.mark.parametrize("layout", OF_LAYERS)
@pytest.mark.parametrize("fields, message", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_fields_that_cannot_be_together_or_without_a_tensor_are_refused(layout, fields, message, write):
    with pytest.raises(ValueError, match=message.replace("layers.0", r"(layers.0|midlayer)")):
        write(layout, **fields)


@pytest.mark.parametrize("layout", ["speculators", "speculators (dflash, dspark)"])
@pytest.mark.parametrize("place", ["dflash_config", None])
def test_positions_that_pair_neighbours_are_refused_beside_the_config_of_the_layer(layout, place, write):
    says = {"rope_is_neox_style": False}
    with pytest.raises(ValueError, match="says rope_is_neox_style False in its config.json.*expected True"):
        write(layout, beside={place: says} if place else says)


def test_a_layer_of_an_eagle_head_has_no_window(write):
    with pytest.raises(ValueError, match="says sliding_window 4 of its layer, and the layer of an EAGLE head sees"):
        write("EAGLE", **SLIDES)


@pytest.mark.parametrize(
    "layout, says, message",
    [
        ("EAGLE-3", {"norm_before_residual": "false"}, "says norm_before_residual 'false', expected true or false"),
        ("DFlash", {"num_target_layers": 30}, "were trained for a base of number of layers 30; the base .* has 8"),
        ("DFlash", {"rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "does not say rope_theta"),
        ("DFlash", {"swa_window_size": 4, "layer_types": None}, "says swa_window_size 4, and not which .* add use_swa"),
    ],
)
def test_what_one_layout_says_wrongly_is_refused(layout, says, message, write):
    with pytest.raises(ValueError, match=message):
        write(layout, **says)


def test_biases_of_a_layer_with_norms_of_queries_are_read(write, tmp_path):
    """As the block drafters of gpt-oss have them."""

    def with_biases(tensors):
        weights = [name for name in tensors if "self_attn" in name and name.endswith("proj.weight")]
        return tensors | {f"{name[:-6]}bias": torch.randn(len(tensors[name])) for name in weights}

    write("DFlash", with_biases, attention_bias=True)
    model = DFlashForCausalLM.from_pretrained(tmp_path / "new")
    assert model.config.layer_config.attention_bias and model.drafter.body.layers[1].self_attn.o_proj.bias.any()


def test_medusa_heads_of_vllm_that_lost_their_biases_are_refused(write):
    with pytest.raises(ValueError, match="lacks the tensor 'blocks.0.layers.0.bias'"):
        write("vLLM Medusa", lambda tensors: {name: tensor for name, tensor in tensors.items() if "bias" not in name})


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("layout", OF_LAYERS)
def test_what_changes_a_layer_is_refused_by_name(layout, fields, write):
    (name, value), *_ = fields.items()
    named = name if not isinstance(value, dict) else "partial_rotary_factor|phase"
    with pytest.raises(ValueError, match=f"says ({named}) .* in its config.json"):
        write(layout, **fields)


@pytest.mark.parametrize(
    "field, value", [("rope_is_neox_style", False), ("rope_interleave", True), ("is_neox_style", False)]
)
@pytest.mark.parametrize("layout", OF_LAYERS)
def test_positions_that_pair_neighbours_are_turned_to_pair_halves(layout, field, value, write, tmp_path):
    """Scores of heads whose rows are put in another order, and are read as such, are what they were."""
    turned = ("q_proj.weight", "k_proj.weight", "q_norm.weight", "k_norm.weight")

    def neighbours(tensors):
        def back(tensor):
            return tensor.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2).contiguous()

        return {name: back(tensor) if name.endswith(turned) else tensor for name, tensor in tensors.items()}

    model = write(layout, neighbours, **{field: value})
    found = load_file(tmp_path / "new" / "model.safetensors")
    for name, tensor in model.drafter.state_dict().items():
        if name.endswith(turned):
            assert torch.equal(found[f"drafter.{name}"], tensor), name


def test_rows_of_a_head_go_from_neighbours_to_halves():
    rows = torch.arange(16.0)[:, None]
    turned = half_split(Joined((rows,), (16, 1)), 8).tensor()[:, 0]
    assert turned.tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


KINDS = {
    "types": ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}, [None, 5]),
    "ModelOpt": ({"use_swa": True, "swa_window_size": 6, "layer_types": ["full_attention"] * 2}, [6, 6]),
    "Qwen": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, [None, 5]),
    "Qwen, all": ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, [5, 5]),
    "off": ({"use_sliding_window": False, "sliding_window": 5}, [None, None]),
    "none": ({}, [None, None]),
    "wider than any text": ({"sliding_window": 64, "max_position_embeddings": 64}, [None, None]),
}


@pytest.mark.parametrize("config, windows", KINDS.values(), ids=KINDS)
def test_windows_are_read_in_every_spelling(config, windows):
    kinds, window = layer_types("heads", config, 2)
    assert [window if kind == "sliding_attention" else None for kind in kinds] == windows


def test_a_window_of_which_nobody_says_whose_it_is_is_refused():
    with pytest.raises(ValueError, match="says sliding_window 5, and not which of its layers"):
        layer_types("heads", {"sliding_window": 5}, 2)


FULL = ["full_attention"]
OF_TYPES = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
ROTARY = {
    "of the type": ({"rope_parameters": OF_TYPES}, {"rope_type": "default", "rope_theta": 1e6}),
    "three positions": (
        {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}, "rope_theta": 1e5},
        {"rope_type": "default", "rope_theta": 1e5},
    ),
    "the same twice": (
        {"rope_theta": 2e4, "rope_parameters": {"rope_theta": 2e4}},
        {"rope_type": "default", "rope_theta": 2e4},
    ),
    "none": ({}, {"rope_type": "default", "rope_theta": 1e4}),
}


@pytest.mark.parametrize("config, expected", ROTARY.values(), ids=ROTARY)
def test_rotary_parameters(config, expected):
    assert rotary_of("heads", config, FULL) == expected


@pytest.mark.parametrize(
    "config, kinds",
    [
        ({"rope_parameters": OF_TYPES}, ["full_attention", "sliding_attention"]),
        ({"rope_parameters": {"chunked_attention": {"rope_theta": 1e6}}}, FULL),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, FULL),
    ],
    ids=["two", "of another type", "twice"],
)
def test_rotary_parameters_that_differ_are_refused(config, kinds):
    with pytest.raises(ValueError, match="rope_parameters"):
        rotary_of("heads", config, kinds)


def test_what_was_read_is_tried_before_it_is_written(write, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_drafthead.formats.fields.ROTARY", TABLE["DFlash"] | dict.fromkeys(("rope_type", "factor")))
    monkeypatch.setattr("hf_drafthead.formats.fields.rotary_of", lambda *_: YARN)
    with pytest.raises(ValueError, match="the heads at .* cannot guess with what its config.json says"):
        write("EAGLE-3")
    assert not (tmp_path / "new").exists()


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN |= {"original_max_position_embeddings": 64}
