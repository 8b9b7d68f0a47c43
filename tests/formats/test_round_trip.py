"""One law over all layouts: written in a layout and read from it, heads are what they were, bit for bit."""

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from hf_drafthead import convert_checkpoint, export_checkpoint
from hf_drafthead.formats.disk import find_sources
from hf_drafthead.formats.layouts import LAYOUTS, targets
from hf_drafthead.modeling import (
    DFlash2ForCausalLM,
    DFlashForCausalLM,
    Eagle3ForCausalLM,
    EagleForCausalLM,
    GemmaAssistantForCausalLM,
    HydraForCausalLM,
    MedusaForCausalLM,
    MtpForCausalLM,
    PEagleForCausalLM,
)
from tests.bases import tiny_base
from tests.families import DSPARK_VARIANTS, Family

EAGLE_LAYER = {"layer_config": tiny_base("llama-gqa").config}
EAGLE3 = {"draft_vocab_size": 50}
SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 8}
NARROW = LlamaConfig(**SIZES, num_hidden_layers=1)
SIZES_OF_A_LAYER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES_OF_A_LAYER |= {"head_dim": 8, "num_hidden_layers": 2}
SLIDES = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
BLOCK = {"num_layers": 2, "num_draft_heads": 5, "mask_token_id": 7}
DSPARK = BLOCK | {"markov_rank": 6, "confidence_head": True, "sample_from_anchor": True}
DFLASH2 = BLOCK | {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9}
SCALED = {"input_embedding_scale": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
SLIDING = SCALED | {"layer_config": Qwen3Config(**SIZES_OF_A_LAYER, **SLIDES)}
RNN = {"markov_head_type": "rnn", "confidence_with_markov": False}
MEDUSA, HYDRA, EAGLE, HEAD = MedusaForCausalLM, HydraForCausalLM, EagleForCausalLM, Eagle3ForCausalLM
# Heads of every form that a layout can hold, and the targets that can hold it.
FORMS = {
    "medusa": (MEDUSA, {}, "medusa tgi vllm"),
    "medusa of 5 heads": (MEDUSA, {"num_draft_heads": 5}, "medusa tgi vllm"),
    "medusa with a shared lm_head": (MEDUSA, {"share_lm_head": True}, "medusa tgi vllm"),
    "medusa of 3 blocks": (MEDUSA, {"num_layers": 3}, "tgi vllm"),
    "hydra": (HYDRA, {}, "hydra"),
    "hydra of 2 blocks": (HYDRA, {"num_layers": 2}, "hydra"),
    "hydra, tied": (HYDRA, {"num_layers": 3, "tie_blocks": True}, "hydra"),
    "hydra++": (HYDRA, {"num_layers": 4, "tie_blocks": True, "prefix_layer": True}, "hydra"),
    "eagle": (EAGLE, EAGLE_LAYER, "eagle vllm sglang"),
    "eagle with a bias": (EAGLE, EAGLE_LAYER | {"fc_bias": True}, "eagle sglang"),
    "eagle3": (HEAD, EAGLE3, "eagle3 sglang vllm speculators"),
    "eagle3 over all tokens": (HEAD, {}, "eagle3 sglang vllm speculators"),
    "eagle3 with embeddings": (HEAD, EAGLE3 | {"own_embeddings": True}, "eagle3 vllm speculators"),
    "eagle3 of another width": (HEAD, {"own_embeddings": True, "layer_config": NARROW}, "eagle3 sglang vllm"),
    "eagle3, normed residual": (HEAD, EAGLE3 | {"norm_before_residual": True}, "vllm speculators"),
    "eagle3, normed features": (HEAD, EAGLE3 | {"norm_before_fc": True}, "sglang vllm speculators"),
    "eagle3, norms apart": (HEAD, EAGLE3 | {"fc_norm": True, "norm_output": True}, "sglang vllm speculators"),
    "eagle3 of other layers": (HEAD, EAGLE3 | {"feature_layers": [3, 4, 6]}, "sglang vllm speculators"),
    "eagle3 of five layers": (HEAD, EAGLE3 | {"feature_layers": [1, 2, 3, 4, 5]}, "vllm speculators"),
    "eagle3, two deep": (HEAD, EAGLE3 | {"num_layers": 2}, "vllm speculators"),
    "eagle3, qwen3 layer": (HEAD, EAGLE3 | {"layer_config": tiny_base("qwen3").config}, "speculators"),
    "peagle": (PEagleForCausalLM, EAGLE3 | {"own_embeddings": True, "num_layers": 2}, "speculators"),
    "dflash": (DFlashForCausalLM, BLOCK, "sglang speculators"),
    "dflash of DeepSpec": (DFlashForCausalLM, BLOCK | {"sample_from_anchor": True}, "sglang speculators"),
    "dflash, reduced": (DFlashForCausalLM, BLOCK | EAGLE3 | {"share_lm_head": False}, "speculators"),
    "dspark": (DFlashForCausalLM, DSPARK, "sglang speculators"),
    "dspark, gated": (DFlashForCausalLM, DSPARK | {"markov_head_type": "gated"}, "sglang speculators"),
    "dspark, rnn": (DFlashForCausalLM, DSPARK | RNN, "sglang speculators"),
    "dflash2": (DFlash2ForCausalLM, DFLASH2, "sglang speculators"),
    "dflash2, sliding": (DFlash2ForCausalLM, DFLASH2 | SLIDING, "sglang"),
    "dspark, sliding": (DFlashForCausalLM, DSPARK_VARIANTS | {"markov_head_type": "gated"}, "speculators"),
}
CASES = [
    pytest.param(Family(name, kind, fields), to, id=f"{name} as {to}")
    for name, (kind, fields, targets) in FORMS.items()
    for to in targets.split()
]


def build(form, base):
    model = form.build(base)
    if (tokens := model.drafter.draft_tokens) is not None:  # in the order that trainers write
        tokens.copy_(tokens.sort().values)
    return model


def tensors_in(folder):
    (source,) = find_sources(str(folder), {})
    return source.tensors


def assert_same(found, wanted):
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("form, to", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_convert_after_export_changes_nothing(form, to, dtype, base, tmp_path):
    model = build(form, base)
    model.drafter.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", to)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "again", base_model=tmp_path / "base")
    assert_same(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "ours"))
    again = form.model_class.from_pretrained(tmp_path / "again")
    for name in form.fields:
        if name != "layer_config":
            assert getattr(again.config, name) == getattr(model.config, name)
    export_checkpoint(tmp_path / "again", tmp_path / "theirs again", to)
    assert_same(tensors_in(tmp_path / "theirs again"), tensors_in(tmp_path / "theirs"))


@pytest.mark.parametrize("form, to", CASES)
def test_exported_heads_draft_what_they_drafted(form, to, base, tmp_path):
    model = build(form, base)
    model.save_pretrained(tmp_path / "ours")
    export_checkpoint(model, tmp_path / "theirs", to)  # the loaded model itself
    again = form.model_class.from_pretrained(tmp_path / "theirs", convert=True, base_model=base)
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 16, "eos_token_id": None, "return_dict_in_generate": True}
    one, other = (
        each.generate(ids, draft_tree=[[0], [1], [0, 0], [0, 1], [1, 0]], **settings) for each in (model, again)
    )
    assert torch.equal(one.sequences, other.sequences)
    assert torch.equal(one.accepted_lengths, other.accepted_lengths)


def test_every_target_is_in_the_law():
    others = {"base", "transformers"}  # see test_mtp and test_gemma4_assistant
    assert {to for _, _, formats in FORMS.values() for to in formats.split()} | others == set(targets())
    families = {kind for kind, _, _ in FORMS.values()}
    assert families == {layout.family for layout in LAYOUTS} - {MtpForCausalLM, GemmaAssistantForCausalLM}


def test_a_model_with_its_base_goes_out_and_in_as_one(base, tmp_path):
    model = Family("medusa", MedusaForCausalLM).build(base)
    model.save_pretrained(tmp_path / "ours", include_base=True)
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs", "medusa")
    report = convert_checkpoint(tmp_path / "theirs", tmp_path / "again")
    assert report.layout == "Medusa 1.0 model"
    assert_same(tensors_in(tmp_path / "again"), tensors_in(tmp_path / "ours"))
    again = MedusaForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.base_included
    for name, tensor in base.state_dict().items():
        assert torch.equal(again.base.state_dict()[name], tensor)
