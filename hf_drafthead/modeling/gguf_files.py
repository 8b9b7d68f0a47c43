"""Bases in a GGUF file, as llama.cpp has them: transformers reads them, unpacked into ordinary weights."""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import cached_file, quantization_config

from hf_drafthead.modeling.files import refusing

HUB = ("revision", "token", "local_files_only", "cache_dir")  # arguments of a download


def split_gguf(name: str) -> tuple[str, str | None]:
    """A name of a base as a folder or Hub id, and the GGUF file there, if it names one.

    >>> split_gguf("models/llama.Q4_1.gguf"), split_gguf("org/name")
    (('models', 'llama.Q4_1.gguf'), ('org/name', None))
    """
    if not name.lower().endswith(".gguf") or os.path.isdir(name):
        return name, None
    place, _, file = name.rpartition("/")
    return place or os.curdir, file


def gguf_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `from_pretrained`, by which a GGUF file among them is unpacked: in its blocks, as transformers may
    leave them, weights can be neither saved nor computed in bfloat16 without a conversion in every product."""
    if arguments.get("gguf_file") is None:
        return dict(arguments)
    config = getattr(quantization_config, "GgufConfig", None)  # in older versions weights are always unpacked
    unpacked = {"quantization_config": config(dequantize=True)} if config is not None else {}
    return {**unpacked, **{name: value for name, value in arguments.items() if value is not None}}


def reading_gguf(named: str) -> AbstractContextManager[None]:
    """Turn what a damaged or unknown GGUF file makes its readers raise into one line."""
    return refusing(OSError, f"the GGUF file {named!r} cannot be read", "give another copy.")


def load_tokenizer(name: str | os.PathLike, gguf_file: str | None = None, **arguments: Any) -> Any:
    """The tokenizer of a model, in its folder, repository or GGUF file; a fast one, where there is one."""
    place, file = split_gguf(os.fspath(name)) if gguf_file is None else (os.fspath(name), gguf_file)
    if file is None:
        tokenizer = AutoTokenizer.from_pretrained(place, **arguments)
        if getattr(tokenizer, "is_fast", False):
            return tokenizer
        # mistral-common's tokenizer comes first where it is installed; the file of a fast one often lies beside its own
        hub: dict[str, Any] = {name: arguments[name] for name in HUB if name in arguments}
        fast = cached_file(place, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **hub)
        return tokenizer if fast is None else PreTrainedTokenizerFast.from_pretrained(place, **arguments)
    with reading_gguf(os.path.join(place, file)):
        tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file, **arguments)
        config = AutoConfig.from_pretrained(place, gguf_file=file, **arguments)
    for kind in ("bos", "eos", "unk", "pad"):  # older versions guess some of them, where the file says them all
        if (number := getattr(config, f"{kind}_token_id", None)) is not None:
            setattr(tokenizer, f"{kind}_token", tokenizer.convert_ids_to_tokens(number))
    tokenizer.name_or_path = place
    return tokenizer
