"""Files that others wrote: found, and read within limits, or refused in one line before they cost time or memory.

A checkpoint's files are JSON and safetensors. Nothing in them is executed or unpickled.
"""

import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PureWindowsPath
from types import MappingProxyType
from typing import Any, cast

import torch
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
MAX_JSON = 2 * 2**20  # bytes; the largest configs of the Hub have some 100 kB
MAX_HEADER = 4 * 2**20  # bytes; a tensor takes some 100, and no file of a model is known to hold 30,000
MAX_NESTING = 32  # levels of JSON; a config with sub-configs and their settings has 6

shortened = reprlib.Repr()  # what a file says, cut to a length that fits a message
shortened.maxstring = shortened.maxother = 80


def is_local(name: str, folder: str | os.PathLike = os.curdir) -> bool:
    """Whether the name of a model, as a config in a folder gives it, is a path and no Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return (Path(folder) / name).is_dir()


def is_missing_folder(name: str) -> bool:
    """Whether a name can be no id on the Hub but only that of a folder, and there is none."""
    return not os.path.isdir(name) and is_local(name)


def full_name(name: str, folder: str | os.PathLike = os.curdir) -> str:
    """The name of a model, as a config in a folder gives it, wherever it will be read: a path is made absolute."""
    is_path = name and ((Path(folder) / name).is_dir() or name.startswith((".", os.sep)))
    return str((Path(folder) / name).resolve()) if is_path else name


def fetch_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of a model, here; None if it has no such file."""
    with refusing(OSError, f"{name} of {path!r} cannot be fetched", of=(OSError, HTTP_ERROR)):
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)


def why_missing(path: str, name: str, hub: Mapping[str, Any]) -> str:
    """Why a file that a model needs is not here, in transformers' words: it has none, or the Hub cannot be asked."""
    try:
        cached_file(path, name, **hub)
        return "it has none"
    except (OSError, HTTP_ERROR) as error:
        return in_one_line(error)


def weights_in(path: str, name: str, hub: Mapping[str, Any]) -> list[str] | None:
    """A file of weights, or the shards that an index of that name spreads the tensors over; None if there is none."""
    file = fetch_file(path, name, hub)
    if file is None or not name.endswith(".json"):
        return [file] if file else None
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise OSError(f"{file!r} is no index of weights: expected the object 'weight_map'; copy or download it again.")
    kind, files = "safetensors" if ".safetensors." in name else "bin", []
    for shard in dict.fromkeys(map(str, weight_map.values())):
        # as Windows reads it: both kinds of slash and drives lead elsewhere
        if not shard.endswith(f".{kind}") or PureWindowsPath(shard).name != shard:
            what = f"names the file {shortened.repr(shard)}: expected the name of a {kind} file in the same folder"
            raise OSError(f"{file!r} {what}; do not use this checkpoint.")
        if (shard_file := fetch_file(path, shard, hub)) is None:
            raise OSError(f"{path!r} lacks {shard}, which its {name} names: copy or download the checkpoint again.")
        files.append(shard_file)
    return sorted(files)


def checkpoint_files(path: str, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, in a folder or fetched from the Hub."""
    if (files := weights_in(path, WEIGHTS, hub) or weights_in(path, INDEX, hub)) is not None:
        return files
    advice = "save the model there again (a pickle such as pytorch_model.bin is never opened, for it can run code)."
    raise OSError(f"{path!r} holds no {WEIGHTS} ({why_missing(path, WEIGHTS, hub)}): {advice}")


def read_tensors(path: str, hub: Mapping[str, Any] = NO_OPTIONS) -> dict[str, Tensor]:
    """The tensors of a checkpoint, mapped from its files; errors as of `checkpoint_files` and `map_tensors`."""
    return map_tensors(checkpoint_files(path, hub))


@torch.inference_mode(False)
def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used."""
    mapped: dict[str, Tensor] = {}
    for file in files:
        with open_tensors(file) as tensors:
            mapped |= {name: tensors.get_tensor(name) for name in tensors.keys()}
    return mapped


@contextmanager
def open_tensors(file: str | os.PathLike) -> Iterator[Any]:
    """An open safetensors file, as `safetensors.safe_open` gives it."""
    what = f"{os.fspath(file)!r} is not a readable safetensors file"
    advice = "copy or download it again, and if it stays so, ask its author."
    with refusing(OSError, what, advice, of=SafetensorError):
        with open(file, "rb") as stream:
            if (length := int.from_bytes(stream.read(8), "little")) > MAX_HEADER:
                raise SafetensorError(f"its header has {length:,} bytes, expected at most {MAX_HEADER:,}")
        with safe_open(file, framework="pt") as tensors:
            yield tensors


def read_json(file: str | os.PathLike) -> dict[str, Any]:
    """The fields of a JSON file that holds one object, such as a config."""
    name, size, advice = os.fspath(file), os.path.getsize(file), "copy or download it again."
    if size > MAX_JSON:
        raise OSError(f"{name!r} has {size:,} bytes, expected at most {MAX_JSON:,}: it is no file of a model.")
    with refusing(OSError, f"{name!r} is not readable JSON", advice, of=(ValueError, RecursionError)):
        fields = json.loads(Path(file).read_text(encoding="utf-8-sig"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds {shortened.repr(fields)}, expected an object of fields")
        if is_deep(fields):
            raise ValueError(f"its fields are nested more than {MAX_NESTING} levels deep")
    return fields


def read_ranking(tokens: str | os.PathLike | Sequence[int]) -> list[int]:
    """Token ids, the most frequent first, given or in a JSON file."""
    ids: Any = tokens
    if isinstance(tokens, (str, os.PathLike)):
        with refusing(ValueError, f"{os.fspath(tokens)!r} is no JSON", "give a list of token ids.", of=ValueError):
            ids = json.loads(Path(tokens).read_text(encoding="utf-8"))
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(token) is int for token in ids):
        what = f"draft_tokens is {shortened.repr(ids)}"
        raise ValueError(f"{what}: expected token ids, frequent ones first, such as [11, 284, 13].")
    return list(ids)


def edit_json(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes one."""
    before = json.loads(path.read_text(encoding="utf-8-sig"))
    after = {name: value for name, value in (before | fields).items() if name not in fields or value is not None}
    if after != before:
        path.write_text(json.dumps(after, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def is_deep(value: Any) -> bool:
    """Whether lists and dicts are nested deeper than a function that calls itself, as `copy.deepcopy`, should walk."""
    level, depth = [value], 0
    while level and depth <= MAX_NESTING:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level, depth = [part for parts in inner for part in parts], depth + 1
    return bool(level)


@contextmanager
def refusing(kind: type[Exception], what: str, advice: str = "", of: Any = Exception, but: Any = ()) -> Iterator[None]:
    """Say in one line what cannot be done where another library raises an error, of some types but for others."""
    try:
        yield
    except but:
        raise
    except of as error:
        raise kind(f"{what} ({in_one_line(error)}){f': {advice}' if advice else '.'}") from error


def in_one_line(error: BaseException) -> str:
    """An error of another library inside a message: its text, behind its type where that is no plain one."""
    kind = "" if type(error) in (OSError, ValueError) else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split())[:200]).rstrip(" .:")
