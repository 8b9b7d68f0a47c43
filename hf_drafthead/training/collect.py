"""What every distillation does, with a model or a server: answer the remaining rows in all processes and write them.

The processes may be killed at any time. Next to the output file are `OUTPUT.settings.json`, the settings that the rows
depend on, and until the end one `OUTPUT.partN` for each process. A part grows by complete lines; an incomplete one is
dropped. At the end the parts are merged in the order of the rows.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from hf_drafthead.data.texts import same_words
from hf_drafthead.training.answers import Counts

Todo = Iterator[tuple[int, Mapping[str, Any]]]  # rows with their numbers
NAMED = 5  # refused rows that the report names
UNFIT_IN_A_ROW = 256  # chats without a question, one after the other, after which the base is asked for no more


@dataclass
class DistillReport:
    """What a run wrote, over all its processes.

    Attributes:
        rows: in the data.
        written: by this run.
        found: written by earlier runs.
        refused: rows that cannot be asked; they are not in the output.
        refusals: the first of these, each with its number and the reason.
        answers: of the base, in this run.
        cut: answers that reached `max_new_tokens` or `max_length`.
        tokens: of the answers.
        tokens_per_step: of draft heads; None without any.
        seconds: of the slowest process.
        unusable: answers that are in no row, by the reason.
        questions: that the base wrote itself, in this run.
        dropped: those of them that were not asked, by the reason.
        missing: chats that were asked for and are not there, because the base wrote no more questions.
    """

    rows: int = 0
    written: int = 0
    found: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)
    answers: int = 0
    cut: int = 0
    tokens: int = 0
    tokens_per_step: float | None = None
    seconds: float = 0.0
    unusable: dict[str, int] = field(default_factory=dict)
    questions: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    missing: int = 0

    def refuse(self, index: int, reason: object) -> None:
        """Count a row that cannot be asked."""
        self.refused += 1
        self.refusals += [f"row {index}: {reason}"][: NAMED - len(self.refusals)]

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        return asdict(self)

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


def collect(
    rows: Iterable[Mapping[str, Any]],
    output: str | Path,
    settings: dict[str, Any],
    work: Callable[[Todo, Shards, DistillReport], Counts],
    progress: Callable[[], None],
    own: bool = False,
) -> DistillReport:
    """Answer the rows that are not answered yet, in all processes together, and write them to the output in order.

    Args:
        rows: all of them; they are iterated over once.
        output: JSON lines.
        settings: what the output depends on.
        work: answers this process's share; it writes the rows, and counts refused ones in the report.
        progress: called once for each row that is done already or another process's.
        own: the base writes the questions: there are no rows, and those of earlier runs are found.

    Raises:
        OSError, ValueError: as `Shards` does, what `work` raises, or no row could be asked.
    """
    state = processes()
    shards = Shards(output, settings, state.process_index)
    state.wait_for_everyone()
    if state.is_main_process:
        shards.write_settings()
    done = shards.done()
    state.wait_for_everyone()  # no process writes before all have read what is done
    report, start = DistillReport(), time.monotonic()
    if own:
        report.found = len(done) * state.is_main_process
        for _ in done:
            progress()
    todo = _share(rows, set() if own else done, state.process_index, state.num_processes, report, progress)
    shards.open()
    try:
        counts = work(todo, shards, report)
    finally:
        shards.close()
    report.seconds = time.monotonic() - start
    total = _sum(gather_object([(report, counts)]))  # waits for everyone
    if not total.written + total.found:
        if own:
            raise ValueError(
                f"not one of {total.questions:,} questions that the base wrote can be asked "
                f"({in_words(total.dropped) or 'none was finished'}): give questions (--data), or the chat template "
                "that it was trained with."
            )
        why = f" ({'; '.join(total.refusals)})" if total.refusals else ""
        raise ValueError(
            f"there is nothing to ask in the data: {total.refused} of {total.rows} rows were refused{why}."
        )
    if state.is_main_process:
        shards.merge()
    state.wait_for_everyone()
    return total


def processes() -> PartialState:
    """The processes of `accelerate launch`, or this one alone; a finished process waits for the others for days."""
    # accelerate forms no group of CPU processes unless this is set
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=cpu, timeout=timedelta(days=30))


def _share(
    rows: Iterable[Mapping[str, Any]],
    done: set[int],
    process: int,
    processes: int,
    report: DistillReport,
    progress: Callable[[], None],
) -> Todo:
    """The rows that this process still has to do, each with its number; the first process counts them all."""
    left = 0
    for index, row in enumerate(rows):
        report.rows += process == 0
        if index in done:
            report.found += process == 0
            progress()
            continue
        left += 1
        if left % processes == process:
            yield index, row
        else:
            progress()


def _sum(parts: list[tuple[DistillReport, Any]]) -> DistillReport:
    """The reports of all processes as one."""
    total = DistillReport()
    steps = step_tokens = 0
    for report, counts in parts:
        for name in ("rows", "written", "found", "refused"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        for name in ("answers", "cut", "tokens"):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
        total.questions, total.missing = total.questions + counts.questions, total.missing + report.missing
        for reason, count in counts.dropped.items():
            total.dropped[reason] = total.dropped.get(reason, 0) + count
        for reason, count in counts.unusable.items():
            total.unusable[reason] = total.unusable.get(reason, 0) + count
        total.refusals = (total.refusals + report.refusals)[:NAMED]
        total.seconds = max(total.seconds, report.seconds)
        steps, step_tokens = steps + counts.steps, step_tokens + counts.step_tokens
    total.tokens_per_step = step_tokens / steps if steps else None
    return total


def in_words(counts: Mapping[str, int]) -> str:
    """Counts by reason, the most frequent first.

    >>> in_words({"cut": 2, "duplicate": 1300})
    '1,300 duplicate, 2 cut'
    """
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda pair: -pair[1]))


def own_share(count: int, shards: Shards) -> int:
    """How many of `count` chats this process still has to write."""
    state = processes()
    left = max(0, count - len(shards.there))
    return (left + state.num_processes - 1 - state.process_index) // state.num_processes


def own_rows(
    count: int, patience: int, shards: Shards, counts: Counts, report: DistillReport, seconds: float | None = None
) -> Todo:
    """Numbers of chats that this process may begin, behind those that are there, until its share is written.

    Args:
        count: chats in all.
        patience: chats without a question, one after the other, after which no more are begun.
        shards: its `there` names those of earlier runs.
        counts, report: of the work, as it goes on.
        seconds: after which no chat is begun.
    """
    state, share, start = processes(), own_share(count, shards), time.monotonic()
    index = max(shards.there, default=-1) + 1 + state.process_index
    while report.written < share and (seconds is None or time.monotonic() - start < seconds):
        if counts.in_vain >= patience:
            report.missing = share - report.written
            return
        report.rows += 1
        yield index, {}
        index += state.num_processes
