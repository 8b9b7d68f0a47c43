"""Which decoder layer a draft head has: what its config says, as far as its tensors bear it out."""

import math
from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, Qwen2Config, Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.formats.layout import Reader

KEPT = ["max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "hidden_act"]
KEPT += ["initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"]
ATTENTION = "self_attn."


def read_layer_config(
    reader: Reader, prefix: str, config: Mapping[str, Any], hidden_size: int, vocab_size: int
) -> PreTrainedConfig:
    """The config of the layer whose tensors stand under a prefix; sizes are those of the tensors, and noted if others.

    Args:
        reader: of the file.
        prefix: of the layer.
        config: of the draft head, a Llama's fields.
        hidden_size, vocab_size: of what the layer gives out, and of the base.

    Raises:
        ValueError: there is no config, or its number of heads does not divide the tensors.
    """
    if not config.get("num_attention_heads"):
        raise ValueError(
            f"{reader.name!r} has no config.json that says num_attention_heads: tensors do not tell into how many "
            "heads attention is divided, give the folder that has it."
        )
    rows = {name: reader.take(f"{prefix}{ATTENTION}{name}_proj.weight").shape[0] for name in ("q", "k")}
    heads = config["num_attention_heads"]
    head_dim, rest = divmod(rows["q"], heads)
    groups, rest_of_groups = divmod(rows["k"], head_dim) if head_dim else (0, 1)
    if rest or rest_of_groups or heads % groups:
        raise ValueError(
            f"{reader.name!r} has query and key projections of {rows['q']} and {rows['k']} rows, which {heads} "
            "attention heads (num_attention_heads of its config.json) do not divide: correct the config."
        )
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": reader.take(f"{prefix}mlp.gate_proj.weight").shape[0],
        "num_key_value_heads": groups,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
    }
    for name, size in sizes.items():
        reader.note_difference(config, name, size)
    fields = {name: config[name] for name in KEPT if config.get(name) is not None}
    for name in ("rope_theta", "rms_norm_eps", "max_position_embeddings"):
        for holder in (fields, fields.get("rope_parameters") or {}, fields.get("rope_scaling") or {}):
            value = holder.get(name, 1) if isinstance(holder, Mapping) else 1
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                problem = f"{name} {str(value)[:40]!r}, expected a number above 0"
                raise ValueError(f"{reader.name!r} says {problem}: correct its config.json.")
    fields |= sizes | {"num_attention_heads": heads, "num_hidden_layers": 1, "tie_word_embeddings": False}
    if config.get("sliding_window") and "sliding_attention" in (config.get("layer_types") or ()):
        fields |= {"sliding_window": config["sliding_window"], "layer_types": list(config["layer_types"])}
        fields["num_hidden_layers"] = len(config["layer_types"])
    if f"{prefix}{ATTENTION}q_norm.weight" in reader:
        return Qwen3Config(**fields, use_sliding_window="sliding_window" in fields)
    attention, mlp = f"{prefix}{ATTENTION}o_proj.bias" in reader, f"{prefix}mlp.gate_proj.bias" in reader
    if f"{prefix}{ATTENTION}q_proj.bias" in reader and not (attention or mlp):  # as Qwen2 has it
        return Qwen2Config(**fields)
    return LlamaConfig(**fields, attention_bias=attention, mlp_bias=mlp)


def llama_fields(layer: PreTrainedConfig, vocab_size: int) -> dict[str, Any]:
    """A Llama config for one layer, as projects of before transformers 5 read it: rotary fields on the top level."""
    rope = dict(getattr(layer, "rope_parameters", None) or {})
    theta = rope.pop("rope_theta", 10000.0)
    rope.pop("type", None)
    scaled = rope.get("rope_type", "default") != "default"
    heads = layer.num_attention_heads
    return {
        "model_type": "llama",
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
        "head_dim": getattr(layer, "head_dim", None) or layer.hidden_size // heads,
        "num_hidden_layers": 1,
        "max_position_embeddings": layer.max_position_embeddings,
        "rms_norm_eps": layer.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": rope if scaled else None,
        "hidden_act": layer.hidden_act,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }
