"""Which tree: a calibrated entry, else by what steps cost here, else a small tree; and whether a step drafts it.

Whether a call drafts must not depend on the clock, for in half precision another number of nodes rounds otherwise, and
the same call would give another text: entries, the file of costs and tokens decide.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from transformers.utils import logging

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import DraftTree, copies_alone
from hf_drafthead.trees.costs import StepCosts
from hf_drafthead.trees.entries import CalibrationKey, copies_of, expected_of, matching, tree_of
from hf_drafthead.trees.switch import SwitchRule

logger = logging.get_logger(__name__)

# 8 nodes, the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
USUAL = 2.0  # tokens of a step where nothing was measured
UNMEASURED = 1.5  # cost of a step where that cannot be measured
UNLIKELY = 1.25  # as many times more than usual no text is expected to gain, and no tree of more nodes
ALLOWANCE = 1.0  # steps of the base that drafting may lose in a call where only its cost is known
Limits = tuple[int | None, int]  # how deep heads guess, None without a limit, and among how many tokens
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
        settings: of the call and the generation config.
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
        entry = matching(settings.calibration, key)
        if entry is None:
            plan = without_entry(settings, key, limits, costs)
        else:
            plan, calibrated_copies = of_entry(entry, settings, key, limits)
            copies = calibrated_copies or None if copies is None else copies
    if copies is None:
        return plan
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    plan = plan.with_lookup(copies, longest_match, vocabulary, texts)
    if key.on_cpu and plan.acceptance == "exact" and plan.switch is None and copies_alone(plan.tree):
        cost = costs([plan.tree])
        plan = replace(plan, switch=SwitchRule(UNMEASURED if cost is None else cost[0], USUAL, ALLOWANCE))
    return plan


def of_entry(
    entry: dict[str, Any], settings: DraftSettings, key: CalibrationKey, limits: Limits
) -> tuple[DraftPlan, int]:
    """The plan with the tree of the entry for this call, and the tokens that each step copies from the text."""
    tree = tree_of(entry, *limits)
    copies = copies_of(entry)
    measured = entry.get("measured") or {}
    speedup, interval = measured.get("speedup"), measured.get("interval")
    why = f"calibrated for this call ({key})"
    why += f", {speedup:.2f} times as fast as the base" if isinstance(speedup, float) else ""
    why += f" ({interval[0]:.2f} to {interval[1]:.2f})" if isinstance(interval, list) and len(interval) == 2 else ""
    if nothing := not tree.max_depth:
        why = f"no tree paid when this call was calibrated ({key}; draft_tree= drafts all the same)"
    switched = settings.draft_tree == AUTO and (tree.max_depth or copies)
    switch = SwitchRule(*expected_of(entry)) if switched else None
    return replace(settings.with_tree(tree), why=why, switch=switch, base_decodes=nothing), copies


def without_entry(settings: DraftSettings, key: CalibrationKey, limits: Limits, costs: StepCosts) -> DraftPlan:
    """The plan of a call for which nothing was calibrated: of the first nodes of a tree on a CPU, elsewhere of all of
    them where they cost little more; with none where no text is expected to save what a step costs here."""
    auto, why = settings.draft_tree == AUTO, f"These heads were not calibrated for this call ({key})"
    few = first_paths(settings.draft_tree, limits, key.batch_size)
    if few is None:  # a tree of the user's own is drafted as it is
        return replace(settings.plan(*limits), why=why)
    plans = [replace(settings, draft_tree=few).plan(*limits)]
    if not key.on_cpu and not auto:
        plans.append(settings.plan(*limits))
    captured = " --captured" if key.execution == "compiled" else ""
    advice = f"run `hf-drafthead calibrate PATH --batch-size {key.batch_size}{captured}` to measure here."
    if settings.acceptance != "exact":  # whose text depends on what is drafted
        plan = replace(plans[-1], why=why, switch=SwitchRule(UNMEASURED, USUAL) if auto else None)
        _tell(key, plan, f"{why}: a tree of {plan.tree.num_nodes} nodes is a first choice; {advice}")
        return plan
    trees = [plan.tree for plan in plans]
    most = min(trees[0].max_depth + 1, USUAL * UNLIKELY)  # tokens of a step that no text is expected to exceed
    measured = costs(trees)
    if measured is not None and measured[0] >= most and not auto:  # which a busy machine may have said
        measured = costs(trees, True)
    plan, cost, takes = plans[0], UNMEASURED, "What a step costs here could not be measured."
    if measured is not None:
        larger = len(plans) > 1 and measured[1] <= UNLIKELY * measured[0]
        plan, cost = plans[larger], measured[larger]
        takes = f"On this machine a step takes with {plan.tree.num_nodes} nodes as long as {cost:.1f} of the base's"
        takes += f"{costs.in_words(plan.tree)}."
    why = f"{why}. {takes}"
    if auto or cost < most:
        watch = None if measured is None else functools.partial(costs.contradict, plan.tree)
        switch = SwitchRule(cost, USUAL, ALLOWANCE, watch) if auto or key.on_cpu else None
        plan = replace(plan, switch=switch, why=why)
        pays = " as long as that pays on the text" if switch else ""
        _tell(key, plan, f"{why} {plan.tree.num_nodes} nodes are drafted{pays}; {advice}")
        return plan
    # steps that are not eager take less, with the root alone, than the base's own decoding
    eager = key.execution == "eager"
    instead = "the base decodes by itself" if eager else f"steps are {key.execution} all the same"
    why += f" No text is expected to save that: nothing is drafted, {instead}"
    plan = replace(plan, tree=DraftTree.root_alone(), why=why, base_decodes=eager)
    instead = "draft_tree= drafts all the same, `hf-drafthead costs --clear` has steps measured anew"
    _tell(key, plan, f"{why}; {instead}; {advice}")
    return plan


def first_paths(draft_tree: Any, limits: Limits, rows: int) -> list[list[int]] | None:
    """The first nodes of the tree that a generation config names, whose parents are among them, as many as a small
    tree has; None of a tree that is no larger, or was made by the user."""
    small = small_paths(*limits, rows)
    if isinstance(draft_tree, str) and draft_tree != "dynamic":
        return small
    if not isinstance(draft_tree, list) or len(draft_tree) <= len(small):
        return None
    first: list[list[int]] = []
    for path in map(list, draft_tree):
        if len(first) < len(small) and (len(path) == 1 or path[:-1] in first):
            first.append(path)
    return first


def small_paths(max_depth: int | None, vocabulary: int, rows: int = 1) -> list[list[int]]:
    """The rank paths of a small tree, for heads of these limits and so many rows."""
    paths = SMALL_TREE[: max(SMALL_STEP // rows, 2) - 1]
    return [path for path in paths if len(path) <= (max_depth or len(path)) and max(path) < vocabulary]


def _tell(key: CalibrationKey, plan: DraftPlan, line: str) -> None:
    """Tell a choice once in a process for all numbers of rows: what is drafted, and that nothing is."""
    kind = key._replace(batch_size=0), plan.tree.max_depth > 0
    if kind not in _TOLD:
        _TOLD.add(kind)
        logger.warning(line)
