"""Programs of a step that are kept for later calls, and the memory that recorded ones work on.

A program is trusted because it is tried. A compiled one has dynamo's guards: the first step of every call asks them
whether the program holds for what the call has, the base's attributes, hooks and numbers in closures included, and
another is compiled where it does not; later steps of the call run its code and ask nothing. A recorded one sees no
Python, so that the first step of every call compares a replay with a run.

Some things dynamo has no guards for, such as hooks on layers that it traces once: a program also holds for one
`BaseReader` alone, which is made anew where the base's modules, hooks or forwards are other ones.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.slots import SlotCache, padded
from hf_drafthead.generation.state import DecodingState, Limits, Rows

MOST_PROGRAMS = 64  # kept per model, of which a step takes three; the least recently used goes first
MOST_ARENAS, ARENA_BYTES = 4, 2 << 30  # memory of recorded programs that is kept after a call, per model
Stage = Callable[..., Any]


class NotCaptured(Exception):
    """A stage cannot be compiled or recorded; the text says why. The call's tensors are as they were before it.

    lasting: whether that holds for later calls too; where there is no reason it was told, or another call compiles.
    """

    def __init__(self, reason: str, lasting: bool | None = None):
        super().__init__(reason)
        self.lasting = bool(reason) if lasting is None else lasting


def written(rows: Rows, after: Rows) -> Rows:
    """Write what a step leaves to where it started from."""
    places, values = tensors_of(rows), tensors_of(after)
    assert len(places) == len(values), "a step hands on other tensors than it was given"
    moved = [(place, value.clone()) for place, value in zip(places, values) if value is not place]  # one may be a view
    for place, value in moved:
        place.copy_(value)
    return rows


class Arena:
    """Memory that recorded programs work on; it belongs to one call at a time, which says when it is `free` again.

    Args:
        state: of the call that takes it first, whose tensors and caches it keeps.
    """

    def __init__(self, state: DecodingState):
        self.rows = state.rows
        self.limits = state.limits = Limits(*(limit.clone() for limit in state.limits))
        self.programs: dict[Hashable, Any] = {}  # of `runner.Recorded`
        self.free = False

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(block.nbytes for cache in self.rows.caches for block in cache.blocks)

    def take(self, state: DecodingState, padding: int) -> None:
        """Let a call go on here; `padding` is the token behind the end of a row."""
        for cache, past in zip(self.rows.caches, state.caches, strict=True):
            cache.copy_past(past)
        rows = with_shapes(state.rows, self.rows.sequences.shape[1], self.rows.cache.slots, padding)
        for place, value in zip(tensors_of((self.rows, self.limits)), tensors_of((rows, state.limits)), strict=True):
            place.copy_(value)
        state.limits = self.limits
        state.keep(self.rows, state.pending)


def out_of_arena(rows: Rows) -> Rows:
    """Rows with tensors of their own, and caches that will not touch an arena's once they are resized."""

    def taken_along(leaf: Any) -> Any:
        if isinstance(leaf, SlotCache):
            return leaf.twin()
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    moved: Rows = tree_map(taken_along, rows)
    return moved


