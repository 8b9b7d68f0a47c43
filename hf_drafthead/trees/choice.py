"""Which tree: a calibrated entry, else by what steps cost here, else a small tree; and whether a step drafts it.

Whether a call drafts must not depend on the clock, for in half precision another number of nodes rounds otherwise, and
the same call would give another text: entries, the file of costs and tokens decide.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import DraftTree, Tree, copies_alone
from hf_drafthead.trees.costs import StepCosts
from hf_drafthead.trees.entries import (
    CalibrationKey,
    copies_of,
    expected_of,
    gain_of,
    matching,
    nearest,
    tokens_of,
    tree_of,
)

logger = logging.get_logger(__name__)

# 8 nodes, the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
USUAL = 2.0  # tokens of a step where nothing was measured
UNMEASURED = 1.5  # cost of a step where that cannot be measured
UNLIKELY = 1.25  # as many times more than usual no text is expected to gain
ALLOWANCE, LOSS_SHARE = 1.0, 0.01  # of a call's steps that drafting may lose where only its cost is known
SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
PRIOR = 3  # steps as usual that the mean begins with
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials, the first for each step of cost
TIMED = 4  # steps of each kind in a call before their times say something
_TOLD: set[Hashable] = set()  # what this process was told of its choices


def choose(
    model: Any,
    reader: BaseReader,
    settings: DraftSettings,
    rows: int,
    execution: Execution,
    *,
    named: DraftPlan | None = None,
    copies: int | None = None,
    longest_match: int | None = None,
    texts: TextIndex | None = None,
) -> DraftPlan:
    """How a call drafts, or steps of so many rows, and why.

    Args:
        model: with `base` and `drafter`.
        reader: how to run the base.
        settings: of the call and the generation config.
        rows, execution: of the call.
        named: the plan with the tree that the call names.
        copies: tokens that each step copies from the text; None: as many as were calibrated, where no tree is named.
        longest_match, texts: of the copies, see `LookupTree`.

    Raises:
        ValueError: an entry is damaged, or a setting does not go with another.
    """
    key = CalibrationKey.of(model.base, model.drafter if settings.calibration else None, rows, execution.name)
    costs, plan = StepCosts(model, reader, key, execution), named
    if plan is None:
        limits = model.drafter.max_depth, draft_vocabulary(model.base, model.drafter)
        plan, calibrated_copies = Choice(settings, key, limits, costs).plan()
        copies = calibrated_copies or None if copies is None else copies
    if copies is None:
        return plan
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    plan = plan.with_lookup(copies, longest_match, vocabulary, texts)
    if key.on_cpu and plan.acceptance == "exact" and plan.switch is None and copies_alone(plan.tree):
        cost = costs([plan.tree])
        plan = replace(plan, switch=SwitchRule(UNMEASURED if cost is None else cost[0], USUAL, ALLOWANCE))
    return plan


class Choice:
    """The choice of a tree for a call that names none.

    Args:
        settings: of the call and the generation config.
        key: of the call.
        limits: how deep the heads guess, None without a limit, and among how many tokens.
        costs: of trees on this machine, in steps of the base.
    """

    def __init__(self, settings: DraftSettings, key: CalibrationKey, limits: tuple[int | None, int], costs: StepCosts):
        self.settings, self.key, self.limits, self.costs = settings, key, limits, costs

    def plan(self) -> tuple[DraftPlan, int]:
        """The plan, and the tokens that each of its steps copies from the text where that was calibrated."""
        settings, key = self.settings, self.key
        if (entry := matching(settings.calibration, key)) is not None:
            return self._of_entry(entry)
        entry = nearest(settings.calibration, key)
        plan, copies, first_choice = self._first_choice(entry)
        # the text of another acceptance depends on what is drafted, and a tree of the user's own is drafted as it is
        if key.on_cpu and settings.acceptance == "exact" and first_choice and isinstance(plan.tree, DraftTree):
            return self._that_pays(plan, entry), 0
        plan = replace(plan, why=self._not_calibrated(entry), base_decodes=False)
        if settings.draft_tree == AUTO and plan.switch is None:
            plan = replace(plan, switch=SwitchRule(UNMEASURED, USUAL))
        if settings.calibration or first_choice:
            self._tell(plan, f"{plan.why}: a tree of {plan.tree.num_nodes} nodes is a first choice; {self._advice()}")
        return plan, copies

    def _first_choice(self, entry: dict[str, Any] | None) -> tuple[DraftPlan, int, bool]:
        """The nearest entry's tree, else the generation config's, of which a CPU takes few nodes; its copies; and
        whether it is another one than the generation config's own."""
        settings, few = self.settings, small_paths(*self.limits, self.key.batch_size)
        named = isinstance(settings.draft_tree, str) and settings.draft_tree != "dynamic"
        small, paths = self.key.on_cpu or settings.draft_tree == AUTO, settings.draft_tree
        if entry is not None and entry.get("tree"):
            if not small:
                return *self._of_entry(entry), True
            paths = [list(path) for path in tree_of(entry, *self.limits, self.key).paths]
        elif named and small:
            paths = few
        if small and isinstance(paths, list):
            paths = beginning_of(paths, len(few))
        plan = replace(settings, draft_tree=paths).plan(*self.limits)
        return plan, 0, named or paths != settings.draft_tree

    def _of_entry(self, entry: dict[str, Any]) -> tuple[DraftPlan, int]:
        """The plan with the tree of an entry, and its copies."""
        tree, settings = tree_of(entry, *self.limits, self.key), self.settings
        copies = 0 if settings.acceptance == "rejection" else copies_of(entry)
        switched = settings.draft_tree == AUTO and (tree.max_depth or copies)
        why = f"calibrated for this call ({self.key}){gain_of(entry)}"
        if nothing := not tree.max_depth:
            why = f"no tree paid when this call was calibrated ({self.key}; draft_tree= drafts all the same)"
        switch = SwitchRule(*expected_of(entry)) if switched else None
        return replace(settings.with_tree(tree), why=why, switch=switch, base_decodes=nothing), copies

    def _that_pays(self, plan: DraftPlan, entry: dict[str, Any] | None) -> DraftPlan:
        """The plan with a switch where a text may gain by it on this machine; else with the root alone."""
        always, eager, trees = self.settings.draft_tree == AUTO, self.key.execution == "eager", [plan.tree]
        tokens = None if entry is None else tokens_of(entry, plan.tree.num_nodes)
        most = min(plan.tree.max_depth + 1, USUAL * UNLIKELY if tokens is None else tokens)
        measured = self.costs(trees)
        if measured is not None and measured[0] >= most and not always:  # which a busy machine may have said
            measured = self.costs(trees, True)
        takes, cost, watch = "What a step costs here could not be measured.", UNMEASURED, None
        if measured is not None:
            cost, watch = measured[0], Watch(self.costs, plan.tree)
            takes = f"On this machine a step takes with {plan.tree.num_nodes} nodes as long as {cost:.1f} of the base's"
            takes += f"{self.costs.in_words(trees)}."
        why = f"{self._not_calibrated(entry)}. {takes}"
        if always or cost < most:
            switch = SwitchRule(cost, USUAL if tokens is None else tokens, ALLOWANCE, watch)
            plan = replace(plan, switch=switch, why=why)
            nodes = f"{plan.tree.num_nodes} nodes are drafted as long as that pays on the text"
            self._tell(plan, f"{why} {nodes}; {self._advice()}")
            return plan
        # steps that are not eager take less, with the root alone, than the base's own decoding
        instead = "the base decodes by itself" if eager else f"steps are {self.key.execution} all the same"
        why += f" No text is expected to save that: nothing is drafted, {instead}"
        plan = replace(plan, tree=DraftTree.root_alone(), why=why, base_decodes=eager)
        instead = "draft_tree= drafts all the same, `hf-drafthead costs --clear` has steps measured anew"
        self._tell(plan, f"{why}; {instead}; {self._advice()}")
        return plan

    def _tell(self, plan: DraftPlan, line: str) -> None:
        """Tell a choice once in a process for all numbers of rows: what is drafted, and that nothing is."""
        kind = self.key._replace(batch_size=0), plan.tree.max_depth > 0
        if kind not in _TOLD:
            _TOLD.add(kind)
            logger.warning(line)

    def _advice(self) -> str:
        captured = " --captured" if self.key.execution == "compiled" else ""
        return f"run `hf-drafthead calibrate PATH --batch-size {self.key.batch_size}{captured}` to measure here."

    def _not_calibrated(self, entry: dict[str, Any] | None) -> str:
        """For what heads were calibrated instead of a call, as the beginning of a sentence."""
        key = self.key
        if entry is None:
            return f"These heads were not calibrated for this call ({key})"
        its = CalibrationKey.of_entry(entry)
        another = "another CPU" if key.on_cpu else "another GPU"
        if its.device != key.device:
            its = its._replace(device=another if its.device == "cpu" else f"{another} ({its.device})")
        return f"These heads were calibrated on {its}, and not for this call ({key})"


