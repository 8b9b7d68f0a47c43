"""Programs that are kept for later calls: what they depend on, and the memory that recorded ones work on."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from hf_drafthead.generation.slots import SlotCache, out_of_memory, padded
from hf_drafthead.generation.state import DecodingState, Limits, Rows
from hf_drafthead.generation.step import Program
from hf_drafthead.generation.tree import Tree

MOST_PROGRAMS = 32  # kept per model; the least recently used goes first
MOST_ARENAS, ARENA_BYTES = 4, 2 << 30  # memory of recorded programs that is kept after a call, per model


class ProgramKey(NamedTuple):
    """Everything that a program depends on but the values and, where it is compiled, the sizes of its tensors.

    execution: an `Execution` as text; slots: for nodes; eos_tokens: how many; draft_state: see `form_of`;
    circumstances: see `Programs.circumstances_of`.
    """

    execution: str
    tree: Tree
    slots: int
    greedy: bool
    samples: bool
    rejects: bool
    batch_size: int
    padded: bool
    eos_tokens: int
    reads: tuple[int, ...]
    draft_state: Hashable
    circumstances: Hashable


def global_state(device: torch.device) -> Hashable:
    """What torch computes by that is set for a thread or a process, and that a program takes from where it was made."""
    kinds = dict.fromkeys((device.type, "cpu"))
    backends = torch.backends.cuda
    sums = backends.matmul
    return (
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(),
        (sums.allow_fp16_reduced_precision_reduction, sums.allow_bf16_reduced_precision_reduction),
        (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled()),
        backends.cudnn_sdp_enabled(),
        (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        torch.get_default_dtype(),
        torch.get_default_device(),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        torch.get_num_threads(),
    )


def adapters_of(module: Any) -> Iterator[str]:
    """Of each of PEFT's layers, which adapters are active, merged or disabled, and how they are scaled."""
    for name, layer in module.named_modules() if isinstance(module, nn.Module) else ():
        if hasattr(layer, "_disable_adapters"):
            switches = {key: value for key, value in vars(layer).items() if key[0] != "_" or "adapter" in key}
            yield f"{name} { {key: value for key, value in switches.items() if not isinstance(value, torch.Tensor)} }"


def fingerprint(module: Any) -> Iterator[Hashable]:
    """Modules, hooks and shapes."""
    for part in module.modules() if isinstance(module, nn.Module) else ():
        hooks = (*part._forward_hooks, None, *part._forward_pre_hooks)  # numbers, which are not given twice
        yield id(part), hooks, id(part.__dict__.get("forward")), part.training
        for parameter in part._parameters.values():
            if parameter is not None:
                yield tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device


def addresses(model: Any) -> Iterator[int]:
    """Where the weights are: a recorded program reads them from there."""
    for module in (model.base, model.drafter):
        if isinstance(module, nn.Module):
            yield from (tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()))


class Arena:
    """Memory that recorded programs work on; it belongs to one call at a time, which says when it is `free` again.

    Args:
        state: of the call that takes it first, whose tensors and caches it keeps.
    """

    def __init__(self, state: DecodingState):
        self.rows, self.caches = state.rows, state.caches
        self.limits = state.limits = Limits(*(limit.clone() for limit in state.limits))
        self.programs: dict[ProgramKey, Program] = {}
        self.free = False

    @property
    def bytes(self) -> int:
        """Of keys and values."""
        return sum(block.nbytes for cache in self.caches for block in cache.blocks)

    def take(self, state: DecodingState, padding: int) -> None:
        """Let a call go on here; `padding` is the token behind the end of a row."""
        for mine, theirs in zip(self.caches, state.caches, strict=True):
            mine.copy_past(theirs)
        state.cache, state.caches = self.caches[0], self.caches
        values = (with_shapes(state, self.rows.sequences.shape[1], padding), state.limits)
        for place, value in zip(tensors_of((self.rows, self.limits)), tensors_of(values), strict=True):
            place.copy_(value)
        state.rows, state.limits = self.rows, self.limits


def leave(state: DecodingState) -> None:
    """Let a call leave an arena with tensors of its own, and caches that will not touch the arena's once resized."""
    caches = [cache.twin() for cache in state.caches]
    of_drafter = iter(caches[1:])

    def own(leaf: Any) -> Any:
        if isinstance(leaf, SlotCache):
            return next(of_drafter)
        return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf

    state.cache, state.caches, state.rows = caches[0], caches, tree_map(own, state.rows)


