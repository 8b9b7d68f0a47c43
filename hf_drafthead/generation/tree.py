"""Draft trees: which guesses one step checks, named by rank paths.

A node is the path of top-k ranks that leads to it: `(0, 2)` is the best guess of head 1 followed by the third of head
2. The root, node 0, is the token the base itself chose; it is always there and is not listed. Nodes are numbered by
(depth, path), so a level is a contiguous range. The example used in docs and tests:

    root
    ├── (0,)
    │   ├── (0, 0)
    │   └── (0, 1)
    └── (1,)

Shapes: N nodes (root included), D nodes on the longest path (root included), n nodes of one level.
"""

from __future__ import annotations

import functools
import json
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeGuard

import torch

from hf_drafthead.bases.topology import Topology

RankPath = tuple[int, ...]

# A step holds two (N, N) masks, and every forward of the base N more positions: published trees have at most 64 nodes.
MAX_NODES = 4096
MAX_DEPTH = 256
LOOKUP = "lookup"  # copies from the text in the place of a tree of guesses
COPIES = 10  # tokens of other texts that are copied where no number is given
DEFAULT_MATCH = 8  # last tokens that are compared with the text
MOST_COPIES = 256  # where copies are all that is guessed
MAX_MADE = 65_536  # nodes that a dynamic tree guesses in a step, row by row; published trees guess some hundreds

_shown = reprlib.Repr()  # what was given, cut to a length that fits a message
_shown.maxtuple, _shown.maxlist, _shown.maxstring, _shown.maxother = 16, 16, 60, 60


@dataclass(frozen=True)
class Level:
    """One call of the drafter: expand nodes (n,) that have children, then fill the nodes of the next depth.

    hang_on (n,): place of each one's parent among the nodes expanded by the previous level; slots, ranks (children,):
    which expanded node a child hangs on and which of its guesses it is; width: how many guesses per node are needed.
    """

    expanded: torch.Tensor
    hang_on: torch.Tensor
    slots: torch.Tensor
    ranks: torch.Tensor
    width: int


