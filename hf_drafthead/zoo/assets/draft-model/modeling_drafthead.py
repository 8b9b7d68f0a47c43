# Made from hf_drafthead 0.1.0, which holds the same code module by module, with its tests and documentation.
# Where that package is imported, its own classes are used instead of these.
"""A base model with draft_model heads, whose `generate` returns the base's own text in fewer forward passes."""

from __future__ import annotations

import contextlib
import copy
import difflib
import functools
import hashlib
import inspect
import json
import math
import os
import re
import reprlib
import statistics
import threading
import time
import torch
import torch.distributed as dist
import types
from collections import Counter
from collections import OrderedDict
from collections import defaultdict
from collections import deque
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
from dataclasses import fields
from dataclasses import replace
from huggingface_hub.errors import GatedRepoError
from huggingface_hub.errors import HFValidationError
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from importlib import resources
from pathlib import Path
from pathlib import PureWindowsPath
from safetensors import SafetensorError
from safetensors import safe_open
from torch import Tensor
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig
from transformers import AutoModelForCausalLM
from transformers import AutoModelForImageTextToText
from transformers import AutoTokenizer
from transformers import CompileConfig
from transformers import GenerationConfig
from transformers import LlamaConfig
from transformers import LogitsProcessorList
from transformers import PreTrainedModel
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.cache_utils import DynamicLayer
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.cache_utils import StaticLayer
from transformers.cache_utils import StaticSlidingWindowLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation import GenerationMixin
from transformers.generation import GenerationMode
from transformers.generation import StopStringCriteria
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.streamers import BaseStreamer
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.utils import ADAPTER_CONFIG_NAME
from transformers.utils import CONFIG_NAME
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils import cached_file
from transformers.utils import has_file
from transformers.utils import logging
from typing import Any
from typing import ClassVar
from typing import NamedTuple
from typing import TypeVar
from typing import cast
from weakref import WeakKeyDictionary

__version__ = "0.1.0"


# ---- hf_drafthead/generation/tree.py

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


RankPath = tuple[int, ...]

# A step holds two (N, N) masks, and every forward of the base N more positions: published trees have at most 64 nodes.
MAX_NODES = 4096
MAX_DEPTH = 256

_shown = reprlib.Repr()  # what was given, cut to a length that fits a message
_shown.maxtuple, _shown.maxlist, _shown.maxstring, _shown.maxother = 16, 16, 60, 60


class Topology(NamedTuple):
    """How the nodes of a step hang together, as tensors; R is 1 (all rows alike) or the batch size.

    parents (R, N) with the root as its own parent; depths (R, N); ancestors (R, N, N), True where the column is the
    row's node or above it; unrelated (R, N, N), True where the column is the root or no ancestor; paths (R, N, D), the
    nodes from the root down to each node, padded with 0.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    unrelated: torch.Tensor
    paths: torch.Tensor

    @classmethod
    def of(cls, parents: torch.Tensor, depths: torch.Tensor, deepest: int) -> Topology:
        """The topology of every row's own tree, without waiting for the device.

        Args:
            parents, depths: (B, N), node 0 the root, which is its own parent.
            deepest: D - 1, levels below the root.
        """
        line = [torch.arange(parents.shape[1], device=parents.device).expand_as(parents)]
        for _ in range(deepest):
            line.append(parents.gather(1, line[-1]))
        upwards = torch.stack(line, dim=2)  # (B, N, D) each node, its parent, ..., the root, and the root again
        nodes = parents.shape[1]
        ancestors = torch.zeros(*parents.shape, nodes, dtype=torch.bool, device=parents.device)
        ancestors = ancestors.scatter(2, upwards, True)
        unrelated = ~ancestors
        unrelated[..., 0] = True
        columns = depths[:, None].expand(-1, nodes, -1).gather(2, upwards)
        return cls(parents, depths, ancestors, unrelated, torch.zeros_like(upwards).scatter(2, columns, upwards))


@dataclass(frozen=True)
class Level:
    """One call of the drafter: expand `expanded`, then fill the nodes of the next depth.

    expanded (n,): nodes that have children; hang_on (n,): place of each one's parent among the nodes expanded by the
    previous level; slots, ranks (children,): which expanded node a child hangs on and which of its guesses it is;
    width: how many guesses per node are needed.
    """

    expanded: torch.Tensor
    hang_on: torch.Tensor
    slots: torch.Tensor
    ranks: torch.Tensor
    width: int


class DraftTree:
    """A static tree of guesses.

    Args:
        paths: rank paths in any order, without the root; every prefix of a path must be a path too.

    Raises:
        TypeError: `paths` is not a sequence of sequences of integers.
        ValueError: no path, an empty path, a negative rank, a duplicate or an orphan; more than 4,096 nodes or 256
            levels.

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

    def __init__(self, paths: Iterable[Sequence[int]]):
        self.paths = _validated(paths)
        number = {path: node for node, path in enumerate(((), *self.paths))}
        self.parents = (0, *(number[path[:-1]] for path in self.paths))
        self.depths = (0, *(len(path) for path in self.paths))
        self._topologies: dict[torch.device, Topology] = {}
        self._levels: dict[torch.device, tuple[Level, ...]] = {}

    @classmethod
    def root_alone(cls) -> DraftTree:
        """The tree that drafts nothing: a step with it gives one token, as a step of the base does."""
        tree = cls([(0,)])
        tree.paths, tree.parents, tree.depths = (), (0,), (0,)
        return tree

    @property
    def num_nodes(self) -> int:
        """N, the root included."""
        return len(self.paths) + 1

    @property
    def slots(self) -> int:
        """Most nodes that a step writes to a cache, of the base or of the drafter."""
        return self.num_nodes

    @property
    def max_depth(self) -> int:
        """Levels below the root: the number of heads that the tree needs."""
        return self.depths[-1]

    @property
    def max_rank(self) -> int:
        """The highest rank of any node, from 0."""
        return max((max(path) for path in self.paths), default=-1)

    def children(self, node: int) -> tuple[int, ...]:
        """The nodes that hang on `node`, best rank first."""
        return self._children[node]

    @functools.cached_property
    def _children(self) -> list[tuple[int, ...]]:
        found: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for child, parent in enumerate(self.parents[1:], start=1):  # a node's number is above its parent's
            found[parent].append(child)
        return [tuple(children) for children in found]

    def cut(self, max_depth: int) -> DraftTree:
        """The same tree without the levels below `max_depth` (at least 1)."""
        return self if self.max_depth <= max_depth else DraftTree(p for p in self.paths if len(p) <= max_depth)

    def without_gaps(self) -> DraftTree:
        """The same shape with the children of every node at the ranks from 0.

        >>> DraftTree([(1,), (3,), (3, 2)]).without_gaps().paths
        ((0,), (1,), (1, 0))
        """
        renamed: list[RankPath] = [()]
        for node, parent in enumerate(self.parents[1:], start=1):
            renamed.append((*renamed[parent], self.children(parent).index(node)))
        return DraftTree(renamed[1:])

    def topology(self, device: torch.device | str = "cpu") -> Topology:
        """The tree as tensors on `device`, made once per device."""
        device = torch.device(device)
        if device not in self._topologies:
            ancestors = torch.eye(self.num_nodes, dtype=torch.bool).unsqueeze(0)
            paths = torch.zeros(1, self.num_nodes, self.max_depth + 1, dtype=torch.long)
            for node, parent in enumerate(self.parents[1:], start=1):  # after its parent: a node continues its line
                ancestors[0, node] |= ancestors[0, parent]
                paths[0, node] = paths[0, parent]
                paths[0, node, self.depths[node]] = node
            unrelated = ~ancestors
            unrelated[..., 0] = True
            self._topologies[device] = Topology(
                parents=torch.tensor([self.parents], device=device),
                depths=torch.tensor([self.depths], device=device),
                ancestors=ancestors.to(device),
                unrelated=unrelated.to(device),
                paths=paths.to(device),
            )
        return self._topologies[device]

    def levels(self, device: torch.device | str = "cpu") -> tuple[Level, ...]:
        """What the drafter is asked, level by level, as tensors on `device`, made once per device."""
        device = torch.device(device)
        if device not in self._levels:
            levels: list[Level] = []
            by_depth: list[list[int]] = [[] for _ in range(self.max_depth)]
            for node in range(1, self.num_nodes):
                by_depth[self.depths[node] - 1].append(node)
            before = {0: 0}  # place of each node among those that the previous level expanded
            for below in by_depth:
                expanded = sorted({self.parents[node] for node in below})
                place = {node: slot for slot, node in enumerate(expanded)}
                ranks = [self.paths[node - 1][-1] for node in below]
                levels.append(
                    Level(
                        expanded=torch.tensor(expanded, device=device),
                        hang_on=torch.tensor([before[self.parents[node]] for node in expanded], device=device),
                        slots=torch.tensor([place[self.parents[node]] for node in below], device=device),
                        ranks=torch.tensor(ranks, device=device),
                        width=max(ranks) + 1,
                    )
                )
                before = place
            self._levels[device] = tuple(levels)
        return self._levels[device]

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

    def to_json(self) -> str:
        """The rank paths as a JSON array; `from_json` reads it back."""
        return json.dumps([list(path) for path in self.paths])

    @classmethod
    def from_json(cls, text: str) -> DraftTree:
        """The tree of a JSON array of rank paths.

        Raises:
            ValueError: `text` is not JSON.
        """
        wanted = "give an array of rank paths such as [[0], [1], [0, 0]]."
        try:
            paths = json.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError: also a number of more digits than Python reads
            raise ValueError(f"the tree {text[:40]!r} is not JSON ({error}): {wanted}") from None
        return cls(paths)

    @classmethod
    def from_name(cls, name: str) -> DraftTree:
        """One of the published trees, see `published_trees()`.

        Raises:
            ValueError: no published tree has that name.
        """
        return _published(name)

    @classmethod
    def resolve(
        cls, tree: str | DraftTree | Iterable[Sequence[int]], max_depth: int | None, vocab_size: int
    ) -> DraftTree:
        """The tree that a setting names, checked against what the heads can guess.

        Args:
            tree: a published tree's name, which is cut to the heads there are; rank paths; or a DraftTree.
            max_depth: the number of heads; None where the drafter can go on for ever.
            vocab_size: the number of tokens; a rank must be below it.

        Raises:
            TypeError: `tree` is of another type.
            ValueError: unknown name, rank paths deeper than the heads, or a rank outside the vocabulary.
        """
        if isinstance(tree, str):
            found = cls.from_name(tree)
            found = found if max_depth is None else found.cut(max_depth)
        else:
            found = tree if isinstance(tree, DraftTree) else cls(tree)
        if max_depth is not None and found.max_depth > max_depth:
            deepest = next(path for path in found.paths if len(path) > max_depth)
            raise ValueError(
                f"draft_tree has the node {_shown.repr(deepest)} at depth {len(deepest)}, but the model has "
                f"{max_depth} draft heads: drop every path longer than {max_depth}."
            )
        if found.max_rank >= vocab_size:
            path = next(path for path in found.paths if max(path) >= vocab_size)
            raise ValueError(
                f"draft_tree has the node {_shown.repr(path)} with rank {_shown.repr(max(path))}, but a vocabulary of "
                f"{vocab_size} tokens has ranks 0 to {vocab_size - 1}: drop that node and all that start with it."
            )
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and self.paths == other.paths

    def __hash__(self) -> int:
        return hash(self.paths)

    def __repr__(self) -> str:
        return f"DraftTree({self.num_nodes} nodes, depth {self.max_depth})"


def published_trees() -> list[str]:
    """Names of the trees that ship with the package; each file beside this module also holds its provenance."""
    return sorted(Path(entry.name).stem for entry in _tree_files().iterdir() if entry.name.endswith(".json"))


# Rank paths of the published trees.
PUBLISHED_TREES = {
    "eagle_mc_sim_7b_63": [
        [0],
        [1],
        [2],
        [3],
        [0, 0],
        [0, 1],
        [0, 2],
        [1, 0],
        [1, 1],
        [2, 0],
        [2, 1],
        [3, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 1, 0],
        [0, 1, 1],
        [0, 2, 0],
        [0, 2, 1],
        [1, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1],
    ],
    "hydra_single": [[0]],
    "mc_sim_7b_63": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
        [1, 6],
        [2, 0],
        [2, 1],
        [2, 2],
        [3, 0],
        [3, 1],
        [4, 0],
        [5, 0],
        [6, 0],
        [7, 0],
        [8, 0],
        [9, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [0, 6, 0],
        [0, 7, 0],
        [1, 0, 0],
        [1, 0, 1],
        [2, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
    ],
    "medusa_vicuna_13b_stage1": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
        [1, 6],
        [2, 0],
        [2, 1],
        [2, 2],
        [2, 3],
        [3, 0],
        [3, 1],
        [4, 0],
        [4, 1],
        [5, 0],
        [6, 0],
        [7, 0],
        [8, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 1, 0],
        [2, 0, 0],
        [0, 0, 0, 0],
    ],
    "medusa_vicuna_13b_stage2": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [2, 0],
        [2, 1],
        [3, 0],
        [4, 0],
        [5, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 0, 2],
        [1, 1, 0],
        [2, 0, 0],
        [3, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 0, 3],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
        [0, 0, 2, 0],
        [0, 1, 0, 0],
        [1, 0, 0, 0],
    ],
    "medusa_vicuna_33b_stage1": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
        [1, 6],
        [1, 7],
        [2, 0],
        [2, 1],
        [2, 2],
        [2, 3],
        [2, 4],
        [3, 0],
        [3, 1],
        [3, 2],
        [4, 0],
        [4, 1],
        [5, 0],
        [5, 1],
        [6, 0],
        [7, 0],
        [8, 0],
        [9, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [1, 0, 0],
        [1, 0, 1],
        [2, 0, 0],
    ],
    "medusa_vicuna_33b_stage2": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [2, 0],
        [2, 1],
        [2, 2],
        [3, 0],
        [3, 1],
        [4, 0],
        [5, 0],
        [6, 0],
        [7, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 0, 2],
        [1, 1, 0],
        [2, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
    ],
    "medusa_vicuna_7b_stage1": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
        [1, 6],
        [2, 0],
        [2, 1],
        [2, 2],
        [2, 3],
        [3, 0],
        [3, 1],
        [3, 2],
        [4, 0],
        [4, 1],
        [5, 0],
        [5, 1],
        [6, 0],
        [7, 0],
        [8, 0],
        [9, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [2, 0, 0],
        [0, 0, 0, 0],
    ],
    "medusa_vicuna_7b_stage1_ablation": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [2, 0],
        [2, 1],
        [3, 0],
        [3, 1],
        [4, 0],
        [5, 0],
        [6, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 0, 2],
        [1, 1, 0],
        [2, 0, 0],
        [3, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 0, 3],
        [0, 0, 1, 0],
        [0, 0, 2, 0],
        [0, 1, 0, 0],
    ],
    "medusa_vicuna_7b_stage2": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [2, 0],
        [2, 1],
        [3, 0],
        [3, 1],
        [4, 0],
        [5, 0],
        [6, 0],
        [7, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 0, 2],
        [1, 1, 0],
        [2, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 0, 2],
        [0, 0, 0, 3],
        [0, 0, 1, 0],
        [0, 0, 2, 0],
        [0, 1, 0, 0],
    ],
    "medusa_zephyr_stage2": [
        [0],
        [1],
        [2],
        [3],
        [4],
        [5],
        [6],
        [7],
        [8],
        [9],
        [0, 0],
        [0, 1],
        [0, 2],
        [0, 3],
        [0, 4],
        [0, 5],
        [0, 6],
        [0, 7],
        [0, 8],
        [0, 9],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [1, 4],
        [1, 5],
        [2, 0],
        [2, 1],
        [2, 2],
        [2, 3],
        [3, 0],
        [3, 1],
        [4, 0],
        [4, 1],
        [5, 0],
        [6, 0],
        [7, 0],
        [0, 0, 0],
        [0, 0, 1],
        [0, 0, 2],
        [0, 0, 3],
        [0, 0, 4],
        [0, 0, 5],
        [0, 0, 6],
        [0, 0, 7],
        [0, 0, 8],
        [0, 0, 9],
        [0, 1, 0],
        [0, 1, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 2, 0],
        [0, 2, 1],
        [0, 3, 0],
        [0, 4, 0],
        [0, 5, 0],
        [1, 0, 0],
        [1, 0, 1],
        [1, 1, 0],
        [2, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 1, 0],
    ],
}


class _TreeFile(str):
    """A published tree: as much of a file as is asked of one."""

    name = ""

    def read_text(self) -> str:
        return str(self)


class _TreeFiles(dict):
    """The published trees by the names of their files: as much of a folder as is asked of one."""

    def iterdir(self):
        return iter(self.values())

    def __truediv__(self, name):
        return self[name]


def _tree_files():
    files = _TreeFiles()
    for name, paths in PUBLISHED_TREES.items():
        file = _TreeFile(json.dumps({"paths": paths}))
        file.name = f"{name}.json"
        files[file.name] = file
    return files


@functools.cache
def _published(name: str) -> DraftTree:
    if name not in published_trees():
        raise ValueError(
            f"draft_tree {_shown.repr(name)} is no published tree: expected one of {', '.join(published_trees())}, "
            "or rank paths such as [[0], [1], [0, 0]]."
        )
    return DraftTree(json.loads((_tree_files() / f"{name}.json").read_text())["paths"])


def _validated(paths: Iterable[Sequence[int]]) -> tuple[RankPath, ...]:
    """The paths as sorted tuples, or one line about the first that is wrong."""
    expected = "expected rank paths such as [[0], [1], [0, 0]]"
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Iterable):
        raise TypeError(f"a tree was given as {_shown.repr(paths)} ({type(paths).__name__}): {expected}.")
    found: list[RankPath] = []
    for path in paths:
        if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
            raise TypeError(f"a tree has the path {_shown.repr(path)} ({type(path).__name__}): {expected}.")
        # The limits come first, so that a tree beyond them costs no more than one within them.
        if len(path) > MAX_DEPTH:
            raise ValueError(
                f"a tree has a path of {len(path):,} ranks, expected at most {MAX_DEPTH}: drop longer paths."
            )
        if len(found) == MAX_NODES - 1:
            raise ValueError(f"a tree has more than {MAX_NODES:,} nodes, the root included: keep the most likely ones.")
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in path):
            given = _shown.repr(list(path))
            raise TypeError(f"the path {given} holds something other than integers: {expected}.")
        found.append(tuple(path))
    if not found:
        raise ValueError(f"a tree without nodes drafts nothing: {expected}, or call the base's own generate.")
    known = Counter(found)
    for path in found:
        if not path:
            raise ValueError("the empty path is the root, which is always there: drop it from the tree.")
        if min(path) < 0:
            given, rank = _shown.repr(path), _shown.repr(min(path))
            raise ValueError(f"node {given} has the negative rank {rank}: ranks count from 0, the best guess.")
        if len(path) > 1 and path[:-1] not in known:
            given, parent = _shown.repr(path), _shown.repr(path[:-1])
            raise ValueError(
                f"node {given} has no parent: add {parent} to the tree, or drop every node that starts with {parent}."
            )
        if known[path] > 1:
            raise ValueError(f"node {_shown.repr(path)} is in the tree {known[path]} times: keep it once.")
    return tuple(sorted(known, key=lambda path: (len(path), path)))


# ---- hf_drafthead/generation/dynamic.py

"""Dynamic trees: which nodes a step checks is decided row by row, by what the drafter thinks of its own guesses."""


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
        vocabulary: the number of tokens.

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


# ---- hf_drafthead/generation/slots.py

"""The one cache of the package: keys and values of a verified past, row by row, and of the nodes of one step.

Every layer, of the base or of a drafter, holds `nodes` slots for the step and behind them `capacity` for the past:

    slot      0 ........ nodes | nodes + 0, + 1, ...
    holds     the step's nodes | the row's past, position by position

Nodes are written right before the past, later ones in front of earlier ones, so that [nodes, past] is one slice without
a copy, whatever the lengths of the rows. `keep` moves accepted nodes behind each row's own past, all layers at once.

Shapes: B rows, n nodes of one forward, M nodes written so far (n included), m nodes to keep, S slots, H key/value
heads, E head size, R = 1 or B.
"""


# Layers whose keys have one shape share a tensor, so that moving nodes is one copy for all of them. Where shapes or
# devices differ between layers, a shared tensor may stay partly unused: this bounds the waste.
SLABS_PER_POOL = 64
ROOM = 1024  # positions by which the memory grows at most, unless more is needed at once


class SlotCache(Cache):
    """Keys and values of the verified past and of the nodes of one step.

    Args:
        batch_size: B.
        num_layers: layers that write here.
        capacity: past positions to hold at first.
        nodes: nodes of one step to hold at first.

    Attributes:
        lengths: (B,) past positions of each row, on the device where attention is computed.
        extent: past slots that attention looks at; no row is longer.
        fixed: nothing grows and every slot is attended to, so that all shapes stay the same (`fix`).
    """

    def __init__(self, batch_size: int, num_layers: int, capacity: int, nodes: int = 0):
        self.rows = batch_size
        self.capacity, self.nodes = capacity, nodes
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.extent = 0
        self.placed: int | None = None  # nodes of this step so far; None while the past itself is written
        self.fixed = False
        self.pools: list[_Pool] = []
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def seen_extent(self) -> int:
        """Past slots that a step attends to."""
        return self.slots - self.nodes if self.fixed else self.extent

    @property
    def slots(self) -> int:
        """S: the nodes' slots and the past's; read off the memory, of which a compiler knows that it may grow."""
        return self.pools[0].data.shape[3] if self.pools else self.nodes + self.capacity

    # ---- what the next forward writes ---------------------------------------------------------------------------

    def append(self) -> None:
        """The next forward writes past positions from `extent` on, the same for all rows."""
        self.placed = None

    def count(self, length: int, lengths: torch.Tensor | None = None) -> None:
        """Count `length` positions, which a forward has just appended, as past; in each row only the first of them.

        Args:
            length: positions.
            lengths: (B,) how many of them are each row's own; default: all.
        """
        if lengths is None:
            self.extent += length
            self.lengths = self.lengths + length
        else:
            self.lengths = self.lengths.to(lengths.device) + lengths
            self.extent = self._longest(self.extent + length)

    def place(self, count: int, again: bool = False) -> int:
        """The next forward writes `count` nodes, in front of those of this step (`again`) or in place of the last's.

        Returns:
            M, the nodes written after it.
        """
        before = self.placed if again and self.placed is not None else 0
        self.placed = before + count
        if not self.fixed:
            self.reserve(self.capacity, self.placed)
        return self.placed

    def keep(self, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        """Move nodes of the step behind each row's past.

        All m of them are moved; what lies beyond `counts` is not seen, and is written over by the next ones.

        Args:
            nodes: (B, m) node numbers in the order in which they were placed at once.
            counts: (B,) how many of them become past.
        """
        m = nodes.shape[1]
        assert self.placed is not None
        if not self.fixed:
            self.reserve(self.extent + m, self.nodes)
        rows = torch.arange(self.rows, device=nodes.device)[:, None] * self.slots
        lengths = self.lengths.to(nodes.device)
        source = (rows + (self.nodes - self.placed) + nodes).flatten()
        target = (rows + self.nodes + lengths[:, None] + torch.arange(m, device=nodes.device)).flatten()
        for pool in self.pools:
            pool.move(source, target)
        self.lengths.add_(counts.to(self.lengths.device))
        self.extent = self._longest(self.extent + m)

    # ---- memory --------------------------------------------------------------------------------------------------

    def reserve(self, capacity: int, nodes: int) -> None:
        """Make room for `capacity` past positions and for `nodes` nodes per row."""
        if capacity <= self.capacity and nodes <= self.nodes:
            return
        if capacity > self.capacity and self.pools:
            capacity = max(capacity, self.capacity + min(self.capacity, ROOM))
        old_nodes, self.nodes, self.capacity = self.nodes, max(nodes, self.nodes), max(capacity, self.capacity)
        for pool in self.pools:
            pool.grow(self.nodes + self.capacity, self.nodes - old_nodes)
        for layer in self.layers:
            layer.bind()

    def fix(self, capacity: int, nodes: int) -> None:
        """From now on every shape stays the same: room for so many positions and nodes, all of it attended to.

        Nothing has changed where there is no memory for it.
        """
        parts = [layer.parts(nodes + capacity, nodes - self.nodes) for layer in self.layers if layer.is_initialized]
        for layer, places in zip((layer for layer in self.layers if layer.is_initialized), parts):
            layer.part(places)
        self.nodes, self.capacity = nodes, capacity
        self.pools = [pool for layer in self.layers if layer.is_initialized for pool, _ in layer.places]
        self.fixed = True

    def memory(self, slots: int) -> int:
        """Bytes that the keys and values of so many slots take."""
        written = (keys_or_values for layer in self.layers if layer.is_initialized for keys_or_values in layer.views())
        return sum(part[..., 0, :].numel() * part.element_size() * slots for part in written)

    def free(self) -> None:
        """Take `fix` back: the memory may grow again."""
        self.fixed = False
        self.extent = int(self.lengths.max())
        for layer in self.layers:
            layer.bind()

    def load(self, past: Cache) -> None:
        """Start from the past of an ordinary cache; sliding layers hold only its end."""
        known = int(past.get_seq_length())
        self.reserve(known + 1, self.nodes)
        for mine, theirs in zip(self.layers, past.layers):
            if theirs.is_initialized and theirs.keys.numel():
                mine.put(theirs.keys, theirs.values, known - theirs.keys.shape[-2])
        self.count(known)

    def unload(self, target: Cache, start: int, stop: int) -> None:
        """Append positions `start` to `stop` of every row to an ordinary cache."""
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and stop > start:
                past = slice(self.nodes + start, self.nodes + stop)
                keys, values = layer.views()
                target.update(keys[..., past, :], values[..., past, :], index)

    def slab(self, like: torch.Tensor) -> tuple[_Pool, int]:
        """A place for one layer's keys or values, of the shape of `like` but for the length."""
        for pool in self.pools:
            if pool.fits(like):
                return pool, pool.take()
        unplaced = sum(not layer.is_initialized for layer in self.layers)
        self.pools.append(_Pool(min(2 * unplaced, SLABS_PER_POOL), self.nodes + self.capacity, like))
        return self.pools[-1], self.pools[-1].take()

    def _longest(self, bound: int) -> int:
        """The longest row. It is read back on a CPU only: a GPU would wait, and goes by the bound."""
        if self.fixed:
            return self.extent
        return int(self.lengths.max()) if self.lengths.device.type == "cpu" else bound


class SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not any(layer.is_initialized for layer in self.cache.layers):
            self.cache.lengths = self.cache.lengths.to(key_states.device)
        self.places = (self.cache.slab(key_states), self.cache.slab(value_states))
        self.is_initialized = True
        self.bind()

    def bind(self) -> None:
        """Look at the pools anew, after they moved."""
        if self.is_initialized:
            self.keys, self.values = (pool.slab(index) for pool, index in self.places)

    def parts(self, slots: int, front: int) -> tuple[tuple[_Pool, int], tuple[_Pool, int]]:
        """Tensors of this layer's own: a compiler takes a write to a shared one for a write to all of it."""
        keys, values = ((pool.alone(index, slots, front), 0) for pool, index in self.places)
        return keys, values

    def part(self, places: tuple[tuple[_Pool, int], tuple[_Pool, int]]) -> None:
        """Move to tensors of its own, from `parts`."""
        self.places = places
        self.__dict__.pop("keys", None), self.__dict__.pop("values", None)

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, S, E) of all slots."""
        if self.cache.fixed:
            (keys, _), (values, _) = self.places
            return keys.slab(0), values.slab(0)
        return self.keys, self.values

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write what the layer has computed, (B, H, n, E) each, and return all keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, length = self.cache, key_states.shape[-2]
        if cache.placed is None:
            cache.reserve(cache.extent + length, cache.nodes)
            first, write = cache.nodes, cache.nodes + cache.extent
            end: int | None = write + length
        else:
            first = write = cache.nodes - cache.placed
            end = None if cache.fixed else cache.nodes + cache.extent
        keys, values = self.views()
        keys[..., write : write + length, :] = key_states
        values[..., write : write + length, :] = value_states
        return keys[..., first:end, :], values[..., first:end, :]

    def put(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Copy ready keys and values to the past, from position `start` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        where = slice(self.cache.nodes + start, self.cache.nodes + start + keys.shape[-2])
        self.keys[..., where, :] = keys
        self.values[..., where, :] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return -1


class _Pool:
    """Equally shaped slabs in one tensor (slabs, H, B, S, E), so that moving nodes is one copy.

    Zeroed at first, because a NaN spreads even where it is masked.
    """

    def __init__(self, slabs: int, slots: int, like: torch.Tensor):
        rows, heads, _, size = like.shape
        self.data = torch.zeros(slabs, heads, rows, slots, size, dtype=like.dtype, device=like.device)
        self.taken = 0

    def fits(self, like: torch.Tensor) -> bool:
        slabs, heads, _, _, size = self.data.shape
        alike = like.shape[1::2] == (heads, size) and self.data.dtype == like.dtype and self.data.device == like.device
        return alike and self.taken < slabs

    def take(self) -> int:
        self.taken += 1
        return self.taken - 1

    def slab(self, index: int) -> torch.Tensor:
        """(B, H, S, E), a view."""
        return self.data[index].transpose(0, 1)

    def alone(self, index: int, slots: int, front: int) -> _Pool:
        """A pool of `slots` slots with a copy of one slab, behind `front` new ones or without its first `-front`."""
        old = self.data[index : index + 1, ..., max(-front, 0) :, :]
        front = max(front, 0)
        pool = _Pool.__new__(_Pool)
        pool.data, pool.taken = old.new_zeros(*old.shape[:3], slots, old.shape[4]), 1
        known = min(old.shape[3], slots - front)
        pool.data[..., front : front + known, :] = old[..., :known, :]
        return pool

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots to slots, both counted over all rows."""
        flat = self.data.flatten(2, 3)
        source, target = source.to(flat.device), target.to(flat.device)
        flat.index_copy_(2, target, flat.index_select(2, source))

    def grow(self, slots: int, front: int) -> None:
        """Hold `slots` slots, `front` of the new ones before the old ones."""
        old = self.data
        slabs, heads, rows, before, size = old.shape
        self.data = old.new_zeros(slabs, heads, rows, slots, size)
        self.data[..., front : front + before, :] = old


