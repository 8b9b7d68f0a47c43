"""The table of bases in `docs/bases.md`: each is built tiny, as a published checkpoint is, and tried with heads on it.

A class of transformers has the settings of a published checkpoint for defaults, and names it. A tiny base has these but
for its sizes: the first layers of that model, as many as show every kind of layer that it has, and a short window where
it has a window. PUBLISHED says what a checkpoint has otherwise than its class.

`python -m tests.base_table` writes the table anew.
"""

import functools
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_drafthead.exactness import Inexact, exact
from hf_drafthead.modeling.base_model import auto_class
from hf_drafthead.modeling.families import fresh_heads
from tests.bases import KINDS, SIZES, SPECIAL

DOCS = Path(__file__).parents[1] / "docs" / "bases.md"
# Without a layer, with one, and with several hidden states to read: what else families differ in the base does not see.
FAMILIES: dict[str, dict[str, Any]] = {"medusa": {}, "eagle": {}, "eagle3": {"feature_layers": [0, 1]}}
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"

GROUPS: dict[str, Any] = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA4 = {**GROUPS, "head_dim": 8, "num_local_experts": 2, "intermediate_size_mlp": 48}
GEMMA3 = {**GROUPS, "head_dim": 8, "query_pre_attn_scalar": 8}
DEEPSEEK = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
DEEPSEEK |= {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, **EXPERTS, "first_k_dense_replace": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4}
TEXT: dict[str, dict[str, Any]] = {
    "llama": GROUPS,
    "mistral": GROUPS,
    "ministral": {**GROUPS, "head_dim": 8},
    "mixtral": {**GROUPS, "num_local_experts": 4},
    "qwen2": GROUPS,
    "qwen3": {**GROUPS, "head_dim": 8},
    "qwen3_moe": {**GROUPS, **EXPERTS, "head_dim": 8},
    "gemma": {**GROUPS, "head_dim": 8},
    "gemma2": KINDS["gemma2"],
    "gemma3_text": GEMMA3,
    "gemma3n_text": KINDS["gemma3n-sharing"],
    "gemma4_text": KINDS["gemma4-sharing"],
    "phi": {},
    "phi3": GROUPS,
    "cohere": GROUPS,
    "cohere2": GROUPS,
    "olmo2": GROUPS,
    "granite": GROUPS,
    "starcoder2": GROUPS,
    "stablelm": GROUPS,
    "smollm3": GROUPS,
    "exaone4": GROUPS,
    "glm4": {**GROUPS, "head_dim": 8},
    "nemotron": GROUPS,
    "deepseek_v3": {"num_key_value_heads": 4, **DEEPSEEK},
    "gpt_oss": {**GROUPS, "head_dim": 8, "num_local_experts": 4},
    "llama4_text": LLAMA4,
    "gpt_neox": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "falcon": {"num_kv_heads": 2},
    "codegen": {"rotary_dim": 4},
    "biogpt": {},
    "bloom": {},
    "mpt": KINDS["mpt"],
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    "mamba": KINDS["mamba"],
    "rwkv": {"attention_hidden_size": 32},
    "qwen3_next": {**GROUPS, **EXPERTS, **LINEAR, "head_dim": 8, "shared_expert_intermediate_size": 16},
    "granitemoehybrid": {**GROUPS, **MAMBA, "num_local_experts": 4, "shared_intermediate_size": 16},
    "bamba": {**GROUPS, **MAMBA},
    "kimi_linear": {"num_key_value_heads": 4, **EXPERTS, **LATENT, "linear_num_heads": 4, "linear_head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 1},
}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.015625}
# under both names that configs have
TWO_KINDS = dict.fromkeys(("layer_types", "layers_block_type"), ["linear_attention", "full_attention"])
# Checkpoints, and what they have otherwise than their class, whose defaults are of another one or of none.
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": (
        "ibm-ai-platform/Bamba-9B",
        {"attn_layer_indices": [1], **TWO_KINDS},
    ),
    "cohere2": ("CohereLabs/c4ai-command-r7b-12-2024", {}),
    "deepseek_v3": ("deepseek-ai/DeepSeek-V3", {}),
    "falcon": ("tiiuae/falcon-40b", {"new_decoder_architecture": True, "alibi": False}),
    "gemma2": ("google/gemma-2-9b", {}),
    "glm4": ("zai-org/GLM-4-9B-0414", {}),
    "granite": ("ibm-granite/granite-3.0-8b-base", {**GRANITE, "logits_scaling": 16.0}),
    "granitemoe": ("ibm-granite/granite-3.0-1b-a400m-base", {**GRANITE, "logits_scaling": 6.0}),
    "granitemoehybrid": (
        "ibm-granite/granite-4.0-h-tiny",
        {**GRANITE, "logits_scaling": 6.0, **TWO_KINDS},
    ),
    "granitemoeshared": ("ibm-research/moe-7b-1b-active-shared-experts", {**GRANITE, "logits_scaling": 6.0}),
    "laguna": ("poolside/laguna-XS.2", {"layer_types": ["full_attention", "sliding_attention"]}),
    "lfm2": ("LiquidAI/LFM2-1.2B", {"layer_types": ["conv", "conv", "full_attention"]}),
    "lfm2_moe": ("LiquidAI/LFM2-8B-A1B", {"layer_types": ["conv", "conv", "full_attention"]}),
    "mellum": ("JetBrains/Mellum2-12B-A2.5B-Base", {"layer_types": ["full_attention", "sliding_attention"]}),
    "opt": ("facebook/opt-350m", {"do_layer_norm_before": False}),
    "phi3": ("microsoft/Phi-3-mini-4k-instruct", {"sliding_window": 8}),
    "starcoder2": ("bigcode/starcoder2-7b", {"sliding_window": 8}),
}
# Lists with an entry per layer, and what is computed from a rule: which kinds of layers follow each other.
PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")
SHORT = 8


