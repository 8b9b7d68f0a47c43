"""Trees from the ranks of the base's own text: of each size the rank paths that were right most often.

The worth of (0, 2) is the share of positions where head 1 had the next token first and head 2 the one after third.

Shapes: B rows, S positions, K levels.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hf_drafthead.generation.tree import DraftTree, RankPath
from hf_drafthead.trees.rank_paths import UNKNOWN, foretold_steps

NODES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)  # that are tried
MOST_RANK = 64  # ranks from here on are never grown: finding them costs more than they are worth


class Size(NamedTuple):
    """Of a tree: N nodes, root included, and levels below the root."""

    nodes: int
    depth: int


ALONE = Size(1, 0)  # the root


def grow_tree(ranks: torch.Tensor, nodes: int, ranks_below: int = MOST_RANK) -> list[RankPath]:
    """The rank paths that were right most often, best first: every beginning of the list is the best tree of its size.

    Args:
        ranks: (..., K) from `rank_paths`; positions near a row's end, whose last level is not known, do not count.
        nodes: N, at least 2, the root included; fewer come back where the text shows no more.
        ranks_below: no path has a rank that is not below this.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    ranks = ranks.flatten(0, -2)
    known = ranks[ranks[:, -1] != UNKNOWN].tolist()
    worth: Counter[RankPath] = Counter()
    for path, count in Counter(map(tuple, known)).items():
        for depth in range(1, len(path) + 1):
            worth[path[:depth]] += count
    fitting = (path for path in worth if max(path) < ranks_below)
    # a parent is worth at least as much as its children and is shorter, so it always comes first
    return heapq.nsmallest(nodes - 1, fitting, key=lambda path: (-worth[path], len(path), path))


@dataclass(frozen=True)
class TreeStatistics:
    """What the base's own text says of trees, on any machine.

    paths: the rank paths of the best tree of each size, the most valuable first, so that every beginning is a tree;
    steps: by the size of a tree, tokens emitted by each step of generating each text, foretold with a tree that was not
    grown on that text; positions: that were counted.
    """

    paths: dict[Size, list[RankPath]]
    steps: dict[Size, list[list[int]]]
    positions: int

    @classmethod
    def of(cls, ranks: Sequence[torch.Tensor], max_nodes: int, ranks_below: int) -> TreeStatistics:
        """Of texts whose ranks (S, K) are given. Every second one is foretold with the tree of the others, and the
        other way round: a large tree knows the text that it was grown on better than any other."""
        deepest = ranks[0].shape[1]
        texts = torch.cat([*ranks]), torch.cat([*ranks[1::2]]), torch.cat([*ranks[0::2]])
        paths: dict[Size, list[RankPath]] = {ALONE: []}
        steps = {ALONE: [foretold_steps(DraftTree.root_alone(), text[None])[0] for text in ranks]}
        for depth, nodes in itertools.product(range(1, deepest + 1), NODES):
            every, *halves = (grow_tree(some[:, :depth], min(nodes, max_nodes), ranks_below) for some in texts)
            if all((every, *halves)) and (size := Size(len(every) + 1, max(map(len, every)))) not in paths:
                paths[size] = every
                trees = [DraftTree(half) for half in halves]  # of even and odd texts
                steps[size] = [foretold_steps(trees[n % 2], text[None])[0] for n, text in enumerate(ranks)]
        return cls(paths, dict(sorted(steps.items())), sum(map(len, ranks)))

    def tree(self, size: Size) -> DraftTree:
        """The best tree of this size."""
        return DraftTree(self.paths[size]) if size.nodes > 1 else DraftTree.root_alone()

    def tokens_per_step(self, size: Size) -> float:
        """Tokens that a step gives to a row."""
        return statistics.mean(itertools.chain(*self.steps[size]))

    def fewer_steps(self, size: Size, rows: int) -> float:
        """How many times fewer steps than the base's own texts take in batches of B neighbours, each of which ends with
        the row that takes most steps."""
        texts, base = self.steps[size], self.steps[ALONE]
        batches = [[(first + row) % len(texts) for row in range(rows)] for first in range(len(texts))]
        steps = sum(max(len(texts[text]) for text in batch) for batch in batches)
        return sum(max(len(base[text]) for text in batch) for batch in batches) / steps
