"""What a manager of many requests decides once: how many run at once, and how steps of so many rows draft.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import AUTO, DraftPlan, DraftSettings
from hf_drafthead.generation.tree import COPIES
from hf_drafthead.trees.choice import choose
from hf_drafthead.trees.costs import StepCosts
from hf_drafthead.trees.entries import CalibrationKey

FEW, MOST = 4, 32  # slots that are taken by default where there is memory, at least and at most
POSITIONS = 4096  # of a slot whose memory is counted, or as many as the base has
SHARE = 0.5  # of the memory that is free; the rest is for drafters, the tensors of a step, and other programs
GROWTH = 1.7  # twice as many rows are taken while a step of theirs takes at most so many times as long
MEMORY = Path("/proc/meminfo")


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
        copies = self.config.prompt_lookup_num_tokens or self.model.drafter.copies
        how: dict[str, Any] = {"longest_match": self.config.max_matching_ngram_size, "texts": self.texts}
        how |= {"named": self.named, "copies": copies or (None if self.texts is None else COPIES)}
        return choose(self.model, self.reader, self.settings, rows, self.execution, **how)


def slots_that_pay(model: Any, reader: BaseReader, execution: str, most: int | None = None) -> int:
    """The number of slots of a manager that was given none, a power of two unless `most` is less.

    On a CPU the base is timed once over so many rows, as all costs of steps are, and the file of these decides ever
    after; on a GPU more rows always pay, up to 32.

    Args:
        model: with `base` and `drafter`.
        reader: how to run the base.
        execution: of the steps, see `EXECUTIONS`.
        most: requests that will come.
    """
    device, limit = model.base.device, min(most or MOST, MOST)
    free = free_memory(device)
    if free is not None:
        limit = min(limit, max(int(free * SHARE / bytes_of_slot(reader)), 1))
    if device.type != "cpu":
        return limit
    key = CalibrationKey.of(model.base, model.drafter, 1, execution)
    slots, costs = 1, StepCosts(model, reader, key)
    while slots < limit:
        if slots >= FEW and not costs.of_rows(2 * slots) <= GROWTH * costs.of_rows(slots) < math.inf:
            break
        slots *= 2
    return min(slots, limit)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on a device, with what torch holds there unused; None where that cannot be told."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type != "cpu":
        return None
    try:
        lines = dict(line.split(":", 1) for line in MEMORY.read_text(encoding="ascii").splitlines())
        return int(lines["MemAvailable"].split()[0]) << 10
    except (OSError, LookupError, ValueError):  # no Linux
        names = getattr(os, "sysconf_names", {})
        if "SC_AVPHYS_PAGES" not in names:
            return None
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@torch.no_grad()
def bytes_of_slot(reader: BaseReader) -> int:
    """Memory of a row of `POSITIONS` positions in the base's cache, as a forward over one token lays it out."""
    cache, config = reader.cache(1, 16, 1), reader.base.config.get_text_config(decoder=True)
    reader.read({"input_ids": probe_tokens(reader.base)[None, :1], reader.cache_name: cache, "use_cache": True})
    positions = min(getattr(config, "max_position_embeddings", None) or POSITIONS, POSITIONS)
    states = sum(tensor.nbytes for layer in cache.recurrent for tensor in layer.tensors)
    return math.ceil(sum(block.nbytes for block in cache.blocks) / cache.slots * positions) + states
