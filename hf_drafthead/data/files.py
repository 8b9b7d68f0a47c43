"""Files of chats, texts, prompts or questions: which of them are read, and their records."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

TEXTS = (".txt",)
TABLES = (".parquet", ".arrow")
RECORD_ENDINGS = (".json", ".jsonl")
BLOCK_SIZE = 1 << 16  # characters of a text file that become one row, up to the end of the line


def files_of(path: Path) -> list[Path]:
    """The file itself, or those of a folder that are read one by one, in the order of their names."""
    if path.is_file():
        if path.suffix not in TEXTS + RECORD_ENDINGS:
            wanted = ", ".join(RECORD_ENDINGS + TEXTS)
            raise ValueError(f"the kind of {str(path)!r} is not known: expected a file that ends in one of {wanted}.")
        return [path]
    found = [file for file in sorted(path.rglob("*")) if not _hidden(file.relative_to(path)) and file.is_file()]
    if any(file.suffix in TABLES for file in found):
        return []  # a data set, whose other files only describe it
    return [file for file in found if file.suffix in TEXTS + RECORD_ENDINGS]


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def records_of(path: str) -> Iterator[tuple[str, Any]]:
    """The records of a file, each with its place in it: `line 3`, or `row 2` of an array, counted from 0.

    Raises:
        ValueError: the file is not UTF-8 text, or not JSON.
    """
    try:
        yield from _texts(path) if path.endswith(TEXTS) else _records(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it.") from None


def _texts(path: str) -> Iterator[tuple[str, Any]]:
    """A text file as one record, or as several if it is long."""
    with open(path, encoding="utf-8") as file:
        number = 0
        while lines := file.readlines(BLOCK_SIZE):
            yield f"row {number}", {"text": "".join(lines)}
            number += 1


def _records(path: str) -> Iterator[tuple[str, Any]]:
    """Objects of a file: of an array, or one per line."""
    with open(path, encoding="utf-8") as file:
        while (first := file.read(1)).isspace():
            pass
        file.seek(0)
        if first == "[":
            yield from ((f"row {number}", element) for number, element in enumerate(_array(file, path)))
        else:
            yield from _lines(file, path)


def _lines(file: TextIO, path: str) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{path} line {number} is not JSON ({error.msg}): write one object per line, or one array of them."
                ) from None


def _array(file: TextIO, path: str) -> Iterator[Any]:
    """Elements of a JSON array, read piece by piece: a file of chats may be larger than memory."""
    decoder, text, before = json.JSONDecoder(), "", "["
    while True:
        try:
            text = text.lstrip()
            if text[:1] == "]" and before == ",":
                break
            if text[:1] != before:
                raise ValueError
            inner = text[1:].lstrip()
            element, end = decoder.raw_decode(inner)
        except ValueError:  # it may only continue after the piece that was read
            piece = file.read(max(BLOCK_SIZE, len(text)))
            if not piece:
                break
            text += piece
            continue
        yield element
        text, before = inner[end:], ","
    if "".join((text + file.read()).split()) == ("]" if before == "," else "[]"):
        return
    file.seek(0)
    try:
        json.load(file)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path} line {error.lineno} is not JSON ({error.msg}): expected an array of chats, and nothing else."
        ) from None