def checkpoint(kind: str) -> str:
    """The published checkpoint as which a base of this class is built."""
    if kind in PUBLISHED:
        return PUBLISHED[kind][0]
    said = re.search(r"\[([\w\-.]+/[\w\-.]+)\]\(https://huggingface.co/", inspect.getdoc(_of_class(kind)) or "")
    return said[1] if said else "its class's defaults"


@functools.cache
def _of_class(kind: str) -> PreTrainedConfig:
    return AutoConfig.for_model(kind)


def published(kind: str) -> dict[str, Any]:
    """The settings of the checkpoint's text model."""
    config = _of_class(kind).get_text_config(decoder=True)
    others = (*PER_LAYER, "sliding_window")  # some are properties
    per_layer = {name: getattr(config, name) for name in others if hasattr(config, name)}
    return {**vars(config), **per_layer, **PUBLISHED.get(kind, ("", {}))[1]}


def layers(kind: str) -> dict[str, Any]:
    """How many layers show every kind of layer of a published model, their kinds, and its window made short."""
    config = published(kind)
    fields = {name: value for name, value in PUBLISHED.get(kind, ("", {}))[1].items() if name not in PER_LAYER}
    per_layer = {name: list(config.get(name) or ()) for name in PER_LAYER}
    firsts = [kinds.index(one) + 1 for kinds in per_layer.values() for one in set(kinds)]
    count = fields.get("num_hidden_layers") or max(SIZES["num_hidden_layers"], *firsts, 0)
    stored = vars(_of_class(kind).get_text_config(decoder=True))
    kinds = {name: kinds[:count] for name, kinds in per_layer.items() if kinds and name in stored}
    window = {"sliding_window": SHORT} if config.get("sliding_window") else {}
    return {**fields, "num_hidden_layers": count, **kinds, **window}


CLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP |= {"image_size": 16, "patch_size": 8}
LLAMA4_VISION = {
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
    "intermediate_size": 64,
}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
QWEN_VISION |= {"patch_size": 8}
QWEN_TOKENS = {"image_token_id": 66, "video_token_id": 65, "vision_start_token_id": 64, "vision_end_token_id": 63}
QWEN_LINEAR = {**GROUPS, **LINEAR, "head_dim": 32}
GEMMA4_VISION = {**CLIP, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4}
GEMMA4_VISION |= {"pooling_kernel_size": 2, "default_output_length": 4, "position_embedding_size": 16}
GEMMA4_TOKENS = {"image_token_id": 66, "boi_token_id": 64, "eoi_token_id": 65, "video_token_id": 63}
GEMMA4_TOKENS |= {"audio_token_id": 62, "boa_token_id": 61, "eoa_token_index": 60}


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections, **more}}


