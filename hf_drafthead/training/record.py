"""What a training records in addition to the weights: how it was run, and what must not change when it is resumed."""

import hashlib
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_drafthead import __version__
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel

SUMMARY = "training_summary.json"
RUN = "run.json"  # beside the checkpoints: what they are checkpoints of


def provenance() -> dict[str, Any]:
    """Command, versions and machine."""
    cuda = torch.cuda.is_available()
    return {
        "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
        "hf_drafthead": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hardware": torch.cuda.get_device_name() if cuda else f"CPU, {os.cpu_count()} cores",
        "devices": torch.cuda.device_count() if cuda else 1,
    }


def fingerprint(base: Any) -> str:
    """A short hash of a base: its shapes, and some of all its weights."""
    digest = hashlib.sha256()
    for name, parameter in sorted(base.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:64].double().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def recent_loss(history: Sequence[dict[str, Any]]) -> float | None:
    """Training loss over the last four of a Trainer's logs."""
    losses = [entry["loss"] for entry in history if "loss" in entry][-4:]
    return round(sum(losses) / len(losses), 4) if losses else None


def check_run(output: Path, run: dict[str, Any], resume: bool) -> None:
    """Record what is being trained in a folder, or refuse to resume with something else.

    Args:
        output: folder of the checkpoints.
        run: what must stay the same.
        resume: continue from the existing checkpoints.

    Raises:
        ValueError: another run's checkpoints are there, or some are and they are not to be resumed.
    """
    file = output / RUN
    checkpoints = sorted(output.glob("checkpoint-*"))
    if resume and file.is_file():
        before = json.loads(file.read_text())
        for name, value in run.items():
            if before.get(name) != value:
                raise ValueError(
                    f"{str(output)!r} holds a training with {name} {before.get(name)!r}, this one has {value!r}: "
                    "resume with the same, or give another --output."
                )
    elif checkpoints and not resume:
        raise ValueError(
            f"{str(output)!r} holds checkpoints of an earlier training ({checkpoints[-1].name}): continue it with "
            "--resume, or give another --output."
        )
    output.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(run, indent=2) + "\n")


def save_whole(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    output: Path,
    include_base: bool,
    state_dict: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save the model so that the folder always holds a complete model, the old one or the new one.

    Args:
        model: heads and base.
        tokenizer: the base's.
        output: folder.
        include_base: save the base too.
        state_dict: the model's tensors, where it is spread over processes.

    Raises:
        OSError: there is no space, or no permission to write.
    """
    with tempfile.TemporaryDirectory(dir=output, prefix=".saving-") as folder:
        # a relative path of the base is relative to the folder, and this one is a level deeper
        model.save_pretrained(folder, include_base=include_base, state_dict=state_dict)
        tokenizer.save_pretrained(folder)
        config = Path(folder) / "config.json"
        saved = json.loads(config.read_text())
        name = saved.get("base_model_name_or_path")
        if name and name.startswith(".." + os.sep):
            saved["base_model_name_or_path"] = os.path.relpath(Path(folder) / name, output)
            config.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
        files = [file for file in Path(folder).rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: file.relative_to(folder) == Path("config.json")):
            place = output / file.relative_to(folder)
            place.parent.mkdir(exist_ok=True)
            os.replace(file, place)


def write_whole(file: Path, text: str) -> None:
    """Write a text file atomically."""
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(text)
    os.replace(beside, file)
