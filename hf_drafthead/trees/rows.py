"""What a manager of many requests decides once: how many run at once, and how steps of so many rows draft."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.tree import COPIES
from hf_drafthead.trees.choice import choose

MOST, MOST_ON_CPU = 32, 8  # slots where nobody says; on a CPU each further token of a step costs


class Plans:
    """The plan for each number of running rows, made when it is first asked for.

    Args:
        config: of the manager; None: the model's.
        slots: rows at most; None: as many requests as are `wanted`, where that is known, at most 8 on a CPU, else 32.
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
        most = MOST_ON_CPU if model.base.device.type == "cpu" else MOST
        self.model, self.slots, self.texts = model, slots or min(wanted or most, most), texts
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
        copies = self.config.prompt_lookup_num_tokens or self.model.drafter.copies
        how: dict[str, Any] = {"longest_match": self.config.max_matching_ngram_size, "texts": self.texts}
        how |= {"named": self.named, "copies": copies or (None if self.texts is None else COPIES)}
        return choose(self.model, self.reader, self.settings, rows, self.execution, **how)
