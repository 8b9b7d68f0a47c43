"""CUDA graphs: the kernels of a step are recorded once per call and replayed, so that the host need not launch them.

Nothing is compiled: recording takes as long as launching one step. A graph reads and writes the same memory at every
replay, so what a step hands to the next is copied back to where the step found it.

The first recorded step of a kind is also run without the graph, and the two are compared: a base that decides something
on the host, which a replay would not decide again, is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, MutableSet

import torch
from torch.utils._pytree import tree_leaves

from hf_drafthead.generation.slots import SlotCache
from hf_drafthead.generation.state import Limits, Rows, Walk

_RECORDING = threading.Lock()  # of all models: a second recording at the same time fails


class NotRecorded(Exception):
    """A step cannot be recorded; the text says why. The call's tensors are as they were before the step."""


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for this device."""
    return device.type == "cuda"


def recorded_kernels(step: Callable[[], Walk], device: torch.device) -> Callable[[], Walk]:
    """What replays the kernels of a step on a device; its outcome lies in the same memory each time.

    Other threads may go on meanwhile, but for those that draw from the device's generator.
    """
    with _RECORDING, torch.cuda.device(device):
        before = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                walk = step()
        except BaseException:
            torch.cuda.set_stream(before)  # a recording that failed leaves the thread on its stream
            raise

    def replay() -> Walk:
        graph.replay()
        return walk

    return replay


class Recorded:
    """A whole step, recorded when it is called for the second time with the same memory.

    The first time takes what it needs besides, such as workspaces and the tensors of a tree. On some GPUs attention
    makes a plan for each new length, which it cannot do while it is recorded.

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
        self.replay: Callable[[], Walk] | None = None
        self.of: tuple[tuple[int, torch.Size], ...] = ()  # the memory that the graph works on

    def __call__(self, rows: Rows, cache: SlotCache, limits: Limits) -> tuple[Walk, Rows]:
        """Take a step.

        Raises:
            NotRecorded: it cannot be recorded, or a replay gives something else.
        """
        caches = [cache, *_caches_of(rows)]
        if self.of != _memory(rows, caches, limits):
            self.replay = None
            walk, after = self.step(rows, cache, limits)
            self.of = _memory(after, caches, limits)
            return walk, after
        if self.replay is None:
            self.replay = self._recorded(rows, caches, limits)
        walk = self.replay()
        return Walk(walk.packed.clone()), rows  # the next replay may be launched before this one's result is read

    def _recorded(self, rows: Rows, caches: list[SlotCache], limits: Limits) -> Callable[[], Walk]:
        lengths = [cache.lengths for cache in caches]
        held = [*_tensors_of(rows), *lengths]

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
            replay = recorded_kernels(in_place, rows.lengths.device)
        except Exception as error:  # whatever cannot be recorded: steps without a graph work all the same
            raise NotRecorded(cause_of(error)) from error
        if self.key in self.compared:
            return replay
        expected = [in_place().packed, *(tensor.clone() for tensor in held)]
        _put_back(before, held)
        found = [replay().packed.clone(), *(tensor.clone() for tensor in held)]
        _put_back(before, held)
        if not all(alike(one, other) for one, other in zip(expected, found)):
            raise NotRecorded("a replay of the recorded step gives something else than the step.")
        self.compared.add(self.key)
        return replay


def cause_of(error: BaseException) -> str:
    """One line about why a recording failed: how it ends says less."""
    cause = error.__context__ or error
    return f"{type(cause).__name__}: {cause}".partition("\n")[0]


def _tensors_of(rows: Rows) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(rows) if isinstance(leaf, torch.Tensor)]


def _caches_of(rows: Rows) -> list[SlotCache]:
    return [leaf for leaf in tree_leaves(rows) if isinstance(leaf, SlotCache)]


def _memory(rows: Rows, caches: list[SlotCache], limits: Limits) -> tuple[tuple[int, torch.Size], ...]:
    """Addresses and shapes of what a graph works on."""
    parts = (part for one in caches for part in (one.lengths, *one.memory))
    return tuple((tensor.data_ptr(), tensor.shape) for tensor in (*_tensors_of(rows), *parts, *limits))


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, but for rounding where they are no whole numbers."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = torch.finfo(one.dtype).eps ** 0.5
    return torch.allclose(one, other, rtol=close, atol=close * float(one.abs().max()) if one.numel() else 0.0)


def _put_back(values: list[torch.Tensor], where: list[torch.Tensor]) -> None:
    for value, place in zip(values, where):
        place.copy_(value)
