"""What a call costs on this machine: the seconds of a step by nodes and levels of its tree, measured for a few sizes.

Shapes: B rows, N nodes (root included).
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.ladder import ALONE, CostCurve, Size
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.generation.worth import Worth

STEPS = (2, 8, 16, 32, 64, 128, 256)  # nodes whose step is timed
COMPILED_STEPS = (2, 8, 32)  # compiling one takes longer than everything else
LEVEL_NODES = 8  # of the two trees that tell what a level costs
COST_TOKENS, COST_ROUNDS = 32, 3
COMPILED_ROUNDS = 4  # times as many of captured steps: they take seconds, and compiling a step half a minute
HOPELESS = 0.8  # larger trees are not timed if the most that any can reach is below this share of the best size


class Predicted(NamedTuple):
    """Tokens per second of all rows, and how many times as fast as the base that is."""

    tokens_per_second: float
    speedup: float

    def figures(self) -> dict[str, float]:
        """As an entry names them."""
        return {f"predicted_{name}": value for name, value in self._asdict().items()}


@dataclass(frozen=True)
class Costs:
    """Seconds of a call with some batch size.

    curve: of a step; start: of everything before the first step; base_step, base_start: of the base.
    """

    curve: CostCurve
    start: float
    base_step: float
    base_start: float

    def predicted(self, worth: Worth, size: Size, rows: int, new_tokens: int, step: float | None = None) -> Predicted:
        """Of calls with the best tree of a size.

        A call ends with the row that takes most steps: the mean of all rows would promise too much. With the root alone
        it is the base that decodes. `step` is the seconds of a step where they are known better than by the curve.
        """
        calls = worth.calls(size, rows, new_tokens)
        step = self.curve.at(*size) if step is None else step
        seconds = sum(self.start + call.steps * step for call in calls)
        base_seconds = sum(self.base_start + call.base_steps * self.base_step for call in calls)
        seconds = base_seconds if size == ALONE else seconds
        return Predicted(sum(call.tokens for call in calls) / seconds, base_seconds / seconds)


def gain(worth: Worth, size: Size, rows: int, new_tokens: int = sys.maxsize) -> float:
    """Steps of the base over steps with the best tree: the tokens per step of the row that takes most of them."""
    calls = worth.calls(size, rows, new_tokens)
    return sum(call.base_steps for call in calls) / sum(call.steps for call in calls)


def measured_costs(
    model: Any, worth: Worth, given: dict[str, torch.Tensor], sampling: dict[str, Any], captured: bool = False
) -> Costs:
    """Time calls with trees of a few sizes and calls of the base in turn.

    Of a few numbers of nodes the deepest tree is timed, and of LEVEL_NODES also the least deep one: the two tell what a
    level costs. A first round warms up. It goes from small to large trees, and ends, after these two, where a step
    takes so long that no larger tree can pay. Of the others each gives seconds in units of the base's step in the same
    round, since the speed of a machine may change from one round to the next; the medians count (`in_units`).

    Args:
        model: with draft heads.
        worth: which trees.
        given: one batch of prompts.
        sampling: settings of `generate`.
        captured: time compiled steps.
    """
    rows = len(given["input_ids"])
    call = {**given, **sampling, "max_new_tokens": COST_TOKENS, "min_new_tokens": None, "eos_token_id": None}
    most = max(worth.steps).nodes
    few = [nodes for nodes in (COMPILED_STEPS if captured else STEPS) if nodes < most]
    pair = worth.depths(min(LEVEL_NODES, most))
    gains = {size: gain(worth, size, rows) for size in worth.steps}
    first: dict[Size, float] = {}
    for size in sorted({ALONE, *(worth.depths(nodes)[-1] for nodes in (*few, most)), pair[0], pair[-1]}):
        first[size] = timed(model, worth.tree(size), call, captured).step
        best = max(gains[one] / step for one, step in first.items())
        level = CostCurve.through(first).level
        least = {one: first[size] + level * (one.depth - size.depth) for one in worth.steps if one.nodes > size.nodes}
        if size >= pair[-1] and all(gains[one] / step < HOPELESS * best for one, step in least.items()):
            break
    trees = {size: worth.tree(size) for size in first}
    model.base.generate(**call)
    rounds = [
        (timed(model, None, call), {size: timed(model, tree, call, captured) for size, tree in trees.items()})
        for _ in range(COST_ROUNDS * (COMPILED_ROUNDS if captured else 1))
    ]
    unit = statistics.median(base.step for base, _ in rounds)
    paces = in_units(
        [base.step for base, _ in rounds], {size: [runs[size].step for _, runs in rounds] for size in trees}
    )
    curve = CostCurve.through({size: unit * pace for size, pace in paces.items()})
    start = statistics.median(run.rest / base.step for base, runs in rounds for run in runs.values())
    base_start = statistics.median(base.rest / base.step for base, _ in rounds)
    return Costs(curve, unit * start, unit, unit * base_start)


def in_units(base: Sequence[float], steps: dict[Size, list[float]]) -> dict[Size, float]:
    """Steps with some trees in steps of the base, as medians over turns; empty where there was no step to time.

    A machine may change how fast compiled steps are and not how fast the base's are, which wait for Python: so trees
    are compared with each other in the same turn, and all together with the base.

    >>> in_units([1.0, 1.0, 1.0], {Size(2, 1): [1.0, 2.0, 2.0], Size(8, 1): [1.5, 3.0, 3.0]})
    {Size(nodes=2, depth=1): 2.0, Size(nodes=8, depth=1): 3.0}
    """
    turns = [turn for turn in range(len(base)) if all(one[turn] > 0 for one in (base, *steps.values()))]
    if not turns:
        return {}
    together = [statistics.geometric_mean(one[turn] for one in steps.values()) for turn in turns]
    all_over_base = statistics.median(mean / base[turn] for mean, turn in zip(together, turns))
    return {
        size: all_over_base * statistics.median(one[turn] / mean for mean, turn in zip(together, turns))
        for size, one in steps.items()
    }


class Timed(NamedTuple):
    """What one call took.

    step: seconds of a step, the median; NaN where there was none; rest: seconds of everything besides its steps;
    seconds: of all together; steps: how many; sequences: its texts, on the host; emitted: by each row's steps, where
    it drafted.
    """

    step: float
    rest: float
    seconds: float
    steps: int = 0
    sequences: torch.Tensor = torch.empty(0)
    emitted: Sequence[int] = ()


def timed(model: Any, tree: DraftTree | None, call: dict[str, Any], captured: bool = False) -> Timed:
    """One call with a tree, or of the base where there is none."""
    steps: list[float] = []
    call = {**call, "return_dict_in_generate": True}
    start = time.perf_counter()
    if tree is None:
        clock = _TokenClock()
        sequences = model.base.generate(**call, streamer=clock).sequences.cpu()  # waits for the device
        steps, emitted = clock.intervals(), torch.empty(0)
    else:
        output = model.generate(
            **call,
            **({"cache_implementation": "static"} if captured else {}),
            draft_tree=tree,
            on_step=lambda record: steps.append(record.seconds["step"]) if record.step else None,
        )
        sequences, emitted = output.sequences.cpu(), output.accepted_lengths
    seconds = time.perf_counter() - start
    # a step that takes long for another reason, such as preparing a captured one, is no step
    step = statistics.median(steps) if steps else math.nan
    rest = seconds - step * len(steps) if steps else seconds
    return Timed(step, rest, seconds, len(steps), sequences, emitted[emitted > 0].tolist())


class _TokenClock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def intervals(self) -> list[float]:
        """Seconds from token to token; the prompt and the first token are no step."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:])]
