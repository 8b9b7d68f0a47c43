"""What a step costs on this machine, in steps of the base: measured between calls, kept in a file, and read by calls.

Steps are taken in turn with those of the root alone. Of each the shortest time counts: whatever else the machine does
can only make a step longer. What a product of that shape excludes is not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import logging

from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, DynamicCache
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.entry import prefill
from hf_drafthead.generation.programs import NotCaptured
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree
from hf_drafthead.trees import cost_file
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.trees.timing import product_seconds, wait

logger = logging.get_logger(__name__)

ROUNDS, FEW_ROUNDS = 12, 4  # of steps, of which the shortest times count; where steps are long, a few
BUDGET, UNNOTICED = 6.0, 0.5  # steps of the base, and seconds, after which no further round is begun
PROMPT = 4  # tokens of the text that is measured on
SLACK = 2.0  # times as much more than one node as a product over as many tokens, that a forward may cost
# seconds after which costs are measured again; where that failed or nothing pays; where a call contradicts them
DAY, MINUTES, MINUTE = 86_400, 600, 60
CONTRADICTED = 1.5  # times as long, or as short, as known, that steps of a call have taken
ALONE = DraftTree.root_alone()
_MEASURING = threading.Lock()
if hasattr(os, "register_at_fork"):  # nobody measures in a process that was forked meanwhile
    os.register_at_fork(after_in_child=_MEASURING._at_fork_reinit)  # type: ignore[attr-defined]
_DOUBTED: dict[str, float] = {}  # situations, and the seconds after which their costs are measured again


class ImpossibleCost(ValueError):
    """A machine that measures this does something else meanwhile."""


class StepCosts:
    """Costs of steps for one model, kind of call and machine; key, execution: of the call."""

    def __init__(self, model: Any, reader: BaseReader, key: CalibrationKey, execution: Execution):
        if is_hooked(reader.base):  # of such a base no program is made
            execution = Execution("eager")
        elif execution.records:  # to compile takes minutes, and differs little from recording where a GPU waits
            execution = Execution("recorded", records=True)
        self.model, self.reader, self.rows, self.execution = model, reader, key.batch_size, execution
        self.key = key._replace(execution=execution.name, heads_hash=None)

    @functools.cached_property
    def situation(self) -> str:
        """What the costs depend on, as the file names it."""
        return f"{self.key}, torch {torch.__version__}, {_shape_hash(self.model)}"

    def __call__(self, trees: Sequence[Tree]) -> list[float] | None:
        """Seconds of a step with each tree over those of a step of the base; None where they cannot be measured."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return None  # processes that must stay in step would measure, and decide, each for itself
        steps = {name_of(tree): tree for tree in trees}
        known = cost_file.of_situation(self.situation)  # which another process may remove meanwhile
        if self._outdated(known, steps):
            with _MEASURING:
                known = cost_file.of_situation(self.situation)
                if self._outdated(known, steps):  # and no other thread has measured meanwhile
                    measured = self._measured(steps)
                    if measured is None:
                        return None
                    known = cost_file.keep(self.situation, measured)
                    _DOUBTED.pop(self.situation, None)
        return None if any(len(known[name]) == 1 for name in steps) else [known[name][0] for name in steps]

    def in_words(self, tree: Tree) -> str:
        """How a step with a tree was measured, when, and where that is kept."""
        *cost, when = cost_file.of_situation(self.situation).get(name_of(tree), [0.0])
        if not cost:
            return ""
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        return f" (measured {day}, half of the times at most {cost[1]:.1f} as long; kept in {str(cost_file.FILE)!r})"

    def doubt(self, seconds: float = MINUTES) -> None:
        """Have costs measured again by a later call, once they are so old."""
        _DOUBTED[self.situation] = min(seconds, _DOUBTED.get(self.situation, seconds))

    def contradict(self, longer: float) -> None:
        """Take in how many times as long as is known steps of a call have taken."""
        if not 1 / CONTRADICTED < longer < CONTRADICTED:
            self.doubt(MINUTE)

    def _outdated(self, known: Mapping[str, list[float]], steps: Iterable[str]) -> bool:
        now = time.time()
        for name in steps:
            *cost, when = known.get(name, [-math.inf])
            if not 0 <= now - when < min(DAY if cost else MINUTES, _DOUBTED.get(self.situation, DAY)):
                return True
        return False

    @torch.no_grad()
    def _measured(self, steps: Mapping[str, Tree]) -> dict[str, tuple[float, ...]] | None:
        """Cost and spread of each step; nothing of each where they cannot be told, None where not now."""
        trees = {name_of(ALONE): ALONE, **steps}
        try:
            seconds, verifying = seconds_in_turn(self.model, self.reader, self.rows, trees, self.execution)
            least = {name: min(each) for name, each in seconds.items()}
            self._check(least, {name: min(each) for name, each in verifying.items()}, steps)
            costs = {name: round(max(each / least[name_of(ALONE)], 0.01), 3) for name, each in least.items()}
            return {name: (costs[name], round(statistics.median(seconds[name]) / least[name], 3)) for name in steps}
        except NotCaptured:  # another call compiles, and eager costs are not those of later calls
            return None
        except Exception as error:
            reason = cost_file.in_one_line(error)
            logger.warning_once(f"What a step costs here could not be measured: {reason}")
            return dict.fromkeys(steps, ())

    def _check(self, seconds: Mapping[str, float], verifying: Mapping[str, float], steps: Mapping[str, Tree]) -> None:
        """Compare forwards with products over as many tokens, which take most of their time."""
        base, alone = self.reader.base, name_of(ALONE)
        products = product_seconds(base, sorted({self.rows, *(self.rows * tree.num_nodes for tree in steps.values())}))
        # a token of its own may need experts, or a state, of its own
        apart = bool(self.reader.mixers) or any("expert" in name for name, _ in base.named_modules())
        for name, tree in steps.items():
            tokens, more = self.rows * tree.num_nodes, tree.num_nodes
            product = products[tokens] / products[self.rows]
            forward = verifying[name] / max(verifying[alone], 1e-9)
            cost = seconds[name] / max(seconds[alone], 1e-9)
            possible = 0 < seconds[alone] < math.inf and 0 < cost <= more + tree.max_depth
            if not possible or forward > max(SLACK * product, more if apart else 1.0):
                raise ImpossibleCost(
                    f"over {tokens} token(s) a step took {cost:.1f} times as long as over {self.rows}, its forward "
                    f"{forward:.1f} times, and a product {product:.1f}: other programs use this machine"
                )


