"""What a training records in addition to the weights: how it was run, and what must not change when it is resumed."""

import hashlib
import json
import os
import platform
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import TrainerState
from transformers import __version__ as transformers_version
from transformers.utils import CONFIG_NAME

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import replacing
from hf_drafthead.modeling.files import in_one_line, read_json
from hf_drafthead.version import __version__

SUMMARY = "training_summary.json"
RUN = "run.json"  # beside the checkpoints: what they are checkpoints of


def provenance() -> dict[str, Any]:
    cuda = torch.cuda.is_available()
    return {
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "hf_drafthead": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers_version,
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "devices": torch.cuda.device_count() if cuda else 1,
    }


def base_fingerprint(base: Any) -> str:
    """A short hash of a base: its shapes, and some of all its weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(base.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        if not parameter.is_meta:  # of an offloaded layer
            digest.update(parameter.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def recent_loss(history: Sequence[dict[str, Any]]) -> float | None:
    """Training loss over the last four of a Trainer's logs."""
    losses = [entry["loss"] for entry in history if "loss" in entry][-4:]
    return round(sum(losses) / len(losses), 4) if losses else None


def check_output(output: Path, resume: bool) -> None:
    """Refuse with a ValueError a folder in which a training cannot begin, or not go on, or that is another model's."""
    config = read_json(output / CONFIG_NAME) if (output / CONFIG_NAME).is_file() else {}
    if not config.get("model_type", "drafthead_").startswith("drafthead_"):
        raise ValueError(f"{str(output)!r} is the folder of a model without heads: give another --output.")
    if resume and whole_checkpoint(output) is None:
        raise ValueError(f"{str(output)!r} holds no complete checkpoint to resume from: leave --resume out.")
    if not resume and (checkpoints := sorted(output.glob("checkpoint-*"))):
        what = f"{str(output)!r} holds checkpoints of an earlier training ({checkpoints[-1].name})"
        raise ValueError(f"{what}: continue it with --resume, or give another --output.")


def refuse_weights_alone(checkpoint: Path) -> None:
    """Refuse a checkpoint from which rate, moments or random numbers would begin anew; a ValueError."""
    wanted = {"optimizer": ("optimizer*", "global_step*"), "scheduler": ("scheduler.pt",), "random": ("rng_state*",)}
    missing = [name for name, files in wanted.items() if not any(any(checkpoint.glob(file)) for file in files)]
    if missing:
        raise ValueError(
            f"{str(checkpoint)!r} holds no {', '.join(missing)} state, as with save_only_model, so that it cannot be "
            "resumed: train its heads further with --heads and another --output, or begin anew."
        )


def keep_settings(output: Path, file: Path, settings: dict[str, Any], begun: bool) -> None:
    """Note in a file what an output depends on, or refuse to go on with one that was begun with something else."""
    before = read_json(file) if begun and file.is_file() else settings
    version = before.get("hf_drafthead", "an unknown one")
    names = [*settings, *before] if version == __version__ else before  # an earlier one may have known fewer
    for name in [name for name in dict.fromkeys(names) if name != "hf_drafthead"]:
        if before.get(name) != settings.get(name):
            same = name in before and name in settings
            way = "use the same setting" if same else f"go on with its version of hf_drafthead ({version})"
            raise ValueError(
                f"{str(output)!r} was started with {name}={before.get(name)!r}, but now {name}={settings.get(name)!r}: "
                f"{way}, or give another output."
            )
    write_whole(file, json.dumps({"hf_drafthead": __version__, **settings}, indent=2) + "\n")


@contextmanager
def writing(folder: str | Path) -> Iterator[None]:
    """Turn what torch and safetensors raise on a full disk into one line; OSError."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if out_of_memory(error):
            raise
        what = f"{str(folder)!r} cannot be written ({in_one_line(error)}): what was there before is whole"
        raise OSError(f"{what}; free some space, then try again.") from error


def save_whole(
    model: DraftHeadPreTrainedModel, tokenizer: Any, output: Path, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Save heads, and a trained base, so that the folder always holds a complete model, the old or the new one."""
    with writing(output), replacing(output) as folder:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(output, state_dict=state_dict)


def write_whole(file: Path, content: str | Iterable[bytes]) -> None:
    """Write a file atomically: a text, or lines."""
    beside = file.with_name(f".{file.name}.new")
    with open(beside, "wb") as new:
        new.writelines([content.encode()] if isinstance(content, str) else content)
        new.flush()
        os.fsync(new.fileno())
    os.replace(beside, file)


def whole_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint under a folder (the Trainer writes its state last) whose weights are finite."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for checkpoint in sorted(checkpoints, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        try:
            TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            read_json(checkpoint / CONFIG_NAME)
            tensors = load_file(checkpoint / "model.safetensors")
        except Exception:  # incomplete or damaged, in whatever way
            continue
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
        if finite and all(map(zipfile.is_zipfile, checkpoint.glob("*.pt*"))):  # which torch has written
            return checkpoint
    return None
