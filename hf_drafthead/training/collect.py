"""The file and the figures of a distillation, whoever answers."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_drafthead.data.texts import same_words
from hf_drafthead.training.record import keep_settings, write_whole

NAMED = 5  # refused rows that the report names
UNFIT_IN_A_ROW = 256  # chats without a question, one after the other, after which the base is asked for no more


@dataclass
class DistillReport:
    """What a run wrote: `found` rows are from earlier runs; `steps`, `step_tokens` of draft heads, counted for each row
    that took part; unusable answers, and dropped questions, by the reason; chats that are missing."""

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
        return line + refused_in_words(self)


def refused_in_words(report: Any) -> str:
    """The rows that a report counts as refused, with the first reasons, on a line of its own; nothing without any."""
    more = ", ..." if report.refused > len(report.refusals) else ""
    return f"\n{report.refused:,} rows refused: {', '.join(report.refusals)}{more}" if report.refused else ""


def in_words(counts: Mapping[str, int]) -> str:
    """Counts by reason, the most frequent first.

    >>> in_words({"cut": 2, "duplicate": 1300})
    '1,300 duplicate, 2 cut'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in Counter(counts).most_common())


class OutputFile:
    """JSON lines, one row each, with the row's number in `row`, which may be interrupted at any time: what is complete
    stays, and `close` puts it in the order of the rows. Beside it lie the settings that the rows depend on.

    An OSError or a ValueError where the output cannot be written, or was not begun by this with the same settings."""

    def __init__(self, output: str | Path, settings: dict[str, Any]) -> None:
        self.output = Path(output)
        notes = self.output.with_name(f"{self.output.name}.settings.json")
        if self.output.exists() and not notes.is_file():
            advice = "move it away, or give another output"
            raise OSError(f"{str(output)!r} exists and was not written by this command: {advice}.")
        begun = self.output.exists() and self.output.stat().st_size > 0  # else no row depends on anything yet
        keep_settings(self.output, notes, settings, begun)
        self._file = open(self.output, "a+b")  # closed in `close`
        self._places = dict(self._found())  # where in the file each row is
        self._file.truncate(self._end)

    def _found(self) -> Iterator[tuple[int, int]]:
        self._file.seek(0)
        self._end = 0
        for number, line in enumerate(self._file, start=1):
            if not line.endswith(b"\n"):  # of a process that was killed
                return
            try:
                yield json.loads(line)["row"], self._end
            except (ValueError, KeyError, TypeError):
                what = f"{self.output} line {number} is not a valid row"
                raise ValueError(f"{what}: correct it, or move the file away.") from None
            self._end += len(line)

    @property
    def done(self) -> set[int]:
        """Numbers of the rows that are there."""
        return set(self._places)

    def asked(self) -> set[int]:
        """`same_words` of the first question of each chat that is there, or of the beginning of each text."""
        words = set()
        for row in map(json.loads, self._lines()):
            question = next((turn["content"] for turn in row.get("messages") or () if turn["role"] == "user"), "")
            words.add(same_words(question or (row.get("text") or "")[: row.get("given") or 0]))
        return words

    def write(self, rows: Iterable[dict[str, Any]]) -> None:
        """Append rows; they are on the disk when this returns."""
        for row in rows:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
            self._file.write(line)
            self._places[row["row"]] = self._end
            self._end += len(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Put the rows in their order; without any there is no file."""
        if not self._places:
            self.output.unlink()
        elif list(self._places) != sorted(self._places):
            write_whole(self.output, self._lines())
        self._file.close()

    def _lines(self) -> Iterator[bytes]:
        for row in sorted(self._places):
            self._file.seek(self._places[row])
            yield self._file.readline()