def seconds_in_turn(
    model: Any,
    reader: BaseReader,
    rows: int,
    trees: Mapping[Any, Tree],
    execution: Execution,
) -> tuple[dict[Any, list[float]], dict[Any, list[float]]]:
    """Seconds of steps with some trees, of which the first is the root alone, in turn, of a short text each; and of
    their forwards, where these are timed.

    Raises:
        NotCaptured: another call compiles meanwhile.
    """
    seconds: dict[Any, list[float]] = defaultdict(list)
    verifying: dict[Any, list[float]] = defaultdict(list)
    device = reader.base.device
    with torch.no_grad(), contextlib.ExitStack() as calls:
        takes = {name: _begun(model, reader, rows, tree, execution, calls) for name, tree in trees.items()}
        try:
            for take in takes.values():
                take()  # which compiles, also a base that compiles itself, and makes what later ones use
        except NotCaptured as error:
            if not error.lasting:
                raise
            return seconds_in_turn(model, reader, rows, trees, Execution("eager"))  # as calls do
        begin = time.perf_counter()
        for turn in range(ROUNDS):
            for name, take in takes.items():
                start = _now(device)
                stages = take()
                seconds[name].append(_now(device) - start)
                verifying[name].append(stages.get("verify", math.nan))
            enough = max(BUDGET * min(seconds[next(iter(trees))]), UNNOTICED)
            if turn + 1 >= FEW_ROUNDS and time.perf_counter() - begin > enough:
                break
    return seconds, verifying


def _now(device: torch.device) -> float:
    """Of this thread's processor time, which others' work does not lengthen; a GPU has none."""
    wait(device)
    return thread_time() if device.type == "cpu" else time.perf_counter()


def _begun(
    model: Any, reader: BaseReader, rows: int, tree: Tree, execution: Execution, calls: contextlib.ExitStack
) -> Callable[[], dict[str, float]]:
    """What takes a step of a text, and returns the seconds of its stages where they are timed; NotCaptured: steps
    that are to be compiled are not."""
    prompt = probe_tokens(reader.base)[None, :PROMPT].expand(rows, -1)
    ends = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 1 + (ROUNDS + 1) * (tree.max_depth + 1))])
    rules = Rules(LogitsProcessorList(), ends, GenerationConfig(), rows, PROMPT, prompt.device, samples=False)
    inputs = {"attention_mask": torch.ones_like(prompt), CACHE: DynamicCache()}
    member = prefill(reader, model.drafter, DraftPlan(tree), prompt, rules, inputs, None)
    batch = calls.enter_context(contextlib.closing(Batch.of_one(model, member, execution, execution.name == "eager")))
    runner: Any = batch.runner

    def take() -> dict[str, float]:
        seconds = {name: each for record in batch.step() for name, each in record.seconds.items()}
        if runner.execution.name != execution.name:
            refused: set[Any] = runner.programs.refused
            raise NotCaptured("", lasting=any(key[3] == tree for key in refused))
        return seconds

    return take


def name_of(tree: Tree) -> str:
    """What a tree's cost depends on, as the file names it; of copies, that they are all that is guessed."""
    if isinstance(tree, LookupTree):
        return f"{tree.num_nodes} nodes of copies"
    return f"{tree.num_nodes} nodes in {tree.max_depth} levels"


def _shape_hash(model: Any) -> str:
    """Of what a model's speed depends on besides the machine; heads that are trained further keep their costs."""
    base, digest = model.base, hashlib.sha256()
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    for part in (type(base).__name__, base.config._attn_implementation, autocast, model.config.model_type):
        digest.update(f"{part} ".encode())
    for name, weight in (*base.named_parameters(), *model.drafter.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
    return digest.hexdigest()[:16]
