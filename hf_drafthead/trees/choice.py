"""Which tree: a calibrated entry, else by what steps cost here, else a small tree; and by what its nodes are chosen.

What a call drafts must not depend on the clock, for in half precision another number of nodes rounds otherwise, and
the same call would give another text: entries, the file of costs and tokens decide.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from transformers.utils import logging

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import DraftTree, Tree, copies_alone
from hf_drafthead.trees.costs import StepCosts
from hf_drafthead.trees.entries import CalibrationKey, copies_of, costs_of, matching, tree_of
from hf_drafthead.trees.grow import Size
from hf_drafthead.trees.sizes import ALLOWANCE, MOST_LEFT, NodeCosts, SizeRule, steps_by_size, trees_by_size

logger = logging.get_logger(__name__)

# the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [3], [4], [2, 0], [0, 2]]
FEW = 8  # nodes of it, where steps do not choose among them
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
UNMEASURED = 1.5  # cost of a step where that cannot be measured
MOST = 2.5  # tokens of a step that no text is expected to exceed
LARGER = 1.25  # times as much as with few nodes a step may cost with all
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
    if key.on_cpu and plan.acceptance == "exact" and plan.sizes is None and copies_alone(plan.tree):
        cost = (costs([plan.tree]) or [UNMEASURED])[0]
        return sized(plan, key, NodeCosts({Size(plan.tree.num_nodes, 0): cost}))
    return plan if plan.sizes is None else sized(plan, key, plan.sizes.costs, plan.sizes.allowance, plan.sizes.watch)


def sized(
    plan: DraftPlan, key: CalibrationKey, costs: NodeCosts, allowance: float = ALLOWANCE, watch: Any = None
) -> DraftPlan:
    """The plan with as many nodes in each step as pay."""
    exact = plan.acceptance == "exact"  # else the text depends on what is drafted
    reads = exact and key.on_cpu and key.execution == "eager"
    among = trees_by_size(plan.tree, key.execution, exact and not reads)
    return replace(plan, sizes=SizeRule(plan.tree, costs, reads, among, allowance, watch))


def of_entry(
    entry: dict[str, Any], settings: DraftSettings, key: CalibrationKey, limits: Limits
) -> tuple[DraftPlan, int]:
    """The plan with the tree of the entry for this call, and the tokens that each step copies from the text."""
    tree = tree_of(entry, *limits)
    copies = copies_of(entry)
    measured = entry.get("measured") or {}
    speedup, why = measured.get("speedup"), f"calibrated for this call ({key})"
    why += f", {speedup:.2f} times as fast as the base" if isinstance(speedup, float) else ""
    if nothing := not tree.max_depth:
        why = f"no tree paid when this call was calibrated ({key}; draft_tree= drafts all the same)"
    plan = replace(settings.with_tree(tree), why=why, base_decodes=nothing)
    if settings.draft_tree == AUTO and (tree.max_depth or copies):
        size = Size(max(tree.num_nodes, copies + 1), tree.max_depth)
        plan = sized(plan, key, NodeCosts(costs_of(entry, size)), MOST_LEFT)
    return plan, copies


def without_entry(settings: DraftSettings, key: CalibrationKey, limits: Limits, costs: StepCosts) -> DraftPlan:
    """The plan of a call for which nothing was calibrated: of the first nodes of a tree on a CPU, elsewhere of all of
    them where they cost little more; with none where no text is expected to save what a step costs here."""
    auto, why = settings.draft_tree == AUTO, f"These heads were not calibrated for this call ({key})"
    few = first_paths(settings.draft_tree, limits, key)
    if few is None:  # a tree of the user's own is drafted as it is
        return replace(settings.plan(*limits), why=why)
    plan, several = replace(settings, draft_tree=few).plan(*limits), auto or key.on_cpu
    whole = plan if several else settings.plan(*limits)
    captured = " --captured" if key.execution == "compiled" else ""
    advice = f"run `hf-drafthead calibrate PATH --batch-size {key.batch_size}{captured}` to measure here."
    if settings.acceptance != "exact":  # whose text depends on what is drafted
        plan = replace(whole, why=why)
        plan = sized(plan, key, unmeasured(plan.tree)) if auto else plan
        _tell(key, plan, f"{why}: a tree of {plan.tree.num_nodes} nodes is a first choice; {advice}")
        return plan
    found, takes = measured(plan.tree, key, limits, several, costs), "What a step costs here could not be measured."
    if found and not several:
        of_whole = measured(whole.tree, key, limits, several, costs)
        if of_whole and of_whole.whole <= LARGER * found.whole:
            plan, found = whole, of_whole
    if found:
        takes = f"On this machine a step takes with {plan.tree.num_nodes} nodes as long as {found.whole:.1f} of the "
        takes += f"base's{costs.in_words(plan.tree)}."
    watch = costs.contradict if found and key.on_cpu else None
    why, found = f"{why}. {takes}", found or unmeasured(plan.tree)
    if auto or found.pays(MOST):
        plan = replace(plan, why=why)
        plan = sized(plan, key, found, watch=watch) if several else plan
        pays = ", as many as pay on the text" if several else ""
        _tell(key, plan, f"{why} {plan.tree.num_nodes} nodes are drafted{pays}; {advice}")
        return plan
    costs.doubt()
    # steps that are not eager take less, with the root alone, than the base's own decoding
    eager = key.execution == "eager"
    instead = "the base decodes by itself" if eager else f"steps are {key.execution} all the same"
    why += f" No text is expected to save that: nothing is drafted, {instead}"
    plan = replace(plan, tree=DraftTree.root_alone(), why=why, base_decodes=eager)
    instead = "draft_tree= drafts all the same, `hf-drafthead costs --clear` has steps measured anew"
    _tell(key, plan, f"{why}; {instead}; {advice}")
    return plan


def measured(tree: Tree, key: CalibrationKey, limits: Limits, several: bool, costs: StepCosts) -> NodeCosts | None:
    """What steps with a tree cost, and with several sizes of it; None where that cannot be measured."""
    steps = steps_by_size(tree, key.execution, limits[1] * key.on_cpu, several)
    found = costs([*steps.values()])
    return None if found is None else NodeCosts(dict(zip(steps, found)))


def unmeasured(tree: Tree) -> NodeCosts:
    return NodeCosts({Size(tree.num_nodes, tree.max_depth): UNMEASURED})


def first_paths(draft_tree: Any, limits: Limits, key: CalibrationKey) -> list[list[int]] | None:
    """The first nodes of the tree that a generation config names, whose parents are among them, as many as a small
    tree has; None of a tree that is no larger, or was made by the user."""
    chosen = key.on_cpu and key.execution == "eager"
    small = small_paths(*limits, key.batch_size, len(SMALL_TREE) + 1 if chosen else FEW)
    if isinstance(draft_tree, str) and draft_tree != "dynamic":
        return small
    if not isinstance(draft_tree, list) or len(draft_tree) <= min(len(small), FEW - 1):
        return None
    first: list[list[int]] = []
    for path in map(list, draft_tree):
        if len(first) < len(small) and (len(path) == 1 or path[:-1] in first):
            first.append(path)
    return first


def small_paths(max_depth: int | None, vocabulary: int, rows: int = 1, most: int = FEW) -> list[list[int]]:
    """The rank paths of a small tree, for heads of these limits and so many rows."""
    paths = SMALL_TREE[: max(min(SMALL_STEP // rows, most), 2) - 1]
    return [path for path in paths if len(path) <= (max_depth or len(path)) and max(path) < vocabulary]


def _tell(key: CalibrationKey, plan: DraftPlan, line: str) -> None:
    """Tell a choice once in a process for all numbers of rows: what is drafted, and that nothing is."""
    kind = key._replace(batch_size=0), plan.tree.max_depth > 0
    if kind not in _TOLD:
        _TOLD.add(kind)
        logger.warning(line)
