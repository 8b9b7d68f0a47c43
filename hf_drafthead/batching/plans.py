"""How steps of so many rows draft: calibrated by batch size, or a first choice, as for a call of that many rows."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.batching.slot_count import slots_that_pay
from hf_drafthead.costs import StepCosts
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, CalibrationKey, DraftPlan, DraftSettings
from hf_drafthead.generation.tree import COPIES


class Plans:
    """The plan for each number of running rows, made when it is first asked for.

    Args:
        model: with `base` and `drafter`.
        given: the generation config of the manager; None: the model's.
        slots: rows at most; None: as many as pay, known with the reader.
        wanted: requests that will come, where that is known.
        draft_tree: of all steps; None: what was measured, or a first choice.
        texts: others than the requests' own that are copied from; None: none.

    Raises:
        TypeError, ValueError: a setting that does not fit.
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
        self.model, self.slots, self.wanted, self.texts = model, slots or 0, wanted, texts
        self.reader: BaseReader | None = None
        self.config = model._merged_config(config, {"use_cache": True})[0]
        self.settings = DraftSettings.from_config(self.config, draft_tree=draft_tree)
        self.execution = Execution.wanted(model, self.config)
        self.plans: dict[int, DraftPlan] = {}
        chooses = draft_tree in (None, AUTO) and model.drafter.copies is None
        self.named = None if chooses else self.settings.plan(*model._guesses_among())

    def renew(self, reader: BaseReader) -> None:
        """Plan for a base that is run in this way."""
        self.reader = reader
        self.plans.clear()
        self.slots = self.slots or slots_that_pay(self.model, reader, self.execution.name, self.wanted)

    def __call__(self, rows: int) -> DraftPlan:
        """The plan for so many rows; their number is rounded up to a power of two, of which there are few.

        Where shapes are fixed all slots are rows, whoever is in them.
        """
        size = self.slots if self.execution.name != "eager" else min(1 << (rows - 1).bit_length(), self.slots)
        if size not in self.plans:
            self.plans[size] = self._plan(size)
        return self.plans[size]

    @property
    def largest(self) -> DraftPlan:
        """The plan of the largest tree."""
        return max((self(rows) for rows in range(1, self.slots + 1)), key=lambda plan: plan.tree.num_nodes)

    def _plan(self, rows: int) -> DraftPlan:
        assert self.reader is not None
        model = self.model
        key = CalibrationKey.of(model.base, model.drafter, rows, self.execution.name)
        costs = StepCosts(model, self.reader, key)
        deepest, vocabulary = model._guesses_among()
        plan = self.named or self.settings.plan_for(key, deepest, vocabulary, costs)
        copies = self.config.prompt_lookup_num_tokens or plan.copies or model.drafter.copies
        if copies := copies or (COPIES if self.texts is not None else 0):
            vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
            plan = plan.with_lookup(copies, self.config.max_matching_ngram_size, vocabulary, self.texts)
            plan = plan.while_copies_pay(key, costs)
        return plan
