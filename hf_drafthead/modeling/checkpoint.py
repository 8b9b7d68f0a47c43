"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""

import copy
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file, has_file

from hf_drafthead.modeling.config import MODEL_TYPE_PREFIX, DraftHeadConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_config(family: type[DraftHeadConfig], path: str, given: Any, hub: Mapping[str, Any]) -> DraftHeadConfig:
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
                raise OSError("there is no config.json")
        except (OSError, HTTP_ERROR) as error:
            refused = why_refused(error)
            if refused:
                raise OSError(f"the heads {source!r} cannot be fetched: {refused}.") from error
            raise OSError(
                f"{source!r} is no draft-head checkpoint ({str(error).splitlines()[0]}): give a folder or Hub id that "
                "save_pretrained of a draft-head model has written."
            ) from error
        found = fields.get("model_type")
        config = family.from_dict(fields) if found == family.model_type else None
    if found != family.model_type:
        other_family = str(found).startswith(MODEL_TYPE_PREFIX)
        advice = "load it with AutoModel" if other_family else "to put new heads on a base use from_base"
        raise ValueError(
            f"{path!r} is no {family.model_type} checkpoint: its config.json has model_type {found!r}; {advice}."
        )
    return config


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says; nothing if it has none.

    Raises:
        OSError: it cannot be read, or the Hub does not give it out.
    """
    found = fetch_file(path, GENERATION_CONFIG_NAME, hub)
    try:
        settings = json.loads(Path(found).read_text(encoding="utf-8-sig")) if found else {}
    except ValueError as error:
        raise OSError(f"{found!r} is not readable JSON ({error}): copy or download it again.") from None
    return settings if isinstance(settings, dict) else {}


def checkpoint_files(path: str, variant: str | None, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, in a local folder or fetched from the Hub.

    Args:
        path: local folder or Hub id.
        variant: as in `from_pretrained`: `model.<variant>.safetensors`.
        hub: keyword arguments of `transformers.utils.cached_file`.

    Raises:
        OSError: there are no weights, or a shard is missing.
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
    shards = sorted(set(json.loads(Path(found).read_text())["weight_map"].values()))
    files = [fetch_file(path, shard, hub) for shard in shards]
    missing = [shard for shard, file in zip(shards, files, strict=True) if file is None]
    if missing:
        raise OSError(f"{path!r} lacks {missing[0]}, which its {index} names: copy or download the checkpoint again.")
    return [file for file in files if file is not None]


def fetch_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of the heads, here; None if they have no such file.

    Args:
        path: local folder or Hub id.
        name: of the file.
        hub: keyword arguments of `transformers.utils.cached_file`.

    Raises:
        OSError: it cannot be fetched.
    """
    try:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None:
            raise
        raise OSError(f"{name} of the heads {path!r} cannot be fetched: {refused}.") from error


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
            return f"the connection broke ({type(cause).__name__}): try again, files that have arrived are kept"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came from, what that came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@torch.inference_mode(False)
def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used.

    Raises:
        OSError: a file is no readable safetensors file.
    """
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise OSError(
                f"{file!r} is not a readable safetensors file ({error}): copy or download it again, and if it stays "
                "so, ask its author."
            ) from None
    return tensors


def check_tensors(path: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare the tensors of a checkpoint's drafter with what its config asks for.

    Args:
        path: the checkpoint, for the message.
        found: its tensors, by their names in it.
        expected: tensors of the shapes that there should be, by the same names.

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
                f"{path!r} has {name!r} of shape {list(found[name].shape)}, but its config asks for "
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
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as {unknown[0]!r}: "
            "remove them, or correct config.json."
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
