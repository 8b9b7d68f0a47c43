"""What a step costs on this machine, in steps of the base: measured between calls, kept in a file, and read by calls.

Steps are taken in turn with those of the root alone. Of each the shortest time counts: whatever else the machine does
can only make a step longer.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
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
from hf_drafthead.trees.timing import wait

logger = logging.get_logger(__name__)

ROUNDS, FEW_ROUNDS = 12, 4  # of steps, of which the shortest times count; where steps are long, a few
BUDGET, UNNOTICED = 6.0, 0.5  # steps of the base, and seconds, after which no further round is begun
PROMPT = 4  # tokens of the text that is measured on
DAY, MINUTES = 86_400, 600  # seconds after which costs are measured again; where that failed
ALONE = DraftTree.root_alone()
_MEASURING = threading.Lock()


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
        if self._outdated(steps):
            with _MEASURING:
                if self._outdated(steps):  # and no other thread has measured meanwhile
                    measured = self._measured(steps)
                    if measured is None:
                        return None
                    cost_file.keep(self.situation, measured)
        known = cost_file.of_situation(self.situation)
        return None if any(len(known[name]) == 1 for name in steps) else [known[name][0] for name in steps]

    def in_words(self, tree: Tree) -> str:
        """How a step with a tree was measured, when, and where that is kept."""
        *cost, when = cost_file.of_situation(self.situation).get(name_of(tree), [0.0])
        if not cost:
            return ""
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(when))
        return f" (measured {day}, half of the times at most {cost[1]:.1f} as long; kept in {str(cost_file.FILE)!r})"

    def _outdated(self, steps: Iterable[str]) -> bool:
        known, now = cost_file.of_situation(self.situation), time.time()
        for name in steps:
            *cost, when = known.get(name, [-math.inf])
            if not 0 <= now - when < (DAY if cost else MINUTES):
                return True
        return False

    @torch.no_grad()
    def _measured(self, steps: Mapping[str, Tree]) -> dict[str, tuple[float, ...]] | None:
        """Cost and spread of each step; nothing of each where they cannot be told, None where not now."""
        trees = {name_of(ALONE): ALONE, **steps}
        try:
            seconds = seconds_in_turn(self.model, self.reader, self.rows, trees, self.execution)
            least = {name: max(min(each), 1e-9) for name, each in seconds.items()}
            alone = least[name_of(ALONE)]
            found = {name: (least[name] / alone, statistics.median(seconds[name]) / least[name]) for name in steps}
            # within limits, for a clock may be put back
            return {name: tuple(round(min(max(ratio, 0.01), 1e3), 3) for ratio in each) for name, each in found.items()}
        except NotCaptured:  # another call compiles, and eager costs are not those of later calls
            return None
        except Exception as error:
            reason = cost_file.in_one_line(error)
            logger.warning_once(f"What a step costs here could not be measured: {reason}")
            return dict.fromkeys(steps, ())


def seconds_in_turn(
    model: Any,
    reader: BaseReader,
    rows: int,
    trees: Mapping[Any, Tree],
    execution: Execution,
) -> dict[Any, list[float]]:
    """Seconds of steps with some trees, of which the first is the root alone, in turn, of a short text each.

    Raises:
        NotCaptured: another call compiles meanwhile.
    """
    seconds: dict[Any, list[float]] = defaultdict(list)
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
                take()
                seconds[name].append(_now(device) - start)
            enough = max(BUDGET * min(seconds[next(iter(trees))]), UNNOTICED)
            if turn + 1 >= FEW_ROUNDS and time.perf_counter() - begin > enough:
                break
    return seconds


def _now(device: torch.device) -> float:
    """Of this thread's processor time, which others' work does not lengthen; a GPU has none."""
    wait(device)
    return thread_time() if device.type == "cpu" else time.perf_counter()


def _begun(
    model: Any, reader: BaseReader, rows: int, tree: Tree, execution: Execution, calls: contextlib.ExitStack
) -> Callable[[], None]:
    """What takes a step of a text; NotCaptured: steps that are to be compiled are not."""
    prompt = probe_tokens(reader.base)[None, :PROMPT].expand(rows, -1)
    ends = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 1 + (ROUNDS + 1) * (tree.max_depth + 1))])
    rules = Rules(LogitsProcessorList(), ends, GenerationConfig(), rows, PROMPT, prompt.device, samples=False)
    inputs = {"attention_mask": torch.ones_like(prompt), CACHE: DynamicCache()}
    member = prefill(reader, model.drafter, DraftPlan(tree), prompt, rules, inputs, None)
    batch = calls.enter_context(contextlib.closing(Batch.of_one(model, member, execution)))
    runner: Any = batch.runner

    def take() -> None:
        batch.step()
        if runner.execution.name != execution.name:
            refused: set[Any] = runner.programs.refused
            raise NotCaptured("", lasting=any(key[3] == tree for key in refused))

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
