"""What a call costs on this machine: the seconds of a step by nodes and levels of its tree, measured for a few sizes.

Shapes: B rows, N nodes (root included).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.frames import with_room
from hf_drafthead.generation.ladder import ALONE, CostCurve, Size, TreesInTurn
from hf_drafthead.generation.slots import fixed_slots
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.generation.worth import Call, Worth

STEPS = (2, 8, 16, 32, 64, 128, 256)  # nodes whose step is timed
COMPILED_STEPS = (2, 8, 32)  # compiling one takes longer than everything else
LEVEL_NODES = 8  # of the two trees that tell what a level costs
COST_TOKENS, COST_ROUNDS, WARM_TOKENS = 16, 8, 8  # short calls: the speed of a machine changes within one
COST_TURNS = 24  # in which trees of these sizes are compared
LEAST_TURNS, TURN_SECONDS = 12, 8.0  # turns end after so long, but not before so many
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
        base_seconds = sum(map(self.of_base, calls))
        seconds = base_seconds if size == ALONE else sum(self.of_tree(call, step) for call in calls)
        return Predicted(sum(call.tokens for call in calls) / seconds, base_seconds / seconds)

    def of_base(self, call: Call) -> float:
        """Seconds of the base for these texts."""
        return self.base_start + call.base_steps * self.base_step

    def of_tree(self, call: Call, step: float) -> float:
        """Seconds for these texts with a tree whose step takes so many."""
        return self.start + call.steps * step


def gain(worth: Worth, size: Size, rows: int, new_tokens: int = sys.maxsize) -> float:
    """Steps of the base over steps with the best tree: the tokens per step of the row that takes most of them."""
    calls = worth.calls(size, rows, new_tokens)
    return sum(call.base_steps for call in calls) / sum(call.steps for call in calls)


def measured_costs(model: Any, worth: Worth, call: dict[str, Any], captured: bool = False) -> Costs:
    """What a step costs with trees of a few sizes, in seconds of the base's step.

    Of a few numbers of nodes the deepest tree is timed, and of LEVEL_NODES also the least deep one: the two tell what a
    level costs. A first call with each warms up. It goes from small to large trees, and ends, after these two, where a
    step takes so long that no larger tree can pay. Then the trees are compared with each other step by step
    (`in_turn`), and one of them and the root alone with the base, call by call.

    Args:
        model: with draft heads.
        worth: which trees.
        call: arguments of `generate` for one batch, without end-of-sequence tokens.
        captured: time compiled steps.
    """
    rows, call = len(call["input_ids"]), _short(call, COST_TOKENS)
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
    trees = {size: worth.tree(size) for size in first if size != ALONE}
    # compiled steps attend to all slots of a cache: with those of the largest tree small ones would seem dear
    by_slots: dict[int, dict[Size, DraftTree]] = {}
    for size, tree in trees.items():
        by_slots.setdefault(fixed_slots(size.nodes) if captured else 0, {pair[-1]: trees[pair[-1]]})[size] = tree
    over_deep: dict[Size, float] = {}  # the deepest tree of LEVEL_NODES
    for alike in by_slots.values():
        shares = in_turn(model, alike, [call], COST_TURNS, captured)
        over_deep |= {size: shares[size] / shares[pair[-1]] for size in alike}
    base, alone, deep = in_rounds(model, [None, worth.tree(ALONE), trees[pair[-1]]], [call], captured)
    unit = statistics.median(run.step for run in base)
    seconds = {size: unit * pace(deep, base) * over_deep[size] for size in trees}
    start = statistics.median(run.rest / one.step for runs in (alone, deep) for run, one in zip(runs, base))
    base_start = statistics.median(one.rest / one.step for one in base)
    return Costs(CostCurve.through({ALONE: unit * pace(alone, base), **seconds}), unit * start, unit, unit * base_start)


def in_turn(
    model: Any, trees: dict[Any, DraftTree], calls: Sequence[dict[str, Any]], turns: int, captured: bool = False
) -> dict[Any, float]:
    """What a step costs with each tree, as a share of their geometric mean.

    The speed of a machine changes within a tenth of a second, and that of compiled steps without that of the base. So
    the trees take the steps of the same calls in turn, in a random order each time, and the medians over turns count.

    Args:
        model: with draft heads.
        trees: by name.
        calls: arguments of `generate` for a few calls, taken one after the other.
        turns: at most.
        captured: compiled steps.
    """
    names = [*trees]
    shuffled = random.Random(0)
    order = [place for _ in range(turns) for place in shuffled.sample(range(len(names)), len(names))]
    together = tuple(trees.values())
    for place in range(len(names)):  # compiles
        timed(model, TreesInTurn(together, (place,)), _short(calls[0], WARM_TOKENS), captured)
    steps: list[float] = []
    started = time.perf_counter()
    for call in itertools.cycle(calls):
        enough = len(steps) >= LEAST_TURNS * len(names) and time.perf_counter() - started > TURN_SECONDS
        left = tuple(order[len(steps) :])
        if enough or not left:
            break
        run = timed(
            model, TreesInTurn(together, left), _short(call, len(left) + 1), captured
        )  # the first token is no step
        steps += run.each
        if not run.each:
            break  # every answer is one token long
    found: dict[Any, list[float]] = {name: [] for name in names}
    for first in range(0, len(steps) - len(names) + 1, len(names)):
        turn = slice(first, first + len(names))
        mean = statistics.geometric_mean(steps[turn])
        for place, step in zip(order[turn], steps[turn]):
            found[names[place]].append(step / mean)
    return {name: statistics.median(shares) if shares else 1.0 for name, shares in found.items()}


def in_rounds(
    model: Any, trees: Sequence[DraftTree | None], calls: Sequence[dict[str, Any]], captured: bool = False
) -> list[list[Timed]]:
    """Short calls with each tree, and of the base where there is none, COST_ROUNDS of each in turn.

    Args:
        model: with draft heads.
        trees: which, or None.
        calls: arguments of `generate`, taken one after the other.
        captured: compiled steps.
    """
    runs: list[list[Timed]] = [[] for _ in trees]
    places = [*range(len(trees))]
    for turn, call in enumerate(itertools.islice(itertools.cycle(calls), COST_ROUNDS + 1)):
        for place in places if turn % 2 else places[::-1]:
            run = timed(model, trees[place], _short(call, COST_TOKENS), captured)
            runs[place] += [run] if turn else []  # the first round warms up
    return runs


def _short(call: dict[str, Any], tokens: int) -> dict[str, Any]:
    """A call of no more tokens than it has and than these."""
    return {**call, "max_new_tokens": min(call["max_new_tokens"], tokens)}


def pace(runs: Sequence[Timed], base: Sequence[Timed]) -> float:
    """A step in steps of the base, the median over rounds; NaN where no round has a step of both."""
    ratios = [run.step / one.step for run, one in zip(runs, base) if run.step > 0 and one.step > 0]
    return statistics.median(ratios) if ratios else math.nan


class Timed(NamedTuple):
    """What one call took.

    step: seconds of a step, the median; NaN where there was none; rest: seconds of everything besides its steps;
    seconds: of all together; steps: how many; sequences: its texts, on the host; emitted: by each row's steps, where
    it drafted; each: seconds of every step.
    """

    step: float
    rest: float
    seconds: float
    steps: int = 0
    sequences: torch.Tensor = torch.empty(0)
    emitted: Sequence[int] = ()
    each: Sequence[float] = ()


def timed(model: Any, tree: DraftTree | TreesInTurn | None, call: dict[str, Any], captured: bool = False) -> Timed:
    """One call with a tree, or of the base where there is none."""
    steps: list[float] = []
    call = {**call, "return_dict_in_generate": True}
    start = time.perf_counter()
    if tree is None:
        clock = _TokenClock()
        sequences = with_room(model.base.generate)(**call, streamer=clock).sequences.cpu()  # waits for the device
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
    return Timed(step, rest, seconds, len(steps), sequences, emitted[emitted > 0].tolist(), steps)


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
