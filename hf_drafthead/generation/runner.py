"""How the steps of a call run: eagerly, compiled, recorded as a CUDA graph, or compiled and then recorded.

A step is written once, in `step`, as functions of one signature. An eager step calls them as they are; `compiled` and
`Recorded` take one and return another of the same signature, and what they make is kept for later calls under a
`ProgramKey`, which names everything that it depends on.

    greedy               draft, verify, walk, commit               one program
    anything else        draft, verify | walk of the call | commit  two programs around it

Only the capacity of the caches may differ between two runs of a compiled program, so that a text can grow, and prompts
of any length share it. A recorded one works on the same memory at every replay (`Arena`): a call moves into it, and
into a larger one as its text grows.

Compiled programs are kept without guards: dynamo would compare every weight and attribute of the base before each
step. What can change between two calls is compared once per call instead.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from hf_drafthead.generation.programs import (
    PROGRAMS,
    Arena,
    ProgramKey,
    Programs,
    addresses,
    caches_of,
    fix,
    form_of,
    leave,
    sizes_may_change,
    tensors_of,
)
from hf_drafthead.generation.slots import BUCKET, SLOTS, DoesNotFit, SlotCache, out_of_memory, rounded_up
from hf_drafthead.generation.state import DecodingState, Limits, Outcome, Rows, unpacked
from hf_drafthead.generation.step import Function, Program, Step, observe_pending
from hf_drafthead.generation.tree import Tree, smaller

logger = logging.get_logger(__name__)

CAPACITY_BUCKET = 16  # capacities are multiples of this, at all of which attention looks; on a GPU of `slots.BUCKET`
AHEAD = 256  # positions for which a capacity is taken at first; it grows as the text does
RECORDS = ("reduce-overhead", "max-autotune")  # modes of a compile config that ask for CUDA graphs


class Execution(NamedTuple):
    """How a call runs its steps.

    name: eager, compiled or recorded; config: what `torch.compile` is told; records: whether programs become graphs,
    also those that were compiled.
    """

    name: str
    config: CompileConfig | None = None
    records: bool = False

    @classmethod
    def wanted(cls, model: Any, config: GenerationConfig) -> Execution:
        """What a call asks for, by a static cache or a `compile_config`; else recorded where there are graphs.

        On a GPU a static cache by name, and the modes `reduce-overhead` and `max-autotune`, which in transformers mean
        CUDA graphs, compile and record; other modes only compile.
        """
        graphs, asked = has_graphs(model.base.device), config.compile_config
        if config.disable_compile:
            return cls("eager")
        if asked is None and config.cache_implementation != "static":
            return cls("recorded", records=True) if graphs else cls("eager")
        records = graphs and (asked is None or asked.mode in RECORDS)
        return cls("compiled", asked or CompileConfig(mode="default"), records)


def compiled(function: Function, config: CompileConfig) -> Function:
    """`torch.compile` without guards, for a function of which the caller knows that nothing but tensors changes."""

    def run(*arguments: Any) -> Any:
        return function(*arguments)

    # dynamo keeps its programs by code object, and without guards it takes the first: each gets one of its own
    alone = types.FunctionType(run.__code__.replace(), run.__globals__, "step", None, run.__closure__)
    plain = config.mode in ("default", *RECORDS[:1])
    options = {} if plain else torch._inductor.list_mode_options(config.mode)
    if config.backend == "inductor":
        from hf_drafthead.generation.compiling import TransposedProducts  # takes a second to import

        options = {**options, "post_grad_custom_pre_pass": TransposedProducts()}
    options = {**options, **(config.options or {}), "guard_filter_fn": lambda guards: [False] * len(guards)}
    options.pop("triton.cudagraphs", None)  # `Recorded` makes the graphs
    result: Function = torch.compile(alone, fullgraph=True, dynamic=False, backend=config.backend, options=options)
    return result


class NotCaptured(Exception):
    """A step cannot be compiled or recorded; the text says why. The call's tensors are as they were before the step.

    lasting: whether that holds for later calls too.
    """

    def __init__(self, reason: str, lasting: bool = True):
        super().__init__(reason)
        self.lasting = lasting


class Recorded:
    """A CUDA graph of a function, recorded when it is called for the second time.

    The first time takes what it needs besides, such as workspaces and the tensors of a tree. On some GPUs attention
    makes a plan for each new length, which it cannot do while it is recorded. Rows, cache and limits are the same
    memory in every call; what else is given is copied to where it was at first.
    """

    def __init__(self, function: Function):
        self.function, self.calls = function, 0

    def __call__(self, rows: Rows, cache: SlotCache, limits: Limits, more: Any) -> tuple[Any, Rows]:
        self.calls += 1
        if self.calls == 1:
            result, after = self.function(rows, cache, limits, more)
            return result, written(rows, after)
        if self.calls == 2:
            self._record(rows, cache, limits, more)
        for place, value in zip(self.places, tensors_of(more)):
            if place.data_ptr() != value.data_ptr():
                place.copy_(value)
        self.replay()
        return self.result, rows

    def _record(self, rows: Rows, cache: SlotCache, limits: Limits, more: Any) -> None:
        """Record it, and compare a replay with a run: a base that decides something on the host is refused.

        Raises:
            NotCaptured: it cannot be recorded, or a replay gives something else.
        """
        more = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, more)
        self.places = tensors_of(more)
        held = [*tensors_of(rows), *(each.lengths for each in (cache, *caches_of(rows)))]
        before = [tensor.clone() for tensor in held]

        def once() -> Any:
            result, after = self.function(rows, cache, limits, more)
            written(rows, after)
            return result

        def put_back() -> None:
            for place, value in zip(held, before):
                place.copy_(value)

        def outcome(run: Callable[[], Any]) -> list[torch.Tensor]:
            put_back()
            return [tensor.clone() for tensor in (*tensors_of(run()), *held)]

        try:
            self.replay, self.result = record_kernels(once, rows.lengths.device)
        except Exception as error:  # whatever cannot be recorded: steps without a graph work all the same
            cause = error.__context__ or error  # how a recording ends says less
            raise NotCaptured(f"{type(cause).__name__}: {cause}".partition("\n")[0]) from error
        same = all(map(alike, outcome(once), outcome(lambda: self.replay() or self.result)))
        put_back()
        if not same:
            raise NotCaptured("a replay of the recorded step gives something else than the step.")


def record_kernels(function: Callable[[], Any], device: torch.device) -> tuple[Callable[[], None], Any]:
    """Record the kernels of a function on a device: what replays them, and its outcome, in the same memory each time.

    Other threads may go on meanwhile, but for those that draw from the device's generator.
    """
    with _RECORDING, torch.cuda.device(device):
        before, caches_casts = torch.cuda.current_stream(), torch.is_autocast_cache_enabled()
        graph = torch.cuda.CUDAGraph()
        try:
            torch.set_autocast_cache_enabled(False)  # weights that autocast has converted do not outlive it
            with torch.cuda.graph(graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                found = function()
        except BaseException:
            torch.cuda.set_stream(before)  # a recording that failed leaves the thread on its stream
            raise
        finally:
            torch.set_autocast_cache_enabled(caches_casts)
    return graph.replay, found


_RECORDING = threading.Lock()  # of all models: a second recording at the same time fails


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for this device."""
    return device.type == "cuda"


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, but for rounding where they are no whole numbers."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = torch.finfo(one.dtype).eps ** 0.5
    largest = float(one.abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=close, atol=close * largest, equal_nan=True)