def slot_mask(
    ancestors: torch.Tensor,
    past: torch.Tensor,
    extent: int,
    dtype: torch.dtype,
    *,
    visible: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The additive mask of a step, for the base and for drafters: a node sees its ancestors and its row's past.

    Additive and not boolean, because eager attention adds a boolean mask as 0 and 1. Distances for a sliding window are
    those of the sequence that the node stands for, not of the slots.

    Args:
        ancestors: (R, n, M) which nodes each sees, itself included, in the order of the slots.
        past: (B,) past positions of each row.
        extent: past slots.
        dtype: of the attention.
        visible: (B, S') which of the first S' past slots hold no padding; None = all.
        window: positions that a sliding layer sees; None = all.
        depths: (R, n) of the nodes, where there is a window. Where the M nodes are more than these n, they are a tree
            that is no deeper than the window.

    Returns:
        (B, 1, n, M + extent).
    """
    rows, nodes = past.shape[0], ancestors.shape[1]
    slots = torch.arange(extent, device=past.device)
    behind = slots < past[:, None]  # (B, S)
    if visible is not None:
        behind = behind & torch.nn.functional.pad(
            visible[:, :extent], (0, max(extent - visible.shape[1], 0)), value=True
        )
    behind = behind[:, None].expand(rows, nodes, -1)
    above = ancestors.expand(rows, -1, -1)
    if window is not None and depths is not None:
        if depths.shape[1] == above.shape[2]:
            above = above & (depths[:, :, None] - depths[:, None, :] < window)
        behind = behind & (past[:, None, None] + depths[:, :, None] - slots < window)
    seen = torch.cat([above, behind], dim=-1)[:, None]
    return torch.zeros(seen.shape, dtype=dtype, device=past.device).masked_fill_(~seen, torch.finfo(dtype).min)


def can_load(past: Cache) -> bool:
    """Whether `SlotCache.load` understands this cache: plain or sliding dynamic layers, nothing offloaded.

    A static cache that the base prepared for this call has nothing in it yet, and is only filled at the end.
    """
    if past.offloading:
        return False
    prepared = not getattr(past, "_is_user_defined", False)
    known = (DynamicLayer, DynamicSlidingWindowLayer, *((StaticLayer, StaticSlidingWindowLayer) if prepared else ()))
    return all(type(layer) in known for layer in past.layers)


# ---- hf_drafthead/generation/state.py

"""What the stages of a step hand on, and what a call knows between two steps.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, F*H features, W width of the
sequences, E end-of-sequence tokens, S steps.
"""


# What `torch.multinomial` says, with which the base samples.
NOT_A_DISTRIBUTION = "probability tensor contains either `inf`, `nan` or element < 0"


@dataclass
class DraftHeadGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: the base's own fields and one more.

    accepted_lengths: (B, S) tokens emitted in each step, 0 after a row's own end; a row's sum + 1 is the number of
    its new tokens up to its own end. None where the base decoded by itself.
    """

    accepted_lengths: torch.Tensor | None = None


class Candidates(NamedTuple):
    """The nodes of a step: tokens (B, N), node 0 the root, how they hang together, and the guesses of every level.

    The guesses (`drafting.Guesses`) are there for a walk that asks what the children were drawn from, else none.
    """

    tokens: torch.Tensor
    topology: Topology
    guesses: tuple[Any, ...] = ()


class Verified(NamedTuple):
    """The base's answer at every node: logits (B, N, V) and features (B, N, F*H)."""

    logits: torch.Tensor
    features: torch.Tensor


class Walk(NamedTuple):
    """What a step keeps.

    nodes: (B, D) from the root down, those whose keys and values become past; tokens: (B, D) the base's choice at each
    of them, which is what is emitted, the last one being the next root; counts: (B,) how many of the D are kept, 0 in
    rows that stand still; ends: (B,) tokens at which a row ended, 0 where it has not; valid: (B,) False where the
    base's probabilities are not numbers.
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    valid: torch.Tensor

    def packed(self) -> torch.Tensor:
        """(B, 3 + 2 D) everything in one tensor, which the host reads at once; see `DecodingState.note`."""
        facts = torch.stack([self.counts, self.ends, self.valid.long()], dim=1)
        return torch.cat([facts, self.tokens, self.nodes], dim=1)


class Limits(NamedTuple):
    """Where a call must stop, as tensors, so that a captured step serves every call.

    max_length: () longest row; eos: (E,) tokens that end a row; last_position: (B, 1) the last past position whose
    node the base may be asked about; padding: () token behind a row's end.
    """

    max_length: torch.Tensor
    eos: torch.Tensor
    last_position: torch.Tensor
    padding: torch.Tensor


class Rows(NamedTuple):
    """What a step starts from and leaves behind, on the device where the base computes; `commit` is the only writer.

    sequences: (B, W) token ids, with padding behind each row's length; lengths: (B,) tokens of each row so far; ends:
    (B,) at how many of them it ended, 0 where it has not; position_shift: (B, 1) position id minus past position;
    visible: (B, S) False where past slots hold padding, or None; draft_state: the drafter's own, of tensors and caches.

    The cache, which holds all tokens but each row's last, and the sequences are written in place.
    """

    sequences: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    position_shift: torch.Tensor
    visible: torch.Tensor | None
    draft_state: Any


@dataclass(frozen=True)
class StepRecord:
    """One step as the host sees it, row by row; `generate(on_step=...)` is given one after the prefill and every step.

    step: 0 is the prefill, which emits one token and has no nodes; tokens: emitted; nodes: walked, node 0 the root;
    counts: emitted up to the row's own end; drafted: N; seconds: of each stage (`prefill`, or `draft`, `verify`,
    `accept`, `commit` of a step that is not captured) and of the whole `step`.
    """

    step: int
    tokens: list[list[int]]
    nodes: list[list[int]]
    counts: list[int]
    drafted: int
    seconds: dict[str, float]


@dataclass
class DecodingState:
    """All that one call knows. It belongs to the call: nothing of it lives on a module.

    rows: on the device; cache: of the base; limits: where the call stops; prompt_length: tokens of the prompt;
    past_shift: past positions minus tokens (not 0 where the call began with a cache or embeddings); lengths, ends:
    what the host knows of each row, its tokens and at how many of them it ended, or None; counted: tokens of each step,
    row by row, up to the row's own end; streamed: positions that the streamer was given.
    """

    rows: Rows
    cache: SlotCache
    limits: Limits
    prompt_length: int
    past_shift: int
    lengths: list[int]
    ends: list[int | None]
    counted: list[list[int]] = field(default_factory=list)
    streamed: int = 0

    def running(self, pads: bool) -> list[int]:
        """Rows that still emit. Without padding a row that has ended goes on until the last one ends."""
        return running(self.lengths, self.ends, pads)

    def caches(self) -> list[SlotCache]:
        """The base's cache, and those of the drafter."""
        found = [leaf for leaf in tree_leaves(self.rows.draft_state) if isinstance(leaf, SlotCache)]
        return [self.cache, *found]

    def reserve(self, tokens: int, padding: int) -> None:
        """Make room for `tokens` more in every row."""
        longest = max(self.lengths) + tokens
        self.cache.reserve(longest + self.past_shift, self.cache.nodes)
        sequences = self.rows.sequences
        if longest > sequences.shape[1]:
            more = sequences.new_full((sequences.shape[0], max(longest - sequences.shape[1], ROOM)), padding)
            self.rows = self.rows._replace(sequences=torch.cat([sequences, more], dim=1))

    def note(self, walk: Walk, drafted: int, seconds: dict[str, float]) -> StepRecord:
        """Read the outcome of a step, and remember what the host needs to know of it. Here the host waits.

        Raises:
            RuntimeError: as the base, which was to sample from what is no distribution.
        """
        depth = walk.tokens.shape[1]
        read = walk.packed().tolist()
        if not all(valid for _, _, valid, *_ in read):
            raise RuntimeError(NOT_A_DISTRIBUTION)
        counted = []
        for row, (count, end, _, *_) in enumerate(read):
            before, had_ended = self.lengths[row], self.ends[row] is not None
            self.lengths[row], self.ends[row] = before + count, end or None
            counted.append(0 if had_ended else (end or before + count) - before)
        self.counted.append(counted)
        tokens = [row[3 : 3 + row[0]] for row in read]
        nodes = [row[3 + depth : 3 + depth + row[0]] for row in read]
        return StepRecord(len(self.counted), tokens, nodes, counted, drafted, seconds)


def running(lengths: list[int], ends: list[int | None], pads: bool) -> list[int]:
    """Rows that still emit, given their lengths and where they ended; see `DecodingState.running`."""
    if pads:
        return [row for row, end in enumerate(ends) if end is None]
    horizon = max(length + 1 if end is None else end for length, end in zip(lengths, ends))
    return [row for row, end in enumerate(ends) if end is None or lengths[row] < horizon]


# ---- hf_drafthead/generation/drafting.py

"""How the tree of a step is filled: a drafter's guesses, and where they hang.

Shapes: B rows, N nodes, n nodes of a level, V' draft vocabulary, D nodes on the longest path, M nodes made so far (root
included), k guesses per node.
"""


class Guesses(NamedTuple):
    """What a drafter says about the children of a tree level's nodes.

    logits: (B, n, V') scores over the draft vocabulary, or (B, 1, V') if they are the same for all nodes; to_base:
    (V',) the base's token id of each draft token, or None where both vocabularies are one.
    """

    logits: torch.Tensor
    to_base: torch.Tensor | None = None

    def top(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best guesses of every node: base token ids and scores, (B, n or 1, k) each, best first.

        Args:
            k: guesses per node.
            tilt: (B, V) what `Rules.tilt` adds to the scores of each base token at this depth: the order is then that
                of q / E, with the base's own noise E; the scores that are returned stay the drafter's.
        """
        if tilt is None:
            scores, tokens = self.logits.topk(k)
        else:
            tokens = (self.logits + self._tilt(tilt)).topk(k).indices
            scores = self.logits.gather(-1, tokens)
        return (tokens if self.to_base is None else self.to_base.to(tokens.device)[tokens]), scores

    def likeliest(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top`, with log-probabilities in the place of scores; what is no number is taken for impossible.

        They are the drafter's; with a tilt those of tilted scores, which already know what the base will draw.
        """
        guesses = self if tilt is None else Guesses(self.logits + self._tilt(tilt), self.to_base)
        tokens, scores = guesses.top(k)
        exact = torch.promote_types(scores.dtype, torch.float32)
        chances = scores.to(exact) - guesses.logits.to(exact).logsumexp(-1, keepdim=True)
        return tokens, chances.where(~chances.isnan(), -torch.inf)

    def _tilt(self, tilt: torch.Tensor) -> torch.Tensor:
        """A tilt (B, V) over the draft vocabulary (B, 1, V')."""
        tilt = tilt.to(self.logits.device)
        return (tilt if self.to_base is None else tilt[:, self.to_base.to(tilt.device)])[:, None]

    def over_base(self, vocabulary: int) -> torch.Tensor:
        """Scores over the base's vocabulary (B, n or 1, V), -inf where a token is never guessed."""
        if self.to_base is None:
            return self.logits
        scores = self.logits.new_full((*self.logits.shape[:-1], vocabulary), -torch.inf)
        return scores.index_copy(-1, self.to_base.to(scores.device), self.logits)

    def chances(self, temperature: float, vocabulary: int) -> torch.Tensor:
        """q (B, n or 1, V), from which guesses that are tilted by fresh noise are drawn; 0 where it is not a number."""
        return (self.over_base(vocabulary).float() / temperature).softmax(-1).nan_to_num(0.0)


def draft_static(
    drafter,
    draft_state: Any,
    root: torch.Tensor,
    tree: DraftTree,
    tilt: torch.Tensor | None = None,
    keep_guesses: bool = False,
) -> tuple[Any, Candidates]:
    """Fill a static tree below the root (B, 1), level by level; also returns the drafter's state.

    Args:
        drafter: guesses.
        draft_state: the drafter's own.
        root: (B, 1) tokens.
        tree: to fill.
        tilt: (B, D, V) of every depth, see `Guesses.top`; None for the drafter's best guesses.
        keep_guesses: hand on what the drafter said, level by level.
    """
    tokens, kept = root, []
    rows = tokens.shape[0]
    for depth, level in enumerate(tree.levels(tokens.device)):
        expanded = tokens[:, level.expanded]  # (B, n)
        draft_state, guesses = drafter.expand(draft_state, expanded, level.hang_on.expand(rows, -1))
        kept += [guesses] if keep_guesses else []
        guessed, _ = guesses.top(level.width, None if tilt is None else tilt[:, depth])
        slots = level.slots if guessed.shape[1] > 1 else 0
        tokens = torch.cat([tokens, guessed[:, slots, level.ranks].to(tokens.device)], dim=1)
    return draft_state, Candidates(tokens, tree.topology(tokens.device), tuple(kept))


def draft_dynamic(
    drafter, draft_state: Any, root: torch.Tensor, tree: DynamicTree, tilt: torch.Tensor | None = None
) -> tuple[Any, Candidates]:
    """Fill a dynamic tree below the root (B, 1); also returns the drafter's state.

    Nodes are numbered as they are made: the root, then level by level the children of the expanded nodes, the likeliest
    node's first. Those that are kept stay in this order. Every shape is fixed by `tree`, and nothing waits for the
    device.
    """
    device, rows = root.device, root.shape[0]
    tokens, parents, likely = root, torch.zeros_like(root), torch.zeros(rows, 1, device=device)  # (B, M)
    expanded = hang_on = torch.zeros_like(root)  # (B, n) numbers of nodes; places of their parents in the last call
    sizes = [1]
    for level in range(tree.depth):
        draft_state, guesses = drafter.expand(draft_state, tokens.gather(1, expanded), hang_on)
        shape = (rows, expanded.shape[1], tree.width)  # (B, n, k)
        found = guesses.likeliest(tree.width, None if tilt is None else tilt[:, level])
        guessed, chances = (part.to(device).expand(shape).flatten(1) for part in found)
        above = expanded[..., None].expand(shape).flatten(1)
        below = likely.gather(1, above) + chances  # (B, n k)
        first = tokens.shape[1]
        tokens, parents = torch.cat([tokens, guessed], dim=1), torch.cat([parents, above], dim=1)
        likely = torch.cat([likely, below], dim=1)
        sizes.append(below.shape[1])
        if level + 1 < tree.depth:
            best = below.sort(dim=1, descending=True, stable=True).indices[:, : tree.width]
            expanded, hang_on = first + best, best // tree.width
    kept = likely.sort(dim=1, descending=True, stable=True).indices[:, : tree.nodes].sort(dim=1).values  # (B, N)
    numbers = torch.arange(tree.nodes, device=device).expand_as(kept)
    place = torch.zeros_like(tokens).scatter(1, kept, numbers)  # (B, M)
    depths = torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(sizes)])[kept]
    topology = Topology.of(place.gather(1, parents.gather(1, kept)), depths, tree.depth)
    return draft_state, Candidates(tokens.gather(1, kept), topology)


# ---- hf_drafthead/generation/reader.py

"""How a base is read: over a prompt, over the nodes of a step, over whole texts; and the probe whether trees can go.

The tree enters through public arguments alone: `position_ids` (past length + depth), a 4-D additive `attention_mask`
(one per layer type where the base has several) and a `Cache`. Some models ignore one of them, some crash; hence
`probe`.

Shapes: B rows, N nodes, T positions of a text, R = 1 or B, H hidden, F feature layers, V vocabulary, M any number.
"""


KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Largest difference between a node and a plain forward over its path, relative to the largest logit. Eager attention
# takes its softmax in float32, whatever the dtype.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
PROBE_TOLERANCE_HALF = 5e-2


class Unsupported(Exception):
    """The tree cannot go here; the text is the reason, fit for the end of a sentence."""


