"""Self-distillation: the base answers the prompts of the data, and heads are trained on its answers.

Heads have to predict the base's own text, which differs from that of the people or models that wrote the data. Where
there is no data, the base writes the questions too, or beginnings of texts.
"""

import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.data.chats import Refused
from hf_drafthead.data.rows import data_hash, without_format
from hf_drafthead.training.answers import ONE_TEXT, Answerer, Sampling, Task, Writer, at_least_one
from hf_drafthead.training.collect import UNFIT_IN_A_ROW, DistillReport, OutputFile, in_words
from hf_drafthead.training.endpoint import Server, ServerWriter
from hf_drafthead.training.examples import PreparedData, longest_text_of
from hf_drafthead.training.record import base_fingerprint
from hf_drafthead.trees.calibrate import Bar, no_bar

OWN_CHATS, MOST_CHATS = 2000, 200_000  # to write; where the hours end the writing
ASSUMED_LENGTH = 256  # tokens of a row that is not written yet
ANSWER_TOKENS, QUESTION_TOKENS = (32, 64, 128, 256, 512), 96  # at most, of which the first is taken where hours are few
ROWS, TRIED = 32, 8  # at once, and tokens after which the clock is looked at
SLOWER = 2  # times as long as the first tokens later ones may take, which have more keys to read
FILE = "own.jsonl"  # in the folder of the heads
Progress = Callable[[], object]


def distill(
    model: Any,
    tokenizer: Any,
    rows: Collection[Mapping[str, Any]] | int,
    output: str | Path,
    *,
    max_new_tokens: int = 512,
    temperature: float | None = None,
    top_p: float = 1.0,
    batch_size: int | None = None,
    max_length: int | None = None,
    prompt_tokens: int = 64,
    turns: int = 1,
    question_tokens: int = 96,
    seconds: float | None = None,
    seed: int = 0,
    bar: Bar = no_bar,
) -> DistillReport:
    """Let a model answer the data's questions, in their order, its own answers being the context of the next ones.

    Of a chat, the system turn and the questions are used, not the answers; a text is continued from its beginning.
    An answer ends at the model's end of text, at the chat template's end of turn, or at a limit; a chat ends at an
    answer that reached a limit, or where the base has no position left. With a number in the place of rows the model
    writes so many chats from nothing, its own questions (Magpie, arXiv 2406.08464) and its answers to them; without a
    chat template, texts.

    The output has one JSON object per row in the form that `read_rows` reads, with the row's number in `row`, and
    with the tokens of each answer in `ids`. An interrupted run resumes where it stopped, and one with a greater number
    of chats goes on behind the last one. The rows are the same whatever the batch size and the interruptions, but that
    nearly equal logits may be exchanged in another batch, and that chats of the model's own that were not finished are
    not begun again.

    Args:
        model: a causal language model on its device; one with draft heads needs fewer forward passes. Or a `Server`.
        tokenizer: its fast one, with a chat template if there are chats; None for a server that is asked chats alone.
        rows: from `read_rows`, or a list of such records; or the number of chats to write, those of earlier runs
            included.
        output: JSON lines.
        max_new_tokens: of each answer.
        temperature: 0 is greedy, as by default for rows; 1 by default for chats of the model's own, of which every
            second one has greedy answers.
        top_p: sample from the likeliest tokens that have this probability together; above 0.
        batch_size: rows at a time; for a server, requests at once. By default 8; of the model's own
            chats 256 on an accelerator, 32 on a CPU or with a server.
        max_length: of a prompt with its answer; by default the base's positions. Not for a server.
        prompt_tokens: of a text, how many are given.
        turns, question_tokens: of the model's own chats: questions of each, and tokens of a question, at most.
        seconds: after which no further chat of the model's own is begun.
        seed: of the sampling; bar: shows how many rows are done, as of `calibrate`.

    Raises:
        OSError: the output cannot be written, or is another file; or the server cannot be used.
        ValueError: a setting that does not fit, an output that was begun with other settings, no row that can be asked,
            or no chat template that shows a lone question.
    """
    settings = {"max_new_tokens": max_new_tokens, "top_p": float(top_p), "seed": seed}
    rows = without_format(rows)
    rows = rows if isinstance(rows, int) or hasattr(rows, "__len__") else [*rows]
    if isinstance(rows, int):
        at_least_one(count=rows)
        settings |= {"turns": turns, "question_tokens": question_tokens}
        data, usual_temperature = "the base's own questions", 1.0
        usual_size = 32 if isinstance(model, Server) or model.device.type == "cpu" else 256
    else:
        settings["prompt_tokens"] = prompt_tokens
        data, usual_temperature, usual_size = data_hash(rows), 0.0, 8
    settings["temperature"] = usual_temperature if temperature is None else float(temperature)
    batch_size = usual_size if batch_size is None else batch_size
    at_least_one(batch_size=batch_size)
    writer, about = _writer(model, tokenizer, settings, max_length)
    count, part = (rows, "writing") if isinstance(rows, int) else (len(rows), "answering")
    with bar(count) as begin:
        return _collect(writer, output, {**about, "data": data}, rows, batch_size, begin(part), seconds)


