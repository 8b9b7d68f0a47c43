"""Captured steps: the whole step as one program of fixed shapes, compiled once and kept for later calls.

A program is made for a tree, a batch size and what the call decides by (`Capture._key`). Only the capacity of the
caches may differ between two runs of it, so that a text can grow, and prompts of any length share it. What the programs
are made of are the stages of `step`; nothing here knows what they do.

    greedy               draft, verify, walk, commit                       one program
    anything else        draft, verify | walk as without capture | commit  two programs around it

On a GPU greedy steps that nobody asked to compile are recorded instead (`graphs`).

Compiled programs are kept without guards: dynamo would compare every weight and attribute of the base before each
step. What can change between two calls is compared once per call instead (`fingerprint`).
"""

from __future__ import annotations

import functools
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import CompileConfig, GenerationConfig
from transformers.utils import logging

from hf_drafthead.generation.acceptance import walk_on_device
from hf_drafthead.generation.graphs import NotRecorded, Recorded, has_graphs
from hf_drafthead.generation.memory import DoesNotFit, nodes_in_memory, out_of_memory
from hf_drafthead.generation.regions import layers_once
from hf_drafthead.generation.state import DecodingState, Limits, Rows, Walk
from hf_drafthead.generation.step import Step, commit, deepest, draft, verify
from hf_drafthead.generation.tree import DraftTree

logger = logging.get_logger(__name__)

MOST_PROGRAMS = 32  # kept per model, of which "auto" takes two for a kind of call; the least recently used goes first
BUCKET = 64  # capacities are multiples of this, since attention looks at all of it
AHEAD = 256  # positions for which a capacity is taken at first; it grows as the text does


@dataclass
class Programs:
    """What is kept for one model: its programs by key, and what they were made from."""

    made: OrderedDict[Hashable, Captured] = field(default_factory=OrderedDict)
    fingerprint: Hashable = None
    refused: dict[Hashable, str] = field(default_factory=dict)
    compared: set[Hashable] = field(default_factory=set)  # steps of which a recording does the same
    lock: threading.Lock = field(default_factory=threading.Lock)


# not on the model, which must stay a thing that can be copied and pickled
_PROGRAMS: WeakKeyDictionary[Any, Programs] = WeakKeyDictionary()