@dataclass(init=False, repr=False, unsafe_hash=True)  # of which a generation config is written by `to_dict`
class DraftTree:
    """A static tree of guesses.

    As of every tree, `num_nodes` is N, the root included; `max_depth` the levels below the root, which is how many
    heads it needs; `slots` the most nodes that a step writes to a cache, of the base or of the drafter.

    Args:
        paths: rank paths in any order, without the root; every prefix of a path must be a path too. With none the root
            is alone: a step with it gives one token, as a step of the base does.

    Raises:
        TypeError: `paths` is not a sequence of sequences of integers.
        ValueError: an empty path, a negative rank, a duplicate or an orphan; more than 4,096 nodes or 256 levels.

    >>> tree = DraftTree([(0,), (1,), (0, 0), (0, 1)])
    >>> tree.num_nodes, tree.max_depth, tree.parents
    (5, 2, (0, 0, 0, 1, 1))
    >>> print(tree.draw())
    root
    ├── 0
    │   ├── 0
    │   └── 1
    └── 1
    """

    paths: tuple[RankPath, ...]

    def __init__(self, paths: Iterable[Sequence[int]]):
        self.paths = _validated(paths)
        number = {path: node for node, path in enumerate(((), *self.paths))}
        self.parents = (0, *(number[path[:-1]] for path in self.paths))
        self.depths = (0, *map(len, self.paths))
        self.num_nodes = self.slots = len(number)
        self.max_depth = self.depths[-1]
        self._children: list[list[int]] = [[] for _ in self.parents]
        for child, parent in enumerate(self.parents[1:], start=1):
            self._children[parent].append(child)

    @property
    def max_rank(self) -> int:
        """The highest rank of any node, from 0."""
        return max((max(path) for path in self.paths), default=-1)

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes that hang on `node`, best rank first."""
        return (*self._children[node],)

    def cut(self, max_depth: int) -> DraftTree:
        """The same tree without the levels below `max_depth` (at least 1)."""
        return self if self.max_depth <= max_depth else DraftTree(p for p in self.paths if len(p) <= max_depth)

    def topology(self, device: torch.device | str = "cpu") -> Topology:
        """The tree as tensors on `device`."""
        return Topology.of_numbers(self.parents, torch.device(device))

    def levels(self, device: torch.device | str = "cpu") -> tuple[Level, ...]:
        """What the drafter is asked, level by level, as tensors on `device`."""
        levels: list[Level] = []
        tensor = functools.partial(torch.tensor, device=device)
        before = {0: 0}  # place of each node among those that the previous level expanded
        for depth in range(1, self.max_depth + 1):
            below = [node for node, at in enumerate(self.depths) if at == depth]
            expanded = sorted({self.parents[node] for node in below})
            place = {node: slot for slot, node in enumerate(expanded)}
            ranks = [self.paths[node - 1][-1] for node in below]
            hang_on = tensor([before[self.parents[node]] for node in expanded])
            slots = tensor([place[self.parents[node]] for node in below])
            levels.append(Level(tensor(expanded), hang_on, slots, tensor(ranks), max(ranks) + 1))
            before = place
        return tuple(levels)

    def draw(self) -> str:
        """A text drawing; each line is the node's rank among its siblings."""
        lines = ["root"]
        waiting = [(child, "") for child in reversed(self.children(0))]
        while waiting:
            node, indent = waiting.pop()
            last = node == self.children(self.parents[node])[-1]
            lines.append(f"{indent}{'└── ' if last else '├── '}{self.paths[node - 1][-1]}")
            below = indent + ("    " if last else "│   ")
            waiting += [(child, below) for child in reversed(self.children(node))]
        return "\n".join(lines)

    def to_dict(self) -> list[list[int]]:
        """What a generation config stores of the tree, and `resolve` reads again: its rank paths."""
        return [*map(list, self.paths)]

    @classmethod
    def from_json(cls, text: str) -> DraftTree:
        """The tree of a JSON array of rank paths; ValueError where `text` is not JSON."""
        wanted = "give an array of rank paths such as [[0], [1], [0, 0]]."
        try:
            paths = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
            raise ValueError(f"the tree {text[:40]!r} is not JSON ({error}): {wanted}") from None
        return cls(paths)

    @classmethod
    @functools.cache
    def from_name(cls, name: str) -> DraftTree:
        """One of the published trees, see `published_trees()`; ValueError where none has that name."""
        if name not in published_trees():
            raise ValueError(
                f"draft_tree {_shown.repr(name)} is no published tree: expected one of {', '.join(published_trees())}, "
                "or rank paths such as [[0], [1], [0, 0]]."
            )
        return cls(_tree_files()[name])

    def __repr__(self) -> str:
        return f"DraftTree({self.num_nodes} nodes, depth {self.max_depth})"


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
        ValueError: no whole number, one out of range, or more nodes than depth and width can fill.
    """

    nodes: int = 32
    depth: int = 6
    width: int = 8

    def __post_init__(self) -> None:
        limits = {"nodes": (2, MAX_NODES), "depth": (1, MAX_DEPTH), "width": (1, MAX_NODES)}
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} of a dynamic tree is {value!r}: expected {least} to {most:,}.")
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

    def to_dict(self) -> dict[str, dict[str, int]]:
        """What a generation config stores of the tree, and `resolve` reads again."""
        return {"dynamic": asdict(self)}

    @property
    def made(self) -> int:
        """Nodes that are guessed, of which the likeliest are kept."""
        return self.width + (self.depth - 1) * self.width**2

    num_nodes = property(lambda self: self.nodes)
    max_depth = property(lambda self: self.depth)
    slots = property(lambda self: max(self.nodes, (self.depth - 1) * self.width))

    def fitted(self, max_depth: int | None, vocabulary: int) -> DynamicTree:
        """The tree cut to the heads and the tokens that there are."""
        depth = self.depth if max_depth is None else min(self.depth, max_depth)
        width = min(self.width, vocabulary)
        made = width + (depth - 1) * width**2
        return DynamicTree(min(self.nodes, made + 1), depth, width)


@dataclass(frozen=True)
class LookupTree:
    """A tree in which copies take the place of nodes that are less likely, see `generation.lookup`.

    tree: of the heads, the root alone where copies are all that is guessed; copies: L, at most; longest_match: tokens
    that are compared; vocabulary: tokens of the base; certain: C, tokens at most of a path that comes for certain, see
    `generation.grammar`.
    """

    tree: DraftTree | DynamicTree
    copies: int
    longest_match: int
    vocabulary: int
    certain: int = 0

    @classmethod
    def around(
        cls, tree: DraftTree | DynamicTree, copies: int, longest_match: int | None, vocabulary: int
    ) -> LookupTree:
        """The tree with so many copies, no more than its nodes below the root, or `MOST_COPIES` (ValueError)."""
        longest_match = DEFAULT_MATCH if longest_match is None else longest_match
        for name, value in (("prompt_lookup_num_tokens", copies), ("max_matching_ngram_size", longest_match)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}: expected a whole number of tokens, at least 1.")
        return cls(tree, min(copies, tree.num_nodes - 1 or MOST_COPIES), longest_match, vocabulary)

    num_nodes = property(lambda self: max(self.tree.num_nodes, self.copies + self.certain + 1))
    max_depth = property(lambda self: max(self.tree.max_depth, self.copies + self.certain))
    slots = property(lambda self: max(self.tree.slots, self.num_nodes))


Tree = DraftTree | DynamicTree | LookupTree


def copies_alone(tree: Tree) -> TypeGuard[LookupTree]:
    """Whether copies from the text are all that a step with this tree guesses."""
    return isinstance(tree, LookupTree) and tree.tree.num_nodes == 1


def resolve(tree: Any, max_depth: int | None, vocabulary: int) -> Tree:
    """The tree that a `draft_tree` setting names; TypeError or ValueError where these heads cannot fill it.

    "dynamic", or a published name, which are cut to the heads there are; {"dynamic": {"nodes": 32, ...}}; "lookup", the
    root alone; a DynamicTree, a DraftTree, or rank paths. Of so many heads, None where the drafter can go on for ever,
    which choose among so many tokens.
    """
    if tree == LOOKUP:
        return ROOT_ALONE
    if tree == "dynamic":
        return DynamicTree().fitted(max_depth, vocabulary)
    if isinstance(tree, Mapping):
        names = [field.name for field in fields(DynamicTree)]
        settings = tree.get("dynamic")
        if set(tree) != {"dynamic"} or not isinstance(settings, Mapping) or not set(settings) <= set(names):
            raise ValueError(
                f"draft_tree is {reprlib.repr(tree)}: expected {{'dynamic': {asdict(DynamicTree())}}}, of which "
                "any may be left out."
            )
        defaults = DynamicTree().fitted(max_depth, vocabulary)
        tree = DynamicTree(**{**asdict(defaults), **settings})
    if isinstance(tree, DynamicTree):
        fitting = tree.fitted(max_depth, vocabulary)
        if fitting != tree:
            raise ValueError(
                f"draft_tree is a dynamic tree of {tree.nodes} nodes, depth {tree.depth} and width {tree.width}, but "
                f"these heads fill {fitting.nodes} nodes, depth {fitting.depth}, width {fitting.width}: ask for that."
            )
        return tree
    if isinstance(tree, str):
        tree = DraftTree.from_name(tree).cut(max_depth or MAX_DEPTH)
    tree = tree if isinstance(tree, DraftTree) else DraftTree(tree)
    if max_depth is not None and tree.max_depth > max_depth:
        deepest = next(path for path in tree.paths if len(path) > max_depth)
        raise ValueError(
            f"draft_tree has the node {_shown.repr(deepest)} at depth {len(deepest)}, but the model has {max_depth} "
            f"draft heads: drop every path longer than {max_depth}."
        )
    if tree.max_rank >= vocabulary:
        path = next(path for path in tree.paths if max(path) >= vocabulary)
        raise ValueError(
            f"draft_tree has the node {_shown.repr(path)} with rank {_shown.repr(max(path))}, but a vocabulary of "
            f"{vocabulary} tokens has ranks 0 to {vocabulary - 1}: drop that node and all that start with it."
        )
    return tree


def smaller(tree: Tree) -> Tree:
    """A tree of half the nodes: the best guesses near the root; at last the root alone.

    >>> smaller(DraftTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])).paths
    ((0,), (1,))
    """
    nodes = tree.num_nodes // 2
    if nodes < 2:
        return ROOT_ALONE
    if isinstance(tree, LookupTree):
        if tree.certain:
            return smaller(replace(tree, certain=0)) if tree.copies else smaller(tree.tree)
        return smaller(tree.tree) if tree.tree.num_nodes > 1 else replace(tree, copies=nodes - 1)
    return replace(tree, nodes=nodes) if isinstance(tree, DynamicTree) else DraftTree(tree.paths[: nodes - 1])


def published_trees() -> list[str]:
    """Names of the trees that ship with the package; each file beside this module also holds its provenance."""
    return sorted(_tree_files())


@functools.cache
def _tree_files() -> dict[str, list[list[int]]]:
    """Rank paths of the published trees, by their names."""
    files = (file for file in (resources.files(__package__) / "trees").iterdir() if file.name.endswith(".json"))
    return {Path(file.name).stem: json.loads(file.read_text())["paths"] for file in files}


def _validated(paths: Iterable[Sequence[int]]) -> tuple[RankPath, ...]:
    """The paths as sorted tuples, or one line about the first that is wrong."""
    expected = "expected rank paths such as [[0], [1], [0, 0]]"
    if isinstance(paths, (str, bytes, dict)) or not isinstance(paths, Iterable):
        raise TypeError(f"a tree was given as {_shown.repr(paths)} ({type(paths).__name__}): {expected}.")
    rank_paths: list[RankPath] = []
    for path in paths:
        if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
            raise TypeError(f"a tree has the path {_shown.repr(path)} ({type(path).__name__}): {expected}.")
        # The limits come first, so that a tree beyond them costs no more than one within them.
        if len(path) > MAX_DEPTH or len(rank_paths) == MAX_NODES - 1:
            raise ValueError(
                f"a tree has more than {MAX_NODES:,} nodes, the root included, or a path of more than {MAX_DEPTH} "
                "ranks: keep the most likely ones."
            )
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in path):
            shown = _shown.repr(list(path))
            raise TypeError(f"the path {shown} holds something other than integers: {expected}.")
        if not path or min(path) < 0:
            raise ValueError(
                f"a tree has the node {_shown.repr(tuple(path))}: expected at least one rank, counted from 0, the best "
                "guess; the root is always there."
            )
        rank_paths.append(tuple(path))
    counts = Counter(rank_paths)
    for path in rank_paths:
        if len(path) > 1 and path[:-1] not in counts:
            shown, parent = _shown.repr(path), _shown.repr(path[:-1])
            raise ValueError(
                f"node {shown} has no parent: add {parent} to the tree, or drop every node that starts with {parent}."
            )
        if counts[path] > 1:
            raise ValueError(f"node {_shown.repr(path)} is in the tree {counts[path]} times: keep it once.")
    return tuple(sorted(counts, key=lambda path: (len(path), path)))


ROOT_ALONE = DraftTree([])
