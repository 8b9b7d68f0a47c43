"""Text of the base's own to train its heads on, where no data is given: questions too, or beginnings of texts."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.training.answers import ONE_TEXT, Sampling, Writer
from hf_drafthead.training.distill import distill
from hf_drafthead.training.examples import PreparedData, longest_text_of

OWN_CHATS, MOST_CHATS = 2000, 200_000  # to write; where the hours end the writing
ASSUMED_LENGTH = 256  # tokens of a row that is not written yet
ANSWER_TOKENS, QUESTION_TOKENS = (32, 64, 128, 256, 512), 96  # at most, of which the first is taken where hours are few
ROWS, TRIED = 32, 8  # at once, and tokens after which the clock is looked at
FILE = "own.jsonl"  # in the folder of the heads
Bar = Callable[[int], AbstractContextManager[Callable[[str], Callable[[], None]]]]


def kind_of_text(tokenizer: Any) -> str:
    """What a base with this tokenizer can write of its own: "chats", or "texts" without a chat template; else a
    ValueError."""
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
    bar: Bar | None = None,
) -> float:
    """Let the base (or a model with trained heads, which needs fewer forward passes) write so many chats or texts, by
    default 2,000, or those that half of the hours is enough for, into a file of JSON lines; the seconds that this took.
    The same call resumes what was interrupted. `bar`, given the number of chats, yields what begins a part of the work
    by its name and returns what to call for each chat."""
    start, count = time.monotonic(), chats or (OWN_CHATS if hours is None else MOST_CHATS)
    kind = kind_of_text(tokenizer)
    file.parent.mkdir(parents=True, exist_ok=True)
    seconds = None if hours is None else 3600 * hours / 2
    amount = f"{count:,} {kind}" if seconds is None or chats else f"{kind} for {seconds / 60:.0f} min"
    without = "" if kind == "chats" else ", for its tokenizer has no chat template"
    say(f"the base writes {amount} into {file}{without}")
    tokens = ANSWER_TOKENS[-1] if seconds is None or chats else fitting_tokens(model, seconds)
    with nullcontext(None) if bar is None else bar(count) as begin:
        progress = None if begin is None else begin("writing")
        limits: dict[str, Any] = {"seconds": seconds, "max_length": max_length, "max_new_tokens": tokens}
        report = distill(model, tokenizer, count, file, progress=progress, **limits)
    say(str(report))
    return time.monotonic() - start


def fitting_tokens(model: Any, seconds: float) -> int:
    """Of an answer: fewer where the first questions and their answers would take longer than there is time."""
    base: Any = getattr(model, "base", model)
    prompt = probe_tokens(base)[None, :8].expand(ROWS, -1)
    start = time.perf_counter()
    base.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=TRIED, min_new_tokens=TRIED, **ONE_TEXT
    )
    fitting = seconds * TRIED / (time.perf_counter() - start) - QUESTION_TOKENS
    return max((tokens for tokens in ANSWER_TOKENS if tokens <= fitting), default=ANSWER_TOKENS[0])


def rows_to_assume(model: Any, count: int) -> PreparedData:
    """Rows of any tokens as long as written ones may be: what a training takes depends on their shape."""
    length = min(ASSUMED_LENGTH, longest_text_of(model) - 1)
    some = list(range(1, min(length, model.config.get_text_config().vocab_size)))
    row = {"input_ids": some, "labels": some}
    held_out = max(1, min(64, count // 10))
    return PreparedData([row] * max(count - held_out, 1), [row] * held_out, "rows to assume", "")
