"""From a name to a model with draft heads and its tokenizer, or to a one-line error."""

from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoTokenizer

from hf_drafthead.modeling.checkpoint import read_heads_config
from hf_drafthead.modeling.families import BY_MODEL_TYPE
from hf_drafthead.modeling.gguf_files import load_tokenizer


def load(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """Model and tokenizer of a draft-head checkpoint, the base's tokenizer if the checkpoint has none.

    Args:
        name: its folder, or its id on the Hub.
        kwargs: for `from_pretrained`: `dtype`, `device_map`, `base_model`, `trust_remote_code` (of the base), ...

    Raises:
        OSError, ValueError: as `read_heads_config` and `from_pretrained` do.
    """
    config = read_heads_config(name)
    # not through AutoModel, where `trust_remote_code` would run the code that was pushed with the heads
    model_class = BY_MODEL_TYPE[config.model_type]
    try:
        model: Any = model_class.from_pretrained(name, **kwargs)
    except OSError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        raise OSError(
            f"the base of {name!r} has its own model code, which runs only if you trust it: read it, then give "
            "--trust-remote-code (trust_remote_code=True)."
        ) from error
    trust = {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **trust)
    except (OSError, ValueError):
        tokenizer = load_tokenizer(model.base.name_or_path, model.config.base_gguf_file, **trust)
    return model, tokenizer


def process_state() -> PartialState:
    """The state of this process; without a GPU, processes that `torchrun` or MPI started on the CPU count too."""
    return PartialState(cpu=not torch.cuda.is_available())


def load_arguments(
    dtype: str = "auto", device: str | None = None, base_model: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Keyword arguments of `load` for the options of a command.

    Without a device: the GPU of this process, all GPUs if there is one process, and the CPU where there is no GPU.

    Raises:
        ValueError: there is no such type, or no such device here.
    """
    check_device(device)
    place: Any = device
    if place is None and torch.cuda.is_available():
        state = process_state()
        place = "auto" if state.num_processes == 1 else state.device
    arguments = {
        "dtype": floating_type(dtype),
        "device_map": None if place in (None, "cpu") else "auto" if place == "auto" else {"": place},
        "base_model": base_model,
        "trust_remote_code": trust_remote_code or None,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def floating_type(name: str) -> Any:
    """What `--dtype` names: `auto`, or a floating point type of torch; a ValueError if there is none."""
    wanted = name if name == "auto" else getattr(torch, name, None)
    if wanted != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ValueError(f"--dtype {name!r} is no floating point type: expected auto, float32, bfloat16 or float16.")
    return wanted


def check_device(name: str | None) -> None:
    """Raise a ValueError for a device that torch does not know, or that is not here."""
    if name in (None, "auto", "cpu"):
        return
    try:
        wanted = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is no device: expected auto, cpu, cuda, cuda:1 or mps.") from None
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = 0 if kind is None else torch.accelerator.device_count()
    if kind is None or kind.type != wanted.type or (wanted.index or 0) >= present:
        there = "none" if kind is None else f"{present} of type {kind.type!r}"
        raise ValueError(
            f"--device {name!r} is not available (accelerators found: {there}): give another, or leave it."
        )
