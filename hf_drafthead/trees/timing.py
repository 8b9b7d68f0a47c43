"""The one clock: calls take turns, so that whatever else the machine does slows all of them alike."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


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


def wait(device: torch.device) -> None:
    """Let queued work on a GPU end, so that a clock around it measures it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
