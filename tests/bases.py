"""Tiny base models of many architectures, built from a config: no network, float64 where tokens are compared."""

from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hf_drafthead.bases.releases import NEWEST, numbers

VOCABULARY = 67
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Weights are drawn wider than models are usually initialised: else a random model repeats one token for ever.
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 4},
    "llama-gqa": {"model_type": "llama", "num_key_value_heads": 2},
    "llama-tied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "mistral-sliding": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 8},
    "gemma2": {
        "model_type": "gemma2",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    # The last two of four layers read the keys and values of the two before.
    "gemma4-sharing": {
        "model_type": "gemma4_text",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
    },
    "gemma3n-sharing": {
        "model_type": "gemma3n_text",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
    },
    "gpt-neox": {"model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2"},
    "mpt": {"model_type": "mpt", "d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 512},
    "mamba": {"model_type": "mamba", "state_size": 4, "num_hidden_layers": 2},
}
# Bases with layers that keep a state in the place of keys, of every kind of mixer that drafts, and several classes.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
}
# all of the experts, for which of them a token asks is decided by rounding where two are alike
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPERTS["shared_expert_intermediate_size"] = 16
GROUPED = {"num_hidden_layers": 4, "num_key_value_heads": 2}
CONVOLUTION = {**GROUPED, "layer_types": ["conv", "full_attention", "conv", "conv"]}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 2}
LATENT = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
KIMI = {**DELTA, **LATENT, **EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 4}
KIMI |= {"linear_num_heads": 4, "linear_head_dim": 8, "n_routed_experts": 2}
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3.5": {"model_type": "qwen3_5_text", **GROUPED, **DELTA, "head_dim": 16},
    "qwen3.5-moe": {"model_type": "qwen3_5_moe_text", **GROUPED, **DELTA, **EXPERTS, "head_dim": 16},
    "qwen3-next": {"model_type": "qwen3_next", **GROUPED, **DELTA, **EXPERTS, "head_dim": 16},
    "olmo-hybrid": {"model_type": "olmo_hybrid", **GROUPED, **DELTA},
    "kimi-linear": {"model_type": "kimi_linear", **KIMI, "num_experts_per_token": 2},
    "lfm2": {"model_type": "lfm2", **CONVOLUTION, "block_auto_adjust_ff_dim": False},
    "lfm2-moe": {"model_type": "lfm2_moe", **CONVOLUTION, **EXPERTS},
    "granite-hybrid": {
        "model_type": "granitemoehybrid",
        **GROUPED,
        **MAMBA,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
    },
    "nemotron-h": {
        "model_type": "nemotron_h",
        **GROUPED,
        "hybrid_override_pattern": "M-M*",
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 2,
    },
    "bamba": {"model_type": "bamba", **GROUPED, **MAMBA, "attn_layer_indices": [1]},
    "falcon-h1": {"model_type": "falcon_h1", **GROUPED, **MAMBA, "mamba_d_ssm": 64},
    "mamba2": {"model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 4, "n_groups": 2},
    "zamba2": {
        "model_type": "zamba2",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "mamba_d_state": 4,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "num_mem_blocks": 1,
        "attention_head_dim": 16,
    },
}
# Whether transformers is older than the release that the docs speak of: a base here and there behaves otherwise there.
EARLIER = numbers(transformers.__version__) < numbers(NEWEST)
CANNOT_SDPA = {"gemma2", "mpt", "mamba"}


def tiny_base(
    kind: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    attn_implementation: str | None = "sdpa",
    **overrides: Any,
) -> PreTrainedModel:
    """A random causal language model in eval mode.

    Args:
        kind: one of KINDS or HYBRID; of the latter states are computed in float32, whatever the dtype.
        seed: of the weights.
        dtype: of the weights.
        attn_implementation: None, or a kind of CANNOT_SDPA, leaves the choice to transformers.
        overrides: config fields.
    """
    fields = {**SIZES, **SPECIAL, **{**KINDS, **HYBRID}[kind], **overrides}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if attn_implementation == "sdpa" and kind in CANNOT_SDPA:
        attn_implementation = None
    choice = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        base = AutoModelForCausalLM.from_config(config, dtype=dtype, **choice).eval()
        for name, parameter in base.named_parameters():
            if name.endswith(("A_log", "dt_bias")):  # else all heads of random weights forget alike, and at once
                torch.nn.init.normal_(parameter.data, std=1.0)
        return base
