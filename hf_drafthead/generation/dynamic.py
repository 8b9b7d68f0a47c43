"""Dynamic trees: which nodes a step checks is decided row by row, by what the drafter thinks of its own guesses."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from hf_drafthead.generation.tree import MAX_DEPTH, MAX_NODES, DraftTree

MAX_MADE = 65_536  # nodes that are guessed in a step, row by row; published trees guess some hundreds


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4): of fixed size, its shape is decided anew in every step.

    Level by level the `width` likeliest nodes are expanded, each to its `width` likeliest children; of all nodes so
    made the likeliest stay. A node's likelihood is the product of the drafter's probabilities along its path. Ties go
    to the node that was made first, so that no node is ever kept without its parent.

    Args:
        nodes: N, the root included.
        depth: levels below the root.
        width: nodes that are expanded at each level, and guesses that are taken from each.

    Raises:
        TypeError: a number that is no whole number.
        ValueError: one out of range, or more nodes than depth and width can fill.
    """

    nodes: int = 32
    depth: int = 6
    width: int = 8

    def __post_init__(self) -> None:
        limits = {"nodes": (2, MAX_NODES), "depth": (1, MAX_DEPTH), "width": (1, MAX_NODES)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of a dynamic tree is {value!r} ({type(value).__name__}): expected a number.")
            if not least <= value <= most:
                raise ValueError(f"{name} of a dynamic tree is {value}: expected {least} to {most:,}.")
        if self.made > MAX_MADE:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and width {self.width} guesses {self.made:,} nodes in each "
                f"step: expected at most {MAX_MADE:,}; ask for less width."
            )
        if self.nodes > self.made + 1:
            raise ValueError(
                f"a dynamic tree of {self.nodes} nodes cannot be filled: {self.depth} levels of width {self.width} "
                f"make {self.made + 1}, the root included; ask for fewer nodes, or for more levels or width."
            )

    @property
    def made(self) -> int:
        """Nodes that are guessed, of which the likeliest are kept."""
        return self.width + (self.depth - 1) * self.width**2

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return self.nodes

    @property
    def max_depth(self) -> int:
        """Levels below the root."""
        return self.depth

    @property
    def slots(self) -> int:
        """Most nodes that a step writes to a cache, of the base or of the drafter."""
        return max(self.nodes, (self.depth - 1) * self.width)

    def fitted(self, max_depth: int | None, vocabulary: int) -> DynamicTree:
        """The tree cut to the heads and the tokens that there are."""
        depth = self.depth if max_depth is None else min(self.depth, max_depth)
        width = min(self.width, vocabulary)
        made = width + (depth - 1) * width**2
        return DynamicTree(min(self.nodes, made + 1), depth, width)


Tree = DraftTree | DynamicTree


def resolve(tree: Any, max_depth: int | None, vocabulary: int) -> Tree:
    """The tree that a `draft_tree` setting names, checked against what the heads can guess.

    Args:
        tree: "dynamic", which is cut to the heads there are; {"dynamic": {"nodes": 32, ...}}; a DynamicTree; or what
            `DraftTree.resolve` takes.
        max_depth: the number of heads; None where the drafter can go on for ever.
        vocabulary: the number of tokens that the heads choose among.

    Raises:
        TypeError, ValueError: no such tree, or one that these heads cannot fill.
    """
    if tree == "dynamic":
        return DynamicTree().fitted(max_depth, vocabulary)
    if isinstance(tree, Mapping):
        known = [field.name for field in fields(DynamicTree)]
        given = tree.get("dynamic")
        if set(tree) != {"dynamic"} or not isinstance(given, Mapping) or not set(given) <= set(known):
            raise ValueError(
                f"draft_tree is {reprlib.repr(tree)}: expected {{'dynamic': {asdict(DynamicTree())}}}, of which "
                "any may be left out."
            )
        defaults = DynamicTree().fitted(max_depth, vocabulary)
        tree = DynamicTree(**{**asdict(defaults), **given})
    if isinstance(tree, DynamicTree):
        fitting = tree.fitted(max_depth, vocabulary)
        if fitting != tree:
            raise ValueError(
                f"draft_tree is a dynamic tree of {tree.nodes} nodes, depth {tree.depth} and width {tree.width}, but "
                f"these heads fill {fitting.nodes} nodes, depth {fitting.depth}, width {fitting.width}: ask for that."
            )
        return tree
    return DraftTree.resolve(tree, max_depth, vocabulary)
