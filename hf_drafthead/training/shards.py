"""Rows written by several processes that may be killed at any time, and merged in order at the end.

Next to the output file are `OUTPUT.settings.json`, the settings that the rows depend on, and until the end one
`OUTPUT.partN` for each process. A part grows by complete lines; an incomplete line of a killed process is dropped.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hf_drafthead.data.texts import same_words


class Shards:
    """The files of one output.

    Args:
        output: JSON lines, one row each, with the row's number in `row`.
        settings: what the rows depend on; an output that was started with others is refused.
        process: which of the processes this is.

    Raises:
        OSError: there is no folder for the output, or a file that was not made by this is in its place.
        ValueError: the output was started with other settings.
    """

    def __init__(self, output: str | Path, settings: dict[str, Any], process: int = 0) -> None:
        self.output, self.settings = Path(output), settings
        self.there: set[int] = set()
        self._notes = self.output.with_name(f"{self.output.name}.settings.json")
        self._part = self.output.with_name(f"{self.output.name}.part{process}")
        if self.output.is_dir() or not self.output.absolute().parent.is_dir():
            raise OSError(
                f"no file can be written at {str(output)!r}: give the path of a file in a folder that exists."
            )
        if not self._notes.is_file():
            if self.output.exists():
                raise OSError(
                    f"{str(output)!r} exists and was not written by this command: move it away, or give another output."
                )
            return
        begun = json.loads(self._notes.read_text(encoding="utf-8"))
        for name in sorted({*begun, *settings}):
            if begun.get(name) != settings.get(name):
                raise ValueError(
                    f"{str(output)!r} was started with {name}={begun.get(name)!r}, but now "
                    f"{name}={settings.get(name)!r}: use the same setting, or give another output."
                )

    def write_settings(self) -> None:
        """Note what the rows are made with; for one of the processes."""
        _write_whole(self._notes, [json.dumps(self.settings, indent=2).encode() + b"\n"])

    def done(self) -> set[int]:
        """Numbers of the rows that are there, whichever process wrote them; also kept in `there`."""
        self.there = set(self._index())
        return self.there

    def asked(self) -> set[int]:
        """`same_words` of the first question of each chat that is there."""
        rows = (json.loads(_line_at(*place)) for place in self._index().values())
        firsts = (next((turn for turn in row["messages"] if turn["role"] == "user"), None) for row in rows)
        return {same_words(turn["content"]) for turn in firsts if turn is not None}

    def open(self) -> None:
        """Open this process's part for writing; an incomplete line of a killed process is dropped."""
        self._file = open(self._part, "ab")  # closed in `close`
        with open(self._part, "rb") as file:
            whole = file.read().rfind(b"\n") + 1
        self._file.truncate(whole)

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows; they are on the disk when this returns."""
        self._file.write(b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more rows from this process."""
        self._file.close()

    def merge(self) -> None:
        """Put all parts into the output, in the order of the rows; for one process, when all have closed theirs."""
        if self.output.is_file() and not self._parts():
            return
        index = self._index()
        _write_whole(self.output, (_line_at(*index[row]) for row in sorted(index)))
        for part in self._parts():
            part.unlink()

    def _parts(self) -> list[Path]:
        name = f"{self.output.name}.part"
        return sorted(file for file in self.output.absolute().parent.iterdir() if file.name.startswith(name))

    def _index(self) -> dict[int, tuple[Path, int]]:
        """In which file and where in it each row is."""
        found: dict[int, tuple[Path, int]] = {}
        for file in [self.output] * self.output.is_file() + self._parts():
            at = 0
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.endswith(b"\n"):
                        try:
                            found.setdefault(json.loads(line)["row"], (file, at))
                        except (ValueError, KeyError, TypeError):
                            raise ValueError(
                                f"{file} line {number} is not a valid row: correct it, or move the file away."
                            ) from None
                    at += len(line)
        return found


def _line_at(file: Path, at: int) -> bytes:
    with open(file, "rb") as lines:
        lines.seek(at)
        return lines.readline()


def _write_whole(path: Path, lines: Iterable[bytes] | Iterator[bytes]) -> None:
    """Write a file atomically."""
    beside = path.with_name(f"{path.name}.tmp")
    with open(beside, "wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
