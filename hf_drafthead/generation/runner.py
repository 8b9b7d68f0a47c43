"""How the steps of a call run: eagerly, compiled, recorded as a CUDA graph, or compiled and then recorded.

The step is written once, in `step`. What runs its stages is all that differs: eager steps call them; compiled ones call
a `Program`, recorded ones a `Recorded`, which are kept for later calls (`programs`). The walk stands between them.

Only the capacity of the caches may differ between two runs of a compiled program, so that a text can grow, and prompts
of any length share it. A recorded one works on the same memory at every replay (`Arena`): a call moves into it, and
into a larger one as its text grows.
"""

from __future__ import annotations

import functools
import math
import time
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.generators import not_put_back
from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.slots import BUCKET, SLOTS, rounded_up
from hf_drafthead.generation.grammar import certain_paths, tree_with
from hf_drafthead.generation.programs import (
    PROGRAMS,
    RECORDS,
    Arena,
    NotCaptured,
    Program,
    Programs,
    Recorded,
    Stage,
    addresses,
    fix,
    form_of,
    out_of_arena,
)
from hf_drafthead.generation.state import DecodingState, Outcome
from hf_drafthead.generation.step import MOST_PENDING, Stages, Step, shortage_undone
from hf_drafthead.generation.tree import ROOT_ALONE, Tree, smaller

logger = logging.get_logger(__name__)

CAPACITY_BUCKET = 16  # capacities are multiples of this, at all of which attention looks; on a GPU of `slots.BUCKET`
AHEAD = 256  # positions for which programs take a capacity at first; it grows as the text does
STRETCH = 32  # and eager steps, or an eighth of a long text
COMPILES = (
    "A step is compiled for each tree and number of rows, half a minute to some minutes each; a call without "
    "cache_implementation='static' and compile_config=, or with disable_compile=True, compiles nothing."
)


