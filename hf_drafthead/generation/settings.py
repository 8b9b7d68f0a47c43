"""The settings of drafting, wherever they are given or stored, and the entry of a calibration that fits a call.

An entry is a JSON object of the generation config: the fields of a `CalibrationKey`, `tree` (rank paths, the most
valuable first; none where no tree pays), `lookup` (tokens that each step copies from the text, 0 where that does not
pay) and `measured` (the figures, see `calibrate`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers.utils import logging

from hf_drafthead.generation.lookup import HeldTexts, TextIndex
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree, copies_alone, resolve

logger = logging.get_logger(__name__)

DEFAULT_TREE = "mc_sim_7b_63"  # the 64 nodes that the Medusa and Hydra papers' code drafts
# 8 nodes, the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
AUTO = "auto"  # draft, or do not draft for a while
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
USUAL = 2.0  # tokens of a step where nothing was measured
UNMEASURED = 1.5  # cost of a step where that cannot be measured
ALLOWANCE, LOSS_SHARE = 1.0, 0.01  # of a call's steps that drafting may lose where only its cost is known
UNLIKELY = 1.25  # as many times more than usual no text is expected to gain
ACCEPTANCES = ("exact", "rejection", "typical")

SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
PRIOR = 3  # steps as usual that the mean begins with
EXECUTIONS = ("eager", "compiled", "recorded")  # how a call runs its steps; recorded: as CUDA graphs
# by drafter: what its weights were when they were hashed, and the hash
_HASHED: WeakKeyDictionary[Any, tuple[Any, str | None]] = WeakKeyDictionary()
Costs = Callable[[Sequence[Tree]], Sequence[float] | None]  # see `StepCosts`
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials, the first for each step of cost


class DraftSwitch:
    """A call drafts as long as that pays on its text, else not for a while, ever longer; tokens alone decide.

    A step with the tree costs as much as `cost` steps of the root alone, which drafts nothing: it pays where it emits
    more tokens than that, in a moving mean over the steps of the call.

    Args:
        cost: seconds of a step with the tree, in steps of the root alone.
        usual: tokens that a step emits on usual text.
        allowance: steps of the base that drafting may cost the call, beside `LOSS_SHARE` of its steps; None: whatever
            the mean takes to fall, where `usual` was measured here.

    >>> switch = DraftSwitch(cost=1.5, usual=2.0)
    >>> [switch.drafts() and not switch.note(1) for step in range(9)]
    [True, True, True, True, False, False, False, True, False]
    """

    def __init__(self, cost: float, usual: float, allowance: float | None = None):
        self.cost, self.mean, self.steps = cost, max(usual, cost), PRIOR
        self.allowance = math.inf if allowance is None else allowance
        self.pause, self.left = 0, 0  # steps without drafting, of which so many are left

    def drafts(self) -> bool:
        """Whether to draft now; called once for each step."""
        self.left -= 1
        self.allowance += LOSS_SHARE
        return self.left < 0 and self.allowance >= self.cost - 1  # what a step without a right guess loses

    def note(self, emitted: float) -> None:
        """Take in how many tokens a step that drafted has emitted."""
        self.steps += 1
        self.allowance += emitted - self.cost
        self.mean += (TRIAL_SHARE if self.pause else max(SHARE, 1 / self.steps)) * (emitted - self.mean)
        longer = int(max(4 * self.pause, FIRST_PAUSE * self.cost))  # a trial that costs more comes later
        self.pause = 0 if self.mean >= self.cost else min(longer, LONGEST_PAUSE)
        self.left = self.pause


class SwitchRule(NamedTuple):
    """What a `DraftSwitch` starts from; the switch itself changes with every step, and belongs to one call."""

    cost: float
    usual: float
    allowance: float | None = None


@dataclass(frozen=True)
class DraftPlan:
    """How one call drafts and accepts, once everything about the call is known.

    tree: that its steps fill; acceptance, posterior_threshold, posterior_alpha: see `DraftSettings`; copies: tokens
    that each step copies from the text where the entry that fits says so; texts: others to copy from; switch: of a call
    that drafts only while that pays; why_none: why the base decodes by itself where the tree is the root alone, fit for
    the end of a sentence; empty where steps go on without guesses.
    """

    tree: Tree
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    copies: int = 0
    texts: TextIndex | None = None
    switch: SwitchRule | None = None
    why_none: str = "no tree paid when this call was calibrated (draft_tree= drafts all the same)"

    def with_lookup(
        self, copies: int, longest_match: int | None, vocabulary: int, texts: TextIndex | None = None
    ) -> DraftPlan:
        """The same plan with copies from the text, and from other texts, in the tree, see `LookupTree`.

        Raises:
            ValueError: numbers of tokens that are none, or an acceptance that must know how each node was drawn.
        """
        if self.acceptance == "rejection":
            name = "prompt_lookup_num_tokens" if texts is None else "lookup_texts"
            raise ValueError(
                f"{name} is given with acceptance='rejection', which must know how each node was drawn: leave one of "
                "them out."
            )
        assert not isinstance(self.tree, LookupTree)
        return replace(self, tree=LookupTree.around(self.tree, copies, longest_match, vocabulary), texts=texts)

    def texts_on(self, device: torch.device) -> HeldTexts | None:
        """The other texts on a device; None where there are none."""
        return None if self.texts is None else self.texts.on(device)

    def while_copies_pay(self, key: CalibrationKey, costs: Costs) -> DraftPlan:
        """The plan with a switch where copies from the text are all that steps of a CPU guess."""
        judged = key.on_cpu and self.acceptance == "exact" and self.switch is None
        if not judged or not copies_alone(self.tree):
            return self
        measured = costs([self.tree])
        return replace(self, switch=SwitchRule(UNMEASURED if measured is None else measured[0], USUAL, ALLOWANCE))


@dataclass(frozen=True)
class DraftSettings:
    """How calls draft and accept, as a generation config stores it.

    Args:
        draft_tree, acceptance, posterior_threshold, posterior_alpha: see `DraftHeadGenerationMixin.generate`.
        calibration: which tree was measured to be the fastest, an entry for each situation (see `generation.settings`);
            the entry that fits a call comes before `draft_tree`.

    Raises:
        TypeError: a setting of another type.
        ValueError: a setting that is out of range.
    """

    draft_tree: Any = DEFAULT_TREE
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    calibration: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.acceptance not in ACCEPTANCES:
            text = isinstance(self.acceptance, str)
            kind = "" if text else f" ({type(self.acceptance).__name__})"
            raise (ValueError if text else TypeError)(
                f"acceptance is {self.acceptance!r}{kind}: expected one of {', '.join(map(repr, ACCEPTANCES))}."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a number from 0 to 1.")
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}: expected a number from 0 to 1.")
        entries = self.calibration
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TypeError(
                f"calibration is {entries!r} ({type(entries).__name__}): expected a list of entries as "
                "`hf-drafthead calibrate` writes them."
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings, as a generation config has them."""
        return tuple(setting.name for setting in fields(cls))

    @classmethod
    def stored_in(cls, config: Any) -> dict[str, Any]:
        """The settings that a generation config, or its dict, holds; not checked."""
        stored = config if isinstance(config, Mapping) else vars(config)
        return {name: stored[name] for name in cls.names() if stored.get(name) is not None}

    @classmethod
    def from_config(cls, config: Any, **overrides: Any) -> DraftSettings:
        """The settings given, else the generation config's, else the defaults; None is a setting not given.

        Raises:
            TypeError, ValueError: as the class does.
        """
        arguments = {name: value for name, value in overrides.items() if value is not None}
        settings = cls(**{**cls.stored_in(config), **arguments})
        for name in ("posterior_threshold", "posterior_alpha"):
            if name in arguments and settings.acceptance != "typical":
                raise ValueError(
                    f"{name} is {arguments[name]}, but acceptance is {settings.acceptance!r}: pass "
                    f"acceptance='typical', or leave {name} out."
                )
        return settings

    def plan(self, max_depth: int | None, vocabulary: int) -> DraftPlan:
        """The plan of a call with the tree that `draft_tree` names, see `resolve`; "auto" names none."""
        return self._with(resolve(self.draft_tree, max_depth, vocabulary))

    def plan_for(
        self, key: CalibrationKey, max_depth: int | None, vocabulary: int, costs: Costs = lambda trees: None
    ) -> DraftPlan:
        """The plan of a call that names no tree: with what was measured for it, else with a first choice.

        A first choice, told in one notice that names the command, is the tree of the nearest entry, else `draft_tree`,
        of which a CPU and "auto" take 8 nodes, of more rows fewer. Steps of a CPU are judged by what they cost here: of
        the entry's tree and 8 nodes the one that promises most is drafted as long as that pays on the text, and none
        where none can pay. The plan also says how many tokens each step copies from the text, which rejection does not.

        Args:
            key: of the call.
            max_depth, vocabulary: see `resolve`.
            costs: of trees on this machine, in steps of the base; None where they cannot be measured.

        Raises:
            ValueError: an entry is damaged.
        """
        if (entry := matching(self.calibration, key)) is not None:
            return self._of_entry(entry, max_depth, vocabulary, key)
        entry = nearest(self.calibration, key)
        choices = [] if entry is None else [self._of_entry(entry, max_depth, vocabulary, key)]
        small = SMALL_TREE[: max(SMALL_STEP // key.batch_size, 2) - 1]
        cut = self._cut(small, max_depth, vocabulary) if key.on_cpu or self.draft_tree == AUTO else self
        if entry is None or key.on_cpu:
            choices.append(cut.plan(max_depth, vocabulary))
        # the text of another acceptance depends on what is drafted, and a tree of the user's own is drafted as it is
        if key.on_cpu and self.acceptance == "exact" and (entry is not None or cut is not self):
            return self._that_pays(choices, entry, key, costs)
        chosen = choices[0]
        if self.draft_tree == AUTO and chosen.switch is None and (chosen.tree.max_depth or chosen.copies):
            chosen = replace(chosen, switch=SwitchRule(UNMEASURED, USUAL))
        named = isinstance(self.draft_tree, str) and self.draft_tree != "dynamic"
        nodes = f"a tree of {chosen.tree.num_nodes} nodes is used"
        if entry is not None:
            nodes = f"the tree of that calibration, {chosen.tree.num_nodes} node(s), is a first choice"
        if entry is not None or self.calibration or cut is not self or named:
            logger.warning_once(f"{_not_calibrated(entry, key)}: {nodes}; {_advice(key)}")
        return chosen

    def _of_entry(
        self, entry: dict[str, Any], max_depth: int | None, vocabulary: int, key: CalibrationKey
    ) -> DraftPlan:
        """The plan with the tree, and the copies, of an entry."""
        tree = tree_of(entry, max_depth, vocabulary, key)
        copies = 0 if self.acceptance == "rejection" else copies_of(entry)
        switched = self.draft_tree == AUTO and (tree.max_depth or copies)
        return replace(self._with(tree), copies=copies, switch=SwitchRule(*expected_of(entry)) if switched else None)

    def _that_pays(
        self, choices: list[DraftPlan], entry: dict[str, Any] | None, key: CalibrationKey, costs: Costs
    ) -> DraftPlan:
        """Of some plans, the small tree's the last, the one that promises most on this machine; or the root alone."""
        choices = [choice for choice in choices if isinstance(choice.tree, DraftTree) and choice.tree.max_depth]
        if not choices:
            return self._with(DraftTree.root_alone())
        usual = [USUAL] * len(choices)
        if entry is not None:
            tokens_per_step = [tokens_of(entry, choice.tree.num_nodes) for choice in choices]
            usual = [USUAL if tokens is None else tokens for tokens in tokens_per_step]
        trees = list(dict.fromkeys(choice.tree for choice in choices))
        measured = costs(trees)
        cost_of = dict(zip(trees, [UNMEASURED] * len(trees) if measured is None else measured))
        rules = [SwitchRule(cost_of[choice.tree], tokens, ALLOWANCE) for choice, tokens in zip(choices, usual)]
        chosen, rule = max(zip(choices, rules), key=lambda pair: pair[1].usual / pair[1].cost)
        sizes = [f"with {tree.num_nodes} nodes as long as {cost:.1f} of the base's" for tree, cost in cost_of.items()]
        takes = "" if measured is None else f" On this machine a step takes {', '.join(sizes)}."
        most = min(chosen.tree.max_depth + 1, rule.usual * (1.0 if entry is not None else UNLIKELY))
        if self.draft_tree != AUTO and rule.cost >= most:
            why = f"{_not_calibrated(entry, key)}.{takes} No text is expected to save that; {_advice(key)}".rstrip(".")
            if key.execution != "eager":  # of the root alone they take less than the base's own decoding
                logger.warning_once(f"{why}. Nothing is drafted; steps are {key.execution} all the same.")
                why = ""
            return replace(chosen, tree=DraftTree.root_alone(), copies=0, why_none=why)
        drafts = f"{chosen.tree.num_nodes} nodes are drafted as long as that pays on the text; {_advice(key)}"
        logger.warning_once(f"{_not_calibrated(entry, key)}.{takes} {drafts}")
        return replace(chosen, switch=rule)

    def _cut(self, small: list[list[int]], max_depth: int | None, vocabulary: int) -> DraftSettings:
        """The same settings without the nodes by which a tree exceeds a small one, which replaces published ones."""
        if isinstance(self.draft_tree, str) and self.draft_tree != "dynamic":
            fits = [path for path in small if len(path) <= (max_depth or len(path)) and max(path) < vocabulary]
            return replace(self, draft_tree=fits)
        if not isinstance(self.draft_tree, list) or len(self.draft_tree) <= len(small):
            return self
        first: list[list[int]] = []
        for path in map(list, self.draft_tree):  # those whose parent is there
            if len(first) < len(small) and (len(path) == 1 or path[:-1] in first):
                first.append(path)
        return replace(self, draft_tree=first)

    def _with(self, tree: Tree) -> DraftPlan:
        """The plan with this tree, where the acceptance can walk it."""
        plan = DraftPlan(tree, self.acceptance, self.posterior_threshold, self.posterior_alpha)
        if self.acceptance != "rejection":
            return plan
        if not isinstance(tree, DraftTree):
            raise ValueError(
                f"draft_tree is {self.draft_tree!r}, but acceptance='rejection' must know how each node was drawn: "
                "give a published tree's name or rank paths, or leave acceptance out."
            )
        # rejection takes the children of a node in the order in which they were drawn, and must know every draw
        return replace(plan, tree=tree.without_gaps())


def _advice(key: CalibrationKey) -> str:
    captured = " --captured" if key.execution == "compiled" else ""
    return f"run `hf-drafthead calibrate PATH --batch-size {key.batch_size}{captured}` to measure here."


def _not_calibrated(entry: dict[str, Any] | None, key: CalibrationKey) -> str:
    """For what heads were calibrated instead of a call, as the beginning of a sentence."""
    if entry is None:
        return f"These heads were not calibrated for this call ({key})"
    its = CalibrationKey.of_entry(entry)
    another = "another CPU" if key.on_cpu else "another GPU"
    where = its.device if its.device == key.device else another if its.device == "cpu" else f"{another} ({its.device})"
    return f"These heads were calibrated on {its._replace(device=where)}, and not for this call ({key})"


class CalibrationKey(NamedTuple):
    """What the speed of a tree depends on, besides the text.

    device: the GPU's name, or the CPU's; threads: that torch uses on a CPU, None on a GPU; dtype: of the base;
    batch_size: rows; execution: one of EXECUTIONS; heads_hash: of the drafter's weights, see `drafter_hash`.
    """

    device: str
    threads: int | None
    dtype: str
    batch_size: int
    execution: str
    heads_hash: str | None

    @classmethod
    def of(cls, base: Any, drafter: torch.nn.Module | None, batch_size: int, execution: str) -> CalibrationKey:
        """The key of a call; without a drafter, whose hash takes its time, that of any heads."""
        on_cpu = base.device.type == "cpu"
        device, threads = (cpu_name(), torch.get_num_threads()) if on_cpu else (device_name(base.device), None)
        dtype = str(base.dtype).removeprefix("torch.")
        heads = None if drafter is None else drafter_hash(drafter)
        return cls(device, threads, dtype, batch_size, execution, heads)

    @classmethod
    def of_entry(cls, entry: dict[str, Any]) -> CalibrationKey:
        """The key of an entry; entries of earlier versions say "cpu" for every CPU, and `captured`.

        Raises:
            ValueError: a field is missing, or of another type.
        """
        device, threads = entry.get("device"), entry.get("threads", 0 if entry.get("device") == "cpu" else None)
        execution = entry.get("execution")
        if execution is None and isinstance(entry.get("captured"), bool):
            # on a GPU every call that was not compiled was recorded
            execution = "compiled" if entry["captured"] else "eager" if device == "cpu" else "recorded"
        key = cls(device, threads, entry.get("dtype"), entry.get("batch_size"), execution, entry.get("heads_hash"))  # type: ignore[arg-type]
        for name, value in key._asdict().items():
            kinds: Any = {"threads": int | None, "batch_size": int, "heads_hash": str | None}.get(name, str)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise damaged(entry, TypeError(f"its field {name!r} is {str(value)[:20]!r}"))
        if key.batch_size < 1 or key.execution not in EXECUTIONS:
            raise damaged(entry, ValueError(f"batch size {key.batch_size}, execution {key.execution[:20]!r}"))
        return key

    @property
    def on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.threads is not None

    def __str__(self) -> str:
        device = f"{self.device} with {self.threads} thread(s)" if self.threads else self.device
        return f"{device}, {self.dtype}, batch size {self.batch_size}, {self.execution} steps"


def matching(entries: Sequence[dict[str, Any]], key: CalibrationKey) -> dict[str, Any] | None:
    """The entry that was measured for this key; None if there is none.

    Raises:
        ValueError: an entry is damaged.
    """
    return next((entry for entry in entries if CalibrationKey.of_entry(entry) == key), None)


def nearest(entries: Sequence[dict[str, Any]], key: CalibrationKey) -> dict[str, Any] | None:
    """The entry of these heads that is a first choice for a key; None if there is none.

    The same kind of device comes first, then the nearest batch size, the execution, the dtype, the device, its threads,
    and fewer nodes. A GPU's entry is none for a CPU, and the other way round. That no tree pays for some rows says
    nothing about fewer.

    Raises:
        ValueError: an entry is damaged.
    """
    candidates = []
    for entry in entries:
        its, paths = CalibrationKey.of_entry(entry), entry.get("tree")
        # in another dtype the same weights are rounded, and have another hash
        other_heads = None not in (its.heads_hash, key.heads_hash) and its.heads_hash != key.heads_hash
        if (its.dtype == key.dtype and other_heads) or its.on_cpu != key.on_cpu:
            continue
        if not paths and its.batch_size > key.batch_size:
            continue
        rows = abs(math.log(its.batch_size / key.batch_size))
        differs = (its.execution != key.execution, its.dtype != key.dtype, its.device != key.device)
        threads = abs((its.threads or 0) - (key.threads or 0))
        candidates.append(((rows, *differs, threads, len(paths or [])), entry))
    return min(candidates, key=lambda pair: pair[0])[1] if candidates else None


def tree_of(
    entry: dict[str, Any], max_depth: int | None, vocabulary: int, key: CalibrationKey | None = None
) -> DraftTree:
    """The tree of an entry; without paths it is the root alone.

    Args:
        entry: of a calibration.
        max_depth, vocabulary: see `resolve`.
        key: of a call; with more rows than were measured, a smaller tree, so that a step verifies as many tokens.

    Raises:
        ValueError: the entry holds none, or one that these heads cannot fill.
    """
    try:
        paths = entry.get("tree")
        if not isinstance(paths, list):
            raise TypeError(f"its tree is of type {type(paths).__name__}, expected a list of rank paths.")
        if not paths:
            return DraftTree.root_alone()
        tree = DraftTree.resolve(paths, max_depth, vocabulary)
        measured = CalibrationKey.of_entry(entry).batch_size if key is not None else 0
        if key is None or measured >= key.batch_size:
            return tree
        # every beginning of the paths is a tree
        return DraftTree(paths[: max(tree.num_nodes * measured // key.batch_size, 2) - 1])
    except (TypeError, ValueError) as error:
        raise damaged(entry, error) from None


def copies_of(entry: dict[str, Any]) -> int:
    """Tokens that each step copies from the text; an entry of an earlier version says nothing, and copies none.

    Raises:
        ValueError: the entry holds something else.
    """
    copies = entry.get("lookup", 0)
    if isinstance(copies, bool) or not isinstance(copies, int) or copies < 0:
        raise damaged(entry, TypeError(f"its lookup is {str(copies)[:20]!r}"))
    return copies


def expected_of(entry: dict[str, Any]) -> tuple[float, float]:
    """What a step with the entry's tree costs in steps of the base, and the tokens that it emits.

    Raises:
        ValueError: the entry does not hold both.
    """
    try:
        measured = entry["measured"]
        if "step_cost" not in measured:  # of an earlier version
            measured = {**measured, "step_cost": measured["tree_seconds"] / measured["base_step_seconds"]}
        cost, tokens = (float(measured[name]) for name in ("step_cost", "tokens_per_step"))
        if not (0 < cost < math.inf and 0 < tokens < math.inf):
            raise ValueError(f"a step of {tokens} tokens that costs {cost} was never measured")
        return cost, tokens
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise damaged(entry, error) from None


def tokens_of(entry: dict[str, Any], nodes: int) -> float | None:
    """Tokens of a step with so many nodes, as far as an entry knows: of its own tree, or of the best that was timed."""
    measured = entry.get("measured")
    if not isinstance(measured, dict):
        return None
    timed = measured.get("candidates")
    rows = [row for row in (timed if isinstance(timed, list) else []) if isinstance(row, list) and len(row) > 2]
    pairs = [(size, tokens) for size, _, tokens, *_ in rows] + [
        (len(entry["tree"]) + 1, measured.get("tokens_per_step"))
    ]
    numbers = [pair for pair in pairs if all(type(value) in (int, float) and 0 < value < math.inf for value in pair)]
    of_own = [tokens for size, tokens in numbers[-1:] if size == nodes]
    return max(of_own or [tokens for size, tokens in numbers if size <= nodes], default=None)


def damaged(entry: dict[str, Any], error: Exception) -> ValueError:
    """One line about an entry that cannot be used."""
    device, size = (str(entry.get(name))[:60] for name in ("device", "batch_size"))
    return ValueError(
        f"the calibration entry for {device}, batch size {size}, is damaged "
        f"({' '.join(str(error).split())[:300]}): run `hf-drafthead calibrate` again, or give draft_tree=."
    )


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32.

    The same values therefore give the same hash in any dtype.

    Args:
        tensors: name and tensor, in any order.
        dtype: the type that fractions are rounded to before; None leaves them as they are.

    >>> weight = torch.tensor([1.0, 2.5])
    >>> heads_hash([("a", weight)]) == heads_hash([("a", weight.bfloat16())])
    True
    >>> heads_hash([("a", weight)]) == heads_hash([("b", weight)])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        rounded = tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        values = rounded.to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def drafter_hash(drafter: torch.nn.Module) -> str | None:
    """`heads_hash` of what a checkpoint holds of a drafter, kept until it changes; None where weights lie elsewhere."""
    stored = drafter.state_dict(keep_vars=True).keys()
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = [(f"drafter.{name}", weight) for name, weight in tensors if name in stored]
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in weights]
    hashed = _HASHED.get(drafter)
    if hashed is None or hashed[0] != state:
        elsewhere = any(weight.is_meta for _, weight in weights)
        hashed = _HASHED[drafter] = state, None if elsewhere else heads_hash(weights)
    return hashed[1]


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def cpu_name() -> str:
    """The model of the CPU, as the operating system names it.

    >>> len(cpu_name()) > 0 and cpu_name() != "cpu"
    True
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine() or "unknown CPU"
