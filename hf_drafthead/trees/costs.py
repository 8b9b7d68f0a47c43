"""What a step costs on this machine, in steps of the base: measured between calls, kept in a file, and read by calls.

    {situation: {"8 nodes in 3 levels": [cost, median of the times over the shortest, when], ...}}

Steps are taken in turn with those of the root alone. Of each the shortest time counts: whatever else the machine does
can only make a step longer. Where measuring failed, or said what a product of that shape excludes, the list says when,
and nothing else. Whether a call drafts is decided by this file and by the tokens, never by the clock: in half precision
another number of nodes rounds otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import thread_time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from huggingface_hub.constants import HF_HOME
from huggingface_hub.utils import WeakFileLock
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.utils import logging

from hf_drafthead.bases.generators import new_lock
from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, DynamicCache
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.entry import Asked, prefill
from hf_drafthead.generation.programs import PROGRAMS, NotCaptured
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.step import now
from hf_drafthead.generation.tree import ROOT_ALONE, DraftTree, RankPath, Tree
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.trees.timing import product_seconds, time_interleaved

logger = logging.get_logger(__name__)

FILE = Path(HF_HOME) / "hf_drafthead" / "costs.json"
MOST_SITUATIONS = 1000  # in the file; the oldest are dropped
LOCK_SECONDS = 5.0  # that another process is waited for, which writes the file
ROUNDS, FEW_ROUNDS = 12, 4  # of steps, of which the shortest times count; where steps are long, a few
BUDGET, UNNOTICED = 6.0, 0.5  # steps of the base, and seconds, after which no further round is begun
PROMPT = 4  # tokens of the text that is measured on
SLACK = 2.0  # times as much more than one node as a product over as many tokens, that a forward may cost
# seconds after which costs are measured again; where that failed or nothing pays; where a call contradicts them
DAY, MINUTES, MINUTE = 86_400, 600, 60
CONTRADICTED = 1.5  # times as long, or as short, as known, that steps of a call have taken
Measured = dict[str, list[float]]  # by what a step does
_KNOWN: dict[str, Measured] = {}  # what this process has measured or read, by situation
_DOUBTED: dict[str, float] = {}  # situations, and the seconds after which their costs are measured again
_MEASURING = new_lock()


class Size(NamedTuple):
    """Of a tree: N nodes, root included, and levels below the root that heads guess, none where all are copies."""

    nodes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.nodes} nodes " + (f"in {self.depth} levels" if self.depth else "of copies")


ALONE = Size(1, 0)  # the root
Seconds = dict[Size, list[float]]  # of the steps with each tree


class NodeCosts:
    """What steps cost, in steps of the root alone.

    Args:
        measured: of whole steps with some trees. Those of as many nodes in more levels tell what drafting a level
            costs, and those of other numbers of nodes lie on lines between these.

    >>> costs = NodeCosts({Size(8, 1): 1.3, Size(8, 3): 1.5, Size(2, 1): 1.2})
    >>> [round(costs(nodes, levels), 2) for nodes, levels in ((8, 3), (2, 1), (5, 2), (1, 0))]
    [1.5, 1.2, 1.35, 1.0]
    """

    def __init__(self, measured: Mapping[Size, float]):
        self.measured = measured
        slopes = [
            (measured[one] - measured[other]) / (one.depth - other.depth)
            for one, other in itertools.permutations(measured, 2)
            if one.nodes == other.nodes and one.depth > other.depth
        ]
        self.level = max(statistics.median(slopes), 0.0) if slopes else 0.0
        self.forwards = {1: 1.0}  # by the number of nodes, without drafting
        for size in sorted(measured):
            self.forwards.setdefault(size.nodes, max(measured[size] - self.level * size.depth, 0.01))

    def __call__(self, nodes: int, levels: int) -> float:
        known = sorted(self.forwards)
        high = next((place for place, count in enumerate(known) if count >= nodes), len(known) - 1)
        few, many = known[max(high - 1, 0)], known[high]
        share = (nodes - few) / max(many - few, 1)
        return self.forwards[few] + share * (self.forwards[many] - self.forwards[few]) + self.level * levels

    @property
    def whole(self) -> float:
        """Of a step with the largest tree."""
        return self.measured[max(self.measured)]

    def pays(self, most: float) -> bool:
        """Whether some tree may give more than it costs, where no text is expected to give more tokens than this."""
        return any(cost < min(size.depth + 1, most) for size, cost in self.measured.items())


def sizes_up_to(nodes: int) -> list[int]:
    """Numbers of nodes that are chosen among: powers of two, and all."""
    return [*(1 << power for power in range((nodes - 1).bit_length())), nodes]


def trees_of(paths: Sequence[RankPath], vocabulary: int, nodes: Sequence[int] = ()) -> dict[Size, Tree]:
    """Trees of the first rank paths, of these numbers of nodes, else of many and, which tells what a level costs, of as
    many nodes in one, among the tokens that there are."""
    most = len(paths) + 1
    counts = sorted({*nodes, most}) if nodes else sizes_up_to(most)[1:]
    trees = [DraftTree(paths[: count - 1]) for count in counts if count <= min(most, max(nodes, default=most))]
    if not nodes and trees[-1].max_depth > 1:
        trees.append(DraftTree([(rank,) for rank in range(min(len(paths), vocabulary))]))
    return {Size(tree.num_nodes, tree.max_depth): tree for tree in trees}


class StepCosts:
    """Costs of steps of so many rows for one model, kind of call and machine."""

    def __init__(self, model: Any, reader: BaseReader, rows: int, execution: Execution):
        if is_hooked(reader.base):  # of such a base no program is made
            execution = Execution("eager")
        elif execution.records:  # to compile takes minutes, and differs little from recording where a GPU waits
            execution = Execution("recorded", records=True)
        self.model, self.reader, self.rows, self.execution = model, reader, rows, execution

    @functools.cached_property
    def situation(self) -> str:
        """What the costs depend on, as the file names it."""
        key = CalibrationKey.of(self.model.base, None, self.rows, self.execution.name)
        return f"{key}, torch {torch.__version__}, {_shape_hash(self.model)}"

    def __call__(self, trees: Mapping[Size, Tree]) -> NodeCosts | None:
        """What steps with these trees cost; None where they cannot be measured."""
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return None  # processes that must stay in step would measure, and decide, each for itself
        known = self._known(trees)
        if known is None:
            with _MEASURING:  # another thread, or process, may have measured meanwhile
                here, held = _KNOWN.get(self.situation, {}), stored().get(self.situation, {})
                # a file that cannot be written holds older ones
                newer = {size: its for size, its in held.items() if here.get(size, [0])[-1] < its[-1] <= time.time()}
                _KNOWN[self.situation] = here | newer
                known = self._known(trees)
                if known is None:
                    measured = self._measured(trees)
                    if measured is None:
                        return None
                    known = _keep(self.situation, measured)
                    _DOUBTED.pop(self.situation, None)
        costs = {size: known[str(size)][0] for size in trees if len(known[str(size)]) > 1}
        return NodeCosts(costs) if len(costs) == len(trees) else None

    def in_words(self, size: Size) -> str:
        """How a step was measured, when, and where that is kept."""
        *cost, when = _KNOWN.get(self.situation, {}).get(str(size), [0.0])
        if not cost:
            return ""
        return f" (measured {day(when)}, half of the times at most {cost[1]:.1f} as long; kept in {str(FILE)!r})"

    def doubt(self, seconds: float = MINUTES) -> None:
        """Have costs measured again by a later call, once they are so old."""
        _DOUBTED[self.situation] = min(seconds, _DOUBTED.get(self.situation, seconds))

    def contradict(self, longer: float) -> None:
        """Take in how many times as long as is known steps of a call have taken."""
        if not 1 / CONTRADICTED < longer < CONTRADICTED:
            self.doubt(MINUTE)

    def _known(self, trees: Mapping[Size, Tree]) -> Measured | None:
        """What is known of the situation, if all steps were measured not too long ago."""
        known, now = _KNOWN.get(self.situation, {}), time.time()
        for size in trees:
            *cost, when = known.get(str(size), [-math.inf])
            if not 0 <= now - when < min(DAY if cost else MINUTES, _DOUBTED.get(self.situation, DAY)):
                return None
        return known

    @torch.no_grad()
    def _measured(self, trees: Mapping[Size, Tree]) -> dict[str, tuple[float, ...]] | None:
        """Cost and spread of each step; nothing of each where they cannot be told, None where not now."""
        try:
            steps = {ALONE: ROOT_ALONE, **trees}
            seconds, forwards = seconds_in_turn(self.model, self.reader, self.rows, steps, self.execution)
            least = {size: min(each) for size, each in seconds.items()}
            if not all(0 < each < math.inf for each in least.values()):
                raise ValueError(f"steps took {[*least.values()]} seconds")  # by a clock that was put back
            costs = {size: max(each / least[ALONE], 0.01) for size, each in least.items()}
            self._check(trees, costs, forwards)
            spreads = {size: statistics.median(seconds[size]) / least[size] for size in trees}
            return {str(size): (round(costs[size], 3), round(spread, 3)) for size, spread in spreads.items()}
        except NotCaptured:  # another call compiles, and eager costs are not those of later calls
            return None
        except Exception as error:
            logger.warning_once(f"What a step costs here could not be measured: {_in_one_line(error)}")
            return {str(size): () for size in trees}

    def _check(self, trees: Mapping[Size, Tree], costs: Mapping[Size, float], forwards: Seconds) -> None:
        """Compare forwards with products over as many tokens, which take most of their time."""
        base, alone = self.reader.base, max(min(forwards[ALONE]), 1e-9)
        products = product_seconds(base, sorted({self.rows, *(self.rows * size.nodes for size in trees)}))
        # a token of its own may need experts, or a state, of its own
        apart = bool(self.reader.mixers) or any("expert" in name for name, _ in base.named_modules())
        for size, tree in trees.items():
            tokens, forward = self.rows * size.nodes, min(forwards[size]) / alone
            product = products[tokens] / products[self.rows]
            most = max(SLACK * product, size.nodes if apart else 1.0)
            if costs[size] > size.nodes + tree.max_depth or forward > most:
                raise ValueError(
                    f"over {tokens} token(s) a step took {costs[size]:.1f} times as long as over {self.rows}, its "
                    f"forward {forward:.1f} times, and a product {product:.1f}: other programs use this machine"
                )


def seconds_in_turn(
    model: Any,
    reader: BaseReader,
    rows: int,
    trees: Mapping[Size, Tree],
    execution: Execution,
) -> tuple[Seconds, Seconds]:
    """Seconds of steps with some trees, the root alone first, in turn, of a short text each; and of their forwards,
    where these are timed. NotCaptured: another call compiles meanwhile."""
    verifying: Seconds = defaultdict(list)
    device = reader.base.device
    # a thread's processor time is not lengthened by others' work; a GPU has none
    clock: Callable[[torch.device], float] = (lambda _: thread_time()) if device.type == "cpu" else now
    with torch.no_grad(), contextlib.ExitStack() as calls:
        takes = {size: _begun(model, reader, rows, tree, execution, calls) for size, tree in trees.items()}
        try:
            for take in takes.values():
                take()  # which compiles, also a base that compiles itself, and makes what later ones use
        except NotCaptured as error:
            if not error.lasting:
                raise
            return seconds_in_turn(model, reader, rows, trees, Execution("eager"))  # as calls do
        begin = time.perf_counter()

        def step(size: Size) -> None:
            verifying[size].append(takes[size]().get("verify", math.nan))

        def enough(seconds: Seconds) -> bool:
            least = max(BUDGET * min(seconds[ALONE]), UNNOTICED)
            return len(seconds[ALONE]) >= FEW_ROUNDS and time.perf_counter() - begin > least

        runs = {size: functools.partial(step, size) for size in trees}
        _, seconds = time_interleaved(runs, ROUNDS, device, clock=clock, enough=enough)
    return seconds, verifying


def _begun(
    model: Any, reader: BaseReader, rows: int, tree: Tree, execution: Execution, calls: contextlib.ExitStack
) -> Callable[[], dict[str, float]]:
    """What takes a step of a text, and returns the seconds of its stages where they are timed; NotCaptured: steps
    that are to be compiled are not."""
    prompt = probe_tokens(reader.base)[None, :PROMPT].expand(rows, -1)
    ends = StoppingCriteriaList([MaxLengthCriteria(PROMPT + 1 + (ROUNDS + 1) * (tree.max_depth + 1))])
    rules = Rules(LogitsProcessorList(), ends, GenerationConfig(), rows, PROMPT, prompt.device, samples=False)
    inputs, plan = {"attention_mask": torch.ones_like(prompt), CACHE: DynamicCache()}, DraftPlan(tree)
    member = prefill(reader, model.drafter, plan, prompt, rules, inputs, Asked(plan))
    batch = Batch(model, reader, plan, execution, member, timed=True)
    calls.enter_context(contextlib.closing(batch))

    def take() -> dict[str, float]:
        seconds = {name: each for record in batch.step() for name, each in record.seconds.items()}
        if batch.runner is None and execution.name != "eager":
            refused: set[Any] = PROGRAMS[model].refused
            raise NotCaptured("", lasting=any(key[3] == tree for key in refused))
        return seconds

    return take


def _shape_hash(model: Any) -> str:
    """Of what a model's speed depends on besides the machine; heads that are trained further keep their costs."""
    base, digest = model.base, hashlib.sha256()
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
    for part in (type(base).__name__, base.config._attn_implementation, autocast, model.config.model_type):
        digest.update(f"{part} ".encode())
    for name, weight in (*base.named_parameters(), *model.drafter.named_parameters()):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode())
    return digest.hexdigest()[:16]


