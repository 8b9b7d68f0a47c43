"""From another project's checkpoint to one of this library, on disk or in memory."""

import copy
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_drafthead.formats.base_tensors import base_tensor, same_values
from hf_drafthead.formats.disk import Source, new_folder, refuse_existing, write_safetensors
from hf_drafthead.formats.fields import halves, head_fields
from hf_drafthead.formats.layout import Heads, Layout
from hf_drafthead.formats.layouts import BASES, find
from hf_drafthead.formats.mtp import named_base
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import commit_of, copy_tokenizer, fetch_config, split_gguf
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.files import WEIGHTS, full_name, in_one_line
from hf_drafthead.modeling.loading import check_tensors

logger = logging.get_logger(__name__)

OF_BASE = ("token", "cache_dir", "local_files_only")  # arguments of downloads that are the base's as well
Base = str | os.PathLike | nn.Module | None
GIVE_BASE = "give the base that they were trained for (base_model=, on the command line --base)"
OF_A_BASE = {"hidden_size": "hidden size", "vocab_size": "vocabulary", "num_hidden_layers": "number of layers"}
# What reading a config field as another type than it is, or a tensor of other dimensions, raises.
OF_WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, StrictDataclassError, TypeError)


@dataclass(frozen=True)
class Conversion:
    """What was found at a place, and what it became.

    base is None if nothing names one, folder if nothing was written. fields are of the family's config; shapes and
    sources of the drafter's tensors by their names here (sources: of which tensors of the file they were made); dropped
    says why tensors were left out, notes what was assumed or disagreed.
    """

    source: str
    layout: str
    family: str
    base: str | None
    fields: dict[str, Any]
    shapes: dict[str, list[int]]
    sources: dict[str, list[str]]
    dropped: dict[str, str]
    notes: list[str] = field(default_factory=list)
    folder: str | None = None

    def table(self) -> list[tuple[str, str, str]]:
        """Rows of (names in the file, number of tensors and shape here, names here), numbers left open."""
        rows: Counter[tuple[str, str, str]] = Counter()
        for name, shape in self.shapes.items():
            theirs = " + ".join(dict.fromkeys(_open(source) for source in self.sources[name])) or "(zeros)"
            rows[theirs, str(shape), _open(name)] += 1
        return [(theirs, f"{count} x {shape}", ours) for (theirs, shape, ours), count in rows.items()]


def convert_checkpoint(
    source: str | os.PathLike,
    folder: str | os.PathLike | None = None,
    *,
    base_model: str | os.PathLike | None = None,
    base_revision: str | None = None,
    fields: Mapping[str, Any] | None = None,
    **hub: Any,
) -> Conversion:
    """Convert draft heads of another project; the layout is told by the names of the tensors.

    Args:
        source: folder, file or Hub id. Files are read as tensors and never run; `docs/formats.md` lists the layouts.
        folder: new folder for the converted heads; None only looks. A model that holds its base as well is written with
            it, heads alone are written alone.
        base_model: Hub id or path of the base, where the layout does not name it.
        base_revision: branch, tag or commit of the base.
        fields: config fields that hold instead of what the layout says, where that has two meanings.
        hub: of the source, if it is on the Hub: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Returns:
        What was found and what it became.

    Raises:
        OSError: a file is not there or cannot be read, or the folder exists.
        ValueError: the layout is not known, the heads do not fit the base, or the family here cannot hold them.
    """
    name = os.fspath(source)
    if folder is not None:
        refuse_existing(folder)
    fetch = {key: value for key, value in hub.items() if value is not None}
    file, layout = find(name, fetch)
    heads = _read(file, layout, fields or {}, fetch)
    config = None
    if folder is not None or base_model is not None or heads.base is not None or heads.base_inside:
        config = _config_of(file, heads, base_model, base_revision, fetch)
        named: Any = config.base_model_name_or_path
        heads.notes += _compare_copies(name, heads, named, config.base_model_revision or base_revision)
    if folder is not None and config is not None:
        with new_folder(folder) as staged:
            if heads.base_inside:
                model: Any = heads.model_class.from_pretrained(name, convert=True, dtype="auto", **fetch)
                model.save_pretrained(staged, include_base=True)
            else:
                config.save_pretrained(staged)
                write_safetensors(staged / WEIGHTS, {f"drafter.{key}": tensor for key, tensor in heads.tensors.items()})
                settings = GenerationConfig()
                settings.draft_tree = heads.tree
                settings.save_pretrained(staged)
            of_base: dict[str, Any] = {key: fetch[key] for key in OF_BASE if key in fetch}
            with suppress(OSError, ValueError):  # heads without a tokenizer are loaded with the base's
                base_name, commit = config.base_model_name_or_path, config.base_model_revision or "main"
                copy_tokenizer(name if heads.base_inside else base_name, staged, None, {**of_base, "revision": commit})
    form = {key: value if config is None else getattr(config, key) for key, value in heads.fields.items()}
    plain = {key: value.to_diff_dict() if isinstance(value, PreTrainedConfig) else value for key, value in form.items()}
    return Conversion(
        source=name,
        layout=layout.name,
        family=(config or heads.model_class.config_class(**heads.fields)).family,
        base=heads.base if config is None else config.base_model_name_or_path,
        fields=plain,
        shapes={key: list(tensor.shape) for key, tensor in heads.tensors.items()},
        sources={key: list(tensor.sources) for key, tensor in heads.tensors.items()},
        dropped=heads.dropped,
        notes=heads.notes,
        folder=None if folder is None else os.fspath(folder),
    )


