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
) -> DistillReport:
    """Answer the rows that are not answered yet, in all processes together, and write them to the output in order.

    Args:
        rows: all of them; they are iterated over once.
        output: JSON lines.
        settings: what the output depends on.
        work: answers this process's share; it writes the rows, and counts refused ones in the report.
        progress: called once for each row that is done already or another process's.

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
    todo = _share(rows, done, state.process_index, state.num_processes, report, progress)
    shards.open()
    try:
        counts = work(todo, shards, report)
    finally:
        shards.close()
    report.seconds = time.monotonic() - start
    total = _sum(gather_object([(report, counts)]))  # waits for everyone
    if not total.written + total.found:
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
        for reason, count in counts.unusable.items():
            total.unusable[reason] = total.unusable.get(reason, 0) + count
        total.refusals = (total.refusals + report.refusals)[:NAMED]
        total.seconds = max(total.seconds, report.seconds)
        steps, step_tokens = steps + counts.steps, step_tokens + counts.step_tokens
    total.tokens_per_step = step_tokens / steps if steps else None
    return total
