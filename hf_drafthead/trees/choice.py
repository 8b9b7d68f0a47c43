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
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings, Plans
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import ROOT_ALONE, DraftTree, LookupTree, Tree, copies_alone
from hf_drafthead.trees.costs import NodeCosts, Size, StepCosts, trees_of
from hf_drafthead.trees.entries import CalibrationKey, calibrated, matching
from hf_drafthead.trees.sizes import MOST_LEFT, SizeRule

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


def choose(plans: Plans, reader: BaseReader, rows: int) -> DraftPlan:
    """See `Plans.choose`."""
    model, plan, copies, settings = plans.model, plans.named, plans.copies, plans.settings
    heads, limits = model.drafter if settings.calibration else None, guessed_among(model)
    key = CalibrationKey.of(model.base, heads, rows, plans.execution.name)
    costs = StepCosts(model, reader, rows, plans.execution)
    if plan is None and (entry := matching(settings.calibration, key)) is not None:
        plan, of_steps = of_entry(entry, settings, key, limits)
        copies = of_steps if copies is None else copies
    elif plan is None:
        plan = without_entry(settings, key, limits, costs)
    if copies is None:
        return plan
    assert not isinstance(plan.tree, LookupTree)
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    tree = LookupTree.around(plan.tree, copies, plans.config.max_matching_ngram_size, vocabulary)
    plan = replace(plan, tree=tree, texts=plans.texts, base_decodes=False)
    if plan.sizes is not None:
        return replace(plan, sizes=replace(plan.sizes, tree=tree))
    if key.on_cpu and settings.acceptance == "exact" and copies_alone(tree):
        size = Size(tree.num_nodes, 0)
        return sized(plan, key, costs({size: tree}) or NodeCosts({size: UNMEASURED}))
    return plan


def sized(plan: DraftPlan, key: CalibrationKey, costs: NodeCosts, **more: Any) -> DraftPlan:
    """The plan with as many nodes in each step as pay; more: fields of `SizeRule`."""
    reads = key.on_cpu and key.execution == "eager"
    return replace(plan, sizes=SizeRule(plan.tree, costs, reads, **more))


def chooses(settings: DraftSettings, key: CalibrationKey) -> bool:
    """Whether steps choose among the nodes of a tree that the call does not name: where the host knows what they are
    worth, or is asked to wait for it, and the text does not depend on what is drafted."""
    return (key.on_cpu or settings.draft_tree == AUTO) and settings.acceptance == "exact"


def of_entry(
    entry: dict[str, Any], settings: DraftSettings, key: CalibrationKey, limits: Limits
) -> tuple[DraftPlan, int | None]:
    """The plan with the tree that was calibrated for a call, and how many tokens its steps copy."""
    tree, copies, measured, speedup = calibrated(entry, *limits)
    why = f"calibrated for this call ({key})"
    why += "" if speedup is None else f", {speedup:.2f} times as fast as the base"
    if nothing := not tree.max_depth:
        why = f"no tree paid when this call was calibrated ({key}; draft_tree= drafts all the same)"
    plan = DraftPlan(tree, settings, why=why, base_decodes=nothing)
    if measured and chooses(settings, key) and (copies or not nothing):
        costs = NodeCosts({Size(*size): cost for size, cost in measured.items()})
        plan = sized(plan, key, costs, allowance=MOST_LEFT)
    return plan, copies or None


def without_entry(settings: DraftSettings, key: CalibrationKey, limits: Limits, costs: StepCosts) -> DraftPlan:
    """The plan of a call for which nothing was calibrated: of the first nodes of a tree on a CPU, elsewhere of all of
    them where they cost little more; with none where no text is expected to save what a step costs here."""
    why = f"these heads were not calibrated for this call ({key})"
    captured = " --captured" if key.execution == "compiled" else ""
    advice = f"`hf-drafthead calibrate PATH --batch-size {key.batch_size}{captured}` measures here"
    few = first_paths(settings.draft_tree, limits, key)
    if few is None:  # a tree of the user's own is drafted as it is
        return replace(settings.plan(*limits), why=why)
    plan, several = replace(settings, draft_tree=few).plan(*limits), chooses(settings, key)
    whole = plan if key.on_cpu or settings.draft_tree == AUTO else settings.plan(*limits)
    if settings.acceptance != "exact":  # whose text depends on what is drafted
        return _told(key, replace(whole, why=f"{why}, and these are a first choice; {advice}"))
    found = costs(steps_of(plan.tree, key, limits))
    if found and plan is not whole:
        of_whole = costs(steps_of(whole.tree, key, limits))
        if of_whole and of_whole.whole <= LARGER * found.whole:
            plan, found = whole, of_whole
    size = Size(plan.tree.num_nodes, plan.tree.max_depth)
    if found is None:
        why += "; what a step costs here could not be measured"
    else:
        why += f"; on this machine a step takes with {size.nodes} nodes as long as {found.whole:.1f} of the base's"
        why += costs.in_words(size)
    if found is None or found.pays(MOST):
        if several:
            watch = costs.contradict if found and key.on_cpu else None
            plan = sized(plan, key, found or NodeCosts({size: UNMEASURED}), watch=watch)
        return _told(key, replace(plan, why=f"{why}; {advice}"))
    costs.doubt()
    # steps that are not eager take less, with the root alone, than the base's own decoding
    eager = key.execution == "eager"
    instead = "the base decodes by itself" if eager else f"steps are {key.execution} all the same"
    why += f", which no text is expected to save: {instead}; draft_tree= drafts all the same, `hf-drafthead costs "
    why += f"--clear` has steps measured anew, {advice}"
    return _told(key, replace(plan, tree=ROOT_ALONE, why=why, base_decodes=eager))


def steps_of(tree: Tree, key: CalibrationKey, limits: Limits) -> dict[Size, Tree]:
    """The steps whose costs are to be known: with a tree, and with fewer of its nodes where each step may take them."""
    if isinstance(tree, DraftTree) and key.on_cpu and key.execution == "eager":
        return trees_of(sorted(tree.paths, key=lambda path: (len(path) + sum(path), path)), limits[1])
    return {Size(tree.num_nodes, tree.max_depth): tree}


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


def _told(key: CalibrationKey, plan: DraftPlan) -> DraftPlan:
    """The plan, which is told once in a process for all numbers of rows, and once that nothing is drafted."""
    kind = key._replace(batch_size=0), plan.tree.max_depth > 0
    if kind not in _TOLD:
        _TOLD.add(kind)
        logger.warning(f"Calls draft {plan}.")
    return plan