class Capture:
    """How the steps of one call are to be captured.

    Args:
        model: with `base` and `drafter`; its programs are kept as long as it lives.
        config: of `torch.compile`; None to record steps without compiling them.
    """

    def __init__(self, model: Any, config: CompileConfig | None):
        self.model, self.config = model, config

    @classmethod
    def wanted(cls, model: Any, config: GenerationConfig) -> Capture | None:
        """The capture that a call asks for, by a static cache or a `compile_config`, else a recording where there are
        graphs; None where there is neither."""
        asked = config.compile_config
        if config.disable_compile:
            return None
        if asked is not None or config.cache_implementation == "static":
            return cls(model, asked or CompileConfig(mode="default"))
        return cls(model, None) if has_graphs(model.base.device) else None

    def prepared(self, step: Step, state: DecodingState) -> Step | CapturedStep:
        """The captured form of a call's step; the step itself where it cannot be captured, with one warning."""
        programs = _PROGRAMS.setdefault(self.model, Programs())
        if not programs.lock.acquire(blocking=False):
            return step  # another thread is capturing on this model: this call need not wait for it
        try:
            now = fingerprint(self.model)
            if now != programs.fingerprint:
                programs.made.clear()
                programs.refused.clear()
                programs.compared.clear()
                programs.fingerprint = now
            key = self._key(step, state)
            if key in programs.refused:
                return step
            if self.config is None:
                return self._recorded(step, state, key, programs) if whole(step) else step
            captured = programs.made.get(key)
            if captured is None:
                captured = Captured(step, functools.partial(compiled, config=self.config))
                if isinstance(step.tree, DraftTree):  # else its tensors would be made in every step
                    for tensors in (step.tree.topology, step.tree.levels):
                        tensors(state.rows.lengths.device)
            captured_step = CapturedStep(captured, step, state)
            if captured.seconds is None:
                if self.config is not None and self.config.backend == "inductor":
                    instruction_sets_meanwhile()
                sizes_may_change(state)
                with layers_once(self.model.base):
                    captured_step.first = captured_step(state)
                logger.warning(
                    f"a step of {step.tree.num_nodes} nodes for {state.rows.lengths.shape[0]} row(s) was compiled in "
                    f"{captured.seconds:.1f} s; it is kept for later calls."
                )
            programs.made[key] = captured
            programs.made.move_to_end(key)
            while len(programs.made) > MOST_PROGRAMS:
                programs.made.popitem(last=False)
            return captured_step
        except (MemoryError, DoesNotFit) as error:  # of this call alone; for the next one there may be enough
            not_captured(str(error), state)
            return step
        except Exception as error:  # whatever a compiler says of a base: uncaptured steps work all the same
            reason = " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])
            programs.refused[self._key(step, state)] = reason
            not_captured(reason, state)
            return step
        finally:
            programs.lock.release()

    def _recorded(self, step: Step, state: DecodingState, key: Hashable, programs: Programs) -> CapturedStep:
        """A graph belongs to the call, whose memory it works on."""

        def recorded(function: Callable) -> Recorded:
            return Recorded(function, key, programs.compared)

        refuse = functools.partial(programs.refused.setdefault, key)
        return CapturedStep(Captured(step, recorded), step, state, refuse, alone=False)

    def _key(self, step: Step, state: DecodingState) -> Hashable:
        base, rows = self.model.base, state.rows
        return (
            step.tree,
            step.slots,
            whole(step),
            (step.rules.tape is not None, step.rules.rejects),
            rows.lengths.shape[0],
            rows.lengths.device,
            rows.visible is None,
            len(state.limits.eos),
            base.dtype,
            base.config._attn_implementation,
            step.drafter.reads,
            global_state(rows.lengths.device),
            (*adapters_of(base), *adapters_of(self.model.drafter)),
            None if self.config is None else repr(sorted(self.config.to_dict().items())),
        )


def execution_of(model: Any, config: GenerationConfig) -> str:
    """How the steps of a call run, as a `CalibrationKey` names it: eager, compiled or recorded."""
    capture = Capture.wanted(model, config)
    return "eager" if capture is None else "recorded" if capture.config is None else "compiled"


def not_captured(reason: str, state: DecodingState) -> None:
    """Say why the steps of a call are not captured, and let its caches grow again."""
    logger.warning_once(f"Steps are not captured, they run operation by operation: {reason}")
    for cache in state.caches:
        cache.free()


def whole(step: Step) -> bool:
    """Whether the walk of a step can be compiled with the rest: greedy, and nothing to ask on the host."""
    typical = step.settings.acceptance == "typical" and step.rules.config.do_sample
    return step.rules.greedy and not typical


class Captured:
    """The programs of one key. They hold the base and the drafter, and nothing of a call.

    Args:
        step: what they are made of.
        make: makes a program of a function.
    """

    def __init__(self, step: Step, make: Callable[[Callable], Callable]):
        reader, drafter, tree, choose = step.reader, step.drafter, step.tree, step.rules.choose_greedily
        rejects = step.rules.rejects

        def first(rows: Rows, cache: Any, limits: Limits, tilt: torch.Tensor | None = None) -> Any:
            draft_state, candidates = draft(drafter, rows, tree, limits, tilt, rejects)
            return draft_state, candidates, verify(reader, cache, candidates, rows, limits)

        def last(draft_state: Any, cache: Any, rows: Rows, verified: Any, walk: Walk) -> Rows:
            return commit(drafter, draft_state, cache, rows, verified, walk)

        def all_in_one(rows: Rows, cache: Any, limits: Limits) -> tuple[Walk, Rows]:
            reach = deepest(limits, cache)
            draft_state, candidates, verified = first(rows, cache, limits)
            choice, valid = choose(verified.logits.to(rows.lengths.device))
            walk = walk_on_device(choice, valid, candidates, rows, limits, reach)
            return walk, last(draft_state, cache, rows, verified, walk)

        self.seconds: float | None = None  # that the preparation took
        self.whole = make(all_in_one) if whole(step) else None
        self.first = make(first)
        self.last = make(last)