def written(rows: Rows, after: Rows) -> Rows:
    """Write what a step leaves to where it started from."""
    places, values = tensors_of(rows), tensors_of(after)
    assert len(places) == len(values), "a step hands on other tensors than it was given"
    moved = [(place, value.clone()) for place, value in zip(places, values) if value is not place]  # one may be a view
    for place, value in moved:
        place.copy_(value)
    return rows


class Runner:
    """Takes the steps of one call.

    Args:
        model: with `base` and `drafter`; its programs are kept as long as it lives.
        execution, state: of the call.
        make: a step with a tree.
        tree: the largest of the call.
        choose: which tree the next step takes, where that is not always the same.
    """

    def __init__(
        self,
        model: Any,
        execution: Execution,
        make: Callable[[Tree], Step],
        tree: Tree,
        state: DecodingState,
        choose: Callable[[DecodingState], Tree] | None = None,
    ):
        self.model, self.execution, self.make, self.tree, self.choose = model, execution, make, tree, choose
        # the same for most trees, which then share programs; attention does not look at more than there are nodes
        self.slots = rounded_up(tree.slots, SLOTS)
        self.device = state.rows.lengths.device
        self.has_graphs = has_graphs(self.device)
        self.steps_of_room = 2 if self.has_graphs else 1  # of a step that was launched ahead the host does not know
        self.steps: dict[int, Step] = {}  # trees of a call stay the same objects
        self.ready: dict[Step, Program] = {}  # of the memory of the call as it is now
        self.arena: Arena | None = None
        self.held: list[Arena] = []  # until the call ends, which may go on in their memory without programs
        self.ahead = 0  # steps that are launched before the result of the first of them is read
        if execution.name != "eager":
            self.programs = PROGRAMS.setdefault(model, Programs())
            self.circumstances = self.programs.circumstances_of(model, self.device)

    def step(self, state: DecodingState) -> Outcome:
        """Take one step.

        Raises:
            RuntimeError, MemoryError: not even the root alone fits into memory.
        """
        tree = self.tree if self.choose is None else self.choose(state)
        while True:
            step = self.steps.get(id(tree)) or self.steps.setdefault(id(tree), self.make(tree))
            try:
                if self.execution.name == "eager":
                    return Outcome(*step(state), step.num_nodes)
                program, past = self.ready.get(step), max(state.lengths) + state.past_shift
                if program is None or past + self.steps_of_room * step.depth > state.cache.capacity:
                    return Outcome(self._first_run(step, state), {}, step.num_nodes)
                return Outcome(self._run(program, step, state), {}, step.num_nodes)
            except NotCaptured as reason:
                self._stop(step, state, reason)
            except DoesNotFit as short:
                tree = self._smaller(tree, short)

    def _smaller(self, tree: Tree, short: DoesNotFit) -> Tree:
        """The tree of this step and of all that follow, after one for which memory is short."""
        if tree.num_nodes == 1:
            raise short.__cause__ or short from None
        logger.warning_once("Memory does not hold the nodes of a step: this call goes on with smaller trees.")
        self.choose, self.tree = None, smaller(tree)
        return self.tree

    def _key(self, step: Step, state: DecodingState) -> ProgramKey:
        return ProgramKey(
            execution=repr(self.execution),
            tree=step.tree,
            slots=self.slots,
            greedy=step.greedy,
            samples=step.rules.tape is not None,
            rejects=step.rules.rejects,
            batch_size=len(state.lengths),
            padded=state.rows.visible is not None,
            eos_tokens=len(state.limits.eos),
            reads=step.stages.drafter.reads,
            draft_state=form_of(state.rows.draft_state),
            circumstances=self.circumstances,
        )

    def _first_run(self, step: Step, state: DecodingState) -> torch.Tensor:
        """Take a step with a program that is new to the call, or to the memory of the call; its walk, `packed`.

        Raises:
            NotCaptured: without a reason if that was told, or if another thread compiles, for which nobody waits.
        """
        key, programs, config = self._key(step, state), self.programs, self.execution.config
        fresh = config is not None and key not in programs.compiled
        if key in programs.refused or (fresh and not programs.lock.acquire(blocking=False)):
            raise NotCaptured("", lasting=False)
        try:
            self._fit(step, state)
            if state.pending:
                observe_pending(step.stages.drafter, state)
            functions = programs.compiled.get(key, step.functions)
            if fresh and config is not None:
                sizes_may_change(state)
                functions = Program(*(compiled(function, config) for function in functions))
            program = functions
            if self.arena is not None:
                program = self.arena.programs.setdefault(key, Program(*map(Recorded, functions)))
            pack = self._run_traced(program, step, state) if fresh else self._run(program, step, state)
        except (MemoryError, DoesNotFit) as error:  # of this call alone; for the next one there may be enough
            raise NotCaptured(str(error), lasting=False) from error
        except Exception as error:  # whatever a compiler says of a base: eager steps work all the same
            if not fresh:
                raise
            raise NotCaptured(" ".join(f"{type(error).__name__}: {error}".split("\n")[:2])) from error
        finally:
            if fresh:
                programs.lock.release()
        if fresh:
            programs.keep_compiled(key, functions)
        elif config is not None:
            programs.compiled.move_to_end(key)
        self.ready[step] = program
        return pack

    def _run_traced(self, program: Program, step: Step, state: DecodingState) -> torch.Tensor:
        """As `_run`, while the program is compiled."""
        from hf_drafthead.generation.compiling import layers_once  # takes a second to import

        start = time.perf_counter()
        with layers_once(self.model.base):
            pack = self._run(program, step, state)
        logger.warning(
            f"a step of {step.num_nodes} nodes for {len(state.lengths)} row(s) was compiled in "
            f"{time.perf_counter() - start:.1f} s; it is kept for later calls."
        )
        return pack

    def _run(self, program: Program, step: Step, state: DecodingState) -> torch.Tensor:
        """Take a step, whose stages have no seconds of their own; returns its walk, `packed`."""
        rows, cache, limits = state.rows, state.cache, state.limits
        self.ahead = int(step.greedy and self.has_graphs)  # such a step asks nothing of the host
        before = [(each, each.lengths, each.lengths.clone()) for each in state.caches]
        try:
            if step.greedy:
                pack, state.rows = program.whole(rows, cache, limits, None)
                # the next replay may be launched before this one's result is read
                return pack.clone() if self.execution.records else pack
            noise, tilt = step.noise_ahead(state)
            (draft_state, candidates, verified), rows = program.first(rows, cache, limits, tilt)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            for each, lengths, values in before:  # what lies behind them is not seen
                each.lengths = lengths.copy_(values)
            raise DoesNotFit(str(error).partition("\n")[0]) from error
        pack = step.walk(state, candidates, verified, noise)
        cache.placed = step.num_nodes
        _, state.rows = program.last(rows, cache, limits, (draft_state, verified.features, unpacked(pack)))
        return pack

    def _fit(self, step: Step, state: DecodingState) -> None:
        """Give all tensors of the call the shapes for the next stretch of text, and room for the next steps.

        Raises:
            MemoryError: there is no memory for a capacity of so many positions.
        """
        depth, past, cache = step.depth, max(state.lengths) + state.past_shift, state.cache
        room = self.steps_of_room * depth
        if cache.fixed and cache.nodes == self.slots and past + room <= cache.capacity:
            return
        self.ready.clear()
        padding, apart = step.rules.pad_token, self.execution.config is not None
        longest = step.rules.max_length or max(state.lengths) + AHEAD
        left = min(longest - max(state.lengths), AHEAD) + room
        if not self.execution.records:
            bucket = BUCKET if self.device.type == "cuda" else CAPACITY_BUCKET
            fix(state, rounded_up(past + left, bucket), self.slots, depth, padding, apart)
            return
        capacity = rounded_up(past + left, AHEAD)
        size = (capacity, self.slots, apart, len(state.lengths), state.rows.visible is None, len(state.limits.eos))
        key = (*size, form_of(state.rows.draft_state), self.circumstances, *addresses(self.model))
        arena = self.programs.arena(key)
        if arena is not None:
            arena.take(state, padding)
        else:
            if self.arena is not None:
                leave(state)
            fix(state, capacity, self.slots, depth, padding, apart)
            arena = Arena(state)
        self.arena = arena
        self.held.append(arena)
        self.programs.keep(key, arena)

    def close(self) -> None:
        """Let other calls have the memory of this one, which has ended: a traceback may hold its state for long."""
        for arena in self.held:
            arena.free = True

    def _stop(self, step: Step, state: DecodingState, reason: NotCaptured) -> None:
        """Go on without programs, and with memory that grows by itself."""
        if reason.lasting:
            self.programs.refused.add(self._key(step, state))
        if str(reason):
            logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
        if self.arena is not None:
            leave(state)
        self.execution, self.ahead, self.arena = Execution("eager"), 0, None
        for cache in state.caches:
            cache.fixed, cache.extent = False, int(cache.lengths.max())
