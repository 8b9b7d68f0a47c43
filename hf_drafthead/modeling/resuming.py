"""A Trainer that goes on from a checkpoint loads the heads by itself; here it gets the base that lies beside them."""

import sys
from pathlib import Path
from typing import Any

import torch

from hf_drafthead.modeling.adapters import load_adapter, unwrapped
from hf_drafthead.modeling.base_model import load_base, tensors_of
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.files import read_json

FRAMES = 4  # between a model's `load_state_dict` and the Trainer that wants it
LOADERS = ("_load_from_checkpoint", "_load_best_model")  # methods of transformers' Trainer


def checkpoint_being_resumed() -> Path | None:
    """The checkpoint from which a Trainer is loading a model right now, for it tells the model no path; else None."""
    frame: Any = sys._getframe(2)
    for _ in range(FRAMES):
        if frame is None:
            return None
        if frame.f_code.co_name in LOADERS and hasattr(trainer := frame.f_locals.get("self"), "state"):
            folder = frame.f_locals.get("resume_from_checkpoint") or trainer.state.best_model_checkpoint
            return Path(folder) if folder and (Path(folder) / "config.json").is_file() else None
        frame = frame.f_back
    return None


def restore_base(model: Any, folder: Path) -> None:
    """Give a model's base the weights and adapters that lie beside the heads in a checkpoint, in place."""
    base, saved = unwrapped(model.base), read_json(folder / "config.json")
    if saved.get("base_included") and getattr(base, "hf_quantizer", None) is None:  # else nothing of it was trained
        state = tensors_of(base)
        fresh = tensors_of(load_base(str(folder / BASE_FOLDER), {"dtype": base.dtype})[0])
        if other := sorted(set(state) ^ set(fresh)):
            raise ValueError(
                f"the base in {str(folder)!r} is another than the model's: {other[0]!r} is in one of them."
            )
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(fresh[name])
    for name in saved.get("base_adapters") or ():
        load_adapter(base, folder / BASE_FOLDER / name, name, trainable=True)
