"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""

import copy
import os
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, cast

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from hf_drafthead.generation.tree import resolve
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import in_one_line, open_tensors, read_json, refusing, shortened

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
GIVE_CHECKPOINT = "give the folder of a draft-head checkpoint, or its id on the Hub"
IN_ANOTHER_LAYOUT = "if these are heads in another project's layout, give convert=True, or convert them once with "
IN_ANOTHER_LAYOUT += "`hf-drafthead convert`"


def read_heads_config(
    path: str, hub: Mapping[str, Any] = NO_OPTIONS, family: type[DraftHeadConfig] = DraftHeadConfig, chosen: Any = None
) -> Any:
    """The config of a checkpoint with draft heads of a family, or the one that is given instead."""
    fields = {"model_type": chosen.model_type} if chosen is not None else _heads_fields(path, hub)
    model_type = str(fields.get("model_type"))
    known = sorted(name for name in CONFIG_MAPPING if name.startswith(MODEL_TYPE_PREFIX))
    wanted = known if family is DraftHeadConfig else [family.model_type]
    if model_type in wanted:
        config = CONFIG_MAPPING[model_type].from_dict(fields) if chosen is None else copy.deepcopy(chosen)
        if family is DraftHeadConfig and config.base_config is None:
            raise ValueError(f"{path!r} does not hold the config of its base: save it again, or correct config.json.")
        return config
    if model_type.startswith(MODEL_TYPE_PREFIX):
        raise ValueError(
            f"{path!r} holds {shortened.repr(model_type)} heads, expected {' or '.join(wanted)}: load it with "
            "AutoModel; a newer hf_drafthead may know other families."
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
    what, advice = f"{path!r} is no draft-head checkpoint", f"{GIVE_CHECKPOINT}; {IN_ANOTHER_LAYOUT}."
    with refusing(OSError, what, advice, of=(OSError, HTTP_ERROR)):
        fields, _ = DraftHeadConfig.get_config_dict(path, **hub)
        if not fields:
            raise OSError("there is no config.json, or it is empty")
    return fields


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says, its draft tree checked; nothing if it has none."""
    file = fetch_file(path, GENERATION_CONFIG_NAME, hub)
    settings = read_json(file) if file else {}
    if isinstance(settings.get("draft_tree"), (list, dict)):
        resolve(settings["draft_tree"], None, 2**31)  # refuses a tree that no call of generate could use
    return settings


def checkpoint_files(path: str, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, in a folder or fetched from the Hub."""
    for name in (WEIGHTS, INDEX):
        if (files := weights_in(path, name, hub)) is not None:
            return files
    raise OSError(
        f"{path!r} holds no {WEIGHTS} ({why_missing(path, WEIGHTS, hub)}): save the model there again, or give the "
        "folder that has it (a pickle such as pytorch_model.bin is never opened, for it can run code)."
    )


def why_missing(path: str, name: str, hub: Mapping[str, Any]) -> str:
    """Why a file that a model needs is not here, in transformers' words: it has none, or the Hub cannot be asked."""
    try:
        cached_file(path, name, **hub)
        return "it has none"
    except (OSError, HTTP_ERROR) as error:
        return in_one_line(error)


def read_tensors(path: str, hub: Mapping[str, Any] = NO_OPTIONS) -> dict[str, Tensor]:
    """The tensors of a checkpoint, mapped from its files; errors as of `checkpoint_files` and `map_tensors`."""
    return map_tensors(checkpoint_files(path, hub))


def weights_in(path: str, name: str, hub: Mapping[str, Any]) -> list[str] | None:
    """A file of weights, or the shards that an index of that name spreads the tensors over; None if there is none."""
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
    """A file of a model, here; None if it has no such file."""
    with refusing(OSError, f"{name} of {path!r} cannot be fetched", of=(OSError, HTTP_ERROR)):
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)


def is_local(name: str, checkpoint: str | os.PathLike) -> bool:
    """Whether the name of a model, as the config of a checkpoint gives it, is a path and no Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return (Path(checkpoint) / name).is_dir()


def is_missing_folder(name: str) -> bool:
    """Whether a name can be no id on the Hub but only that of a folder, and there is none."""
    return not os.path.isdir(name) and is_local(name, os.curdir)


@torch.inference_mode(False)
def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used."""
    mapped: dict[str, Tensor] = {}
    for file in files:
        with open_tensors(file) as tensors:
            mapped |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    return mapped


def check_tensors(path: str, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare the tensors of a checkpoint's drafter with tensors of the shapes and types that its config asks for."""
    advice = "save the checkpoint again, or correct config.json."
    for name, tensor in expected.items():
        if name not in tensors:
            raise ValueError(
                f"{path!r} lacks the tensor {name!r} {list(tensor.shape)} that its config asks for: {advice}"
            )
        there, wanted = _form(tensors[name]), _form(tensor)
        if there != wanted:
            raise ValueError(f"{path!r} has {name!r} as {there}, but its config asks for {wanted}: {advice}")
    if unknown := sorted(set(tensors) - set(expected)):
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as "
            f"{shortened.repr(unknown[0])}: {advice}"
        )


def _form(tensor: Tensor) -> str:
    """The kind of number, and the shape: all floating types of two bytes and more are converted into each other."""
    converted = tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1
    kind = "floating-point numbers" if converted else str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {shortened.repr(list(tensor.shape))}"
