"""GGUF files: the modules of a base in one, and drafters.

Drafters are those of llama.cpp: `general.architecture` is `dflash` for DFlash, DSpark and DFlash 2 alike, which their
tensors tell apart, or `eagle3`. They are read as z-lab and vLLM would have saved them, and then as these.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file, extract_commit_hash

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.eagle3 import IDS, WRITTEN_FOR
from hf_drafthead.formats.fields import said
from hf_drafthead.modeling.base_model import reading_gguf, split_gguf

# What llama.cpp calls the parts of a block, and of a module for multi-token prediction, which is the last block.
PARTS = {
    **{f"nextn.{part}": part for part in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    **{f"nextn.shared_head_{part}": f"shared_head.{part}" for part in ("norm", "head")},
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    **dict.fromkeys(("post_attention_norm", "ffn_norm"), "post_attention_layernorm"),
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.attention_sink_bias",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
for _part in ("gate", "up", "down"):
    PARTS |= {f"ffn_{_part}": f"mlp.{_part}_proj", f"ffn_{_part}_exps": f"mlp.experts.{_part}_proj"}
    PARTS[f"ffn_{_part}_shexp"] = f"mlp.shared_expert.{_part}_proj"
for _part, _name in (("attn", "attention"), ("ffn", "mlp")):
    PARTS |= {f"{_part}_conv_base": f"{_name}_conv.base_kernel"}
    PARTS |= {f"{_part}_conv_proj": f"{_name}_conv.kernel_projection"}
# And those beside the blocks of a drafter.
BESIDE = {
    **{name: name for name in ("fc", "d2t", *(f"fc_norm.{number}" for number in range(8)))},
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    **{f"markov_w{number}": f"markov_head.markov_w{number}" for number in (1, 2)},
    "conf_proj": "confidence_head.proj",
    **{f"selector_{part}": f"candidate_selector.{part}_codebook" for part in ("predecessor", "successor")},
    "selector_hidden": "candidate_selector.hidden_projection",
}
BARE = ("codebook", "base_kernel", "d2t")  # ends of names without .weight
# Keys behind the architecture's name, and the fields of config.json that they are.
FIELDS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.causal": "is_causal",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "logit_scale": "output_multiplier",
}
ALIKE = """vocab_size final_logit_softcapping input_embedding_scale sample_from_anchor block_size conv_kernel_size
conv_group_size selector_rank selector_top_k norm_before_residual norm_before_fc target_hidden_size"""
FIELDS |= {name: name for name in ALIKE.split()}
LAYERS = ("target_layers", "extract_layers")  # inputs of layers that are read
SLIDES = ("attention.sliding_window_pattern", "sliding_window_pattern")
# That say the same again, or say how a file was made.
LEFT_OUT = ("attention.value_length", "rope.dimension_count", "rope.dimension_sections", "expert_count")
DRAFTERS = ("dflash", "eagle3")
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")  # whose norms llama.cpp stores as 1 + weight
EXPERTS = "mlp.experts."


def _opened(place: str, file: str, hub: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[Any]]:
    """Where a file lies here, what it says, and its tensors as the package gguf has them."""
    with reading_gguf(named := os.path.join(place, file)):
        from gguf import GGUFReader  # an optional package

        path = named if os.path.isfile(named) else cached_file(place, file, **hub)
        reader = GGUFReader(path)
        return path, {key: value.contents() for key, value in reader.fields.items()}, list(reader.tensors)


def gguf_says(place: str, file: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the header of a file says."""
    return _opened(place, file, hub)[1]


