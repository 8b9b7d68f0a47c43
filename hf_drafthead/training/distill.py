"""Self-distillation: the base answers the prompts of the data, and heads are trained on its answers.

Heads have to predict the base's own text, which differs from that of the people or models that wrote the data.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_drafthead.data.chats import Refused
from hf_drafthead.data.rows import data_hash
from hf_drafthead.modeling.gguf_files import gguf_arguments, load_tokenizer, reading_gguf, split_gguf
from hf_drafthead.training.answers import Answerer, Counts, Task
from hf_drafthead.training.collect import (
    UNFIT_IN_A_ROW,
    DistillReport,
    Shards,
    Todo,
    collect,
    own_rows,
    own_share,
    processes,
)


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

    Of a chat, the system turn and the questions are used, not the answers. A text is continued from its beginning. An
    answer ends at the model's end of text, at the chat template's end of turn, or at a limit; a chat ends at an answer
    that reached a limit, or where the base has no position left.

    The output has one JSON object per row in the form that `read_rows` reads, with the row's number in `row`, and with
    the tokens of each answer in `ids`. An interrupted run resumes where it stopped. Under `accelerate launch`
    every process takes its share of the rows (the folder of the output must be one that all see). The rows are the same
    whatever the number of processes, the batch size and the interruptions: sampled tokens depend on the seed, the row
    and the position alone. The limit is rounding: in another batch, two nearly equal logits may be exchanged.

    Args:
        model: a causal language model on its device; one with draft heads needs fewer forward passes.
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
    check_choices(temperature, top_p, max_new_tokens=max_new_tokens, batch_size=batch_size, prompt_tokens=prompt_tokens)
    choices: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "max_length": _longest(model, max_length),
        "temperature": float(temperature),
        "top_p": float(top_p),
        "prompt_tokens": prompt_tokens,
        "seed": seed,
    }
    about = {**_origin(model, tokenizer), "data": data_hash(rows)}
    answerer = Answerer(model.eval(), tokenizer, **choices)

    def work(todo: Todo, shards: Shards, report: DistillReport) -> Counts:
        _run(answerer, answerer.begin, todo, shards, batch_size, report, tell)
        return answerer.counts

    tell = progress or (lambda: None)
    return collect(rows, output, {**about, **choices}, work, tell)


def synthesize(
    model: Any,
    tokenizer: Any,
    count: int,
    output: str | Path,
    *,
    turns: int = 1,
    greedy: float = 0.5,
    max_new_tokens: int = 512,
    question_tokens: int = 96,
    temperature: float = 1.0,
    top_p: float = 1.0,
    batch_size: int | None = None,
    max_length: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    progress: Callable[[], None] | None = None,
) -> DistillReport:
    """Let a model write chats from nothing: its own questions (Magpie, arXiv 2406.08464), and its answers to them.

    A question is what the model writes where the chat template would have a user's words, at temperature 1, until the
    turn ends. Questions that are too short, cut, repeat themselves or hold control tokens are dropped, and so are first
    questions with the words of an earlier one (of this process).

    The output is that of `distill`. A run that was interrupted goes on behind the last chat that was written, and so
    does one with a greater `count`. Under `accelerate launch` every process writes its share.

    Args:
        model: a causal language model on its device; one with draft heads needs fewer forward passes.
        tokenizer: its fast tokenizer, with a chat template.
        count: chats to write, those of earlier runs included.
        output: JSON lines.
        turns: questions of a chat, at most.
        greedy: share of the chats whose answers are greedy; the others are sampled.
        max_new_tokens: of each answer.
        question_tokens: of each question.
        temperature, top_p: of the answers that are sampled.
        batch_size: chats at a time, in each process; by default 32 on a CPU, 256 elsewhere.
        max_length, seed: as for `distill`.
        seconds: after which no further chat is begun; those that were are finished.
        progress: called once for each chat, in this process.

    Returns:
        What was written; fewer chats than asked for where the model wrote nothing but unfit questions for long.

    Raises:
        OSError: as `distill`.
        ValueError: a setting that does not fit, no chat template or one that does not show a lone question, an output
            that was begun with other settings, or not one question that can be asked.
    """
    choices = own_choices(turns, greedy, max_new_tokens, question_tokens, temperature, top_p, seed)
    at_once = (32 if model.device.type == "cpu" else 256) if batch_size is None else batch_size
    check_choices(temperature, top_p, count=count, batch_size=at_once)
    choices["max_length"] = _longest(model, max_length)
    names = ("max_new_tokens", "question_tokens", "temperature", "top_p", "seed", "max_length")
    answerer = Answerer(
        model.eval(), tokenizer, prompt_tokens=1, **{name: choices[name] for name in names if name in choices}
    )
    answerer.begin_own(0, 1, False)  # which refuses a tokenizer that does not fit, before a file is written
    tell = progress or (lambda: None)

    def work(todo: Todo, shards: Shards, report: DistillReport) -> Counts:
        answerer.asked |= shards.asked()
        own = own_rows(count, max(UNFIT_IN_A_ROW, 4 * at_once), shards, answerer.counts, report, seconds)

        def begin(index: int, row: Mapping[str, Any]) -> Task:
            return answerer.begin_own(index, turns, is_greedy(index, greedy))

        _run(answerer, begin, own, shards, at_once, report, tell, own_share(count, shards))
        return answerer.counts

    return collect((), output, {**_origin(model, tokenizer), **choices}, work, tell, own=True)


def own_chats(
    base: str,
    output: str | Path,
    count: int,
    *,
    chat_template: str | None = None,
    progress: Callable[[], None] | None = None,
    **settings: Any,
) -> DistillReport:
    """`synthesize` for a base by its name, which is loaded, in its own type, and given up again.

    Args:
        base: folder or id of a causal language model, or a GGUF file.
        output, count, progress: as for `synthesize`.
        chat_template: text of a Jinja template that replaces the tokenizer's.
        settings: the other arguments of `synthesize`.

    Raises:
        OSError, ValueError: as `load_model` and `synthesize` do.
    """
    model, tokenizer = load_model(base, processes().device)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    return synthesize(model, tokenizer, count, output, progress=progress, **settings)


def own_choices(
    turns: int,
    greedy: float,
    max_new_tokens: int,
    question_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> dict[str, Any]:
    """What chats from nothing depend on.

    Raises:
        ValueError: naming the setting that does not fit.
    """
    check_choices(temperature, top_p, turns=turns, max_new_tokens=max_new_tokens, question_tokens=question_tokens)
    if not 0 <= greedy <= 1:
        raise ValueError(f"greedy is {greedy}: expected a share from 0 to 1.")
    if greedy < 1 and temperature == 0:
        raise ValueError(f"temperature is 0, but greedy is {greedy}: give greedy=1 (--greedy 1), or a temperature.")
    return {
        "data": "the base's own questions",
        "turns": turns,
        "greedy": float(greedy),
        "max_new_tokens": max_new_tokens,
        "question_tokens": question_tokens,
        "temperature": float(temperature),
        "top_p": float(top_p),
        "seed": seed,
    }


def is_greedy(index: int, share: float) -> bool:
    """Whether a chat's answers are greedy: this share of the chats, spread evenly.

    >>> [is_greedy(index, 0.5) for index in range(4)], is_greedy(7, 0.0), is_greedy(7, 1.0)
    ([True, False, True, False], False, True)
    """
    return int(-index * share // 1) != int(-(index + 1) * share // 1)


def _longest(model: Any, max_length: int | None) -> int | None:
    """Tokens of a prompt and its answer; the base's positions if nothing is asked for."""
    config = getattr(model, "base", model).config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_length is not None and max_length > positions:
        raise ValueError(f"max_length is {max_length}, but the base has {positions} positions: give at most that many.")
    return positions if max_length is None else max_length


