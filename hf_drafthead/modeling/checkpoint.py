"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""

import copy
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import PureWindowsPath
from typing import Any, cast

import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, has_file

from hf_drafthead.generation.tree import resolve
from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig
from hf_drafthead.modeling.files import open_tensors, read_json, shortened
from hf_drafthead.modeling.foreign import how_to_convert

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_heads_config(family: type[DraftHeadConfig], path: str, given: Any, hub: Mapping[str, Any]) -> DraftHeadConfig:
    """The checkpoint's config, or a copy of the given one (or what is read at the given path).

    Raises:
        OSError: there is no config.json.
        ValueError: it belongs to another family or kind of model.
    """
    if isinstance(given, PreTrainedConfig):
        found, config = given.model_type, copy.deepcopy(given)
    else:
        source = os.fspath(given) if given is not None else path
        try:
            fields, _ = family.get_config_dict(source, **hub)
            if not fields:
                raise OSError("there is no config.json, or it is empty")
        except (OSError, HTTP_ERROR) as error:
            refused = why_refused(error)
            if refused:
                raise OSError(f"the heads {source!r} cannot be fetched: {refused}.") from error
            if advice := how_to_convert(source, {}, lambda name: os.path.isfile(os.path.join(source, name))):
                raise OSError(f"{source!r} is no checkpoint of this library: {advice}.") from error
            raise OSError(
                f"{source!r} is no draft-head checkpoint ({str(error).splitlines()[0].rstrip('.')}): give a folder or "
                "Hub id that save_pretrained of a draft-head model has written."
            ) from error
        found = fields.get("model_type")
        config = family.from_dict(fields) if found == family.model_type else None
    if found != family.model_type:
        other_family = str(found).startswith(MODEL_TYPE_PREFIX)
        advice = "load it with AutoModel" if other_family else None
        if not isinstance(given, PreTrainedConfig):
            advice = advice or how_to_convert(path, fields)
        advice = advice or "to put new heads on a base use from_base"
        raise ValueError(
            f"{path!r} is no {family.model_type} checkpoint: its config.json has model_type {shortened.repr(found)}; "
            f"{advice}."
        )
    return config


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says; nothing if it has none.

    Raises:
        OSError: it cannot be read, or the Hub does not give it out.
        TypeError, ValueError: its draft tree is no tree.
    """
    found = fetch_file(path, GENERATION_CONFIG_NAME, hub)
    settings = read_json(found) if found else {}
    if isinstance(settings.get("draft_tree"), (list, dict)):
        resolve(settings["draft_tree"], None, 2**31)  # refuses a tree that no call of generate could use
    return settings


def checkpoint_files(path: str, variant: str | None, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, in a local folder or fetched from the Hub.

    Args:
        path: local folder or Hub id.
        variant: as in `from_pretrained`: `model.<variant>.safetensors`.
        hub: keyword arguments of `transformers.utils.cached_file`.

    Raises:
        OSError: there are no weights, a shard is missing, or the index cannot be read or names other files than shards.
    """
    weights, index = (_with_variant(name, variant) for name in (WEIGHTS, INDEX))
    found = fetch_file(path, weights, hub)
    if found is not None:
        return [found]
    found = fetch_file(path, index, hub)
    if found is None:
        here = {name: value for name, value in hub.items() if name != "subfolder"}
        if not hub.get("subfolder") and has_file(path, PICKLE, **here):
            raise OSError(
                f"{path!r} holds {PICKLE}, a pickle, where {weights} is expected: it is never opened, for it can run "
                "code; ask its author to save the heads as safetensors."
            )
        raise OSError(f"{path!r} holds no {weights}: save the model there again, or give the folder that has it.")
    files = []
    for shard in _shards(found):
        file = fetch_file(path, shard, hub)
        if file is None:
            raise OSError(f"{path!r} lacks {shard}, which its {index} names: copy or download the checkpoint again.")
        files.append(file)
    return files