# ---- the file


def stored() -> dict[str, Measured]:
    """What the file holds; nothing where there is none, or a damaged one, with a notice."""
    try:
        contents: dict[str, Measured] = json.loads(FILE.read_text(encoding="utf-8"))
        for times in (times for steps in contents.values() for times in steps.values()):
            numbers = isinstance(times, list) and all(type(each) in (int, float) and 0 < each < 1e12 for each in times)
            if not numbers or len(times) not in (1, 3):
                raise ValueError(f"{str(times)[:20]!r} is no measurement")
        return contents
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        logger.warning_once(
            f"{str(FILE)!r}, which holds what steps cost here, cannot be read ({_in_one_line(error)}): they are "
            "measured again."
        )
        return {}


def clear() -> int:
    """Remove the file, and return of how many situations it held costs."""
    count = len(stored())
    _KNOWN.clear()
    FILE.unlink(missing_ok=True)
    return count


def _keep(situation: str, measured: Mapping[str, tuple[float, ...]]) -> Measured:
    """Write costs in the place of older ones, and return what is known of the situation then."""
    new = {name: [*values, time.time()] for name, values in measured.items()}
    known = _KNOWN[situation] = _KNOWN.get(situation, {}) | new  # whether the file can be written or not
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(FILE.with_suffix(".lock"), timeout=LOCK_SECONDS):
            everything = stored()
            everything[situation] = everything.pop(situation, {}) | new
            draft = FILE.with_name(f"{FILE.name}.{os.getpid()}")
            draft.write_text(json.dumps(dict([*everything.items()][-MOST_SITUATIONS:]), indent=1), encoding="utf-8")
            os.replace(draft, FILE)  # as a whole, or not at all
    except Exception as error:  # a full disk, no right to write, another process that hangs
        logger.warning_once(
            f"{str(FILE)!r} cannot be written ({_in_one_line(error)}): what steps cost here is measured again by the "
            "next process."
        )
    return known


def day(when: float) -> str:
    """A time of the file, as it is printed."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(when))


def _in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
