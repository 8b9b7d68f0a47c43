"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""

import copy
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import PureWindowsPath
from types import MappingProxyType
from typing import Any, cast

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from hf_drafthead.generation.tree import resolve
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import first_line, open_tensors, read_json, shortened

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
NOT_ASKED = "it is not in the cache, and the Hub cannot be reached (offline mode, or no connection): connect and try "
NOT_ASKED += "again, or give a local folder"
REFUSALS = {  # what the Hub has against a download, and what to do
    GatedRepoError: "the repository is gated: ask for access on its page, then sign in or pass token=",
    RepositoryNotFoundError: "the Hub has no such repository, or it is private: check the name, and sign in (`hf auth "
    "login`) or pass token= of somebody who can read it",
    RevisionNotFoundError: "the repository has no such revision: give a branch, tag or commit that it has",
}
GIVE_CHECKPOINT = "give the folder of a draft-head checkpoint, or its id on the Hub"
HEADS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
IN_ANOTHER_LAYOUT = (
    "if these are heads in another project's layout, give convert=True, or convert them once with `hf-drafthead "
)
IN_ANOTHER_LAYOUT += "convert`"


def read_heads_config(
    path: str, hub: Mapping[str, Any] = NO_OPTIONS, family: type[DraftHeadConfig] = DraftHeadConfig, chosen: Any = None
) -> Any:
    """The config of a checkpoint with draft heads.

    Args:
        path: its folder or Hub id.
        hub: keyword arguments of every download.
        family: config class of the heads that it should hold; heads of any family by default.
        chosen: a config of which a copy is taken instead, or where one is read instead.

    Raises:
        OSError: there is no config.json, or it cannot be fetched.
        ValueError: it belongs to another kind of model, or to another or an unknown family.
    """
    ready = copy.deepcopy(chosen) if isinstance(chosen, PreTrainedConfig) else None
    fields = {} if ready is not None else _heads_fields(path if chosen is None else os.fspath(chosen), hub)
    model_type = str(fields.get("model_type") if ready is None else ready.model_type)
    of_any, ours = family is DraftHeadConfig, model_type.startswith(MODEL_TYPE_PREFIX)
    if of_any and ours and model_type in CONFIG_MAPPING:
        family = CONFIG_MAPPING[model_type]
    if model_type == family.model_type:
        config = family.from_dict(fields) if ready is None else ready
        if of_any and config.base_config is None:
            raise ValueError(f"{path!r} does not hold the config of its base: save it again, or correct config.json.")
        return config
    if ours:
        known = sorted(name for name in CONFIG_MAPPING if name.startswith(MODEL_TYPE_PREFIX))
        raise ValueError(
            f"{path!r} holds {shortened.repr(model_type)} heads, expected "
            f"{' or '.join(known if of_any else [family.model_type])}: load it with AutoModel; a newer hf_drafthead "
            "may know other families."
        )
    raise ValueError(
        f"{path!r} holds a {shortened.repr(model_type)} model without draft heads: {GIVE_CHECKPOINT}; to put new heads "
        f"on a base use from_base; {IN_ANOTHER_LAYOUT}."
    )