@dataclass
class Programs:
    """What is kept for one model."""

    compiled: OrderedDict[ProgramKey, Program] = field(default_factory=OrderedDict)
    arenas: OrderedDict[Hashable, Arena] = field(default_factory=OrderedDict)
    refused: set[ProgramKey] = field(default_factory=set)
    fingerprint: Hashable = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # of compiling
    taking: threading.Lock = field(default_factory=threading.Lock)

    def circumstances_of(self, model: Any, device: torch.device) -> Hashable:
        """What of torch and of a model a program depends on and a user may change between two calls, its weights aside.

        Where modules or hooks are not those that the programs were made of, nothing is kept of these.
        """
        base, drafter = model.base, model.drafter
        now = (*fingerprint(base), *fingerprint(drafter))
        if now != self.fingerprint:
            for kept in (self.compiled, self.arenas, self.refused):
                kept.clear()
            self.fingerprint = now
        switches = (*adapters_of(base), *adapters_of(drafter))
        return base.dtype, base.config._attn_implementation, global_state(device), switches

    def keep_compiled(self, key: ProgramKey, program: Program) -> None:
        """Keep a program for later calls, in place of what was not used for the longest time."""
        self.compiled[key] = program
        while len(self.compiled) > MOST_PROGRAMS:
            self.compiled.popitem(last=False)

    def arena(self, key: Hashable) -> Arena | None:
        """The memory that is kept under a key, if no other call is in it."""
        with self.taking:
            found = self.arenas.get(key)
            if found is None or not found.free:
                return None
            found.free = False
            return found

    def keep(self, key: Hashable, arena: Arena) -> None:
        """Keep memory for later calls, in place of what was not used for the longest time."""
        self.arenas[key] = arena
        self.arenas.move_to_end(key)
        while len(self.arenas) > MOST_ARENAS or sum(each.bytes for each in self.arenas.values()) > ARENA_BYTES:
            self.arenas.popitem(last=False)


# not on the model, which must stay a thing that can be copied and pickled
PROGRAMS: weakref.WeakKeyDictionary[Any, Programs] = weakref.WeakKeyDictionary()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested tuples, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def caches_of(tree: Any) -> list[SlotCache]:
    """The caches of nested tuples, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, SlotCache)]


def form_of(draft_state: Any) -> Hashable:
    """What of a drafter's state is no value of a tensor: shapes, numbers and flags, and which caches hold something."""

    def form(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tuple(leaf.shape), leaf.dtype
        if isinstance(leaf, SlotCache):
            return bool(leaf.blocks)
        # else an object of a drafter of the user's own
        return leaf if isinstance(leaf, Hashable) else type(leaf).__qualname__

    return tuple(map(form, tree_leaves(draft_state)))


def fix(state: DecodingState, capacity: int, nodes: int, depth: int, padding: int, apart: bool) -> None:
    """Give all tensors of a call fixed shapes, for so many past positions; apart: as a compiler wants them.

    Raises:
        MemoryError: there is no memory for them.
    """
    for cache in state.caches:
        if apart:
            cache.split()
        try:
            cache.resize(capacity, nodes)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            size = cache.bytes_of(capacity + nodes) / 2**30
            raise MemoryError(
                f"there is no memory for a cache of {size:.1f} GiB: {capacity} positions, {len(state.lengths)} row(s)."
            ) from error
        cache.fixed = True
    # the compiler takes equal sizes for one size: what need not be equal must differ
    state.rows = with_shapes(state, max(capacity - state.past_shift, 0) + depth + nodes + 1, padding)


def with_shapes(state: DecodingState, width: int, padding: int) -> Rows:
    """The rows of a call with sequences (B, width), and `visible` over all past slots."""
    rows, shown = state.rows, state.rows.sequences[:, :width]
    sequences = nn.functional.pad(shown, (0, width - shown.shape[1]), value=padding)
    # as long as the keys: the compiler cannot write code for a size that differs from theirs by a constant
    visible = None if rows.visible is None else padded(rows.visible, state.cache.slots)
    return rows._replace(sequences=sequences, visible=visible)


def sizes_may_change(state: DecodingState) -> None:
    """Tell a compiler which sizes of a call's tensors differ from step to step."""
    parts = [(layer.keys, layer.values) for cache in state.caches for layer in cache.layers if layer.is_initialized]
    for tensor in (part for pair in parts for part in pair):
        torch._dynamo.mark_dynamic(tensor, tensor.ndim - 2)
    torch._dynamo.mark_dynamic(state.rows.sequences, 1)
    if state.rows.visible is not None:
        torch._dynamo.mark_dynamic(state.rows.visible, 1)
