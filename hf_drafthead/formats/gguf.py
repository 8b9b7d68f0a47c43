"""A base in a GGUF file as an ordinary model, so that no command unpacks it again; and the modules that it may hold."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

from hf_drafthead.formats.disk import new_folder
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
    "post_attention_norm": "post_attention_layernorm",
    **{f"attn_{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
ARCHITECTURES = ("qwen35", "qwen35moe", "qwen3next")  # whose norms llama.cpp stores as 1 + weight
EXPERTS = "mlp.experts."


def gguf_blocks(place: str, file: str, first: int, hub: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of the blocks from number `first` on, unpacked, under the names that DeepSeek's files would have.

    Args:
        place, file: folder or Hub id, and the GGUF file there.
        first: of the blocks, the base having as many layers.
        hub: keyword arguments of a download.

    Raises:
        OSError: the package gguf is missing, or the file cannot be read.
        ValueError: a tensor has a name that is not known, or the architecture is another than Qwen's.
    """
    gguf_arguments(place, {"gguf_file": file}, {name: hub[name] for name in HUB if name in hub})
    from gguf import GGUFReader, dequantize  # an optional package

    tensors: dict[str, torch.Tensor] = {}
    with reading_gguf(named := os.path.join(place, file)):
        reader = GGUFReader(named if os.path.isfile(named) else cached_file(place, file, **hub))
        kind = reader.fields["general.architecture"].contents()
        block_tensors = [tensor for tensor in reader.tensors if tensor.name.startswith("blk.")]
        blocks = [(int(tensor.name.split(".")[1]), tensor) for tensor in block_tensors]
        unpacked = {
            (block, tensor.name.split(".", 2)[2].removesuffix(".weight")): torch.from_numpy(
                dequantize(tensor.data, tensor.tensor_type).copy()
            )
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