class Execution(NamedTuple):
    """How a call runs its steps: eager, compiled or recorded; what `torch.compile` is told; whether programs become
    graphs, also those that were compiled.
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


def has_graphs(device: torch.device) -> bool:
    """Whether there are graphs for this device."""
    return device.type == "cuda"


class Runner:
    """Takes the steps of a batch; `choose` says which tree the next one takes, where that is not always the same."""

    def __init__(self, batch: Any, state: DecodingState, choose: Callable[[DecodingState], Tree] | None):
        self.model, self.drafter, self.reader = batch.model, batch.drafter, batch.reader
        self.execution, self.tree, self.choose = batch.execution, batch.largest.tree, choose
        self.members, self.shared = batch.members, batch.shared
        self.padding = 0 if batch.shared else self.members[0].rules.pad_token
        self.device, self.base_device = state.rows.lengths.device, self.reader.base.device
        graphs, eager = has_graphs(self.device), self.execution.name == "eager"
        self.steps_of_room = 2 if graphs else 1  # of a step that was launched ahead the host does not know
        self.make = functools.partial(
            Step, batch, device=self.device, timed=batch.timed and eager, ahead=graphs and not eager
        )
        self.steps: dict[int, Step] = {}  # trees of a call stay the same objects
        self.with_certain: dict[tuple[int, int], Tree] = {}  # trees with room for so many tokens that are certain
        self.stages: dict[Step, Any] = {}  # programs in the place of a step's stages
        self.recorded: dict[Hashable, Recorded] = {}  # what runs stages, in the memory of the call as it is now
        self.arena: Arena | None = None
        self.held: list[Arena] = []  # until the call ends, which may go on in their memory without programs
        self.ahead = 0  # steps that are launched before the result of the first of them is read
        self.compiled_in = 0.0  # seconds of this step in which programs were made
        self.layers: tuple[int, ...] | None = None  # ids of those that programs trace once; None: not asked yet
        if not eager:
            self.programs = PROGRAMS.setdefault(self.model, Programs())
            if is_hooked(self.reader.base):  # which may do something else within a call; one that counts, for ever
                self._stop("the base has hooks or forwards of the user's own, which a program would pass by")

    def step(self, state: DecodingState) -> Outcome:
        """Take one step; RuntimeError or MemoryError where not even the root alone fits into memory."""
        state.pays = None
        tree = self._alone(state) if state.stuck else self.tree if self.choose is None else self.choose(state)
        if not state.stuck and any(member is not None and member.rules.grammar for member in self.members):
            tree = self._with_certain(tree, state)
        while True:
            step = self.steps.get(id(tree)) or self.steps.setdefault(id(tree), self.make(tree))
            try:
                self.fit(state, step.depth)
                programs = None if self.execution.name == "eager" else self._programs_of(step, len(state.lengths))
                if len(state.pending) >= (MOST_PENDING if step.defers and programs is None else 1):
                    self.observe(state)
                outcome = step(state, programs)
                if self.compiled_in:
                    made = f"a step of {step.num_nodes} nodes for {len(state.lengths)} row(s)"
                    logger.warning(f"{made} was compiled in {self.compiled_in:.1f} s; it is kept for later calls.")
                    self.compiled_in = 0.0
                return outcome
            except DoesNotFit as short:
                tree, state.pays = self._smaller(tree, short), None

    def _alone(self, state: DecodingState) -> Tree:
        """The root alone, of a step that nothing of the nodes before it is left for."""
        for cache in state.caches:
            cache.clear()
        return ROOT_ALONE

    def _with_certain(self, tree: Tree, state: DecodingState) -> Tree:
        """The tree with room for what comes for certain, where a constraint says that something does."""
        state.certain, paths = None, certain_paths(self.members, state, self.reader.vocabulary)
        if paths is None or self.execution.config is not None:  # which would be compiled for each of them
            return tree
        slots = None if self.execution.name == "eager" else rounded_up(self.tree.slots, SLOTS)
        found = tree_with(tree, paths, self.reader.vocabulary, slots)
        if found is None:
            return tree
        kept: Tree = self.with_certain.setdefault((id(tree), found.certain), found)
        padded = [[*path[: found.certain], *[-1] * (found.certain - len(path))] for path in paths]
        state.certain = torch.tensor(padded, device=self.device)
        return kept

    def _programs_of(self, step: Step, rows: int) -> Any:
        """What runs the stages of a step: programs, once each has run in the memory of the call as it is now."""
        if self.reader.base.device != self.base_device:  # a program would read the memory of where it was
            raise RuntimeError(f"the base was moved from {self.base_device} while it generated: move it between calls.")
        if step not in self.stages:
            self.layers = None  # which may have changed since another step was prepared
            names = ("draft", "verify", "walk", "commit")
            runs = {name: functools.partial(self._run, step, rows, name, step.stages) for name in names}
            self.stages[step] = types.SimpleNamespace(**runs)
        self.ahead = int(step.ahead)
        return self.stages[step]

    def _smaller(self, tree: Tree, short: DoesNotFit) -> Tree:
        """The tree of this step and of all that follow, after one for which memory is short; DoesNotFit in a batch of
        several calls, which gets smaller before the tree does.
        """
        if sum(member is not None for member in self.members) > 1 and self.shared:
            raise short
        if tree.num_nodes == 1:
            raise short.__cause__ or short from None
        logger.warning_once("Memory does not hold the nodes of a step: this call goes on with smaller trees.")
        self.choose, self.tree = None, smaller(tree)
        return self.tree

    def observe(self, state: DecodingState) -> None:
        """Let the drafter observe what steps of the root alone have verified.

        One that keeps a history would run a layer, or a model, in each of them, to remember one position. A row that
        has ended has counts of 0 from there on, so its valid positions come first, as `observe` wants them.
        """
        features, tokens, counts = zip(*state.pending)
        with shortage_undone(state.caches):
            seen = torch.cat(features, 1), torch.cat(tokens, 1), torch.stack(counts).sum(0)
            draft_state = self.drafter.observe(state.rows.draft_state, *seen)
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
        """Run a stage by a program that is new to the call, or to the memory of the call, else NotCaptured."""
        program: Any = stage
        if (config := self.execution.config) is not None:
            from hf_drafthead.bases.compiling import repeated  # takes a second to import

            if self.layers is None:
                self.layers = tuple(map(id, repeated(self.model.base)))
            made_for = (stage, repr(config), self.reader, *self.layers)
            program = self.programs.fitting(made_for, arguments) or Program(made_for, stage, config)
        runs: Any = program
        if self.arena is not None:
            key = (program, step.tree, form_of(arguments[1:]))
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

    def fit(self, state: DecodingState, depth: int, longest: int = 0) -> None:
        """See that there is room for a step of `depth` nodes, and for a row of `longest` tokens that joins."""
        longest, more, cache = max(longest, *state.lengths), self.steps_of_room * depth, state.rows.cache
        past, programs = longest + state.past_shift, self.execution.name != "eager"
        need = past + max(more, len(state.pending))
        # eager steps attend to few positions in vain
        most = math.inf if programs else need + 2 * max(STRETCH, longest // 8) + BUCKET
        fits = cache.fixed == programs and cache.nodes >= self.tree.slots
        fits = fits and longest + more <= state.rows.sequences.shape[1]
        if not fits or any(not need <= other.capacity <= most for other in state.caches):
            self._reshape(state, depth, longest, need)
        for other in state.caches if not programs else ():  # a GPU does not say how far rows reach
            other.extent = min(other.extent, past - (other is state.rows.cache))

    def _reshape(self, state: DecodingState, depth: int, longest: int, need: int) -> None:
        """Give all tensors shapes for the next stretch of text, for which programs are made anew."""
        self.stages.clear()
        self.recorded.clear()
        programs = self.execution.name != "eager"
        if state.rows.cache.fixed and not programs:  # memory of the call's own again, which no program works on
            rows = state.rows if self.arena is None else out_of_arena(state.rows)
            for cache in rows.caches:
                cache.fixed, cache.extent = False, int(cache.lengths.max())
            self.arena = None
            state.keep(rows, state.pending)
        # the same number of nodes for most trees, which then share programs; attention looks at those that there are
        slots = rounded_up(self.tree.slots, SLOTS) if programs else self.tree.slots
        ahead = AHEAD if programs else max(STRETCH, longest // 8)
        bound = None if self.shared else self.members[0].rules.max_length
        capacity = need + min((bound or longest + ahead) - longest, ahead)
        bucket = BUCKET if self.device.type == "cuda" else CAPACITY_BUCKET
        try:
            if self.execution.records:
                self._enter_arena(state, rounded_up(capacity, AHEAD), slots, depth)
            else:
                fix(state, rounded_up(capacity, bucket), slots, depth, self.padding, programs, programs)
        except MemoryError as reason:  # of this call alone; for the next one there may be enough
            if not programs:
                raise
            self._stop(str(reason))
            self._reshape(state, depth, longest, need)

    def _enter_arena(self, state: DecodingState, capacity: int, slots: int, depth: int) -> None:
        """Go on in memory that recorded programs work on: of an earlier call, or new."""
        rows, compiles = state.rows, self.execution.config is not None
        sizes = (capacity, slots, compiles, len(state.lengths), rows.visible is None, state.limits.eos.shape[-1])
        key = (*sizes, state.past_shift, form_of(rows.draft_state), self.reader, *addresses(self.model))
        arena = self.programs.take_arena(key)
        if arena is not None:
            arena.take(state, self.padding)
        else:
            if self.arena is not None:
                state.keep(out_of_arena(rows), state.pending)
            fix(state, capacity, slots, depth, self.padding, True, compiles)
            arena = Arena(state)
        self.arena = arena
        self.held.append(arena)
        self.programs.keep_arena(key, arena)

    def _stop(self, reason: str) -> None:
        """Go on without programs."""
        if reason:
            logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
        self.execution, self.ahead, self.compiled_in = Execution("eager"), 0, 0.0
