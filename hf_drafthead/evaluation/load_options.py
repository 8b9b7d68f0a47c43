"""Where and how the command line loads a model with draft heads."""

from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.sharding import process_state


@dataclass(frozen=True)
class LoadOptions:
    """How to load heads and base.

    dtype: `auto`, or a floating point type of torch by name; device: as torch names it, or `auto` for all GPUs; None
    for the GPU of this process, for all GPUs if there is one process, and for the CPU where there is no GPU;
    base_model: folder or id to load instead of the base that the config names; trust_remote_code: run the base's own
    model code.

    Raises:
        ValueError: there is no such type, or no such device here.
    """

    dtype: str = "auto"
    device: str | None = None
    base_model: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        floating_type(self.dtype)
        check_device(self.device)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`; defaults are left out."""
        place: Any = self.device
        if place is None and torch.cuda.is_available():
            state = process_state()
            place = "auto" if state.num_processes == 1 else state.device
        given: dict[str, Any] = {"dtype": floating_type(self.dtype)}
        if place is not None and place != "cpu":
            given["device_map"] = place if place == "auto" else {"": place}
        if self.base_model is not None:
            given["base_model"] = self.base_model
        if self.trust_remote_code:
            given["trust_remote_code"] = True
        return given


def load_here(name: str, options: LoadOptions) -> tuple[Any, Any]:
    """Model, in eval mode, and tokenizer.

    Args:
        name: folder or id of the heads.
        options: how to load them.

    Raises:
        OSError, ValueError: as `load` does.
    """
    model, tokenizer = load(name, **options.arguments())
    return model.eval(), tokenizer


def floating_type(name: str) -> Any:
    """What `--dtype` names: `auto`, or a floating point type of torch.

    Raises:
        ValueError: there is no such type.
    """
    wanted = name if name == "auto" else getattr(torch, name, None)
    if wanted != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point):
        raise ValueError(f"--dtype {name!r} is no floating point type: expected auto, float32, bfloat16 or float16.")
    return wanted


def check_device(name: str | None) -> None:
    """Refuse a device that torch does not know, or that is not here.

    Raises:
        ValueError: it is one of these.
    """
    if name in (None, "auto", "cpu"):
        return
    try:
        wanted = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device {name!r} is no device: expected auto, cpu, cuda, cuda:1 or mps.") from None
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if found is not None else 0
    if found is None or found.type != wanted.type or (wanted.index or 0) >= count:
        here = f"{count} of type {found.type!r}" if found is not None else "none"
        raise ValueError(f"--device {name!r} is not available (accelerators found: {here}): give another, or leave it.")