def _shards(index: str) -> list[str]:
    """Names of the files that an index spreads the tensors over: beside it, and nowhere else.

    Raises:
        OSError: it is no such index.
    """
    fields = read_json(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not isinstance(fields.get("metadata"), dict) or not weight_map:
        raise OSError(
            f"{index!r} is no index of weights: expected the objects 'metadata' and 'weight_map'; copy or download it "
            "again."
        )
    shards = set()
    for shard in weight_map.values():
        # as Windows reads it: both kinds of slash and drives lead elsewhere
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or PureWindowsPath(shard).name != shard:
            raise OSError(
                f"{index!r} names the file {shortened.repr(shard)}: expected the name of a safetensors file in the "
                "same folder; do not use this checkpoint."
            )
        shards.add(shard)
    return sorted(shards)


def fetch_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of the heads, here; None if they have no such file."""
    try:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None:
            raise
        raise OSError(f"{name} of the heads {path!r} cannot be fetched: {refused}.") from error


def is_missing_folder(name: str) -> bool:
    """Whether a name can be no id on the Hub but only that of a folder, and there is none."""
    local = os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1
    return local and not os.path.isdir(name)


def why_refused(error: BaseException) -> str | None:
    """What the Hub had against a download, and what to do; None for an error that is not about that."""
    for cause in _causes(error):
        if isinstance(cause, GatedRepoError):
            return "the repository is gated: ask for access on its page, then sign in or pass token="
        if isinstance(cause, RepositoryNotFoundError):
            return (
                "the Hub has no such repository, or it is private: check the name, and sign in (`hf auth login`) or "
                "pass token= of somebody who can read it"
            )
        if isinstance(cause, RevisionNotFoundError):
            return "the repository has no such revision: give a branch, tag or commit that it has"
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            if cause.response.status_code == 401:
                return "the Hub does not accept the token: sign in anew (`hf auth login`), or pass another token="
            return f"the Hub answered {cause.response.status_code}: try again later"
        if isinstance(cause, HTTP_ERROR):
            return (
                f"the connection broke ({type(cause).__name__}): try again, files that have arrived are kept; if a "
                "local folder was meant, there is none of that name"
            )
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came from, what that came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used.

    Raises:
        OSError: a file is no readable safetensors file, or a tensor is in two of them.
    """
    return map_wanted(files, None)[0]


@torch.inference_mode(False)
def map_wanted(files: Iterable[str], wanted: Collection[str] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Some of the tensors of safetensors files, and which file holds each of all their tensors.

    Args:
        files: safetensors files.
        wanted: names of the tensors to map; None for all.

    Raises:
        OSError: as `map_tensors`.
    """
    found: dict[str, Tensor] = {}
    holders: dict[str, str] = {}
    for file in files:
        with open_tensors(file) as tensors:
            names = dict.fromkeys(tensors.keys(), file)
            if twice := sorted(set(holders) & set(names)):
                raise OSError(
                    f"{file!r} and {holders[twice[0]]!r} both hold the tensor {shortened.repr(twice[0])}: copy or "
                    "download the checkpoint again."
                )
            holders |= names
            found |= {name: tensors.get_tensor(name) for name in names if wanted is None or name in wanted}
    return found, holders


def check_tensors(
    path: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], others: Collection[str] = ()
) -> None:
    """Compare the tensors of a checkpoint's drafter with what its config asks for.

    Args:
        path: the checkpoint, for the message.
        found: its tensors, by their names in it.
        expected: tensors of the shapes that there should be, by the same names.
        others: names of tensors that it has besides those found.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, or of another kind of number.
    """
    for name, wanted in expected.items():
        if name not in found:
            raise ValueError(
                f"{path!r} lacks the tensor {name!r} {list(wanted.shape)} that its config asks for: "
                "save the checkpoint again, or correct config.json."
            )
        if found[name].shape != wanted.shape:
            raise ValueError(
                f"{path!r} has {name!r} of shape {shortened.repr(list(found[name].shape))}, but its config asks for "
                f"{list(wanted.shape)}: save the checkpoint again, or correct config.json."
            )
        if not wanted.dtype.is_floating_point:
            if found[name].dtype != wanted.dtype:
                raise ValueError(
                    f"{path!r} has {name!r} in {_type_name(found[name].dtype)}, expected {_type_name(wanted.dtype)}: "
                    "these are whole numbers, save them as such."
                )
        elif found[name].dtype not in FLOATS:
            raise ValueError(
                f"{path!r} has {name!r} in {_type_name(found[name].dtype)}, expected one of "
                f"{', '.join(map(_type_name, FLOATS))}: save the heads in a floating point type."
            )
    unknown = sorted((set(found) | set(others)) - set(expected))
    if unknown:
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as "
            f"{shortened.repr(unknown[0])}: remove them, or correct config.json."
        )


def refuse_damage(path: str, info: dict[str, Any]) -> None:
    """Raise for what transformers only logs."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise ValueError(
                f"{path!r} does not fit its config: {kind.replace('_', ' ')} {sorted(map(str, info[kind]))[:3]}: "
                "save the checkpoint again, or correct config.json."
            )


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_variant(name: str, variant: str | None) -> str:
    stem, extension = name.rsplit(".", 1)
    return f"{stem}.{variant}.{extension}" if variant else name