def _heads_fields(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the config.json of a checkpoint says."""
    # heads lie under the name of their owner on the Hub: a name without one is not asked for there
    if is_missing_folder(path) or ("/" not in path and not os.path.isdir(path)):
        reason = f"{path!r} is a file" if os.path.isfile(path) else f"there is no folder {path!r}"
        raise OSError(f"{reason}: {GIVE_CHECKPOINT}.")
    try:
        fields, _ = DraftHeadConfig.get_config_dict(path, **hub)
        if not fields:
            raise OSError("there is no config.json, or it is empty")
    except (OSError, HTTP_ERROR) as error:
        if refused := why_refused(error):
            raise OSError(f"the heads {path!r} cannot be fetched: {refused}.") from error
        raise OSError(
            f"{path!r} is no draft-head checkpoint ({first_line(error)}): {GIVE_CHECKPOINT}; {IN_ANOTHER_LAYOUT}."
        ) from error
    return fields


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says, its draft tree checked; nothing if it has none."""
    file = fetch_file(path, GENERATION_CONFIG_NAME, hub)
    settings = read_json(file) if file else {}
    if isinstance(settings.get("draft_tree"), (list, dict)):
        resolve(settings["draft_tree"], None, 2**31)  # refuses a tree that no call of generate could use
    return settings


def weight_names(variant: str | None = None) -> tuple[str, str]:
    """The names of a checkpoint's file of weights, and of the index that stands in its place beside shards."""
    if not variant:
        return WEIGHTS, INDEX
    return f"model.{variant}.safetensors", f"model.safetensors.index.{variant}.json"


def checkpoint_files(path: str, variant: str | None, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint (`model.<variant>.safetensors`), in a local folder or fetched from the Hub.

    Raises:
        OSError: there are no weights, a shard is missing, or the index cannot be read or names other files than shards.
    """
    weights, index = weight_names(variant)
    files = weights_in(path, weights, hub) or weights_in(path, index, hub)
    if files is not None:
        return files
    refuse_unasked(path, (weights, index), hub)
    raise OSError(
        f"{path!r} holds no {weights}: save the model there again, or give the folder that has it (a pickle such as "
        "pytorch_model.bin is never opened, for it can run code)."
    )


def refuse_unasked(path: str, names: Collection[str], hub: Mapping[str, Any]) -> None:
    """Raise an OSError if it is not known of all these files, none of which was fetched, that they are not there."""
    if not all(was_looked_up(path, name, hub) for name in names):
        raise OSError(f"the weights of {path!r} cannot be fetched: {NOT_ASKED}.")


def read_tensors(path: str, hub: Mapping[str, Any] = NO_OPTIONS, variant: str | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint, mapped from its files; errors as of `checkpoint_files` and `map_tensors`."""
    return map_tensors(checkpoint_files(path, variant, hub))


def weights_in(path: str, name: str, hub: Mapping[str, Any]) -> list[str] | None:
    """A file of weights, or the shards that an index of that name spreads the tensors over; None if there is none.

    Raises:
        OSError: a shard is missing, or the index cannot be read or names other files than shards beside it.
    """
    file = fetch_file(path, name, hub)
    if file is None or not name.endswith(".json"):
        return None if file is None else [file]
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise OSError(f"{file!r} is no index of weights: expected the object 'weight_map'; copy or download it again.")
    kind, files = "safetensors" if ".safetensors." in name else "bin", []
    for shard in dict.fromkeys(map(str, weight_map.values())):
        # as Windows reads it: both kinds of slash and drives lead elsewhere
        if not shard.endswith(f".{kind}") or PureWindowsPath(shard).name != shard:
            raise OSError(
                f"{file!r} names the file {shortened.repr(shard)}: expected the name of a {kind} file in the "
                "same folder; do not use this checkpoint."
            )
        if (shard_file := fetch_file(path, shard, hub)) is None:
            raise OSError(f"{path!r} lacks {shard}, which its {name} names: copy or download the checkpoint again.")
        files.append(shard_file)
    return sorted(files)


def fetch_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of a model, here; None if it has no such file.

    Raises:
        OSError: the Hub refuses it, or cannot be reached.
    """
    at = f" at {hub['revision']!r}" if hub.get("revision") not in (None, "main") else ""
    try:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    except (OSError, HTTP_ERROR) as error:
        if (refused := why_refused(error)) is None:
            raise
        raise OSError(f"{name} of {path!r}{at} cannot be fetched: {refused}.") from error


def was_looked_up(path: str, name: str, hub: Mapping[str, Any]) -> bool:
    """Whether it is known of a file if a model has it: not where the Hub could not be asked for it.

    Other files of the model in the cache do not tell: they may be a part of it.
    """
    if os.path.isdir(path):
        return True
    named = {key: hub[key] for key in ("revision", "cache_dir") if hub.get(key) is not None}
    if try_to_load_from_cache(path, os.path.join(hub.get("subfolder") or "", name), **named) is not None:
        return True
    options = {key: hub[key] for key in ("subfolder", "token", "local_files_only") if hub.get(key) is not None}
    try:
        hf_hub_download(path, name, **named, **options)  # a cache that cannot be written to keeps no note of it
    except (OSError, HTTP_ERROR, ValueError) as error:
        return isinstance(error, RemoteEntryNotFoundError)
    return True


def is_missing_folder(name: str) -> bool:
    """Whether a name can be no id on the Hub but only that of a folder, and there is none."""
    local = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
    return local and not os.path.isdir(name)


def why_refused(error: BaseException) -> str | None:
    """What the Hub had against a download, and what to do; None for an error that is not about that."""
    cause: BaseException | None = error
    asked = True
    while cause is not None:
        asked = asked and not isinstance(cause, LocalEntryNotFoundError)
        for kind, reason in REFUSALS.items():
            if isinstance(cause, kind):
                return reason
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            if cause.response.status_code == 401:
                return "the Hub does not accept the token: sign in anew (`hf auth login`), or pass another token="
            return f"the Hub answered {cause.response.status_code}: try again later"
        if isinstance(cause, HTTP_ERROR):
            return (
                f"the connection broke ({type(cause).__name__}): try again, files that have arrived are kept; if a "
                "local folder was meant, there is none of that name"
            )
        cause = cause.__cause__ or cause.__context__
    return None if asked else NOT_ASKED


@torch.inference_mode(False)
def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used.

    Raises:
        OSError: a file is no readable safetensors file, or a tensor is in two of them.
    """
    mapped: dict[str, Tensor] = {}
    for file in files:
        with open_tensors(file) as tensors:
            names = set(tensors.keys())
            if twice := sorted(names & set(mapped)):
                raise OSError(
                    f"{file!r} holds the tensor {shortened.repr(twice[0])}, which another file of the checkpoint holds "
                    "as well: copy or download the checkpoint again."
                )
            mapped |= {name: tensors.get_tensor(name) for name in names}
    return mapped


def check_tensors(path: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare the tensors of a checkpoint's drafter with tensors of the shapes and types that its config asks for.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, or of another kind of number.
    """
    for name, wanted in expected.items():
        if name not in tensors:
            raise ValueError(
                f"{path!r} lacks the tensor {name!r} {list(wanted.shape)} that its config asks for: "
                "save the checkpoint again, or correct config.json."
            )
        if tensors[name].shape != wanted.shape:
            raise ValueError(
                f"{path!r} has {name!r} of shape {shortened.repr(list(tensors[name].shape))}, but its config asks for "
                f"{list(wanted.shape)}: save the checkpoint again, or correct config.json."
            )
        allowed = HEADS_DTYPES if wanted.dtype.is_floating_point else (wanted.dtype,)
        if tensors[name].dtype not in allowed:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
            raise ValueError(
                f"{path!r} has {name!r} in {str(tensors[name].dtype).removeprefix('torch.')}, expected {names}: save "
                "it in such a type."
            )
    if unknown := sorted(set(tensors) - set(expected)):
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as "
            f"{shortened.repr(unknown[0])}: remove them, or correct config.json."
        )
