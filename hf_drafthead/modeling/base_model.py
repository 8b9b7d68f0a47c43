"""The base of a set of heads: where it lies, whether it is the right one, and loading it."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import cached_file, logging

from hf_drafthead.modeling.checkpoint import HTTP_ERROR, why_refused
from hf_drafthead.modeling.config import DraftHeadConfig

logger = logging.get_logger(__name__)

BESIDE_THE_CONFIG = ("dtype", "torch_dtype", "quantization_config")


def load_new_base(
    name: str, revision: str | None, fetch: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """A base for fresh heads, and its commit if it comes from the Hub.

    Args:
        name: Hub id or path.
        revision: branch, tag or commit.
        fetch: keyword arguments of every download.
        arguments: all others of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        OSError: there is no such base.
    """
    hub = {**fetch, "revision": revision or "main"}
    try:
        _, arguments = _config_at(name, hub, arguments)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        refused = why_refused(error)
        if refused:
            raise OSError(f"the base {name!r} cannot be fetched: {refused}.") from error
        raise OSError(
            f"the base {name!r} was not found ({_first_line(error)}): give the id or path of a causal language model."
        ) from error
    commit = commit_of(name, hub)
    hub["revision"] = commit or hub["revision"]
    return AutoModelForCausalLM.from_pretrained(name, **hub, **arguments), commit


def load_base(
    checkpoint: str,
    config: DraftHeadConfig,
    given: str | os.PathLike | nn.Module | None,
    revision: str | None,
    fetch: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """The base that the heads of a checkpoint run on, checked against what they were trained for.

    Args:
        checkpoint: folder or Hub id of the heads.
        config: theirs; where the base lies here is written down in it.
        given: the user's choice of a base; None for the one that the config names.
        revision, fetch, arguments: as above.

    Raises:
        OSError: the base is not there.
        TypeError: arguments for loading a base that is loaded already.
        ValueError: it is another base than the heads were made for.
    """
    base: Any = given
    if isinstance(given, nn.Module):
        refuse_loading_arguments(base, arguments)
        name = getattr(base.config, "_name_or_path", "")
        check_base(config, base.config, name or type(base).__name__)
    else:
        name = locate_base(config, checkpoint) if given is None else os.fspath(given)
        if (os.path.isabs(name) or name.startswith(".")) and not os.path.isdir(name):
            raise OSError(
                f"the base {name!r} of {checkpoint!r} was not found (there is no such folder): pass base_model= with "
                "its id, path or object."
            )
        revision = revision or (config.base_model_revision if given is None else None) or "main"
        hub = {**fetch, "revision": revision}
        try:
            found, arguments = _config_at(name, hub, arguments)
        except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
            refused = why_refused(error)
            if refused:
                raise OSError(
                    f"the base {name!r} of {checkpoint!r} cannot be fetched at {revision!r}: {refused}; base_model= "
                    "takes another place of it."
                ) from error
            raise OSError(
                f"the base {name!r} of {checkpoint!r} was not found ({_first_line(error)}): pass base_model= with its "
                "id, path or object."
            ) from error
        check_base(config, found, name)
        commit = commit_of(name, hub)
        if commit and config.base_model_revision and commit != config.base_model_revision:
            logger.warning_once(
                f"these heads were trained on {config.base_model_name_or_path!r} at {config.base_model_revision}; "
                f"the base is {name!r} at {commit}: fewer guesses may be accepted."
            )
        hub["revision"] = commit or revision
        try:
            base = AutoModelForCausalLM.from_pretrained(name, **hub, **arguments)
        except (OSError, HTTP_ERROR) as error:
            refused = why_refused(error)
            if refused is None:
                raise
            raise OSError(
                f"the base {name!r} of {checkpoint!r} cannot be fetched at {revision!r}: {refused}."
            ) from error
    # A Hub id stays as the record of what the heads were trained for; a path is only where the base lies here.
    recorded = config.base_model_name_or_path
    if name and (given is None or not recorded or is_local(recorded, checkpoint)):
        config.base_model_name_or_path = full_name(name)
    return base


def locate_base(config: DraftHeadConfig, checkpoint: str) -> str:
    """Name of the base that the config asks for: a Hub id, or an absolute path.

    A relative path is looked up in the checkpoint's folder.

    Raises:
        OSError: the config names no base, or a folder that is not there.
    """
    name = config.base_model_name_or_path
    if not name:
        raise OSError(
            f"{checkpoint!r} does not say which base it was trained for: pass base_model= with its id, path or object."
        )
    inside = Path(checkpoint) / name
    if inside.is_dir():
        return str(inside.resolve())
    if os.path.isabs(name) or name.startswith("."):
        if Path(name).is_dir() and os.path.isabs(name):
            return name
        raise OSError(
            f"the base of {checkpoint!r} was not found at {str(inside)!r}: pass base_model= with its id, path or "
            "object."
        )
    return name


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base that the heads were not made for.

    Raises:
        ValueError: model type, hidden size or vocabulary differ.
    """
    if isinstance(base_config, DraftHeadConfig):
        raise ValueError(f"the base {name!r} has draft heads itself: give the model that these heads were trained for.")
    wanted, given = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(given, field, None)
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
    """The config of a base, without running code that may lie beside it.

    Args:
        name: Hub id or folder.
        revision: branch, tag or commit.
        token: as in huggingface_hub.
        hub: `cache_dir`, `local_files_only`, ...

    Raises:
        OSError: there is none, or it cannot be fetched.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error) or _first_line(error)
        raise OSError(f"config.json of the base {name!r} cannot be fetched: {refused.rstrip('.')}.") from error
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
    device = head.weight.device if device is None else device
    dtype = head.weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a quantized lm_head
        dtype = base.dtype
    return torch.device(device), dtype


def refuse_loading_arguments(base: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what only matters while a base is loaded, and would be ignored silently with a loaded one.

    Raises:
        TypeError: there is such an argument.
    """
    harmless: dict[str, tuple[Any, ...]] = {
        "dtype": ("auto", base.dtype, str(base.dtype).removeprefix("torch.")),
        "trust_remote_code": (True, False),
        "attn_implementation": (getattr(base.config, "_attn_implementation", None),),
    }
    harmless["torch_dtype"] = harmless["dtype"]
    for name, value in arguments.items():
        if value is not None and value not in harmless.get(name, ()):
            raise TypeError(
                f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}: "
                "set it when the base is loaded."
            )


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
    beside = {key: arguments[key] for key in BESIDE_THE_CONFIG if arguments.get(key) is not None}
    code = {key: arguments[key] for key in ("trust_remote_code", "code_revision") if key in arguments}
    fields = {key: value for key, value in arguments.items() if key not in beside and key not in code}
    config, left = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **code, **hub, **fields)
    return config, {**beside, **code, **left, "config": config}


def commit_of(name: str, hub: Mapping[str, Any]) -> str | None:
    """The commit that a Hub id and revision resolve to; None for a local folder."""
    if os.path.isdir(name):
        return None
    file = cached_file(name, "config.json", _raise_exceptions_for_missing_entries=False, **hub)
    commit = Path(file).parent.name if file else ""
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
