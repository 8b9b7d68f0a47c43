"""The one clock: calls take turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch


def time_interleaved(
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    device: torch.device,
    *,
    before: Callable[[], object] = lambda: None,
    after: Callable[[Any], object] = lambda name: None,
) -> tuple[dict[Any, Any], dict[Any, list[float]]]:
    """Call each alternately, `repeats` times: what each returned last, and the seconds of every call.

    Each round begins with another one.

    Args:
        runs: what to call, by name.
        repeats: rounds, in each of which every one is called once.
        device: whose queued work belongs to a call; the host waits for it before and after.
        before, after: called around each call, outside of its time; `after` with the name.
    """
    names = [*runs]
    results: dict[Any, Any] = {}
    seconds: dict[Any, list[float]] = {name: [] for name in names}
    for turn in range(repeats):
        first = turn % max(len(names), 1)
        for name in names[first:] + names[:first]:
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

    def step(self, prompts: int = 0) -> float:
        """Seconds of a step, the median; 0 where there was none. A streamer is shown the prompt first."""
        times = self.times[prompts:]
        return statistics.median(after - before for before, after in itertools.pairwise(times)) if times[1:] else 0.0


def ratio(seconds: Mapping[Any, Sequence[float]], name: Hashable, unit: Hashable) -> float:
    """How many times as long a call took as another one of its round: the median over rounds.

    >>> ratio({"base": [4.0, 8.0, 2.0], "heads": [2.0, 4.0, 2.0]}, "base", "heads")
    2.0
    """
    return statistics.median(slow / fast for slow, fast in zip(seconds[name], seconds[unit], strict=True))


def wait(device: torch.device) -> None:
    """Let queued work on a GPU end, so that a clock around it measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
