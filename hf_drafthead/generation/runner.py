"""How the steps of a call run: eagerly, compiled, recorded as a CUDA graph, or compiled and then recorded.

The step is written once, in `step`. What runs its stages is all that differs: eager steps call them; compiled ones call
a `Program`, recorded ones a `Recorded`, which are kept for later calls (`programs`). The walk stands between them.

Only the capacity of the caches may differ between two runs of a compiled program, so that a text can grow, and prompts
of any length share it. A recorded one works on the same memory at every replay (`Arena`): a call moves into it, and
into a larger one as its text grows.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Hashable
from typing import Any, NamedTuple

from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.generators import not_put_back
from hf_drafthead.bases.slots import BUCKET, SLOTS, rounded_up
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
from hf_drafthead.generation.state import DecodingState
from hf_drafthead.generation.step import STAGES, Stages

logger = logging.get_logger(__name__)

CAPACITY_BUCKET = 16  # capacities are multiples of this, at all of which attention looks; on a GPU of `slots.BUCKET`
HAVE_GRAPHS = ("cuda",)  # kinds of devices
AHEAD = 256  # positions for which programs take a capacity at first; it grows as the text does
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
        """What a call asks for by a static cache or a `compile_config`, else recorded where there are graphs. Modes
        that mean CUDA graphs in transformers compile and record, and so does a static cache; others only compile."""
        graphs, asked = model.base.device.type in HAVE_GRAPHS, config.compile_config
        if config.disable_compile:
            return cls("eager")
        if asked is None and config.cache_implementation != "static":
            return cls("recorded", records=True) if graphs else cls("eager")
        records = graphs and (asked is None or asked.mode in RECORDS)
        return cls("compiled", asked or CompileConfig(mode="default"), records)


class Runner:
    """Runs the stages of a batch's steps by programs, until one cannot be had: then the batch goes on without."""

    def __init__(self, batch: Any):
        self.batch, self.model, self.reader = batch, batch.model, batch.reader
        self.execution, self.device = batch.execution, self.reader.base.device
        self.graphs = self.device.type in HAVE_GRAPHS
        self.stages: dict[Stages, Any] = {}  # what runs in the place of a step's stages
        self.recorded: dict[Hashable, Recorded] = {}  # what runs stages, in the memory of the call as it is now
        self.arena: Arena | None = None
        self.layers: tuple[int, ...] | None = None  # ids of those that programs trace once; None: not asked yet
        self.programs = PROGRAMS.setdefault(self.model, Programs())

    def of(self, stages: Stages, rows: int) -> Any:
        """What runs the stages of a step: programs, once each has run in the memory of the call as it is now."""
        if self.reader.base.device != self.device:  # a program would read the memory of where it was
            raise RuntimeError(f"the base was moved from {self.device} while it generated: move it between calls.")
        if stages not in self.stages:
            self.layers = None  # which may have changed since another step was prepared
            runs = {name: functools.partial(self._run, rows, name, stages) for name in STAGES}
            self.stages[stages] = types.SimpleNamespace(**runs)
        return self.stages[stages]

    def _run(self, rows: int, name: str, stages: Stages, *arguments: Any) -> Any:
        """Run a stage by a program. Where none can be had it runs as it stands, and so do all that follow."""
        if self.batch.runner is None:
            return getattr(stages, name)(*arguments)
        key = (name, self.reader, repr(self.execution), stages.tree, rows)
        try:
            if (stages, name) in self.recorded:
                return self.recorded[stages, name](stages, *arguments)
            if key in self.programs.refused:
                raise NotCaptured("")
            return self._first_run(name, (stages, *arguments))
        except NotCaptured as reason:
            if reason.lasting:
                self.programs.refused.add(key)
            self.stop(str(reason))
        return getattr(stages, name)(*arguments)

    def _first_run(self, name: str, arguments: tuple) -> Any:
        """Run a stage by a program that is new to the call, or to the memory of the call, else NotCaptured."""
        stages, stage = arguments[0], getattr(Stages, name)
        program: Any = stage
        if (config := self.execution.config) is not None:
            from hf_drafthead.bases.compiling import repeated  # takes a second to import

            if self.layers is None:
                self.layers = tuple(map(id, repeated(self.model.base)))
            made_for = (stage, repr(config), self.reader, *self.layers)
            program = self.programs.fitting(made_for, arguments) or Program(made_for, stage, config)
        runs: Any = program
        if self.arena is not None:
            key = (program, stages.tree, form_of(arguments[1:]))
            runs = self.arena.programs.setdefault(key, Recorded(program))
            runs.try_again(*arguments)
        if isinstance(program, Program) and not program.made:
            result = self._compiled(program, runs, arguments)
        else:
            result = runs(*arguments)
        if self.arena is not None:
            self.recorded[stages, name] = runs
        else:
            setattr(self.stages[stages], name, functools.partial(program.step, stages))
        return result

    def _compiled(self, program: Program, runs: Stage, arguments: tuple) -> Any:
        """Run what compiles a program, which is then kept."""
        from hf_drafthead.bases.compiling import in_this_thread_alone  # takes a second to import

        start = time.perf_counter()
        if not self.programs.compiles.acquire(blocking=False):  # another call compiles
            raise NotCaptured("")
        try:
            logger.warning_once(COMPILES)
            with in_this_thread_alone(self.model.base), not_put_back(self.device):
                result = runs(*arguments)
        except Exception as error:  # whatever a compiler says of a base: eager steps work all the same
            if program.made:
                raise
            reason = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
            raise NotCaptured(reason, lasting=not out_of_memory(error)) from error
        finally:
            self.programs.compiles.release()
        self.programs.keep_compiled(program)
        made = f"{program.stage.__name__} of {arguments[0].tree.num_nodes} nodes for {len(arguments[1].lengths)} row(s)"
        logger.warning(f"{made} was compiled in {time.perf_counter() - start:.1f} s; it is kept for later calls.")
        return result

    def reshape(self, state: DecodingState, depth: int, longest: int, need: int) -> None:
        """Give all tensors shapes for the next stretch of text, for which programs are made anew."""
        self.stages.clear()
        self.recorded.clear()
        # the same number of nodes for most trees, which then share programs; attention looks at those that there are
        slots = rounded_up(self.batch.tree.slots, SLOTS)
        capacity = need + min(self.batch.longest - longest, AHEAD)
        bucket = BUCKET if self.device.type == "cuda" else CAPACITY_BUCKET
        try:
            if self.execution.records:
                self._enter_arena(state, rounded_up(capacity, AHEAD), slots, depth)
            else:
                fix(state, rounded_up(capacity, bucket), slots, depth, self.batch.padding, True, True)
        except MemoryError as reason:  # of this call alone; for the next one there may be enough
            self.stop(str(reason))

    def _enter_arena(self, state: DecodingState, capacity: int, slots: int, depth: int) -> None:
        """Go on in memory that recorded programs work on: of an earlier call, or new."""
        rows, compiles = state.rows, self.execution.config is not None
        sizes = (capacity, slots, compiles, len(state.lengths), rows.visible is None, state.limits.eos.shape[-1])
        key = (*sizes, state.past_shift, form_of(rows.draft_state), self.reader, *addresses(self.model))
        arena = self.programs.take_arena(key)
        if arena is not None:
            arena.take(state, self.batch.padding)
        else:
            if self.arena is not None:
                state.keep(out_of_arena(rows), state.pending)
            fix(state, capacity, slots, depth, self.batch.padding, True, compiles)
            arena = Arena(state)
        self.arena = arena
        self.batch.held.append(arena)
        self.programs.keep_arena(key, arena)

    def stop(self, reason: str) -> None:
        """Let the batch go on without programs."""
        if reason:
            logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
        self.batch.runner = None
