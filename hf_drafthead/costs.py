"""What a step costs on this machine, in steps of the base: measured once, kept in a file, and read ever after.

Whether a call drafts must not depend on the clock, for in half precision another number of nodes rounds otherwise, and
the same call would give another text. So the clock is asked before the first call that wants to know, never in one:
what it says is written to `FILE`, and the call decides by the file, as all later ones do.

Of eager steps a few forwards are measured, of a part of the base's layers where it has many alike, which cost less than
three steps:

    a step = the base over N nodes + the drafter's guesses + what the drafter observes of the tokens that are kept

Of compiled steps some are taken, by the programs that the call itself takes afterwards.

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import WeakFileLock
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.output_layer import probe_tokens, with_part
from hf_drafthead.bases.reader import BaseReader, kinds_of
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation.decoding import Stream, prefill
from hf_drafthead.generation.programs import NotCaptured
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution, Runner
from hf_drafthead.generation.settings import CalibrationKey, DraftPlan
from hf_drafthead.generation.state import DecodingState
from hf_drafthead.generation.step import Stages, Step
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree

logger = logging.get_logger(__name__)

FILE = Path(HF_HOME) / "hf_drafthead" / "costs.json"
MOST_SITUATIONS = 1000  # in the file; the oldest are dropped
LOCK_SECONDS = 5.0  # that another process is waited for, which writes the file
PART = 10  # of the layers, and of the vocabulary, one in so many is run
ROUNDS = 3  # of which the shortest time counts
BUDGET = 1.5  # in steps of the base: once more is spent, no further round is begun
HIGHEST = 1e6  # steps of the base that a step may be said to cost
UNNOTICED = 0.02  # seconds that may be spent all the same: of short steps a single time says little
_UNWRITTEN: dict[str, dict[str, float]] = {}  # what the file could not take, for the rest of this process
_MEASURING = threading.Lock()
_read: tuple[Any, dict[str, dict[str, float]]] = (None, {})  # the state of the file when it was read, and its contents


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

    def __call__(self, trees: Sequence[Tree]) -> list[float] | None:
        """Seconds of a step with each tree over those of a step of the base; None where they cannot be measured."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return None  # processes that must stay in step would measure, and decide, each for itself
        names = [*map(name_of, trees)]
        costs = self._stored()
        if any(name not in costs for name in names):
            with _MEASURING:  # a thread that waited finds what the other one wrote
                costs = self._stored()
                new = [tree for tree, name in zip(trees, names) if name not in costs]
                if new and (measured := self._measured(new)) is None:
                    return None
                if new:
                    costs = keep(self.situation, dict(zip(map(name_of, new), measured or ())))
        return [costs[name] for name in names]

    def _stored(self) -> dict[str, float]:
        return {**_UNWRITTEN.get(self.situation, {}), **read_costs().get(self.situation, {})}

    @torch.no_grad()
    def _measured(self, trees: Sequence[Tree]) -> list[float] | None:
        # a base whose layers cannot be run apart is run as a whole
        eager = [functools.partial(_of_forwards, part_of) for part_of in (PartOfBase.of, PartOfBase)]
        ways: list[Callable[..., list[float]]] = [*([] if self.execution.name == "eager" else [_of_programs]), *eager]
        for way in ways:
            try:
                return way(self, trees)
            except Exception as error:  # a step may work all the same
                reason = _in_one_line(error)
                if isinstance(error, NotCaptured) and not error.lasting:  # eager costs are not those of later calls
                    return None
        logger.warning_once(f"What a step costs here could not be measured: {reason}")
        return None


def name_of(tree: Tree) -> str:
    """What a tree's cost depends on, as the file names it; of copies, that they are all that is guessed.

    >>> name_of(DraftTree([(0,), (1,), (0, 0)]))
    '4 nodes in 2 levels'
    """
    if isinstance(tree, LookupTree):
        return f"{tree.num_nodes} nodes of copies"
    return f"{tree.num_nodes} nodes in {tree.max_depth} levels"


def read_costs() -> dict[str, dict[str, float]]:
    """The costs in the file, by situation and tree; none where there is no file, or a damaged one, with a notice."""
    global _read
    try:
        status = os.stat(FILE)
        version = str(FILE), status.st_mtime_ns, status.st_size, status.st_ino
        if _read[0] != version:
            _read = version, _checked(json.loads(FILE.read_text(encoding="utf-8")))
        return _read[1]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        logger.warning_once(
            f"{str(FILE)!r}, which holds what steps cost here, cannot be read ({_in_one_line(error)}): they are "
            "measured again."
        )
        return {}


