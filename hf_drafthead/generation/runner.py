"""How the steps of a call run: eagerly, compiled, recorded as a CUDA graph, or compiled and then recorded.

The step is written once, in `step`. What runs its stages is all that differs: eager steps call them; compiled ones call
a `Program`, recorded ones a `Recorded`, which are kept for later calls (`programs`). The walk stands between them.

Only the capacity of the caches may differ between two runs of a compiled program, so that a text can grow, and prompts
of any length share it. A recorded one works on the same memory at every replay (`Arena`): a call moves into it, and
into a larger one as its text grows.
"""

from __future__ import annotations

import functools
import re
import threading
import time
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map
from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.generators import not_put_back
from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import BUCKET, SLOTS, rounded_up
from hf_drafthead.generation.grammar import certain_paths, tree_with
from hf_drafthead.generation.programs import (
    PROGRAMS,
    Arena,
    NotCaptured,
    Programs,
    Stage,
    addresses,
    fix,
    form_of,
    out_of_arena,
    sizes_may_change,
    tensors_of,
    written,
)
from hf_drafthead.generation.state import DecodingState, Limits, Outcome, Rows
from hf_drafthead.generation.step import MOST_PENDING, Stages, Step, shortage_undone
from hf_drafthead.generation.tree import ROOT_ALONE, Tree, smaller

logger = logging.get_logger(__name__)

CAPACITY_BUCKET = 16  # capacities are multiples of this, at all of which attention looks; on a GPU of `slots.BUCKET`
RECORDS = ("reduce-overhead", "max-autotune")  # modes of a compile config that ask for CUDA graphs
AHEAD = 256  # positions for which a capacity is taken at first; it grows as the text does
COMPILES = (
    "A step is compiled for each tree and number of rows, half a minute to some minutes each; a call without "
    "cache_implementation='static' and compile_config=, or with disable_compile=True, compiles nothing."
)


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
        return cls.with_compiler(graphs, asked)

    @classmethod
    def with_compiler(cls, graphs: bool, asked: CompileConfig | None) -> Execution:
        """Of a call that asks for compiled steps, where there are graphs or none."""
        records = graphs and (asked is None or asked.mode in RECORDS)
        return cls("compiled", asked or CompileConfig(mode="default"), records)


def compiled(function: Stage, config: CompileConfig) -> Stage:
    """`torch.compile` of a function whose guards are kept.

    Each gets a code object of its own: dynamo keeps a program with the code, bounds how many there may be of one, and
    frees one only with its code.
    """
    alone = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    plain = config.mode in ("default", *RECORDS[:1])
    options = {} if plain else torch._inductor.list_mode_options(config.mode)
    if config.backend == "inductor":
        from hf_drafthead.bases.compiling import TransposedProducts  # takes a second to import

        options = {**options, "post_grad_custom_pre_pass": TransposedProducts()}
    # the forward that a layer has while it is traced is gone when guards are asked
    options = {**options, **(config.options or {}), "guard_filter_fn": lambda guards: [*map(_lasts, guards)]}
    options.pop("triton.cudagraphs", None)  # `Recorded` makes the graphs
    result = torch.compile(alone, fullgraph=True, dynamic=False, backend=config.backend, options=options)
    result.alone = alone  # type: ignore[attr-defined]
    return result


def _lasts(guard: Any) -> bool:
    return re.search(r"_modules\['\d+'\]\.forward(\.|$)", guard.name) is None


class Program:
    """A stage compiled for what its arguments are like when it is first called."""

    def __init__(self, made_for: Hashable, stage: Stage, config: CompileConfig):
        self.made_for, self.stage, self.config, self.made = made_for, stage, config, False
        self.step: Stage = stage  # what runs it
        self.entry: Any = None  # of dynamo's
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
        for self.entry in entries_of(alone.__code__):
            self.kept = alone  # whose code holds the entry
            self.step = types.FunctionType(self.entry.code, alone.__globals__, alone.__name__)

    def fits(self, arguments: tuple) -> bool:
        """Whether the guards hold for these arguments."""
        if self.entry is None:
            return True
        names = self.kept.__code__.co_varnames
        return bool(self.entry.guard_manager.check(dict(zip(names, arguments))))


