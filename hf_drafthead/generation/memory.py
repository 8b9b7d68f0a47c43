"""Where memory does not hold the nodes of a step: the call goes on with smaller trees, and the text stays the same.

Nothing of a step counts before `commit` has written all of it, so a step that failed can be taken again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.generation.dynamic import DynamicTree, Tree
from hf_drafthead.generation.slots import SlotCache
from hf_drafthead.generation.tree import DraftTree

logger = logging.get_logger(__name__)

WORDS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
)  # of devices without an error class of their own


class DoesNotFit(Exception):
    """The nodes of a step do not fit into memory; its cause is the error of the device."""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is short, and nothing else.

    >>> out_of_memory(torch.OutOfMemoryError("2 GiB")), out_of_memory(RuntimeError("shapes do not match"))
    (True, False)
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in WORDS)


@contextlib.contextmanager
def nodes_in_memory(caches: list[SlotCache]) -> Iterator[None]:
    """Turn an error about memory into `DoesNotFit`, with the caches as they were: what lies behind a row is not seen.

    Raises:
        DoesNotFit: memory is short.
    """
    before = [cache.lengths.clone() for cache in caches]
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        for cache, lengths in zip(caches, before):
            cache.lengths = lengths
        raise DoesNotFit(str(error).partition("\n")[0]) from error


def smaller(tree: Tree) -> Tree:
    """A tree of half the nodes: the best guesses near the root; at last the root alone.

    >>> smaller(DraftTree([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])).paths
    ((0,), (1,))
    """
    nodes = tree.num_nodes // 2
    if nodes < 2:
        return DraftTree.root_alone()
    return replace(tree, nodes=nodes) if isinstance(tree, DynamicTree) else DraftTree(tree.paths[: nodes - 1])


class FittingStep:
    """A step that goes on with smaller trees once memory does not hold the nodes of its own.

    Args:
        step: as long as it fits.
        make: the step, not captured, with another tree.
    """

    def __init__(self, step: Any, make: Callable[[Tree], Any]):
        self.step, self.make = step, make

    @property
    def tree(self) -> Tree:
        """Of the last step."""
        return self.step.tree

    @property
    def ahead(self) -> int:
        """Steps that are launched before the first of them is read."""
        return self.step.ahead

    def __call__(self, state: Any) -> tuple[Any, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages.

        Raises:
            RuntimeError, MemoryError: not even the root alone fits.
        """
        while True:
            try:
                return self.step(state)
            except DoesNotFit as short:
                if self.tree.num_nodes == 1:
                    raise short.__cause__ or short from None
            # here, where nothing refers to the tensors of the step that failed any more
            logger.warning_once("Memory does not hold the nodes of a step: this call goes on with smaller trees.")
            for cache in state.caches:
                if cache.fixed:
                    cache.free()
            self.step = self.make(smaller(self.tree))