def keep(situation: str, costs: dict[str, float]) -> dict[str, float]:
    """Add costs to the file; what another process has written there in the meantime stays, and is what counts.

    Returns:
        the costs of the situation, as every later call will read them.
    """
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(FILE.with_suffix(".lock"), timeout=LOCK_SECONDS):
            stored = read_costs()
            merged = {**_UNWRITTEN.get(situation, {}), **costs, **stored.get(situation, {})}
            everything = {**{name: stored[name] for name in stored if name != situation}, situation: merged}
            newest = [*everything.items()][-MOST_SITUATIONS:]
            _replace_file(json.dumps(dict(newest), indent=1) + "\n")
    except Exception as error:  # a full disk, no right to write, another process that hangs
        merged = {**costs, **_UNWRITTEN.get(situation, {})}
        logger.warning_once(
            f"{str(FILE)!r} cannot be written ({_in_one_line(error)}): what steps cost here is measured again by the "
            "next process."
        )
    _UNWRITTEN[situation] = merged  # also for a file that cannot be read again
    return merged


def _replace_file(text: str) -> None:
    """Write the file as a whole or not at all."""
    handle, name = tempfile.mkstemp(dir=FILE.parent, prefix=FILE.name)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, FILE)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(name)
        raise


def _checked(contents: Any) -> dict[str, dict[str, float]]:
    """What a file holds; a ValueError if it is something else than costs."""
    if not isinstance(contents, dict) or not all(isinstance(costs, dict) for costs in contents.values()):
        raise ValueError("it holds no costs by situation")
    for cost in (cost for costs in contents.values() for cost in costs.values()):
        if isinstance(cost, bool) or not isinstance(cost, (int, float)) or not 0 < cost <= HIGHEST:
            raise ValueError(f"{str(cost)[:20]!r} is no cost")
    return contents


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


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