def converted(
    model_class: type[DraftHeadPreTrainedModel],
    source: str,
    *,
    base_model: Base = None,
    base_revision: str | None = None,
    fields: Mapping[str, Any],
    hub: Mapping[str, Any],
) -> tuple[DraftHeadConfig, dict[str, Tensor], dict[str, Any], Callable[[nn.Module], list[str]]]:
    """Config, tensors and generation settings of heads of another project, for `from_pretrained(convert=True)`; and
    what compares them with their base when that is loaded, and returns notes.

    Raises OSError and ValueError as `convert_checkpoint`, and where the heads are of another family than model_class.
    """
    file, layout = find(source, hub)
    if not issubclass(layout.family, model_class):
        advice = f"load them with {layout.family.__name__}.from_pretrained(..., convert=True)"
        raise ValueError(f"{source!r} holds heads in the layout {layout.name!r}: {advice}.")
    heads = _read(file, layout, fields, hub)
    config = _config_of(file, heads, base_model, base_revision, hub)
    for note in heads.notes:
        logger.warning_once(f"{source!r}: {note}")
    tensors = {f"drafter.{key}": tensor.tensor() for key, tensor in heads.tensors.items()}
    return config, tensors, {"draft_tree": heads.tree}, partial(_compare_copies, source, heads)


def _read(file: Source, layout: Layout, fields: Mapping[str, Any], hub: Mapping[str, Any]) -> Heads:
    """The heads, with the base that published ones of this name are known to be for."""
    known_fields = layout.family.config_class.heads_fields()
    if unknown := sorted(set(fields) - known_fields):
        known = ", ".join(sorted(known_fields))
        raise ValueError(f"{unknown[0]!r} is no config field of {layout.family.__name__}: expected some of {known}.")
    try:
        file = replace(file, config=head_fields(file, layout.name))
        heads = layout.read(file, fields)
        heads.tensors = halves(file, layout.name, heads.tensors)
    except OF_WRONG_TYPES as error:
        what = f"has in its config.json a value, or a tensor, of a form that no {layout.name} file has"
        raise ValueError(f"{file.name!r} {what} ({in_one_line(error)}): correct it.") from error
    heads.fields |= fields
    if not (heads.base or heads.base_inside):
        by = "is the one that heads of this name were published for"
        heads.base = next((base for repo_id, base in BASES.items() if repo_id.lower() == file.name.lower()), None)
        if heads.base is None and not os.path.isfile(file.name):
            by, heads.base = "is the one that its card names", named_base(split_gguf(file.name)[0], hub)
        heads.notes += [f"the layout names no base: {heads.base} {by}."] if heads.base else []
    return heads


