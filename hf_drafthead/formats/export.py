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
from hf_drafthead.modeling.base_model import locate_base
from hf_drafthead.modeling.checkpoint import read_heads_config, read_tensors
from hf_drafthead.modeling.config import BASE_FOLDER


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
    *,
    fold_bias: bool = False,
    revision: str | None = None,
    token: str | bool | None = None,
    **hub: Any,
) -> Export:
    """Write draft heads in the layout of another project.

    Args:
        model: folder or Hub id of heads, or a loaded model.
        folder: new folder to write to.
        to: `medusa`, `tgi`, `vllm`, `hydra`, `eagle`, `sglang`, ...; which of them depends on the family.
        fold_bias: for EAGLE to vLLM, which drops the bias of fc: move it into embeddings of the head's own.
        revision, token: of the heads, if they are on the Hub.
        hub: `cache_dir`, `local_files_only`, `force_download`, `subfolder`.

    Returns:
        What was written, and how it is run.

    Raises:
        OSError: the heads cannot be read, or the folder exists.
        ValueError: the family has no form in the target, or the target would damage the heads silently.
    """
    refuse_existing(folder)
    if to not in targets():
        raise ValueError(f"--to {to!r} is no known target: expected one of {', '.join(targets())}.")
    fetch = {key: value for key, value in {"revision": revision, "token": token, **hub}.items() if value is not None}
    saved = _of_model(model) if isinstance(model, DraftHeadPreTrainedModel) else _of_checkpoint(os.fspath(model), fetch)
    saved.fold_bias = fold_bias
    layout = _layout_for(saved, to)
    try:
        if saved.base_tensors and not (layout.holds_base or saved.base):
            what = "they were trained together with the base that lies with them, and the target only names a base"
            raise Loss(what, "save the base on its own (model.base.save_pretrained) and name it")
        if (lost := layout.lost(saved, to)) is not None:
            others = {
                other: kind for kind in _of_family(saved) for other in kind.targets if not kind.lost(saved, other)
            }
            what, place, name = lost
            train = f"train it with {name} {place}" if hasattr(saved.config, name) else "train it otherwise"
            advice = f"use --to {' or '.join(sorted(others))}" if others else train
            raise Loss(f"its {what}, and the target has a place for {place} alone", advice)
        vocabulary = [] if layout.holds_vocabulary else _without_vocabulary(saved)
        files = layout.write(saved, to)
    except Loss as loss:
        raise ValueError(f"{saved.name!r} cannot be written as {to!r}: {loss}.") from None
    with new_folder(folder) as staged:
        config = json.dumps(files.config, indent=2, sort_keys=True, default=str) + "\n"
        (staged / "config.json").write_text(config, encoding="utf-8")
        if files.weights.endswith(".safetensors"):
            write_safetensors(staged / files.weights, files.tensors)
        else:  # a row of a larger tensor is copied, or all of it would be stored
            whole = {name: tensor.detach().cpu().clone() for name, tensor in files.tensors.items()}
            torch.save(whole, staged / files.weights)
    shapes = {name: list(tensor.shape) for name, tensor in files.tensors.items()}
    return Export(saved.name, to, layout.name, os.fspath(folder), files.weights, shapes, files.notes + vocabulary)


def _of_family(saved: SavedHeads) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.family.config_class is type(saved.config) and layout.targets]


def _layout_for(saved: SavedHeads, to: str) -> Layout:
    fitting = [layout for layout in _of_family(saved) if to in layout.targets]
    if fitting:
        return next((layout for layout in fitting if layout.holds_base == bool(saved.base_tensors)), fitting[0])
    targets = sorted({target for layout in _of_family(saved) for target in layout.targets})
    advice = f"expected one of {', '.join(targets)}" if targets else "no other project has a form for them"
    raise ValueError(f"{saved.name!r} holds {saved.config.family} heads, which have no form in {to!r}: {advice}.")


def _without_vocabulary(saved: SavedHeads) -> list[str]:
    """A note where heads lose their draft vocabulary, without which they guess as well, among all tokens."""
    if not saved.reduced_vocabulary:
        return []
    size = len(saved.tensors["draft_tokens"])
    if any(key.startswith("projections.up.") for key in saved.tensors):
        what = f"its heads have projections of their own over a draft vocabulary of {size} tokens, the target over all"
        raise Loss(what, "train heads with share_lm_head=True or without draft_vocab_size")
    return [f"the draft vocabulary of {size} tokens is left out: there the heads guess among all tokens."]


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
    return SavedHeads(name, config, heads, config.base_model_name_or_path and locate_base(config, name), base)


def _beside(heads: str) -> str | None:
    """The folder of a base that lies beside its heads, by which a target can name it; None where there is none here."""
    folder = os.path.join(heads, BASE_FOLDER)
    return os.path.abspath(folder) if os.path.isdir(folder) else None