def _origin(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The base and the chat template that rows depend on."""
    template = hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest()
    return {"base": getattr(model, "base", model).name_or_path, "chat_template": template}


def load_model(name: str, device: torch.device | None = None) -> tuple[Any, Any]:
    """A causal language model, with draft heads or without, and its tokenizer.

    Args:
        name: its folder, or its id on the Hub.
        device: where it goes.

    Raises:
        OSError: there is none.
    """
    place, file = split_gguf(name)
    wanted = "give the folder of a causal language model or of a draft-head checkpoint, or its id on the Hub."
    try:
        device_map = {} if device is None or device.type == "cpu" else {"device_map": {"": device}}
        options = gguf_arguments(place, {"gguf_file": file} if file else {}, {})
        with reading_gguf(file):
            model = AutoModelForCausalLM.from_pretrained(place, dtype="auto", **device_map, **options)
    except OSError as error:
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise OSError(f"no model could be read at {name!r} ({said}): {wanted}") from error
    try:
        return model, load_tokenizer(name)
    except (OSError, ValueError):
        if not hasattr(model, "base"):
            raise
        return model, load_tokenizer(model.base.name_or_path, model.config.base_gguf_file)


def tokenizer_of(name: str) -> Any:
    """The tokenizer of a model, without the model.

    Raises:
        OSError: there is none.
    """
    try:
        return load_tokenizer(name)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split("\n\n")[0].split()).rstrip(".")
        raise OSError(f"no tokenizer could be read at {name!r} ({said}): give the folder or id of the base.") from error


def check_choices(temperature: float, top_p: float, **counts: int) -> None:
    """Refuse what cannot be sampled with, and counts below 1.

    Raises:
        ValueError: naming the setting.
    """
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: expected at least 1.")
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: expected 0 for greedy, or a number above it.")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p}: expected a number above 0, at most 1.")


def _run(
    answerer: Answerer,
    begin: Callable[[int, Mapping[str, Any]], Task],
    todo: Todo,
    shards: Shards,
    batch_size: int,
    report: DistillReport,
    progress: Callable[[], None],
    most: int | None = None,
) -> None:
    """Keep the batch full until no row is left; finished rows are written before the next question is asked.

    With `most` the base writes the questions: rows without one are not rows that were refused, and what is finished
    beyond so many is left out.
    """
    tasks: list[Task] = []
    more = True
    while more or tasks:
        while more and len(tasks) < batch_size:
            index, row = next(todo, (None, {}))
            more = index is not None
            if index is None:
                break
            try:
                tasks.append(begin(index, row))
            except Refused as reason:
                report.refuse(index, reason)
                progress()
        if not tasks or (most is not None and report.written >= most):
            break
        answerer.answer(tasks)
        through = [task for task in tasks if task.done]
        answered = [task for task in through if not task.refused]
        answered = answered if most is None else answered[: most - report.written]
        shards.write(task.to_row() for task in answered)
        report.written += len(answered)
        for task in through if most is None else answered:
            if task.refused:
                report.refuse(task.index, task.refused)
            progress()
        tasks = [task for task in tasks if not task.done]