class Programs:
    """What is kept for one model; a call that uses something of it holds it until it ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.compiled: list[Any] = []  # of `runner.Program`, the most recently used one last
        self.arenas: OrderedDict[Hashable, Arena] = OrderedDict()
        self.refused: set[Hashable] = set()
        self.compiles = False  # whether a call compiles; others, whose steps would wait, run theirs eagerly

    def fitting(self, made_for: Hashable, arguments: tuple) -> Any:
        """The program that was made for this and holds for the arguments, or None."""
        with self.lock:
            candidates = [program for program in reversed(self.compiled) if program.made_for == made_for]
        for program in candidates:
            if program.fits(arguments):
                self.keep_compiled(program)
                return program
        return None

    def keep_compiled(self, program: Any) -> None:
        """Keep a program for later calls, in place of what was not used for the longest time."""
        with self.lock:
            self.compiled = [*(other for other in self.compiled if other is not program), program][-MOST_PROGRAMS:]

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compile meanwhile.

        Raises:
            NotCaptured: another call does.
        """
        with self.lock:
            if self.compiles:
                raise NotCaptured("")
            self.compiles = True
        try:
            yield
        finally:
            self.compiles = False

    def take_arena(self, key: Hashable) -> Arena | None:
        """The memory that is kept under a key, if no other call is in it."""
        with self.lock:
            arena = self.arenas.get(key)
            if arena is None or not arena.free:
                return None
            arena.free = False
            return arena

    def keep_arena(self, key: Hashable, arena: Arena) -> None:
        """Keep memory for later calls, in place of what was not used for the longest time."""
        with self.lock:
            self.arenas[key] = arena
            self.arenas.move_to_end(key)
            while len(self.arenas) > MOST_ARENAS or sum(memory.bytes for memory in self.arenas.values()) > ARENA_BYTES:
                self.arenas.popitem(last=False)


# not on the model, which must stay a thing that can be copied and pickled
PROGRAMS: weakref.WeakKeyDictionary[Any, Programs] = weakref.WeakKeyDictionary()


def addresses(model: Any) -> Iterator[int]:
    """Where the weights are: a recorded program reads them from there."""
    for module in (model.base, model.drafter):
        if isinstance(module, nn.Module):
            yield from (tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def form_of(tree: Any) -> Hashable:
    """What of nested tuples is no value of a tensor: shapes, numbers and flags, and which caches hold something."""

    def form(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype
        if isinstance(leaf, SlotCache):
            return bool(leaf.blocks)
        # else an object of a drafter of the user's own
        return leaf if isinstance(leaf, Hashable) else type(leaf).__qualname__

    return tuple(map(form, tree_leaves(tree)))


def fix(state: DecodingState, capacity: int, nodes: int, depth: int, padding: int, compiles: bool) -> None:
    """Give all tensors of a call fixed shapes, for so many past positions; where it `compiles`, as a compiler wants.

    Raises:
        MemoryError: there is no memory for them.
    """
    for cache in state.caches:
        if compiles:
            cache.split()
        try:
            cache.resize(capacity, nodes)
            for layer in cache.recurrent:
                layer.resize_record(nodes)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            size = cache.bytes_of(capacity + nodes) / 2**30
            raise MemoryError(
                f"there is no memory for a cache of {size:.1f} GiB: {capacity} positions, {len(state.lengths)} row(s)."
            ) from error
        cache.fixed = True
    # the compiler takes equal sizes for one size: what need not be equal must differ
    width = max(capacity - state.past_shift, 0) + depth + nodes + 1
    state.keep(with_shapes(state.rows, width, state.rows.cache.slots, padding), state.pending)


def with_shapes(rows: Rows, width: int, slots: int, padding: int) -> Rows:
    """Rows with sequences (B, width), and `visible` over so many slots."""
    shown = rows.sequences[:, :width]
    sequences = nn.functional.pad(shown, (0, width - shown.shape[1]), value=padding)
    # as long as the keys: the compiler cannot write code for a size that differs from theirs by a constant
    visible = None if rows.visible is None else padded(rows.visible, slots)
    return rows._replace(sequences=sequences, visible=visible)


def sizes_may_change(arguments: tuple) -> None:
    """Tell a compiler which sizes of a call's tensors differ from step to step."""
    for rows in (value for value in arguments if isinstance(value, Rows)):
        layers = [layer for cache in rows.caches for layer in cache.layers if layer.is_initialized]
        for tensor in (part for layer in layers for part in (layer.keys, layer.values)):
            torch._dynamo.mark_dynamic(tensor, tensor.ndim - 2)
        torch._dynamo.mark_dynamic(rows.sequences, 1)
        if rows.visible is not None:
            torch._dynamo.mark_dynamic(rows.visible, 1)
