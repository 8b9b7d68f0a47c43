"""The settings of drafting: their names, defaults and checks, wherever they are given or stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from hf_drafthead.generation.entries import (
    CalibrationKey,
    copies_of,
    expected_of,
    matching,
    nearest,
    tokens_of,
    tree_of,
)
from hf_drafthead.generation.text_index import HeldTexts, TextIndex
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
        calibration: which tree was measured to be the fastest, an entry for each situation (see `generation.entries`);
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
    def from_config(cls, config: Any, **given: Any) -> DraftSettings:
        """The settings given, else the generation config's, else the defaults; None is a setting not given.

        Raises:
            TypeError, ValueError: as the class does.
        """
        arguments = {name: value for name, value in given.items() if value is not None}
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
        if entry is not None:
            nodes = f"the tree of that calibration, {chosen.tree.num_nodes} node(s), is a first choice"
            logger.warning_once(f"{_not_calibrated(entry, key)}: {nodes}; {_advice(key)}")
        elif self.calibration or cut is not self or named:
            nodes = f"a tree of {chosen.tree.num_nodes} nodes is used"
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
            known = [tokens_of(entry, choice.tree.num_nodes) for choice in choices]
            usual = [USUAL if tokens is None else tokens for tokens in known]
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
