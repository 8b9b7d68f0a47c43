"""Where rows come from: files of chats or text, or a data set; every source becomes rows of one form.

A row has these columns; of `messages` and `text` one is None:

- `messages`: turns of a chat, each with `role`, `content` and `cut` (True: the answer was broken off, and no end of
  turn follows it).
- `text`: plain text.
- `given`: how many characters of the text are only context, from which nothing is learnt.
- `source`, `row`: the file's name (empty for a data set), and the row's number in it, counted from 0.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from datasets import (
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    load_dataset,
    load_from_disk,
)
from datasets.exceptions import DatasetGenerationError

TURN = {"role": Value("string"), "content": Value("string"), "cut": Value("bool")}
FEATURES = Features(
    {
        "messages": List(TURN),
        "text": Value("string"),
        "given": Value("int64"),
        "source": Value("string"),
        "row": Value("int64"),
    }
)
CHATS = ("messages", "conversations")
TEXTS = (".txt",)
TABLES = (".parquet", ".arrow")
RECORDS = (".json", ".jsonl")
EXPECTED = (
    'expected a chat as {"conversations": [{"from": "human", "value": "..."}]} or '
    '{"messages": [{"role": "user", "content": "..."}]}, or {"text": "..."}.'
)
BLOCK = 1 << 16  # characters of a text file that become one row, up to the end of the line


def read_rows(source: str | Path, *, streaming: bool = False, split: str = "train") -> Dataset | IterableDataset:
    """Rows of a source, in its order.

    Args:
        source: a file of chats (ShareGPT `.json`, `.jsonl` of `messages`) or of texts (`.jsonl` of `text`, `.txt`),
            a folder of such files, a folder of `Dataset.save_to_disk`, or what `datasets.load_dataset` takes.
        streaming: read while iterating, for data larger than memory and disk; the rows are the same.
        split: of a data set.

    Returns:
        Rows as this module describes them.

    Raises:
        OSError: there is no such source.
        ValueError: it cannot be read, or holds neither chats nor text; the message names file and line.
    """
    path = Path(source)
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if path.is_file() or (path.is_dir() and not saved and _files(path)):
        return _read_files(_files(path), streaming)
    return uniform(_read_dataset(str(source), streaming, split), str(source))


def uniform(rows: Dataset | IterableDataset, name: str = "the data") -> Dataset | IterableDataset:
    """Any data set with a column `messages`, `conversations` or `text`, in the form that `read_rows` gives.

    Raises:
        ValueError: it has none of the three.
    """
    columns = rows.column_names or list(next(iter(rows), {}))
    if set(columns) == set(FEATURES):
        return rows
    if not {*CHATS, "text"} & set(columns):
        found = f"has the columns {', '.join(columns)}" if columns else "is empty"
        raise ValueError(f"{name} {found}: {EXPECTED}")

    def convert(record: dict[str, Any], number: int) -> dict[str, Any]:
        return as_row(record, "", number)

    return rows.map(convert, with_indices=True, remove_columns=columns, features=FEATURES)


def as_row(record: Any, source: str, number: int) -> dict[str, Any]:
    """One record in the form of a row; what cannot be understood is None, to be refused where it is used."""
    fields = record if isinstance(record, Mapping) else {}
    turns = next((fields[name] for name in CHATS if fields.get(name) is not None), None)
    if isinstance(turns, Mapping):  # how data sets may store a list of objects: an object of lists
        turns = [dict(zip(turns, values)) for values in zip(*turns.values())]
    messages = None if turns is None else [_turn(turn) for turn in turns] if isinstance(turns, list) else []
    text, given = fields.get("text"), fields.get("given")
    return {
        "messages": messages,
        "text": text if messages is None and isinstance(text, str) else None,
        "given": given if isinstance(given, int) else 0,
        "source": source,
        "row": number,
    }


def data_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of what the rows say, in their order; files of another form but with the same rows give the same."""
    digest = hashlib.sha256()
    for row in rows:
        said = {name: row.get(name) for name in ("messages", "text", "given")}
        digest.update(json.dumps(said, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def stream_hash(source: str, first: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of a source that is too large to be read twice as rows: of its files' bytes, else of its first rows."""
    path = Path(source)
    if not path.exists():
        return data_hash(first)
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file()):
        with file.open("rb") as content:
            while block := content.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _turn(turn: Any) -> dict[str, Any]:
    fields = turn if isinstance(turn, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if isinstance(content, list):  # parts: text is put together, anything else is not for a language model
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    return {
        "role": role if isinstance(role, str) else None,
        "content": content if isinstance(content, str) else None,
        "cut": fields.get("cut") is True,
    }


# ---- files ---------------------------------------------------------------------------------------------------------


def _files(path: Path) -> list[Path]:
    """The file itself, or those of a folder that are read one by one, in the order of their names."""
    if path.is_file():
        if path.suffix not in TEXTS + RECORDS:
            wanted = ", ".join(RECORDS + TEXTS)
            raise ValueError(f"the kind of {str(path)!r} is not known: expected a file that ends in one of {wanted}.")
        return [path]
    found = [file for file in sorted(path.rglob("*")) if not _hidden(file.relative_to(path)) and file.is_file()]
    if any(file.suffix in TABLES for file in found):
        return []  # a data set, whose other files only describe it
    return [file for file in found if file.suffix in TEXTS + RECORDS]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _read_files(files: list[Path], streaming: bool) -> Dataset | IterableDataset:
    # size and time are part of what a cached data set is known by: a file that has changed is read again
    known_by = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if next(_rows_of(known_by), None) is None:
        raise ValueError(f"{', '.join(map(str, files[:3]))}: there is no row in it: {EXPECTED}")
    if streaming:
        return IterableDataset.from_generator(_rows_of, features=FEATURES, gen_kwargs={"files": known_by})
    try:
        return Dataset.from_generator(_rows_of, features=FEATURES, gen_kwargs={"files": known_by})
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _rows_of(files: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Rows of files, each given by its path (and what tells its versions apart)."""
    for path, _, _ in files:
        records = _texts(path) if path.endswith(TEXTS) else _records(path)
        try:
            for number, record in enumerate(records):
                if number == 0 and not (isinstance(record, dict) and {*CHATS, "text"} & set(record)):
                    raise ValueError(f"{path} begins with {json.dumps(record)[:60]!r}: {EXPECTED}")
                yield as_row(record, os.path.basename(path), number)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it.") from None


def _texts(path: str) -> Iterator[dict[str, Any]]:
    """A text file as one record, or as several if it is long."""
    with open(path, encoding="utf-8") as file:
        while lines := file.readlines(BLOCK):
            yield {"text": "".join(lines)}


def _records(path: str) -> Iterator[Any]:
    """Objects of a file: of an array, or one per line."""
    with open(path, encoding="utf-8") as file:
        while (first := file.read(1)).isspace():
            pass
        file.seek(0)
        yield from _array(file, path) if first == "[" else _lines(file, path)


def _lines(file: TextIO, path: str) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} line {number} is not JSON ({error.msg}): write one object per line, or one array of them."
                ) from None


def _array(file: TextIO, path: str) -> Iterator[Any]:
    """Elements of a JSON array, read piece by piece: a file of chats may be larger than memory."""
    decoder = json.JSONDecoder()
    text, line = "", 1

    def advance(length: int) -> None:
        nonlocal text, line
        line += text.count("\n", 0, length)
        text = text[length:]

    def symbol() -> str:
        nonlocal text
        while True:
            advance(len(text) - len(text.lstrip()))
            if text or not (text := file.read(BLOCK)):
                return text[:1]

    def wrong(message: str, at: int = 0) -> ValueError:
        number = line + text.count("\n", 0, at)
        return ValueError(
            f"{path} line {number} is not JSON ({message}): expected an array of chats, and nothing else."
        )

    symbol()
    advance(1)
    more = symbol() != "]"
    while more:
        symbol()
        try:
            element, end = decoder.raw_decode(text)
        except json.JSONDecodeError as error:
            # an element that goes on behind the piece read looks broken at its end, or within a string
            goes_on = error.msg.startswith("Unterminated string") or error.pos > len(text) - 12
            if goes_on and (piece := file.read(max(BLOCK, len(text)))):
                text += piece
                continue
            raise wrong(error.msg, error.pos) from None
        yield element
        advance(end)
        if symbol() not in (",", "]"):
            raise wrong(f"{text[:20]!r} instead of a comma" if text else "the file ends within the array")
        more = text[0] == ","
        if more:
            advance(1)
    advance(1)
    if symbol():
        raise wrong(f"{text[:20]!r} after the array")


# ---- data sets -----------------------------------------------------------------------------------------------------


def _read_dataset(source: str, streaming: bool, split: str) -> Dataset | IterableDataset:
    wanted = "give a .json, .jsonl or .txt file, a folder of them, or the name of a data set."
    looks_local = os.path.isabs(source) or source.startswith((".", "~")) or source.endswith(TEXTS + RECORDS)
    if not os.path.exists(source) and (looks_local or source.count("/") > 1 or not source):
        raise OSError(f"there is no data at {source!r}: {wanted}")
    try:
        if any(os.path.isfile(os.path.join(source, name)) for name in ("state.json", "dataset_dict.json")):
            found = load_from_disk(source)
            if isinstance(found, Dataset) and streaming:
                found = found.to_iterable_dataset()
        else:
            found = load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise OSError(f"no data could be read at {source!r} ({said}): {wanted}") from error
    if isinstance(found, (DatasetDict, IterableDatasetDict)):
        if split not in found:
            raise ValueError(f"{source!r} has no split {split!r}: expected one of {', '.join(map(str, found))}.")
        found = found[split].to_iterable_dataset() if streaming else found[split]
    return found
