"""From a checkpoint of this library to another project's layout; what the target would damage is refused."""

import json
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_drafthead.formats.disk import new_folder, refuse_existing, write_safetensors
from hf_drafthead.formats.layout import Layout, Loss, SavedHeads
from hf_drafthead.formats.layouts import LAYOUTS, targets
from hf_drafthead.modeling import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import BASE_FOLDER
from hf_drafthead.modeling.files import full_name, read_tensors
from hf_drafthead.modeling.loading import read_heads_config


@dataclass(frozen=True)
class Export:
    """What was written, and how it is run.

    shapes are those of the tensors by their names there; notes say how the target is started, and what it leaves out.
    """

    model: str
    target: str
    layout: str
    folder: str
    weights: str
    shapes: dict[str, list[int]]
    notes: list[str] = field(default_factory=list)


def export_checkpoint(
    model: str | os.PathLike | DraftHeadPreTrainedModel,
    folder: str | os.PathLike,
    to: str,
    **hub: Any,
) -> Export:
    """Write draft heads in the layout of another project.

    Args:
        model: folder or Hub id of heads, or a loaded model.
        folder: new folder to write to.
        to: `medusa`, `tgi`, `vllm`, `hydra`, `eagle`, `sglang`, ...; which of them depends on the family.
        hub: of the heads, if they are on the Hub: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Returns:
        What was written, and how it is run.

    Raises:
        OSError: the heads cannot be read, or the folder exists.
        ValueError: the family has no form in the target, or the target would damage the heads silently.
    """
    refuse_existing(folder)
    if to not in targets():
        raise ValueError(f"--to {to!r} is no known target: expected one of {', '.join(targets())}.")
    fetch = {key: value for key, value in hub.items() if value is not None}
    saved = _of_model(model) if isinstance(model, DraftHeadPreTrainedModel) else _of_checkpoint(os.fspath(model), fetch)
    try:
        layout = _layout_for(saved, to)
        if saved.base_tensors and not (layout.holds_base or saved.base):
            what = "they were trained together with the base that lies with them, and the target only names a base"
            raise Loss(what, "save the base on its own (model.base.save_pretrained) and name it")
        files = layout.write(saved, to)
    except Loss as loss:
        raise ValueError(f"{saved.name!r} cannot be written as {to!r}: {loss}.") from None
    if saved.reduced_vocabulary and not layout.holds_vocabulary:
        left_out = f"the draft vocabulary of {len(saved.tensors['draft_tokens'])} tokens is left out"
        files.notes.append(f"{left_out}: there the heads guess among all tokens.")
    with new_folder(folder) as staged:
        config = json.dumps(files.config, indent=2, sort_keys=True, default=str) + "\n"
        (staged / "config.json").write_text(config, encoding="utf-8")
        if files.weights.endswith(".safetensors"):
            write_safetensors(staged / files.weights, files.tensors)
        else:  # a row of a larger tensor is copied, or all of it would be stored
            whole = {name: tensor.detach().cpu().clone() for name, tensor in files.tensors.items()}
            torch.save(whole, staged / files.weights)
    shapes = {name: list(tensor.shape) for name, tensor in files.tensors.items()}
    return Export(saved.name, to, layout.name, os.fspath(folder), files.weights, shapes, files.notes)


def _layout_for(saved: SavedHeads, to: str) -> Layout:
    """The layout of a target; Loss if it has no place for what a field of the heads says."""
    layouts = [layout for layout in LAYOUTS if layout.family.config_class is type(saved.config)]
    fitting = [layout for layout in layouts if to in layout.targets]
    if not fitting:
        targets = sorted({target for layout in layouts for target in layout.targets})
        advice = f"expected one of {', '.join(targets)}" if targets else "no other project has a form for them"
        raise ValueError(f"{saved.name!r} holds {saved.config.family} heads, which have no form in {to!r}: {advice}.")
    layout = next((layout for layout in fitting if layout.holds_base == bool(saved.base_tensors)), fitting[0])
    if (lost := layout.lost(saved, to)) is not None:
        what, place, name = lost
        others = sorted({other for kind in layouts for other in kind.targets if not kind.lost(saved, other)})
        train = f"train it with {name} {place}" if hasattr(saved.config, name) else "train it otherwise"
        advice = f"use --to {' or '.join(others)}" if others else train
        raise Loss(f"its {what}, and the target has a place for {place} alone", advice)
    return layout


def _of_model(model: DraftHeadPreTrainedModel) -> SavedHeads:
    """Heads of a loaded model, whose base stays where it was loaded from."""
    config = model.config
    name = config.name_or_path or type(model).__name__
    inside = model.base.state_dict() if config.base_included else {}
    base = _beside(name) if inside else config.base_model_name_or_path
    return SavedHeads(name, config, model.drafter.state_dict(), base, inside, model.base)


def _of_checkpoint(name: str, hub: dict[str, Any]) -> SavedHeads:
    """Heads in a folder or on the Hub, mapped from disk."""
    config = read_heads_config(name, hub)
    tensors = read_tensors(name, hub)
    heads = {key.removeprefix("drafter."): tensor for key, tensor in tensors.items() if key.startswith("drafter.")}
    base = {key.removeprefix("base."): tensor for key, tensor in tensors.items() if key.startswith("base.")}
    if config.base_included:
        inside = "/".join(filter(None, (hub.get("subfolder"), BASE_FOLDER)))
        return SavedHeads(name, config, heads, _beside(name), base or read_tensors(name, {**hub, "subfolder": inside}))
    return SavedHeads(name, config, heads, full_name(config.base_model_name_or_path or "", name) or None, base)


def _beside(heads: str) -> str | None:
    """The folder of a base that lies beside its heads, by which a target can name it; None where there is none here."""
    folder = os.path.join(heads, BASE_FOLDER)
    return os.path.abspath(folder) if os.path.isdir(folder) else None
