"""Self-distillation: the base answers the questions of the data itself, and heads learn from what it said.

Heads have to guess the base's own words, which are not those of the people or models that wrote the data.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead.data.chats import Refused
from hf_drafthead.data.rows import data_hash
from hf_drafthead.training.answers import Answerer, Task
from hf_drafthead.training.shards import Shards

NAMED = 5  # refused rows whose reason is told


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
        cut: answers broken off at `max_new_tokens` or `max_length`.
        tokens: of the answers.
        tokens_per_step: of draft heads; None without any.
        seconds: of the slowest process.
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

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON."""
        return asdict(self)

    def __str__(self) -> str:
        line = f"{self.written:,} rows written"
        line += f", {self.found:,} were there already" if self.found else ""
        line += f": {self.answers:,} answers of {self.tokens:,} tokens in {self.seconds:.1f} s"
        line += f", {self.cut:,} broken off" if self.cut else ""
        line += "" if self.tokens_per_step is None else f", {self.tokens_per_step:.2f} tokens per step"
        if self.refused:
            more = ", ..." if self.refused > len(self.refusals) else ""
            line += f"\n{self.refused:,} rows refused: {', '.join(self.refusals)}{more}"
        return line


def distill(
    model: Any,
    tokenizer: Any,
    rows: Iterable[Mapping[str, Any]],
    output: str | Path,
    *,
    max_new_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    batch_size: int = 8,
    max_length: int | None = None,
    prompt_tokens: int = 64,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> DistillReport:
    """Let a model answer the data's questions, in their order, its own answers being the context of the next ones.

    Of a chat the questions and the system turn are taken; the answers that it holds are not. Of a text the beginning is
    taken, and continued. An answer ends at the model's end of text, at the chat template's end of turn, or at a limit;
    a chat whose answer was broken off, or that has no more room, ends there.

    The output has one JSON object per row in the form that `read_rows` reads, with the row's number in `row`. A run
    that was killed goes on where it stopped. Under `accelerate launch` every process takes its share of the rows (the
    folder of the output must be one that all see). The rows are the same whatever the number of processes, the batch
    size and the interruptions: sampled tokens depend on the seed, the row and the position alone. What remains is
    rounding: in another batch a near-tie may fall the other way.

    Args:
        model: a causal language model on its device; with draft heads it needs fewer forward passes.
        tokenizer: its fast tokenizer, with a chat template if there are chats.
        rows: from `read_rows`, or anything that can be iterated over twice and gives records such as it reads.
        output: JSON lines.
        max_new_tokens: of each answer.
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens that have this probability together; above 0.
        batch_size: rows at a time, in each process.
        max_length: of a prompt with its answer; by default the base's positions.
        prompt_tokens: of a text, how many are given.
        seed: of the sampling.
        progress: called once for each row, in this process.

    Raises:
        OSError: the output cannot be written, or is another file.
        ValueError: a setting that does not fit, an output that was begun with other settings, or no row that can be
            asked.
    """
    _check(max_new_tokens, temperature, top_p, batch_size, prompt_tokens)
    base = getattr(model, "base", model)
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and max_length is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the base has {positions} positions: give at most that many.")
    choices: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "max_length": positions if max_length is None else max_length,
        "temperature": float(temperature),
        "top_p": float(top_p),
        "prompt_tokens": prompt_tokens,
        "seed": seed,
    }
    template = hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()
    about = {"base": base.name_or_path, "chat_template": template, "data": data_hash(rows)}
    state = processes()
    shards = Shards(output, {**about, **choices}, state.process_index)
    state.wait_for_everyone()
    if state.is_main_process:
        shards.write_settings()
    done = shards.done()
    state.wait_for_everyone()  # until all know what is done, nobody writes
    report, start = DistillReport(), time.monotonic()
    answerer = Answerer(model.eval(), tokenizer, **choices)
    todo = _share(rows, done, state.process_index, state.num_processes, report, progress or (lambda: None))
    shards.open()
    try:
        _run(answerer, todo, shards, batch_size, report, progress or (lambda: None))
    finally:
        shards.close()
    report.seconds = time.monotonic() - start
    total = _sum(gather_object([(report, answerer.counts)]))  # waits for everyone
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
    """The processes of `accelerate launch`, or this one alone; one that is through waits for the others for days."""
    # accelerate forms no group of CPU processes unless it is told that they are
    cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    return PartialState(cpu=cpu, timeout=timedelta(days=30))


def load_model(name: str, device: torch.device | None = None) -> tuple[Any, Any]:
    """A causal language model, with draft heads or without, and its tokenizer.

    Args:
        name: its folder, or its id on the Hub.
        device: where it goes.

    Raises:
        OSError: there is none.
    """
    wanted = "give the folder of a causal language model or of a draft-head checkpoint, or its id on the Hub."
    try:
        place = {} if device is None or device.type == "cpu" else {"device_map": {"": device}}
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **place)
    except OSError as error:
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise OSError(f"no model could be read at {name!r} ({said}): {wanted}") from error
    try:
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        return model, AutoTokenizer.from_pretrained(getattr(model, "base", model).name_or_path)


def _check(max_new_tokens: int, temperature: float, top_p: float, batch_size: int, prompt_tokens: int) -> None:
    counts = {"max_new_tokens": max_new_tokens, "batch_size": batch_size, "prompt_tokens": prompt_tokens}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: expected 0 for greedy, or a number above it.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: expected a number above 0, at most 1.")


def _share(
    rows: Iterable[Mapping[str, Any]],
    done: set[int],
    process: int,
    processes: int,
    report: DistillReport,
    progress: Callable[[], None],
) -> Iterator[tuple[int, Mapping[str, Any]]]:
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


def _run(
    answerer: Answerer,
    todo: Iterator[tuple[int, Mapping[str, Any]]],
    shards: Shards,
    batch_size: int,
    report: DistillReport,
    progress: Callable[[], None],
) -> None:
    """Keep a batch full until no row is left; what is through is written before the next question is asked."""
    tasks: list[Task] = []
    more = True
    while more or tasks:
        while more and len(tasks) < batch_size:
            index, row = next(todo, (None, {}))
            more = index is not None
            if index is None:
                break
            try:
                tasks.append(answerer.begin(index, row))
            except Refused as reason:
                report.refused += 1
                report.refusals += [f"row {index}: {reason}"][: NAMED - len(report.refusals)]
                progress()
        if not tasks:
            break
        answerer.answer(tasks)
        through = [task for task in tasks if task.done]
        shards.write(task.to_row() for task in through)
        report.written += len(through)
        for _ in through:
            progress()
        tasks = [task for task in tasks if not task.done]


def _sum(parts: list[tuple[DistillReport, Any]]) -> DistillReport:
    """The reports of all processes as one."""
    total = DistillReport()
    steps = step_tokens = 0
    for report, counts in parts:
        for name in ("rows", "written", "found", "refused"):
            setattr(total, name, getattr(total, name) + getattr(report, name))
        for name in ("answers", "cut", "tokens"):
            setattr(total, name, getattr(total, name) + getattr(counts, name))
        total.refusals = (total.refusals + report.refusals)[:NAMED]
        total.seconds = max(total.seconds, report.seconds)
        steps, step_tokens = steps + counts.steps, step_tokens + counts.step_tokens
    total.tokens_per_step = step_tokens / steps if steps else None
    return total