def compiled(function: Callable, config: CompileConfig) -> Callable:
    """`torch.compile` without guards, for a function of which the caller knows that nothing but tensors changes."""
    # dynamo keeps its programs by code object, and without guards it takes the first: each gets one of its own
    alone = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    options = {} if config.mode in ("default", "reduce-overhead") else torch._inductor.list_mode_options(config.mode)
    if config.backend == "inductor":
        from hf_drafthead.generation.products import TransposedProducts  # takes a second to import

        options = {**options, "post_grad_custom_pre_pass": TransposedProducts()}
    options = {**options, **(config.options or {}), "guard_filter_fn": lambda guards: [False] * len(guards)}
    return torch.compile(alone, fullgraph=True, dynamic=False, backend=config.backend, options=options)


def instruction_sets_meanwhile() -> None:
    """Let inductor find out beside the tracing which vector instructions the CPU has.

    It starts a process for each kind and waits, two seconds in all, and remembers what it found.
    """
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    threading.Thread(target=valid_vec_isa_list, daemon=True).start()


def sizes_may_change(state: DecodingState) -> None:
    """Tell a compiler which sizes of a call's tensors differ from step to step."""
    for cache in state.caches:
        for tensor in cache.memory:
            torch._dynamo.mark_dynamic(tensor, tensor.ndim - 2)
    torch._dynamo.mark_dynamic(state.rows.sequences, 1)
    if state.rows.visible is not None:
        torch._dynamo.mark_dynamic(state.rows.visible, 1)


