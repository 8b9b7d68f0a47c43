"""What a step costs on this machine, in steps of the base: measured between calls, kept in a file, and read by calls.

Some steps are taken, as the call itself takes them afterwards, and steps of the root alone in turn with them. Of each
the shortest time counts: whatever else the machine does can only make a step longer. What a product of that shape
excludes is not kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from hf_drafthead.generation.programs import NotCaptured
from hf_drafthead.generation.prompt import prefill
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree
from hf_drafthead.trees import cost_file
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.trees.timing import product_seconds

logger = logging.get_logger(__name__)

ROUNDS, FEW_ROUNDS = 12, 4  # of steps, of which the shortest times count; where steps are long, a few
BUDGET, UNNOTICED = 6.0, 0.5  # steps of the base, and seconds, after which no further round is begun
PROMPT = 4  # tokens of the text that is measured on
SLACK = 2.0  # times as much more than one node as a product over as many tokens, that a forward may cost
DAY, MINUTE = 86_400, 60  # seconds after which costs are measured again: all; doubted ones, which are few times
MOST_TIMES = 4 * ROUNDS  # that doubted costs are measured
CONTRADICTED = 1.5  # times more, or less, that a step took in a call: then its cost is measured again
NODES = 4  # of a row in the steps of many rows that are timed, about as many as a batch drafts
ALONE = DraftTree.root_alone()
_MEASURING = threading.Lock()
_CONTRADICTED: set[tuple[str, str]] = set()  # situations and steps
Shapes = Mapping[str, tuple[int, Tree]]  # rows and tree of a step, by its name in the file
Samples = dict[str, list[float]]  # seconds by what a step does


class ImpossibleCost(ValueError):
    """A machine that measures this does something else meanwhile."""


class StepCosts:
    """Costs of steps for one model, kind of call and machine.

    Args:
        model: with `base` and `drafter`.
        reader: how to run the base.
        key, execution: of the call.
    """

    def __init__(self, model: Any, reader: BaseReader, key: CalibrationKey, execution: Execution | None = None):
        if execution is None or is_hooked(reader.base):  # of such a base no program is made
            execution, key = Execution("eager"), key._replace(execution="eager")
        self.model, self.reader, self.key, self.rows, self.execution = model, reader, key, key.batch_size, execution

    @functools.cached_property
    def situation(self) -> str:
        """What the costs depend on, as the file names it."""
        return f"{self.key._replace(heads_hash=None)}, torch {torch.__version__}, {_shape_hash(self.model)}"

    def __call__(self, trees: Sequence[Tree], doubted: bool = False) -> list[float] | None:
        """Seconds of a step with each tree over those of a step of the base; None where they cannot be measured.

        doubted: costs for which nothing would be drafted are measured some times more, a minute apart.
        """
        return self._costs({name_of(tree): (self.rows, tree) for tree in trees}, doubted)

    def of_rows(self, rows: int) -> float:
        """Seconds of a step of so many rows of `NODES` nodes over those of one row of one; inf: not measured."""
        chain = DraftTree([(0,) * level for level in range(1, min(NODES, (self.model.drafter.max_depth or NODES) + 1))])
        found = self._costs({f"{rows} rows of {chain.num_nodes} nodes": (rows, chain)})
        return math.inf if found is None else found[0]

    def in_words(self, trees: Sequence[Tree]) -> str:
        """What was measured of steps with some trees, where it is kept, and when it was measured."""
        known = cost_file.of_situation(self.situation)
        times = [known[name] for name in map(name_of, trees) if len(known.get(name, ())) > 1]
        if not times:
            return ""
        wide = max(median / shortest for shortest, median, *_ in times)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(each[-1] for each in times)))
        return f" (measured {when}, half of the times at most {wide:.1f} as long; kept in {str(cost_file.FILE)!r})"

    def contradict(self, tree: Tree, cost: float) -> None:
        """Have a cost measured again by the next call, where steps of this one have cost something else."""
        known = cost_file.of_situation(self.situation)
        times, root = (known.get(name_of(each), []) for each in (tree, ALONE))
        if len(times) > 1 and len(root) > 1 and not 1 / CONTRADICTED < cost / (times[0] / root[0]) < CONTRADICTED:
            _CONTRADICTED.add((self.situation, name_of(tree)))

    def _costs(self, steps: Shapes, doubted: bool = False) -> list[float] | None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return None  # processes that must stay in step would measure, and decide, each for itself
        known = cost_file.of_situation(self.situation)
        if self._lacks(known, steps, doubted):
            with _MEASURING:  # a thread that waited finds what the other one wrote
                known, since = cost_file.of_situation(self.situation), time.time()
                if lacks := self._lacks(known, steps, doubted):
                    samples = self._measured(steps)
                    if samples is None:
                        return None
                    known = cost_file.keep(self.situation, samples, since, anew=lacks == "old")
                    _CONTRADICTED.difference_update((self.situation, name) for name in steps)
        root = known.get(name_of(ALONE), [])
        if len(root) < 2 or any(len(known[name]) < 2 for name in steps):
            return None
        return [round(max(known[name][0] / root[0], 0.01), 3) for name in steps]

    def _lacks(self, known: Mapping[str, Sequence[float]], steps: Shapes, doubted: bool) -> str | None:
        """Why steps are to be measured, if they are: some never were, or long ago, or by a machine that was busy."""
        if any(name not in known for name in steps):
            return "new"
        ages = [time.time() - known[name][-1] for name in steps]
        if not 0 <= max(ages) < DAY:
            return "old"
        failed = any(len(known[name]) == 1 for name in steps)
        few = doubted and all(known[name][2] < MOST_TIMES for name in steps if len(known[name]) > 1)
        if max(ages) > MINUTE and any((self.situation, name) in _CONTRADICTED for name in steps):
            return "old"
        return "doubted" if max(ages) > MINUTE and (failed or few) else None

    @torch.no_grad()
    def _measured(self, steps: Shapes) -> Samples | None:
        """Seconds of the root alone and of steps; none of each where they cannot be told, None where not now."""
        eager = Execution("eager")  # where programs cannot be made, calls take these
        for execution in [eager] if self.execution.name == "eager" else [self.execution, eager]:
            try:
                return self._taken_in_turns({name_of(ALONE): (self.rows, ALONE), **steps}, execution)
            except Exception as error:
                if isinstance(error, NotCaptured) and not error.lasting:  # eager costs are not those of later calls
                    return None
                reason = cost_file.in_one_line(error)
        logger.warning_once(f"What a step costs here could not be measured: {reason}")
        return {name: [] for name in (name_of(ALONE), *steps)}

    def _taken_in_turns(self, steps: Shapes, execution: Execution) -> Samples:
        """Seconds of each step in turn, of a short text each; longer ones a few times.

        Raises:
            ImpossibleCost: at the shortest, steps differ more than a machine can make them.
        """
        seconds: Samples = defaultdict(list)
        verifying: Samples = defaultdict(list)
        with contextlib.ExitStack() as calls:
            takes = {name: self._begun(*step, execution, calls) for name, step in steps.items()}
            for take in takes.values():
                take()  # which compiles, also a base that compiles itself, and makes what later ones use
            begin = time.perf_counter()
            for turn in range(ROUNDS):
                for name, take in takes.items():
                    start = thread_time()
                    stages = take()
                    seconds[name].append(thread_time() - start)
                    verifying[name].append(stages.get("verify", math.nan))
                enough = max(BUDGET * min(seconds[name_of(ALONE)]), UNNOTICED)
                if turn + 1 >= FEW_ROUNDS and time.perf_counter() - begin > enough:
                    break
        self._check(seconds, verifying, steps)
        return seconds

    def _begun(
        self, rows: int, tree: Tree, execution: Execution, calls: contextlib.ExitStack
    ) -> Callable[[], dict[str, float]]:
        """What takes a step of a text, and returns the seconds of its stages where they are timed.

        Raises:
            NotCaptured: steps that are to be compiled are not.
        """
        model, reader = self.model, self.reader
        prompt = probe_tokens(reader.base)[None, :PROMPT].expand(rows, -1)
        ends = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 1 + (ROUNDS + 1) * (tree.max_depth + 1))])
        rules = Rules(LogitsProcessorList(), ends, GenerationConfig(), rows, PROMPT, prompt.device, samples=False)
        inputs = {"attention_mask": torch.ones_like(prompt), CACHE: DynamicCache()}
        member = prefill(reader, model.drafter, DraftPlan(tree), prompt, rules, inputs, None)
        timed = execution.name == "eager"
        batch = calls.enter_context(contextlib.closing(Batch.of_one(model, member, execution, timed)))
        runner: Any = batch.runner

        def take() -> dict[str, float]:
            seconds = {name: each for record in batch.step() for name, each in record.seconds.items()}
            if runner.execution.name != execution.name:
                refused: set[Any] = runner.programs.refused
                raise NotCaptured("", lasting=any(key[3] == tree for key in refused))
            return seconds

        return take

    def _check(self, seconds: Samples, verifying: Samples, steps: Shapes) -> None:
        """Compare forwards with products over as many tokens, which take most of their time."""
        base, alone = self.reader.base, name_of(ALONE)
        tokens = {name: rows * tree.num_nodes for name, (rows, tree) in steps.items()}
        products = product_seconds(base, sorted(set(tokens.values())))
        # a token of its own may need experts, or a state, of its own
        apart = bool(self.reader.mixers) or any("expert" in name for name, _ in base.named_modules())
        for name, (_, tree) in steps.items():
            more = tokens[name] / tokens[alone]
            times = max(SLACK * products[tokens[name]] / products[tokens[alone]], more if apart else 1.0)
            forwards = min(verifying[name]) / max(min(verifying[alone]), 1e-9)
            least, cost = min(seconds[alone]), min(seconds[name]) / max(min(seconds[alone]), 1e-9)
            if not 0 < least < math.inf or not 0 < cost <= more + tree.max_depth or forwards > times:
                raise ImpossibleCost(
                    f"over {tokens[name]} token(s) a step took {cost:.1f} times as long as over {tokens[alone]}, its "
                    f"forward {forwards:.1f} times, and a product {times / SLACK:.1f}: other programs use this machine"
                )


def name_of(tree: Tree) -> str:
    """What a tree's cost depends on, as the file names it; of copies, that they are all that is guessed.

    >>> name_of(DraftTree([(0,), (1,), (0, 0)]))
    '4 nodes in 2 levels'
    """
    if isinstance(tree, LookupTree):
        return f"{tree.num_nodes} nodes of copies"
    return f"{tree.num_nodes} nodes in {tree.max_depth} levels"


def _shape_hash(model: Any) -> str:
    """A hash of what a model's speed depends on besides the machine: its kind, its sizes, and how it attends.

    The values of weights say nothing, so that heads that are trained further keep their costs.
    """
    base, digest = model.base, hashlib.sha256()
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    for part in (type(base).__name__, base.config._attn_implementation, autocast, model.config.model_type):
        digest.update(f"{part} ".encode())
    for name, weight in (*base.named_parameters(), *model.drafter.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
    return digest.hexdigest()[:16]
