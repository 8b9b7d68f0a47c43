"""How many nodes of its tree each step takes: as many as pay, by how likely they are and by what a step costs here.

The drafter's own probabilities say how likely a node is to be on the path that is accepted, corrected by what was
accepted in the last steps; levels that are not worth their cost are not drafted (SVIP, arXiv 2411.18462). Where these
numbers are on a device, for which the host would have to wait, or each size is a program, what was accepted says
whether all nodes pay. Only tokens, scores and costs decide, and never the clock, by which a call merely tells later
ones that costs are no longer what they were.

Shapes: B rows, M nodes that were guessed (root included), n nodes of a level, k guesses of each.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from hf_drafthead.generation.state import DecodingState
from hf_drafthead.generation.tree import ROOT_ALONE, Level, Tree
from hf_drafthead.trees.costs import NodeCosts, sizes_up_to

ALLOWANCE, LOSS_SHARE = 1.0, 0.01  # steps of the base, and share of a call's, that drafting may lose
MOST_LEFT = 4.0  # of what drafting has gained that it may lose again
KEPT = 0.97  # of what is known of earlier steps, in each step; the rest is as usual
PRIOR, RIGHT = 4.0, 0.6  # guesses that count as usual; how often one of a node's is right
TIMED = 4  # steps in a call with guesses, and without, before their times say something


@dataclass(frozen=True)
class SizeRule:
    """What sizes are chosen by; a call's `Sizes` change with every step.

    tree: the largest; costs: of steps here; reads: whether the drafter's probabilities are at hand; allowance: steps of
    the base that drafting may cost the call, beside `LOSS_SHARE` of its steps; watch: is told how many times as long as
    known steps have taken.
    """

    tree: Tree
    costs: NodeCosts
    reads: bool
    allowance: float = ALLOWANCE
    watch: Callable[[float], object] | None = None

    def begin(self, shared: bool) -> Sizes:
        """The sizes of a call, or of several that share a batch."""
        return Sizes(self.allowance, shared)


class Sizes:
    """What a call, or a batch, knows of its last steps, and how many nodes the next one takes.

    left: steps of the base that drafting may still lose; shared: whether rows are of several calls; hits, mass, tries:
    of accepted guesses, of how likely guesses were said to be, and of the nodes below which one was guessed.
    """

    def __init__(self, allowance: float, shared: bool = False):
        self.left, self.shared = allowance, shared
        self.hits = self.mass = PRIOR
        self.tries = PRIOR / RIGHT
        self.noted = 0  # steps whose outcome is known
        self.steps: deque[Any] = deque()  # those that were begun since
        self.timed: tuple[Weighed, float] | None = None  # the last step, and when it began
        self.seconds: tuple[list[float], list[float]] = [], []  # of the root alone: of steps without guesses, and with

    def tree(self, rule: SizeRule, state: DecodingState, drafts: bool = True) -> Tree:
        """The tree of the next step; where its nodes can be weighed while it is drafted, `state.pays` does it. Without
        `drafts` it is known that nothing would be guessed."""
        if state.steps != self.noted and self.steps:
            self._note(self.steps.popleft(), state)
        self.noted = state.steps
        if rule.watch is not None and min(map(len, self.seconds)) < TIMED:  # a call is judged once
            self._time(rule.watch)
        self.left = min(self.left + LOSS_SHARE, MOST_LEFT)
        self.hits, self.mass = (PRIOR + KEPT * (known - PRIOR) for known in (self.hits, self.mass))
        self.tries = PRIOR / RIGHT + KEPT * (self.tries - PRIOR / RIGHT)
        step = Weighed(self, rule, [row for row, end in enumerate(state.ends) if end is None])
        state.pays = step if rule.reads and drafts and rule.costs(2, 1) - 1 <= self.left else None
        self.steps.append(step)
        self.timed = step, perf_counter()
        return rule.tree if state.pays or (drafts and not rule.reads and step.whole_pays()) else ROOT_ALONE

    def _time(self, watch: Callable[[float], object]) -> None:
        if self.timed is not None:
            step, begun = self.timed
            self.seconds[step.drafts].append((perf_counter() - begun) / step.cost)
        if min(map(len, self.seconds)) == TIMED:
            watch(min(self.seconds[True]) / max(min(self.seconds[False]), 1e-9))

    def _note(self, step: Weighed, state: DecodingState) -> None:
        """Take in what a step has emitted."""
        moved = [(length - count, count, row) for row, (length, count) in enumerate(zip(state.lengths, state.counted))]
        if not step.drafts or not (moved := [each for each in moved if each[1]]):  # 0 in rows that had ended
            return
        counts = [count for _, count, _ in moved]
        # a call ends with the row that is the furthest behind
        self.left += (statistics.mean(counts) if self.shared else min(moved)[1]) - step.cost
        for *_, row in moved:
            hits, mass, tries = step.found(row, state.walked[row])
            self.hits, self.mass, self.tries = self.hits + hits, self.mass + mass, self.tries + tries


class Weighed:
    """The nodes of one step, each as likely as the drafter and the last steps of the call say.

    cost: of the step, in steps of the root alone; levels: that were drafted; running: rows that have not ended.
    """

    def __init__(self, sizes: Sizes, rule: SizeRule, running: Sequence[int]):
        self.sizes, self.rule, self.running = sizes, rule, torch.tensor(running)
        # how many times as often as they say guesses are right
        self.correction, self.levels, self.cost, self.drafts = sizes.hits / sizes.mass, 0, 1.0, False
        self.value: torch.Tensor | None = None  # (B, M) logarithms of how likely nodes are
        self.said: list[list[float]] = []  # row by row, how likely the guesses below each node were said to be

    def goes_on(self, level: Level, chances: torch.Tensor, below: Level | None = None) -> bool:
        """Take in the guesses of a level, logarithms of how likely they are (B, n or 1, k), and return whether it pays
        to guess the level below as well."""
        if self.value is None:
            self.value = chances.new_zeros(len(chances), 1)
        room = -chances.exp().sum(-1, keepdim=True).log()  # guesses of one node are at most certain together
        chances = (chances + room.clamp(max=math.log(self.correction))).clamp(max=0.0)  # which rounding may pass
        slots = level.slots if chances.shape[1] > 1 else 0
        above = self.value[:, level.expanded][:, level.slots]
        self.value = torch.cat([self.value, above + chances[:, slots, level.ranks]], dim=1)
        self.levels += 1
        if below is None:
            return False
        worth, size = self._most_worth(self.value, self.rule.tree.num_nodes)
        reached = float(self.value[self.running][:, below.expanded].exp().sum(1).mean())
        costs, levels = self.rule.costs, self.levels + 1
        more = costs(size + 1, levels) - costs(size, levels - 1)
        affordable = costs(2, levels) - 1 <= self.sizes.left
        return affordable and reached * self.sizes.hits / self.sizes.tries >= worth * more

    def size(self, value: torch.Tensor, most: int) -> int:
        """How many of all nodes of a step (B, M) pay, at most so many, for all rows as many."""
        nodes = self._most_worth(value, most)[1]
        self.cost = self.rule.costs(nodes, self.levels)
        return nodes

    def keep(self, parents: torch.Tensor, value: torch.Tensor) -> None:
        """Note how likely the nodes (B, N) are that the step takes."""
        edges = (value - value.gather(1, parents)).exp().nan_to_num(0.0)
        edges[:, 0] = 0.0
        self.said, self.drafts = torch.zeros_like(edges).scatter_add(1, parents, edges).tolist(), True

    def _most_worth(self, value: torch.Tensor, most: int) -> tuple[float, int]:
        """Tokens for each step of the base, and the number of nodes that gives most of them."""
        value = value[self.running] if len(self.running) else value
        tokens = value.exp().sort(dim=1, descending=True).values.cumsum(1).mean(0).tolist()
        costs = {size: self.rule.costs(size, self.levels) for size in sizes_up_to(most) if size <= len(tokens)}
        left = self.sizes.left
        return max((tokens[size - 1] / cost, size) for size, cost in costs.items() if size == 1 or cost - 1 <= left)

    def whole_pays(self) -> bool:
        """Whether the whole tree pays, where nothing is known of its nodes but how often guesses were right."""
        heads: Any = getattr(self.rule.tree, "tree", self.rule.tree)
        depth, cost = heads.max_depth or self.rule.tree.max_depth, self.rule.costs.whole
        right = self.sizes.hits / self.sizes.tries
        expected = sum(right**level for level in range(depth + 1))
        # now and then it is tried with what may be lost anyway, else nothing would ever tell that it pays
        if cost - 1 <= self.sizes.left - (ALLOWANCE if expected < cost else 0):
            self.levels, self.cost, self.drafts = depth, cost, True
        return self.drafts

    def found(self, row: int, walked: Sequence[int]) -> tuple[float, float, int]:
        """Of a row that walked these nodes: guesses that were right, that were said to be, and nodes that had some."""
        if not self.said:
            right = min(len(walked) - 1, self.levels)
            return right, right, min(right + 1, self.levels)
        said = self.said[row % len(self.said)]
        asked = [said[node] for node in walked if said[node] > 0]
        return len(walked) - 1.0, sum(asked) / self.correction, len(asked)
