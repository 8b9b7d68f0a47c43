"""A push that transformers' Trainer makes itself: it uploads the folder in which the model was saved as it is."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

from transformers.trainer_utils import HubStrategy

from hf_drafthead.hub_upload.contents import check_base
from hf_drafthead.hub_upload.destination import Target, look, told
from hf_drafthead.modeling import DraftHeadConfig
from hf_drafthead.modeling.base_model import is_local
from hf_drafthead.modeling.remote_code import CODE_FILE, code_of

OF_TRAINERS = "transformers.trainer"


def publishing_trainer() -> tuple[Any, str | None]:
    """The Trainer that is calling, if it publishes what it trains (it tells no model so), and its token for the Hub."""
    frame: FrameType | None = sys._getframe(1)
    trainer, publishes, token = None, False, None
    while frame is not None:
        if frame.f_globals.get("__name__") == OF_TRAINERS and hasattr(frame.f_locals.get("self"), "args"):
            trainer = frame.f_locals["self"]
            if frame.f_code.co_name == "push_to_hub":
                publishes, token = True, frame.f_locals.get("token")
        frame = frame.f_back
    if trainer is None or not (publishes or trainer.args.push_to_hub):
        return None, None
    return trainer, token or trainer.args.hub_token


def check_trainer_push(config: DraftHeadConfig, folder: Path, ask_hub: bool = True, beside: bool = False) -> None:
    """Refuse what a Trainer that is calling would publish, if others could not load it; without one nothing happens.

    Args:
        config: that is or would be saved.
        folder: of the checkpoint; a relative path of the base is looked for there.
        ask_hub: whether the Hub is asked about the base, and the repository is made ready for the heads.
        beside: whether the base is sure to lie beside the heads, though the config does not say so yet.
    """
    trainer, token = publishing_trainer()
    if trainer is None:
        return
    arguments, base = trainer.args, config.base_model_name_or_path
    beside = beside or config.base_included or bool(config.base_adapters)
    if beside and arguments.push_to_hub and arguments.hub_strategy != HubStrategy.END:
        raise ValueError(
            f"the base is trained or adapted and lies beside its heads, where the Trainer leaves it out when it "
            f"publishes a checkpoint (hub_strategy={arguments.hub_strategy.value!r}): set hub_strategy='end'."
        )
    repo_id = getattr(trainer, "hub_model_id", None)  # the main process alone has one
    if ask_hub and repo_id:
        if not config.base_included:
            with told(target := Target(repo_id, token=token)):
                info = look(target).info
                check_base(config, folder, target.token, bool(info and info.private))
        if (uploaded := Path(arguments.output_dir)).is_dir():  # where the Trainer copies other files of `folder`
            (uploaded / CODE_FILE).write_text(code_of(type(config)), encoding="utf-8")
    elif not beside and (not base or is_local(base, folder)):
        check_base(config, folder, None, False)