def _writer(
    model: Any, tokenizer: Any, settings: dict[str, Any], max_length: int | None
) -> tuple[Writer, dict[str, Any]]:
    """Who answers, and what the rows depend on."""
    if isinstance(model, Server):  # which decides by itself how long a text may be
        values = {"chat_template_kwargs": model.template_values} if model.template_values else {}
        about = {"endpoint_model": model.model, **values, **settings}
        return ServerWriter(model, tokenizer, Sampling(**settings)), about
    base = getattr(model, "base", model)
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and max_length is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the base has {positions} positions: give at most that many.")
    settings = {**settings, "max_length": positions if max_length is None else max_length}
    template = hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()
    origin = {"base": base.name_or_path, "weights": base_fingerprint(base), "chat_template": template}
    return Answerer(model.eval(), tokenizer, Sampling(**settings)), {**origin, **settings}


def _collect(
    writer: Writer,
    output: str | Path,
    settings: dict[str, Any],
    rows: Iterable[Mapping[str, Any]] | int,
    batch_size: int,
    tell: Progress,
    seconds: float | None,
) -> DistillReport:
    """Answer what is not answered yet, and write it to the output in order; `settings` are what the rows depend on."""
    report, start = writer.report, time.monotonic()
    file = OutputFile(output, settings)
    share = None
    if isinstance(rows, int):
        report.found = len(file.done)
        for _ in file.done:
            tell()
        writer.asked |= file.asked()
        share = max(0, rows - report.found)
        patience = max(UNFIT_IN_A_ROW, 4 * batch_size)
        todo = _own_tasks(writer, max(file.done, default=-1) + 1, share, patience, seconds)
    else:
        todo = _tasks(writer, rows, file.done, tell)
    try:
        _answer_all(writer, todo, file, batch_size, share, tell)
    finally:
        file.close()
        writer.close()
    report.seconds = time.monotonic() - start
    if report.written + report.found:
        return report
    if isinstance(rows, int):
        raise ValueError(
            f"not one of {report.questions:,} questions that the base wrote can be asked "
            f"({in_words(report.dropped) or 'none was finished'}): give questions (--data), or the chat template "
            "that it was trained with."
        )
    why = f" ({'; '.join(report.refusals)})" if report.refusals else ""
    raise ValueError(f"there is nothing to ask in the data: {report.refused} of {report.rows} rows were refused{why}.")


def _tasks(writer: Writer, rows: Iterable[Mapping[str, Any]], done: set[int], tell: Progress) -> Iterator[Task]:
    """Tasks for the rows that are still to be done."""
    report = writer.report
    for index, row in enumerate(rows):
        report.rows += 1
        report.found += index in done
        if index not in done:
            try:
                yield writer.begin(index, row)
                continue
            except Refused as reason:
                report.refuse(index, reason)
        tell()


def _own_tasks(writer: Writer, first: int, share: int, patience: int, seconds: float | None) -> Iterator[Task]:
    """Chats that may be begun, from `first` on, until the share is written, the time over, or `patience` at its end."""
    report, start = writer.report, time.monotonic()
    for index in itertools.count(first):
        if report.written >= share or (seconds is not None and time.monotonic() - start >= seconds):
            return
        if writer.in_vain >= patience:
            report.missing = share - report.written
            return
        report.rows += 1
        yield writer.begin_own(index)


