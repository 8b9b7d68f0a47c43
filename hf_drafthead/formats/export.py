"""From a checkpoint of this library to another project's layout; what the target would damage is refused."""

import os
from dataclasses import dataclass, field
from typing import Any

from hf_drafthead.formats.disk import new_folder, refuse_existing, write_config, write_pickle, write_safetensors
from hf_drafthead.formats.layout import Layout, Own, refuse
from hf_drafthead.formats.layouts import LAYOUTS, targets
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import locate_base
from hf_drafthead.modeling.checkpoint import checkpoint_files, map_tensors, read_heads_config
from hf_drafthead.modeling.families import BY_MODEL_TYPE


@dataclass(frozen=True)
class Export:
    """What was written, and how it is run.

    Attributes:
        model: the heads.
        target: as it was asked for.
        layout: that the target reads.
        folder: where it lies.
        weights: name of its file of weights.
        shapes: of its tensors, by their names there.
        notes: how the target is started, and what it leaves out.
    """

    model: str
    target: str
    layout: str
    folder: str
    weights: str
    shapes: dict[str, list[int]]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return dict(vars(self))


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
    own = _of_model(model) if isinstance(model, DraftHeadPreTrainedModel) else _of_checkpoint(os.fspath(model), fetch)
    layout = _layout_for(own, to)
    vocabulary = _left_out(own, to)
    files = layout.write(own, to, fold_bias)
    with new_folder(folder) as staged:
        write_config(staged / "config.json", files.config)
        write = write_safetensors if files.weights.endswith(".safetensors") else write_pickle
        write(staged / files.weights, files.tensors)
    shapes = {name: list(tensor.shape) for name, tensor in files.tensors.items()}
    return Export(own.name, to, layout.name, os.fspath(folder), files.weights, shapes, files.notes + vocabulary)


def _layout_for(own: Own, to: str) -> Layout:
    family = own.config.family
    here = [one for one in LAYOUTS if one.family.config_class is type(own.config) and one.targets]
    fitting = [one for one in here if to in one.targets and one.holds_base == bool(own.base_tensors)]
    fitting = fitting or [one for one in here if to in one.targets]
    if fitting:
        return fitting[0]
    known = sorted({target for one in here for target in one.targets})
    advice = f"expected one of {', '.join(known)}" if known else "no other project has a form for them"
    raise ValueError(f"{own.name!r} holds {family} heads, which have no form in {to!r}: {advice}.")


def _left_out(own: Own, to: str) -> list[str]:
    """A note where heads lose their draft vocabulary, without which they guess as well, among all tokens.

    Raises:
        ValueError: their own projections hold no other tokens.
    """
    if "draft_tokens" not in own.tensors or own.config.family.startswith("eagle3"):  # whose layouts have a place for it
        return []
    size = len(own.tensors["draft_tokens"])
    if any(key.startswith("projections.up.") for key in own.tensors):
        refuse(
            own,
            to,
            f"its heads have projections of their own over a draft vocabulary of {size} tokens, and the target wants "
            "all tokens",
            "train heads with share_lm_head=True or without draft_vocab_size",
        )
    return [f"the draft vocabulary of {size} tokens is left out: there the heads guess among all tokens."]


def _of_model(model: DraftHeadPreTrainedModel) -> Own:
    """Heads of a loaded model, whose base stays where it was loaded from."""
    config = model.config
    name = config.name_or_path or type(model).__name__
    inside = model.base.state_dict() if config.base_included else {}
    base = None if inside else config.base_model_name_or_path
    return Own(name, config, model.drafter.state_dict(), base, inside, model.base)


def _of_checkpoint(name: str, hub: dict[str, Any]) -> Own:
    """Heads in a folder or on the Hub, mapped from disk."""
    config = _read_own_config(name, hub)
    tensors = map_tensors(checkpoint_files(name, None, hub))
    heads = {key.removeprefix("drafter."): tensor for key, tensor in tensors.items() if key.startswith("drafter.")}
    base = {key.removeprefix("base."): tensor for key, tensor in tensors.items() if key.startswith("base.")}
    named = None if config.base_included or not config.base_model_name_or_path else locate_base(config, name)
    return Own(name, config, heads, named, base)


def _read_own_config(name: str, hub: dict[str, Any]) -> DraftHeadConfig:
    try:
        fields, _ = DraftHeadConfig.get_config_dict(name, **hub)
    except OSError:
        fields = {}
    model_class = BY_MODEL_TYPE.get(fields.get("model_type", ""))
    return read_heads_config(model_class.config_class if model_class else DraftHeadConfig, name, None, hub)
