"""Files that others wrote: read within limits, or refused in one line before they cost time or memory.

A checkpoint's files are JSON and safetensors. Nothing in them is executed or unpickled.
"""

import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

MAX_JSON = 2 * 2**20  # bytes; the largest configs of the Hub have some 100 kB
MAX_HEADER = 4 * 2**20  # bytes; a tensor takes some 100, and no file of a model is known to hold 30,000
MAX_NESTING = 32  # levels of JSON; a config with sub-configs and their settings has 6

shortened = reprlib.Repr()  # what a file says, cut to a length that fits a message
shortened.maxstring = shortened.maxother = 80


def read_json(file: str | os.PathLike) -> dict[str, Any]:
    """The fields of a JSON file that holds one object, such as a config."""
    size = os.path.getsize(file)
    if size > MAX_JSON:
        raise OSError(
            f"{os.fspath(file)!r} has {size:,} bytes, expected at most {MAX_JSON:,}: it is no file that "
            "save_pretrained has written."
        )
    try:
        fields = json.loads(Path(file).read_text(encoding="utf-8-sig"))
        if not isinstance(fields, dict):
            raise ValueError(f"it holds {shortened.repr(fields)}, expected an object of fields")
        if is_deep(fields):
            raise ValueError(f"its fields are nested more than {MAX_NESTING} levels deep")
    except (ValueError, RecursionError) as error:
        raise OSError(f"{os.fspath(file)!r} is not readable JSON ({error}): copy or download it again.") from None
    return fields


def read_ranking(tokens: str | os.PathLike | Sequence[int]) -> list[int]:
    """Token ids, the most frequent first, given or in a JSON file."""
    ids: Any = tokens
    if isinstance(tokens, (str, os.PathLike)):
        try:
            ids = json.loads(Path(tokens).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(tokens)!r} is no JSON ({error}): expected a list of token ids.") from None
    if not isinstance(ids, (list, tuple)) or not ids or not all(type(token) is int for token in ids):
        raise ValueError(
            f"draft_tokens is {shortened.repr(ids)}: expected token ids, frequent ones first, such as [11, 284, 13]."
        )
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
    """An error of another library inside a message: its text, behind its type where that is no plain OSError."""
    kind = "" if type(error) is OSError else f"{type(error).__name__}: "
    return (kind + " ".join(str(error).split())[:200]).rstrip(" .:")
