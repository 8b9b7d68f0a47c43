"""Uploads of a saved model that others make, a Trainer or a pipeline of transformers: looked at as a push is."""

from pathlib import Path

from transformers.trainer_utils import HubStrategy

from hf_drafthead.hub_upload.contents import check_base
from hf_drafthead.hub_upload.destination import Target, look, told
from hf_drafthead.modeling import DraftHeadConfig
from hf_drafthead.modeling.files import is_local
from hf_drafthead.modeling.publishers import Publisher
from hf_drafthead.modeling.remote_code import CODE_FILE, code_of


def check_saved(config: DraftHeadConfig, folder: Path, publisher: Publisher) -> None:
    """Refuse what is about to be saved and uploaded, if others could not load it."""
    check_training(config, publisher, bool(config.base_included or config.base_adapters))
    if publisher.repo_id is None:
        return
    if not config.base_included:
        with told(target := Target(publisher.repo_id, token=publisher.token)):
            info = look(target).info
            check_base(config, folder, target.token, bool(info and info.private))
    if publisher.trainer is not None and (uploaded := Path(publisher.trainer.args.output_dir)).is_dir():
        # a Trainer copies what it knows of a checkpoint to the folder that it uploads
        (uploaded / CODE_FILE).write_text(code_of(type(config)), encoding="utf-8")


def check_training(config: DraftHeadConfig, publisher: Publisher, beside: bool) -> None:
    """Refuse a training whose checkpoints others could not load, without asking the Hub."""
    if publisher.trainer is None:
        return
    arguments = publisher.trainer.args
    if beside and arguments.push_to_hub and arguments.hub_strategy != HubStrategy.END:
        raise ValueError(
            "the base is trained or adapted and lies beside its heads, where the Trainer leaves it out when it "
            f"publishes a checkpoint (hub_strategy={arguments.hub_strategy.value!r}): set hub_strategy='end'."
        )
    name, folder = config.base_model_name_or_path, Path(arguments.output_dir)
    if not beside and (not name or is_local(name, folder)):
        check_base(config, folder, None, False)
