"""GGUF files: a base as an ordinary model, so that no command unpacks it again; its modules; and drafters.

Drafters are those of llama.cpp: `general.architecture` is `dflash` for DFlash, DSpark and DFlash 2 alike, which their
tensors tell apart, or `eagle3`. They are read as z-lab and vLLM would have saved them, and then as these.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file, extract_commit_hash

from hf_drafthead.formats.disk import Source, new_folder
from hf_drafthead.formats.eagle3 import IDS, WRITTEN_FOR
from hf_drafthead.modeling.gguf_files import HUB, gguf_arguments, load_tokenizer, reading_gguf, split_gguf


def unpack_gguf(source: str | os.PathLike, folder: str | os.PathLike, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the weights of a GGUF file as safetensors, with config and tokenizer, chat template included.

    Args:
        source: path of the file, or `org/name/file.gguf` on the Hub.
        folder: new folder.
        dtype: in which the weights are kept; they are unpacked in float32 and rounded once.

    Raises:
        OSError: the package gguf is missing, the file cannot be read, or the folder exists.
        ValueError: the source does not name a GGUF file.
    """
    place, file = split_gguf(os.fspath(source))
    if file is None:
        raise ValueError(f"{os.fspath(source)!r} names no GGUF file: give models/name.gguf, or org/name/name.gguf.")
    with new_folder(folder) as staged:
        arguments: dict[str, Any] = gguf_arguments(place, {"gguf_file": file}, {})
        with reading_gguf(os.path.join(place, file)):
            model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **arguments)
        model.to(dtype).save_pretrained(staged)
        load_tokenizer(Path(place, file) if os.path.isdir(place) else f"{place}/{file}").save_pretrained(staged)


# What llama.cpp calls the parts of a block, and of a module for multi-token prediction, which is the last block.
PARTS = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_sinks": "self_attn.attention_sink_bias",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"{part}_conv_base": f"{name}_conv.base_kernel" for part, name in (("attn", "attention"), ("ffn", "mlp"))},
    **{f"{part}_conv_proj": f"{name}_conv.kernel_projection" for part, name in (("attn", "attention"), ("ffn", "mlp"))},
}
# And those beside the blocks of a drafter.
BESIDE = {
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "output": "lm_head",
    "token_embd": "embed_tokens",
    "d2t": "d2t",
    **{f"markov_w{number}": f"markov_head.markov_w{number}" for number in (1, 2)},
    "conf_proj": "confidence_head.proj",
    **{f"selector_{part}": f"candidate_selector.{part}_codebook" for part in ("predecessor", "successor")},
    "selector_hidden": "candidate_selector.hidden_projection",
    **{f"fc_norm.{number}": f"fc_norm.{number}" for number in range(8)},
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
    "vocab_size": "vocab_size",
    "logit_scale": "output_multiplier",
    **{name: name for name in ("final_logit_softcapping", "input_embedding_scale", "sample_from_anchor", "block_size")},
    **{name: name for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")},
    **{name: name for name in ("norm_before_residual", "norm_before_fc", "target_hidden_size")},
}
LAYERS = ("target_layers", "extract_layers")  # inputs of layers that are read
SLIDES = ("attention.sliding_window_pattern", "sliding_window_pattern")
# That say the same again, or say how a file was made.
LEFT_OUT = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "expert_count",
    *LAYERS,
    *SLIDES,
)
DRAFTERS = ("dflash", "eagle3")
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")  # whose norms llama.cpp stores as 1 + weight
EXPERTS = "mlp.experts."


def _opened(place: str, file: str, hub: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[Any]]:
    """Where a file lies here, what it says, and its tensors as the package gguf has them."""
    gguf_arguments(place, {"gguf_file": file}, {name: hub[name] for name in HUB if name in hub})
    from gguf import GGUFReader  # an optional package

    with reading_gguf(named := os.path.join(place, file)):
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
    tensors: dict[str, Tensor] = {}
    _, said, stored = _opened(place, file, hub)
    named, kind = os.path.join(place, file), said["general.architecture"]
    blocks = [(int(tensor.name.split(".")[1]), tensor) for tensor in stored if tensor.name.startswith("blk.")]
    with reading_gguf(named):
        unpacked = {
            (block, tensor.name.split(".", 2)[2].removesuffix(".weight")): _unpacked(tensor)
            for block, tensor in blocks
            if block >= first
        }
    if unpacked and kind not in ARCHITECTURES:
        raise ValueError(
            f"{named!r} holds a module for multi-token prediction of the architecture {kind!r}: known are those of "
            f"{', '.join(ARCHITECTURES)}; take it from the safetensors of the original repository, with modules_from=."
        )
    for (block, part), tensor in unpacked.items():
        if part not in PARTS:
            raise ValueError(f"{named!r} has 'blk.{block}.{part}.weight', which is not known here: get it again.")
        name = PARTS[part]
        tensor = tensor - 1 if name.endswith("norm") else tensor
        tensor = tensor[None] if name.endswith("shared_expert_gate") and tensor.dim() == 1 else tensor
        tensors[f"model.layers.{block}.{name}" + ("" if EXPERTS in name else ".weight")] = tensor
    for gate in [name for name in tensors if name.endswith(f"{EXPERTS}gate_proj")]:  # as transformers joins them
        joined = gate.replace("gate_proj", "gate_up_proj")
        tensors[joined] = torch.cat([tensors.pop(gate), tensors.pop(gate.replace("gate_proj", "up_proj"))], dim=1)
    return tensors


