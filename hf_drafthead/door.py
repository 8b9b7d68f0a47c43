"""One door for any id: what its files say that it is, without weights; and the model that drafts with it."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from hf_drafthead.exactness import exact as make_exact
from hf_drafthead.formats.convert import convert_checkpoint
from hf_drafthead.formats.disk import CONFIG, ENDINGS, GROUPS
from hf_drafthead.formats.eagle3 import WRITTEN_FOR
from hf_drafthead.formats.export import export_checkpoint
from hf_drafthead.formats.gguf import ARCHITECTURES, DRAFTERS, gguf_says
from hf_drafthead.formats.layout import KIND
from hf_drafthead.formats.layouts import BASES, find
from hf_drafthead.formats.mtp import named_base
from hf_drafthead.formats.speculators import verifier_of
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import PLACE_ARGUMENTS, split_gguf
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX
from hf_drafthead.modeling.families import BY_MODEL_TYPE, from_base
from hf_drafthead.modeling.files import (
    fetch_file,
    full_name,
    is_missing_folder,
    read_json,
    refusing,
    shortened,
    weights_in,
    why_missing,
)
from hf_drafthead.modeling.loading import read_heads_config
from hf_drafthead.modeling.mtp import COUNTS, MtpForCausalLM

logger = logging.get_logger(__name__)

OURS, DRAFTER, BASE = "draft heads of this library", "a drafter of another project", "a base"
# Fields that configs of other projects' drafters have, and what stands in the names of their architectures.
MARKS = (
    KIND,
    "dflash_config",
    "eagle_config",
    "draft_vocab_size",
    "ptd_token_id",
    "medusa_num_heads",
    "hydra_num_heads",
)
NAMED = re.compile(r"DFlash|DSpark|Eagle|EAGLE|Medusa|Hydra|Domino|DraftModel|Speculator|Assistant")
INSIDE = "dflash"  # a folder in some bases' repositories


@dataclass(frozen=True)
class Found:
    """What an id is.

    Attributes:
        name: the id, as it was given.
        kind: OURS, DRAFTER or BASE.
        by: the field, architecture or file by which that is told.
        base: of a drafter, which one its files, its card or its name say; None if none does.
        modules: of a base, how many modules for multi-token prediction its config counts.
        subfolder: where the drafter lies in the repository.
    """

    name: str
    kind: str
    by: str
    base: str | None = None
    modules: int = 0
    subfolder: str | None = None

    @property
    def line(self) -> str:
        """How it is loaded."""
        if self.kind == DRAFTER and self.base is None:
            return f"hf_drafthead.from_pretrained({self.name!r}, base_model=...), whose base its files do not name"
        return f"hf_drafthead.from_pretrained({self.name!r})"


def recognize(name: str, hub: Mapping[str, Any] | None = None) -> Found:
    """What an id, a folder or a file is, by its config.json and by which files there are; no weights are read.

    Raises:
        OSError: there is nothing, or it cannot be fetched.
    """
    hub = {key: value for key, value in (hub or {}).items() if value is not None}
    place, file = split_gguf(name)
    if file is not None:
        said = gguf_says(place, file, hub)
        kind = str(said.get("general.architecture"))
        if kind in DRAFTERS or "dflash" in kind or "dspark" in kind:
            return Found(name, DRAFTER, f"architecture {kind!r} of the GGUF file", named_base(place, hub))
        modules = said.get(f"{kind}.nextn_predict_layers") or 0
        return Found(
            name, BASE, f"architecture {kind!r} of the GGUF file", modules=modules if kind in ARCHITECTURES else 0
        )
    if os.path.isfile(name) and name.endswith(ENDINGS):
        return Found(name, DRAFTER, "a file of weights")
    if os.path.isfile(name) or is_missing_folder(name):
        raise OSError(f"{name!r} is no folder, id or file of weights: give one.")
    config_file = fetch_file(name, CONFIG, hub)
    config = read_json(config_file) if config_file else {}
    of_values = (AttributeError, LookupError, TypeError)
    with refusing(ValueError, f"{name!r} has a config.json that cannot be used", "correct it.", of=of_values):
        return _of_config(name, config, hub)


def _of_config(name: str, config: Mapping[str, Any], hub: Mapping[str, Any]) -> Found:
    model_type, base = config.get("model_type") or "", _base_of(name, config, hub)
    if not isinstance(model_type, str):
        raise TypeError(f"model_type is {shortened.repr(model_type)}")
    if model_type.startswith(MODEL_TYPE_PREFIX):
        return Found(name, OURS, model_type.removeprefix(MODEL_TYPE_PREFIX), config.get("base_model_name_or_path"))
    architecture = next(iter(config.get("architectures") or ()), "")
    marks = [f"{mark} {shortened.repr(config[mark])}" for mark in MARKS if config.get(mark) is not None]
    if marks or NAMED.search(str(architecture)) or model_type == "medusa" or model_type.endswith("_assistant"):
        by = (
            marks[0] if marks and (KIND in config or not architecture) else f"architecture {architecture or model_type}"
        )
        return Found(name, DRAFTER, by, base)
    if "subfolder" not in hub and fetch_file(name, CONFIG, {**hub, "subfolder": INSIDE}) is not None:
        return Found(name, DRAFTER, f"its folder {INSIDE}", name, subfolder=INSIDE)
    if not config and not any(weights_in(name, file, hub) for group in GROUPS for file in group):
        in_gguf = sorted(str(file) for file in Path(name).glob("*.gguf")) if os.path.isdir(name) else []
        if len(in_gguf) == 1:
            return recognize(in_gguf[0], hub)
        why = why_missing(name, CONFIG, hub)
        several = f"; it holds {len(in_gguf)} GGUF files, such as {in_gguf[0]!r}: give one of them" if in_gguf else ""
        raise OSError(
            f"{name!r} holds no config.json and no weights ({why}){several or ': give a folder or id that does'}."
        )
    one_layer = config.get("num_hidden_layers") == 1 and model_type in ("llama", "mixtral", "qwen2")
    if one_layer or not model_type:  # nobody publishes a language model of one layer
        return Found(name, DRAFTER, "a single layer" if one_layer else "files without a config of a model", base)
    text = config.get("text_config") or config
    modules = next((text[count] for count in COUNTS if type(text.get(count)) is int), 0)
    return Found(name, BASE, f"model_type {model_type!r}", modules=modules)


def _base_of(name: str, config: Mapping[str, Any], hub: Mapping[str, Any]) -> str | None:
    by_name = {repo_id.lower(): base for repo_id, base in BASES.items()}.get(name.lower())
    named = verifier_of(config) or config.get("base_model_name_or_path")
    return named or by_name or named_base(name, hub)


def from_pretrained(name: str | os.PathLike, *, base_model: Any = None, **arguments: Any) -> DraftHeadPreTrainedModel:
    """The model of any id that drafts: heads of this library, drafters of other projects, or a base by itself.

    Args:
        name: folder, file or Hub id. Of a base, its own modules for multi-token prediction draft where its files have
            them, else copies of what the text says already (prompt lookup).
        base_model: Hub id, path or loaded model, where a drafter's files name none, or to use another copy.
        arguments: as of `from_pretrained` of the model classes; config fields that a layout leaves open.

    Raises:
        OSError, ValueError: it is nothing of these, or cannot be loaded; what was found, and what to do.
    """
    place = os.fspath(name)
    hub = {key: arguments[key] for key in PLACE_ARGUMENTS & set(arguments)}
    found = recognize(place, hub)
    place = found.name  # the only GGUF file of a folder
    if found.kind == BASE:
        if base_model is not None:
            raise ValueError(f"{place!r} is a base ({found.by}) and no drafter: drop base_model=, or give a drafter.")
        exact = arguments.pop("exact", False)
        revision = arguments.pop("revision", None)
        arguments["base_revision"] = arguments.get("base_revision") or revision
        model = _alone(place, found, arguments)
        return make_exact(model) if exact else model
    if found.kind == OURS:
        model_class: Any = BY_MODEL_TYPE.get(MODEL_TYPE_PREFIX + found.by) or read_heads_config(place, hub)  # says why
        return model_class.from_pretrained(place, base_model=base_model, **arguments)
    if found.subfolder is not None:
        arguments, hub = {**arguments, "subfolder": found.subfolder}, {**hub, "subfolder": found.subfolder}
    model_class = find(place, hub)[1].family
    return model_class.from_pretrained(place, convert=True, base_model=base_model, **arguments)  # type: ignore


def _alone(place: str, found: Found, arguments: dict[str, Any]) -> DraftHeadPreTrainedModel:
    """A base that drafts by itself."""
    if found.modules:
        try:
            return MtpForCausalLM.from_base(place, **arguments)
        except ValueError as error:
            if "multi-token prediction" not in str(error):
                raise
            logger.warning_once(f"{error} Guesses are copied from the text.")
    return from_base(place, **arguments)


@dataclass(frozen=True)
class Start:
    """Trained heads that are trained further: where they lie here, their base and family, and how they go back.

    targets: of `export_checkpoint`, those that write the layout in which they were found, that of the engine that they
        were written for first; None for heads of here.
    """

    folder: str
    base: str
    family: str
    targets: tuple[str, ...] | None = None

    def write_back(self, trained: str | os.PathLike) -> str:
        """Write trained heads in the layout of those that they began as, beside them; what was done, with notes."""
        why = "no layout of other projects"
        for target in self.targets or ():
            folder = f"{os.fspath(trained)}-{target}"
            try:
                written = export_checkpoint(trained, folder, target)
            except ValueError as error:
                why = str(error)
            except OSError as error:  # such as a folder of an earlier training, which nothing else takes the place of
                return f"not written back: {error}"
            else:
                done = f"in the layout that they were found in (--to {target}): {folder}"
                return "\n".join([done, *(f"note: {note}" for note in written.notes)])
        return f"not written back: {why}"


def start_from(name: str, folder: str, base: str | None = None, options: dict[str, Any] | None = None) -> Start:
    """Heads of any id as ones that are trained further.

    Args:
        name: heads of this library, a published drafter, or a base with modules of its own.
        folder: new folder for what is no checkpoint of this library; one that holds it already is used again.
        base: the base to train on, such as a fine-tuned one; by default that of the heads.
        options: of which config fields that the layout leaves open are taken out.

    Raises:
        OSError, ValueError: as of `from_pretrained`; or nothing there can be trained.
    """
    found, ready = recognize(name), os.path.exists(os.path.join(folder, CONFIG))
    if found.kind == BASE and not found.modules:
        raise ValueError(f"{name!r} is a base ({found.by}) without modules of its own: give --base and --family.")
    if found.kind == BASE:
        if not ready:
            MtpForCausalLM.from_base(base or name, modules_from=name).save_pretrained(folder)
        return Start(folder, base or name, "mtp", ("base",))
    if found.kind == OURS:
        config = read_heads_config(name)
        if base is None and config.base_model_name_or_path is None:
            raise ValueError(f"{name!r} names no base: give --base.")
        if base is None:  # from the folder of its heads, and of it what they name
            parts = (full_name(config.base_model_name_or_path, name), config.base_subfolder, config.base_gguf_file)
            base = "/".join(part for part in parts if part)
        return Start(name, base, config.family)
    source, layout = find(name, {})
    engine = source.config.get(WRITTEN_FOR, "sglang" if "Eagle" in str(source.config.get("architectures")) else "")
    known = layout.family.config_class.heads_fields()
    fields = {key: (options or {}).pop(key) for key in known & set(options or {})}
    if not ready:
        for note in convert_checkpoint(name, folder, base_model=base, fields=fields).notes:
            logger.warning_once(f"{name!r}: {note}")
    config = read_heads_config(folder)
    targets = sorted(layout.targets, key=lambda target: target != engine)
    return Start(folder, base or config.base_model_name_or_path, config.family, tuple(targets))