# Text model, its fields, the vision model's fields, and the fields of both together.
IMAGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "gemma3_text",
        GEMMA3,
        {**CLIP, "model_type": "siglip_vision_model"},
        {"mm_tokens_per_image": 4, "image_token_index": 66, "boi_token_index": 64, "eoi_token_index": 65},
    ),
    "mistral3": (
        "mistral",
        {**GROUPS, "head_dim": 8, "sliding_window": None},
        {**CLIP, "model_type": "pixtral", "head_dim": 8},
        {"image_token_index": 66},
    ),
    "llava": ("llama", GROUPS, {**CLIP, "model_type": "clip_vision_model"}, {"image_token_index": 66}),
    "internvl": ("qwen2", GROUPS, {**CLIP, "image_size": [32, 32], "patch_size": [8, 8]}, {"image_token_id": 66}),
    "idefics3": ("llama", GROUPS, CLIP, {"image_token_id": 66, "scale_factor": 1}),
    "qwen2_5_vl": (
        "qwen2_5_vl_text",
        {**GROUPS, **_rope([1, 1, 2])},
        {**QWEN_VISION, "fullatt_block_indexes": [0]},
        QWEN_TOKENS,
    ),
    "qwen3_vl": (
        "qwen3_vl_text",
        {**GROUPS, "head_dim": 8, **_rope([2, 1, 1], mrope_interleaved=True)},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
        QWEN_TOKENS,
    ),
    "qwen3_5": (
        "qwen3_5_text",
        {**QWEN_LINEAR, **_rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)},
        QWEN_VISION,
        QWEN_TOKENS,
    ),
    "gemma4": ("gemma4_text", TEXT["gemma4_text"], GEMMA4_VISION, GEMMA4_TOKENS),
    "smolvlm": ("llama", GROUPS, CLIP, {"image_token_id": 66, "scale_factor": 1}),
    "lfm2_vl": (
        "lfm2",
        {**GROUPS, "block_auto_adjust_ff_dim": False},
        {**CLIP, "model_type": "siglip2_vision_model", "num_patches": 16},
        {"image_token_id": 66, "projector_hidden_size": 24},
    ),
    "llama4": ("llama4_text", LLAMA4, {**CLIP, **LLAMA4_VISION}, {"image_token_index": 66}),
    "paligemma": (
        "gemma",
        {**GROUPS, "head_dim": 8},
        {**CLIP, "model_type": "siglip_vision_model", "projection_dim": 32},
        {"image_token_index": 66, "projection_dim": 32},
    ),
}
# Classes of which none runs with images.
WHY_BLIND = {"llama4": "its class for images does not run in transformers 5.24"}
SEEING = {kind for kind in IMAGES if kind not in WHY_BLIND}

# Two rows with an image of four tokens (66) between its markers, and one of text alone.
IMAGE_PROMPTS = torch.tensor(
    [[5, 64, 66, 66, 66, 66, 63, 9, 20], [0, 0, 7, 64, 66, 66, 66, 66, 63], [0, 0, 0, 5, 9, 11, 8, 7, 12]]
)


