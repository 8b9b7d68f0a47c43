"""How many nodes of its tree each step takes: as many as pay, by how likely they are and by what a step costs here.

The drafter's own probabilities say how likely a node is to be on the path that is accepted; levels that are not worth
their cost are not drafted (SVIP, arXiv 2411.18462). Where these numbers are on a device, for which the host would have
to wait, the ranks of a node say it, and there are few sizes, which exist as programs. What was accepted in the last
steps corrects both. Only tokens, scores and costs decide, and never the clock, by which a call merely tells later ones
that costs are no longer what they were.

Shapes: B rows, M nodes that were guessed (root included), n nodes of a level, k guesses of each.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch

from hf_drafthead.generation.state import DecodingState
from hf_drafthead.generation.tree import ROOT_ALONE, DraftTree, Level, LookupTree, Tree
from hf_drafthead.trees.grow import Size

ALLOWANCE, LOSS_SHARE = 1.0, 0.01  # steps of the base, and share of a call's, that drafting may lose
MOST_LEFT = 4.0  # of what drafting has gained that it may lose again
KEPT = 0.97  # of what is known of earlier steps, in each step; the rest is as usual
PRIOR, RIGHT = 4.0, 0.6  # guesses that count as usual; how often one of a node's is right
TIMED = 4  # steps in a call with guesses, and without, before their times say something
PER_RANK = -0.7  # about the logarithm of how likely a guess is, for each rank from 1 on


class NodeCosts:
    """What steps cost, in steps of the root alone.

    Args:
        measured: of whole steps with some trees. Those of as many nodes in more levels tell what drafting a level
            costs, and those of other numbers of nodes lie on lines between these.

    >>> costs = NodeCosts({Size(8, 1): 1.3, Size(8, 3): 1.5, Size(2, 1): 1.2})
    >>> [round(costs(nodes, levels), 2) for nodes, levels in ((8, 3), (2, 1), (5, 2), (1, 0))]
    [1.5, 1.2, 1.35, 1.0]
    """

    def __init__(self, measured: Mapping[Size, float]):
        self.measured = measured
        alike = itertools.permutations(measured, 2)
        slopes = [
            (measured[one] - measured[other]) / (one.depth - other.depth)
            for one, other in alike
            if one.nodes == other.nodes and one.depth > other.depth
        ]
        self.level = max(statistics.median(slopes), 0.0) if slopes else 0.0
        self.forwards = {1: 1.0}  # by the number of nodes, without drafting
        for size in sorted(measured):
            self.forwards.setdefault(size.nodes, max(measured[size] - self.level * size.depth, 0.01))

    def __call__(self, nodes: int, levels: int) -> float:
        known = sorted(self.forwards)
        high = next((place for place, count in enumerate(known) if count >= nodes), len(known) - 1)
        few, many = known[max(high - 1, 0)], known[high]
        share = (nodes - few) / max(many - few, 1)
        return self.forwards[few] + share * (self.forwards[many] - self.forwards[few]) + self.level * levels

    @property
    def whole(self) -> float:
        """Of a step with the largest tree."""
        return self.measured[max(self.measured)]

    def pays(self, most: float) -> bool:
        """Whether some tree may give more than it costs, where no text is expected to give more tokens than this."""
        return any(cost < min(size.depth + 1, most) for size, cost in self.measured.items())


def sizes_up_to(nodes: int) -> list[int]:
    """Numbers of nodes that are chosen among: powers of two, and all."""
    return [*(1 << power for power in range((nodes - 1).bit_length())), nodes]


@dataclass(frozen=True)
class SizeRule:
    """What sizes are chosen by; a call's `Sizes` change with every step.

    tree: the largest; costs: of steps here; reads: whether the drafter's probabilities are at hand; among: where they
    are not, the trees to choose among, with those of their guesses; allowance: steps of the base that drafting may cost
    the call, beside `LOSS_SHARE` of its steps; watch: is told how many times as long as known steps have taken.
    """

    tree: Tree
    costs: NodeCosts
    reads: bool
    among: Sequence[tuple[DraftTree, Tree]]
    allowance: float = ALLOWANCE
    watch: Callable[[float], object] | None = None

    def begin(self, shared: bool) -> Sizes:
        """The sizes of a call, or of several that share a batch."""
        return Sizes(self.allowance, shared)


def trees_by_size(tree: Tree, execution: str, several: bool = True) -> list[tuple[DraftTree, Tree]]:
    """The likeliest nodes of a tree, as trees of guesses, and with the copies among them, few nodes first: few sizes
    where each is a program, none but the tree where there are not to be several."""
    heads: Any = tree.tree if isinstance(tree, LookupTree) else tree
    if heads.num_nodes == 1:  # of copies alone, one path
        paths = [(0,) * depth for depth in range(1, tree.max_depth + 1)]
        return [(DraftTree(paths) if paths else ROOT_ALONE, tree)]
    nodes, found = heads.num_nodes, [(heads, tree)]
    sizes = {"eager": sizes_up_to(nodes)[1:-1], "recorded": [max(nodes // 4, 2)]}.get(execution, [])
    paths = sorted(heads.paths, key=lambda path: (len(path) + sum(path), path))
    for size in reversed(sizes if several and nodes > 2 else []):
        some = DraftTree(paths[: size - 1])
        whole: Tree = some
        if isinstance(tree, LookupTree):
            whole = replace(tree, tree=some, copies=min(tree.copies, size - 1))
        found.insert(0, (some, whole))
    return found


def steps_by_size(tree: Tree, execution: str, vocabulary: int, several: bool) -> dict[Size, Tree]:
    """The steps whose costs are to be known: with the trees to choose among; and where heads choose among so many
    tokens, eager ones with as many nodes in one level."""
    steps: dict[Size, Tree] = {
        Size(some.num_nodes, some.max_depth): some for some, _ in trees_by_size(tree, execution, several)
    }
    if execution == "eager" and tree.max_depth > 1 and tree.num_nodes - 1 <= vocabulary:
        steps[Size(tree.num_nodes, 1)] = DraftTree([(rank,) for rank in range(tree.num_nodes - 1)])
    return steps


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
        """The tree of the next step; where its nodes can be weighed while it is drafted, `state.pays` does it.

        Args:
            rule: which may be another than before, where the number of rows is.
            drafts: False where it is known that nothing would be guessed.
        """
        if state.steps != self.noted and self.steps:
            self._note(self.steps.popleft(), state)
        self.noted = state.steps
        if rule.watch is not None and min(map(len, self.seconds)) < TIMED:  # a call is judged once
            self._time(rule.watch)
        self.left = min(self.left + LOSS_SHARE, MOST_LEFT)
        self.hits, self.mass = (PRIOR + KEPT * (known - PRIOR) for known in (self.hits, self.mass))
        self.tries = PRIOR / RIGHT + KEPT * (self.tries - PRIOR / RIGHT)
        step = Weighed(self, rule, [row for row, end in enumerate(state.ends) if end is None])
        tree: Tree = ROOT_ALONE
        if drafts and rule.costs(2, 1) - 1 <= self.left:
            tree = rule.tree if rule.reads else step.by_ranks()
            state.pays = step if rule.reads else None
        self.steps.append(step)
        self.timed = step, perf_counter()
        return tree

    def _time(self, watch: Callable[[float], object]) -> None:
        if self.timed is not None:
            step, begun = self.timed
            self.seconds[step.levels > 0].append((perf_counter() - begun) / step.cost)
        if min(map(len, self.seconds)) == TIMED:
            watch(min(self.seconds[True]) / max(min(self.seconds[False]), 1e-9))

    def _note(self, step: Weighed, state: DecodingState) -> None:
        """Take in what a step has emitted."""
        moved = [(length - count, count, row) for row, (length, count) in enumerate(zip(state.lengths, state.counted))]
        if not step.said or not (moved := [each for each in moved if each[1]]):  # 0 in rows that had ended
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
        self.correction, self.levels, self.cost = sizes.hits / sizes.mass, 0, 1.0
        self.value: torch.Tensor | None = None  # (B, M) logarithms of how likely nodes are
        self.said: list[list[float]] = []  # row by row, how likely the guesses below each node were said to be
        self.chain: list[int] | None = None  # the nodes of the likeliest path, where others are not told apart

    def goes_on(self, level: Level, chances: torch.Tensor, below: Level | None = None) -> bool:
        """Take in the guesses of a level: logarithms of how likely they are (B, n or 1, k).

        Returns:
            whether it pays to guess the level below as well.
        """
        if self.value is None:
            self.value = chances.new_zeros(len(chances), 1)
        room = -chances.exp().sum(-1, keepdim=True).log()  # guesses of one node are at most certain together
        chances = chances + room.clamp(max=math.log(self.correction))
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
        self.said = torch.zeros_like(edges).scatter_add(1, parents, edges).tolist()

    def _most_worth(self, value: torch.Tensor, most: int) -> tuple[float, int]:
        """Tokens for each step of the base, and the number of nodes that gives most of them."""
        value = value[self.running] if len(self.running) else value
        tokens = value.exp().sort(dim=1, descending=True).values.cumsum(1).mean(0).tolist()
        costs = {size: self.rule.costs(size, self.levels) for size in sizes_up_to(most) if size <= len(tokens)}
        left = self.sizes.left
        return max((tokens[size - 1] / cost, size) for size, cost in costs.items() if size == 1 or cost - 1 <= left)

    def by_ranks(self) -> Tree:
        """The tree that is worth most where nothing is known of its nodes but their ranks."""
        rule, shape = self.rule, self.rule.among[-1][0]
        for level in shape.levels():
            self.goes_on(level, PER_RANK * (1.0 + torch.arange(level.width))[None, None])
        assert self.value is not None
        value = dict(zip(((), *shape.paths), self.value[0].tolist()))
        best: Tree = ROOT_ALONE
        most, self.levels = 1.0, 0
        for some, tree in rule.among:
            cost = rule.costs(some.num_nodes, some.max_depth)
            worth = sum(math.exp(value[path]) for path in ((), *some.paths)) / cost
            if worth >= most and cost - 1 <= self.sizes.left:
                most, best, self.levels, self.cost = worth, tree, some.max_depth, cost
                said = dict.fromkeys(((), *some.paths), 0.0)
                for path in some.paths:
                    said[path[:-1]] += math.exp(value[path] - value[path[:-1]])
                self.said, self.chain = [[*said.values()]], [0]
                while below := some.children(self.chain[-1]):
                    self.chain.append(below[0])
        return best

    def found(self, row: int, walked: Sequence[int]) -> tuple[float, float, int]:
        """Of a row that walked these nodes: guesses that were right, that were said to be, and nodes that had some."""
        walked = walked if self.chain is None else self.chain[: len(walked)]
        said = self.said[row % len(self.said)]
        asked = [said[node] for node in walked if said[node] > 0]
        return len(walked) - 1.0, sum(asked) / self.correction, len(asked)
