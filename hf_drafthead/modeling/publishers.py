"""Who is about to upload a model: transformers sends what `save_pretrained` wrote, and does not tell the model."""

import sys
from types import FrameType
from typing import Any, NamedTuple

TRAINER, ANY_OBJECT = "transformers.trainer", "transformers.utils.hub"  # whose methods upload a folder


class Publisher(NamedTuple):
    """Where a Trainer, or (None) another method of transformers, uploads to, and with which token of the Hub."""

    repo_id: str | None  # None in a process that uploads nothing itself
    token: str | bool | None
    trainer: Any = None


def publisher() -> Publisher | None:
    """Who is calling, if it uploads what is saved now or after a training; else None."""
    frame: FrameType | None = sys._getframe(2)
    trainer, token, uploads = None, None, False
    while frame is not None:
        module, now = frame.f_globals.get("__name__"), frame.f_code.co_name == "push_to_hub"
        if module in (TRAINER, ANY_OBJECT):
            given = frame.f_locals
            if module == ANY_OBJECT and now:
                return Publisher(given.get("repo_id"), given.get("token"))
            if module == TRAINER and hasattr(given.get("self"), "args"):
                trainer, uploads, token = given["self"], uploads or now, given.get("token") if now else token
        frame = frame.f_back
    if trainer is None or not (uploads or trainer.args.push_to_hub):
        return None
    return Publisher(getattr(trainer, "hub_model_id", None), token or trainer.args.hub_token, trainer)