def _unpacked(tensor: Any) -> Tensor:
    """A tensor; what is packed in float32."""
    from gguf import dequantize

    if tensor.tensor_type.name.startswith("I"):  # whole numbers
        return torch.from_numpy(tensor.data.copy()).long()
    return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def gguf_blocks(place: str, file: str, first: int, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the blocks from number `first` on, unpacked, under the names that DeepSeek's files would have."""
    _, says, stored = _opened(place, file, hub)
    named, kind = os.path.join(place, file), says["general.architecture"]
    own = [item for item in stored if item.name.startswith("blk.") and int(item.name.split(".")[1]) >= first]
    if own and kind not in ARCHITECTURES:
        what = f"a module for multi-token prediction of the architecture {kind!r}: known are {', '.join(ARCHITECTURES)}"
        raise ValueError(f"{named!r} holds {what}; take it from the original repository, with modules_from=.")
    names = [f"model.{_name_of(named, item.name)}" for item in own]
    with reading_gguf(named):
        tensors = dict(zip(names, map(_unpacked, own)))
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = tensor - 1
        elif name.endswith("shared_expert_gate.weight") and tensor.dim() == 1:
            tensors[name] = tensor[None]
    for gate in [name for name in tensors if name.endswith(f"{EXPERTS}gate_proj")]:  # as transformers joins them
        joined = gate.replace("gate_proj", "gate_up_proj")
        tensors[joined] = torch.cat([tensors.pop(gate), tensors.pop(gate.replace("gate_proj", "up_proj"))], dim=1)
    return tensors


def gguf_source(name: str, hub: Mapping[str, Any]) -> Source:
    """A drafter in a GGUF file, with names and config as the other layouts have them."""
    place, file = split_gguf(name)
    path, says, stored = _opened(place, file or "", hub)
    kind = says.get("general.architecture")
    if kind not in DRAFTERS:
        what = f"has the architecture {kind!r}: of drafters in GGUF files {' and '.join(map(repr, DRAFTERS))} are known"
        raise ValueError(f"{name!r} {what}; a base with modules of its own is loaded with MtpForCausalLM.from_base.")
    with reading_gguf(name):
        tensors = {_name_of(name, tensor.name): _of_drafter(tensor) for tensor in stored if tensor.name != FREQUENCIES}
        factors = next((_unpacked(tensor).tolist() for tensor in stored if tensor.name == FREQUENCIES), None)
    about = {key: value for key, value in says.items() if value is not None}
    config = _config_of(name, kind, about, tensors, factors)
    if "d2t" in tensors and len(tensors["d2t"].unique()) == len(tensors["d2t"]) > 1:  # ids; others have offsets
        tensors["d2t"] = tensors["d2t"] - torch.arange(len(tensors["d2t"]))
    return Source(name, (path,), config, tensors, extract_commit_hash(path, None))


FREQUENCIES = "rope_freqs.weight"  # by what the frequencies of rotary positions are divided


def _of_drafter(tensor: Any) -> Tensor:
    """A tensor in the type in which it is kept: what was packed or narrower in bfloat16."""
    whole = _unpacked(tensor)
    return whole if not whole.is_floating_point() or tensor.tensor_type.name == "F32" else whole.to(torch.bfloat16)


def _name_of(name: str, stored: str) -> str:
    """What a tensor is called elsewhere."""
    bare, ending = (stored[:-5], ".bias") if stored.endswith(".bias") else (stored.removesuffix(".weight"), ".weight")
    _, block, part = bare.split(".", 2) if bare.startswith("blk.") else ("", "", bare)
    found = (PARTS if block else BESIDE).get(part)
    if found is None:
        raise ValueError(f"{name!r} has {stored!r}, which is not known here: these are heads of another kind.")
    return (f"layers.{block}." if block else "") + found + ("" if found.endswith(BARE) or EXPERTS in found else ending)


def _config_of(
    name: str, kind: str, says: Mapping[str, Any], tensors: Mapping[str, Tensor], factors: list[float] | None
) -> dict[str, Any]:
    """What a config.json of z-lab (dflash) or of vLLM (eagle3) says; what is in no table here is refused there."""
    own = {key.removeprefix(f"{kind}."): value for key, value in says.items() if key.startswith(f"{kind}.")}
    scaling = {key.removeprefix(SCALED): own.pop(key) for key in list(own) if key.startswith(SCALED)}
    left_out = {key: own.pop(key, None) for key in (*LEFT_OUT, *LAYERS, *SLIDES)}
    layers, slides = (said(name, left_out, *keys) for keys in (LAYERS, SLIDES))
    config: dict[str, Any] = {"model_type": "qwen3" if kind == "dflash" else "llama"}
    config |= {FIELDS.get(key, f"{kind}.{key}"): value for key, value in own.items()}
    heads, turned = config.get("num_attention_heads") or 1, left_out["rope.dimension_count"]
    if turned not in (None, wide := config.get("head_dim") or config.get("hidden_size", 0) // heads):
        config["partial_rotary_factor"] = turned / wide
    if scaling and scaling.setdefault("type", "linear") != "none":  # as llama.cpp takes it
        config["rope_scaling"] = {ROPE.get(key, key): value for key, value in scaling.items()}
    if factors is not None and "rope_scaling" in config:
        config[FREQUENCIES] = "beside another scaling"  # and so a field that is refused
    elif factors is not None:
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        config["rope_scaling"] |= {"factor": 1.0, "attention_factor": 1.0}
        config["rope_scaling"]["original_max_position_embeddings"] = config.get("max_position_embeddings")
    if slides is not None or "sliding_window" in config:
        slides = slides or [True] * config.get("num_hidden_layers", 1)
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if tokens := says.get("tokenizer.ggml.tokens"):
        config.setdefault("vocab_size", len(tokens))
    if kind == "eagle3":  # whose rows pair neighbours, as all of a Llama in such files
        return {**config, IDS: layers and list(layers), WRITTEN_FOR: "vllm", "rope_is_neox_style": False}
    markov = tensors.get("markov_head.markov_w1.weight")
    config["target_layer_ids"] = layers and [layer - 1 for layer in layers]
    config["mask_token_id"] = says.get("tokenizer.ggml.mask_token_id")
    config = {"is_causal": False, "sample_from_anchor": markov is not None} | config
    if markov is not None:
        config |= {"markov_rank": markov.shape[1], "markov_head_type": "vanilla"}
        config["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
        config.setdefault("vocab_size", len(markov))
    return config


SCALED = "rope.scaling."
# Of how rotary positions are scaled.
ROPE = {"type": "rope_type", "original_context_length": "original_max_position_embeddings"}
ROPE |= {"attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
