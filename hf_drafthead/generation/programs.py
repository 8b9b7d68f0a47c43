"""Programs of a step, compiled or recorded, which are kept for later calls, and the memory that recorded ones work on.

A program is trusted because it is tried. A compiled one has dynamo's guards: the first step of every call asks them
whether the program holds for what the call has, the base's attributes, hooks and numbers in closures included, and
another is compiled where it does not; later steps of the call run its code and ask nothing. A recorded one sees no
Python, so that the first step of every call compares a replay with a run.

Some things dynamo has no guards for, such as hooks on layers that it traces once: a program also holds for one
`BaseReader` alone, which is made anew where the base's modules, hooks or forwards are other ones.
"""

from __future__ import annotations

import re
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import CompileConfig

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.generators import new_lock
from hf_drafthead.bases.slots import SlotCache, padded
from hf_drafthead.generation.state import DecodingState, Limits, Rows

MOST_PROGRAMS = 64  # kept per model, of which a step takes three; the least recently used goes first
RECORDS = ("reduce-overhead", "max-autotune")  # modes of a compile config that ask for CUDA graphs
MOST_ARENAS, ARENA_BYTES = 4, 2 << 30  # memory of recorded programs that is kept after a call, per model
OF_A_LAYER = re.compile(r"_modules\['\d+'\]\.forward(\.|$)")  # in the name of a guard
Stage = Callable[..., Any]


class NotCaptured(Exception):
    """A stage cannot be compiled or recorded, `lasting` for later calls too; without a reason where that was told, or
    another call compiles. The call's tensors are as they were before it.
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


def compiled(function: Stage, config: CompileConfig) -> Stage:
    """`torch.compile` of a function, whose guards are kept, with a code object of its own: dynamo keeps programs with
    the code, bounds how many there may be of one, and frees one only with its code."""
    alone = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    plain = config.mode in ("default", *RECORDS[:1])
    options = {} if plain else torch._inductor.list_mode_options(config.mode)
    if config.backend == "inductor":
        from hf_drafthead.bases.compiling import TransposedProducts  # takes a second to import

        options = {**options, "post_grad_custom_pre_pass": TransposedProducts()}
    # the forward that a layer has while it is traced is gone when guards are asked
    lasting: Stage = lambda guards: [OF_A_LAYER.search(guard.name) is None for guard in guards]  # noqa: E731
    options = {**options, **(config.options or {}), "guard_filter_fn": lasting}
    options.pop("triton.cudagraphs", None)  # `Recorded` makes the graphs
    result = torch.compile(alone, fullgraph=True, dynamic=False, backend=config.backend, options=options)
    result.alone = alone  # type: ignore[attr-defined]
    return result


class Program:
    """A stage compiled for what its arguments are like when it is first called."""

    def __init__(self, made_for: Hashable, stage: Stage, config: CompileConfig):
        self.made_for, self.stage, self.config, self.made = made_for, stage, config, False
        self.step: Stage = stage  # what runs it
        self.guards: Any = None  # of dynamo's entry, which may be freed at any time (`torch._dynamo.reset`)
        self.kept: Any = None

    def __call__(self, *arguments: Any) -> Any:
        if self.made:
            return self.step(*arguments)
        sizes_may_change(arguments)
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            self.step = compiled(self.stage, self.config)
            result = self.step(*arguments)
        self._take_code()
        return result

    def _take_code(self) -> None:
        """Go on with the code that dynamo has made, which asks no guards; without a way to it they are always asked."""
        self.made, alone = True, getattr(self.step, "alone", None)
        entries_of = getattr(torch._C._dynamo.eval_frame, "_debug_get_cache_entry_list", None)
        if alone is None or entries_of is None:
            return
        for entry in entries_of(alone.__code__):
            self.guards, self.kept = entry.guard_manager, alone  # whose code holds the entry
            self.step = types.FunctionType(entry.code, alone.__globals__, alone.__name__)

    def fits(self, arguments: tuple) -> bool:
        """Whether the guards hold for these arguments."""
        if self.guards is None:
            return True
        names = self.kept.__code__.co_varnames
        return self.guards.cache_entry is not None and bool(self.guards.check(dict(zip(names, arguments))))


class Recorded:
    """A CUDA graph of a stage, recorded when it is called for the second time.

    The first time takes what it needs besides, such as workspaces; on some GPUs attention makes a plan for each new
    length, which it cannot do while it is recorded. Rows and limits are the same memory in every call (`Arena`); other
    tensors are copied to where they were at first.
    """

    def __init__(self, stage: Stage):
        self.stage, self.warm = stage, False
        self.replay: Callable[[], Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if not self.warm:
            self.warm = True
            return self._run(arguments)
        if self.replay is None:
            self._record(arguments)
        self._place(arguments)
        self.replay()  # type: ignore[misc]
        return self.result

    def try_again(self, *arguments: Any) -> None:
        """At the beginning of a call: drop the graph if it does something else than the stage does now."""
        if self.replay is not None and not isinstance(self.stage, Program) and not self._agrees(arguments):
            self.replay, self.warm = None, False

    def _run(self, arguments: tuple) -> Any:
        """Run the stage; rows that it returns are written to where they come from."""
        result = self.stage(*arguments)
        if isinstance(result, Rows):
            return written(next(value for value in arguments if isinstance(value, Rows)), result)
        return result

    def _place(self, arguments: tuple) -> None:
        for place, value in zip(self.places, tensors_of(arguments)):
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)

    def _record(self, arguments: tuple) -> None:
        """Record it, and compare a replay with a run: NotCaptured where the base decides something on the host."""

        def fixed(value: Any) -> Any:
            if isinstance(value, (Rows, Limits)):
                return value
            return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, value)

        fixed_arguments = tuple(map(fixed, arguments))
        self.places = tensors_of(fixed_arguments)
        _, put_back = _restorable(arguments)
        try:
            self.replay, self.result = record_kernels(lambda: self._run(fixed_arguments), self.places[0].device)
        except Exception as error:  # whatever cannot be recorded: steps without a graph work all the same
            cause = error.__context__ or error  # how a recording ends says less
            raise NotCaptured(f"{type(cause).__name__}: {cause}".partition("\n")[0]) from error
        put_back()
        if not self._agrees(arguments):
            raise NotCaptured("a replay of the recorded step gives something else than the step.")

    def _agrees(self, arguments: tuple) -> bool:
        """Whether a replay gives what a run gives. Tensors are put back, but what lies behind the rows' past."""
        self._place(arguments)
        writable, put_back = _restorable(arguments)

        def outcome(run: Callable[[], Any]) -> list[torch.Tensor]:
            tensors = [tensor.clone() for tensor in (*tensors_of(run()), *writable)]
            put_back()
            return tensors

        expected = outcome(lambda: self._run(arguments))
        replayed = outcome(lambda: self.replay() or self.result)  # type: ignore[misc]
        return len(expected) == len(replayed) and all(map(alike, expected, replayed))


