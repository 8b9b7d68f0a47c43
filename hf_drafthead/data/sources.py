"""Where rows come from: a file, a folder of files, a folder of `Dataset.save_to_disk`, or a data set by its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_drafthead.data.files import RECORD_ENDINGS, TEXTS, files_of, records_of
from hf_drafthead.data.rows import EXPECTED, KNOWN, as_row, data_hash, features, is_record

if TYPE_CHECKING:  # imported where it is used: a file of questions is read without it
    from datasets import Dataset, IterableDataset

SAVED = ("state.json", "dataset_dict.json")  # one of which a folder of `save_to_disk` holds


def read_rows(source: str | Path, *, streaming: bool = False, split: str = "train") -> Dataset | IterableDataset:
    """Rows of a source, in its order.

    Args:
        source: a file of records (`.json`, `.jsonl`) or of text (`.txt`), a folder of such files, a folder of
            `Dataset.save_to_disk`, or what `datasets.load_dataset` takes.
        streaming: read while iterating, for data larger than memory and disk; the rows are the same.
        split: of a data set.

    Returns:
        Rows as `hf_drafthead.data.rows` describes them.

    Raises:
        OSError: there is no such source.
        ValueError: it cannot be read, or holds nothing that is known; the message names file and line.
    """
    from datasets import Dataset, DatasetDict, IterableDatasetDict

    if files := _read_one_by_one(Path(source)):
        return _read_files(files, streaming)
    found = _load(str(source), streaming, split)
    if isinstance(found, (DatasetDict, IterableDatasetDict)):
        if split not in found:
            raise ValueError(f"{str(source)!r} has no split {split!r}: expected one of {', '.join(map(str, found))}.")
        found = found[split]
    if streaming and isinstance(found, Dataset):
        found = found.to_iterable_dataset()
    return uniform(found, str(source))


def read_records(source: str | Path, split: str | None = None) -> Iterator[tuple[str, Any]]:
    """Records of the same sources as they are, with all their fields.

    Args:
        source: as for `read_rows`.
        split: of a data set; by default its only one, or the one called `test`.

    Yields:
        where the record stands, for messages, and the record.

    Raises:
        OSError, ValueError: as `read_rows` does.
    """
    if files := _read_one_by_one(Path(source)):
        for file in files:
            for place, record in records_of(str(file)):
                yield f"{file} {place}", record
        return
    from datasets import DatasetDict

    found = _load(str(source), False, None)
    if isinstance(found, DatasetDict):
        chosen = split or (next(iter(found)) if len(found) == 1 else "test")
        if chosen not in found:
            asked = f"no split {split!r}" if split else "several splits"
            raise ValueError(
                f"the data set {str(source)!r} has {asked}: choose one of {', '.join(found)} with --split."
            )
        found = found[chosen]
    for number, record in enumerate(found):
        yield f"{source} row {number}", record


def uniform(rows: Dataset | IterableDataset, name: str = "the data") -> Dataset | IterableDataset:
    """Any data set with one of the columns that are read, in the form that `read_rows` gives.

    Raises:
        ValueError: it has none of them.
    """
    columns = rows.column_names or list(next(iter(rows), {}))
    wanted = features()
    if set(columns) == set(wanted):
        return rows
    if not set(KNOWN) & set(columns):
        found = f"has the columns {', '.join(columns)}" if columns else "is empty"
        raise ValueError(f"{name} {found}: {EXPECTED}.")

    def convert(record: dict[str, Any], number: int) -> dict[str, Any]:
        return as_row(record, "", number)

    return rows.map(convert, with_indices=True, remove_columns=columns, features=wanted)


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


def _read_one_by_one(path: Path) -> list[Path]:
    """The files of a source that are read record by record; none if it is for `datasets` to read."""
    saved = any((path / name).is_file() for name in SAVED)
    return files_of(path) if path.is_file() or (path.is_dir() and not saved) else []


def _read_files(files: list[Path], streaming: bool) -> Dataset | IterableDataset:
    from datasets import Dataset, IterableDataset
    from datasets.exceptions import DatasetGenerationError

    # size and time are part of what a cached data set is known by: a file that has changed is read again
    known_by = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    if next(_rows_of(known_by), None) is None:
        raise ValueError(f"{', '.join(map(str, files[:3]))}: there is no row in it: {EXPECTED}.")
    if streaming:
        return IterableDataset.from_generator(_rows_of, features=features(), gen_kwargs={"files": known_by})
    try:
        return Dataset.from_generator(_rows_of, features=features(), gen_kwargs={"files": known_by})
    except DatasetGenerationError as error:
        raise (error.__cause__ or error) from None


def _rows_of(files: list[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """Rows of files, each given by its path (and what tells its versions apart)."""
    for path, _, _ in files:
        for number, (_, record) in enumerate(records_of(path)):
            if number == 0 and not is_record(record):
                raise ValueError(f"{path} begins with {json.dumps(record)[:60]!r}: {EXPECTED}.")
            yield as_row(record, os.path.basename(path), number)


def _load(source: str, streaming: bool, split: str | None) -> Any:
    """What `datasets` finds at a source: a data set, or several splits."""
    from datasets import load_dataset, load_from_disk

    wanted = "give a .json, .jsonl or .txt file, a folder of them, or the name of a data set."
    looks_local = os.path.isabs(source) or source.startswith((".", "~")) or source.endswith(TEXTS + RECORD_ENDINGS)
    if not os.path.exists(source) and (looks_local or source.count("/") > 1 or not source):
        raise OSError(f"there is no data at {source!r}: {wanted}")
    try:
        if any(os.path.isfile(os.path.join(source, name)) for name in SAVED):
            return load_from_disk(source)
        return load_dataset(source, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise OSError(f"no data could be read at {source!r} ({said}): {wanted}") from error
