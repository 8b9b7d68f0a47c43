"""The one clock: calls take turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_drafthead.generation.step import now

LARGE = 4096  # most rows and columns of the weight of a product
PRODUCT = 1 << 24  # numbers that are multiplied with a token before the clock is looked at, or the weight's


def time_interleaved(
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    *,
    first: int = 0,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[torch.device], float] = now,
    enough: Callable[[dict[Any, list[float]]], bool] = lambda seconds: False,
) -> tuple[dict[Any, Any], dict[Any, list[float]]]:
    """Call each of `runs` in turn, `repeats` times: what each returned last, and the seconds of every call.

    Args:
        device: whose queued work belongs to a call.
        first: which one the first round begins with, modulo how many there are; each round begins with another one.
        before: called before each call, outside of its time.
        clock: in seconds, once a device has done what was asked of it.
        enough: given the seconds so far, whether no further round is begun.
    """
    names, results = [*runs], {}
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(first, first + repeats):
        start_at = turn % max(len(names), 1)
        for name in names[start_at:] + names[:start_at]:
            before()
            start = clock(device)
            results[name] = runs[name]()
            seconds[name].append(clock(device) - start)
        if enough(seconds):
            break
    return results, seconds


def product_seconds(base: Any, tokens: Sequence[int]) -> dict[int, float]:
    """Seconds of a product over so many tokens each, the shortest, with a weight as large as a base's, where it is."""
    config = base.config.get_text_config(decoder=True)
    sizes = min(4 * config.hidden_size, LARGE), min(config.hidden_size, LARGE)
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(base.device, base.dtype)
    times = min(max(PRODUCT // (weight.numel() * max(tokens)), 1), 20)

    def product(rows: torch.Tensor) -> None:
        for _ in range(times):
            torch.nn.functional.linear(rows, weight)

    runs = {count: functools.partial(product, weight.new_ones(count, sizes[1])) for count in tokens}
    _, seconds = time_interleaved(runs, 5, base.device)
    return {count: min(each) / times for count, each in seconds.items()}