def _restorable(arguments: tuple) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """The tensors that a stage may write to, but keys and values, and what puts their values back."""
    rows = next(value for value in arguments if isinstance(value, Rows))
    tensors = [*tensors_of(rows), *(tensor for cache in rows.caches for tensor in cache.advancing)]
    before = [tensor.clone() for tensor in tensors]

    def put_back() -> None:
        for place, value in zip(tensors, before):
            place.copy_(value)

    return tensors, put_back


def record_kernels(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Record the kernels of a function on a device: what replays them, and its outcome, in the same memory each time.
    Other threads may go on meanwhile, but for those that draw from the device's generator."""
    with _RECORDING, torch.cuda.device(device):
        before, caches_casts = torch.cuda.current_stream(), torch.is_autocast_cache_enabled()
        graph = torch.cuda.CUDAGraph()
        try:
            torch.set_autocast_cache_enabled(False)  # weights that autocast has converted do not outlive it
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                result = function()
        except BaseException:
            torch.cuda.set_stream(before)  # a recording that failed leaves the thread on its stream
            raise
        finally:
            torch.set_autocast_cache_enabled(caches_casts)
    return graph.replay, result


_RECORDING = new_lock()  # of all models: a second recording at the same time fails


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, but for rounding where they are no whole numbers."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = torch.finfo(one.dtype).eps ** 0.5
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=close, atol=close * largest, equal_nan=True)


class Arena:
    """Memory that recorded programs work on, of the call that takes it first; it belongs to one at a time, which says
    when it is `free` again.
    """

    def __init__(self, state: DecodingState):
        self.rows = state.rows
        self.limits = state.limits = Limits(*(limit.clone() for limit in state.limits))
        self.programs: dict[Hashable, Any] = {}  # of `Recorded`
        self.bytes = sum(block.nbytes for cache in self.rows.caches for block in cache.blocks)
        self.free = False

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
    twins = {id(cache): cache.twin() for cache in rows.caches}
    moved: Rows = tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else twins.get(id(leaf), leaf), rows
    )
    return moved


class Programs:
    """What is kept for one model; a call that uses something of it holds it until it ends."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.compiled: list[Any] = []  # of `Program`, the most recently used one last
        self.arenas: OrderedDict[Hashable, Arena] = OrderedDict()
        self.refused: set[Hashable] = set()
        self.compiles = new_lock()  # held by the call that compiles; others, which would wait, run steps eagerly

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


def fix(
    state: DecodingState, capacity: int, nodes: int, depth: int, padding: int, programs: bool, compiles: bool
) -> None:
    """Give all tensors of a call shapes for so many past positions, as `programs`, or a compiler, want them."""
    for cache in state.caches:
        if compiles:
            cache.split()
        try:
            cache.resize(capacity, nodes)
            for layer in cache.recurrent if programs else ():
                layer.resize_record(nodes)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            size = cache.bytes_of(capacity + nodes) / 2**30
            raise MemoryError(
                f"there is no memory for a cache of {size:.1f} GiB: {capacity} positions, {len(state.lengths)} row(s)."
            ) from error
        cache.fixed = programs
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