class CapturedStep:
    """A step that runs the programs of its key, in place of `Step`.

    Args:
        captured: the programs.
        step: the step that they were made from.
        state: of the call, whose caches get fixed shapes here.
        refuse: is told why the programs cannot be used.
        alone: whether each layer needs tensors of its own, see `SlotCache.fix`.
    """

    def __init__(
        self,
        captured: Captured,
        step: Step,
        state: DecodingState,
        refuse: Callable[[str], Any] = lambda reason: None,
        alone: bool = True,
    ):
        self.alone = alone
        self.captured, self.step, self.tree, self.refuse = captured, step, step.tree, refuse
        step.observer = step.drafter  # its states and those of a program take each other's place
        self.device = state.rows.lengths.device
        self.first: tuple[Walk, dict[str, float]] | None = None
        self.refused: str | None = None  # why this call goes on without its programs
        if not self._fits(state):
            self._fix(state)

    @property
    def ahead(self) -> int:
        """Steps that are launched before the first of them is read: only a greedy step asks nothing of the host."""
        return int(self.captured.whole is not None and self.refused is None and has_graphs(self.device))

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and no seconds: the stages are one program."""
        if self.first is not None:
            done, self.first = self.first, None
            return done
        if self.refused is None and not self._fits(state):
            try:
                self._fix(state)
            except MemoryError as error:
                self.refused = str(error)
        if self.refused is not None:
            if state.cache.fixed:
                not_captured(self.refused, state)
            return self.step(state)
        captured, rows, cache, limits = self.captured, state.rows, state.cache, state.limits
        start = time.perf_counter()
        if captured.whole is not None:
            try:
                with nodes_in_memory(state.caches):
                    walk, state.rows = captured.whole(rows, cache, limits)
            except NotRecorded as error:
                self.refused = str(error)
                self.refuse(self.refused)
                return self(state)
        else:
            noise, tilt = self.step.noise_ahead(state)
            with nodes_in_memory(state.caches):
                draft_state, candidates, verified = captured.first(rows, cache, limits, tilt)
            walk = self.step.walk(state, candidates, verified, noise)
            state.rows = captured.last(draft_state, cache, rows, verified, walk)
        if captured.seconds is None:
            captured.seconds = time.perf_counter() - start
        return walk, {}

    def _fits(self, state: DecodingState) -> bool:
        """Whether the caches have their fixed shapes, with room for two steps."""
        longest = max(state.lengths) + state.past_shift + 2 * (self.step.tree.max_depth + 1)
        cache = state.cache
        return cache.fixed and cache.nodes == self.step.slots and longest <= cache.capacity

    def _fix(self, state: DecodingState) -> None:
        """Give all tensors of the call the shapes for the next stretch of text.

        Raises:
            MemoryError: there is no memory for a capacity of so many positions.
        """
        depth, nodes = self.step.tree.max_depth + 1, self.step.slots
        past = max(state.lengths) + state.past_shift
        left = int(state.limits.max_length) - max(state.lengths)
        capacity = past + min(left, AHEAD) + 2 * depth
        capacity = -(-capacity // BUCKET) * BUCKET
        for cache in state.caches:
            try:
                cache.fix(capacity, nodes, alone=self.alone)
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                size = cache.bytes_of(capacity + nodes) / 2**30
                raise MemoryError(
                    f"there is no memory for a cache of {size:.1f} GiB: {capacity} positions (a multiple of {BUCKET}), "
                    f"{len(state.lengths)} row(s)."
                ) from error
        # the compiler takes equal sizes for one size: what need not be equal must differ
        width = max(capacity - state.past_shift, 0) + depth + nodes + 1
        rows = state.rows
        sequences = rows.sequences.new_full((rows.sequences.shape[0], width), self.step.rules.pad_token)
        known = min(width, rows.sequences.shape[1])
        sequences[:, :known] = rows.sequences[:, :known]
        visible = rows.visible
        if visible is not None:
            # as long as the keys: the compiler cannot write code for a size that differs from theirs by a constant
            visible = nn.functional.pad(visible, (0, state.cache.slots - visible.shape[1]), value=True)
        state.rows = rows._replace(sequences=sequences, visible=visible)


def global_state(device: torch.device) -> Hashable:
    """What torch computes by that is set for a thread or a process, and that a program takes from where it was made."""
    kinds = dict.fromkeys((device.type, "cpu"))
    backends = torch.backends.cuda
    return (
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds),
        torch.is_autocast_cache_enabled(),
        torch.get_float32_matmul_precision(),
        (
            backends.matmul.allow_fp16_reduced_precision_reduction,
            backends.matmul.allow_bf16_reduced_precision_reduction,
        ),
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
            values = {
                key: value for key, value in vars(layer).items() if not isinstance(value, (nn.Module, torch.Tensor))
            }
            switches = {key: value for key, value in values.items() if key[0] != "_" or "adapter" in key}
            yield f"{name} {switches}"


def fingerprint(model: Any) -> Hashable:
    """What programs depend on and what a user may change between two calls: modules, hooks, shapes; not the weights."""
    return tuple(_facts(model.base)), tuple(_facts(model.drafter)) if isinstance(model.drafter, nn.Module) else ()


def _facts(model: nn.Module) -> Iterator[Hashable]:
    for module in model.modules():
        hooks = (*module._forward_hooks, None, *module._forward_pre_hooks)  # numbers, which are not given twice
        yield id(module), hooks, id(module.__dict__.get("forward")), module.training
        for parameter in module._parameters.values():
            if parameter is not None:
                yield tuple(parameter.shape), parameter.stride(), parameter.dtype, parameter.device