class PartOfBase(NamedTuple):
    """Runs a part of a base, and says how long all of it would take.

    reader: of some of the layers, which hands on states in the place of logits where `output` makes these, of some of
    the vocabulary; layers, vocabulary: how many times as much the base has of both.
    """

    reader: BaseReader
    layers: float = 1.0
    output: Callable[[torch.Tensor], torch.Tensor] | None = None
    vocabulary: float = 1.0

    @classmethod
    def of(cls, reader: BaseReader) -> PartOfBase:
        """A base's first layers and tokens, which it shares: nothing of it is changed, for it may run in a thread."""
        base, decoder, head = reader.base, reader.base.get_decoder(), reader.output.head
        count = getattr(base.config.get_text_config(decoder=True), "num_hidden_layers", 0)
        lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == count]
        bound = any("forward" in module.__dict__ for module in (base, decoder))  # such a forward runs the whole base
        few = max(count // PART, 2)
        if not reader.split or bound or not lists or few >= count:
            return cls(reader)
        path = next(name for name, module in base.named_modules() if module is lists[0])
        part: Any = with_part(base, path.split("."), lambda layers: layers[:few])
        as_they_are: Any = SimpleNamespace(decoder=part.get_decoder(), logits=lambda states: states)
        short = BaseReader(part, reader.windows, True, (-1,), as_they_are, reader.mixers)
        if type(head) is not nn.Linear or not reader.output.is_head:
            return cls(short, count / few, reader.output.logits)
        weight = head.weight[: max(len(head.weight) // PART, 1)]
        return cls(short, count / few, lambda states: F.linear(states, weight), len(head.weight) / len(weight))

    def seconds(self, tree: DraftTree, tokens: torch.Tensor, cache: SlotCache) -> float:
        """Of one forward of the base over the nodes of a tree, (B, N) tokens."""
        topology = tree.topology()
        start = thread_time()
        logits, _ = self.reader.nodes(tokens, topology, cache, cache.lengths[:, None] + topology.depths, None)
        middle = thread_time()
        if self.output is not None:
            self.output(logits)
        return self.layers * (middle - start) + self.vocabulary * (thread_time() - middle)


def _of_forwards(part_of: Callable[[BaseReader], PartOfBase], call: StepCosts, trees: Sequence[Tree]) -> list[float]:
    """Costs of eager steps; a first forward over one token makes what later ones use, and the past that they have."""
    part, drafter, rows, alone = part_of(call.reader), call.model.drafter, call.rows, DraftTree.root_alone()
    reader = part.reader
    cache = reader.cache(rows, 16, 1)
    root = probe_tokens(reader.base)[:1].expand(rows, 1)
    hidden = reader.read({"input_ids": root, reader.cache_name: cache, "use_cache": True}).hidden
    cache.count(1)
    kinds = kinds_of(drafter.reads)
    keys = [hidden.new_zeros(rows, 1, drafter.key_width)] if kinds else []
    features = torch.cat([hidden.repeat(1, 1, len(drafter.reads) - len(kinds)), *keys], dim=2)  # (B, 1, F*H)
    draft: dict[Tree, Callable[[], None]] = {}
    for tree in trees:
        if isinstance(tree, DraftTree):
            stages = Stages.of(call.reader, drafter, tree, False, root.device)
            draft[tree] = _guessing(stages, tree.max_depth + 1, root, features)
    shortest, spent = dict.fromkeys((alone, *trees), math.inf), 0.0
    for _ in range(ROUNDS):
        begun = thread_time()
        for tree in shortest:
            shape = tree if isinstance(tree, DraftTree) else chain(tree.num_nodes - 1)
            seconds = part.seconds(shape, root.expand(rows, shape.num_nodes), cache)
            if tree in draft:
                start = thread_time()
                draft[tree]()
                seconds += thread_time() - start
            shortest[tree] = min(shortest[tree], seconds)
        spent += thread_time() - begun
        if not spent <= max(BUDGET * shortest[alone], UNNOTICED):
            break
    return _in_steps(shortest, trees)


def _of_programs(call: StepCosts, trees: Sequence[Tree]) -> list[float]:
    """Costs of trees where programs run the steps, of a short text each."""
    model, drafter, reader, rows = call.model, call.model.drafter, call.reader, call.rows
    deepest = max(tree.max_depth for tree in trees) + 1
    prompt = probe_tokens(reader.base)[None, :4].expand(rows, -1)
    ends = StoppingCriteriaList([MaxLengthCriteria(4 + 1 + (ROUNDS + 1) * deepest)])
    rules = Rules(LogitsProcessorList(), ends, GenerationConfig(), rows, 4, prompt.device, samples=False)
    shortest: dict[Tree, float] = dict.fromkeys((DraftTree.root_alone(), *trees), math.inf)
    with contextlib.ExitStack() as calls:
        steps = {}
        for tree in shortest:
            inputs = {"attention_mask": torch.ones_like(prompt)}
            begun = prefill(reader, drafter, tree, prompt, rules, inputs, DynamicCache(), Stream(None, rules))
            step = functools.partial(Step, reader, drafter, device=prompt.device, plan=DraftPlan(tree), rules=rules)
            runner = Runner(model, reader, call.execution, step, tree, begun[0])
            calls.callback(runner.close)
            steps[tree] = functools.partial(_take, runner, begun[0])
            steps[tree]()  # which compiles
            if runner.execution.name == "eager":
                refused: set[Any] = runner.programs.refused
                raise NotCaptured("", lasting=any(key[3] == tree for key in refused))
        for tree in [*shortest] * ROUNDS:
            start = thread_time()
            steps[tree]()
            shortest[tree] = min(shortest[tree], thread_time() - start)
    return _in_steps(shortest, trees)


def _take(runner: Runner, state: DecodingState) -> None:
    state.note(runner.step(state))


def _in_steps(seconds: dict[Tree, float], trees: Sequence[Tree]) -> list[float]:
    """Costs of trees from the seconds of steps with them, and of the root alone."""
    root_seconds = max(seconds[DraftTree.root_alone()], 1e-9)  # a clock may stand still, or go back
    return [round(min(max(seconds[tree] / root_seconds, 0.01), HIGHEST), 3) for tree in trees]


def _guessing(stages: Stages, depth: int, root: torch.Tensor, features: torch.Tensor) -> Callable[[], None]:
    """What the drafter does in a step: fill the tree, and observe the tokens of its longest path, of so many nodes."""
    drafter, (rows, _, width) = stages.drafter, features.shape
    state = drafter.observe(drafter.start(rows, ROUNDS * depth), features, root, torch.ones_like(root[:, 0]))
    accepted = features.expand(rows, depth, width), root.expand(rows, depth), torch.full_like(root[:, 0], depth)

    def run() -> None:
        nonlocal state
        state, _ = stages.fill_static(state, root)
        state = drafter.observe(state, *accepted)

    return run


def chain(depth: int) -> DraftTree:
    """A tree in which every node has one child."""
    return DraftTree([(0,) * level for level in range(1, depth + 1)])