def pixels(images: int, *sizes: int) -> torch.Tensor:
    return torch.rand(images, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def image_inputs(kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a tiny base is given with rows of IMAGE_PROMPTS: an image for every row that has tokens of one."""
    of_image = (ids == 66).long()
    count = int(of_image.any(1).sum())
    if kind in ("qwen2_5_vl", "qwen3_vl", "qwen3_5"):
        grid = torch.tensor([[1, 4, 4]] * count)
        return {"pixel_values": pixels(16 * count, 384), "image_grid_thw": grid, "mm_token_type_ids": of_image}
    if kind in ("idefics3", "smolvlm"):  # one for every row, which is all 0 where there is none
        values = torch.zeros(len(ids), 1, 3, 16, 16, dtype=torch.float64)
        values[of_image.any(1)] = pixels(count, 1, 3, 16, 16)
        return {"pixel_values": values}
    if kind in ("gemma4", "lfm2_vl"):  # as patches
        corners = torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], dim=-1).expand(count, -1, -1)
        if kind == "gemma4":
            values = {"pixel_values": pixels(count, 16, 48), "image_position_ids": corners}
            return {**values, "mm_token_type_ids": of_image}
        mask = torch.ones(count, 16, dtype=torch.long)
        shapes = torch.tensor([[4, 4]] * count)
        return {"pixel_values": pixels(count, 16, 192), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    size = 32 if kind in ("mistral3", "internvl") else 16
    values = {"pixel_values": pixels(count, 3, size, size)}
    if kind == "mistral3":
        values["image_sizes"] = torch.tensor([[size, size]] * count)
    return values | ({"token_type_ids": of_image} if kind in ("gemma3", "paligemma") else {})


# Small values of fields under the names that configs give them, for bases of which nothing else is known.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("decoder_layers", "linear_num_key_heads"), 2),
    **dict.fromkeys(
        (
            "linear_num_value_heads",
            "num_experts",
            "num_local_experts",
            "n_routed_experts",
            "n_head",
            "n_heads",
            "rotary_dim",
        ),
        4,
    ),
    **dict.fromkeys(("decoder_attention_heads", "mamba_n_heads", "mamba_num_heads", "state_size"), 4),
    **dict.fromkeys(("head_dim", "mamba_d_head", "mamba_head_dim", "linear_key_head_dim"), 8),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("d_model", "n_embd", "word_embed_proj_dim", "mamba_d_ssm"), 32),
    **dict.fromkeys(("ffn_dim", "d_ff", "ffn_hidden_size", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "n_shared_experts"), 1),
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "linear_value_head_dim": 8,
    "ssm_state_size": 4,
    "is_decoder": True,
}
# What some configs want otherwise: heads of another size, or as many of keys as of queries.
OTHERWISE: list[dict[str, Any]] = [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 4, "head_dim": None}]
SMALL_TREE = [[0], [1], [0, 0]]
MOST = 5_000_000  # parameters of what counts as tiny


def generic(kind: str) -> PreTrainedModel | None:
    """A tiny base of any class of transformers, with random weights in float64; None where these fields make none."""
    for otherwise in OTHERWISE:
        try:
            plain = AutoConfig.for_model(kind)
            # latent attention has as many heads of keys as of queries, of a size that follows from others
            latent = {"num_key_value_heads": 4, "head_dim": None} if "kv_lora_rank" in vars(plain) else {}
            fields = {**SIZES, **SPECIAL, **SMALL, **latent, **otherwise, **layers(kind)}
            known = {name: value for name, value in fields.items() if value is not None and hasattr(plain, name)}
            config = AutoConfig.for_model(kind, **known)
            choice = {"experts_implementation": "eager", "dtype": torch.float64}
            with torch.device("meta"):
                blank = auto_class(config).from_config(config, **choice)
            if sum(parameter.numel() for parameter in blank.parameters()) > MOST:
                continue
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                base = auto_class(config).from_config(config, **choice).eval()
            base.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=2, do_sample=False)
            return base
        except Exception:  # each config and model refuses in its own way what it cannot be
            continue
    return None


def tiny(kind: str) -> PreTrainedModel:
    """A base of the table, with random weights in float64."""
    if kind in TEXT:
        fields = {**SIZES, **SPECIAL, **layers(kind), **TEXT[kind]}
        fields.pop("model_type", None)
        config = AutoConfig.for_model(kind, **fields)
        reads = auto_class(config)
    else:
        text_type, text, vision, fields = IMAGES[kind]
        text = {**SIZES, **SPECIAL, **layers(text_type), **text, "model_type": text_type}
        config = AutoConfig.for_model(kind, text_config=text, vision_config=vision, **fields)
        reads = AutoModelForImageTextToText if kind in SEEING else auto_class(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        choice = {"experts_implementation": "eager", "dtype": torch.float64}  # experts in groups know no float64
        base = reads.from_config(config, **choice).eval()
        for name, parameter in base.named_parameters():
            if name.endswith("mm_input_projection_weight"):  # which starts as zeros
                torch.nn.init.normal_(parameter.data)
        return base


def with_images(kind: str, base: PreTrainedModel, models: dict[str, Any]) -> tuple[str, str]:
    """Whether a base drafts behind prompts with images, alone, in a batch and beside text; and why not.

    Raises:
        AssertionError: a text differs from the base's, or the base does not see the image.
    """
    if kind not in SEEING:
        return "no", WHY_BLIND[kind]
    for rows in ([0], [0, 1], [0, 1, 2], [2, 1]):
        ids = IMAGE_PROMPTS[rows]
        inputs = {"input_ids": ids, "attention_mask": (ids > 0).long(), **image_inputs(kind, ids)}
        grey = {**inputs, "pixel_values": inputs["pixel_values"].sign() * 0.5}
        with torch.no_grad():
            assert not torch.equal(base(**inputs).logits, base(**grey).logits), kind
        call = {**inputs, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
        expected = base.generate(**call)
        for family, model in models.items():
            found = model.generate(**call, draft_tree=SMALL_TREE, return_dict_in_generate=True)
            assert torch.equal(found.sequences, expected), (kind, family, rows)
            if getattr(found, "accepted_lengths", None) is None:
                return "no", next(iter(model._base_reader().refused.values()), "").partition(" (")[0]
    return "yes", ""


def row(kind: str) -> tuple[str, str, str, str]:
    """Whether a base drafts for text and with images, whose decoder layers heads have on it, and why it falls back.

    Raises:
        AssertionError: a family's greedy text differs from the base's, or calls do not what `why_no_drafts` says.
    """
    base = tiny(kind) if kind in (*TEXT, *IMAGES) else generic(kind)
    assert base is not None, kind
    ids = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 9, 10, 11]])
    if kind not in (*TEXT, *IMAGES):  # padding in float64 gives NaN in some of these, in transformers itself
        ids = ids.where(ids > 0, 3)
    call = {"attention_mask": (ids > 0).long(), "max_new_tokens": 6, "do_sample": False}
    models = {}
    for family, fields in FAMILIES.items():
        try:
            models[family] = fresh_heads(family, base, **fields)
        except ValueError as error:  # of bases without attention, on which no head can have a layer, and of some others
            refused = str(error).partition(":")[0]
    if not models:
        return "no", "", "", refused
    (reason,) = {model.why_no_drafts() for model in models.values()}
    if reason is not None:  # some of these take no padding
        ids, call = ids.where(ids > 0, 3), {**call, "attention_mask": None}
    expected = base.generate(ids, **call)
    for family, model in models.items():
        # with a tree by name, for without one a call drafts only where it pays
        output = model.generate(ids, **call, draft_tree=SMALL_TREE, return_dict_in_generate=True)
        assert (getattr(output, "accepted_lengths", None) is None) == (reason is not None), (kind, family)
        assert torch.equal(output.sequences, expected), (kind, family)
    if reason is not None:
        return "no", "", "", reason.partition(" (")[0]
    eagle = models.get("eagle")
    own = "" if eagle is None else "a LLaMA's" if eagle.config.layer_config else "its own"
    seen, why = with_images(kind, base, models) if kind in IMAGES else ("", "")
    return "yes", seen, own, why


def exactness(kind: str) -> str:
    """Whether a base that drafts can be exact in bfloat16, and if not, why.

    Raises:
        AssertionError: bits of scores differ all the same, of a drafted text or of a row alone.
    """
    base = (tiny(kind) if kind in (*TEXT, *IMAGES) else generic(kind)).to(torch.bfloat16)
    ids = torch.tensor([[0, 0, 5, 9, 11], [7, 8, 9, 10, 11]])
    plain = base(ids[1:]).logits
    try:
        exact(base)
    except Inexact as error:
        return f"no: {str(error).partition(' cannot be made exact: ')[2] or error}".rstrip(".")
    call = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    call |= {"eos_token_id": None, "pad_token_id": 0}
    differing = (base(ids[1:]).logits - plain).abs().amax(-1)
    assert differing.median() < 0.1 * plain.abs().max(), kind  # at some positions a router chooses other experts
    alone, together = base.generate(ids[:1, 2:], **call), base.generate(ids, attention_mask=(ids > 0).long(), **call)
    drafted = fresh_heads("medusa", base).generate(ids[:1, 2:], **call, draft_tree=SMALL_TREE)
    assert all(map(torch.equal, alone.logits, drafted.logits)), kind
    beside = [(one[0], row_of_two[0]) for one, row_of_two in zip(alone.logits, together.logits)]
    if (beside[0][0] - beside[0][1]).abs().max() > 0.1 * beside[0][0].abs().max():
        return "yes, but for padding, which it reads"
    assert all(torch.equal(*pair) for pair in beside), kind
    return "yes"


def others() -> list[str]:
    """All other classes of this version of transformers that can be built tiny from fields of general names."""
    kinds = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(TEXT) - set(IMAGES))
    return [kind for kind in kinds if generic(kind) is not None]


HEADER = (
    "| Base (`model_type`) | Built as | Drafts for text | With images | Decoder layers of heads | "
    "Why it decodes by itself | Exact |\n|---|---|---|---|---|---|---|"
)


def table() -> str:
    """All rows, as Markdown."""
    return "\n".join([HEADER, *(line(kind, row(kind)) for kind in [*TEXT, *IMAGES, *others()])])


def line(kind: str, tried: tuple[str, str, str, str]) -> str:
    """A row as it is written."""
    return f"| `{kind}` | {checkpoint(kind)} | {' | '.join(tried)} | {exactness(kind) if tried[0] == 'yes' else ''} |"


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