def gguf_source(name: str, hub: Mapping[str, Any]) -> Source:
    """A drafter in a GGUF file, with names and config as the other layouts have them."""
    place, file = split_gguf(name)
    path, said, stored = _opened(place, file or "", hub)
    kind = said.get("general.architecture")
    if kind not in DRAFTERS:
        raise ValueError(
            f"{name!r} has the architecture {kind!r}: of drafters in GGUF files those of llama.cpp are known, "
            f"{' and '.join(map(repr, DRAFTERS))}; get one of these, or safetensors. A base with modules of its own is "
            "loaded with MtpForCausalLM.from_base."
        )
    with reading_gguf(name):
        tensors = {_name_of(name, tensor.name): _of_drafter(tensor) for tensor in stored if tensor.name != FREQUENCIES}
        factors = next((_unpacked(tensor).tolist() for tensor in stored if tensor.name == FREQUENCIES), None)
    config = _config_of(name, kind, {key: value for key, value in said.items() if value is not None}, tensors, factors)
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
    bare, kind = (
        stored.removesuffix(".weight").removesuffix(".bias"),
        ".bias" if stored.endswith(".bias") else ".weight",
    )
    block, _, part = bare.removeprefix("blk.").partition(".") if bare.startswith("blk.") else ("", "", bare)
    found = PARTS.get(part) if block else BESIDE.get(part)
    if found is None:
        raise ValueError(f"{name!r} has {stored!r}, which is not known here: these are heads of another kind.")
    return (f"layers.{block}.{found}" if block else found) + ("" if found.endswith(BARE) else kind)


def _config_of(
    name: str, kind: str, said: Mapping[str, Any], tensors: Mapping[str, Tensor], factors: list[float] | None
) -> dict[str, Any]:
    """What a config.json of z-lab (dflash) or of vLLM (eagle3) says."""
    own = {key.removeprefix(f"{kind}."): value for key, value in said.items() if key.startswith(f"{kind}.")}
    config: dict[str, Any] = {"model_type": "qwen3" if kind == "dflash" else "llama"}
    scaling = {
        key.removeprefix("rope.scaling."): value for key, value in own.items() if key.startswith("rope.scaling.")
    }
    for key, value in own.items():
        if key in FIELDS:
            config[FIELDS[key]] = value
        elif key not in LEFT_OUT and not key.startswith("rope.scaling."):
            config[f"{kind}.{key}"] = value  # refused by name, unless it says nothing
    heads = config.get("num_attention_heads") or 1
    turned, wide = own.get("rope.dimension_count"), config.get("head_dim") or config.get("hidden_size", 0) // heads
    if turned not in (None, wide):
        config["partial_rotary_factor"] = turned / wide
    if scaling.get("type", "none") != "none":
        config["rope_scaling"] = {ROPE.get(key, key): value for key, value in scaling.items()}
    if factors is not None:
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        config["rope_scaling"] |= {"factor": 1.0, "attention_factor": 1.0}
        config["rope_scaling"]["original_max_position_embeddings"] = config.get("max_position_embeddings")
    layers = next((list(own[key]) for key in LAYERS if key in own), None)
    slides = next((list(own[key]) for key in SLIDES if key in own), None)
    if slides is not None or "sliding_window" in config:
        slides = slides or [True] * config.get("num_hidden_layers", 1)
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
    if "vocab_size" not in config and (tokens := said.get("tokenizer.ggml.tokens")):
        config["vocab_size"] = len(tokens)
    if kind == "eagle3":  # whose rows pair neighbours, as all of a Llama in such files
        return {**config, IDS: layers, WRITTEN_FOR: "vllm", "rope_is_neox_style": False}
    markov = tensors.get("markov_head.markov_w1.weight")
    config |= {
        "target_layer_ids": layers and [layer - 1 for layer in layers],
        "is_causal": config.get("is_causal", False),
    }
    config |= {"mask_token_id": said.get("tokenizer.ggml.mask_token_id")}
    config.setdefault("sample_from_anchor", markov is not None)
    if markov is not None:
        config |= {"markov_rank": markov.shape[1], "markov_head_type": "vanilla"}
        config["enable_confidence_head"] = "confidence_head.proj.weight" in tensors
        config.setdefault("vocab_size", len(markov))
    return config


# Of how rotary positions are scaled.
ROPE = {
    "type": "rope_type",
    "original_context_length": "original_max_position_embeddings",
    "attn_factor": "attention_factor",
}
ROPE |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
