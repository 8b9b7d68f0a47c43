"""The one clock: calls take turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

SLOW = 1.2  # times as fast as the base, below which another dtype may be worth a try
DTYPES = (torch.float32, torch.bfloat16)
MANY, TEXT, LARGE = 8, 256, 4096  # tokens of a step, and of a text; most rows and columns of the weight that is tried
DEAR = 1.5  # times as much as one token, or as in float32, from where on another dtype is worth a line
PRODUCT = 1 << 24  # numbers that are multiplied with a token before the clock is looked at, or the weight's


def time_interleaved(
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    *,
    first: int = 0,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Any], object] = lambda name: None,
) -> tuple[dict[Any, Any], dict[Any, list[float]]]:
    """Call each of `runs` in turn, `repeats` times: what each returned last, and the seconds of every call.

    Args:
        device: whose queued work belongs to a call; the host waits for it before and after.
        first: which one the first round begins with, modulo how many there are; each round begins with another one.
        before, after: called around each call, outside of its time; `after` with the name.
    """
    names, results = [*runs], {}
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(first, first + repeats):
        start_at = turn % max(len(names), 1)
        for name in names[start_at:] + names[:start_at]:
            before()
            wait(device)
            start = time.perf_counter()
            results[name] = runs[name]()
            wait(device)
            seconds[name].append(time.perf_counter() - start)
            after(name)
    return results, seconds


class StepClock:
    """Notes when each step of a call has ended: as its streamer, or its `put` as `on_step`."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def figures(self, prompts: int = 0) -> tuple[float, float, int]:
        """Seconds of a step, the median, of all steps, and their number; a streamer is shown the prompt first."""
        times = self.times[prompts:]
        seconds = [after - before for before, after in itertools.pairwise(times)]
        return statistics.median(seconds or [0.0]), sum(seconds), len(seconds)


def product_seconds(base: Any, tokens: Sequence[int], dtype: torch.dtype | None = None) -> dict[int, float]:
    """Seconds of a product over so many tokens each, the shortest, with a weight as large as a base's, where it is."""
    config = base.config.get_text_config(decoder=True)
    sizes = min(4 * config.hidden_size, LARGE), min(config.hidden_size, LARGE)
    weight = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(base.device, dtype or base.dtype)
    times = min(max(PRODUCT // (weight.numel() * max(tokens)), 1), 20)

    def product(rows: torch.Tensor) -> None:
        for _ in range(times):
            torch.nn.functional.linear(rows, weight)

    runs = {count: functools.partial(product, weight.new_ones(count, sizes[1])) for count in tokens}
    _, seconds = time_interleaved(runs, 5, base.device)
    return {count: min(each) / times for count, each in seconds.items()}


def dtype_advice(base: Any) -> str | None:
    """A line about the dtype in which a tree is cheap on this CPU, where the base's own is dear; else None."""
    if base.device.type != "cpu" or base.dtype not in DTYPES:
        return None
    other = DTYPES[base.dtype == DTYPES[0]]
    own_cost, cost = (
        of[MANY] / of[1] for of in (product_seconds(base, (1, MANY), dtype) for dtype in (base.dtype, other))
    )
    if own_cost < DEAR or cost > 0.75 * own_cost:
        return None
    return (
        f"a product over {MANY} tokens takes as long here as one over a single token {own_cost:.1f} times in "
        f"{name_of(base.dtype)}, {cost:.1f} times in {name_of(other)}: trees pay more with --dtype {name_of(other)}."
    )


def training_advice(base: Any) -> str | None:
    """A line about float32, where a CPU multiplies faster in it than in the half precision of the base; else None."""
    if base.device.type != "cpu" or base.dtype.itemsize != 2 or getattr(base, "is_quantized", False):
        return None
    half, full = (product_seconds(base, (TEXT,), dtype)[TEXT] for dtype in (base.dtype, torch.float32))
    if half < DEAR * full:
        return None
    return (
        f"a product over a text takes {half / full:.1f} times as long here in {name_of(base.dtype)} as in float32: the "
        "training may be faster with --dtype float32, which takes twice the memory."
    )


def name_of(dtype: torch.dtype) -> str:
    """As a user writes it."""
    return str(dtype).removeprefix("torch.")


def wait(device: torch.device) -> None:
    """Let queued work on a GPU end, so that a clock around it measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
