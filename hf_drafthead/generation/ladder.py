"""Trees of several sizes for one call: what a step with each costs, and which of them pays most on a text.

Shapes: N nodes (root included).
"""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from hf_drafthead.generation.entries import damaged, tree_of
from hf_drafthead.generation.tree import DraftTree

STEPS_DOWN = 3  # each tree of a ladder has a third of the nodes of the one above it


class Size(NamedTuple):
    """Of a tree: N nodes, and levels below the root. In order of the nodes; of as many nodes in order of the levels."""

    nodes: int
    depth: int


ALONE = Size(1, 0)  # the root


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by the size of its tree.

    points: by nodes, of trees with one level, or none: measured, made monotone, and straight lines between them; level:
    what each further level costs, which is one more call of the drafter.

    >>> curve = CostCurve.through({Size(2, 1): 1.0, Size(8, 1): 4.0, Size(8, 3): 5.0, Size(16, 2): 3.5})
    >>> curve.points, curve.level, curve.at(5), curve.at(5, 3), curve.at(100)
    ([(2, 1.0), (8, 3.5), (16, 3.5)], 0.5, 2.25, 3.25, 3.5)
    """

    points: list[tuple[int, float]]
    level: float = 0.0

    @classmethod
    def through(cls, measured: dict[Size, float]) -> CostCurve:
        """The curve that never falls and is nearest to the measured points (pool adjacent violators).

        Args:
            measured: seconds by size; two trees of as many nodes tell what a level costs.
        """
        level = 0.0
        for shallow, deep in itertools.pairwise(sorted(measured)):
            if shallow.nodes == deep.nodes:
                level = max(measured[deep] - measured[shallow], 0.0) / (deep.depth - shallow.depth)
        by_nodes = {size.nodes: measured[size] - level * max(size.depth - 1, 0) for size in sorted(measured)}
        pools: list[list[float]] = []
        for seconds in by_nodes.values():
            pools.append([seconds])
            while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
                dear = pools.pop()
                pools[-1] += dear
        monotone = [statistics.mean(pool) for pool in pools for _ in pool]
        return cls(list(zip(by_nodes, monotone)), level)

    def at(self, nodes: int, depth: int = 1) -> float:
        """Seconds of a step of so many nodes and levels; outside of the measured nodes those of the nearest one."""
        levels = self.level * max(depth - 1, 0)
        if nodes <= self.points[0][0]:
            return self.points[0][1] + levels
        for (low, cheap), (high, dear) in zip(self.points, self.points[1:]):
            if nodes <= high:
                return cheap + (dear - cheap) * (nodes - low) / (high - low) + levels
        return self.points[-1][1] + levels


@dataclass(frozen=True)
class Trees:
    """The trees of one call, each step of which takes one of them; caches have room for the largest."""

    trees: tuple[DraftTree, ...]

    @property
    def num_nodes(self) -> int:
        """N of the largest tree."""
        return max(tree.num_nodes for tree in self.trees)

    @property
    def max_depth(self) -> int:
        """Levels of the deepest tree."""
        return max(tree.max_depth for tree in self.trees)

    @property
    def slots(self) -> int:
        """Most nodes that a step writes to a cache."""
        return max(tree.slots for tree in self.trees)


@dataclass(frozen=True)
class TreesInTurn(Trees):
    """Trees whose steps are to be compared: one call makes its steps with them in a given order.

    order: which tree each step takes; after the last one it begins again.
    """

    order: tuple[int, ...]


@dataclass(frozen=True)
class Ladder(Trees):
    """What `draft_tree="auto"` chooses from: the root alone first, then trees that hold each other, ever larger.

    seconds: of a step with each tree; tokens_per_step: that each gave where it was calibrated, 1.0 for the root alone.
    """

    seconds: tuple[float, ...]
    tokens_per_step: tuple[float, ...]

    @classmethod
    def of(cls, entry: dict[str, Any], max_depth: int | None, vocabulary: int) -> Ladder:
        """The sizes of a calibration entry.

        Raises:
            ValueError: the entry is damaged.
        """
        largest = tree_of(entry, max_depth, vocabulary)
        try:
            measured = entry["measured"]
            points = [(int(nodes), _number(seconds)) for nodes, seconds in measured["step_seconds"]]
            level = measured.get("level_seconds", 0)  # entries of earlier versions have none: points of deep trees
            curve = CostCurve(points, _number(level) if level != 0 else 0.0)
            gains = {int(nodes): _number(tau) for nodes, tau in measured["tokens_per_step_by_nodes"]}
            # the paths as they are stored: the most valuable first
            order = [tuple(path) for path in entry["tree"]]
            sizes = sorted({1, *_sizes(largest.num_nodes)})
            known = sorted(gains)
            taus = [1.0 if size == 1 else gains[min(known, key=lambda one: abs(one - size))] for size in sizes]
            trees = [DraftTree(order[: size - 1]) if size > 1 else DraftTree.root_alone() for size in sizes]
            seconds = [curve.at(tree.num_nodes, tree.max_depth) for tree in trees]
            # what the check found holds for the other trees too
            off = _number(measured.get("tree_seconds", seconds[-1])) / seconds[-1]
            seconds = [seconds[0], *(off * one for one in seconds[1:])]
            return cls(tuple(trees), tuple(seconds), tuple(taus))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise damaged(entry, error) from None

    def best(self, gain: float) -> int:
        """Which tree gives most tokens per second where a step gives `gain` times the usual gain."""
        rates = [
            (1 + gain * (tau - 1)) / seconds for tau, seconds in zip(self.tokens_per_step, self.seconds, strict=True)
        ]
        return max(range(len(rates)), key=rates.__getitem__)


def _sizes(largest: int) -> list[int]:
    sizes = [largest]
    while sizes[-1] > STEPS_DOWN:
        sizes.append(max(sizes[-1] // STEPS_DOWN, 2))
    return sizes


def _number(value: Any) -> float:
    """A measured number.

    Raises:
        ValueError: it is none that can have been measured.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{str(value)[:20]!r} was never measured")
    return float(value)
