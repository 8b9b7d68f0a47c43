"""CUDA graphs: the kernels of a step are recorded once per call and replayed, so that the host need not launch them.

Nothing is compiled: recording takes as long as launching one step. A graph reads and writes the same memory at every
replay, so what a step hands to the next is copied back to where the step found it.

The first recorded step of a kind is also run without the graph, and the two are compared: a base that decides something
on the host, which a replay would not decide again, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableSet

import torch
from torch.utils._pytree import tree_leaves

from hf_drafthead.generation.slots import SlotCache
from hf_drafthead.generation.state import Limits, Rows, Walk


class NotRecorded(Exception):
    """A step cannot be recorded; the text says why. The call's tensors are as they were before the step."""


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for this device."""
    return device.type == "cuda"


def recorded_kernels(step: Callable[[], Walk]) -> Callable[[], Walk]:
    """What replays the kernels of a step; its outcome lies in the same memory each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on meanwhile
        walk = step()

    def replay() -> Walk:
        graph.replay()
        return walk

    return replay


class Recorded:
    """A whole step, recorded when it is called for the second time with tensors of one shape.

    Args:
        step: draft, verify, walk and commit, see `capture.Captured`.
        key: which kind of step this is.
        compared: kinds of steps that were compared with a step without a graph.
    """

    def __init__(
        self,
        step: Callable[[Rows, SlotCache, Limits], tuple[Walk, Rows]],
        key: Hashable,
        compared: MutableSet[Hashable],
    ):
        self.step, self.key, self.compared = step, key, compared
        self.warm = False  # a first step takes what it needs besides, such as workspaces and the tensors of a tree
        self.replay: Callable[[], Walk] | None = None
        self.of: tuple[int, ...] = ()  # addresses of the memory that the graph works on

    def __call__(self, rows: Rows, cache: SlotCache, limits: Limits) -> tuple[Walk, Rows]:
        """Take a step.

        Raises:
            NotRecorded: it cannot be recorded, or a replay gives something else.
        """
        if not self.warm:
            self.warm = True
            return self.step(rows, cache, limits)
        held, caches = _tensors_of(rows), [cache, *_caches_of(rows)]
        memory = [tensor for one in caches for tensor in one.memory]
        lengths = [one.lengths for one in caches]
        addresses = tuple(tensor.data_ptr() for tensor in [*held, *lengths, *memory, *limits])
        if self.replay is None or self.of != addresses:
            self._record(rows, caches, limits, [*held, *lengths])
            self.of = addresses
        assert self.replay is not None
        walk = self.replay()
        return Walk(walk.packed.clone()), rows  # the next replay may be launched before this one's result is read

    def _record(self, rows: Rows, caches: list[SlotCache], limits: Limits, held: list[torch.Tensor]) -> None:
        lengths = [cache.lengths for cache in caches]

        def in_place() -> Walk:
            try:
                walk, after = self.step(rows, caches[0], limits)
                found = [*_tensors_of(after), *(cache.lengths for cache in caches)]
            finally:
                for cache, own in zip(caches, lengths):
                    cache.lengths = own
            assert len(found) == len(held), "a step hands on other tensors than it was given"
            moved = [(mine, new.clone()) for mine, new in zip(held, found) if new is not mine]  # one may be a view
            for mine, new in moved:
                mine.copy_(new)
            return walk

        before = [tensor.clone() for tensor in held]
        try:
            self.replay = recorded_kernels(in_place)
        except Exception as error:  # whatever cannot be recorded: steps without a graph work all the same
            raise NotRecorded(" ".join(f"{type(error).__name__}: {error}".split("\n")[:1])) from error
        if self.key in self.compared:
            return
        expected = [in_place().packed, *(tensor.clone() for tensor in held)]
        _put_back(before, held)
        found = [self.replay().packed.clone(), *(tensor.clone() for tensor in held)]
        _put_back(before, held)
        if not all(torch.equal(one, other) for one, other in zip(expected, found)):
            self.replay = None
            raise NotRecorded("a replay of the recorded step gives something else than the step.")
        self.compared.add(self.key)


def _tensors_of(rows: Rows) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(rows) if isinstance(leaf, torch.Tensor)]


def _caches_of(rows: Rows) -> list[SlotCache]:
    return [leaf for leaf in tree_leaves(rows) if isinstance(leaf, SlotCache)]


def _put_back(values: list[torch.Tensor], where: list[torch.Tensor]) -> None:
    for value, place in zip(values, where):
        place.copy_(value)
