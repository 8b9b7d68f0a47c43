"""A base in a GGUF file as an ordinary model, so that no command unpacks it again."""

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_drafthead.formats.disk import new_folder
from hf_drafthead.modeling.gguf_files import gguf_arguments, load_tokenizer, reading_gguf, split_gguf


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