def _config_of(file: Source, heads: Heads, base: Base, base_revision: str | None, hub: Mapping[str, Any]) -> Any:
    """The family's config on its base, which fits the heads."""
    name = file.name
    if heads.base_inside:
        if base is not None:
            raise ValueError(f"{name!r} contains the base that its heads were trained with: drop base_model=.")
        base, base_revision = name, file.commit or hub.get("revision")
    commit: str | None = None
    if isinstance(base, nn.Module):
        live: Any = base
        base_config: PreTrainedConfig = live.config
        base_name = getattr(base_config, "_name_or_path", "") or heads.base
    else:
        if not (base_name := os.fspath(base or heads.base or "")):
            raise ValueError(f"{name!r} does not say which base its heads were trained for: {GIVE_BASE}.")
        beside = os.path.join(os.path.dirname(file.files[0]), base_name)
        if base is None and not os.path.isabs(base_name) and os.path.isdir(beside):
            base_name = beside
        fetch = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        base_config = fetch_config(base_name, base_revision, **{"token": None, **fetch})
        commit = commit_of(base_name, {**fetch, "revision": base_revision or "main"})
    called = base_name or type(base).__name__
    for field_name, words in OF_A_BASE.items():
        theirs = getattr(base_config.get_text_config(), field_name, None)
        if (ours := getattr(heads, field_name)) not in (None, theirs):
            what = f"were trained for a base of {words} {ours}; the base {called!r} has {theirs}"
            raise ValueError(f"the heads at {name!r} {what}: {GIVE_BASE}.")
    config: Any = heads.model_class.config_class(
        base_config=base_config,
        base_model_name_or_path=full_name(base_name or "") or None,
        base_model_revision=commit,
        **heads.fields,
    )
    config.architectures = [heads.model_class.__name__]
    config.dtype = next(tensor.dtype for tensor in heads.tensors.values() if tensor.dtype.is_floating_point)
    blank = heads.model_class._blank(copy.deepcopy(config), name)  # which chooses implementations
    tensors: Mapping[str, Any] = {f"drafter.{key}": tensor for key, tensor in heads.tensors.items()}
    check_tensors(name, tensors, blank.state_dict())
    _try_to_guess(name, blank.drafter, config)
    if broken := [key for joined in heads.tensors.values() for key in joined.not_finite()]:
        what = f"NaN or infinity in {broken[0]!r} and {len(broken) - 1} more tensor(s)"
        raise ValueError(f"{name!r} holds {what}, as after an overflow or training that diverged: get another copy.")
    return config


def _try_to_guess(name: str, drafter: Any, config: Any) -> None:
    """Guess once from random states, without memory: what no layer can compute shows before the file is converted."""
    layer = config.own_layer if getattr(config, "own_embeddings", False) else config.get_text_config()
    width = layer.hidden_size if layer is config.own_layer else config.width
    drafter.__dict__["embed"] = lambda tokens, like: like.new_zeros(*tokens.shape, width)
    features = config.width * sum(isinstance(read, int) for read in drafter.reads) + drafter.key_width
    ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
    drafter.bfloat16()  # the one type that products of experts take there
    try:
        with torch.no_grad():
            drafter.head_states(torch.zeros(1, 4, features, dtype=torch.bfloat16, device="meta"), ids)
    except Exception as error:
        what = f"cannot guess with what its config.json says ({in_one_line(error)})"
        raise ValueError(f"the heads at {name!r} {what}: correct it.") from error
    del drafter.__dict__["embed"]


def _compare_copies(name: str, heads: Heads, base: str | nn.Module, revision: str | None = None) -> list[str]:
    """Compare the base's tensors that the file holds a copy of with the base's own; notes on those not at hand."""
    notes = []
    for which, stored in heads.copies.items():
        original = base_tensor(base, which, revision)
        if original is None:
            notes.append(f"the {which} in the file were not compared with the base's: it has no such weights here.")
        elif not same_values(stored, original):
            called = base if isinstance(base, str) else base.name_or_path or type(base).__name__
            what = f"holds {which} that are not those of the base {called!r}, as heads for another base do"
            raise ValueError(f"{name!r} {what}: {GIVE_BASE}.")
    return notes


def _open(name: str) -> str:
    """The name with its numbers left open."""
    return re.sub(r"\d+", "{}", name)