class Recorded:
    """A CUDA graph of a stage, recorded when it is called for the second time.

    The first time takes what it needs besides, such as workspaces and the tensors of a tree. On some GPUs attention
    makes a plan for each new length, which it cannot do while it is recorded. Rows and limits are the same memory in
    every call (`Arena`); other tensors are copied to where they were at first.
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
        """At the beginning of a call: drop the graph if it does something else than the stage does now.

        A program's guards were asked already. What the stage gives is put back.
        """
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
        """Record it, and compare a replay with a run: a base that decides something on the host is refused.

        Raises:
            NotCaptured: it cannot be recorded, or a replay gives something else.
        """

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

    Other threads may go on meanwhile, but for those that draw from the device's generator.
    """
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


_RECORDING = threading.Lock()  # of all models: a second recording at the same time fails


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, but for rounding where they are no whole numbers."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    close = torch.finfo(one.dtype).eps ** 0.5
    largest = float(one.nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=close, atol=close * largest, equal_nan=True)


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for this device."""
    return device.type == "cuda"


class Runner:
    """Takes the steps of one call.

    Args:
        model: with `base` and `drafter`; its programs are kept as long as it lives.
        reader: of the base.
        execution, state: of the call.
        make: a step with a tree.
        tree: the largest of the call.
        members: of the batch, by row.
        choose: which tree the next step takes, where that is not always the same.
        shared: whether others may join.
    """

    def __init__(
        self,
        model: Any,
        reader: BaseReader,
        execution: Execution,
        make: Callable[..., Step],
        tree: Tree,
        state: DecodingState,
        members: list[Any],
        choose: Callable[[DecodingState], Tree] | None = None,
        shared: bool = False,
    ):
        self.model, self.reader, self.execution, self.tree, self.choose = model, reader, execution, tree, choose
        self.members, self.shared = members, shared
        # the same for most trees, which then share programs; attention does not look at more than there are nodes
        self.slots = rounded_up(tree.slots, SLOTS)
        self.device, self.base_device = state.rows.lengths.device, reader.base.device
        graphs = has_graphs(self.device)
        self.steps_of_room = 2 if graphs else 1  # of a step that was launched ahead the host does not know
        self.make = functools.partial(make, members=members, ahead=graphs and execution.name != "eager")
        self.steps: dict[int, Step] = {}  # trees of a call stay the same objects
        self.with_certain: dict[tuple[int, int], Tree] = {}  # trees with room for so many tokens that are certain
        self.stages: dict[Step, Any] = {}  # programs in the place of a step's stages
        self.recorded: dict[Hashable, Recorded] = {}  # what runs stages, in the memory of the call as it is now
        self.arena: Arena | None = None
        self.held: list[Arena] = []  # until the call ends, which may go on in their memory without programs
        self.ahead = 0  # steps that are launched before the result of the first of them is read
        self.compiled_in = 0.0  # seconds of this step in which programs were made
        self.layers: tuple[int, ...] | None = None  # ids of those that programs trace once; None: not asked yet
        if execution.name != "eager":
            self.programs = PROGRAMS.setdefault(model, Programs())
            if is_hooked(reader.base):  # which may do something else within a call; one that counts compiles for ever
                self._stop("the base has hooks or forwards of the user's own, which a program would pass by")

    def step(self, state: DecodingState) -> Outcome:
        """Take one step; RuntimeError or MemoryError where not even the root alone fits into memory."""
        tree = self._alone(state) if state.stuck else self.tree if self.choose is None else self.choose(state)
        if not state.stuck and any(member is not None and member.rules.grammar for member in self.members):
            tree = self._with_certain(tree, state)
        while True:
            step = self.steps.get(id(tree)) or self.steps.setdefault(id(tree), self.make(tree))
            try:
                if self.execution.name != "eager":
                    return self._captured(step, state)
                self._make_room(step, state)
                return step(state)
            except DoesNotFit as short:
                tree = self._smaller(tree, short)

    def _alone(self, state: DecodingState) -> Tree:
        """The root alone, of a step that nothing of the nodes before it is left for."""
        for cache in state.caches:
            cache.clear()
        return ROOT_ALONE

    def _with_certain(self, tree: Tree, state: DecodingState) -> Tree:
        """The tree with room for what comes for certain, where a constraint says that something does."""
        state.certain, paths = None, certain_paths(self.members, state)
        if paths is None or self.execution.config is not None:  # which would be compiled for each of them
            return tree
        slots = None if self.execution.name == "eager" else self.slots
        found = tree_with(tree, paths, self.reader.vocabulary, slots)
        if found is None:
            return tree
        kept: Tree = self.with_certain.setdefault((id(tree), found.certain), found)
        padded = [[*path[: found.certain], *[-1] * (found.certain - len(path))] for path in paths]
        state.certain = torch.tensor(padded, device=self.device)
        return kept

    def _captured(self, step: Step, state: DecodingState) -> Outcome:
        """Take a step by programs."""
        if self.reader.base.device != self.base_device:  # a program would read the memory of where it was
            raise RuntimeError(f"the base was moved from {self.base_device} while it generated: move it between calls.")
        past, cache = max(state.lengths) + state.past_shift, state.rows.cache
        fits = cache.fixed and cache.nodes == self.slots and past + self.steps_of_room * step.depth <= cache.capacity
        if step not in self.stages or not fits:
            self._prepare(step, state, fits)
        if state.pending:
            self._observe(step, state)
        outcome = step(state, self.stages.get(step))
        if self.compiled_in:
            made = f"a step of {step.num_nodes} nodes for {len(state.lengths)} row(s)"
            logger.warning(f"{made} was compiled in {self.compiled_in:.1f} s; it is kept for later calls.")
            self.compiled_in = 0.0
        return outcome

    def _prepare(self, step: Step, state: DecodingState, fits: bool) -> None:
        """What runs the stages of a step: programs, once each has run in the memory of the call as it is now.

        Where there is no memory for the next stretch of text there are none, and the call goes on without.
        """
        if not fits:
            self.stages.clear()
            try:
                self._fit(step, state)
            except MemoryError as reason:  # of this call alone; for the next one there may be enough
                self._stop(str(reason))
                self._make_room(step, state)
                return
        self.layers = None  # which may have changed since another step was prepared
        run = functools.partial(self._run, step, len(state.lengths))
        self.stages[step] = types.SimpleNamespace(
            **{name: functools.partial(run, name, step.stages) for name in ("draft", "verify", "walk", "commit")}
        )
        self.ahead = int(step.ahead)

    def close(self) -> None:
        """Let other calls have the memory of this one, which has ended: a traceback may hold its state for long."""
        for arena in self.held:
            arena.free = True

    def _smaller(self, tree: Tree, short: DoesNotFit) -> Tree:
        """The tree of this step and of all that follow, after one for which memory is short.

        Raises:
            DoesNotFit: a batch of several calls gets smaller before the tree does.
        """
        if sum(member is not None for member in self.members) > 1 and self.shared:
            raise short
        if tree.num_nodes == 1:
            raise short.__cause__ or short from None
        logger.warning_once("Memory does not hold the nodes of a step: this call goes on with smaller trees.")
        self.choose, self.tree = None, smaller(tree)
        return self.tree

    def _make_room(self, step: Step, state: DecodingState) -> None:
        """Room for the next steps, of which the host may not know the last one yet."""
        if state.rows.cache.fixed:
            self._leave_fixed(state)
        cache, past = state.rows.cache, max(state.lengths) - 1 + state.past_shift
        for other in state.caches:  # attention sees no further than rows reach; a draft model has read the newest token
            other.extent = min(other.extent, past + (other is not cache))
        longest = max(state.lengths) + 2 * (step.depth + 1)
        cache.reserve(longest + state.past_shift, max(cache.nodes, step.tree.slots))
        if longest > state.rows.sequences.shape[1]:
            state.keep(state.rows.with_room(longest, step.padding), state.pending)
        if len(state.pending) >= (MOST_PENDING if step.defers else 1):
            self._observe(step, state)

    def _observe(self, step: Step, state: DecodingState) -> None:
        """Let the drafter observe what steps of the root alone have verified.

        Such a step drafts nothing. A drafter that keeps a history would run a layer, or a model, in each of them all
        the same, to remember one position. A row that has ended has counts of 0 from there on, so its valid positions
        come first, as `observe` wants them.
        """
        features, tokens, counts = zip(*state.pending)
        with shortage_undone(state.caches):
            seen = torch.cat(features, 1), torch.cat(tokens, 1), torch.stack(counts).sum(0)
            draft_state = step.stages.drafter.observe(state.rows.draft_state, *seen)
        state.keep(state.rows._replace(draft_state=draft_state), [])

    def _run(self, step: Step, rows: int, name: str, *arguments: Any) -> Any:
        """Run a stage by a program. Where none can be had it runs as it stands, and so do all that follow."""
        stage = getattr(Stages, name)
        if self.execution.name == "eager":
            return stage(*arguments)
        key = (name, self.reader, repr(self.execution), step.tree, rows)
        try:
            if (step, name) in self.recorded:
                return self.recorded[step, name](*arguments)
            if key in self.programs.refused:
                raise NotCaptured("")
            return self._first_run(step, name, stage, arguments)
        except NotCaptured as reason:
            if reason.lasting:
                self.programs.refused.add(key)
            self._stop(str(reason))
        return stage(*arguments)

    def _first_run(self, step: Step, name: str, stage: Stage, arguments: tuple) -> Any:
        """Run a stage by a program that is new to the call, or to the memory of the call.

        Raises:
            NotCaptured: without a reason if that was told, or if another call compiles, for which nobody waits.
        """
        program: Any = stage if self.execution.config is None else self._program(stage, arguments)
        runs: Any = program
        if self.arena is not None:
            key = (program, step.tree, step.rejects, form_of(arguments[1:]))
            runs = self.arena.programs.setdefault(key, Recorded(program))
            runs.try_again(*arguments)
        if isinstance(program, Program) and not program.made:
            result = self._compiled(program, runs, arguments)
        else:
            result = runs(*arguments)
        if self.arena is not None:
            self.recorded[step, name] = runs
        else:
            setattr(self.stages[step], name, functools.partial(program.step, step.stages))
        return result

    def _program(self, stage: Stage, arguments: tuple) -> Program:
        """A program for such arguments, of an earlier call or new."""
        from hf_drafthead.bases.compiling import repeated  # takes a second to import

        config: Any = self.execution.config
        if self.layers is None:
            self.layers = tuple(map(id, repeated(self.model.base)))
        made_for = (stage, repr(config), self.reader, *self.layers)
        return self.programs.fitting(made_for, arguments) or Program(made_for, stage, config)

    def _compiled(self, program: Program, runs: Stage, arguments: tuple) -> Any:
        """Run what compiles a program, which is then kept."""
        from hf_drafthead.bases.compiling import in_this_thread_alone  # takes a second to import

        start = time.perf_counter()
        with self.programs.compiling(), in_this_thread_alone(self.model.base), not_put_back(self.device):
            logger.warning_once(COMPILES)
            try:
                result = runs(*arguments)
            except Exception as error:  # whatever a compiler says of a base: eager steps work all the same
                if program.made:
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
                raise NotCaptured(reason, lasting=not out_of_memory(error)) from error
        self.programs.keep_compiled(program)
        self.compiled_in += time.perf_counter() - start
        return result

    def _fit(self, step: Step, state: DecodingState) -> None:
        """Give all tensors of the call the shapes for the next stretch of text, and room for the next steps.

        Raises:
            MemoryError: there is no memory for a capacity of so many positions.
        """
        past, room = max(state.lengths) + state.past_shift, self.steps_of_room * step.depth
        self.recorded.clear()
        padding, compiles = step.padding, self.execution.config is not None
        bound = None if self.shared else self.members[0].rules.max_length
        longest = bound or max(state.lengths) + AHEAD
        left = min(longest - max(state.lengths), AHEAD) + room
        if not self.execution.records:
            bucket = BUCKET if self.device.type == "cuda" else CAPACITY_BUCKET
            fix(state, rounded_up(past + left, bucket), self.slots, step.depth, padding, compiles)
            return
        capacity, rows = rounded_up(past + left, AHEAD), state.rows
        ends = state.limits.eos.shape[-1]
        sizes = (capacity, self.slots, compiles, len(state.lengths), rows.visible is None, ends)
        key = (*sizes, form_of(rows.draft_state), self.reader, *addresses(self.model))
        arena = self.programs.take_arena(key)
        if arena is not None:
            arena.take(state, padding)
        else:
            if self.arena is not None:
                state.keep(out_of_arena(rows), state.pending)
            fix(state, capacity, self.slots, step.depth, padding, compiles)
            arena = Arena(state)
        self.arena = arena
        self.held.append(arena)
        self.programs.keep_arena(key, arena)

    def _stop(self, reason: str) -> None:
        """Go on without programs."""
        if reason:
            logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
        self.execution, self.ahead, self.compiled_in = Execution("eager"), 0, 0.0

    def _leave_fixed(self, state: DecodingState) -> None:
        """Let the memory of the call grow by itself again."""
        rows = state.rows if self.arena is None else out_of_arena(state.rows)
        for cache in rows.caches:
            cache.fixed, cache.extent = False, int(cache.lengths.max())
        self.arena = None
        state.keep(rows, state.pending)
