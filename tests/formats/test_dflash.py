"""Files of block drafters: every convention is read from the file, settled by the user, or refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.modeling import DFlashForCausalLM
from tests.bases import tiny_base
from tests.families import Family
from tests.modeling.block_golden import golden_base, load

Z_LAB, DEEPSPEC, SPECULATORS = "dflash_z_qwen3_b8_n3_l2", "dspark_vanilla_qwen3_b7", "dflash_s_swa_causal_qwen3_b6"
OWN = "dflash_config"
READ = {"mask_token_id": 127, "target_layer_ids": [0, 1, 2]}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden") / "base"
    golden_base().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "name, expected",
    [
        (Z_LAB, {"feature_layers": [1, 2, 3], "num_draft_heads": 7, "sample_from_anchor": False, "causal_layers": []}),
        (DEEPSPEC, {"feature_layers": [1, 3], "num_draft_heads": 7, "sample_from_anchor": True, "markov_rank": 16}),
        ("dspark_gated_qwen3_b5", {"feature_layers": [0, 2, 3], "markov_head_type": "gated", "num_draft_heads": 5}),
        (SPECULATORS, {"feature_layers": [1, 3], "num_draft_heads": 5, "draft_vocab_size": 96, "causal_layers": [0]}),
        ("dspark_s_vanilla_qwen3_b5", {"feature_layers": [1, 2], "sample_from_anchor": True, "num_draft_heads": 5}),
    ],
)
def test_each_project_s_conventions_are_read(name, expected, base, tmp_path):
    report = convert_checkpoint(load(name).write(tmp_path / "theirs"), tmp_path / "ours", base_model=base)
    assert {field: report.fields[field] for field in expected} == expected
    assert report.family == ("dspark" if report.fields["markov_rank"] else "dflash")
    assert DFlashForCausalLM.from_pretrained(tmp_path / "ours").config.mask_token_id == 127


OPEN = {
    "layer ids": (Z_LAB, {OWN: {"mask_token_id": 127}}, "feature_layers", [1, 2, 3]),
    "block size": (Z_LAB, {"block_size": None}, "num_draft_heads", 7),
    "mask token": (Z_LAB, {OWN: {"target_layer_ids": [0, 1, 2]}}, "mask_token_id", 127),
    "anchor": (Z_LAB, {"architectures": ["SomeDraftModel"]}, "sample_from_anchor", False),
    "sliding blocks": (Z_LAB, {"layer_types": ["sliding_attention", "full_attention"]}, "causal_layers", [0]),
    "speculators' sliding blocks": (SPECULATORS, {"sliding_window_non_causal": None}, "causal_layers", [0]),
    "speculators' anchor": (SPECULATORS, {"sample_from_anchor": None}, "sample_from_anchor", False),
    "speculators' layer ids": (SPECULATORS, {"aux_hidden_state_layer_ids": None}, "feature_layers", [1, 3]),
}


@pytest.mark.parametrize("name, changed, field, value", OPEN.values(), ids=OPEN)
def test_what_a_file_leaves_open_is_refused_until_it_is_said(name, changed, field, value, base, tmp_path):
    folder = load(name).write(tmp_path / "theirs", **{"sliding_window": 5, **changed})
    with pytest.raises(ValueError, match=f"does not say .*, and projects differ in it: give {field}= .on the command"):
        convert_checkpoint(folder, base_model=base)
    assert convert_checkpoint(folder, base_model=base, fields={field: value}).fields[field] == value


REFUSED = {
    "two block sizes": ({OWN: {**READ, "block_size": 4}}, "says block_size twice, 8 and 4"),
    "the base's last layer": (
        {OWN: {**READ, "target_layer_ids": [0, 1, 3]}},
        "reads the output of the base's last layer",
    ),
    "no rotary base": ({"rope_theta": None, "rope_scaling": None}, "does not say rope_theta or rope_parameters"),
    "layers of no known kind": ({"layer_types": ["chunked_attention"] * 2}, "has the layer_types .'chunked_attention'"),
    "a size in words": ({"block_size": "8"}, "of a form that no DFlash file has .TypeError: .*: correct it.$"),
    "ids that are no list": ({OWN: {**READ, "target_layer_ids": 2}}, "DFlash file has .TypeError: 'int' object"),
    "rotary fields that are missing": ({"rope_scaling": {"rope_type": "yarn"}}, "file has .KeyError: .*'factor'"),
    "rotary fields in words": ({"rope_scaling": "yarn"}, "has .TypeError: rope_scaling is 'yarn'.: correct it.$"),
    "a negative rotary base": ({"rope_theta": -1e4}, "says rope_theta '-10000.0', expected a number above 0"),
    "a flag in words": ({OWN: {**READ, "causal": "yes"}}, "says causal 'yes', expected true or false: correct"),
    "an anchor in words": ({"sample_from_anchor": "no"}, "says sample_from_anchor 'no', expected true or false"),
    "no window": (
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": -3, OWN: {**READ, "causal": False}},
        "sliding_window -3: expected a whole number of at least 1",
    ),
    "fewer layers": (
        {OWN: {**READ, "target_layer_ids": [0, 1]}},
        "'drafter.fc.weight' .* .64, 192., but its config asks",
    ),
    "a scale that is none": ({"output_multiplier": -0.5}, "output_multiplier is -0.5: expected a number above 0"),
    "a mask token beyond the base": (
        {OWN: {**READ, "mask_token_id": 128}},
        "mask_token_id is 128, but the base embeds",
    ),
}


@pytest.mark.parametrize("changed, message", REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_run_is_refused(changed, message, base, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(load(Z_LAB).write(tmp_path / "theirs", **changed), base_model=base)


def test_a_second_drafter_has_no_head_of_the_first(base, tmp_path):
    folder = load("dflash2_z_qwen3_b8_n3_l2").write(tmp_path / "theirs", markov_rank=4)
    with pytest.raises(ValueError, match="says markov_rank 4 in its config.json.*expected 0"):
        convert_checkpoint(folder, base_model=base)


OTHERS = [
    ("prefix_gru.weight_ih_l0", "is Domino"),
    ("layers.0.self_attn.sinks", "is a block drafter with attention sinks"),
]


@pytest.mark.parametrize("key, other", OTHERS)
def test_other_block_drafters_are_refused_by_name(key, other, base, tmp_path):
    folder = load(Z_LAB).write(tmp_path / "theirs")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, key: torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=other):
        convert_checkpoint(folder, base_model=base)


def test_a_causal_head_of_jetspec_is_a_field(base, tmp_path):
    folder = load(Z_LAB).write(tmp_path / "theirs", **{OWN: {**READ, "causal_head": True}})
    assert convert_checkpoint(folder, base_model=base).fields["causal_layers"] == [0, 1]


LOST = {
    "a reduced DSpark": ({"markov_rank": 4, "draft_vocab_size": 50}, "is for a draft vocabulary"),
    "confidence alone": ({"confidence_head": True}, "stands without a Markov head, .* use --to sglang", "speculators"),
    "own projection": (
        {"share_lm_head": False},
        "its share_lm_head is False, .* alone; use --to speculators",
    ),
    "causal blocks": (
        {"causal_layers": [0]},
        "its causal_layers is .0., .* alone; use --to speculators",
    ),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("fields, message, to", [(*case, "sglang")[:3] for case in LOST.values()], ids=LOST)
def test_what_an_engine_would_run_otherwise_is_refused(fields, message, to, tmp_path):
    family = Family("dflash", DFlashForCausalLM, {"num_layers": 1, "sample_from_anchor": True, **fields})
    family.build(tiny_base()).save_pretrained(tmp_path / "ours")
    with pytest.raises(ValueError, match=message):
        export_checkpoint(tmp_path / "ours", tmp_path / "theirs", to)


def test_an_export_says_what_its_readers_look_for(tmp_path):
    model = Family("dflash", DFlashForCausalLM, {"num_layers": 1, "num_draft_heads": 7}).build(tiny_base())
    model.save_pretrained(tmp_path / "ours")
    for target in ("sglang", "speculators"):
        export_checkpoint(tmp_path / "ours", tmp_path / target, target)
    sglang, speculators = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("sglang", "speculators")
    )
    assert sglang["architectures"] == ["DFlashDraftModel"] and sglang["block_size"] == 8
    assert sglang["dflash_config"] == {"mask_token_id": 66, "target_layer_ids": [0]}
    assert speculators["speculators_model_type"] == "dflash" and speculators["aux_hidden_state_layer_ids"] == [1]
    assert not speculators["sample_from_anchor"] and speculators["transformer_layer_config"]["model_type"] == "qwen3"