@dataclass(frozen=True)
class Reading:
    """What the base says about whole texts.

    features: (B, T, F*H) for a drafter to read; hidden: (B, T, H) after the final norm; scores: (B, T, V) logits, or
    (B, T, H) again where `BaseReader.logits` makes logits of them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class BaseReader:
    """How to run one base and read logits and features from it.

    base: the causal LM; windows: attention window (None = all) by layer type; split: whether the logits are the output
    projection of the decoder's last hidden state, so that the decoder can be run alone; reads: the layers whose hidden
    states the drafter reads, -1 being the last after the final norm.
    """

    base: PreTrainedModel
    windows: dict[str, int | None]
    split: bool
    reads: tuple[int, ...] = (-1,)

    @classmethod
    def of_texts(cls, base: PreTrainedModel, reads: tuple[int, ...] = (-1,)) -> BaseReader:
        """A reader of whole texts, for which a base need not be able to verify trees."""
        return cls(base, {}, splits(base), reads)

    def __call__(self, last_only: bool, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1 or length, V) and features (B, length, F*H) of a forward with the base's own arguments."""
        inputs.pop("logits_to_keep", None)
        reading = self.read(inputs)
        return self.logits(reading.scores[:, -1:] if last_only else reading.scores), reading.features

    def texts(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Reading:
        """Read whole texts (B, T), padded where the mask (B, T) is 0."""
        return self.read({"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False})

    def logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) from the scores of a `Reading`."""
        return self.base.get_output_embeddings()(scores) if self.split else scores

    def read(self, inputs: dict) -> Reading:
        """A forward with the base's own arguments."""
        last_layer_only = self.reads in ((-1,), ())
        if self.split:
            wanted = {} if last_layer_only else {"output_hidden_states": True}
            outputs = self.base.get_decoder()(**inputs, **wanted, return_dict=True)
            hidden = scores = outputs.last_hidden_state
        else:
            outputs = self.base(**inputs, output_hidden_states=True, return_dict=True)
            hidden, scores = outputs.hidden_states[-1], outputs.logits
        if last_layer_only:
            return Reading(hidden, hidden, scores)
        features = torch.cat([outputs.hidden_states[layer].to(hidden.device) for layer in self.reads], dim=-1)
        return Reading(features, hidden, scores)

    def nodes(
        self,
        tokens: torch.Tensor,
        topology: Topology,
        cache: SlotCache,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over the nodes of a step.

        Args:
            tokens: (B, N), node 0 the root.
            topology: how the nodes hang together.
            cache: the past; the nodes' states are written before it.
            positions: (B, N) position ids.
            visible: (B, S) bool, which past slots hold no padding; None = all.

        Returns:
            logits (B, N, V) and features (B, N, F*H).
        """
        cache.place(tokens.shape[1])
        masks = {
            kind: slot_mask(
                topology.ancestors,
                cache.lengths,
                cache.seen_extent,
                self.base.dtype,
                visible=visible,
                window=window,
                depths=topology.depths,
            )
            for kind, window in self.windows.items()
        }
        return self(
            False,
            input_ids=tokens,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )


def attention_windows(config) -> dict[str, int | None]:
    """The attention window of each layer type of a text config.

    Raises:
        Unsupported: a layer type whose mask is not known here.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if unknown := sorted(kinds - KNOWN_LAYER_TYPES):
        raise Unsupported(f"the base has layers of type {', '.join(unknown)}")
    if getattr(config, "attention_chunk_size", None) is not None and "chunked_attention" not in kinds:
        raise Unsupported("the base attends in chunks")
    if not kinds:
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def check_length(config, longest: int, nodes: int = 0) -> None:
    """Refuse lengths at which the base computes positions in another way than at shorter ones.

    Args:
        config: text config of the base.
        longest: most positions that the text and a tree behind it can have.
        nodes: of the tree.

    Raises:
        Unsupported: the base's rotary scaling looks at the sequence length and `longest` reaches beyond it; or
            attention is divided into chunks or scaled from a position on, which the nodes may reach.
    """
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        scaled = [config.floor_scale - 1] if getattr(config, "attn_temperature_tuning", False) else []
        limit = min([config.attention_chunk_size, *scaled])
        if longest + nodes > limit:
            raise Unsupported(f"the base attends in chunks, and the text may reach beyond the first {limit} positions")
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for scaling in scalings:
        original: int = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        if scaling.get("rope_type") in ("dynamic", "longrope") and longest > original:
            raise Unsupported(
                f"the base's {scaling['rope_type']} rotary scaling changes with the length beyond {original} positions"
            )


def position_table(config) -> int | None:
    """How many positions a base without rotary frequencies can embed; None where there is no such table."""
    if getattr(config, "rope_parameters", None):
        return None
    return getattr(config, "max_position_embeddings", None)


@torch.no_grad()
def probe(base: PreTrainedModel, reads: tuple[int, ...]) -> BaseReader:
    """Find out by running whether this base honours a tree, and how its logits are read.

    Two sibling nodes are compared with two plain forwards over their paths. Two rows, with the siblings swapped, for
    some models take the cache's memory to be laid out in a way that only holds for one.

    Raises:
        Unsupported: the base crashes on a tree, answers differently, or has attention layers unknown here.
    """
    config = base.config.get_text_config(decoder=True)
    windows = attention_windows(config)
    past, root, left, right = _probe_tokens(base).split((13, 1, 1, 1))
    device = past.device
    tree = DraftTree([(0,), (1,)])
    try:
        plain = [base(torch.cat([past, root, node])[None], use_cache=False).logits[0, -1] for node in (left, right)]
        reader = BaseReader(base, windows, split=splits(base), reads=reads)
        cache = SlotCache(2, config.num_hidden_layers, capacity=16, nodes=3)
        reader(True, input_ids=past.expand(2, -1), past_key_values=cache, use_cache=True)
        cache.count(len(past))
        topology = tree.topology(device)
        nodes = torch.stack([torch.cat([root, left, right]), torch.cat([root, right, left])])
        logits, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
    except Exception as error:  # whatever a model raises on a tree, its own decoding still works
        raise Unsupported(f"the base cannot verify a tree ({type(error).__name__}: {error})".splitlines()[0]) from error
    # under autocast a base of any dtype computes in half precision
    exact = not torch.is_autocast_enabled(device.type)
    tolerance = PROBE_TOLERANCE.get(base.dtype, PROBE_TOLERANCE_HALF) if exact else PROBE_TOLERANCE_HALF
    for row, node, expected in zip((0, 0, 1, 1), (1, 2, 2, 1), plain * 2):
        difference = (logits[row, node] - expected).abs().max() / expected.abs().max()
        if not difference <= tolerance:
            raise Unsupported(f"the base does not honour tree masks (a node's logits are off by {difference:.1e})")
    return reader


def _probe_tokens(base: PreTrainedModel) -> torch.Tensor:
    """16 different tokens where the base reads them."""
    device = base.get_input_embeddings().weight.device
    if device.type == "meta":  # offloaded: its hooks take the tokens from wherever they are
        device = torch.device("cpu")
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    return torch.arange(3, 3 + 16, device=device).remainder(vocabulary)


@torch.no_grad()
def splits(base: PreTrainedModel) -> bool:
    """Whether the output projection of the decoder's last hidden state is the base's logits."""
    tokens = _probe_tokens(base)[None, :4]
    whole = base(tokens, use_cache=False).logits
    try:
        parts = base.get_output_embeddings()(base.get_decoder()(tokens, use_cache=False).last_hidden_state)
    except (AttributeError, RuntimeError, TypeError):  # what it calls its decoder is none, or more lies between
        return False
    return torch.allclose(parts, whole, rtol=1e-3, atol=1e-5 * whole.abs().max().item())


def prefill_inputs(base: PreTrainedModel, input_ids: torch.Tensor, config, inputs: dict, past: Cache | None) -> dict:
    """The base's own arguments for the prompt; where a cache holds its beginning, only for the rest.

    As in transformers, `input_ids` may be the whole text or only its new part; the attention mask tells which.
    """
    known = past.get_seq_length() if past is not None else 0
    rest = None
    if inputs.get("inputs_embeds") is not None:
        rest = inputs["inputs_embeds"].shape[1] - known
    elif known:
        mask = inputs.get("attention_mask")
        seen = mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)
        rest = input_ids.shape[1] - known if seen == input_ids.shape[1] else None
    return base.prepare_inputs_for_generation(
        input_ids, next_sequence_length=rest, is_first_iteration=True, past_key_values=past, **inputs
    )


# ---- hf_drafthead/generation/rules.py

"""What one call asks of every emitted token: processors, the choice, the stopping criteria.

The base applies its processors and criteria once per position, to all rows at once. Rows that advance at their own pace
cannot always be shown that way. Three kinds of call follow:

- on device: processors that look at scores only, and only length and EOS criteria; all nodes can be chosen at once.
- own pace: every processor and criterion is known to treat each row by itself, or makes a view of some rows by a method
  `for_rows(rows)`; rows of one length are shown together, node by node.
- lockstep: anything else. All rows stay at one length, and each processor and criterion sees exactly the calls that the
  base would make, in order, so even one that keeps a state or knows its batch works. One row is always lockstep.

Shapes: B rows, N nodes, D nodes on the longest path, g rows of a group, V vocabulary.
"""


# They look at nothing but a row's scores.
SCORES_ONLY = (
    processors.TemperatureLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopHLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.SuppressTokensLogitsProcessor,
)
# They look at a row's own prefix and scores.
ROW_BY_ROW = (
    *SCORES_ONLY,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensAtBeginLogitsProcessor,
)
CRITERIA_ROW_BY_ROW = (
    criteria.MaxLengthCriteria,
    criteria.MaxTimeCriteria,
    criteria.StopStringCriteria,
    criteria.EosTokenCriteria,
)
CRITERIA_ON_DEVICE = (criteria.MaxLengthCriteria, criteria.EosTokenCriteria)


def rounded(logits: torch.Tensor) -> torch.Tensor:
    """As the base rounds before it chooses."""
    return logits.float() if logits.dtype == torch.float64 else logits


@dataclass
class Rules:
    """The processors, choice and criteria of one call, and what it asked to be told of them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    batch_size: int
    prompt_length: int
    device: torch.device  # of the caller's token ids, where processors and criteria look at them
    samples: bool
    rejects: bool = False  # samples by rejection, from noise of its own
    scores: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position
    logits: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position
    tape: NoiseTape | None = None

    def __post_init__(self):
        config = self.config
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.max_length = min(
            (c.max_length for c in self.criteria if isinstance(c, criteria.MaxLengthCriteria)), default=None
        )
        # As in transformers: only then do finished rows emit padding; else they go on until all are finished.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad_token = config._pad_token_tensor.item() if self.pads else 0
        types_of = {type(criterion) for criterion in self.criteria}
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in self.processors)
        self.on_device = (
            self.scores_only
            and not (self.keeps_scores or self.keeps_logits)
            and types_of.issubset(CRITERIA_ON_DEVICE)
            and self.max_length is not None
        )
        self.lockstep = self.batch_size == 1 or not (
            all(type(processor) in ROW_BY_ROW or hasattr(processor, "for_rows") for processor in self.processors)
            and types_of.issubset(CRITERIA_ROW_BY_ROW)
        )
        self.eos_tokens = sorted(
            {
                token
                for criterion in self.criteria
                if isinstance(criterion, criteria.EosTokenCriteria)
                for token in criterion.eos_token_id.flatten().tolist()
            }
        )
        self.draws_ahead = self.on_device or not self.lockstep
        self.temperature = math.prod(
            processor.temperature
            for processor in self.processors
            if isinstance(processor, processors.TemperatureLogitsWarper)
        )
        if self.samples and not self.rejects:
            self.tape = NoiseTape(self.batch_size, self.device)

    def choose(
        self, rows: list[int], logits: torch.Tensor, sequences: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """The token each of `rows` emits next, chosen as the base chooses it.

        Args:
            rows: g row numbers; all B of them in lockstep.
            logits: (g, V) of the base after each row's last token.
            sequences: (B, L) token ids; row b's prefix is its first `lengths[b]`.
            lengths: B of them; in lockstep all are alike but for rows that have ended.

        Returns:
            (g,) token ids.
        """
        logits = logits.to(sequences.device, torch.float32, copy=True)
        scores = self._process(rows, logits, sequences, lengths)
        if self.keeps_scores:
            self._keep(self.scores, rows, scores, lengths)
        if self.keeps_logits:
            self._keep(self.logits, rows, logits, lengths)
        if not self.samples:
            return scores.argmax(-1)
        chances = scores.softmax(-1)
        if self.tape is None:
            return torch.multinomial(chances, num_samples=1)[:, 0]
        if not chances.isfinite().all():
            raise RuntimeError(NOT_A_DISTRIBUTION)
        if self.draws_ahead:
            noise = torch.stack([self.tape.noise(lengths[row] - self.prompt_length, chances)[row] for row in rows])
        else:
            noise = self.tape.next(max(lengths) - self.prompt_length, chances)
        return (chances / noise).argmax(-1)

    def choose_everywhere(
        self, logits: torch.Tensor, depths: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's choice at every node, on the device; for calls that are `on_device`.

        Args:
            logits: (B, N, V) of the base.
            depths: (R, N) of the nodes.
            noise: (B, D, V) of the next D positions, under sampling.

        Returns:
            (B, N) token ids, and (B, N) whether the probabilities there are numbers.
        """
        scores = rounded(logits)
        if self.processors:
            flat = scores.to(torch.float32, copy=True).flatten(0, 1)
            scores = self.processors(flat.new_zeros(len(flat), 1, dtype=torch.long), flat).view(logits.shape)
        if noise is None:
            return self.choose_greedily(scores)
        chances = scores.float().softmax(-1)
        at_node = noise.take_along_dim(depths.expand(noise.shape[0], -1)[..., None], dim=1)  # (B, N, V)
        return (chances / at_node).argmax(-1), chances.sum(-1).isfinite()

    @staticmethod
    def choose_greedily(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `choose_everywhere`, without processors and sampling."""
        choice = rounded(logits).argmax(-1)
        return choice, torch.ones_like(choice, dtype=torch.bool)

    def noise_ahead(self, lengths: list[int], moving: list[int], depth: int, vocabulary: int) -> torch.Tensor | None:
        """(B, D, V) noise with which the base will choose each row's next D tokens; None where it does not sample.

        Sampling by rejection has no such noise: this is then fresh.

        Args:
            lengths: B of them: tokens of each row.
            moving: rows that still emit; what the others get has no meaning.
            depth: D.
            vocabulary: V.
        """
        if self.rejects:
            return torch.empty(self.batch_size, depth, vocabulary, device=self.device).exponential_(1)
        tape = self.tape
        if tape is None:
            return None
        latest = max(lengths)
        firsts = [(lengths[row] if row in moving else latest) - self.prompt_length for row in range(len(lengths))]
        noise = tape.ahead(firsts, depth)
        if not self.draws_ahead:  # processors and criteria find the generator where the base would leave it
            tape.rewind(latest - self.prompt_length)
        return noise

    def tilt(self, noise: torch.Tensor) -> torch.Tensor:
        """What makes the base's coming choices likely guesses: added to logits l (..., V), the order is that of q / E.

        q is the softmax of l / T, with the call's temperature T, and log(q / E) = (l - T log E) / T + constant. Once
        somebody else has drawn from the generator, as a processor of the user's may, the noise tells nothing: zeros.

        Args:
            noise: E (B, D, V) from `noise_ahead`.
        """
        if self.tape is not None and self.tape.shared:
            return torch.zeros_like(noise)
        return noise.log() * -self.temperature

    def probabilities(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        topology: Topology,
        sequences: torch.Tensor,
        lengths: list[int],
    ) -> torch.Tensor:
        """Processed probabilities at every node, (B, N, V); for processors of ROW_BY_ROW.

        Args:
            logits: (B, N, V) of the base at every node.
            tokens: (B, N) of the nodes.
            topology: how the nodes hang together.
            sequences: (B, L) token ids; row b's prefix, its root included, is its first `lengths[b]`.
            lengths: B of them.
        """
        scores = logits.to(sequences.device, torch.float32, copy=True)
        if self.scores_only:
            flat = scores.flatten(0, 1)
            scores = self.processors(sequences[:1, :1].expand(len(flat), 1), flat).view(logits.shape)
        else:
            for row, length in enumerate(lengths):
                kind = row % len(topology.depths)
                # nodes of one depth have prefixes of one length, which the processors can be shown together
                for depth, nodes in _by_length(range(tokens.shape[1]), topology.depths[kind].tolist()).items():
                    below_root = topology.paths[kind, nodes, 1 : depth + 1]  # (n, depth)
                    drafted = tokens[row, below_root].to(sequences.device)
                    prefixes = torch.cat([sequences[row, :length].expand(len(nodes), -1), drafted], dim=1)
                    seen = _seen_by(self.processors, [row] * len(nodes))
                    scores[row, nodes] = seen(prefixes, scores[row, nodes])
        return scores.softmax(-1).to(logits.device)

    def stops(self, rows: list[int], sequences: torch.Tensor, lengths: list[int]) -> list[bool]:
        """Whether a criterion fires on each row's prefix, the newest token included; g answers."""
        if self.lockstep:
            scores = tuple(self.scores) if self.keeps_scores else None
            return self.criteria(sequences[:, : max(lengths)], scores).tolist()
        answers = [False] * len(rows)
        for length, places in _by_length(rows, lengths).items():
            fired = self.criteria(sequences[[rows[place] for place in places], :length], None).tolist()
            for place, answer in zip(places, fired):
                answers[place] = answer
        return answers

    def _process(self, rows, logits, sequences, lengths):
        if not self.processors:
            return logits
        if self.lockstep:
            return self.processors(sequences[:, : max(lengths)], logits)
        if self.scores_only:
            return self.processors(sequences[rows, :1], logits)
        scores = torch.empty_like(logits)
        for length, places in _by_length(rows, lengths).items():
            group = [rows[place] for place in places]
            scores[places] = _seen_by(self.processors, group)(sequences[group, :length], logits[places])
        return scores

    def _keep(self, kept: list[torch.Tensor], rows, values, lengths) -> None:
        if self.lockstep:
            kept.append(values)
            return
        for row, value in zip(rows, values):
            position = lengths[row] - self.prompt_length
            while len(kept) <= position:
                kept.append(value.new_zeros(self.batch_size, value.shape[-1]))
            kept[position][row] = value


class NoiseTape:
    """The exponential noise of the base's sampling, position by position, drawn ahead of the base's own choices.

    `torch.multinomial(p, 1)` is `argmax(p / noise)` with noise (B, V) drawn anew at every position. The tape draws in
    the order of positions and remembers the generator's state before each, so every noise is drawn once, a row that
    lags can have its position's noise drawn again, and the generator can be left as the base would leave it.
    """

    KEPT = 32  # positions whose noise is held; older ones are redrawn from their state

    def __init__(self, batch_size: int, device: torch.device):
        self.batch_size, self.device = batch_size, device
        self.states: list[torch.Tensor] = [self._state()]  # before every position drawn, and after the last one
        self.drawn: dict[int, torch.Tensor] = {}
        self.shared = False  # whether somebody else has drawn from the generator since

    def noise(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """(B, V) noise of a position, counted from 0; `like` gives V and dtype. Leaves the generator anywhere."""
        while len(self.states) <= position + 1:
            newest = len(self.states) - 1
            self._restore(self.states[newest])
            self.drawn[newest] = self._draw(like)
            self.drawn.pop(newest - self.KEPT, None)
            self.states.append(self._state())
        if position in self.drawn:
            return self.drawn[position]
        self._restore(self.states[position])
        return self._draw(like)

    def ahead(self, firsts: list[int], depth: int) -> torch.Tensor:
        """(B, D, V) noise of D positions from each row's first, once that of any position was drawn."""
        like = next(reversed(self.drawn.values()))
        rows = [[self.noise(first + more, like)[row] for more in range(depth)] for row, first in enumerate(firsts)]
        return torch.stack([torch.stack(row) for row in rows])

    def next(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """As `noise`, at the position where the base draws now, of a generator that others may draw from as well."""
        now = self._state()
        if not torch.equal(now, self.states[position]):
            self.shared = True
            self.states[position:] = [now]
            self.drawn = {known: noise for known, noise in self.drawn.items() if known < position}
        noise = self.noise(position, like)
        self._restore(self.states[position + 1])
        return noise

    def rewind(self, positions: int) -> None:
        """Leave the generator as it was after the first `positions` draws."""
        self._restore(self.states[positions])

    def _draw(self, like):
        return like.new_empty(self.batch_size, like.shape[-1], device=self.device).exponential_(1)

    def _state(self):
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _restore(self, state):
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)


def _by_length(rows: Iterable[int], lengths: list[int]) -> dict[int, list[int]]:
    """Places in `rows`, grouped by the length of the row's prefix."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[lengths[row]].append(place)
    return groups


def _seen_by(all_processors: LogitsProcessorList, rows: list[int]) -> LogitsProcessorList:
    """The processors as these rows see them: a repetition penalty holds the padding of every row of the batch."""
    views = LogitsProcessorList()
    for processor in all_processors:
        if hasattr(processor, "for_rows"):
            processor = processor.for_rows(rows)
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = padding[rows]
        views.append(processor)
    return views


# ---- hf_drafthead/generation/identity.py

"""What a figure belongs to: the heads, by a short hash of their weights, and the device."""


# by drafter: what its weights were when they were hashed, and the hash
_KNOWN: WeakKeyDictionary[Any, tuple[Any, str | None]] = WeakKeyDictionary()


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32.

    The same values therefore give the same hash in any dtype.

    Args:
        tensors: name and tensor, in any order.
        dtype: the type that fractions are rounded to before; None leaves them as they are.

    >>> weight = torch.tensor([1.0, 2.5])
    >>> heads_hash([("a", weight)]) == heads_hash([("a", weight.bfloat16())])
    True
    >>> heads_hash([("a", weight)]) == heads_hash([("b", weight)])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        rounded = tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        values = rounded.to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def drafter_hash(drafter: torch.nn.Module) -> str | None:
    """`heads_hash` of what a checkpoint holds of a drafter; None where weights lie elsewhere.

    It is computed again only after a parameter was replaced or written to.
    """
    stored = drafter.state_dict(keep_vars=True).keys()
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = [(f"drafter.{name}", weight) for name, weight in tensors if name in stored]
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in weights]
    known = _KNOWN.get(drafter)
    if known is None or known[0] != state:
        elsewhere = any(weight.is_meta for _, weight in weights)
        known = _KNOWN[drafter] = state, None if elsewhere else heads_hash(weights)
    return known[1]


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


# ---- hf_drafthead/generation/entries.py

"""Entries of a calibration: the situation in which a tree was measured, and the entry that fits a call.

An entry is a JSON object of the generation config: `device`, `dtype`, `batch_size`, `captured`, `heads_hash`, `tree`
(rank paths, the most valuable first) and `measured` (the figures, see `calibrate`).
"""


class Situation(NamedTuple):
    """What the speed of a tree depends on, besides the text.

    device: the GPU's name, or "cpu"; dtype: of the base; batch_size: rows; captured: whether steps are compiled;
    heads_hash: of the drafter's weights, see `drafter_hash`.
    """

    device: str
    dtype: str
    batch_size: int
    captured: bool
    heads_hash: str | None

    @classmethod
    def of(cls, base: Any, drafter: torch.nn.Module, batch_size: int, captured: bool) -> Situation:
        """The situation of a call."""
        dtype = str(base.dtype).removeprefix("torch.")
        return cls(device_name(base.device), dtype, batch_size, captured, drafter_hash(drafter))

    def __str__(self) -> str:
        steps = "captured" if self.captured else "uncaptured"
        return f"{self.device}, {self.dtype}, batch size {self.batch_size}, {steps} steps, heads {self.heads_hash}"


def matching(entries: Sequence[dict[str, Any]], situation: Situation) -> dict[str, Any] | None:
    """The entry that was measured in this situation; None if there is none."""
    wanted = situation._asdict()
    return next((one for one in entries if all(one.get(name) == value for name, value in wanted.items())), None)


def merged(entries: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with a new one, in place of the one of its situation and of those of its type for other heads."""

    def stays(one: dict[str, Any]) -> bool:
        if one.get("dtype") != new["dtype"]:  # the same heads have another hash where their values are rounded
            return True
        same_heads = one.get("heads_hash") == new["heads_hash"]
        return same_heads and any(one.get(name) != new[name] for name in ("device", "batch_size", "captured"))

    return [*filter(stays, entries), new]


def tree_of(entry: dict[str, Any], max_depth: int | None, vocabulary: int) -> DraftTree:
    """The tree of an entry.

    Raises:
        ValueError: the entry holds none, or one that these heads cannot fill.
    """
    try:
        paths = entry.get("tree")
        if not isinstance(paths, list):
            raise TypeError(f"its tree is of type {type(paths).__name__}, expected a list of rank paths.")
        return DraftTree.resolve(paths, max_depth, vocabulary)
    except (TypeError, ValueError) as error:
        raise damaged(entry, error) from None


def damaged(entry: dict[str, Any], error: Exception) -> ValueError:
    """One line about an entry that cannot be used."""
    return ValueError(
        f"the calibration entry for {entry['device']}, batch size {entry['batch_size']}, is damaged "
        f"({' '.join(str(error).split())[:300]}): run `hf-drafthead calibrate` again, or give draft_tree=."
    )


# ---- hf_drafthead/generation/ladder.py

"""Trees of several sizes, what a step with each costs, and which of them pays most on a text.

Shapes: N nodes (root included).
"""


STEPS_DOWN = 3  # each tree of a ladder has a third of the nodes of the one above it


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a step by its nodes: measured points, made monotone, and straight lines between them.

    >>> curve = CostCurve.through([(2, 1.0), (8, 4.0), (16, 3.0)])
    >>> curve.points, curve.at(5), curve.at(100)
    ([(2, 1.0), (8, 3.5), (16, 3.5)], 2.25, 3.5)
    """

    points: list[tuple[int, float]]

    @classmethod
    def through(cls, measured: Sequence[tuple[int, float]]) -> CostCurve:
        """The curve that never falls and is nearest to the measured points (pool adjacent violators)."""
        pools: list[list[float]] = []
        for _, seconds in sorted(measured):
            pools.append([seconds])
            while len(pools) > 1 and statistics.mean(pools[-2]) > statistics.mean(pools[-1]):
                dear = pools.pop()
                pools[-1] += dear
        level = [statistics.mean(pool) for pool in pools for _ in pool]
        return cls(list(zip((nodes for nodes, _ in sorted(measured)), level)))

    def at(self, nodes: int) -> float:
        """Seconds of a step of so many nodes; outside of the measured sizes those of the nearest one."""
        if nodes <= self.points[0][0]:
            return self.points[0][1]
        for (low, cheap), (high, dear) in zip(self.points, self.points[1:]):
            if nodes <= high:
                return cheap + (dear - cheap) * (nodes - low) / (high - low)
        return self.points[-1][1]


@dataclass(frozen=True)
class Ladder:
    """What `draft_tree="auto"` chooses from: the root alone first, then trees that hold each other, ever larger.

    seconds: of a step with each tree; tokens_per_step: that each gave where it was calibrated, 1.0 for the root alone.
    """

    trees: tuple[DraftTree, ...]
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
            curve = CostCurve([(int(nodes), _number(seconds)) for nodes, seconds in measured["step_seconds"]])
            gains = {int(nodes): _number(tau) for nodes, tau in measured["tokens_per_step_by_nodes"]}
            # the paths as they are stored: the most valuable first
            order = [tuple(path) for path in entry["tree"]]
            sizes = sorted({1, *_sizes(largest.num_nodes)})
            known = sorted(gains)
            taus = [1.0 if size == 1 else gains[min(known, key=lambda one: abs(one - size))] for size in sizes]
            trees = [DraftTree(order[: size - 1]) if size > 1 else DraftTree.root_alone() for size in sizes]
            return cls(tuple(trees), tuple(map(curve.at, sizes)), tuple(taus))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise damaged(entry, error) from None

    def best(self, gain: float) -> int:
        """Which tree gives most tokens per second where a step gives `gain` times the usual gain."""
        rates = [
            (1 + gain * (tau - 1)) / seconds for tau, seconds in zip(self.tokens_per_step, self.seconds, strict=True)
        ]
        return max(range(len(rates)), key=rates.__getitem__)

    @property
    def num_nodes(self) -> int:
        """N of the largest tree."""
        return self.trees[-1].num_nodes

    @property
    def max_depth(self) -> int:
        """Levels of the largest tree."""
        return self.trees[-1].max_depth

    @property
    def slots(self) -> int:
        """Most nodes that a step writes to a cache."""
        return self.trees[-1].slots


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


# ---- hf_drafthead/generation/settings.py

"""The settings of drafting: their names, defaults and checks, wherever they are given or stored."""


logger = logging.get_logger(__name__)

DEFAULT_TREE = "mc_sim_7b_63"  # the 64 nodes that the Medusa and Hydra papers' code drafts
AUTO = "auto"  # in each step the tree that pays most, of those that were calibrated
ACCEPTANCES = ("exact", "rejection", "typical")


@dataclass(frozen=True)
class DraftSettings:
    """How one call drafts and accepts; a generation config stores the same fields.

    Args:
        draft_tree: name of a published tree, rank paths, a `DraftTree`; "dynamic", {"dynamic": {"nodes": 32,
            "depth": 6, "width": 8}} or a `DynamicTree`; "auto".
        acceptance: "exact", "rejection" (the base's distribution, not its seed) or "typical" (Medusa's lossy rule).
        posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, both from 0 to 1.
        calibration: which tree was measured to be the fastest, an entry for each situation (see `generation.entries`);
            the entry that fits a call comes before `draft_tree`.

    Raises:
        TypeError: a setting of another type.
        ValueError: a setting that is out of range.
    """

    draft_tree: Any = DEFAULT_TREE
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    calibration: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.acceptance not in ACCEPTANCES:
            text = isinstance(self.acceptance, str)
            kind = "" if text else f" ({type(self.acceptance).__name__})"
            raise (ValueError if text else TypeError)(
                f"acceptance is {self.acceptance!r}{kind}: expected one of {', '.join(map(repr, ACCEPTANCES))}."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a number from 0 to 1.")
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}: expected a number from 0 to 1.")
        entries = self.calibration
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TypeError(
                f"calibration is {entries!r} ({type(entries).__name__}): expected a list of entries as "
                "`hf-drafthead calibrate` writes them."
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings, as a generation config has them."""
        return tuple(setting.name for setting in fields(cls))

    @classmethod
    def stored_in(cls, config: Any) -> dict[str, Any]:
        """The settings that a generation config, or its dict, holds; not checked."""
        stored = config if isinstance(config, Mapping) else vars(config)
        return {name: stored[name] for name in cls.names() if stored.get(name) is not None}

    @classmethod
    def from_config(cls, config: Any, **given: Any) -> DraftSettings:
        """The settings given, else the generation config's, else the defaults; None is a setting not given.

        Raises:
            TypeError, ValueError: as the class does.
        """
        given = {name: value for name, value in given.items() if value is not None}
        found = cls(**{**cls.stored_in(config), **given})
        for name in ("posterior_threshold", "posterior_alpha"):
            if name in given and found.acceptance != "typical":
                raise ValueError(
                    f"{name} is {given[name]}, but acceptance is {found.acceptance!r}: pass acceptance='typical', or "
                    f"leave {name} out."
                )
        return found

    def resolved(self, max_depth: int | None, vocabulary: int) -> DraftSettings:
        """The same settings, with the tree itself in the place of its name or rank paths; "auto" stays.

        Args:
            max_depth: deepest level that the drafter can guess; None if there is no limit.
            vocabulary: number of tokens.

        Raises:
            TypeError, ValueError: no such tree, or one that does not fit.
        """
        if self.draft_tree == AUTO:  # which trees these are depends on the call, see `calibrated`
            return self
        return self._with(resolve(self.draft_tree, max_depth, vocabulary))

    def calibrated(self, situation: Situation, max_depth: int | None, vocabulary: int) -> DraftSettings:
        """The same settings with the tree that was measured in this situation; with "auto", with a `Ladder`.

        Where none of the entries fits, `draft_tree` is kept (the default tree for "auto"), with one notice.

        Raises:
            ValueError: the entry that fits is damaged.
        """
        entry = matching(self.calibration, situation)
        if entry is None:
            logger.warning_once(
                f"These heads were not calibrated for this call ({situation}): "
                f"{DEFAULT_TREE if self.draft_tree == AUTO else 'draft_tree'} is used; run `hf-drafthead calibrate` to "
                "measure the tree for it."
            )
            if self.draft_tree == AUTO:
                return replace(self, draft_tree=DEFAULT_TREE).resolved(max_depth, vocabulary)
            return self
        if self.draft_tree == AUTO:
            return self._with(Ladder.of(entry, max_depth, vocabulary))
        return self._with(tree_of(entry, max_depth, vocabulary))

    def _with(self, tree: Tree | Ladder) -> DraftSettings:
        """The same settings with this tree, where the acceptance can walk it."""
        if self.acceptance != "rejection":
            return replace(self, draft_tree=tree)
        if not isinstance(tree, DraftTree):
            raise ValueError(
                f"draft_tree is {self.draft_tree!r}, but acceptance='rejection' must know how each node was drawn: "
                "give a published tree's name or rank paths, or leave acceptance out."
            )
        # rejection takes the children of a node in the order in which they were drawn, and must know every draw
        return replace(self, draft_tree=tree.without_gaps())

    @property
    def tree(self) -> Tree | Ladder:
        """The tree of resolved settings, or the trees."""
        assert isinstance(self.draft_tree, (DraftTree, DynamicTree, Ladder))
        return self.draft_tree


# ---- hf_drafthead/generation/acceptance.py

"""Which nodes of a step are kept: walks down the tree. They only look; `step.commit` writes.

At a node the base's own next token is chosen, emitted and looked for among the node's children; if a child carries it
the walk goes on there, else it ends. So the text is the base's whatever was drafted, and the chance to go on at a node
is the probability of all its children together.

    tokens     A ── B ── D        the base's choice after A is B, after B it is D, after D it is F:
               └─── C             emitted are B, D, F; F is the next root

`walk_on_device` looks at all nodes at once and never waits for the device. `walk_on_host` goes node by node and shows
every processor and criterion exactly the prefixes that the base would show them.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, g rows of a group.
"""


def walk_on_device(
    choice: torch.Tensor, valid: torch.Tensor, candidates: Candidates, rows: Rows, limits: Limits, reach: torch.Tensor
) -> Walk:
    """The walk of all rows at once, where nothing but scores, length and EOS decide.

    Args:
        choice: (B, N) the base's choice at every node.
        valid: (B, N) whether it could choose there.
        candidates: the nodes.
        rows: lengths, and which rows have ended.
        limits: EOS tokens and longest length.
        reach: (B,) depth of the deepest nodes at positions that the base can be asked about.
    """
    tokens, topology = candidates.tokens, candidates.topology
    batch = tokens.shape[0]
    parents, depths = topology.parents.expand(batch, -1), topology.depths.expand(batch, -1)
    right = tokens == choice.gather(1, parents)  # (B, N)
    reached = (right[:, None] | topology.unrelated).all(-1) & (depths <= reach[:, None])
    deepest, last = torch.where(reached, depths, -1).max(1)  # (B,); siblings differ, so that there is one such node
    nodes = topology.paths.expand(batch, -1, -1)[torch.arange(batch, device=last.device), last]  # (B, D)
    emitted = choice.gather(1, nodes)
    place = torch.arange(nodes.shape[1], device=nodes.device)
    stops = (emitted[..., None] == limits.eos).any(-1) & (place <= deepest[:, None])
    first_stop = torch.where(stops, place, nodes.shape[1]).min(1).values
    room = limits.max_length - rows.lengths
    counts = torch.minimum(torch.minimum(deepest, first_stop) + 1, room)
    counts = torch.where(rows.ends > 0, 0, counts)
    ends_now = (rows.ends == 0) & ((first_stop < counts) | (counts >= room))
    ends = torch.where(ends_now, rows.lengths + counts, rows.ends)
    walked = place < counts[:, None]
    return Walk(nodes, emitted, counts, ends, (valid.gather(1, nodes) | ~walked).all(1))


def walk_on_host(
    logits: torch.Tensor,
    candidates: Candidates,
    sequences: torch.Tensor,
    lengths: list[int],
    ends: list[int | None],
    reach: list[int],
    rules: Rules,
    *,
    preferred: torch.Tensor | None = None,
    show: Callable[[torch.Tensor], None] | None = None,
) -> Walk:
    """The walk token by token, with every processor and criterion applied to exactly the row's own prefix.

    Args:
        logits: (B, N, V) of the base at every node.
        candidates: the nodes.
        sequences: (B, W) with room for D more tokens in every row; this one is written to.
        lengths: B of them: tokens of each row.
        ends: B of them: at which length each row ended, or None.
        reach: B of them, see `walk_on_device`.
        rules: chooses tokens and says which rows end.
        preferred: (B, N) token to emit at a node instead of the base's choice, -1 for none (`typical_choices`).
        show: is given every token (B,) before the criteria are asked, where all rows stay at one length.
    """
    tokens, topology = candidates.tokens, candidates.topology
    lengths, ends = list(lengths), list(ends)
    batch, depth = tokens.shape[0], topology.paths.shape[-1]
    drafted, parents = tokens.tolist(), topology.parents.expand_as(tokens).tolist()
    depths = topology.depths.expand_as(tokens).tolist()
    below = [
        {(parents[row][node], drafted[row][node]): node for node in reversed(range(1, tokens.shape[1]))}
        for row in range(batch)
    ]
    at = [0] * batch
    nodes: list[list[int]] = [[] for _ in range(batch)]
    emitted: list[list[int]] = [[] for _ in range(batch)]
    moving = running(lengths, ends, rules.pads)
    while moving:
        group = list(range(batch)) if rules.lockstep else moving
        here = [at[row] for row in group]
        chosen = rules.choose(group, logits[group, here], sequences, lengths)  # (g,)
        if preferred is not None:
            instead = preferred[group, here].to(chosen.device)
            chosen = torch.where(instead >= 0, instead, chosen)
        token_of = dict(zip(group, chosen.tolist()))
        for row in moving:
            sequences[row, lengths[row]] = token_of[row]
            lengths[row] += 1
            nodes[row].append(at[row])
            emitted[row].append(token_of[row])
        if show is not None and rules.lockstep:
            show(sequences[:, max(lengths) - 1])
        for row, fired in zip(group, rules.stops(group, sequences, lengths)):
            if fired and ends[row] is None:
                ends[row] = lengths[row]
        now = running(lengths, ends, rules.pads)
        going_on = []
        for row in moving:
            at[row] = below[row].get((at[row], token_of[row]), 0)
            if at[row] and row in now and depths[row][at[row]] <= reach[row]:
                going_on.append(row)
        if rules.lockstep and len(going_on) < len(now):
            break
        moving = going_on
    device = tokens.device

    def padded(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([one + [0] * (depth - len(one)) for one in lists], device=device)

    counts = torch.tensor([len(one) for one in nodes], device=device)
    ended = torch.tensor([end or 0 for end in ends], device=device)
    return Walk(padded(nodes), padded(emitted), counts, ended, torch.ones_like(ended, dtype=torch.bool))


def preferred_choices(
    settings: DraftSettings,
    rules: Rules,
    logits: torch.Tensor,
    candidates: Candidates,
    sequences: torch.Tensor,
    lengths: list[int],
    reach: torch.Tensor,
) -> torch.Tensor | None:
    """(B, N) what typical acceptance or rejection emit at a node, -1 for the base's own choice; None for exact calls.

    Args:
        settings: which acceptance, and the tree.
        rules: of the call.
        logits: (B, N, V) of the base at every node.
        candidates: the nodes.
        sequences: (B, W) token ids; row b's prefix is its first `lengths[b]`.
        lengths: B of them.
        reach: (B,), see `walk_on_device`.
    """
    if settings.acceptance == "exact" or not rules.config.do_sample:
        return None
    tokens, topology = candidates.tokens, candidates.topology
    p = rules.probabilities(logits, tokens, topology, sequences, lengths).to(reach.device)
    if settings.acceptance == "typical":
        return typical_choices(p, candidates, reach, settings.posterior_threshold, settings.posterior_alpha)
    if not p.isfinite().all():
        raise RuntimeError(NOT_A_DISTRIBUTION)
    assert isinstance(settings.tree, DraftTree)  # as the settings see to
    q = torch.zeros_like(p)
    for level, guesses in zip(settings.tree.levels(p.device), candidates.guesses):
        q[:, level.expanded] = guesses.chances(rules.temperature, p.shape[-1]).to(p)
    return rejection_choices(
        p, q, candidates, torch.rand(tokens.shape, device=p.device), torch.empty_like(p[:, 0]).exponential_(1)
    )


def typical_choices(
    probabilities: torch.Tensor, candidates: Candidates, reach: torch.Tensor, threshold: float, alpha: float
) -> torch.Tensor:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.2): NOT the base's distribution, but longer steps.

    A node is accepted if p(token) > min(threshold, alpha * exp(-entropy)) at its parent; of the longest accepted paths
    the likeliest is taken, and the token after it is the base's greedy choice.

    Args:
        probabilities: (B, N, V) of the base at every node, after the processors.
        candidates: the nodes.
        reach: (B,), see `walk_on_device`.
        threshold: epsilon, in probability.
        alpha: delta, in probability.

    Returns:
        (B, N): at every node of the accepted path the token of the next one, elsewhere -1.
    """
    tokens, topology = candidates.tokens, candidates.topology
    parents = topology.parents.expand_as(tokens)
    entropy = -(probabilities * (probabilities + 1e-5).log()).sum(-1)  # (B, N)
    enough = torch.clamp(alpha * torch.exp(-entropy), max=threshold)
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    chance = probabilities[rows, parents, tokens]  # (B, N)
    accepted = chance > enough.gather(1, parents)
    reached = (accepted[:, None] | topology.unrelated).all(-1) & (topology.depths <= reach[:, None])  # (B, N)
    depths = reached * topology.depths
    longest = depths == depths.max(-1, keepdim=True).values
    logs = chance.clamp_min(1e-30).log()
    logs[:, 0] = 0
    likelihood = (logs[:, None] * topology.ancestors).sum(-1)  # (B, N)
    best = likelihood.masked_fill(~(longest & reached), -torch.inf).argmax(-1)  # (B,)
    on_path = topology.ancestors.expand(len(best), -1, -1)[rows[:, 0], best]  # (B, N), the root included
    choices = torch.full_like(tokens, -1)
    below = on_path.clone()
    below[:, 0] = False
    # every node but the root writes its token to its parent; those off the path write to a spare column
    spare = torch.cat([choices, choices[:, :1]], dim=1)
    spare.scatter_(1, torch.where(below, parents, tokens.shape[1]), tokens)
    return spare[:, :-1]


def rejection_choices(
    probabilities: torch.Tensor,
    drawn_from: torch.Tensor,
    candidates: Candidates,
    chance: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Speculative sampling: the base's distribution, not its seed.

    Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (2302.01318) accept a token x that was drawn from q
    with the probability min(1, p(x) / q(x)), else they draw from norm(max(0, p - q)). Several children of a node, drawn
    from q without replacement, are tried in the order of their draws (SpecInfer, 2305.09781, algorithm 2): each refusal
    leaves p = norm(max(0, p - q)), and q without the token that was refused. Where every child is refused, and at a
    leaf, the token is drawn from what is left of p.

    Args:
        probabilities: p (B, N, V) of the base at every node, after the processors.
        drawn_from: q (B, N, V) from which the children of a node were drawn; the first of them has the lowest number.
        candidates: the nodes.
        chance: (B, N) uniform on [0, 1), one for each node.
        noise: (B, V) exponential, for the last token.

    Returns:
        (B, N): at every node of the accepted path the token that follows it, elsewhere -1. On the way the host asks
        for each node whether a row is at its parent.
    """
    tokens, topology = candidates.tokens, candidates.topology
    parents = topology.parents.expand_as(tokens)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    choices = torch.full_like(tokens, -1)
    at = torch.zeros_like(rows)
    p, q = probabilities[:, 0].double(), drawn_from[:, 0].double()  # (B, V)
    for node in range(1, tokens.shape[1]):  # by depth, and siblings in the order of their draws
        here = parents[:, node] == at
        if not here.any():
            continue
        token = tokens[:, node, None]
        p_of, q_of = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        taken = here & (q_of > 0) & (chance[:, node] * q_of < p_of)
        refused = here & (q_of > 0) & ~taken
        left = (p - q).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        p = torch.where(refused[:, None] & (mass > 0), left / mass, p)  # no mass: p and q differ by rounding only
        rest = q.scatter(1, token, 0.0)
        q = torch.where(refused[:, None], rest / rest.sum(-1, keepdim=True).clamp(min=1e-300), q)
        choices[rows, at] = torch.where(taken, token[:, 0], choices[rows, at])
        at = torch.where(taken, node, at)
        p = torch.where(taken[:, None], probabilities[:, node].double(), p)
        q = torch.where(taken[:, None], drawn_from[:, node].double(), q)
    choices[rows, at] = (p / noise).argmax(-1)
    return choices


# ---- hf_drafthead/generation/regions.py

"""The decoder layers of a captured step are compiled once for all of them.

`torch.compiler.nested_compile_region` reuses what it has traced for a function whose inputs look the same: modules of
the same kind, tensors of the same shapes, and plain numbers. A decoder layer is given a cache, which is none of these;
while a program is traced it gets the tensors of its own `SlotLayer` instead.

What a region returns has to be used: a region that only writes to its inputs is dropped by inductor (torch 2.13).

Shapes: B rows, n nodes of one forward, S slots, H key/value heads, E head size.
"""


CACHE_ARGUMENTS = ("past_key_values", "past_key_value", "layer_past")
# before this argument came (torch 2.13) every layer is traced anew, and nothing is saved
REUSED = "reuse_hash_fn" in inspect.signature(torch.compiler.nested_compile_region).parameters


class OneLayer:
    """The cache as a single decoder layer sees it: keys and values (B, H, S, E) of a `SlotCache` with fixed shapes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, first: int):
        self.keys, self.values, self.first = keys, values, first

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the nodes' (B, H, n, E), as `SlotLayer.update` does; returns what is attended to."""
        nodes = slice(self.first, self.first + key_states.shape[-2])
        self.keys[..., nodes, :] = key_states
        self.values[..., nodes, :] = value_states
        return self.keys[..., self.first :, :], self.values[..., self.first :, :]


@torch.compiler.nested_compile_region
def _one_layer(
    layer: nn.Module, name: str, keys: torch.Tensor, values: torch.Tensor, first: int, args: tuple, given: dict
) -> Any:
    return type(layer).forward(layer, *args, **given, **{name: OneLayer(keys, values, first)})


@contextlib.contextmanager
def layers_once(base: nn.Module) -> Iterator[None]:
    """Let every kind of decoder layer of a base be traced once, by a compiler that traces meanwhile."""
    changed = list(repeated(base)) if REUSED else []
    for layer in changed:
        layer.forward = _forward_of(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


def repeated(base: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers: modules of one class in one list, which are given a cache and know their number in it."""
    for modules in base.modules():
        if isinstance(modules, nn.ModuleList) and len(modules) > 1 and len(set(map(type, modules))) == 1:
            for module in modules:
                if _cache_argument_of(module) and _number_of(module) is not None and "forward" not in module.__dict__:
                    yield module


def _forward_of(layer: nn.Module) -> Callable:
    """The forward of a layer, which hands tensors in place of the cache to the region."""
    name, number = str(_cache_argument_of(layer)), _number_of(layer)

    def forward(*args: Any, **given: Any) -> Any:
        cache: Any = given.get(name)
        if not (torch.compiler.is_compiling() and getattr(cache, "fixed", False)):
            return type(layer).forward(layer, *args, **given)
        rest = {key: value for key, value in given.items() if key != name}
        keys, values = cache.layers[number].views()
        return _one_layer(layer, name, keys, values, cache.nodes - cache.placed, args, rest)

    return forward


def _cache_argument_of(layer: nn.Module) -> str | None:
    known = inspect.signature(type(layer).forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), None)


def _number_of(layer: nn.Module) -> int | None:
    found = {getattr(module, "layer_idx", None) for module in layer.modules()} - {None}
    return int(found.pop()) if len(found) == 1 else None  # type: ignore[arg-type]


# ---- hf_drafthead/generation/step.py

"""One step: draft, verify, walk, commit. Each stage returns what it found; `commit` is the only writer.

    draft    the drafter guesses the tokens of a tree below the root, the token that the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    walk     down from the root as long as a child carries what the base chooses (`acceptance`)
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""


def draft(
    drafter, rows: Rows, tree: Tree, tilt: torch.Tensor | None, keep_guesses: bool = False
) -> tuple[Any, Candidates]:
    """Let the drafter fill the tree below each row's newest token, see `draft_static`; also returns its state."""
    root = rows.sequences.gather(1, rows.lengths[:, None] - 1)
    if isinstance(tree, DynamicTree):
        return draft_dynamic(drafter, rows.draft_state, root, tree, tilt)
    return draft_static(drafter, rows.draft_state, root, tree, tilt, keep_guesses)


def verify(reader: BaseReader, cache: SlotCache, candidates: Candidates, rows: Rows, limits: Limits) -> Verified:
    """One forward of the base over all nodes.

    Nodes behind the last position that the base would be asked about stay on that position, which exists; the walk does
    not go there.
    """
    past = cache.lengths[:, None]
    positions = torch.minimum(past + candidates.topology.depths, torch.maximum(limits.last_position, past))
    logits, features = reader.nodes(
        candidates.tokens, candidates.topology, cache, positions + rows.position_shift, rows.visible
    )
    return Verified(logits, features)


def commit(
    drafter, draft_state: Any, cache: SlotCache, rows: Rows, verified: Verified, walk: Walk, limits: Limits
) -> Rows:
    """Keep what was walked: keys and values, tokens, lengths, and hidden states for the drafter; drop the rest."""
    cache.keep(walk.nodes, walk.counts)
    place = torch.arange(walk.tokens.shape[1], device=walk.tokens.device)
    kept = torch.where(place < walk.counts[:, None], walk.tokens, limits.padding)
    rows.sequences.scatter_(1, rows.lengths[:, None] + place, kept)
    nodes, tokens, counts = walk.nodes, walk.tokens, walk.counts
    if not drafter.keeps_history:
        # a wrong node here costs speed and never correctness: the tests look at it by itself
        last = (counts[:, None] - 1).clamp(min=0)
        nodes, tokens, counts = nodes.gather(1, last), tokens.gather(1, last), counts.clamp(max=1)
    nodes = nodes.to(verified.features.device)
    features = verified.features.take_along_dim(nodes[..., None], dim=1)  # (B, D or 1, F*H)
    draft_state = drafter.observe(draft_state, features, tokens, counts)
    return rows._replace(lengths=rows.lengths + walk.counts, ends=walk.ends, draft_state=draft_state)


class Step:
    """A step that is run operation by operation.

    Args:
        reader: how to run the base.
        drafter: what guesses.
        settings: tree and acceptance.
        rules: of the call.
        show: is given every token before a criterion is asked, see `walk_on_host`.
        timed: note the seconds of every stage, for which the host waits after each.
    """

    ahead = 0  # steps that are launched before the result of the first of them is read

    def __init__(
        self, reader: BaseReader, drafter, settings: DraftSettings, rules: Rules, show=None, timed: bool = False
    ):
        self.reader, self.drafter, self.settings, self.rules, self.show = reader, drafter, settings, rules, show
        assert not isinstance(settings.tree, Ladder)
        self.tree = settings.tree
        self.vocabulary = reader.base.config.get_text_config(decoder=True).vocab_size
        self.slots = self.tree.slots  # of the caches, for the nodes of a step of fixed shapes
        self.timed = timed

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages."""
        watch = Stopwatch(self.timed, state.rows.lengths.device)
        state.reserve(self.tree.max_depth + 2, self.rules.pad_token)
        rows, cache, limits = state.rows, state.cache, state.limits
        noise, tilt = self.noise_ahead(state)
        draft_state, candidates = draft(self.drafter, rows, self.tree, tilt, self.rules.rejects)
        watch.lap("draft")
        verified = verify(self.reader, cache, candidates, rows, limits)
        watch.lap("verify")
        walk = self.walk(state, candidates, verified, noise)
        watch.lap("accept")
        state.rows = commit(self.drafter, draft_state, cache, rows, verified, walk, limits)
        watch.lap("commit")
        return walk, watch.seconds

    def noise_ahead(self, state: DecodingState) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, D, V) the base's noise of the next positions, and how it tilts guesses; None where it does not sample."""
        rules, depth = self.rules, self.tree.max_depth + 1
        noise = rules.noise_ahead(state.lengths, state.running(rules.pads), depth, self.vocabulary)
        return noise, None if noise is None else rules.tilt(noise).to(state.rows.lengths.device)

    def walk(
        self, state: DecodingState, candidates: Candidates, verified: Verified, noise: torch.Tensor | None
    ) -> Walk:
        """The walk that suits the call: on the device where it can be."""
        rules, logits, rows = self.rules, verified.logits, state.rows
        reach = (state.limits.last_position - state.cache.lengths[:, None]).clamp(min=0)[:, 0]
        sequences = rows.sequences.to(rules.device)
        preferred = preferred_choices(self.settings, rules, logits, candidates, sequences, state.lengths, reach)
        if preferred is not None and rules.rejects and rules.on_device:
            valid = torch.ones_like(preferred, dtype=torch.bool)
            return walk_on_device(preferred, valid, candidates, rows, state.limits, reach)
        # under sampling a CPU, which waits for nothing, looks at the nodes that are visited only
        on_cpu = logits.device.type == "cpu" and (rules.samples or rules.processors)
        if preferred is None and rules.on_device and not on_cpu:
            logits = logits.to(rows.lengths.device)
            noise = None if noise is None else noise.to(logits.device)
            choice, valid = rules.choose_everywhere(logits, candidates.topology.depths, noise)
            return walk_on_device(choice, valid, candidates, rows, state.limits, reach)
        return walk_on_host(
            logits,
            candidates,
            sequences.clone(),
            state.lengths,
            state.ends,
            reach.tolist(),
            rules,
            preferred=preferred,
            show=self.show,
        )


class Stopwatch:
    """Seconds between laps; does nothing unless it is switched on."""

    def __init__(self, on: bool, device: torch.device):
        self.on, self.device = on, device
        self.seconds: dict[str, float] = {}
        self.last = self._now() if on else 0.0

    def lap(self, name: str) -> None:
        """Note what has passed since the last lap under this name."""
        if self.on:
            now = self._now()
            self.seconds[name], self.last = now - self.last, now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


# ---- hf_drafthead/generation/capture.py

"""Captured steps: the whole step as one program of fixed shapes, compiled once and kept for later calls.

A program is made for a tree, a batch size and what the call decides by (`Capture._key`). Only the capacity of the
caches may differ between two runs of it, so that a text can grow, and prompts of any length share it. What the programs
are made of are the stages of `step`; nothing here knows what they do.

    greedy               draft, verify, walk, commit                       one program
    anything else        draft, verify | walk as without capture | commit  two programs around it

Compiled programs are kept without guards: dynamo would compare every weight and attribute of the base before each
step. What can change between two calls is compared once per call instead (`fingerprint`).
"""


logger = logging.get_logger(__name__)

MOST_PROGRAMS = 8  # kept per model; the one that was not used for the longest time goes first
BUCKET = 64  # capacities are multiples of this, since attention looks at all of it
AHEAD = 256  # positions for which a capacity is taken at first; it grows as the text does


@dataclass
class Programs:
    """What is kept for one model: its programs by key, and what they were made from."""

    made: OrderedDict[Hashable, Captured] = field(default_factory=OrderedDict)
    fingerprint: Hashable = None
    refused: dict[Hashable, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


# not on the model, which must stay a thing that can be copied and pickled
_PROGRAMS: WeakKeyDictionary[Any, Programs] = WeakKeyDictionary()


class Capture:
    """How the steps of one call are to be captured.

    Args:
        model: with `base` and `drafter`; its programs are kept as long as it lives.
        config: of `torch.compile`.
    """

    def __init__(self, model: Any, config: CompileConfig):
        self.model, self.config = model, config

    @classmethod
    def wanted(cls, model: Any, config: GenerationConfig) -> Capture | None:
        """The capture that a call asks for, by a static cache or a `compile_config`; None where it does not."""
        asked = config.compile_config
        if config.disable_compile or (asked is None and config.cache_implementation != "static"):
            return None
        return cls(model, asked or CompileConfig(mode="default"))

    def prepared(self, step: Step, state: DecodingState) -> Step | CapturedStep:
        """The captured form of a call's step; the step itself where it cannot be captured, with one warning."""
        programs = _PROGRAMS.setdefault(self.model, Programs())
        if not programs.lock.acquire(blocking=False):
            return step  # another thread is capturing on this model: this call need not wait for it
        try:
            now = fingerprint(self.model)
            if now != programs.fingerprint:
                programs.made.clear()
                programs.refused.clear()
                programs.fingerprint = now
            key = self._key(step, state)
            if key in programs.refused:
                return step
            captured = programs.made.get(key)
            if captured is None:
                captured = Captured(step, self.config)
                if isinstance(step.tree, DraftTree):  # else its tensors would be made in every step
                    for tensors in (step.tree.topology, step.tree.levels):
                        tensors(state.rows.lengths.device)
            captured_step = CapturedStep(captured, step, state)
            if captured.seconds is None:
                with layers_once(self.model.base):
                    captured_step.first = captured_step(state)
                logger.warning(
                    f"a step of {step.tree.num_nodes} nodes for {state.rows.lengths.shape[0]} row(s) was compiled in "
                    f"{captured.seconds:.1f} s; it is kept for later calls."
                )
            programs.made[key] = captured
            programs.made.move_to_end(key)
            while len(programs.made) > MOST_PROGRAMS:
                programs.made.popitem(last=False)
            return captured_step
        except MemoryError as error:  # of this call alone; for the next one there may be enough
            not_captured(str(error), state)
            return step
        except Exception as error:  # whatever a compiler says of a base: uncaptured steps work all the same
            reason = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
            programs.refused[self._key(step, state)] = reason
            not_captured(reason, state)
            return step
        finally:
            programs.lock.release()

    def _key(self, step: Step, state: DecodingState) -> Hashable:
        base, rows = self.model.base, state.rows
        return (
            step.tree,
            step.slots,
            whole(step),
            (step.rules.tape is not None, step.rules.rejects),
            rows.lengths.shape[0],
            rows.lengths.device,
            rows.visible is None,
            len(state.limits.eos),
            base.dtype,
            base.config._attn_implementation,
            step.drafter.reads,
            repr(sorted(self.config.to_dict().items())),
        )


def not_captured(reason: str, state: DecodingState) -> None:
    """Say why the steps of a call are not captured, and let its caches grow again."""
    logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
    for cache in state.caches():
        if cache.fixed:
            cache.free()


def whole(step: Step) -> bool:
    """Whether the walk of a step can be compiled with the rest: greedy, and nothing to ask on the host."""
    rules = step.rules
    typical = step.settings.acceptance == "typical" and rules.config.do_sample
    return rules.on_device and not (rules.samples or rules.processors or typical)


class Captured:
    """The programs of one key. They hold the base and the drafter, and nothing of a call."""

    def __init__(self, step: Step, config: CompileConfig):
        reader, drafter, tree, choose = step.reader, step.drafter, step.tree, step.rules.choose_greedily
        rejects = step.rules.rejects

        def first(rows: Rows, cache: Any, limits: Limits, tilt: torch.Tensor | None = None) -> Any:
            draft_state, candidates = draft(drafter, rows, tree, tilt, rejects)
            return draft_state, candidates, verify(reader, cache, candidates, rows, limits)

        def last(draft_state: Any, cache: Any, rows: Rows, verified: Any, walk: Walk, limits: Limits) -> Rows:
            return commit(drafter, draft_state, cache, rows, verified, walk, limits)

        def all_in_one(rows: Rows, cache: Any, limits: Limits) -> tuple[Walk, Rows]:
            reach = (limits.last_position - cache.lengths[:, None]).clamp(min=0)[:, 0]
            draft_state, candidates, verified = first(rows, cache, limits)
            choice, valid = choose(verified.logits.to(rows.lengths.device))
            walk = walk_on_device(choice, valid, candidates, rows, limits, reach)
            return walk, last(draft_state, cache, rows, verified, walk, limits)

        self.seconds: float | None = None  # that the preparation took
        self.whole = compiled(all_in_one, config) if whole(step) else None
        self.first = compiled(first, config)
        self.last = compiled(last, config)


def compiled(function: Callable, config: CompileConfig) -> Callable:
    """`torch.compile` without guards, for a function of which the caller knows that nothing but tensors changes."""
    # dynamo keeps its programs by code object, and without guards it takes the first: each gets one of its own
    alone = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    options = {} if config.mode in ("default", "reduce-overhead") else torch._inductor.list_mode_options(config.mode)
    options = {**options, **(config.options or {}), "guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(alone, fullgraph=True, dynamic=False, backend=config.backend, options=options)


class CapturedStep:
    """A step that runs the programs of its key, in place of `Step`.

    Args:
        captured: the programs.
        step: the step that they were made from.
        state: of the call, whose caches get fixed shapes here.
    """

    ahead = 0

    def __init__(self, captured: Captured, step: Step, state: DecodingState):
        self.captured, self.step, self.tree = captured, step, step.tree
        self.first: tuple[Walk, dict[str, float]] | None = None
        self.refused: str | None = None  # why this call goes on without its programs
        self._fix(state)

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and no seconds: the stages are one program."""
        if self.first is not None:
            done, self.first = self.first, None
            return done
        if self.refused is None and not self._fits(state):
            try:
                self._fix(state)
            except MemoryError as error:
                self.refused = str(error)
        if self.refused is not None:
            not_captured(self.refused, state)
            return self.step(state)
        captured, rows, cache, limits = self.captured, state.rows, state.cache, state.limits
        start = time.perf_counter()
        if captured.whole is not None:
            walk, state.rows = captured.whole(rows, cache, limits)
        else:
            noise, tilt = self.step.noise_ahead(state)
            draft_state, candidates, verified = captured.first(rows, cache, limits, tilt)
            walk = self.step.walk(state, candidates, verified, noise)
            state.rows = captured.last(draft_state, cache, rows, verified, walk, limits)
        if captured.seconds is None:
            captured.seconds = time.perf_counter() - start
        return walk, {}

    def _fits(self, state: DecodingState) -> bool:
        """Whether the caches have their fixed shapes, with room for two steps."""
        longest = max(state.lengths) + state.past_shift + 2 * (self.step.tree.max_depth + 1)
        return state.cache.fixed and longest <= state.cache.capacity

    def _fix(self, state: DecodingState) -> None:
        """Give all tensors of the call the shapes for the next stretch of text.

        Raises:
            MemoryError: there is no memory for a capacity of so many positions.
        """
        depth, nodes = self.step.tree.max_depth + 1, self.step.slots
        past = max(state.lengths) + state.past_shift
        left = int(state.limits.max_length) - max(state.lengths)
        capacity = past + min(left, AHEAD) + 2 * depth
        capacity = -(-capacity // BUCKET) * BUCKET
        for cache in state.caches():
            try:
                cache.fix(capacity, nodes)
            except RuntimeError as error:  # torch has no class of its own for a CPU that is out of memory
                size = cache.memory(capacity + nodes) / 2**30
                raise MemoryError(
                    f"there is no memory for a cache of {size:.1f} GiB: {capacity} positions (a multiple of {BUCKET}), "
                    f"{len(state.lengths)} row(s)."
                ) from error
            for pool in cache.pools:
                torch._dynamo.mark_dynamic(pool.data, 3)
        # the compiler takes equal sizes for one size: what need not be equal must differ
        width = max(capacity - state.past_shift, 0) + depth + nodes + 1
        rows = state.rows
        sequences = rows.sequences.new_full((rows.sequences.shape[0], width), self.step.rules.pad_token)
        known = min(width, rows.sequences.shape[1])
        sequences[:, :known] = rows.sequences[:, :known]
        torch._dynamo.mark_dynamic(sequences, 1)
        visible = rows.visible
        if visible is not None:
            visible = nn.functional.pad(visible, (0, capacity - visible.shape[1]), value=True)
            torch._dynamo.mark_dynamic(visible, 1)
        state.rows = rows._replace(sequences=sequences, visible=visible)


def fingerprint(model: Any) -> Hashable:
    """What programs depend on and what a user may change between two calls: modules, hooks, shapes; not the weights."""
    return tuple(_facts(model.base)), tuple(_facts(model.drafter)) if isinstance(model.drafter, nn.Module) else ()


def _facts(model: nn.Module) -> Iterator[Hashable]:
    for module in model.modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        yield id(module), hooks, id(module.__dict__.get("forward")), module.training
        for parameter in module._parameters.values():
            if parameter is not None:
                yield tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


# ---- hf_drafthead/generation/auto.py

"""How the steps of a call are made; with `draft_tree="auto"` each takes the tree that pays most on this text.

A calibration entry says what a step of n nodes costs, and how many tokens it gives on usual text. Then

    tokens per second of n nodes = (1 + gain * (tokens_per_step_n - 1)) / seconds_n

where `gain` says how much of the usual gain this text gives: a moving mean over the steps of the call. On foreign text
it falls, the trees become smaller, and at last the root alone is left, which drafts nothing. A small tree is tried now
and then all the same, ever more rarely as long as it gives nothing. The text is the base's own whatever is drafted.
"""


SHARE = 0.15  # of the last step in the moving mean
FIRST_PAUSE, LONGEST_PAUSE = 8, 64  # steps without drafting between two trials


def steps_of(
    settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None, state: DecodingState
) -> Step | CapturedStep | AutoStep:
    """What takes the steps of a call.

    Args:
        settings: with the tree, or with the trees to choose from.
        make: a step with the tree of some settings.
        capture: how to capture steps, where they are to be captured.
        state: of the call.
    """
    if isinstance(settings.tree, Ladder):
        return AutoStep(settings, make, capture)
    step = make(settings)
    return capture.prepared(step, state) if capture else step


class AutoStep:
    """A step with one of several trees. Arguments as in `steps_of`."""

    ahead = 0

    def __init__(self, settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None):
        assert isinstance(settings.tree, Ladder)
        self.ladder, self.settings, self.make, self.capture = settings.tree, settings, make, capture
        self.steps: dict[int, Step | CapturedStep] = {}
        self.gain, self.used = 1.0, 0
        self.pause, self.waited = FIRST_PAUSE, 0

    @property
    def tree(self):
        """Of the last step."""
        return self.ladder.trees[self.used]

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages."""
        if state.counted:
            self._learn(state.counted[-1])
        self.used = self._chosen()
        return self._step(state)(state)

    def _learn(self, counts: list[int]) -> None:
        """Take in what the last step gave: tokens of each row, 0 in those that had ended."""
        if not self.used or not any(counts):
            return
        running = [count for count in counts if count]
        gave = sum(running) / len(running) - 1
        self.gain += SHARE * (gave / max(self.ladder.tokens_per_step[self.used] - 1, 0.01) - self.gain)

    def _chosen(self) -> int:
        best = self.ladder.best(self.gain)
        if best or len(self.ladder.trees) == 1:
            self.pause, self.waited = FIRST_PAUSE, 0
            return best
        self.waited += 1
        if self.waited <= self.pause:
            return 0
        self.pause, self.waited = min(2 * self.pause, LONGEST_PAUSE), 0
        return 1

    def _step(self, state: DecodingState) -> Step | CapturedStep:
        found = self.steps.get(self.used)
        if found is None:
            step = self.make(replace(self.settings, draft_tree=self.tree))
            step.slots = self.ladder.slots  # caches of one shape serve all trees
            found = self.capture.prepared(step, state) if self.capture else step
            if self.capture and not isinstance(found, CapturedStep):
                # captured and other steps do not share caches: from now on none is captured
                self.capture = None
                self.steps.clear()
                for cache in state.caches():
                    if cache.fixed:
                        cache.free()
            self.steps[self.used] = found
        return found


# ---- hf_drafthead/generation/decoding.py

"""The decoding loop: prefill once, then step after step until every row has ended (`step` says what a step is).

One step costs one forward of the base over N nodes and emits between 1 and D tokens per row.

Shapes: B rows, P prompt tokens, T prompt positions that are new to the cache, N nodes, D nodes on the longest path,
F*H features, V vocabulary.
"""


FIRST_ROOM = 512  # new positions for which memory is taken at first
FAR = 1 << 40  # where nothing limits a length


@torch.no_grad()
def decode(
    base,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    reader: BaseReader,
    drafter,
    settings: DraftSettings,
    capture: Capture | None = None,
    streamer: BaseStreamer | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    **inputs,
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate with draft heads, as `custom_generate` of the base's own `generate`, which has prepared every argument.

    Args:
        base: the causal LM.
        input_ids: (B, P); (B, 0) where the prompt is `inputs_embeds`.
        logits_processor, stopping_criteria, generation_config: prepared by the base.
        reader: how to run the base.
        drafter: the heads, see `modeling.drafter.Drafter`.
        settings: tree and acceptance.
        capture: how to capture steps, where they are to be captured.
        streamer: is given the prompt and every committed token.
        on_step: is given a record of the prefill and of every step.
        inputs: the base's model inputs: attention_mask, position_ids, past_key_values, inputs_embeds.

    Returns:
        (B, length) token ids, or the output class where `return_dict_in_generate` asks for it.
    """
    rules = Rules(
        logits_processor,
        stopping_criteria,
        generation_config,
        batch_size=input_ids.shape[0],
        prompt_length=input_ids.shape[1],
        device=input_ids.device,
        samples=generation_config.do_sample and settings.acceptance != "typical",
        rejects=generation_config.do_sample and settings.acceptance == "rejection",
    )
    stream = Stream(streamer, input_ids)
    ordinary_cache = inputs.pop("past_key_values")
    known = int(ordinary_cache.get_seq_length())
    watch = Stopwatch(on_step is not None, reader.base.device)
    state = prefill(reader, drafter, settings.tree, input_ids, rules, inputs, ordinary_cache, stream)
    watch.lap("prefill")
    if on_step is not None:
        on_step(StepRecord(0, [[token] for token in newest(state)], [], [1] * rules.batch_size, 0, watch.seconds))
    make = functools.partial(Step, reader, drafter, rules=rules, show=stream.show, timed=on_step is not None)
    step = steps_of(settings, make, capture if state.running(rules.pads) else None, state)
    launched: deque[tuple[Walk, dict[str, float]]] = deque()
    while state.running(rules.pads):
        launched.append(step(state))
        if len(launched) > step.ahead:
            walk, seconds = launched.popleft()
            record = state.note(walk, step.tree.num_nodes, seconds)
            stream.committed(state, rules)
            if on_step is not None:
                watch.lap("step")
                on_step(replace(record, seconds={**seconds, "step": watch.seconds["step"]}))
    return finish(state, rules, ordinary_cache, known, stream)


def prefill(
    reader: BaseReader,
    drafter,
    tree: Tree | Ladder,
    input_ids: torch.Tensor,
    rules: Rules,
    inputs: dict,
    past,
    stream: Stream,
) -> DecodingState:
    """Run the base over the prompt, let it choose the first root, and show the prompt to the drafter."""
    batch, prompt_length = input_ids.shape
    longest = rules.max_length if rules.max_length is not None else prompt_length + FIRST_ROOM
    embeddings = inputs.get("inputs_embeds")
    known = int(past.get_seq_length())
    positions = known + max(prompt_length, 0 if embeddings is None else embeddings.shape[1])
    most = max(longest - prompt_length, 1)  # the first token comes even where a criterion fires on the prompt
    room = min(most, FIRST_ROOM) + tree.max_depth + 2
    config = reader.base.config.get_text_config(decoder=True)
    cache = SlotCache(batch, config.num_hidden_layers, positions + room, tree.num_nodes)
    if known:
        cache.load(past)
    arguments = prefill_inputs(reader.base, input_ids, rules.config, inputs, cache)
    logits, features = _run_prompt(reader, arguments, rules.config.prefill_chunk_size)

    device = next(arguments[name].device for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    mask = inputs.get("attention_mask")
    position_ids = arguments.get("position_ids")
    if position_ids is None:
        next_position = torch.full((batch, 1), cache.extent, device=device)
    else:
        next_position = position_ids[:, -1:].expand(batch, 1).to(device) + 1
    position_shift = next_position - cache.extent
    past_shift = cache.extent - prompt_length
    max_length = FAR if rules.max_length is None else rules.max_length
    last_position = (position_table(config) or FAR) - 1 - position_shift
    limits = Limits(
        max_length=torch.tensor(max_length, device=device),
        eos=torch.tensor(rules.eos_tokens or [-1], device=device),
        last_position=last_position.clamp(max=max_length - 2 + past_shift),
        padding=torch.tensor(rules.pad_token, device=device),
    )
    sequences = torch.full((batch, prompt_length + room), rules.pad_token, dtype=torch.long, device=input_ids.device)
    sequences[:, :prompt_length] = input_ids
    everyone, lengths = list(range(batch)), [prompt_length] * batch
    roots = rules.choose(everyone, logits[:, -1], sequences, lengths)
    sequences[:, prompt_length] = roots
    stream.show(roots)
    lengths = [length + 1 for length in lengths]
    fired = rules.stops(everyone, sequences, lengths)
    root = roots[:, None].to(device)
    seen = _prompt_for_drafter(drafter, root, features, arguments, mask)
    draft_state = drafter.start(batch, positions + most)
    if not all(fired):
        draft_state = drafter.observe(draft_state, *seen)
    return DecodingState(
        rows=Rows(
            sequences=sequences.to(device),
            lengths=torch.tensor(lengths, device=device),
            ends=torch.tensor([length if stop else 0 for length, stop in zip(lengths, fired)], device=device),
            position_shift=position_shift,
            visible=None if mask is None or bool(mask.all()) else mask.bool().to(device),
            draft_state=draft_state,
        ),
        cache=cache,
        limits=limits,
        prompt_length=prompt_length,
        past_shift=past_shift,
        lengths=lengths,
        ends=[length if stop else None for length, stop in zip(lengths, fired)],
    )


def newest(state: DecodingState) -> list[int]:
    """Each row's newest token."""
    return state.rows.sequences.gather(1, state.rows.lengths[:, None] - 1)[:, 0].tolist()


class Stream:
    """Gives a streamer the prompt and every committed token, one put per position as in transformers."""

    def __init__(self, streamer: BaseStreamer | None, input_ids: torch.Tensor):
        self.streamer, self.position = streamer, input_ids.shape[1]
        if streamer is not None:
            streamer.put(input_ids.cpu())

    def show(self, tokens: torch.Tensor) -> None:
        """Put the next position (B,)."""
        if self.streamer is not None:
            self.streamer.put(tokens.cpu())
            self.position += 1

    def committed(self, state: DecodingState, rules: Rules) -> None:
        """Put every position that all rows have reached and that was not shown yet."""
        if self.streamer is None:
            return
        still = [length for length, end in zip(state.lengths, state.ends) if end is None or not rules.pads]
        ready = min(still) if still else max(state.lengths)
        if all(end is not None for end in state.ends):
            ready = min(ready, max(end for end in state.ends if end is not None))
        while self.position < ready:
            self.show(state.rows.sequences[:, self.position])

    def end(self) -> None:
        """Tell the streamer that nothing follows."""
        if self.streamer is not None:
            self.streamer.end()


def finish(
    state: DecodingState, rules: Rules, ordinary_cache, known: int, stream: Stream
) -> DraftHeadGenerateOutput | torch.Tensor:
    """What the base's generate would return, in its form."""
    length = max(end for end in state.ends if end is not None)
    if rules.tape is not None and rules.draws_ahead:
        rules.tape.rewind(length - state.prompt_length)
    stream.end()
    sequences = state.rows.sequences[:, :length].to(rules.device, copy=True)
    in_dict = rules.config.return_dict_in_generate
    if in_dict or getattr(ordinary_cache, "_is_user_defined", False):
        state.cache.unload(ordinary_cache, known, length - 1 + state.past_shift)
    if not in_dict:
        return sequences
    steps = torch.tensor(state.counted, dtype=torch.long, device=sequences.device)
    new = length - state.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        past_key_values=ordinary_cache,
        accepted_lengths=steps.reshape(-1, len(state.lengths)).T,
    )


def _run_prompt(reader: BaseReader, arguments: dict, chunk: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the base over the prompt, which becomes past, in chunks where the call asks for them.

    Returns:
        logits at the last position, and features at all of them (B, T, F*H).
    """
    tokens = arguments.get("input_ids")
    if chunk is None or tokens is None:
        logits, features = reader(True, **arguments)
        arguments["past_key_values"].count(features.shape[1])
        return logits, features
    parts: list[torch.Tensor] = []
    done, cache = 0, arguments["past_key_values"]
    mask = arguments.get("attention_mask")
    known = cache.extent
    for part in tokens.split(chunk, dim=1):
        end = done + part.shape[1]
        now = {**arguments, "input_ids": part}
        if mask is not None:
            now["attention_mask"] = mask[:, : known + end]
        if arguments.get("position_ids") is not None:
            now["position_ids"] = arguments["position_ids"][:, done:end]
        logits, features = reader(True, **now)
        parts.append(features)
        cache.count(part.shape[1])
        done = end
    return logits, torch.cat(parts, dim=1)


def _prompt_for_drafter(drafter, root, features, arguments, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the drafter may observe of the prompt: valid positions first, each with the token that follows it.

    A drafter without a memory needs the last position only; so does one whose prompt came as embeddings, since the
    tokens are not known. One that reads nothing of the base observes every token, the first one too.
    """
    rows, length = features.shape[:2]
    tokens = arguments.get("input_ids")
    if not drafter.keeps_history or tokens is None:
        return features[:, -1:], root, torch.ones(rows, dtype=torch.long, device=features.device)
    follow = torch.cat([tokens[:, 1:] if drafter.reads else tokens, root], dim=1).to(features.device)  # (B, T)
    valid = torch.ones_like(follow)
    if mask is not None:
        valid[:, :length] = mask[:, -length:].to(valid)
    if not drafter.reads:
        features = features.new_zeros(*follow.shape, 0)
    if mask is not None:
        order = valid.argsort(dim=1, descending=True, stable=True)
        features, follow = features.take_along_dim(order[..., None], dim=1), follow.gather(1, order)
    return features, follow, valid.sum(1)


# ---- hf_drafthead/generation/mixin.py

"""`generate()` of a model with draft heads: decide whether the tree can go, then let the base prepare everything."""


logger = logging.get_logger(__name__)

# What the base's preparation hands over that the loop knows how to use.
KNOWN_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "inputs_embeds",
    "use_cache",
    "logits_to_keep",
    "cache_position",
}


class CallConfig(GenerationConfig):
    """The settings of one call, in which None is an answer: the base's own defaults do not fill it."""

    settled: tuple[str, ...] = ()

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        if defaults_only:
            kwargs = {name: value for name, value in kwargs.items() if name not in self.settled}
        return super().update(defaults_only=defaults_only, allow_custom_entries=allow_custom_entries, **kwargs)


class DraftHeadGenerationMixin(GenerationMixin):
    """Gives a model with `base` and `drafter` a `generate` that returns what `base.generate` returns, sooner."""

    def generate(  # type: ignore[override]
        self,
        inputs: torch.Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor=None,
        stopping_criteria=None,
        prefix_allowed_tokens_fn=None,
        synced_gpus: bool | None = None,
        assistant_model=None,
        streamer=None,
        negative_prompt_ids: torch.Tensor | None = None,
        negative_prompt_attention_mask: torch.Tensor | None = None,
        custom_generate=None,
        *,
        draft_tree: str | DraftTree | DynamicTree | list | dict | None = None,
        acceptance: str | None = None,
        posterior_threshold: float | None = None,
        posterior_alpha: float | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
        **kwargs: Any,
    ) -> DraftHeadGenerateOutput | GenerateDecoderOnlyOutput | torch.Tensor:
        """Generate what the base's `generate` would with the same arguments, in fewer forward passes.

        Takes every argument of `GenerationMixin.generate`, in its order. What a tree of guesses cannot do (beam search,
        attentions, an assistant model, a cache that cannot be compacted, ...) is decoded by the base itself, with one
        warning. With `cache_implementation="static"` or `compile_config` the whole step is compiled once for a tree and
        a batch size, and kept for later calls.

        Args:
            inputs: (B, P) prompt token ids, left-padded where B > 1.
            generation_config: as in transformers; `model.generation_config` also holds the four settings below.
            draft_tree: name of a published tree, rank paths or a `DraftTree`; "dynamic", {"dynamic": {"nodes": 32,
                "depth": 6, "width": 8}} or a `DynamicTree`, whose shape follows the guesses; "auto", in each step the
                calibrated tree that pays most, or none; by default the tree that was calibrated for this device, dtype
                and batch size, else the generation config's.
            acceptance: "exact" (the base's own text; under sampling its distribution and, with the same seed, its
                tokens), "rejection" (speculative sampling: the base's distribution, not its seed), or "typical"
                (Medusa's lossy rule: under sampling it keeps any guess that is likely enough, so the text is NOT a
                sample of the base). Greedy decoding is exact with all of them.
            posterior_threshold, posterior_alpha: epsilon and delta of typical acceptance, both from 0 to 1.
            on_step: is given a `StepRecord` after the prefill and after every step; the stages are timed for it.

        Returns:
            (B, length) token ids; with `return_dict_in_generate` an output that also holds `accepted_lengths`.

        Raises:
            TypeError, ValueError: a setting that does not fit, or an empty prompt.
        """
        _refuse_empty(inputs if inputs is not None else kwargs.get("input_ids"), kwargs)
        config, kwargs = self._merged_config(generation_config, kwargs)
        asked = {
            "draft_tree": draft_tree,
            "acceptance": acceptance,
            "posterior_threshold": posterior_threshold,
            "posterior_alpha": posterior_alpha,
        }
        settings = self._draft_settings(config, asked)
        call = {
            "generation_config": config,
            "logits_processor": logits_processor,
            "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
            "synced_gpus": synced_gpus,
            "negative_prompt_ids": negative_prompt_ids,
            "negative_prompt_attention_mask": negative_prompt_attention_mask,
            **kwargs,
        }
        try:
            if custom_generate is not None:
                raise Unsupported("custom_generate is given")
            _check_call(self.base, config, assistant_model, synced_gpus)
            loop = functools.partial(
                _decode_if_possible,
                reader=self._base_reader(),
                drafter=self.drafter,
                settings=settings,
                capture=Capture.wanted(self, config),
                streamer=streamer,
                on_step=on_step,
            )
            return self.base.generate(
                inputs, custom_generate=loop, **call | _stop_strings_as_criterion(config, stopping_criteria, kwargs)
            )
        except Unsupported as reason:
            logger.warning_once(f"Draft heads are not used, the base decodes by itself: {reason}.")
        output = self.base.generate(
            inputs,
            stopping_criteria=stopping_criteria,
            assistant_model=assistant_model,
            streamer=streamer,
            custom_generate=custom_generate,
            **call,
        )
        if type(output) is GenerateDecoderOnlyOutput:
            return DraftHeadGenerateOutput(**output)
        return output

    def _merged_config(
        self, given: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[CallConfig, dict[str, Any]]:
        """The call's generation config with the model's for a default, and the arguments that are not part of it."""
        config = CallConfig()
        config.__dict__.update(copy.deepcopy(vars(self.generation_config if given is None else given)))
        if given is not None:
            config.update(**self.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
        lengths = ("max_length", "min_length")  # the base wants to know whether these are its defaults
        defaults = {
            name: value for name, value in config._get_default_generation_params().items() if name not in lengths
        }
        config.update(**defaults, defaults_only=True)
        rest = config.update(**kwargs)
        config.settled = tuple(name for name, value in vars(config).items() if value is None and name not in lengths)
        return config, rest

    def _draft_settings(self, config: GenerationConfig, asked: dict[str, Any]) -> DraftSettings:
        """The call's settings, else the generation config's, else the defaults; checked."""
        if asked["draft_tree"] not in (None, AUTO):  # a tree that the call asks for comes before a measured one
            asked = {**asked, "calibration": []}
        vocabulary = self.base.config.get_text_config(decoder=True).vocab_size
        return DraftSettings.from_config(config, **asked).resolved(self.drafter.max_depth, vocabulary)

    def why_no_drafts(self) -> str | None:
        """Why no call of `generate` can draft on this base, found out by running it once; None if calls can."""
        try:
            self._base_reader()
        except Unsupported as reason:
            return str(reason)
        return None

    def _base_reader(self) -> BaseReader:
        """How to run this base, probed once for each attention implementation, dtype and base."""
        base = self.base
        if base.training or self.drafter.training:  # dropout would draw from the generator that sampling uses
            raise Unsupported("the model is in training mode, call model.eval() first")
        probed, known = self.__dict__.get("_readers", (None, {}))
        if probed is not base:  # by identity, which a copy of the whole model keeps
            known = {}
            self.__dict__["_readers"] = (base, known)
        key = (base.config._attn_implementation, base.dtype, self.drafter.reads)
        if key not in known:
            try:
                known[key] = probe(base, self.drafter.reads)
            except Unsupported as reason:
                known[key] = str(reason)  # not the exception, whose traceback would keep the probe's tensors alive
        if isinstance(known[key], str):
            raise Unsupported(known[key])
        return known[key]


def _decode_if_possible(base, input_ids, *, reader, drafter, settings, capture, streamer, on_step, **call):
    """The loop, as the base's `custom_generate`, after a look at what the base has prepared."""
    processors, criteria = call.pop("logits_processor"), call.pop("stopping_criteria")
    config = call.pop("generation_config")
    inputs = _of_text(base, call)
    if unknown := sorted(set(inputs) - KNOWN_INPUTS):
        raise Unsupported(f"the base takes the model input {', '.join(unknown)}")
    past = inputs.get("past_key_values")
    if past is None or not can_load(past):
        raise Unsupported(f"a cache of type {type(past).__name__} cannot be compacted")
    if settings.acceptance != "exact" and config.do_sample:
        if others := sorted({type(p).__name__ for p in processors if type(p) not in ROW_BY_ROW}):
            raise Unsupported(f"{settings.acceptance} acceptance cannot show {', '.join(others)} all nodes at once")
    position_ids = inputs.get("position_ids")
    if position_ids is not None and position_ids.dim() != 2:
        raise Unsupported("position ids have more than one axis per token")
    mask = inputs.get("attention_mask")  # as long as the prompt and the past together, also where it was dropped
    if settings.calibration or settings.draft_tree == AUTO:
        situation = Situation.of(base, drafter, len(input_ids), capture is not None)
        vocabulary = base.config.get_text_config(decoder=True).vocab_size
        settings = settings.calibrated(situation, drafter.max_depth, vocabulary)
    positions = getattr(config, "_mask_length", input_ids.shape[1]) if mask is None else mask.shape[1]
    longest = positions + config.max_length - input_ids.shape[1] + settings.tree.max_depth
    check_length(base.config.get_text_config(decoder=True), longest, settings.tree.num_nodes)
    inputs.pop("cache_position", None)
    return decode(
        base,
        input_ids,
        processors,
        criteria,
        config,
        reader=reader,
        drafter=drafter,
        settings=settings,
        capture=capture,
        streamer=streamer,
        on_step=on_step,
        **inputs,
    )


def _of_text(base, call: dict[str, Any]) -> dict[str, Any]:
    """The model inputs of a call, without what tells a base for images and text that there are no images."""
    inputs = {name: value for name, value in call.items() if value is not None}
    if base.config.get_text_config(decoder=True) is base.config:
        return inputs
    if inputs.get("mm_encoder_outputs") == {}:
        del inputs["mm_encoder_outputs"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs and not bool(inputs[name].any()):
            del inputs[name]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3 and bool((positions == positions[:1]).all()):
        inputs["position_ids"] = positions[0]  # a position of the text is the same on every axis
    return inputs


def _check_call(base, config: GenerationConfig, assistant_model, synced_gpus: bool | None) -> None:
    """Refuse, before anything runs, what the loop cannot do.

    Raises:
        Unsupported: with the reason.
    """
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unsupported(f"the generation mode is {mode.value.replace('_', ' ')}")
    if config.use_cache is False:
        raise Unsupported("use_cache is False")
    if config.cache_implementation not in (None, "dynamic", "hybrid", "static"):
        raise Unsupported(f"cache_implementation is {config.cache_implementation!r}")
    if config.output_attentions or config.output_hidden_states:
        raise Unsupported("attentions or hidden states are asked for")
    if config.token_healing:
        raise Unsupported("token healing rewrites the prompt")
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(base)
    if synced_gpus or (synced_gpus is None and sharded and dist.is_initialized() and dist.get_world_size() > 1):
        raise Unsupported("several processes must stay in step")


def _stop_strings_as_criterion(config: CallConfig, given, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make `stop_strings` work: with a custom loop transformers loses the tokenizer on the way."""
    if config.stop_strings is None:
        return {"stopping_criteria": given}
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings is {config.stop_strings!r}, but no tokenizer was given: pass tokenizer= to generate()."
        )
    without = copy.deepcopy(config)
    without.stop_strings = None
    without.settled += ("stop_strings",)
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, config.stop_strings), *(given or [])])
    return {"generation_config": without, "stopping_criteria": criteria}


def _refuse_empty(input_ids: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    if input_ids is not None and kwargs.get("inputs_embeds") is None and input_ids.shape[-1] == 0:
        raise ValueError(
            "the prompt is empty (0 tokens): give at least one token, such as the tokenizer's beginning of text."
        )


# ---- hf_drafthead/modeling/decoder_layer.py

"""A decoder layer of the base's own kind, as some drafters have one: with rotary positions and a cache of its own.

Shapes: B rows, T positions, A newly verified positions, n nodes of a level, M nodes of the tree so far, H hidden.
"""


FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm")


class DecoderLayer(nn.Module):
    """One layer as transformers builds it from a model's config; attention to all positions unless told otherwise.

    Args:
        config: text config of the base, or of another model whose layer is to be used.
        input_norm: False replaces the layer's first norm by the identity (EAGLE).
        final_norm: normalise the output as the model does after its last layer (Hydra++).
        window: how many positions the layer sees; None for all.

    Raises:
        ValueError: no such layer can be built from this config.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        input_norm: bool = True,
        final_norm: bool = False,
        window: int | None = None,
    ) -> None:
        super().__init__()
        self.window = window
        model = _one_layer_model(config)
        self.layer = model.layers[0]
        self.rotary = model.rotary_emb
        if not input_norm:
            self.layer.input_layernorm = nn.Identity()
        norms = [getattr(model, name) for name in FINAL_NORMS if hasattr(model, name)]
        self.norm = norms[0] if final_norm and norms else nn.Identity()
        self._sdpa = model._supports_sdpa
        self._takes_causal_flag = model.config._attn_implementation == "sdpa"
        layer_arguments = inspect.signature(type(self.layer).forward).parameters
        self._cache_argument = "layer_past" if "layer_past" in layer_arguments else "past_key_values"
        # Models with several kinds of layers ask which kind the frequencies are for.
        several = "layer_type" in inspect.signature(type(self.rotary).forward).parameters
        self._rotary_kind = {"layer_type": "full_attention"} if several else {}

    def follow(self, base: PreTrainedConfig) -> None:
        """Compute attention and experts as the base does.

        Attention that takes no mask of a tree, such as flash attention, is the exception: the layer keeps its own.
        """
        attention = base._attn_implementation
        heeded = attention == "eager" or (attention == "sdpa" and self._sdpa)
        if heeded:
            self._takes_causal_flag = attention == "sdpa"
        for module in self.modules():
            config = getattr(module, "config", None)  # from which a module reads both
            if isinstance(config, PreTrainedConfig):
                config._attn_implementation_internal = attention if heeded else config._attn_implementation
                config._experts_implementation_internal = base._experts_implementation

    def over_text(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Every position of a text (B, T, H) sees itself and those before it; padding (B, T) is seen by none."""
        positions, seen = self._of_text(x, attention_mask)
        if seen is None and not self._takes_causal_flag:
            seen = self._causal(positions)
        return self._run(x, positions, self._additive(seen, x))

    def over_chains(self, cache: Cache, x: Tensor, step: int, attention_mask: Tensor | None) -> Tensor:
        """A step of chains of guesses, one chain from every position of a text, as EAGLE-3 is trained.

        In step k a position sees the text up to itself as it was in step 0, and itself in the steps since: what a node
        k below it would see in a generation.

        Args:
            cache: an ordinary one, of the steps before.
            x: (B, T, H).
            step: k, from 0 on.
            attention_mask: (B, T) 1 where the text is real.
        """
        positions, seen = self._of_text(x, attention_mask, step)
        seen = self._causal(positions) if seen is None else seen
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device).expand_as(seen)
        return self._run(x, positions + step, self._additive(torch.cat([seen, *[itself] * step], dim=2), x), cache)

    def over_verified(self, cache: SlotCache, x: Tensor, lengths: Tensor) -> Tensor:
        """New verified positions (B, A, H), the first lengths[b] of them valid: they are remembered."""
        count = x.shape[1]
        order = torch.arange(count, device=x.device)
        if cache.extent == 0 and not cache.fixed:  # behind nothing, plain causal attention is all there is
            cache.append()
            seen = None if self._takes_causal_flag and not self._hides(count) else self._causal(order[None])
            out = self._run(x, order[None], self._additive(seen, x), cache)
            cache.count(count, lengths.to(x.device))
            return out
        cache.place(count)
        mask = self._mask(cache, (order <= order[:, None])[None], order[None], x)
        out = self._run(x, cache.lengths[:, None] + order, mask, cache)
        cache.keep(order.expand(len(x), -1), lengths.to(x.device))
        return out

    def over_nodes(self, cache: SlotCache, x: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """A level of nodes (B, n, H): each sees the verified positions and its ancestors, and is soon forgotten.

        Args:
            cache: of the verified positions, and of the levels before.
            x: (B, n, H).
            depth: how many positions the nodes lie behind the last verified one.
            ancestors: (B, n, M) which nodes of the tree so far each sees, those of this level first, then those of the
                level before, and so on: the order in which the cache holds them.
        """
        count = x.shape[1]
        cache.place(count, again=ancestors.shape[2] > count)
        depths = torch.full((1, count), depth - 1, device=x.device)
        return self._run(x, cache.lengths[:, None] + depths, self._mask(cache, ancestors, depths, x), cache)

    def without_order(self, x: Tensor) -> Tensor:
        """A set (N, K, H): everything sees everything, and nothing has a position."""
        nowhere = torch.zeros(1, x.shape[1], dtype=torch.long, device=x.device)  # position 0 is turned by nothing
        seen = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return self._run(x, nowhere, self._additive(seen, x))

    def _mask(self, cache: SlotCache, ancestors: Tensor, depths: Tensor, x: Tensor) -> Tensor:
        return slot_mask(ancestors, cache.lengths, cache.seen_extent, x.dtype, window=self.window, depths=depths)

    def _of_text(self, x: Tensor, attention_mask: Tensor | None, ahead: int = 0) -> tuple[Tensor, Tensor | None]:
        """Positions (B or 1, T) of a text, and what is seen (B, T, T) from `ahead` behind each; None: all up to it."""
        count = x.shape[1]
        if attention_mask is None or bool(attention_mask[:, 0].all()):  # padding on the right is never looked back at
            positions = torch.arange(count, device=x.device).unsqueeze(0)
            return positions, self._causal(positions, ahead) if self._hides(count + ahead) else None
        real = attention_mask.to(x.device).bool()
        positions = (real.cumsum(1) - 1).clamp(min=0)
        # A padded position sees itself, so that no row of scores is empty.
        itself = torch.eye(count, dtype=torch.bool, device=x.device)
        before = itself.cumsum(1).T.bool() & self._causal(positions, ahead)
        return positions, (real.unsqueeze(1) & before) | itself

    def _causal(self, positions: Tensor, ahead: int = 0) -> Tensor:
        """Which positions (B, T, T) are not behind a position, and not too far before what is `ahead` behind it."""
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        seen = distance >= 0
        return seen if self.window is None else seen & (distance + ahead < self.window)

    def _hides(self, count: int) -> bool:
        """Whether something in a text of so many positions is outside the window."""
        return self.window is not None and count > self.window

    def _additive(self, seen: Tensor | None, x: Tensor) -> Tensor | None:
        """The additive mask of what is seen (B, A, S), for eager attention would add a boolean one as 0 and 1."""
        if seen is None:
            return None
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        return mask.masked_fill_(~seen, torch.finfo(x.dtype).min).unsqueeze(1)

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None) -> Tensor:
        return self.norm(self._through(self.layer, x, positions, mask, cache))

    def _through(
        self, layer: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """What a layer makes of x."""
        out = layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions, **self._rotary_kind),
            **{self._cache_argument: cache},
        )
        return out[0] if isinstance(out, tuple) else out


def has_layers(config: PreTrainedConfig) -> bool:
    """Whether a `DecoderLayer` can be built from a config, with one rotary position per token: tried without memory."""
    try:
        with torch.device("meta"), no_init_weights():
            layer = DecoderLayer(config)
            layer.rotary(torch.zeros(1, 2, config.hidden_size), torch.zeros(1, 2), **layer._rotary_kind)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


def _one_layer_model(config: PreTrainedConfig) -> Any:
    """The model of a config with a single layer, full attention and no vocabulary."""
    small = copy.deepcopy(config)
    try:
        small.num_hidden_layers = 1
        small.vocab_size, small.pad_token_id = 1, 0
        if getattr(small, "layer_types", None):
            small.layer_types = ["full_attention"]
        if getattr(small, "mlp_layer_types", None):
            small.mlp_layer_types = small.mlp_layer_types[:1]
        model_class = MODEL_MAPPING[type(config)]
        small._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
        model = model_class(small)
        found = inspect.signature(type(model.layers[0]).forward).parameters
        fits = hasattr(model, "rotary_emb") and {"attention_mask", "position_embeddings"} <= set(found)
    except (ArithmeticError, AttributeError, KeyError, IndexError, TypeError):
        fits = False
    if not fits:
        raise ValueError(
            f"no decoder layer with rotary positions can be built from a {config.model_type!r} config: give "
            "layer_config= of a model that has one (such as a LlamaConfig of the same hidden size), or use Medusa or "
            "Hydra heads."
        )
    return model


# ---- hf_drafthead/modeling/files.py

"""Files that others wrote: read within limits, or refused in one line before they cost time or memory.

A checkpoint's files are JSON and safetensors. Nothing in them is executed or unpickled.
"""


MAX_JSON = 2 * 2**20  # bytes; the largest configs of the Hub have some 100 kB
MAX_HEADER = 4 * 2**20  # bytes; a tensor takes some 100, and no file of a model is known to hold 30,000
MAX_NESTING = 32  # levels of JSON; a config with sub-configs and their settings has 6

shortened = reprlib.Repr()  # what a file says, cut to a length that fits a message
shortened.maxstring = shortened.maxother = 80


def read_json(file: str | os.PathLike) -> dict[str, Any]:
    """The fields of a JSON file that holds one object, such as a config.

    Raises:
        OSError: it is too large, too deeply nested, no JSON, or no object.
    """
    size = os.path.getsize(file)
    if size > MAX_JSON:
        raise OSError(
            f"{os.fspath(file)!r} has {size:,} bytes, expected at most {MAX_JSON:,}: it is no file that "
            "save_pretrained has written."
        )
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8-sig"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds {shortened.repr(found)}, expected an object of fields")
        if is_deep(found):
            raise ValueError(f"its fields are nested more than {MAX_NESTING} levels deep")
    except (ValueError, RecursionError) as error:
        raise OSError(f"{os.fspath(file)!r} is not readable JSON ({error}): copy or download it again.") from None
    return found


def is_deep(value: Any) -> bool:
    """Whether lists and dicts are nested deeper than a function that calls itself, as `copy.deepcopy`, should walk."""
    level, depth = [value], 0
    while level and depth <= MAX_NESTING:
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        level, depth = [part for parts in inner for part in parts], depth + 1
    return bool(level)


@contextmanager
def open_tensors(file: str | os.PathLike) -> Iterator[Any]:
    """An open safetensors file, as `safetensors.safe_open` gives it.

    Raises:
        OSError: it cannot be read: its header is too large or names a tensor twice, is cut off, or does not describe
            the bytes that follow it.
    """
    try:
        _check_header(file)
    except (ValueError, RecursionError) as error:
        raise _unreadable(file, error) from None
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: str | os.PathLike, error: Exception) -> OSError:
    return OSError(
        f"{os.fspath(file)!r} is not a readable safetensors file ({str(error).splitlines()[0]}): copy or download it "
        "again, and if it stays so, ask its author."
    )


def _check_header(file: str | os.PathLike) -> None:
    """What the library does not look at: that the header is of reasonable size, and names every tensor once."""
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, expected at most {MAX_HEADER:,}")
        json.loads(stream.read(length), object_pairs_hook=_refuse_duplicates)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"its header has {shortened.repr(twice)} twice")
    return found


def in_one_line(error: BaseException) -> str:
    """An error of another library inside a message: its type and text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}".rstrip(" .:")


# ---- hf_drafthead/modeling/layers.py

"""What two families share: residual blocks, output projections, and the last verified position of every row.

Shapes: B rows, A newly verified positions, K heads, H hidden, V vocabulary.
"""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at the start (Medusa, section 2.1.1; b as in the published code)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ParallelBlocks(nn.Module):
    """One residual block per head, all heads in one batched product.

    Attributes:
        weight: (K, H, H), head i's W in row i.
        bias: (K, H).
    """

    def __init__(self, heads: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads, hidden_size))
        bound = hidden_size**-0.5
        nn.init.uniform_(self.bias, -bound, bound)  # what torch gives a linear layer's bias

    def forward(self, x: Tensor) -> Tensor:
        """Head i's block on x[i]; x is (K, N, H)."""
        return x + F.silu(torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2)))


class OutputProjections(nn.Module):
    """From a head's state to logits: each head's own projection, or the base's lm_head for all of them.

    Args:
        heads: K.
        hidden_size: H.
        vocab_size: V.
        shared: use the base's lm_head, and have no parameters.
        bias: give the own projections a bias.
        rank: split the own projections in two factors of this rank (Amphista, table 11); None for full ones.
    """

    def __init__(
        self, heads: int, hidden_size: int, vocab_size: int, shared: bool, bias: bool = False, rank: int | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        self.rank = hidden_size if rank is None else rank
        own = 0 if shared else heads
        low = 0 if rank is None else own
        self.down = nn.ModuleList(nn.Linear(hidden_size, self.rank, bias=False) for _ in range(low))
        self.up = nn.ModuleList(nn.Linear(self.rank, vocab_size, bias=bias) for _ in range(own))

    def copy_from_base(self, base: Any) -> None:
        """Start from the base's lm_head, or the nearest that a low rank allows."""
        if self.shared:
            return
        with torch.no_grad():
            start = weight_of(base.get_output_embeddings(), like=next(self.parameters()))
            if start.is_meta:
                return
            if self.down:
                # Its best approximation: W's singular vectors, from the small W'W (H, H), for a full decomposition of
                # (V, H) takes minutes.
                wide = start.float()
                basis = torch.linalg.eigh(wide.T @ wide).eigenvectors.flip(1)[:, : self.rank]  # largest first
                start = wide @ basis
                for weight in self.down.parameters():
                    weight.copy_(basis.T)
            for parameter in self.up.parameters():
                if parameter.dim() == 2:  # not a bias
                    parameter.copy_(start)

    def logits(self, base: Any, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., H).

        Not a `forward`: the hooks of an offloaded model would try to move the base, being an argument.
        """
        if self.shared:
            return base_logits(base, hidden)
        if self.down:
            hidden = self.down[head](hidden)
        return self.up[head](hidden)


def base_logits(base: Any, hidden: Tensor) -> Tensor:
    """What the base's lm_head makes of states (..., H), in its own dtype: heads in training have another."""
    head = base.get_output_embeddings()
    dtype = head.weight.dtype
    return head(hidden.to(dtype) if dtype.is_floating_point else hidden)


def last_valid(kept: Tensor, new: Tensor, lengths: Tensor) -> Tensor:
    """Each row's last valid position of `new`; what was kept where a row has none.

    Args:
        kept: (B, H).
        new: (B, A, H).
        lengths: (B,) valid positions per row.
    """
    lengths = lengths.to(new.device)
    picked = new[torch.arange(new.shape[0], device=new.device), (lengths - 1).clamp(min=0)]
    return torch.where((lengths > 0).unsqueeze(1), picked, kept.to(new.device))


def weight_of(linear: Any, like: Tensor) -> Tensor:
    """The weight (out, in) of a linear layer, also of one that is quantized or offloaded, where `like` is."""
    weight = linear.weight
    if weight.is_floating_point() and weight.dtype.itemsize >= 2 and (like.is_meta or not weight.is_meta):
        return weight.to(like)
    size = linear.in_features
    unit_vectors = torch.zeros(1 + size, size, dtype=like.dtype, device=like.device)
    unit_vectors[1:].fill_diagonal_(1.0)
    out = linear(unit_vectors).to(like)
    return (out[1:] - out[0]).T  # the first row, of zeros, gave the bias


def llama_like(text: PreTrainedConfig, layers: int) -> LlamaConfig:
    """The config of a LLaMA of the sizes that a base's text config gives, with so many layers."""
    width = text.hidden_size
    heads = getattr(text, "num_attention_heads", None) or max(width // 128, 1)
    rope = getattr(text, "rope_parameters", None) or {}
    special = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaConfig(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or width // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        # Scaled frequencies are for texts longer than is trained on; some change with the length of the text.
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
        tie_word_embeddings=bool(getattr(text, "tie_word_embeddings", False)),
        **special,
    )


# ---- hf_drafthead/modeling/config.py

"""What every draft-head model is configured by: its base, and how many heads guess ahead of it."""


MODEL_TYPE_PREFIX = "drafthead_"  # of every family's model_type
ABOUT_THE_BASE = {"base_config", "base_included", "base_model_name_or_path", "base_model_revision"}
ABOUT_THE_BASE |= {"adapter_name_or_path", "adapter_revision"}
# A config builds modules before a tensor is looked at: these keep what it can cost far above anything published.
MAX_HEADS = 64
MAX_LAYERS = 32  # of one head
# Configs of transformers make lists of these lengths as soon as they are created; the fields end in ...
MAX_COUNTS = {"layer": 1024, "layers": 1024, "labels": 2**16}
# What a file may not choose: which code computes attention and experts.
IMPLEMENTATIONS = {"attn_implementation", "experts_implementation"}
IMPLEMENTATIONS |= {f"_{name}" for name in IMPLEMENTATIONS} | {f"_{name}_internal" for name in IMPLEMENTATIONS}

CLASS_FIELDS = {"attribute_map", "sub_configs"}  # of a config's class, never of a file
# What code that is given any model's config asks of it: the base's text config answers, and holds what is set.
OF_THE_BASE = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"}
OF_THE_BASE |= {"num_attention_heads", "num_key_value_heads", "head_dim", "use_cache"}
OF_THE_BASE |= {"bos_token_id", "eos_token_id", "pad_token_id"}


class DraftHeadConfig(PreTrainedConfig):
    """The fields that all families share; a family's config adds its own.

    Args:
        base_config: config of the base model, as a config or as its dict. It is copied: a config object that a live
            model holds is never changed.
        base_model_name_or_path: where the base is loaded from when a checkpoint holds the heads only. A relative path
            is looked up in the checkpoint's own folder.
        base_model_revision: commit of the base that the heads were trained on, if the base came from the Hub.
        adapter_name_or_path: the PEFT adapter that the base had when the heads were trained: `adapter`, the folder of
            the checkpoint that holds it, or the Hub id that it came from, which is used if there is no such folder.
        adapter_revision: commit of the adapter, if it came from the Hub.
        base_included: True in a checkpoint that holds the base's weights as well.
        num_draft_heads: tokens guessed ahead of the base's own next token.

    Raises:
        ValueError: a field is out of range, or two of them contradict each other.
    """

    model_type = "drafthead"
    sub_configs: ClassVar = {"base_config": AutoConfig}

    base_config: dict[str, Any] | PreTrainedConfig | None = None
    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    adapter_name_or_path: str | None = None
    adapter_revision: str | None = None
    base_included: bool = False
    num_draft_heads: int = 4

    def __post_init__(self, **kwargs: Any) -> None:
        # The parent's __post_init__ resets the attention implementation of sub-configs in place, which would turn a
        # live base non-causal: only ever hand it a copy.
        for name in self.sub_configs:
            setattr(self, name, _sub_config(name, getattr(self, name)))
        try:
            super().__post_init__(**kwargs)
        except Exception as error:  # transformers checks few of the fields that it sets
            raise ValueError(
                f"the config has a field that cannot be used ({in_one_line(error)}): correct it."
            ) from error
        self.check()

    def check(self) -> None:
        """Refuse values that cannot be built; families extend it."""
        self._check_count("num_draft_heads", 1, MAX_HEADS)
        self._check_flag("base_included")
        for name in sorted(ABOUT_THE_BASE - {"base_config", "base_included"}):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} is {shortened.repr(value)}: expected text, or None.")
        if isinstance(self.base_config, DraftHeadConfig):
            raise ValueError(
                f"base_config is of a model with draft heads itself ({self.base_config.model_type!r}): give the config "
                "of the model that these heads are for."
            )
        if isinstance(self.base_config, PreTrainedConfig):
            text = self.get_text_config()
            for name in ("hidden_size", "vocab_size"):
                value = getattr(text, name, None)
                if type(value) is not int or value < 1:
                    raise ValueError(
                        f"base_config has {name} {shortened.repr(value)}: expected a whole number of at least 1."
                    )

    @property
    def family(self) -> str:
        """The family's short name, as the papers name it: `medusa`, `hydra`, `hydra++`, `amphista`, ..."""
        return self.model_type.removeprefix(MODEL_TYPE_PREFIX)

    @property
    def max_depth(self) -> int | None:
        """Deepest level of a draft tree that the heads can guess; None if there is no limit."""
        return self.num_draft_heads

    @classmethod
    def heads_fields(cls) -> set[str]:
        """Names of the fields that describe the heads, without those about the base and those of every config."""
        return (
            {field.name for field in fields(cls)} - {field.name for field in fields(PreTrainedConfig)} - ABOUT_THE_BASE
        )

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
        """The base's text config; this config itself while there is no base."""
        if not isinstance(self.base_config, PreTrainedConfig):
            return self
        return self.base_config.get_text_config(decoder=decoder, encoder=encoder)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers, but a dict of another kind of model is refused, where transformers logs it.

        Raises:
            ValueError: it is of another kind, or there are values that no config can be made of.
        """
        found = config_dict.get("model_type")
        if found not in (None, cls.model_type):
            raise ValueError(
                f"the config has model_type {found!r}, expected {cls.model_type!r}: read it with AutoConfig."
            )
        own = {field.name for field in fields(cls)}  # which `check` looks at
        _refuse_costly(
            "the config", {name: value for name, value in config_dict.items() if name not in own - {"base_config"}}
        )
        _refuse_shadowing("the config", cls, config_dict)
        given = {name: value for name, value in config_dict.items() if name not in IMPLEMENTATIONS | OF_THE_BASE}
        try:
            return super().from_dict(given, **kwargs)
        except ValueError:
            raise
        except Exception as error:  # of the validation that transformers' configs have
            raise ValueError(
                f"the config has a field that cannot be used ({in_one_line(error)}): correct it."
            ) from error

    @classmethod
    def _dict_from_json_file(cls, json_file: str | os.PathLike) -> Any:
        read_json(json_file)  # within limits, or refused
        return super()._dict_from_json_file(json_file)

    @property
    def own_layer(self) -> PreTrainedConfig:
        """Of which model the decoder layers of the heads are; for families that have some."""
        return getattr(self, "layer_config", None) or self.get_text_config()

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write `config.json`; a base that lies beside the checkpoint is written as a relative path."""
        saved = copy.deepcopy(self)
        saved.base_model_name_or_path = portable(self.base_model_name_or_path, save_directory)
        super(DraftHeadConfig, saved).save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What `config.json` holds: without the base's local path, and without its quantization unless it is included.

        In a heads-only checkpoint a quantization config would speak of a base that is not there.
        """
        fields = super().to_diff_dict()
        base = fields.get("base_config") or {}
        base.pop("_name_or_path", None)
        if not self.base_included:
            for holder in (fields, base):
                holder.pop("quantization_config", None)
        return fields

    def _check_at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} is {shortened.repr(value)}: expected a whole number of at least {least}.")

    def _check_count(self, name: str, least: int, most: int) -> None:
        """Of modules, each of which takes time and memory to build."""
        self._check_at_least(name, least)
        if getattr(self, name) > most:
            raise ValueError(
                f"{name} is {shortened.repr(getattr(self, name))}: expected a whole number from {least} to {most}."
            )

    def _check_flag(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {shortened.repr(value)}: expected True or False.")

    def _check_layer(self, asking: str, wanted: bool, same_width: bool = True) -> None:
        """Refuse decoder layers for the heads that cannot be; the default for a base that has none is a LLaMA layer.

        Args:
            asking: which fields ask for such layers, with their values, as the message is to say it.
            wanted: whether they do.
            same_width: whether they must be as wide as the base.
        """
        own, layer, text = getattr(self, "layer_config", None), self.own_layer, self.get_text_config()
        if own is not None and not own.model_type:
            raise ValueError("layer_config has no model_type: give the config of a model, such as a LlamaConfig.")
        if not wanted:
            if own is not None:
                raise ValueError(
                    f"layer_config is of a {own.model_type!r} model, but {asking}: there is no layer to build from it, "
                    "leave it out or ask for one."
                )
            return
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        if not getattr(layer, "num_attention_heads", None):
            raise ValueError(
                f"{asking}, but a {layer.model_type!r} model has no attention heads to build a decoder layer of: give "
                "layer_config= of a model that has, or use Medusa or Hydra heads."
            )
        if own is None:
            if not has_layers(layer):  # of learned positions, for instance
                self.layer_config = llama_like(layer, layers=1)
            return
        if same_width and getattr(own, "hidden_size", None) != text.hidden_size:
            raise ValueError(
                f"layer_config has hidden size {getattr(own, 'hidden_size', None)}, but the base has "
                f"{text.hidden_size}: give the layer the base's."
            )
        heads, groups = own.num_attention_heads, getattr(own, "num_key_value_heads", None)
        if groups and heads % groups:
            raise ValueError(
                f"layer_config has num_attention_heads {heads}, but num_key_value_heads {groups}: the first must be a "
                "multiple of the second."
            )

    def _check_fraction(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1:
            raise ValueError(
                f"{name} is {shortened.repr(value)}: expected a number from 0 up to, but not including, 1."
            )


def _of_the_base(name: str) -> property:
    def text_config(config: DraftHeadConfig) -> PreTrainedConfig:
        base = vars(config).get("base_config")
        if not isinstance(base, PreTrainedConfig):
            raise AttributeError(f"{name} is the base's, and {type(config).__name__} has no base_config.")
        return base.get_text_config()

    return property(
        lambda config: getattr(text_config(config), name),
        lambda config, value: setattr(text_config(config), name, value),
        doc=f"The base's `{name}`.",
    )


for _name in OF_THE_BASE:
    setattr(DraftHeadConfig, _name, _of_the_base(_name))


def _sub_config(name: str, given: dict[str, Any] | PreTrainedConfig | None) -> PreTrainedConfig | None:
    if given is None or isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given)
    if not isinstance(given, dict):
        raise ValueError(f"{name} is {type(given).__name__}: expected the config of a model, or its dict.")
    _refuse_costly(name, given)
    fields = {key: value for key, value in given.items() if key not in IMPLEMENTATIONS}
    model_type = fields.pop("model_type", None)
    # A base that lives in remote code: keep what its config says until the base itself brings the real class.
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[model_type] if known else PreTrainedConfig
    _refuse_shadowing(name, config_class, fields)
    try:
        config = config_class(**fields)
    except Exception as error:  # each model's config checks its fields in its own way, if at all
        kind = f"a {shortened.repr(model_type)} model" if known else "a model"
        raise ValueError(f"{name} is no config of {kind} ({in_one_line(error)}): correct it.") from error
    if not known:
        config.model_type = model_type
    return config


def _refuse_costly(name: str, fields: dict[str, Any]) -> None:
    """Refuse deep nesting, and numbers for which transformers would make lists of that length, in all sub-configs.

    Raises:
        ValueError: there is one.
    """
    if is_deep(fields):
        raise ValueError(f"{name} has fields that are nested more than {MAX_NESTING} levels deep: correct it.")
    for key, value in fields.items():
        if isinstance(value, dict):
            _refuse_costly(name, value)
        elif isinstance(value, (int, float)) and value > (most := MAX_COUNTS.get(key.rpartition("_")[2], value)):
            raise ValueError(f"{name} has {key} {shortened.repr(value)}: expected at most {most}.")


def _refuse_shadowing(name: str, config_class: type[PreTrainedConfig], fields: dict[str, Any]) -> None:
    """Refuse fields that would hide what the code of a config is made of.

    Raises:
        ValueError: there is one.
    """
    for key in fields:
        own = inspect.getattr_static(config_class, key, None)
        fixed = isinstance(own, property) and own.fset is None
        if fixed or callable(own) or isinstance(own, classmethod) or key.startswith("__") or key in CLASS_FIELDS:
            raise ValueError(f"{name} has the field {shortened.repr(key)}, a name that its own code uses: remove it.")


def portable(name: str | None, save_directory: str | os.PathLike) -> str | None:
    """The path of a base from the checkpoint's folder if both lie in the same folder; else the name as it is."""
    if not name or not os.path.isabs(name):
        return name
    beside = Path(save_directory).resolve().parent
    resolved = Path(name).resolve()
    return os.path.relpath(resolved, beside / "checkpoint") if resolved.is_relative_to(beside) else name


# ---- hf_drafthead/modeling/foreign.py

"""Heads in another project's layout, recognised by their config: what to do with them instead of loading them."""


# Config keys, architectures and files by which other projects' heads are known, and the family here.
FOREIGN_KEYS = {
    "medusa_num_heads": "Medusa",
    "hydra_num_heads": "Hydra",
    "speculators_model_type": "Eagle3",
    "draft_vocab_size": "Eagle3",
}
FOREIGN_ARCHITECTURES = {
    "MedusaModel": "Medusa",
    "EagleLlamaForCausalLM": "Eagle",
    "LlamaForCausalLMEagle": "Eagle",
    "LlamaForCausalLMEagle3": "Eagle3",
}
FOREIGN_FILES = {
    "medusa_lm_head.safetensors": "Medusa",
    "medusa_lm_head.pt": "Medusa",
    "hydra_lm_head.safetensors": "Hydra",
    "hydra_lm_head.pt": "Hydra",
}


def how_to_convert(path: str, config: Mapping[str, Any], has_file: Callable[[str], bool] | None = None) -> str | None:
    """What a message says about a checkpoint in another project's layout; None if it does not look like one.

    Args:
        path: folder or Hub id.
        config: what its config.json says; empty without one.
        has_file: whether it has a file of a name; asked only where the config does not tell.
    """
    family = foreign_family(config, has_file)
    if family is None:
        return None
    return (
        f"it looks like {family} heads in another project's layout, load them with "
        f"{family}ForCausalLM.from_pretrained({path!r}, convert=True), or convert them once with "
        f"`hf-drafthead convert {path} NEW_FOLDER`"
    )


def foreign_family(config: Mapping[str, Any], has_file: Callable[[str], bool] | None = None) -> str | None:
    """The first part of the model class for another project's heads, as far as their config shows it."""
    for key, family in FOREIGN_KEYS.items():
        if key in config:
            return family
    if config.get("model_type") == "medusa":
        return "Medusa"
    for architecture in config.get("architectures") or ():
        if architecture in FOREIGN_ARCHITECTURES:
            return FOREIGN_ARCHITECTURES[architecture]
    if config.get("num_hidden_layers") == 1 and config.get("model_type") in ("llama", "mixtral"):
        return "Eagle"  # nobody publishes a language model of one layer
    if config or has_file is None:
        return None
    return next((family for file, family in FOREIGN_FILES.items() if has_file(file)), None)


# ---- hf_drafthead/modeling/checkpoint.py

"""Where a checkpoint's parts lie, and whether they are what they should be: nothing is loaded before that is known."""


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"
HTTP_ERROR = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of whichever HTTP client huggingface_hub uses
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_config(family: type[DraftHeadConfig], path: str, given: Any, hub: Mapping[str, Any]) -> DraftHeadConfig:
    """The checkpoint's config, or a copy of the given one (or what is read at the given path).

    Raises:
        OSError: there is no config.json.
        ValueError: it belongs to another family or kind of model.
    """
    if isinstance(given, PreTrainedConfig):
        found, config = given.model_type, copy.deepcopy(given)
    else:
        source = os.fspath(given) if given is not None else path
        try:
            fields, _ = family.get_config_dict(source, **hub)
            if not fields:
                raise OSError("there is no config.json, or it is empty")
        except (OSError, HTTP_ERROR) as error:
            refused = why_refused(error)
            if refused:
                raise OSError(f"the heads {source!r} cannot be fetched: {refused}.") from error
            if advice := how_to_convert(source, {}, lambda name: os.path.isfile(os.path.join(source, name))):
                raise OSError(f"{source!r} is no checkpoint of this library: {advice}.") from error
            raise OSError(
                f"{source!r} is no draft-head checkpoint ({str(error).splitlines()[0].rstrip('.')}): give a folder or "
                "Hub id that save_pretrained of a draft-head model has written."
            ) from error
        found = fields.get("model_type")
        config = family.from_dict(fields) if found == family.model_type else None
    if found != family.model_type:
        other_family = str(found).startswith(MODEL_TYPE_PREFIX)
        advice = "load it with AutoModel" if other_family else None
        if not isinstance(given, PreTrainedConfig):
            advice = advice or how_to_convert(path, fields)
        advice = advice or "to put new heads on a base use from_base"
        raise ValueError(
            f"{path!r} is no {family.model_type} checkpoint: its config.json has model_type {shortened.repr(found)}; "
            f"{advice}."
        )
    return config


def read_generation_settings(path: str, hub: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's generation config says; nothing if it has none.

    Raises:
        OSError: it cannot be read, or the Hub does not give it out.
        TypeError, ValueError: its draft tree is no tree.
    """
    found = fetch_file(path, GENERATION_CONFIG_NAME, hub)
    settings = read_json(found) if found else {}
    if isinstance(settings.get("draft_tree"), (list, dict)):
        resolve(settings["draft_tree"], None, 2**31)  # refuses a tree that no call of generate could use
    return settings


def checkpoint_files(path: str, variant: str | None, hub: Mapping[str, Any]) -> list[str]:
    """The safetensors files of a checkpoint, in a local folder or fetched from the Hub.

    Args:
        path: local folder or Hub id.
        variant: as in `from_pretrained`: `model.<variant>.safetensors`.
        hub: keyword arguments of `transformers.utils.cached_file`.

    Raises:
        OSError: there are no weights, a shard is missing, or the index cannot be read or names other files than shards.
    """
    weights, index = (_with_variant(name, variant) for name in (WEIGHTS, INDEX))
    found = fetch_file(path, weights, hub)
    if found is not None:
        return [found]
    found = fetch_file(path, index, hub)
    if found is None:
        here = {name: value for name, value in hub.items() if name != "subfolder"}
        if not hub.get("subfolder") and has_file(path, PICKLE, **here):
            raise OSError(
                f"{path!r} holds {PICKLE}, a pickle, where {weights} is expected: it is never opened, for it can run "
                "code; ask its author to save the heads as safetensors."
            )
        raise OSError(f"{path!r} holds no {weights}: save the model there again, or give the folder that has it.")
    files = []
    for shard in _shards(found):
        file = fetch_file(path, shard, hub)
        if file is None:
            raise OSError(f"{path!r} lacks {shard}, which its {index} names: copy or download the checkpoint again.")
        files.append(file)
    return files


def _shards(index: str) -> list[str]:
    """Names of the files that an index spreads the tensors over: beside it, and nowhere else.

    Raises:
        OSError: it is no such index.
    """
    fields = read_json(index)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not isinstance(fields.get("metadata"), dict) or not weight_map:
        raise OSError(
            f"{index!r} is no index of weights: expected the objects 'metadata' and 'weight_map'; copy or download it "
            "again."
        )
    shards = set()
    for shard in weight_map.values():
        # as Windows reads it: both kinds of slash and drives lead elsewhere
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or PureWindowsPath(shard).name != shard:
            raise OSError(
                f"{index!r} names the file {shortened.repr(shard)}: expected the name of a safetensors file in the "
                "same folder; do not use this checkpoint."
            )
        shards.add(shard)
    return sorted(shards)


def fetch_file(path: str, name: str, hub: Mapping[str, Any]) -> str | None:
    """A file of the heads, here; None if they have no such file."""
    try:
        return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None:
            raise
        raise OSError(f"{name} of the heads {path!r} cannot be fetched: {refused}.") from error


def why_refused(error: BaseException) -> str | None:
    """What the Hub had against a download, and what to do; None for an error that is not about that."""
    for cause in _causes(error):
        if isinstance(cause, GatedRepoError):
            return "the repository is gated: ask for access on its page, then sign in or pass token="
        if isinstance(cause, RepositoryNotFoundError):
            return (
                "the Hub has no such repository, or it is private: check the name, and sign in (`hf auth login`) or "
                "pass token= of somebody who can read it"
            )
        if isinstance(cause, RevisionNotFoundError):
            return "the repository has no such revision: give a branch, tag or commit that it has"
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            if cause.response.status_code == 401:
                return "the Hub does not accept the token: sign in anew (`hf auth login`), or pass another token="
            return f"the Hub answered {cause.response.status_code}: try again later"
        if isinstance(cause, HTTP_ERROR):
            return f"the connection broke ({type(cause).__name__}): try again, files that have arrived are kept"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it came from, what that came from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def map_tensors(files: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of safetensors files, by name: mapped, so that nothing is read before it is used.

    Raises:
        OSError: a file is no readable safetensors file, or a tensor is in two of them.
    """
    return map_wanted(files, None)[0]


@torch.inference_mode(False)
def map_wanted(files: Iterable[str], wanted: Collection[str] | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Some of the tensors of safetensors files, and which file holds each of all their tensors.

    Args:
        files: safetensors files.
        wanted: names of the tensors to map; None for all.

    Raises:
        OSError: as `map_tensors`.
    """
    found: dict[str, Tensor] = {}
    holders: dict[str, str] = {}
    for file in files:
        with open_tensors(file) as tensors:
            names = dict.fromkeys(tensors.keys(), file)
            if twice := sorted(set(holders) & set(names)):
                raise OSError(
                    f"{file!r} and {holders[twice[0]]!r} both hold the tensor {shortened.repr(twice[0])}: copy or "
                    "download the checkpoint again."
                )
            holders |= names
            found |= {name: tensors.get_tensor(name) for name in names if wanted is None or name in wanted}
    return found, holders


def check_tensors(
    path: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor], others: Collection[str] = ()
) -> None:
    """Compare the tensors of a checkpoint's drafter with what its config asks for.

    Args:
        path: the checkpoint, for the message.
        found: its tensors, by their names in it.
        expected: tensors of the shapes that there should be, by the same names.
        others: names of tensors that it has besides those found.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, or of another kind of number.
    """
    for name, wanted in expected.items():
        if name not in found:
            raise ValueError(
                f"{path!r} lacks the tensor {name!r} {list(wanted.shape)} that its config asks for: "
                "save the checkpoint again, or correct config.json."
            )
        if found[name].shape != wanted.shape:
            raise ValueError(
                f"{path!r} has {name!r} of shape {shortened.repr(list(found[name].shape))}, but its config asks for "
                f"{list(wanted.shape)}: save the checkpoint again, or correct config.json."
            )
        if not wanted.dtype.is_floating_point:
            if found[name].dtype != wanted.dtype:
                raise ValueError(
                    f"{path!r} has {name!r} in {_type_name(found[name].dtype)}, expected {_type_name(wanted.dtype)}: "
                    "these are whole numbers, save them as such."
                )
        elif found[name].dtype not in FLOATS:
            raise ValueError(
                f"{path!r} has {name!r} in {_type_name(found[name].dtype)}, expected one of "
                f"{', '.join(map(_type_name, FLOATS))}: save the heads in a floating point type."
            )
    unknown = sorted((set(found) | set(others)) - set(expected))
    if unknown:
        raise ValueError(
            f"{path!r} has {len(unknown)} tensor(s) that its config does not ask for, such as "
            f"{shortened.repr(unknown[0])}: remove them, or correct config.json."
        )


def refuse_damage(path: str, info: dict[str, Any]) -> None:
    """Raise for what transformers only logs."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise ValueError(
                f"{path!r} does not fit its config: {kind.replace('_', ' ')} {sorted(map(str, info[kind]))[:3]}: "
                "save the checkpoint again, or correct config.json."
            )


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _with_variant(name: str, variant: str | None) -> str:
    stem, extension = name.rsplit(".", 1)
    return f"{stem}.{variant}.{extension}" if variant else name


# ---- hf_drafthead/modeling/adapters.py

"""PEFT adapters (LoRA and others) of the base: found, loaded, saved with the heads, and merged into its weights.

The base holds them as transformers has them (`PreTrainedModel.load_adapter`): they are part of what it computes.
"""


logger = logging.get_logger(__name__)

ADAPTER_WEIGHTS, ADAPTER_PICKLE = "adapter_model.safetensors", "adapter_model.bin"
FOLDER = "adapter"  # of a checkpoint, in which the adapter of its base lies
# How PEFT names the tensors of an adapter that was made for a model with draft heads, and not for its base.
OF_A_WHOLE_MODEL = re.compile(r"base_model\.model\.(base|drafter)\.")


def find_adapter(path: str, hub: Mapping[str, Any], inside: str | None = None) -> str | None:
    """The folder, here, of an adapter; None if there is none.

    Args:
        path: local folder or Hub id.
        hub: keyword arguments of `transformers.utils.cached_file`.
        inside: folder of the checkpoint in which the adapter lies.

    Raises:
        OSError: its config or weights cannot be read, or the weights are no safetensors.
    """
    if inside:
        hub = {**hub, "subfolder": os.path.join(hub.get("subfolder") or "", inside)}
    config = fetch_file(path, ADAPTER_CONFIG_NAME, hub)
    if config is None:
        return None
    read_json(config)
    weights = fetch_file(path, ADAPTER_WEIGHTS, hub)
    if weights is None:
        raise OSError(
            f"{path!r} holds an adapter without {ADAPTER_WEIGHTS}: {ADAPTER_PICKLE}, a pickle, is never opened, for it "
            "can run code; save the adapter as safetensors, or remove it."
        )
    with open_tensors(weights):
        return str(Path(config).parent)


def base_of(folder: str) -> tuple[str, str | None]:
    """Name and revision of the base that an adapter was made for.

    Raises:
        ValueError: its config names none.
    """
    config = read_json(Path(folder) / ADAPTER_CONFIG_NAME)
    name = config.get("base_model_name_or_path")
    if not name:
        raise ValueError(
            f"the adapter in {folder!r} does not say which base it is for: load base and adapter yourself."
        )
    return str(name), config.get("revision")


def is_of_a_whole_model(folder: str) -> bool:
    """Whether an adapter was made for a model with draft heads, base and all."""
    with open_tensors(Path(folder) / ADAPTER_WEIGHTS) as tensors:
        return any(OF_A_WHOLE_MODEL.match(name) for name in tensors.keys())


def load_adapter(base: Any, folder: str) -> None:
    """Put an adapter on a base.

    Raises:
        ValueError: the adapter is not one for this base.
    """
    info = base.load_adapter(folder)
    refuse_damage(folder, {name: getattr(info, name, None) for name in ("missing_keys", "unexpected_keys")})


def adapt(base: Any, path: str | None, config: DraftHeadConfig, hub: Mapping[str, Any], live: bool) -> None:
    """Put the adapter that heads were trained with on their base, if they were trained with one.

    Args:
        base: without adapters.
        path: of the heads; None if they lie nowhere.
        config: of the heads.
        hub: keyword arguments of every download of the heads.
        live: whether the user gave the base as a loaded model, which stays as it is.

    Raises:
        OSError: the adapter is not there.
        ValueError: it is none for this base.
    """
    name = config.adapter_name_or_path
    if name is None:
        return
    if live:
        logger.warning_once(
            f"these heads were trained on a base with the adapter {name!r}, and the base given has none: fewer guesses "
            "may be accepted; load the adapter with model.base.load_adapter(...)."
        )
        return
    folder = find_adapter(path, hub, FOLDER) if path else None
    if folder is None:
        fetch = {key: value for key, value in hub.items() if key not in ("revision", "subfolder")}
        folder = find_adapter(name, {**fetch, "revision": config.adapter_revision or "main"})
    if folder is None:
        raise OSError(f"the adapter {name!r} of the base of {path!r} was not found: copy or download the heads again.")
    load_adapter(base, folder)


def unwrapped(base: Any) -> Any:
    """The model that PEFT wraps, with its adapter as transformers has it; any other base as it is.

    Raises:
        ValueError: an adapter that is not a part of the layers, such as a learnt prompt.
    """
    if not (hasattr(base, "peft_config") and hasattr(base, "get_base_model")):
        return base
    if any(config.is_prompt_learning for config in base.peft_config.values()):
        kinds = ", ".join(sorted(config.peft_type.value for config in base.peft_config.values()))
        raise ValueError(
            f"the base has an adapter of the type {kinds}, which is a part of the prompt: draft heads need one that is "
            "a part of the layers, such as LoRA."
        )
    inner = base.get_base_model()
    inner.peft_config, inner._hf_peft_config_loaded = base.peft_config, True
    return inner


def active_adapter(base: Any) -> str | None:
    """The name of the adapter that takes part in what a base computes; None if there is none.

    Raises:
        ValueError: there are several.
    """
    if not getattr(base, "_hf_peft_config_loaded", False):
        return None
    layers = [module for module in base.modules() if _is_adapted(module)]
    if all(layer.disable_adapters for layer in layers):
        return None
    active = base.active_adapters()
    if len(active) > 1:
        raise ValueError(
            f"the base has {len(active)} active adapters ({', '.join(active)}), of which one can be saved with its "
            "heads: merge them into one, or choose one with model.base.set_adapter(name)."
        )
    return active[0] if active else None


def save_adapter(base: Any, folder: Path, is_main_process: bool) -> None:
    """Write the active adapter of a base into a folder, as PEFT reads it; which base it is for is said by the heads."""
    base.save_pretrained(folder, is_main_process=is_main_process)
    if is_main_process:
        (folder / "generation_config.json").unlink(missing_ok=True)  # the heads' folder has it
        file = folder / ADAPTER_CONFIG_NAME
        fields = {**read_json(file), "base_model_name_or_path": None, "revision": None}
        file.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors with its adapters merged into the weights; the model itself stays as it is."""
    return _plain_state(model, merge=True)


def bare_state(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors without its adapters."""
    return _plain_state(model, merge=False)


def _plain_state(model: nn.Module, merge: bool) -> dict[str, Tensor]:
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        if not (_is_adapted(module) or _is_replaced(module)):
            continue
        for key in [key for key in state if key.startswith(f"{name}.")]:
            del state[key]
        if _is_replaced(module):
            active = module.active_adapter if isinstance(module.active_adapter, str) else module.active_adapter[0]
            plain = module.modules_to_save[active] if merge else module.original_module
        else:
            if merge and not module.disable_adapters:
                module = copy.deepcopy(module)
                module.merge()
            plain = module.get_base_layer()
        state |= {f"{name}.{key}": tensor for key, tensor in plain.state_dict().items()}
    return state


def _is_adapted(module: Any) -> bool:
    """Whether a layer has an adapter in it; asked of what it can do, for PEFT may not be installed."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge") and hasattr(module, "disable_adapters")


def _is_replaced(module: Any) -> bool:
    """Whether an adapter brings a module of its own in the place of the base's."""
    return hasattr(module, "modules_to_save") and hasattr(module, "original_module")


# ---- hf_drafthead/modeling/base_model.py

"""The base of a set of heads: where it lies, whether it is the right one, and loading it."""


logger = logging.get_logger(__name__)

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
BESIDE_THE_CONFIG = ("dtype", "torch_dtype", "quantization_config")


class NewBase(NamedTuple):
    """A base for fresh heads: the model, its name and commit, and where its adapter came from."""

    model: Any
    name: str
    revision: str | None
    adapter: str | None
    adapter_revision: str | None


def load_new_base(
    name: str, revision: str | None, fetch: Mapping[str, Any], arguments: Mapping[str, Any], fields: Collection[str]
) -> NewBase:
    """A base for fresh heads.

    Args:
        name: Hub id or path, of a base or of an adapter for one.
        revision: branch, tag or commit.
        fetch: keyword arguments of every download.
        arguments: all others of `AutoModelForCausalLM.from_pretrained`.
        fields: of the heads' config.

    Raises:
        OSError: there is no such base.
        TypeError: an argument is a field of the heads, misspelt.
        ValueError: it is no decoder-only language model.
    """
    hub = {**fetch, "revision": revision or "main"}
    try:
        place, hub, adapter = _behind_adapter(name, hub)
        config, arguments = _config_at(place, hub, arguments)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        refused = why_refused(error)
        if refused:
            raise OSError(f"the base {name!r} cannot be fetched: {refused}.") from error
        raise OSError(
            f"the base {name!r} was not found ({_first_line(error)}): give the id or path of a causal language model."
        ) from error
    refuse_unfit(config, place, loaded=False)
    refuse_misspelt(arguments, fields)
    commit = commit_of(place, hub)
    hub["revision"] = commit or hub["revision"]
    base = auto_class(config).from_pretrained(place, **hub, **arguments)
    if adapter is None:
        return NewBase(base, name, commit, None, None)
    load_adapter(base, adapter)
    of_the_hub = None if os.path.isdir(name) else name
    return NewBase(base, place, commit, of_the_hub, of_the_hub and _commit_in(adapter))


def _behind_adapter(name: str, hub: dict[str, Any]) -> tuple[str, dict[str, Any], str | None]:
    """Where a base lies, how it is fetched, and the folder of the adapter if its name is one of an adapter."""
    # What the Hub has against it is told where the config is fetched.
    quiet = {f"_raise_exceptions_for_{reason}": False for reason in ("connection_errors", "gated_repo")}
    adapter = find_adapter(name, {**hub, **quiet})
    if adapter is None or fetch_file(name, CONFIG_NAME, hub) is not None:  # transformers loads both from such a folder
        return name, hub, None
    place, revision = base_of(adapter)
    return place, {**hub, "revision": revision or "main"}, adapter


def load_base(
    checkpoint: str,
    config: DraftHeadConfig,
    given: str | os.PathLike | nn.Module | None,
    revision: str | None,
    fetch: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Any:
    """The base that the heads of a checkpoint run on, checked against what they were trained for.

    Args:
        checkpoint: folder or Hub id of the heads.
        config: theirs; where the base lies here is written down in it.
        given: the user's choice of a base; None for the one that the config names.
        revision, fetch, arguments: as above.

    Raises:
        OSError: the base is not there.
        TypeError: arguments for loading a base that is loaded already.
        ValueError: it is another base than the heads were made for.
    """
    base: Any = given
    if isinstance(given, nn.Module):
        base = unwrapped(base)
        refuse_loading_arguments(base, arguments)
        name = getattr(base.config, "_name_or_path", "")
        refuse_unfit(base.config, type(base).__name__, loaded=True)
        check_base(config, base.config, name or type(base).__name__)
    else:
        name = locate_base(config, checkpoint) if given is None else os.fspath(given)
        revision = revision or (config.base_model_revision if given is None else None) or "main"
        base, name = _load_named(name, checkpoint, config, {**fetch, "revision": revision}, arguments)
    # A Hub id stays as the record of what the heads were trained for; a path is only where the base lies here.
    recorded = config.base_model_name_or_path
    if name and (given is None or not recorded or is_local(recorded, checkpoint)):
        config.base_model_name_or_path = full_name(name)
    return base


def _load_named(
    name: str, checkpoint: str, config: DraftHeadConfig, hub: dict[str, Any], arguments: Mapping[str, Any]
) -> tuple[Any, str]:
    """As above for a base, or an adapter for one, by its name; also the name of the base itself."""
    revision = hub["revision"]
    if (os.path.isabs(name) or name.startswith(".")) and not os.path.isdir(name):
        raise OSError(
            f"the base {name!r} of {checkpoint!r} was not found (there is no such folder): pass base_model= with "
            "its id, path or object."
        )
    try:
        name, hub, adapter = _behind_adapter(name, hub)
        found, arguments = _config_at(name, hub, arguments)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model
        refused = why_refused(error)
        if refused:
            raise OSError(
                f"the base {name!r} of {checkpoint!r} cannot be fetched at {revision!r}: {refused}; base_model= "
                "takes another place of it."
            ) from error
        raise OSError(
            f"the base {name!r} of {checkpoint!r} was not found ({_first_line(error)}): pass base_model= with its "
            "id, path or object."
        ) from error
    refuse_unfit(found, name, loaded=False)
    check_base(config, found, name)
    commit = commit_of(name, hub)
    if commit and config.base_model_revision and commit != config.base_model_revision:
        logger.warning_once(
            f"these heads were trained on {config.base_model_name_or_path!r} at {config.base_model_revision}; "
            f"the base is {name!r} at {commit}: fewer guesses may be accepted."
        )
    hub["revision"] = commit or hub["revision"]
    try:
        base = auto_class(found).from_pretrained(name, **hub, **arguments)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error)
        if refused is None:
            raise
        raise OSError(f"the base {name!r} of {checkpoint!r} cannot be fetched at {revision!r}: {refused}.") from error
    if adapter is not None:
        load_adapter(base, adapter)
    return base, name


def locate_base(config: DraftHeadConfig, checkpoint: str) -> str:
    """Name of the base that the config asks for: a Hub id, or an absolute path.

    A relative path is looked up in the checkpoint's folder.

    Raises:
        OSError: the config names no base, or a folder that is not there.
    """
    name = config.base_model_name_or_path
    if not name:
        raise OSError(
            f"{checkpoint!r} does not say which base it was trained for: pass base_model= with its id, path or object."
        )
    inside = Path(checkpoint) / name
    if inside.is_dir():
        return str(inside.resolve())
    if os.path.isabs(name) or name.startswith("."):
        if Path(name).is_dir() and os.path.isabs(name):
            return name
        raise OSError(
            f"the base of {checkpoint!r} was not found at {str(inside)!r}: pass base_model= with its id, path or "
            "object."
        )
    return name


def check_base(config: DraftHeadConfig, base_config: PreTrainedConfig, name: str) -> None:
    """Refuse a base that the heads were not made for.

    Raises:
        ValueError: model type, hidden size or vocabulary differ.
    """
    if isinstance(base_config, DraftHeadConfig):
        raise ValueError(f"the base {name!r} has draft heads itself: give the model that these heads were trained for.")
    wanted, given = config.get_text_config(), base_config.get_text_config()
    trained_for = config.base_model_name_or_path or "another base"
    for field, words in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("model_type", "model type")):
        want, have = getattr(wanted, field, None), getattr(given, field, None)
        if want is not None and want != have:
            if name == trained_for:
                raise ValueError(
                    f"the base {name!r} has changed since these heads were trained for it ({words} {want} then, {have} "
                    "now): give the commit that they were trained on (base_revision=), or train heads for the new one."
                )
            raise ValueError(
                f"these heads were trained for {trained_for!r} ({words} {want}); the base at {name!r} has {words} "
                f"{have}: load the first, or train heads for the second."
            )


def fetch_config(name: str, revision: str | None, token: str | bool | None, **hub: Any) -> PreTrainedConfig:
    """The config of a base, without running code that may lie beside it.

    Args:
        name: Hub id or folder.
        revision: branch, tag or commit.
        token: as in huggingface_hub.
        hub: `cache_dir`, `local_files_only`, ...

    Raises:
        OSError: there is none, or it cannot be fetched.
    """
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision or "main", token=token, **hub)
    except (OSError, HTTP_ERROR) as error:
        refused = why_refused(error) or _first_line(error)
        raise OSError(f"config.json of the base {name!r} cannot be fetched: {refused.rstrip('.')}.") from error
    model_type = fields.get("model_type")
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    config = PreTrainedConfig.from_dict(fields)
    config.model_type = model_type
    return config


def last_layer(base: Any) -> tuple[torch.device, torch.dtype]:
    """Device and compute dtype of the base's lm_head."""
    head = base.get_output_embeddings()
    device = getattr(getattr(head, "_hf_hook", None), "execution_device", None)
    device = head.weight.device if device is None else device
    dtype = head.weight.dtype
    if not dtype.is_floating_point or dtype.itemsize < 2:  # a quantized lm_head
        dtype = base.dtype
    return torch.device(device), dtype


def refuse_unfit(config: PreTrainedConfig, name: str, loaded: bool) -> None:
    """Refuse a base whose own `generate` draft heads could not reproduce.

    Args:
        config: of the base.
        name: for the message.
        loaded: whether the base is a loaded model, and not yet to be loaded by AutoModelForCausalLM.

    Raises:
        ValueError: the base has draft heads already, has an encoder, or is no language model.
    """
    if str(config.model_type).startswith(MODEL_TYPE_PREFIX):
        own = "model.base" if loaded else getattr(config, "base_model_name_or_path", None)
        raise ValueError(f"{name!r} has draft heads already: give their base{f' ({own})' if own else ''}.")
    remote = bool(getattr(config, "auto_map", None)) or config.model_type not in CONFIG_MAPPING
    known = not config.is_encoder_decoder if loaded else remote or is_language_model(config)
    if not known:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "no language"
        raise ValueError(
            f"{name!r} is {kind} model ({config.model_type}): draft heads need a decoder-only language model, as "
            "AutoModelForCausalLM or AutoModelForImageTextToText loads it."
        )


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether transformers has a model for this config that goes on from a text; it may read images as well."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return True
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not config.is_encoder_decoder


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a base."""
    images_only = type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and is_language_model(config)
    return AutoModelForImageTextToText if images_only else AutoModelForCausalLM


def refuse_misspelt(arguments: Mapping[str, Any], fields: Collection[str]) -> None:
    """Refuse arguments for loading a base that are more likely fields of the heads.

    Raises:
        TypeError: there is such an argument; the field is named.
    """
    for name in arguments:
        if meant := difflib.get_close_matches(name, fields, 1, 0.7):
            raise TypeError(f"{name}= is no field of these heads and no argument of a base: {meant[0]}= may be meant.")


def refuse_loading_arguments(base: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what only matters while a base is loaded, and would be ignored silently with a loaded one.

    Raises:
        TypeError: there is such an argument.
    """
    harmless: dict[str, tuple[Any, ...]] = {
        "dtype": ("auto", base.dtype, str(base.dtype).removeprefix("torch.")),
        "trust_remote_code": (True, False),
        "attn_implementation": (getattr(base.config, "_attn_implementation", None),),
        "experts_implementation": (getattr(base.config, "_experts_implementation", None),),
    }
    harmless["torch_dtype"] = harmless["dtype"]
    for name, value in arguments.items():
        if value is not None and value not in harmless.get(name, ()):
            raise TypeError(
                f"{name}={value!r} is for loading a base, but the base given is a loaded {type(base).__name__}: "
                "set it when the base is loaded."
            )


def save_tokenizer(base: Any, config: DraftHeadConfig, folder: Path) -> None:
    """Copy the base's tokenizer, if it is on this machine and the folder has none.

    Args:
        base: the model.
        config: of its heads.
        folder: of the checkpoint.
    """
    name = str(getattr(base, "name_or_path", "") or "")
    if not name or any((folder / file).is_file() for file in TOKENIZER_FILES):
        return
    of_record = name == config.base_model_name_or_path and config.base_model_revision
    hub = {"revision": of_record or "main", "local_files_only": True}
    try:
        if any(cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub) for file in TOKENIZER_FILES):
            AutoTokenizer.from_pretrained(name, **hub).save_pretrained(folder)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        logger.warning_once(f"the tokenizer of {name!r} is not saved with its heads: {_first_line(error)}")


def full_name(name: str) -> str:
    """The name of a base, wherever it will be read: a path is made absolute."""
    return str(Path(name).resolve()) if os.path.isdir(name) else name


def is_local(name: str, checkpoint: str | os.PathLike) -> bool:
    """Whether the name of a base, as the config of a checkpoint gives it, is a path and no Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return (Path(checkpoint) / name).is_dir()


def _config_at(
    name: str, hub: Mapping[str, Any], arguments: Mapping[str, Any]
) -> tuple[PreTrainedConfig, dict[str, Any]]:
    """The base's config, read before its weights are, and the arguments to load these with: the config among them."""
    # As AutoModel does: these are not for the config, everything else that it knows goes into it.
    beside = {key: arguments[key] for key in BESIDE_THE_CONFIG if arguments.get(key) is not None}
    code = {key: arguments[key] for key in ("trust_remote_code", "code_revision") if key in arguments}
    fields = {key: value for key, value in arguments.items() if key not in beside and key not in code}
    config, left = AutoConfig.from_pretrained(name, return_unused_kwargs=True, **code, **hub, **fields)
    return config, {**beside, **code, **left, "config": config}


def commit_of(name: str, hub: Mapping[str, Any]) -> str | None:
    """The commit that a Hub id and revision resolve to; None for a local folder."""
    if os.path.isdir(name):
        return None
    file = cached_file(name, "config.json", _raise_exceptions_for_missing_entries=False, **hub)
    return _commit_in(str(Path(file).parent)) if file else None


def _commit_in(folder: str) -> str | None:
    """The commit that a folder of the Hub's cache is of."""
    name = Path(folder).name
    return name if re.fullmatch(r"[0-9a-f]{40}", name) else None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


# ---- hf_drafthead/modeling/drafter.py

"""The drafter contract: how a family's heads guess.

Shapes: B rows, A newly verified positions, T positions, n nodes of a tree level, K heads, V vocabulary, H hidden,
F feature layers.
"""


class Drafter(nn.Module):
    """A family's heads, and how they guess.

    `generation` calls `start` once, `observe` with the prompt, then in every step `expand` once per tree level and
    `observe` with what was verified; training calls `head_states` and `head_logits`. What a generation needs to
    remember is in the state that these pass on, never on the module. A state is made of tensors and `SlotCache`s alone
    and has the same shapes after every `observe` of a step, so that a step can be compiled.

    Attributes:
        reads: which hidden states of the base are read; -1 is the last one, after the base's final norm.
        keeps_history: True if `observe` needs every verified position, False if only each row's last one counts.
        draft_tokens: (D,) the base's ids of the tokens that it chooses among; None for all of them.
        base: the base model: a plain reference, so that it is neither saved nor moved with the drafter.
    """

    reads: tuple[int, ...] = (-1,)
    keeps_history: bool = False
    draft_tokens: Tensor | None
    base: Any

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_tokens", None)

    @property
    def max_depth(self) -> int | None:
        """Deepest tree level that can be guessed; None if there is no limit."""
        return self.config.max_depth

    def attach(self, base: nn.Module) -> None:
        """Read embeddings and lm_head from this base from now on."""
        self.__dict__["base"] = base  # past nn.Module's bookkeeping: not a submodule
        self.follow_base()

    def follow_base(self) -> None:
        """Compute attention and experts in the same way as the base."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.follow(self.base.config.get_text_config())

    def copy_from_base(self) -> None:
        """Give fresh heads what they start from: weights of the base."""
        raise NotImplementedError

    def check_values(self, path: str) -> None:
        """Refuse what was loaded from a path if its values cannot be used, though its shapes fit.

        Raises:
            ValueError: naming the tensor.
        """

    def start(self, batch_size: int, capacity: int) -> Any:
        """A fresh state.

        Args:
            batch_size: rows.
            capacity: most positions that a row can ever hold.
        """
        raise NotImplementedError

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        """Take in newly verified positions.

        Args:
            state: from `start` or the last `observe` or `expand`.
            features: (B, A, F*H) the base's hidden states there.
            tokens: (B, A) the token that follows each position; the last valid one is the next root.
            lengths: (B,) how many of the A positions are valid, first ones first. A row with 0 stands still.

        Returns:
            The state to go on with.
        """
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Any, Guesses]:
        """Guess the children of the nodes of a tree level; the d-th call since `observe` asks head d.

        Args:
            state: from `observe` or the last `expand`.
            tokens: (B, n) tokens of the nodes; n = 1 and the root on the first call.
            parents: (B, n) where each node hangs: index of its parent among the nodes of the previous call.

        Returns:
            The state to go on with, and scores (B, n, V), or (B, 1, V) if the guesses are the same for all nodes.
        """
        raise NotImplementedError

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What each head's output projection is applied to, with the true tokens in the place of guesses.

        Args:
            features: (B, T, F*H).
            input_ids: (B, T) the text itself.
            attention_mask: (B, T) 1 where the text is real.

        Returns:
            One (B, T, H) per head. Entry i at position t guesses token t + 2 + i; where a family reads the tokens
            t + 1 ... t + 1 + i these wrap around at the end of the text, and what is there has no meaning.
        """
        raise NotImplementedError

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., H); (..., D) where it chooses among some tokens only."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        """Move or convert; what is computed and not stored keeps its type: rounded rotary frequencies turn far
        positions wrongly."""
        exact = {
            (module, name): getattr(module, name)
            for module in self.modules()
            for name in module._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        for (module, name), before in exact.items():
            now = getattr(module, name)
            if now is not None and now.dtype != before.dtype:
                setattr(module, name, before.to(now.device))
        return self

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor where the drafter is, and in its dtype."""
        like = next(self.parameters())
        return tensor.to(like.dtype) if like.is_meta else tensor.to(like)  # hooks move what an offloaded drafter needs

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The base's input embeddings (..., H) of tokens, where and in the type that `like` has."""
        embedding = self.base.get_input_embeddings()
        weight = embedding.weight
        return embedding(tokens if weight.is_meta else tokens.to(weight.device)).to(like)  # meta: offloaded, as above


# ---- hf_drafthead/modeling/base.py

"""The model that holds a base and its drafter: attach, load, save."""


logger = logging.get_logger(__name__)

Model = TypeVar("Model", bound="DraftHeadPreTrainedModel")

# Arguments of from_pretrained that speak of the heads' own files, and of how any file is fetched.
HEADS_ARGUMENTS = {"revision", "subfolder", "variant", "_from_auto", "_from_pipeline", "adapter_kwargs"}
HUB_ARGUMENTS = {"cache_dir", "force_download", "local_files_only", "proxies", "token"}


class DraftHeadPreTrainedModel(DraftHeadGenerationMixin, PreTrainedModel):
    """A base model and the draft heads that make its `generate` faster.

    `MedusaForCausalLM(config)` builds both from the config with random weights; `from_base` puts fresh heads on an
    existing base; `from_pretrained` loads trained heads and finds their base.

    Attributes:
        base: the causal language model whose text is reproduced.
        drafter: the heads.
        checkpoint_revision: branch, tag or commit of the Hub that the heads were loaded from.
    """

    config: DraftHeadConfig
    drafter_class: ClassVar[type[Drafter]]
    checkpoint_revision: str | None = None
    # The outer model has no attention of its own: any choice is passed to the base, which knows what it can do.
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # each head's loss is a mean over its own labels

    def __init__(self, config: DraftHeadConfig, build_base: bool = True) -> None:
        if not isinstance(config.base_config, PreTrainedConfig):
            raise ValueError(
                f"{type(config).__name__} has no base_config: give it the config of the base, or use "
                f"{type(self).__name__}.from_base(...)."
            )
        self._refuse_other_family(config)
        super().__init__(config)
        # The base comes first: device and dtype of the model are those of its first parameter.
        self.register_module("base", None)
        if build_base:
            if not is_language_model(config.base_config):
                raise ValueError(
                    f"base_config is of a {shortened.repr(config.base_config.model_type)} model, which is no causal "
                    "language model of transformers: a base with code of its own is loaded apart, with base_model=."
                )
            base_config = copy.deepcopy(config.base_config)
            self.base = auto_class(base_config).from_config(base_config, trust_remote_code=False)
        self.drafter = self.drafter_class(config)
        self.post_init()
        if build_base:
            self._attach(self.base)
            self.drafter.copy_from_base()

    # ---- attach -----------------------------------------------------------------------------------------------------

    @classmethod
    def from_base(
        cls: type[Model],
        base: str | os.PathLike | nn.Module,
        *,
        config: DraftHeadConfig | None = None,
        base_revision: str | None = None,
        **kwargs: Any,
    ) -> Model:
        """Fresh heads on a base.

        Args:
            base: Hub id or path of a causal language model or of an adapter for one, or a loaded model, which may have
                adapters and is used, not copied. Its parameters are frozen: what trains the model trains the heads.
            config: take the family's fields from this config.
            base_revision: branch, tag or commit of the base.
            kwargs: fields of the family's config (`num_draft_heads=4`), before those of `config`; all others go to
                `AutoModelForCausalLM.from_pretrained`.

        Returns:
            The model, on the base's device and in its dtype.

        Raises:
            OSError: there is no such base.
            TypeError: an argument that neither the config nor a loaded base has.
            ValueError: a config field is out of range, or the base is no decoder-only language model, or has draft
                heads already.
        """
        if config is not None:
            cls._refuse_other_family(config)
        own = cls.config_class.heads_fields()
        config_fields = {name: getattr(config, name) for name in own} if config is not None else {}
        config_fields |= {name: kwargs.pop(name) for name in (own | ABOUT_THE_BASE) & set(kwargs)}
        loaded: Any = base
        commit, adapter, adapter_commit = base_revision, None, None
        if isinstance(base, nn.Module):
            loaded = unwrapped(base)
            refuse_unfit(loaded.config, type(base).__name__, loaded=True)
            refuse_misspelt(kwargs, own)
            refuse_loading_arguments(loaded, kwargs)
            name = getattr(loaded.config, "_name_or_path", "") or None
        else:
            name = os.fspath(base)
            fetch = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)}
            loaded, name, commit, adapter, adapter_commit = load_new_base(name, base_revision, fetch, kwargs, own)
        if loaded.get_output_embeddings() is None:
            raise ValueError(f"{type(loaded).__name__} has no lm_head: draft heads need a causal language model.")
        name = full_name(name) if name else None
        found = {"base_model_name_or_path": name, "base_model_revision": commit}
        config_fields = found | {"adapter_name_or_path": adapter, "adapter_revision": adapter_commit} | config_fields
        model = cls(cls.config_class(base_config=loaded.config, **config_fields), build_base=False)
        model._attach(loaded)
        model.drafter.copy_from_base()
        loaded.requires_grad_(False)
        model.drafter.train(loaded.training)
        model.training = loaded.training
        model._take_generation_config({})
        model.generation_config.draft_tree = DEFAULT_TREE
        if not model.training and last_layer(loaded)[0].type != "meta" and (reason := model.why_no_drafts()):
            logger.warning_once(f"These heads will never draft, the base will decode by itself: {reason}.")
        return model

    @classmethod
    def _refuse_other_family(cls, config: DraftHeadConfig) -> None:
        if not isinstance(config, cls.config_class):
            raise TypeError(
                f"config is a {type(config).__name__}, but {cls.__name__} is configured by a "
                f"{cls.config_class.__name__}: give one of these, or use the model class of that family."
            )

    def _attach(self, base: Any) -> None:
        """Make `base` this model's base, and put the drafter where the base's last layer is.

        What transformers collects from submodels in `post_init` is carried over by hand: `post_init` would touch the
        weights of a live base.
        """
        self.base = base
        self.drafter.attach(base)
        self.config.base_config = base.config  # after construction, so that both stay one object
        self.config._attn_implementation_internal = getattr(base.config, "_attn_implementation_internal", None)
        tied = getattr(base, "all_tied_weights_keys", None) or {}
        self.all_tied_weights_keys = {f"base.{target}": f"base.{source}" for target, source in tied.items()}
        for name in (
            "_no_split_modules",
            "_skip_keys_device_placement",
            "_keep_in_fp32_modules",
            "_keep_in_fp32_modules_strict",
        ):
            setattr(self, name, set(getattr(self, name) or ()) | set(getattr(base, name, None) or ()))
        self._no_split_modules.add(type(self.drafter).__name__)  # all of it on one device
        device, dtype = last_layer(base)
        self.config.dtype = dtype
        if device.type != "meta":
            self.drafter.to(device=device, dtype=dtype)
        placed = getattr(base, "hf_device_map", None)
        if placed:
            self.hf_device_map = {f"base.{name}" if name else "base": place for name, place in placed.items()}
            self.hf_device_map["drafter"] = device

    def _take_generation_config(self, heads: Mapping[str, Any]) -> None:
        """Generate as the base does, with the heads' own settings on top."""
        ours = copy.deepcopy(getattr(self.base, "generation_config", None) or GenerationConfig())
        ours._from_model_config = False  # such a config drops the settings that transformers does not know when loaded
        for name, value in DraftSettings.stored_in(heads).items():
            setattr(ours, name, value)
        self.generation_config = ours

    # ---- load -------------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls: type[Model],
        pretrained_model_name_or_path: str | os.PathLike | None,
        *,
        config: DraftHeadConfig | str | os.PathLike | None = None,
        state_dict: Mapping[str, Tensor] | None = None,
        use_safetensors: bool | None = None,
        base_model: str | os.PathLike | nn.Module | None = None,
        base_revision: str | None = None,
        convert: bool = False,
        generation_config: GenerationConfig | None = None,
        output_loading_info: bool = False,
        **kwargs: Any,
    ) -> Model | tuple[Model, dict[str, Any]]:
        """Load trained heads and their base.

        Args:
            pretrained_model_name_or_path: folder or Hub id of the heads, saved with or without their base; None with
                `config` and `state_dict` in its place.
            config: use this config instead of the checkpoint's.
            state_dict: the tensors of the heads, or of the whole model.
            use_safetensors: as in transformers, for the base; heads are never read from anything else.
            base_model: Hub id, path or loaded model to use instead of the base that the config names.
            base_revision: branch, tag or commit of the base; default: the one that the heads were trained on.
            convert: the heads are in the layout of another project (`docs/formats.md` lists them); a file of weights
                may be given as well. What the layout does not say is to be given here: the base, or fields of the
                family's config.
            generation_config: use this one instead of the base's with the heads' settings.
            output_loading_info: also return what transformers tells about a loading: which tensors were missing,
                unexpected or mismatched. There are none, for such a checkpoint is refused.
            kwargs: `revision`, `subfolder` and `variant` speak of the heads' checkpoint; `cache_dir`,
                `force_download`, `local_files_only`, `proxies` and `token` of every download; all others (`dtype`,
                `device_map`, `quantization_config`, `attn_implementation`, ...) are for the base. The drafter goes to
                the device and dtype of the base's last layer.

        Raises:
            OSError: heads or base are not there, or a file cannot be read.
            ValueError: the checkpoint is of another kind, a tensor is missing, unknown or of another shape, or the
                base is not the one that the heads were made for.
        """
        given = None if pretrained_model_name_or_path is None else os.fspath(pretrained_model_name_or_path)
        if (given is None) != (state_dict is not None) or (given is None and not isinstance(config, PreTrainedConfig)):
            raise ValueError(
                "give the folder or Hub id of the heads, or None with config= and state_dict= in its place."
            )
        path = given or "state_dict"
        fetch = {key: kwargs.pop(key) for key in HUB_ARGUMENTS & set(kwargs)}
        heads = {key: kwargs.pop(key) for key in HEADS_ARGUMENTS & set(kwargs)}
        hub = fetch | {key: heads[key] for key in ("revision", "subfolder") if heads.get(key) is not None}
        settings: Mapping[str, Any] | None = {} if given is None else None
        found: Mapping[str, Tensor] | None = None
        if convert:
            if config is not None:
                raise ValueError("config= cannot be given with convert=True, which reads it from the layout: drop it.")
            try:
                from hf_drafthead.formats import converted
            except ImportError as error:
                raise ImportError(
                    "hf_drafthead is not installed, and only its model code is here: install it."
                ) from error

            fields = {name: kwargs.pop(name) for name in cls.config_class.heads_fields() & set(kwargs)}
            config, found, settings = converted(
                cls, path, base_model=base_model, base_revision=base_revision, fields=fields, hub=hub
            )
        else:
            config = read_config(cls.config_class, path, config, hub)
        # AutoModel puts the choice of attention and of experts into the config; they are meant for the base.
        for name in ("attn_implementation", "experts_implementation"):
            if (chosen := getattr(config, f"_{name}")) is not None:
                kwargs.setdefault(name, chosen)
            setattr(config, f"_{name}", None)
        config.name_or_path = given or ""
        if state_dict is not None:
            config.base_included = any(name.startswith("base.") for name in state_dict)
        untouched = copy.deepcopy(config) if config.base_included else config
        if found is not None:
            model, tensors = cls._blank(untouched, build_base=False), found
        else:
            model, tensors = cls._without_memory(path, untouched, heads.get("variant"), hub, state_dict)
        # What lies beside the weights is read before the base is, which may take minutes.
        adapter = dict(heads.get("adapter_kwargs") or {})
        adapted = adapter.pop("_adapter_model_path", None) or path
        with_adapter = (settings is None or adapted != path) and find_adapter(adapted, hub) is not None
        settings = read_generation_settings(path, hub) if settings is None else settings
        info: dict[str, Any] = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
        info["error_msgs"] = []
        if config.base_included:
            if base_model is not None or base_revision is not None:
                raise ValueError(f"{path!r} contains its own base: drop base_model= and base_revision=.")
            if use_safetensors is False:
                raise ValueError(
                    f"{path!r} is only read as safetensors, for a pickle can run code: drop use_safetensors."
                )
            heads |= fetch | {"config": config, "state_dict": state_dict and dict(state_dict)}
            model = cls._with_its_base(given, heads, kwargs)
        else:
            if use_safetensors is not None:
                kwargs["use_safetensors"] = use_safetensors
            model.config.__dict__.pop("quantization_config", None)  # of a base that is not here
            inside = heads.get("subfolder")
            place = os.path.join(path, inside) if inside and os.path.isdir(path) else path
            base = load_base(place if given else os.curdir, model.config, base_model, base_revision, fetch, kwargs)
            if active_adapter(base) is None:
                adapt(base, given, model.config, hub, isinstance(base_model, nn.Module))
            model._fill(tensors, *last_layer(base))
            model.drafter.check_values(path)
            model._attach(base)
            model._take_generation_config(settings)
            if with_adapter:
                model.load_adapter(adapted, adapter_kwargs=adapter)
        model.base.requires_grad_(False)
        model.checkpoint_revision = heads.get("revision")
        if generation_config is not None:
            model.generation_config = copy.deepcopy(generation_config)
        return (model, info) if output_loading_info else model

    @classmethod
    def _with_its_base(cls: type[Model], path: str | None, heads: dict[str, Any], arguments: dict[str, Any]) -> Model:
        """The model of a checkpoint that holds its base, as transformers loads it."""
        name = path or "state_dict"
        if arguments.get("quantization_config") is not None:
            arguments["quantization_config"] = cls._sparing_the_drafter(
                heads["config"], arguments["quantization_config"]
            )
        try:
            model, info = super().from_pretrained(
                path, **heads, **arguments, use_safetensors=True, output_loading_info=True
            )
        except (ArithmeticError, AttributeError, LookupError) as error:
            raise ValueError(
                f"the base in {name!r} cannot be built from its config ({in_one_line(error)}): correct config.json."
            ) from error
        refuse_damage(name, info)
        model.drafter.check_values(name)
        if "hf_quantizer" in model.__dict__:  # only the base is quantized: heads are saved as they are
            model.base.hf_quantizer = model.__dict__.pop("hf_quantizer")
        model.base.generation_config = copy.deepcopy(model.generation_config)
        for name in DraftSettings.names():
            model.base.generation_config.__dict__.pop(name, None)
        return model

    @classmethod
    def _blank(cls: type[Model], config: DraftHeadConfig, build_base: bool) -> Model:
        """The model without memory: its names and shapes."""
        with torch.device("meta"), no_init_weights():
            return cls(config, build_base=build_base)

    @classmethod
    def _without_memory(
        cls: type[Model],
        path: str,
        config: DraftHeadConfig,
        variant: str | None,
        hub: dict[str, Any],
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[Model, dict[str, Tensor]]:
        """The model without base and memory, and the heads' tensors, given or in the checkpoint, which fit it.

        Raises:
            OSError, ValueError: as `from_pretrained`.
        """
        try:
            model = cls._blank(config, build_base=False)
        except (OSError, ValueError):
            raise
        except Exception as error:  # torch and transformers raise anything for values that make no layer
            raise ValueError(
                f"no heads can be built from the config of {path!r} ({in_one_line(error)}): correct config.json."
            ) from error
        expected = model.state_dict()
        if given is None:
            tensors, held = map_wanted(checkpoint_files(path, variant, hub), expected)
        else:
            tensors, held = {name: given[name] for name in expected if name in given}, dict.fromkeys(given, path)
        tensors = cls._complete(model, tensors)
        check_tensors(
            path, tensors, expected, [name for name in held if not (config.base_included and name.startswith("base."))]
        )
        return model, tensors

    @classmethod
    def _complete(cls: type[Model], model: Model, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a checkpoint with those that it leaves out because they are others of them."""
        return tensors

    @torch.inference_mode(False)
    def _fill(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        """Give a drafter without memory its tensors; where device and type are theirs, they stay mapped from disk."""
        device = torch.device("cpu") if device.type == "meta" else device  # all of the base is offloaded
        placed = {
            name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for name, tensor in tensors.items()
        }
        self.load_state_dict(placed, assign=True)
        for module in self.drafter.modules():
            for name in module._non_persistent_buffers_set:
                setattr(module, name, torch.empty_like(getattr(module, name), device=device))
            self._init_weights(module)
        self.eval()

    @classmethod
    def _sparing_the_drafter(cls, config: DraftHeadConfig, quantization: Any) -> Any:
        """The quantization config, with the drafter (and, as by default, the lm_head) left as they are."""
        spared = copy.deepcopy(quantization)
        values = spared if isinstance(spared, dict) else vars(spared)
        in_bitsandbytes = {"llm_int8_skip_modules", "load_in_4bit", "load_in_8bit", "_load_in_8bit"} & set(values)
        name = "llm_int8_skip_modules" if in_bitsandbytes else "modules_to_not_convert"
        if values.get(name) is None:
            blank = cls._blank(copy.deepcopy(config), build_base=True)
            head = blank.base.get_output_embeddings()
            values[name] = [name for name, module in blank.named_modules() if module is head]
        values[name] = [*values[name], "drafter"]
        return spared

    # ---- save -------------------------------------------------------------------------------------------------------

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        *,
        include_base: bool = False,
        include_code: bool = True,
        include_tokenizer: bool = True,
        **kwargs: Any,
    ) -> None:
        """Save the heads, and with `include_base=True` the base's weights too.

        An adapter of the base is saved with the heads, or merged into the weights of an included base.

        Args:
            save_directory: folder to write to.
            is_main_process: as in transformers.
            state_dict: save these tensors instead of the model's own.
            include_base: a checkpoint that needs no other: for a base that was trained together with its heads.
            include_code: write the model's code as one file, so that `trust_remote_code=True` loads the checkpoint
                where this package is not installed.
            include_tokenizer: copy the base's tokenizer, if it is on this machine and the folder has none.
            kwargs: as in transformers (`max_shard_size`, `variant`, `push_to_hub`, ...).

        Raises:
            ValueError: `include_base=True` with a quantized base, or several adapters are active.
        """
        quantizer = getattr(self.base, "hf_quantizer", None)
        if include_base and quantizer is not None:
            raise ValueError(
                f"the base is quantized ({quantizer.quantization_config.quant_method}) and cannot be saved with its "
                "heads: save the heads only, or load the base without quantization_config=."
            )
        publish = kwargs.pop("push_to_hub", False)
        words = ("commit_message", "commit_description", "private", "revision", "create_pr", "tags", "license")
        told = {name: kwargs.pop(name) for name in ("repo_id", *words) if name in kwargs}
        adapted, adapter = getattr(self, "_hf_peft_config_loaded", False), active_adapter(self.base)
        if (adapted or adapter) and include_base:
            state_dict = merged_state(self)
        elif adapted:  # adapters of the whole model, heads and all, lie beside the heads
            state_dict = bare_state(self)
            super().save_pretrained(save_directory, is_main_process=is_main_process)
        elif adapter:
            save_adapter(self.base, Path(save_directory) / FOLDER, is_main_process)
        tensors = self.state_dict() if state_dict is None else state_dict
        if not include_base:
            tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("drafter.")}
            kwargs["save_original_format"] = False  # renamings of the base's architecture are not for the heads
        live, self.config = self.config, self._stored_config(include_base, bool(adapter))
        self._hf_peft_config_loaded = False
        try:
            super().save_pretrained(save_directory, is_main_process=is_main_process, state_dict=tensors, **kwargs)
        finally:
            self.config, self._hf_peft_config_loaded = live, adapted
        if is_main_process:
            if include_code and (write_code := self._code_writer()) is not None:
                write_code(Path(save_directory))
            if include_tokenizer:
                save_tokenizer(self.base, self.config, Path(save_directory))
        if publish and is_main_process:
            repo_id = told.pop("repo_id", None) or os.path.basename(os.path.abspath(save_directory))
            shard = {name: kwargs[name] for name in ("max_shard_size", "token") if name in kwargs}
            self.push_to_hub(repo_id, include_base=include_base, **shard, **told)

    def _stored_config(self, include_base: bool, with_adapter: bool) -> DraftHeadConfig:
        """The config of a checkpoint with or without the base, and with or without an adapter of the base."""
        stored = copy.deepcopy(self.config)
        stored.base_included = include_base
        if self._code_writer() is not None:
            stored.__dict__.pop("auto_map", None)  # of code that the checkpoint may not hold
        if include_base or not with_adapter:
            stored.adapter_name_or_path = stored.adapter_revision = None
        elif not stored.adapter_name_or_path:
            stored.adapter_name_or_path = FOLDER
        return stored

    @staticmethod
    def _code_writer() -> Callable[[Path], None] | None:
        """Writes the model's code into the folder of a checkpoint; None in that code, which transformers copies."""
        try:
            try:
                from hf_drafthead.hub_upload.bundle import add_bundle
            except ImportError as error:
                raise ImportError(
                    "hf_drafthead is not installed, and only its model code is here: install it."
                ) from error
        except ImportError:
            return None
        return add_bundle

    def load_adapter(self, peft_model_id: str | os.PathLike | None = None, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """As in transformers; an adapter that was made for the base goes to the base.

        Args:
            peft_model_id: folder or Hub id of the adapter.
            args, kwargs: as in transformers.
        """
        asked = dict(kwargs.get("adapter_kwargs") or {}) | {name: kwargs[name] for name in HUB_ARGUMENTS & set(kwargs)}
        folder = None if peft_model_id is None else find_adapter(os.fspath(peft_model_id), asked)
        if folder is not None and not is_of_a_whole_model(folder):
            return self.base.load_adapter(peft_model_id, *args, **kwargs)
        return super().load_adapter(peft_model_id, *args, **kwargs)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str | None = "50GB",
        tags: list[str] | None = None,
        include_base: bool = False,
        license: str | None = None,
    ) -> Any:
        """Publish the heads, with tokenizer, settings, figures and card, in one commit.

        Args:
            repo_id: `org/name` on the Hub; made if it is not there.
            commit_message, commit_description: of the commit.
            private: whether a new repository is private.
            token: of the Hub; by default that of `hf auth login`.
            revision: branch to push to; made if it is not there.
            create_pr: propose the commit instead of making it.
            max_shard_size: of a file of weights.
            tags: for the card, besides its own.
            include_base: publish the base's weights too, for a base that was trained together with its heads.
            license: of the heads, as the Hub names it (`apache-2.0`), if no card or summary says it yet.

        Returns:
            The commit, as `huggingface_hub.CommitInfo`.

        Raises:
            OSError: the Hub refuses, or cannot be reached.
            ValueError: others could not use these heads: their base is a local path, a tensor is not finite, the card
                is not complete.
        """
        try:
            from hf_drafthead.hub_upload import Target, push_model
        except ImportError as error:
            raise ImportError("hf_drafthead is not installed, and only its model code is here: install it.") from error

        target = Target(repo_id, commit_message, commit_description, private, token, revision, create_pr, tags, license)
        return push_model(self, target, include_base=include_base, max_shard_size=max_shard_size or "50GB").commit

    # ---- being a model ----------------------------------------------------------------------------------------------

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        training_loss: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """The base's own forward: the heads take no part in it; but in training mode labels train the heads.

        Then the loss is that of the family's recipe, and the base is only read: a Trainer that knows nothing of draft
        heads trains these. In eval mode the loss is the base's.

        Args:
            training_loss: return `training_loss(model, **kwargs)` instead. A Trainer asks for the heads' loss through
                this, because what wraps a model to distribute it only sees calls of `forward`.
        """
        if training_loss is not None:
            return training_loss(self, **kwargs)
        if labels is not None and self.training:
            try:
                from hf_drafthead.training.plain import heads_output
            except ImportError as error:
                raise ImportError(
                    "hf_drafthead is not installed, and only its model code is here: install it."
                ) from error

            return heads_output(
                self,
                input_ids,
                labels,
                attention_mask,
                position_ids,
                inputs_embeds=inputs_embeds,
                past_key_values=past_key_values,
                **kwargs,
            )
        if self.training and "forward" in self.__dict__ and torch.is_grad_enabled():
            self._refuse_to_learn_nothing()
        given = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "past_key_values": past_key_values,
            "inputs_embeds": inputs_embeds,
            "labels": labels,
            "use_cache": use_cache,
            "output_attentions": output_attentions,
            "output_hidden_states": output_hidden_states,
            "return_dict": return_dict,
        }
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            given["logits_to_keep"] = logits_to_keep
        # Not every base knows every argument: pass on only what was given.
        return self.base(**{name: value for name, value in given.items() if value is not None}, **kwargs)

    def _refuse_to_learn_nothing(self) -> None:
        """Refuse a trainer that put a forward of its own before ours and asks for the output of a base that is frozen.

        Raises:
            ValueError: nothing could learn from that output.
        """
        if not any(parameter.requires_grad for parameter in self.base.parameters()):
            raise ValueError(
                "the trainer computes a loss of its own from the base's output, from which the heads learn nothing: "
                "let the model compute the loss from labels= (in a subclass of TRL's SFTTrainer, compute_loss = "
                "transformers.Trainer.compute_loss), or use hf_drafthead.training.DraftHeadTrainer."
            )

    @classmethod
    def can_generate(cls) -> bool:
        """Always."""
        return True

    def get_input_embeddings(self) -> nn.Module:
        return self.base.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.base.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        return self.base.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.base.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> nn.Module:
        return self.base.get_decoder()

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the base and for decoder layers of the heads."""
        super().set_attn_implementation(*args, **kwargs)
        self.drafter.follow_base()

    def set_experts_implementation(self, *args: Any, **kwargs: Any) -> None:
        """As in transformers, for the base and for decoder layers of the heads."""
        super().set_experts_implementation(*args, **kwargs)
        self.drafter.follow_base()

    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Refused unless nothing changes: the heads guess over the vocabulary that they were trained for."""
        embeddings: Any = self.get_input_embeddings()
        size = embeddings.weight.shape[0]
        if pad_to_multiple_of is None and new_num_tokens in (None, size):
            return embeddings
        raise ValueError(
            f"the draft heads guess over {size} tokens and cannot be resized to {new_num_tokens or size} (multiple of "
            f"{pad_to_multiple_of or 1}): resize the base, then train heads for it (from_base)."
        )

    def _init_weights(self, module: nn.Module) -> None:
        # Parameters have their starting values from where they are made; what is left are computed buffers.
        if any(True for _ in module.buffers(recurse=False)):
            super()._init_weights(module)


# ---- hf_drafthead/modeling/token_maps.py

"""Whether a base and a draft model mean the same by a token id."""


def check_token_maps(config: Any, fetch: Mapping[str, Any]) -> None:
    """Compare the tokenizers of a base and a draft model id by id, as far as both have tokens.

    Where one of them has no tokenizer at hand, as models built in memory, their vocabularies must be of one size.

    Args:
        config: of a draft-model model: names, revisions and vocabularies of both.
        fetch: keyword arguments of every download.

    Raises:
        ValueError: they differ; the first token that does is named.
    """
    base, draft = config.base_model_name_or_path, config.draft_model_name_or_path
    ours = _tokens(base, config.base_model_revision, fetch)
    theirs = _tokens(draft, config.draft_model_revision, fetch)
    if ours is None or theirs is None:
        sizes = config.get_text_config().vocab_size, config.draft_text_config.vocab_size
        if sizes[0] != sizes[1]:
            raise ValueError(
                f"the base has {sizes[0]} tokens and the draft model {sizes[1]}, and their tokenizers are not at hand "
                "to be compared: give both by name, with their tokenizers, or a draft model of the base's vocabulary."
            )
        return
    for token in sorted(ours.keys() & theirs.keys()):
        if ours[token] != theirs[token]:
            raise ValueError(
                f"the tokenizers of the base {base!r} and the draft model {draft!r} differ: token {token} is "
                f"{ours[token]!r} for the first and {theirs[token]!r} for the second; give a draft model with the "
                "base's tokenizer."
            )


def _tokens(name: str | None, revision: str | None, fetch: Mapping[str, Any]) -> dict[int, str] | None:
    """Every token by its id; None where there is no tokenizer."""
    if not name:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, revision=revision or "main", **fetch)
    except Exception:  # a folder without a tokenizer makes each kind of tokenizer raise in its own way
        return None
    return {token: text for text, token in tokenizer.get_vocab().items()}


# ---- hf_drafthead/modeling/draft_model.py

"""A draft model: a small language model of the same vocabulary guesses for the base (Leviathan et al., 2023).

It reads nothing of the base but its tokens, from the first one on, and keeps a cache of its own. Each level of a tree
is one forward of it over the level's nodes, which see the verified text and their ancestors.

Shapes: B rows, A newly verified tokens, T positions, n nodes of a level, M nodes of the tree so far, H hidden, V'
vocabulary that both models share, S whatever the logits are made of: H, or V' where these cannot be had apart.
"""


WithDraftModel = TypeVar("WithDraftModel", bound="DraftModelForCausalLM")

# Distillation: the base's distribution, at the base's own answers.
DRAFT_MODEL_RECIPE: dict[str, Any] = {
    "next_token_weight": 0.0,
    "teacher_weight": 1.0,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 2,
}
FRESH_LAYERS = 2


class DraftModelConfig(DraftHeadConfig):
    """A draft model, which guesses as deep as a tree is: num_draft_heads is 1.

    Args:
        draft_config: config of the draft model; None: a fresh LLaMA of two layers and the base's other sizes.
        draft_model_name_or_path: where it comes from; a relative path is looked up in the checkpoint's own folder.
        draft_model_revision: its commit, if it came from the Hub.
        draft_included: False in a checkpoint that only names it.
    """

    model_type = "drafthead_draft_model"
    sub_configs: ClassVar = {"base_config": AutoConfig, "draft_config": AutoConfig}

    num_draft_heads: int = 1
    draft_config: dict[str, Any] | PreTrainedConfig | None = None
    draft_model_name_or_path: str | None = None
    draft_model_revision: str | None = None
    draft_included: bool = True

    @property
    def family(self) -> str:
        return "draft-model"

    @property
    def max_depth(self) -> int | None:
        return None

    @property
    def own_layer(self) -> PreTrainedConfig:
        return self.draft_text_config

    @property
    def draft_text_config(self) -> PreTrainedConfig:
        """What the draft model's text part is configured by."""
        return cast(PreTrainedConfig, self.draft_config).get_text_config(decoder=True)

    @property
    def shared_vocabulary(self) -> int:
        """V', tokens that both models score: sizes may differ by the padding of one family's vocabularies."""
        return min(self.draft_text_config.vocab_size, self.get_text_config().vocab_size)

    def check(self) -> None:
        super().check()
        if self.num_draft_heads != 1:
            raise ValueError(
                f"num_draft_heads is {self.num_draft_heads}, but a draft model guesses at every depth: leave it out, "
                "the tree says how deep to guess."
            )
        self._check_flag("draft_included")
        if self.draft_config is None and isinstance(self.base_config, PreTrainedConfig):
            self.draft_config = llama_like(self.get_text_config(), FRESH_LAYERS)
        if isinstance(self.draft_config, PreTrainedConfig) and self.draft_config.is_encoder_decoder:
            raise ValueError(
                f"the draft model is an encoder-decoder ({self.draft_config.model_type!r}): it cannot go on from the "
                "base's text, give a causal language model."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        saved = copy.deepcopy(self)
        saved.draft_model_name_or_path = portable(self.draft_model_name_or_path, save_directory)
        super(DraftModelConfig, saved).save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        fields = super().to_diff_dict()
        (fields.get("draft_config") or {}).pop("_name_or_path", None)
        return fields


class DraftModelState(NamedTuple):
    """The verified text, and where in a tree the guessing is.

    cache: of the draft model; scores: (B, S) at each row's root; ancestors: (B, n, M) which nodes of the tree so far
    the last level's nodes see, the last level first; depth: levels that were guessed; over: the draft model has come
    to the end of its positions, and guesses no more in this call.
    """

    cache: SlotCache
    scores: Tensor
    ancestors: Tensor
    depth: int = 0
    over: bool = False


class DraftModelDrafter(Drafter):
    """A language model and its own cache.

    State dict: `model.*` with the draft model's names; `draft_tokens` (V',) where it scores fewer tokens than the base.
    """

    config: DraftModelConfig
    keeps_history = True
    reads = ()

    def __init__(self, config: DraftModelConfig) -> None:
        super().__init__(config)
        self.model: Any = AutoModelForCausalLM.from_config(copy.deepcopy(config.draft_config))
        self.size = config.shared_vocabulary
        if self.size < config.get_text_config().vocab_size:
            self.draft_tokens = torch.arange(self.size)
        self.limit = getattr(config.draft_text_config, "max_position_embeddings", None)

    def prepare(self) -> None:
        """Find out how the draft model is run.

        Raises:
            Unsupported: it cannot score a tree.
        """
        _ = self.reader

    @property
    def reader(self) -> BaseReader:
        """How the draft model is run: found out by running it, once for each way to attend and type.

        Raises:
            Unsupported: it cannot score a tree.
        """
        key = (self.model.config._attn_implementation, self.model.dtype)
        known = self.__dict__.setdefault("_readers", {})
        if key not in known:
            was_training = self.model.training
            self.model.eval()
            try:
                known[key] = probe(self.model, ())
            except Unsupported as reason:
                raise Unsupported(
                    f"the draft model cannot draft a tree: {str(reason).replace('the base', 'it')}"
                ) from None
            finally:
                self.model.train(was_training)
        return known[key]

    def copy_from_base(self) -> None:
        """Nothing: it has learnt what it knows; a fresh one takes over what fits, see `take_from_base`."""

    def take_from_base(self) -> None:
        """Start a fresh model from the base's embeddings and lm_head, where they are as wide."""
        with torch.no_grad():
            for find in ("get_input_embeddings", "get_output_embeddings"):
                ours, theirs = getattr(self.model, find)().weight, getattr(self.base, find)().weight
                if ours.shape == theirs.shape and theirs.is_floating_point() and not theirs.is_meta:
                    ours.copy_(theirs)

    def start(self, batch_size: int, capacity: int) -> DraftModelState:
        layers = self.config.draft_text_config.num_hidden_layers
        cache = SlotCache(batch_size, layers, min(capacity, ROOM))
        width = self.model.get_output_embeddings().weight.shape[-1] if self.reader.split else self.size
        return self._at_root(cache, self.placed(torch.zeros(batch_size, width)), False)

    def observe(self, state: DraftModelState, features: Tensor, tokens: Tensor, lengths: Tensor) -> DraftModelState:
        """Read newly verified tokens; of the prompt all of them, the first one too."""
        cache, device = state.cache, state.scores.device
        tokens, lengths = tokens.to(device), lengths.to(device)
        count = tokens.shape[1]
        if state.over or (not cache.fixed and self.limit is not None and cache.extent + count > self.limit):
            return self._at_root(cache, state.scores, True)
        order = torch.arange(count, device=device)
        if cache.extent == 0 and not cache.fixed:  # behind nothing it is read as any text is
            cache.append()
            scores = self._scores(tokens, order.expand_as(tokens), None, cache)
            cache.count(count, lengths)
        else:
            cache.place(count)
            seen = (order <= order[:, None])[None]
            scores = self._over_nodes(cache, tokens, order[None], seen)
            cache.keep(order.expand_as(tokens), lengths)
        return self._at_root(cache, last_valid(state.scores, scores, lengths), False)

    def expand(self, state: DraftModelState, tokens: Tensor, parents: Tensor) -> tuple[DraftModelState, Guesses]:
        cache, device = state.cache, state.scores.device
        if state.over:
            return state, Guesses(state.scores.new_zeros(len(tokens), 1, self.size), self.draft_tokens)
        if state.depth == 0:  # the root was read already
            scores, ancestors = state.scores.unsqueeze(1), state.ancestors
        else:
            count = tokens.shape[1]
            rows = torch.arange(len(tokens), device=device).unsqueeze(1)
            itself = torch.eye(count, dtype=torch.bool, device=device).expand(len(tokens), -1, -1)
            ancestors = torch.cat([itself, state.ancestors[rows, parents.to(device)]], dim=2)
            cache.place(count, again=state.depth > 1)
            depths = torch.full((1, count), state.depth - 1, device=device)
            scores = self._over_nodes(cache, tokens.to(device), depths, ancestors)
        state = state._replace(ancestors=ancestors, depth=state.depth + 1)
        return state, Guesses(self.head_logits(0, scores), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """One entry: what the guess of the token after next is made of, the next one being read."""
        inputs = {"input_ids": self._known(input_ids), "attention_mask": attention_mask, "use_cache": False}
        if attention_mask is not None:
            inputs["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)
        return [self.reader.read(inputs).scores.roll(-1, dims=1)]

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V') from what they are made of (..., S)."""
        return self.reader.logits(hidden)[..., : self.size]

    def _over_nodes(self, cache: SlotCache, tokens: Tensor, depths: Tensor, ancestors: Tensor) -> Tensor:
        """What the logits at nodes (B, n) are made of, (B, n, S), each node seeing the past and its ancestors.

        Args:
            depths: (1, n) how many positions each lies behind the row's past.
        """
        past = cache.lengths[:, None] + depths
        masks = {
            kind: slot_mask(ancestors, cache.lengths, cache.seen_extent, self.model.dtype, window=window, depths=depths)
            for kind, window in self.reader.windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        # positions behind the last one are those of a tree that reaches beyond it, or of a step of fixed shapes
        return self._scores(tokens, past if self.limit is None else past.clamp(max=self.limit - 1), mask, cache)

    def _scores(self, tokens: Tensor, positions: Tensor, mask: Any, cache: SlotCache) -> Tensor:
        inputs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        return self.reader.read({"input_ids": self._known(tokens), **inputs}).scores

    def _known(self, tokens: Tensor) -> Tensor:
        """Tokens as the draft model can embed them: those that only pad the base's vocabulary are never written."""
        return tokens.clamp(max=self.config.draft_text_config.vocab_size - 1)

    def _at_root(self, cache: SlotCache, scores: Tensor, over: bool) -> DraftModelState:
        nothing = torch.zeros(len(scores), 1, 0, dtype=torch.bool, device=scores.device)
        return DraftModelState(cache, scores, nothing, over=over)


class DraftModelForCausalLM(DraftHeadPreTrainedModel):
    """A base with a small language model that drafts for it."""

    config_class = DraftModelConfig
    config: DraftModelConfig
    drafter_class = DraftModelDrafter
    drafter: DraftModelDrafter

    @classmethod
    def from_base(
        cls: type[WithDraftModel],
        base: str | os.PathLike | nn.Module,
        *,
        draft: str | os.PathLike | nn.Module | PreTrainedConfig | None = None,
        draft_revision: str | None = None,
        config: DraftHeadConfig | None = None,
        **kwargs: Any,
    ) -> WithDraftModel:
        """A draft model for a base.

        Args:
            base: Hub id or path of a causal language model, or a loaded one (which is used, not copied).
            draft: the same for the draft model; or the config of a fresh one, which has to be trained before it is of
                use. Default: the one that the config names, else a fresh LLaMA of two layers.
            draft_revision: branch, tag or commit of the draft model.
            config: take the family's fields from this config.
            kwargs: as in every family: config fields, `base_revision`, and arguments for loading the base.

        Raises:
            OSError: there is no such base or draft model.
            ValueError: the two have different tokens, or the draft model cannot draft a tree.
        """
        loaded: Any = None
        fields: dict[str, Any] = {}
        named = kwargs.pop("draft_model_name_or_path", getattr(config, "draft_model_name_or_path", None))
        draft = named if draft is None else draft
        fetch = {key: kwargs[key] for key in HUB_ARGUMENTS & set(kwargs)}
        if isinstance(draft, PreTrainedConfig):
            fields["draft_config"] = draft
        elif isinstance(draft, nn.Module):
            loaded = draft
            name = getattr(loaded.config, "_name_or_path", "") or None
            fields = {"draft_config": loaded.config, "draft_model_name_or_path": full_name(name) if name else None}
        elif draft is not None:
            name = os.fspath(draft)
            loaded = load_draft(name, draft_revision, fetch)
            commit = getattr(loaded.config, "_commit_hash", None) or draft_revision
            fields = {
                "draft_config": loaded.config,
                "draft_model_name_or_path": full_name(name),
                "draft_model_revision": commit,
            }
        model = super().from_base(base, config=config, **fields, **kwargs)
        if loaded is None:
            model.drafter.take_from_base()
        else:
            model._take_draft(loaded)
            check_token_maps(model.config, fetch)
        try:
            model.drafter.prepare()
        except Unsupported as reason:
            raise ValueError(f"{reason}; give another draft model.") from None
        return model

    def _take_draft(self, loaded: Any) -> None:
        """Draft with a loaded model, as it is where device and type are right."""
        like = next(self.drafter.parameters())
        if loaded is self.base or loaded.dtype != like.dtype or loaded.device != like.device:
            loaded = copy.deepcopy(loaded).to(device=like.device, dtype=like.dtype)
        self.drafter.model = loaded.eval() if not self.training else loaded

    def _attach(self, base: Any) -> None:
        super()._attach(base)
        for target, source in self._tied_in_draft().items():
            self.all_tied_weights_keys[target] = source

    def _tied_in_draft(self) -> dict[str, str]:
        tied = getattr(self.drafter.model, "all_tied_weights_keys", None) or {}
        return {f"drafter.model.{target}": f"drafter.model.{source}" for target, source in tied.items()}

    @classmethod
    def _without_memory(
        cls: type[WithDraftModel],
        path: str,
        config: DraftHeadConfig,
        variant: str | None,
        hub: dict[str, Any],
        given: Mapping[str, Tensor] | None = None,
    ) -> tuple[WithDraftModel, dict[str, Tensor]]:
        if given is not None or cast(DraftModelConfig, config).draft_included:
            return super()._without_memory(path, config, variant, hub, given)
        model = cls._blank(config, build_base=False)
        name = model.config.draft_model_name_or_path
        if not name:
            raise OSError(f"{path!r} neither holds nor names a draft model: save it again.")
        beside = os.path.join(path, name)
        fetch = {key: hub[key] for key in HUB_ARGUMENTS & set(hub)}
        draft = load_draft(beside if os.path.isdir(beside) else name, model.config.draft_model_revision, fetch)
        tensors = {f"drafter.model.{key}": tensor for key, tensor in draft.state_dict().items()}
        expected = model.state_dict()
        if "drafter.draft_tokens" in expected:
            tensors["drafter.draft_tokens"] = torch.arange(model.config.shared_vocabulary)
        check_tensors(name, tensors, expected)
        model.config.draft_included = True
        return model, tensors

    @classmethod
    def _complete(cls: type[WithDraftModel], model: WithDraftModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tied = {target: tensors[source] for target, source in model._tied_in_draft().items() if source in tensors}
        return {**tied, **tensors}

    def _fill(self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        super()._fill(tensors, device, dtype)
        self.drafter.model.tie_weights()

    def _init_weights(self, module: nn.Module) -> None:
        # What the draft model computes instead of storing it, it knows itself; its parameters are there already.
        if module in set(self.drafter.model.modules()) and any(True for _ in module.buffers(recurse=False)):
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            self.drafter.model._init_weights(module)
        else:
            super()._init_weights(module)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike, *args: Any, include_draft: bool = True, **kwargs: Any
    ) -> None:
        """Save the draft model; with `include_draft=False` only its name, for one that is used as it was published.

        Raises:
            ValueError: as in every family, or there is no name, or the base is to be included.
        """
        if include_draft:
            kwargs.setdefault("save_original_format", False)  # renamings of an architecture would reach the draft too
            super().save_pretrained(save_directory, *args, **kwargs)
            return
        if self.config.draft_model_name_or_path is None or kwargs.get("include_base") or kwargs.get("push_to_hub"):
            raise ValueError(
                "include_draft=False saves names only: the draft model must have come from a folder or the Hub, and "
                "include_base= and push_to_hub= are for checkpoints with weights."
            )
        os.makedirs(save_directory, exist_ok=True)
        self.config.architectures = [type(self).__name__]
        self.config.draft_included = False
        try:
            self.config.save_pretrained(save_directory)
        finally:
            self.config.draft_included = True
        self.generation_config.save_pretrained(save_directory)


def load_draft(name: str, revision: str | None, fetch: Mapping[str, Any]) -> Any:
    """A draft model by its Hub id or path, in the type that it was saved in.

    Raises:
        OSError: there is none.
        ValueError: it is an encoder-decoder.
    """
    hub = {**fetch, "revision": revision or "main"}
    try:
        config = AutoConfig.from_pretrained(name, **hub)
        if not config.is_encoder_decoder:
            return AutoModelForCausalLM.from_pretrained(name, config=config, dtype="auto", **hub)
    except (OSError, ValueError) as error:  # ValueError: a folder that holds no model, or one of another kind
        raise OSError(
            f"the draft model {name!r} cannot be loaded ({str(error).splitlines()[0]}): give the id or path of a small "
            "causal language model."
        ) from error
    raise ValueError(
        f"the draft model {name!r} is an encoder-decoder ({config.model_type!r}): it cannot go on from the base's "
        "text, give a causal language model."
    )
