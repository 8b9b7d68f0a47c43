"""Which tree: a calibrated entry, else by what steps cost here, else a small tree; and by what its nodes are chosen.

What a call drafts must not depend on the clock, for in half precision another number of nodes rounds otherwise, and
the same call would give another text: entries, the file of costs and tokens decide.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import COPIES, ROOT_ALONE, DraftTree, LookupTree, Tree, copies_alone
from hf_drafthead.trees.costs import NodeCosts, Size, StepCosts, trees_of
from hf_drafthead.trees.entries import Calibrated, CalibrationKey, matching
from hf_drafthead.trees.sizes import MOST_LEFT, SizeRule

logger = logging.get_logger(__name__)

# the first paths of DEFAULT_TREE: on a CPU each further token that a step verifies costs
SMALL_TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0], [3], [4], [2, 0], [0, 2]]
FEW = 8  # nodes of it, where steps do not choose among them
SMALL_STEP = 16  # tokens of all rows that a step with SMALL_TREE verifies, with two nodes at least
UNMEASURED = 1.5  # cost of a step where that cannot be measured
MOST = 2.5  # tokens of a step that no text is expected to exceed
LARGER = 1.25  # times as much as with few nodes a step may cost with all
SLOTS, SLOTS_ON_CPU = 32, 8  # requests at once where nobody says; on a CPU each further token of a step costs
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
    """How a call drafts, or steps of so many rows, and why; ValueError: an entry is damaged, or settings do not fit.

    named: the plan with the tree that the call names; copies: tokens that each step copies from the text, as many as
    were calibrated where it is None and no tree is named; longest_match, texts: see `LookupTree`.
    """
    key = CalibrationKey.of(model.base, model.drafter if settings.calibration else None, rows, execution.name)
    costs, plan = StepCosts(model, reader, key, execution), named
    if plan is None:
        limits = guessed_among(model)
        entry = matching(settings.calibration, key)
        if entry is None:
            plan = without_entry(settings, key, limits, costs)
        else:
            calibrated = Calibrated.of(entry, *limits)
            plan = of_entry(calibrated, settings, key)
            copies = calibrated.copies or None if copies is None else copies
    if copies is None:
        return plan
    assert not isinstance(plan.tree, LookupTree)
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    tree = LookupTree.around(plan.tree, copies, longest_match, vocabulary)
    plan = replace(plan, tree=tree, texts=texts, base_decodes=False)
    if plan.sizes is not None:
        return replace(plan, sizes=replace(plan.sizes, tree=plan.tree))
    if key.on_cpu and plan.settings.acceptance == "exact" and copies_alone(plan.tree):
        size = Size(plan.tree.num_nodes, 0)
        return sized(plan, key, costs({size: plan.tree}) or NodeCosts({size: UNMEASURED}))
    return plan


def sized(plan: DraftPlan, key: CalibrationKey, costs: NodeCosts, **more: Any) -> DraftPlan:
    """The plan with as many nodes in each step as pay; more: fields of `SizeRule`."""
    reads = key.on_cpu and key.execution == "eager"
    return replace(plan, sizes=SizeRule(plan.tree, costs, reads, **more))


def chooses(settings: DraftSettings, key: CalibrationKey) -> bool:
    """Whether steps choose among the nodes of a tree that the call does not name: where the host knows what they are
    worth, or is asked to wait for it, and the text does not depend on what is drafted."""
    return (key.on_cpu or settings.draft_tree == AUTO) and settings.acceptance == "exact"


def of_entry(calibrated: Calibrated, settings: DraftSettings, key: CalibrationKey) -> DraftPlan:
    """The plan with the tree that was calibrated for a call."""
    tree, why = calibrated.tree, f"calibrated for this call ({key})"
    why += "" if calibrated.speedup is None else f", {calibrated.speedup:.2f} times as fast as the base"
    if nothing := not tree.max_depth:
        why = f"no tree paid when this call was calibrated ({key}; draft_tree= drafts all the same)"
    plan = DraftPlan(tree, settings, why=why, base_decodes=nothing)
    if not (calibrated.costs and chooses(settings, key)) or (nothing and not calibrated.copies):
        return plan
    costs = NodeCosts({Size(*size): cost for size, cost in calibrated.costs.items()})
    return sized(plan, key, costs, allowance=MOST_LEFT)


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


class Plans:
    """The plan for each number of running rows of a manager, made when it is first asked for.

    config: of the manager, else the model's; slots: rows at most, by default as many requests as are `wanted`, at most
    8 on a CPU, else 32; draft_tree: of all steps; texts: others than the requests' own that are copied from.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig | None,
        slots: int | None,
        wanted: int | None = None,
        draft_tree: Any = None,
        texts: TextIndex | None = None,
    ):
        most = SLOTS_ON_CPU if model.base.device.type == "cpu" else SLOTS
        self.model, self.slots, self.texts = model, slots or min(wanted or most, most), texts
        self.reader: BaseReader | None = None
        self.config, self.settings, _ = model._merged_config(config, {"use_cache": True}, draft_tree=draft_tree)
        self.execution = Execution.wanted(model, self.config)
        self.plans: dict[int, DraftPlan] = {}
        measured = draft_tree in (None, AUTO) and model.drafter.copies is None
        self.named = None if measured else self.settings.plan(*guessed_among(model))
        self.copies = self.config.prompt_lookup_num_tokens or model.drafter.copies or (COPIES if texts else None)

    def renew(self, reader: BaseReader) -> None:
        """Plan for a base that is run in this way; `largest` is the plan with most nodes then."""
        self.reader = reader
        self.plans.clear()
        self.largest = max((self(rows) for rows in range(1, self.slots + 1)), key=lambda plan: plan.tree.num_nodes)

    def __call__(self, rows: int) -> DraftPlan:
        """The plan for so many rows, rounded up to a power of two; of all slots where shapes are fixed."""
        if self.named is not None and self.copies is None:
            return self.named
        size = self.slots if self.execution.name != "eager" else min(1 << (rows - 1).bit_length(), self.slots)
        if size not in self.plans:
            assert self.reader is not None
            how: dict[str, Any] = {"longest_match": self.config.max_matching_ngram_size, "texts": self.texts}
            how |= {"named": self.named, "copies": self.copies}
            self.plans[size] = choose(self.model, self.reader, self.settings, size, self.execution, **how)
        return self.plans[size]
