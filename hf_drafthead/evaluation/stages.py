"""Where the time of a step goes: the stages of the loop, timed inside `generate()`.

The clock waits for the device at both ends of every stage, which slows a GPU down: take these figures from a run of
their own, and speed from another.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hf_drafthead.generation import decoding

STAGES = ("draft", "verify", "accept", "commit")


@dataclass
class TimeSplit:
    """The seconds of some steps: of each stage, and of the whole loop; and how many nodes they verified."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    loop_seconds: float = 0.0
    steps: int = 0
    nodes: int = 0  # of the largest tree

    def __add__(self, other: "TimeSplit") -> "TimeSplit":
        return TimeSplit(
            {stage: self.seconds[stage] + other.seconds[stage] for stage in STAGES},
            self.loop_seconds + other.loop_seconds,
            self.steps + other.steps,
            max(self.nodes, other.nodes),
        )

    def to_json(self) -> dict[str, float] | None:
        """Milliseconds per step: of each stage, of the `rest` of the loop, and of the whole `step`; None if no step."""
        if not self.steps:
            return None
        figures = {stage: 1e3 * seconds / self.steps for stage, seconds in self.seconds.items()}
        step = 1e3 * self.loop_seconds / self.steps
        return {**figures, "rest": step - sum(figures.values()), "step": step}


def time_split(call: Callable[[], Any]) -> TimeSplit:
    """Call once, with the stages timed. `call` generates with draft heads."""
    spent: dict[str, list[float]] = defaultdict(list)
    nodes = [0]
    verify = decoding.verify

    def counting(reader, state, candidates, rules):
        nodes.append(candidates.tokens.shape[1])
        return verify(reader, state, candidates, rules)

    decoding.verify = counting
    try:
        with timed(decoding, STAGES, spent), clocked_loop() as loop:
            call()
    finally:
        decoding.verify = verify
    seconds = {stage: sum(spent[stage]) for stage in STAGES}
    return TimeSplit(seconds, loop.get("end", 0.0) - loop.get("start", 0.0), len(spent["verify"]), max(nodes))


@contextlib.contextmanager
def timed(holder: object, names: tuple[str, ...], spent: dict[str, list[float]]) -> Iterator[None]:
    """Note the seconds of every call of `holder`'s functions `names`."""
    originals = {name: getattr(holder, name) for name in names}

    def watch(name: str):
        def call(*args, **kwargs):
            synchronize()
            start = time.perf_counter()
            result = originals[name](*args, **kwargs)
            synchronize()
            spent[name].append(time.perf_counter() - start)
            return result

        return call

    for name in names:
        setattr(holder, name, watch(name))
    try:
        yield
    finally:
        for name in names:
            setattr(holder, name, originals[name])


@contextlib.contextmanager
def clocked_loop() -> Iterator[dict[str, float]]:
    """Note when the loop starts and ends: what happens once per call, before and after it, is no part of a step."""
    clock: dict[str, float] = {}
    prefill, finish = decoding.prefill, decoding.finish

    def starting(*args, **kwargs):
        state = prefill(*args, **kwargs)
        synchronize()
        clock["start"] = time.perf_counter()
        return state

    def ending(*args, **kwargs):
        synchronize()
        clock["end"] = time.perf_counter()
        return finish(*args, **kwargs)

    decoding.prefill, decoding.finish = starting, ending
    try:
        yield clock
    finally:
        decoding.prefill, decoding.finish = prefill, finish


def synchronize() -> None:
    """Let queued work on the GPU end, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