def _answer_all(
    writer: Writer, todo: Iterator[Task], file: OutputFile, batch_size: int, share: int | None, tell: Progress
) -> None:
    """Keep as many tasks at work as there may be; what is finished is written before anything else is asked. With a
    `share` the base writes the questions: chats without one are not refused, and what exceeds the share is left out."""
    report, tasks = writer.report, list[Task]()
    while True:
        while len(tasks) < batch_size and (task := next(todo, None)) is not None:
            tasks.append(task)
        if not tasks or (share is not None and report.written >= share):
            return
        writer.answer(tasks)
        ended, tasks = [task for task in tasks if task.done], [task for task in tasks if not task.done]
        answered = [task for task in ended if not task.refused]
        answered = answered if share is None else answered[: share - report.written]
        file.write(task.to_row() for task in answered)
        report.written += len(answered)
        for task in ended if share is None else answered:
            if task.refused:
                report.refuse(task.index, task.refused)
            tell()
        most = writer.most_refused
        if most is not None and report.refused >= most and not report.written + report.found:
            why = "; ".join(report.refusals)
            raise ValueError(f"nothing can be asked: the first {most} rows were refused ({why}).")


def kind_of_text(tokenizer: Any) -> str:
    """ "chats", or "texts", which is what a base without a chat template can write of its own; else a ValueError."""
    writer = Writer(tokenizer, Sampling(1, 1.0, turns=1))
    return "texts" if writer.chats is None else "chats"


def write_own_text(
    model: Any,
    tokenizer: Any,
    file: Path,
    chats: int | None,
    hours: float | None,
    max_length: int | None,
    say: Callable[[str], object],
    bar: Bar = no_bar,
) -> float:
    """Let the base, or a model with trained heads, write so many chats or texts, by default 2,000, or those that half
    of the hours is enough for, into a file of JSON lines, or resume that; the seconds that this took."""
    start, count = time.monotonic(), chats or (OWN_CHATS if hours is None else MOST_CHATS)
    kind = kind_of_text(tokenizer)
    file.parent.mkdir(parents=True, exist_ok=True)
    seconds = None if hours is None else 3600 * hours / 2
    amount = f"{count:,} {kind}" if seconds is None or chats else f"{kind} for {seconds / 60:.0f} min"
    without = "" if kind == "chats" else ", for its tokenizer has no chat template"
    say(f"the base writes {amount} into {file}{without}")
    tokens = ANSWER_TOKENS[-1] if seconds is None or chats else fitting_tokens(model, seconds)
    limits: dict[str, Any] = {"seconds": seconds, "max_length": max_length, "max_new_tokens": tokens}
    say(str(distill(model, tokenizer, count, file, bar=bar, **limits)))
    return time.monotonic() - start


def fitting_tokens(model: Any, seconds: float) -> int:
    """Of an answer: fewer where the first questions and their answers would take longer than there is time."""
    base: Any = getattr(model, "base", model)
    prompt = probe_tokens(base)[None, :8].expand(ROWS, -1)
    start = time.perf_counter()
    base.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TRIED, min_new_tokens=TRIED, **ONE_TEXT
    )
    fitting = seconds * TRIED / SLOWER / (time.perf_counter() - start) - QUESTION_TOKENS
    return max((tokens for tokens in ANSWER_TOKENS if tokens <= fitting), default=ANSWER_TOKENS[0])


def rows_to_assume(model: Any, count: int) -> PreparedData:
    """Rows of any tokens as long as written ones may be: what a training takes depends on their shape."""
    length = min(ASSUMED_LENGTH, longest_text_of(model) - 1)
    some = list(range(1, min(length, model.config.get_text_config().vocab_size)))
    row = {"input_ids": some, "labels": some}
    held_out = max(1, min(64, count // 10))
    return PreparedData([row] * max(count - held_out, 1), [row] * held_out, "rows to assume", "")
