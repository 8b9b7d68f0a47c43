"""Where rows come from: a file, a folder of files, a folder of `Dataset.save_to_disk`, or a data set by its name.

Files are read here, of JSON lines one by one; those of a data set by `datasets`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_drafthead.data.rows import EXPECTED, KNOWN, MAX_NESTING, as_row, features, without_format
from hf_drafthead.data.texts import UTF_8, one_line

if TYPE_CHECKING:  # imported where it is used: a file of questions is read without it
    from datasets import Dataset

TEXTS, RECORDS, TABLES = (".txt",), (".json", ".jsonl"), (".parquet", ".arrow")  # endings of files
BLOCK_SIZE = 1 << 16  # characters of a text file that become one row, up to the end of the line
SAVED = ("state.json", "dataset_dict.json")  # one of which a folder of `save_to_disk` holds


def read_rows(source: str | Path, *, split: str = "train") -> Dataset:
    """Rows of a source, in its order.

    Args:
        source: a file of records (`.json`, `.jsonl`) or of text (`.txt`), a folder of such files, a folder of
            `Dataset.save_to_disk`, or what `datasets.load_dataset` takes.
        split: of a data set.

    Returns:
        Rows as `hf_drafthead.data.rows` describes them.

    Raises:
        OSError: there is no such source.
        ValueError: it cannot be read, or holds nothing that is known; the message names file and line.
    """
    files = files_of(source)
    return _read_files(files) if files else uniform(_load(str(source), split), str(source))


def read_records(source: str | Path, split: str | None = None) -> Iterator[tuple[str, Any]]:
    """Records of the same sources as they are, with all their fields, each behind where it stands; `split` is by
    default the only one of a data set, or the one called `test`."""
    if files := files_of(source):
        for file in files:
            for place, record in records_of(str(file)):
                yield f"{file} {place}", record
        return
    for number, record in enumerate(_load(str(source), split)):
        yield f"{source} row {number}", record


def uniform(rows: Dataset, name: str = "the data") -> Dataset:
    """Any data set in the form that `read_rows` gives; ValueError without any of the columns that are read."""
    rows = without_format(rows)
    columns, wanted = rows.column_names, features()
    if set(columns) == set(wanted):
        return rows
    if not set(KNOWN) & set(columns):
        problem = f"has the columns {', '.join(columns)}" if columns else "is empty"
        raise ValueError(f"{name} {problem}: {EXPECTED}.")
    read: Any = rows.map(
        lambda record, number: as_row(record, "", number),
        with_indices=True,
        remove_columns=columns,
        features=wanted,
    )
    return read  # type: ignore[no-any-return]


def files_of(source: str | os.PathLike) -> list[Path]:
    """The files of a source that are read here, in the order of their names; none if it is for `datasets` to read."""
    path = Path(source or os.devnull)  # an empty name is none, and not this folder
    if path.is_file():
        if path.suffix not in TEXTS + RECORDS:
            wanted = ", ".join(RECORDS + TEXTS)
            raise ValueError(f"the kind of {str(path)!r} is not known: expected a file that ends in one of {wanted}.")
        return [path]
    if not path.is_dir() or any((path / name).is_file() for name in SAVED):
        return []
    every = (file for file in sorted(path.rglob("*")) if file.is_file())
    files = [file for file in every if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if any(file.suffix in TABLES for file in files):
        return []  # a data set, whose other files only describe it
    return [file for file in files if file.suffix in TEXTS + RECORDS]


def records_of(path: str) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place in it: `line 3`, or `row 2` of an array, counted from 0. A text file
    is one record, or several if it is long. A ValueError where it cannot be read."""
    place = ""
    try:
        with open(path, encoding=UTF_8) as file:
            if path.endswith(TEXTS):
                blocks = iter(lambda: file.readlines(BLOCK_SIZE), [])
                yield from ((f"row {number}", {"text": "".join(lines)}) for number, lines in enumerate(blocks))
                return
            while (first := file.read(1)).isspace():
                pass
            file.seek(0)
            if first == "[":
                place = "array"
                for number, element in enumerate(_parsed(file.read(), path, "")):
                    place = f"row {number}"
                    yield place, readable(element)
                return
            for number, line in enumerate(file, start=1):
                place = f"line {number}"
                if line := line.strip():
                    yield place, readable(_parsed(line, path, place))
    except UnicodeError as error:
        reason = getattr(error, "reason", error)
        raise ValueError(f"{path} is not UTF-8 text ({reason}): convert it.") from None
    except RecursionError:
        raise ValueError(f"{path} {place} is nested more than {MAX_NESTING} levels deep: {EXPECTED}.") from None


def _parsed(text: str, path: str, place: str) -> Any:
    """What a line holds at its place; of an array, which has none, the line of a mistake is named."""
    try:
        return json.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        why, line = getattr(error, "msg", error), getattr(error, "lineno", 0)
        where = place or (f"line {line}" if line else "array")
        raise ValueError(
            f"{path} {where} is not JSON ({why}): write one object per line, or an array of them."
        ) from None


def readable(value: Any, level: int = 0) -> Any:
    """What JSON holds, with a replacement character for each half of one; RecursionError if it is nested too deeply."""
    if level > MAX_NESTING:
        raise RecursionError
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {readable(name): readable(inner, level + 1) for name, inner in value.items()}
    return [readable(inner, level + 1) for inner in value] if isinstance(value, list) else value


def _read_files(files: list[Path]) -> Dataset:
    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    # size and time are part of what a cached data set is known by: a file that has changed is read again
    known_by = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if next(_rows_of(known_by), None) is None:
        raise ValueError(f"{', '.join(map(str, files[:3]))}: there is no row in it: {EXPECTED}.")
    try:
        return Dataset.from_generator(_rows_of, features=features(), gen_kwargs={"files": known_by})
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _rows_of(files: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Rows of files, each given by its path (and what tells its versions apart)."""
    for path, _, _ in files:
        for number, (_, record) in enumerate(records_of(path)):
            if number == 0 and not (isinstance(record, dict) and set(KNOWN) & set(record)):
                raise ValueError(f"{path} begins with {json.dumps(record)[:60]!r}: {EXPECTED}.")
            yield as_row(record, os.path.basename(path), number)


def _load(source: str, split: str | None) -> Any:
    """What `datasets` finds at a source: of several splits the one that is asked for, else the only one, or `test`."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    wanted = "give a .json, .jsonl or .txt file, a folder of them, or the name of a data set."
    looks_local = os.path.isabs(source) or source.startswith((".", "~")) or source.endswith(TEXTS + RECORDS)
    if not os.path.exists(source) and (looks_local or source.count("/") > 1 or not source):
        raise OSError(f"there is no data at {source!r}: {wanted}")
    try:
        saved = any(os.path.isfile(os.path.join(source, name)) for name in SAVED)
        part = None if not split or split.isidentifier() else split  # such as `train[:10%]`
        loaded = load_from_disk(source) if saved else load_dataset(source, split=part)
    except (OSError, ValueError, RuntimeError) as error:
        raise OSError(f"no data could be read at {source!r} ({one_line(error)}): {wanted}") from error
    if not isinstance(loaded, DatasetDict):
        return without_format(loaded)  # a folder of `save_to_disk` keeps it
    chosen = split or (next(iter(loaded)) if len(loaded) == 1 else "test")
    if chosen not in loaded:
        asked = f"no split {split!r}" if split else "several splits"
        raise ValueError(f"{source!r} has {asked}: choose one of {', '.join(map(str, loaded))} with --split.")
    return without_format(loaded[chosen])