def small_paths(max_depth: int | None, vocabulary: int, rows: int = 1) -> list[list[int]]:
    """The rank paths of a small tree, for heads of these limits and so many rows."""
    paths = SMALL_TREE[: max(SMALL_STEP // rows, 2) - 1]
    return [path for path in paths if len(path) <= (max_depth or len(path)) and max(path) < vocabulary]


def beginning_of(paths: list[Any], count: int) -> list[list[int]]:
    """The first so many of some rank paths whose parents are among them."""
    first: list[list[int]] = []
    for path in map(list, paths):
        if len(first) < count and (len(path) == 1 or path[:-1] in first):
            first.append(path)
    return first


class Watch(NamedTuple):
    """What is told how long steps of a call took, where their costs were measured."""

    costs: StepCosts
    tree: Tree

    def __call__(self, cost: float) -> None:
        self.costs.contradict(self.tree, cost)


class SwitchRule(NamedTuple):
    """What a `DraftSwitch` starts from; the switch itself changes with every step, and belongs to one call."""

    cost: float
    usual: float
    allowance: float | None = None
    watch: Watch | None = None

    def begin(self) -> DraftSwitch:
        """The switch of a call."""
        return DraftSwitch(*self)


class DraftSwitch:
    """A call drafts as long as that pays on its text, else not for a while, ever longer; tokens alone decide.

    A step with the tree costs as much as `cost` steps of the root alone, which drafts nothing: it pays where it emits
    more tokens than that, in a moving mean over the steps of the call.

    Args:
        cost: seconds of a step with the tree, in steps of the root alone.
        usual: tokens that a step emits on usual text.
        allowance: steps of the base that drafting may cost the call, beside `LOSS_SHARE` of its steps; None: whatever
            the mean takes to fall, where `usual` was measured here.
        watch: is told what steps of this call have cost, for calls after it.

    >>> switch = DraftSwitch(cost=1.5, usual=2.0)
    >>> [switch.drafts() and not switch.note(1) for step in range(9)]
    [True, True, True, True, False, False, False, True, False]
    """

    def __init__(self, cost: float, usual: float, allowance: float | None = None, watch: Watch | None = None):
        self.cost, self.mean, self.steps = cost, max(usual, cost), PRIOR
        self.allowance = math.inf if allowance is None else allowance
        self.pause, self.left = 0, 0  # steps without drafting, of which so many are left
        self.watch, self.begun, self.drafted = watch, 0.0, False
        self.seconds: tuple[list[float], list[float]] = [], []  # of steps of the root alone, and with the tree

    def drafts(self) -> bool:
        """Whether to draft now; called once for each step."""
        if self.watch is not None:
            self._watch(self.watch)
        self.left -= 1
        self.allowance += LOSS_SHARE
        self.drafted = self.left < 0 and self.allowance >= self.cost - 1  # what a step without a right guess loses
        return self.drafted

    def note(self, emitted: float) -> None:
        """Take in how many tokens a step that drafted has emitted."""
        self.steps += 1
        self.allowance += emitted - self.cost
        self.mean += (TRIAL_SHARE if self.pause else max(SHARE, 1 / self.steps)) * (emitted - self.mean)
        longer = int(max(4 * self.pause, FIRST_PAUSE * self.cost))  # a trial that costs more comes later
        self.pause = 0 if self.mean >= self.cost else min(longer, LONGEST_PAUSE)
        self.left = self.pause

    def _watch(self, watch: Watch) -> None:
        now = perf_counter()
        if self.begun:
            self.seconds[self.drafted].append(now - self.begun)
        self.begun = now
        if min(map(len, self.seconds)) == TIMED:
            self.watch = None  # a call is judged once
            watch(min(self.seconds[True]) / max(min(self.seconds[False]), 1e-9))
