"""The base of a set of heads: where it lies, whether it is the right one, and loading it."""

import difflib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME, CONFIG_NAME, cached_file, extract_commit_hash, logging

from hf_drafthead.modeling.adapters import adapter_base, find_adapter, load_adapter, unwrapped
from hf_drafthead.modeling.checkpoint import (
    HTTP_ERROR,
    NOT_ASKED,
    WEIGHTS,
    fetch_file,
    is_missing_folder,
    was_looked_up,
    why_refused,
)
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import first_line
from hf_drafthead.modeling.gguf_files import beside, gguf_arguments, load_tokenizer, reading_gguf, split_gguf

logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tekken.json")
GIVE_BASE = "pass base_model= (in a shell --base-model) with its id, path or object."
# For decoder-only models; transformers lists some of those that hear beside models with an encoder and a decoder.
SEE_OR_HEAR = (AutoModelForImageTextToText, AutoModelForMultimodalLM, AutoModelForSeq2SeqLM)
BESIDE_THE_CONFIG = ("dtype", "torch_dtype", "quantization_config")


def load_named(
    name: str,
    hub: dict[str, Any],
    arguments: Mapping[str, Any],
    *,
    fields: Collection[str] = (),
    checkpoint: str | None = None,
    config: DraftHeadConfig | None = None,
) -> tuple[Any, dict[str, Any]]:
    """A base for fresh heads, or the one that the heads of a checkpoint run on; and what their config says of it.

    Args:
        name: Hub id or path, of a base or of an adapter for one; it may end with the name of a GGUF file.
        hub: keyword arguments of every download, `revision` among them.
        arguments: all others of `AutoModelForCausalLM.from_pretrained`.
        fields: of the config of fresh heads.
        checkpoint, config: of trained heads.

    Raises:
        OSError: there is no such base.
        TypeError: an argument is a field of the heads, misspelt.
        ValueError: it is no decoder-only language model, or another than the heads were made for.
    """
    name, file = split_gguf(name)
    arguments = {**arguments, "gguf_file": file} if file else arguments
    called, wanted = f"the base {name!r}", "give the id or path of a causal language model."
    if checkpoint is not None:
        called, wanted = f"{called} of {checkpoint!r}", GIVE_BASE
    if is_missing_folder(name):
        raise OSError(f"{called} was not found (there is no such folder): {wanted}")
    arguments = gguf_arguments(name, arguments, hub)
    place, revision = name, hub["revision"]
    try:
        place, hub, adapter = _behind_adapter(name, hub)
        base_config, arguments = _config_at(place, hub, arguments)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        if refused := why_refused(error):
            other = "" if checkpoint is None else "; base_model= takes another place of it"
            raise OSError(f"{called} cannot be fetched at {revision!r}: {refused}{other}.") from error
        what = "cannot be read" if os.path.isdir(name) else "was not found"
        others = "" if file else beside(name)
        raise OSError(f"{called} {what} ({first_line(error)}{others}): {wanted}") from error
    refuse_unfit(base_config, place, loaded=False)
    refuse_misspelt(arguments, fields)
    file = arguments.get("gguf_file")
    commit = commit_of(place, hub, file or CONFIG_NAME)
    if config is not None:
        check_base(config, base_config, place)
        if commit and config.base_model_revision and commit != config.base_model_revision:
            logger.warning_once(
                f"these heads were trained on {config.base_model_name_or_path!r} at {config.base_model_revision}; "
                f"the base is {place!r} at {commit}: fewer guesses may be accepted."
            )
    hub["revision"] = commit or hub["revision"]
    try:
        with reading_gguf(file):
            base = (auto_class(base_config) or AutoModelForCausalLM).from_pretrained(place, **hub, **arguments)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None and was_looked_up(place, file or WEIGHTS, hub):
            raise
        raise OSError(f"{called} cannot be fetched at {revision!r}: {refused or NOT_ASKED}.") from error
    if file is not None:
        base.name_or_path = base.config.name_or_path = place  # transformers takes the title that is in the file
    origin = {"base_model_name_or_path": full_name(place), "base_model_revision": commit, "base_gguf_file": file}
    if adapter is not None:
        load_adapter(base, adapter)
        commit = extract_commit_hash(os.path.join(adapter, ADAPTER_CONFIG_NAME), None)
        if not os.path.isdir(name):
            origin |= {"adapter_name_or_path": name, "adapter_revision": commit}
    return base, origin


