"""The settings of drafting: their names, defaults and checks, wherever they are given or stored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from transformers.utils import logging

from hf_drafthead.generation.entries import CalibrationKey, copies_of, expected_of, matching, nearest, tree_of
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree, resolve

logger = logging.get_logger(__name__)

DEFAULT_TREE = "mc_sim_7b_63"  # the 64 nodes that the Medusa and Hydra papers' code drafts
# 8 nodes, the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
AUTO = "auto"  # draft, or do not draft for a while
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
UNMEASURED = 1.5, 2.0  # cost and tokens of a step with "auto" where nothing was measured
ACCEPTANCES = ("exact", "rejection", "typical")

SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
PRIOR = 3  # steps as usual that the mean begins with
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials, the first for each step of cost


class DraftSwitch:
    """`draft_tree="auto"`: a call drafts as long as that pays on its text, else not for a while, ever longer.

    A step with the tree costs as much as `cost` steps of the root alone, which drafts nothing: it pays where it emits
    more tokens than that, in a moving mean over the steps of the call.

    Args:
        cost: seconds of a step with the tree, in steps of the root alone; None: as the steps of the call turn out, of
            which the shortest of either kind counts (`time`).
        usual: tokens that a step emits on usual text.

    >>> switch = DraftSwitch(cost=1.5, usual=2.0)
    >>> [switch.drafts() and not switch.note(1) for step in range(9)]
    [True, True, True, True, False, False, False, True, False]
    """

    def __init__(self, cost: float | None, usual: float):
        self.cost, self.mean, self.steps = cost, max(usual, cost or 0), PRIOR
        self.pause, self.left = 0, 0  # steps without drafting, of which so many are left
        self.early: list[float] = []  # tokens of the steps before the cost is known
        self.shortest: dict[bool, float] | None = None if cost is not None else {}  # by whether a step drafts

    def drafts(self) -> bool:
        """Whether to draft now; called once for each step."""
        self.left -= 1
        return self.left < 0

    def time(self, drafted: bool, seconds: float) -> None:
        """Take in how long a step has taken."""
        if self.shortest is None:
            return
        if drafted not in self.shortest:  # the first step of a kind also makes what the later ones use
            self.shortest[drafted] = math.inf
            return
        self.shortest[drafted] = min(self.shortest[drafted], seconds)
        if len(self.shortest) > 1 and max(self.shortest.values()) < math.inf:
            known, self.cost = self.cost is not None, self.shortest[True] / self.shortest[False]
            if self.early and not known:
                self.note(sum(self.early) / len(self.early))

    def note(self, emitted: float) -> None:
        """Take in how many tokens a step that drafted has emitted."""
        if self.cost is None:  # until steps that do not draft have said what one costs
            self.early.append(emitted)
            self.left = FIRST_PAUSE if len(self.early) > 1 else 0
            return
        self.steps += 1
        self.mean += (TRIAL_SHARE if self.pause else max(SHARE, 1 / self.steps)) * (emitted - self.mean)
        longer = int(max(4 * self.pause, FIRST_PAUSE * self.cost))  # a trial that costs more comes later
        self.pause = 0 if self.mean >= self.cost else min(longer, LONGEST_PAUSE)
        self.left = self.pause


class SwitchRule(NamedTuple):
    """What a `DraftSwitch` starts from; the switch itself changes with every step, and belongs to one call."""

    cost: float | None
    usual: float


@dataclass(frozen=True)
class DraftPlan:
    """How one call drafts and accepts, once everything about the call is known.

    tree: that its steps fill; acceptance, posterior_threshold, posterior_alpha: see `DraftSettings`; copies: tokens
    that each step copies from the text where the entry that fits says so; switch: of a call that drafts only while that
    pays.
    """

    tree: Tree
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    copies: int = 0
    switch: SwitchRule | None = None

    def with_lookup(self, copies: int, longest_match: int | None, vocabulary: int) -> DraftPlan:
        """The same plan with copies from the text in the tree, see `LookupTree`.

        Raises:
            ValueError: numbers of tokens that are none, or an acceptance that must know how each node was drawn.
        """
        if self.acceptance == "rejection":
            raise ValueError(
                "prompt_lookup_num_tokens is given with acceptance='rejection', which must know how each node was "
                "drawn: leave one of them out."
            )
        assert not isinstance(self.tree, LookupTree)
        return replace(self, tree=LookupTree.around(self.tree, copies, longest_match, vocabulary))


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

    def plan_for(self, key: CalibrationKey, max_depth: int | None, vocabulary: int) -> DraftPlan:
        """The plan of a call that names no tree: with what was measured for it, else with a first choice.

        A first choice, told in one notice that names the command, is the tree of the nearest entry, else `draft_tree`,
        of which a CPU and "auto" take 8 nodes, of more rows fewer. With "auto" the plan has a switch that expects what
        was measured; on a CPU also where nothing was, with a switch that measures, so that no call takes much longer
        than the base. It also says how many tokens each step copies from the text, which rejection does not.

        Raises:
            ValueError: an entry is damaged.
        """
        entry = matching(self.calibration, key) or nearest(self.calibration, key)
        captured = " --captured" if key.execution == "compiled" else ""
        advice = f"run `hf-drafthead calibrate PATH --batch-size {key.batch_size}{captured}` to measure here."
        if entry is not None:
            tree = tree_of(entry, max_depth, vocabulary, key)
            if (measured := CalibrationKey.of_entry(entry)) != key:
                logger.warning_once(
                    f"These heads were calibrated for {measured}, and not for this call ({key}): the tree of that "
                    f"calibration, {tree.num_nodes} node(s), is a first choice; {advice}"
                )
            copies = 0 if self.acceptance == "rejection" else copies_of(entry)
            switched = self.draft_tree == AUTO and (tree.max_depth or copies)
            return replace(
                self._with(tree), copies=copies, switch=SwitchRule(*expected_of(entry)) if switched else None
            )
        small = SMALL_TREE[: max(SMALL_STEP // key.batch_size, 2) - 1]
        cut = self._cut(small, max_depth, vocabulary) if key.on_cpu or self.draft_tree == AUTO else self
        chosen = cut.plan(max_depth, vocabulary)
        eager = key.on_cpu and key.execution == "eager"  # where the host can time a step
        if self.draft_tree == AUTO or (eager and cut is not self and self.acceptance == "exact"):
            cost, usual = UNMEASURED
            chosen = replace(chosen, switch=SwitchRule(None if eager else cost, usual))
        named = isinstance(self.draft_tree, str) and self.draft_tree != "dynamic"
        if self.calibration or cut is not self or named:
            logger.warning_once(
                f"These heads were not calibrated for this call ({key}): a tree of {chosen.tree.num_nodes} nodes is "
                f"used; {advice}"
            )
        return chosen

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
        how = {"acceptance": self.acceptance, "posterior_threshold": self.posterior_threshold}
        plan = DraftPlan(tree, **how, posterior_alpha=self.posterior_alpha)
        if self.acceptance != "rejection":
            return plan
        if not isinstance(tree, DraftTree):
            raise ValueError(
                f"draft_tree is {self.draft_tree!r}, but acceptance='rejection' must know how each node was drawn: "
                "give a published tree's name or rank paths, or leave acceptance out."
            )
        # rejection takes the children of a node in the order in which they were drawn, and must know every draw
        return replace(plan, tree=tree.without_gaps())
