"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import cached_file

from hf_drafthead.modeling.config import DraftHeadConfig

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}


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
    found = cached_file(path, weights, _raise_exceptions_for_missing_entries=False, **hub)
    if found is not None:
        return [found]
    found = cached_file(path, index, _raise_exceptions_for_missing_entries=False, **hub)
    if found is None:
        raise OSError(f"{path!r} holds no {weights}: save the model there again, or give the folder that has it.")
    shards = sorted(set(json.loads(Path(found).read_text())["weight_map"].values()))
    files = [cached_file(path, shard, _raise_exceptions_for_missing_entries=False, **hub) for shard in shards]
    missing = [shard for shard, file in zip(shards, files, strict=True) if file is None]
    if missing:
        raise OSError(f"{path!r} lacks {missing[0]}, which its {index} names: copy or download the checkpoint again.")
    return files


def check_tensors(path: str, files: Iterable[str], expected: Mapping[str, torch.Size], heads_only: bool) -> None:
    """Compare the checkpoint's drafter, as its headers describe it, with what its config asks for.

    Args:
        path: the checkpoint, for the message.
        files: its safetensors files.
        expected: shape of every drafter tensor by its name in the checkpoint.
        heads_only: refuse tensors of a base too; False where the base is part of the checkpoint.

    Raises:
        OSError: a file is no readable safetensors file.
        ValueError: a tensor is missing, unknown, of another shape, or not floating point.
    """
    found: dict[str, tuple[torch.Size, str]] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    piece = tensors.get_slice(name)
                    found[name] = torch.Size(piece.get_shape()), piece.get_dtype()
        except SafetensorError as error:
            raise OSError(
                f"{file!r} is not a readable safetensors file ({error}): copy or download it again."
            ) from None
    if not heads_only:
        found = {name: tensor for name, tensor in found.items() if not name.startswith("base.")}
    for name, shape in expected.items():
        if name not in found:
            raise ValueError(
                f"{path!r} lacks the tensor {name!r} {list(shape)} that its config asks for: "
                "save the checkpoint again, or correct config.json."
            )
        if found[name][0] != shape:
            raise ValueError(
                f"{path!r} has {name!r} of shape {list(found[name][0])}, but its config asks for {list(shape)}: "
                "save the checkpoint again, or correct config.json."
            )
        if found[name][1] not in FLOATS:
            raise ValueError(
                f"{path!r} has {name!r} in {found[name][1]}, expected one of {', '.join(sorted(FLOATS))}: "
                "save the heads in a floating point type."
            )
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as {unknown[0]!r}: "
            "remove them, or correct config.json."
        )


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


def is_local(name: str, checkpoint: str) -> bool:
    """Whether the name of a base, as the checkpoint's config gives it, is a path and no Hub id."""
    return name.startswith(".") or os.path.isabs(name) or (Path(checkpoint) / name).is_dir()


def base_config_at(name: str, checkpoint: str, hub: Mapping[str, Any], trust_remote_code: bool) -> PreTrainedConfig:
    """Config of the base `name`, read before its weights are.

    Raises:
        OSError: there is no such base.
    """
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **hub)
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"the base {name!r} of {checkpoint!r} was not found ({reason}): pass base_model= with its id, path or "
            "object."
        ) from error


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base that the heads were not made for.

    Raises:
        ValueError: model type, hidden size or vocabulary differ.
    """
    wanted, given = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(given, field, None)
        if want is not None and want != have:
            raise ValueError(
                f"these heads were trained for {trained_for!r} ({words} {want}); the base at {name!r} has {words} "
                f"{have}: load the first, or train heads for the second."
            )


def commit_of(name: str, hub: Mapping[str, Any]) -> str | None:
    """The commit that a Hub id and revision resolve to; None for a local folder."""
    if os.path.isdir(name):
        return None
    file = cached_file(name, "config.json", _raise_exceptions_for_missing_entries=False, **hub)
    commit = Path(file).parent.name if file else ""
    return commit if re.fullmatch(r"[0-9a-f]{40}", commit) else None


def _with_variant(name: str, variant: str | None) -> str:
    stem, extension = name.rsplit(".", 1)
    return f"{stem}.{variant}.{extension}" if variant else name