def _behind_adapter(name: str, hub: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Where a base lies, how it is fetched, and the folder of the adapter if its name is one of an adapter."""
    # What the Hub has against it is told where the config is fetched.
    quiet = {f"_raise_exceptions_for_{reason}": False for reason in ("connection_errors", "gated_repo")}
    adapter = find_adapter(name, {**hub, **quiet})
    if adapter is None or fetch_file(name, CONFIG_NAME, hub) is not None:  # transformers loads both from such a folder
        return name, hub, None
    place, revision = adapter_base(adapter)
    return place, {**hub, "revision": revision or "main"}, adapter


def load_base(
    checkpoint: str,
    config: DraftHeadConfig,
    chosen: str | os.PathLike | nn.Module | None,
    revision: str | None,
    fetch: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """The base that the heads of a checkpoint run on, checked against what they were trained for.

    Args:
        checkpoint: folder or Hub id of the heads.
        config: theirs; where the base lies here is written down in it.
        chosen: the user's choice of a base; None for the one that the config names.
        revision, fetch, arguments: for loading it by its name.

    Raises:
        OSError, TypeError, ValueError: as `load_named`; and arguments for loading a base that is loaded already.
    """
    base: Any = chosen
    if isinstance(chosen, nn.Module):
        base = unwrapped(base)
        refuse_loading_arguments(base, arguments)
        name = getattr(base.config, "_name_or_path", "")
        refuse_unfit(base.config, type(base).__name__, loaded=True)
        check_base(config, base.config, name or type(base).__name__)
    else:
        if chosen is None:
            revision = revision or config.base_model_revision
            arguments = {**arguments, "gguf_file": arguments.get("gguf_file") or config.base_gguf_file}
        wanted = locate_base(config, checkpoint) if chosen is None else os.fspath(chosen)
        hub = {**fetch, "revision": revision or "main"}
        base, origin = load_named(wanted, hub, arguments, checkpoint=checkpoint, config=config)
        name = origin["base_model_name_or_path"]
        if chosen is not None and is_local(config.base_model_name_or_path or name, checkpoint):
            config.base_gguf_file = origin["base_gguf_file"]  # the path is recorded below
    # A Hub id stays as the record of what the heads were trained for; a path is only where the base lies here.
    recorded = config.base_model_name_or_path
    if name and (chosen is None or not recorded or is_local(recorded, checkpoint)):
        config.base_model_name_or_path = full_name(name)
    return base


def locate_base(config: DraftHeadConfig, checkpoint: str) -> str:
    """Name of the base that the config asks for: a Hub id, or a path, made absolute from the checkpoint's folder.

    Raises:
        OSError: the config names no base, or a folder that is not there.
    """
    name = config.base_model_name_or_path
    if not name:
        raise OSError(f"{checkpoint!r} does not say which base it was trained for: {GIVE_BASE}")
    inside = Path(checkpoint) / name
    if inside.is_dir():
        return str(inside.resolve())
    if os.path.isabs(name) or name.startswith("."):
        if Path(name).is_dir() and os.path.isabs(name):
            return name
        raise OSError(f"the base of {checkpoint!r} was not found at {str(inside)!r}: {GIVE_BASE}")
    return name


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base of another model type, hidden size or vocabulary than the heads were made for."""
    wanted, base_text = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(base_text, field, None)
        if want is not None and want != have:
            if name == trained_for:
                raise ValueError(
                    f"the base {name!r} has changed since these heads were trained for it ({words} {want} then, {have} "
                    "now): give the commit that they were trained on (base_revision=), or train heads for the new one."
                )
            raise ValueError(
                f"these heads were trained for {trained_for!r} ({words} {want}); the base at {name!r} has {words} "
                f"{have}: load the first, or train heads for the second."
            )


def fetch_config(name: str, revision: str | None, token: str | bool | None, **hub: Any) -> PreTrainedConfig:
    """The config of a base at a Hub id or folder, without running code that may lie beside it.

    Raises:
        OSError: there is none, or it cannot be fetched.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error) or first_line(error)
        raise OSError(f"config.json of the base {name!r} cannot be fetched: {refused}.") from error
    model_type = fields.get("model_type")
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    config = PreTrainedConfig.from_dict(fields)
    config.model_type = model_type
    return config


def last_layer(base: Any) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of the base's lm_head."""
    head = base.get_output_embeddings()
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    device = _weight(head).device if device is None else device
    dtype = _weight(head).dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a quantized lm_head
        dtype = base.dtype
    return torch.device(device), dtype


def _weight(head: Any) -> Any:
    """The weight of a layer; torch's quantized layers have a function there."""
    return head.weight() if callable(head.weight) else head.weight


def width_of(base: Any) -> int | None:
    """How wide the states are that the base's lm_head reads, where that is not its hidden_size; else None."""
    head = base.get_output_embeddings()
    width = getattr(head, "in_features", None) or _weight(head).shape[-1]
    return None if width == base.config.get_text_config(decoder=True).hidden_size else width


def refuse_unfit(config: PreTrainedConfig, name: str, loaded: bool) -> None:
    """Refuse a base whose own `generate` draft heads could not reproduce: with heads, an encoder, or no language model.

    Args:
        config: of the base.
        name: for the message.
        loaded: whether the base is a loaded model, and not yet to be loaded by AutoModelForCausalLM.
    """
    if str(config.model_type).startswith(MODEL_TYPE_PREFIX):
        base_name = "model.base" if loaded else getattr(config, "base_model_name_or_path", None)
        if base_name and os.path.isdir(beside := os.path.join(name, base_name)):  # written relative to the heads
            base_name = os.path.normpath(beside)
        raise ValueError(f"{name!r} has draft heads already: give their base{f' ({base_name})' if base_name else ''}.")
    remote = bool(getattr(config, "auto_map", None)) or config.model_type not in CONFIG_MAPPING
    loadable = not config.is_encoder_decoder if loaded else remote or auto_class(config) is not None
    if not loadable:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no language"
        raise ValueError(
            f"{name!r} is {kind} model ({config.model_type}): draft heads need a decoder-only language model, as "
            "AutoModelForCausalLM, AutoModelForImageTextToText or AutoModelForMultimodalLM loads it."
        )


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a base, which may also see or hear; None for what continues no text."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM
    if config.is_encoder_decoder:
        return None
    return next((kind for kind in SEE_OR_HEAR if type(config) in kind._model_mapping), None)


def refuse_misspelt(arguments: Mapping[str, Any], fields: Collection[str]) -> None:
    """Refuse arguments for loading a base that are more likely fields of the heads, by a TypeError that names them."""
    for name in arguments:
        if meant := difflib.get_close_matches(name, fields, 1, 0.7):
            raise TypeError(f"{name}= is no field of these heads and no argument of a base: {meant[0]}= may be meant.")


def refuse_loading_arguments(base: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what only matters while a base is loaded, and would be ignored with a loaded one, by a TypeError."""
    harmless: dict[str, tuple[Any, ...]] = {
        "dtype": ("auto", base.dtype, str(base.dtype).removeprefix("torch.")),
        "trust_remote_code": (True, False),
        "attn_implementation": (getattr(base.config, "_attn_implementation", None),),
        "experts_implementation": (getattr(base.config, "_experts_implementation", None),),
    }
    harmless["torch_dtype"] = harmless["dtype"]
    for name, value in arguments.items():
        if value is not None and value not in harmless.get(name, ()):
            raise TypeError(
                f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}: "
                "set it when the base is loaded."
            )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


def copy_tokenizer(name: str | None, folder: Path, gguf_file: str | None, hub: Mapping[str, Any]) -> bool:
    """Save the tokenizer of a base in a folder that has none; returns whether the folder has one.

    Args:
        name: folder or Hub id of the base; None if there is none to take it from.
        folder: of the checkpoint.
        gguf_file: of the base, if it is in one.
        hub: keyword arguments of every download.

    Raises:
        OSError: the Hub refuses access.
        ValueError: it cannot be loaded.
    """
    if has_tokenizer(folder):
        return True
    if not name or is_missing_folder(name):
        return False
    quiet = {**hub, "_raise_exceptions_for_connection_errors": not hub.get("local_files_only")}
    if gguf_file is None and not any(fetch_file(name, file, quiet) for file in TOKENIZER_FILES):
        return False
    try:
        load_tokenizer(name, gguf_file, **hub).save_pretrained(folder)
    except (HTTP_ERROR, OSError, ValueError, TypeError, KeyError, ImportError) as error:
        raise ValueError(f"the tokenizer of {name!r} cannot be loaded: {first_line(error)}") from error
    return True


def full_name(name: str) -> str:
    """The name of a base, wherever it will be read: a path is made absolute."""
    return str(Path(name).resolve()) if os.path.isdir(name) else name


def is_local(name: str, checkpoint: str | os.PathLike) -> bool:
    """Whether the name of a base, as the config of a checkpoint gives it, is a path and no Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return (Path(checkpoint) / name).is_dir()


def _config_at(
    name: str, hub: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The base's config, read before its weights are, and the arguments to load these with: the config among them."""
    # As AutoModel does: these are not for the config, everything else that it knows goes into it.
    loading_arguments = {key: arguments[key] for key in BESIDE_THE_CONFIG if arguments.get(key) is not None}
    code = {key: arguments[key] for key in ("trust_remote_code", "code_revision") if key in arguments}
    fields = {key: value for key, value in arguments.items() if key not in loading_arguments and key not in code}
    with reading_gguf(arguments.get("gguf_file")):
        config, left = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **code, **hub, **fields)
    return config, {**loading_arguments, **code, **left, "config": config}


def commit_of(name: str, hub: Mapping[str, Any], of_file: str = CONFIG_NAME) -> str | None:
    """The commit that a Hub id and revision resolve to, by a file that it has; None for a local folder."""
    if os.path.isdir(name):
        return None
    file = cached_file(name, of_file, _raise_exceptions_for_missing_entries=False, **hub)
    return extract_commit_hash(file, None)
