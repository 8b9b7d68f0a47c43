"""The files and the figures of a distillation, whoever answers, in any number of processes.

The processes may be killed at any time. Next to the output file are `OUTPUT.settings.json`, the settings that the rows
depend on, and until the end one `OUTPUT.partN` for each process. A part grows by complete lines; an incomplete one is
dropped. At the end the parts are merged in the order of the rows.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_drafthead.data.texts import same_words
from hf_drafthead.training.record import write_whole

NAMED = 5  # refused rows that the report names
UNFIT_IN_A_ROW = 256  # chats without a question, one after the other, after which the base is asked for no more


@dataclass
class DistillReport:
    """What a run wrote, in one process or, added up, in all of them: rows in the data; those written now and found from
    earlier runs; those refused, with the first reasons; answers of this run, of which some were cut, and their tokens;
    `steps`, `step_tokens` of draft heads, counted for each row that took part; seconds of the slowest process; unusable
    answers by the reason; questions of the base's own, and those dropped; chats that are missing for want of questions.
    """

    rows: int = 0
    written: int = 0
    found: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    seconds: float = 0.0
    unusable: Counter[str] = field(default_factory=Counter)
    questions: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    missing: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Of draft heads; None without any."""
        return self.step_tokens / self.steps if self.steps else None

    def refuse(self, index: int, reason: object) -> None:
        self.refused += 1
        self.refusals += [f"row {index}: {reason}"][: NAMED - len(self.refusals)]

    def __add__(self, other: "DistillReport") -> "DistillReport":
        total = DistillReport(**{name: value + getattr(other, name) for name, value in vars(self).items()})
        total.refusals = total.refusals[:NAMED]
        total.seconds = max(self.seconds, other.seconds)
        return total

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "tokens_per_step": self.tokens_per_step}

    def __str__(self) -> str:
        line = f"{self.written:,} rows written"
        line += f", {self.found:,} were there already" if self.found else ""
        line += f": {self.answers:,} answers of {self.tokens:,} tokens in {self.seconds:.1f} s"
        line += f", {self.cut:,} cut" if self.cut else ""
        line += "" if self.tokens_per_step is None else f", {self.tokens_per_step:.2f} tokens per step"
        if self.questions:
            line += f"\n{self.questions:,} questions of the base's own, dropped: {in_words(self.dropped) or 'none'}"
        if self.missing:
            line += (
                f"\n{self.missing:,} chats are missing: the last {UNFIT_IN_A_ROW:,} or more questions were all unfit"
            )
        for reason, count in self.unusable.items():
            line += f"\n{count:,} answers not used: {reason}"
        if self.refused:
            more = ", ..." if self.refused > len(self.refusals) else ""
            line += f"\n{self.refused:,} rows refused: {', '.join(self.refusals)}{more}"
        return line


def in_words(counts: Mapping[str, int]) -> str:
    """Counts by reason, the most frequent first.

    >>> in_words({"cut": 2, "duplicate": 1300})
    '1,300 duplicate, 2 cut'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(counts).most_common())


class Shards:
    """The files of one output: JSON lines, one row each, with the row's number in `row`. An OSError where the output
    cannot be written or was not made by this, a ValueError where it was started with other settings."""

    def __init__(self, output: str | Path, settings: dict[str, Any], process: int = 0) -> None:
        self.output, self.settings = Path(output), settings
        self._notes = self.output.with_name(f"{self.output.name}.settings.json")
        self._part = self.output.with_name(f"{self.output.name}.part{process}")
        if self.output.is_dir() or not self.output.absolute().parent.is_dir():
            raise OSError(f"no file can be written at {str(output)!r}: give a file in a folder that exists.")
        if not self._notes.is_file():
            if self.output.exists():
                advice = "move it away, or give another output"
                raise OSError(f"{str(output)!r} exists and was not written by this command: {advice}.")
            return
        if not any(file.stat().st_size for file in self._files()):  # no row depends on anything yet
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
        write_whole(self._notes, json.dumps(self.settings, indent=2) + "\n")

    def done(self) -> set[int]:
        """Numbers of the rows that are there, whichever process wrote them."""
        return set(self._index())

    def asked(self) -> set[int]:
        """`same_words` of the first question of each chat that is there, or of the beginning of each text."""
        words = set()
        for row in (json.loads(_line_at(*place)) for place in self._index().values()):
            question = next((turn["content"] for turn in row.get("messages") or () if turn["role"] == "user"), "")
            words.add(same_words(question or (row.get("text") or "")[: row.get("given") or 0]))
        return words

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
        self._file.close()

    def merge(self) -> None:
        """Put all parts into the output, in the order of the rows; for one process, when all have closed theirs."""
        if self.output.is_file() and not self._parts():
            return
        index = self._index()
        write_whole(self.output, (_line_at(*index[row]) for row in sorted(index)))
        for part in self._parts():
            part.unlink()

    def _files(self) -> list[Path]:
        return [self.output] * self.output.is_file() + self._parts()

    def _parts(self) -> list[Path]:
        name = f"{self.output.name}.part"
        return sorted(file for file in self.output.absolute().parent.iterdir() if file.name.startswith(name))

    def _index(self) -> dict[int, tuple[Path, int]]:
        """In which file and where in it each row is."""
        places: dict[int, tuple[Path, int]] = {}
        for file in self._files():
            at = 0
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.endswith(b"\n"):
                        try:
                            places.setdefault(json.loads(line)["row"], (file, at))
                        except (ValueError, KeyError, TypeError):
                            what = f"{file} line {number} is not a valid row"
                            raise ValueError(f"{what}: correct it, or move the file away.") from None
                    at += len(line)
        return places


def _line_at(file: Path, at: int) -> bytes:
    with open(file, "rb") as lines:
        lines.seek(at)
        return lines.readline()
