"""What every distillation does, with a model or a server: answer the remaining rows in all processes and write them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from hf_drafthead.training.answers import Counts
from hf_drafthead.training.shards import Shards

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


def own_rows(count: int, patience: int, shards: Shards, counts: Counts, report: DistillReport) -> Todo:
    """Numbers of chats that this process may begin, behind those that are there, until its share is written.

    Args:
        count: chats in all.
        patience: chats without a question, one after the other, after which no more are begun.
        shards: its `there` names those of earlier runs.
        counts, report: of the work, as it goes on.
    """
    state, share = processes(), own_share(count, shards)
    index = max(shards.there, default=-1) + 1 + state.process_index
    while report.written < share:
        if counts.in_vain >= patience:
            report.missing = share - report.written
            return
        report.rows += 1
        yield index, {}
        index += state.num_processes
