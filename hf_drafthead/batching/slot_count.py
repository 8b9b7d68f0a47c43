"""How many requests run at once where nobody says: as many as memory holds, and as make the whole faster.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.costs import ROUNDS, PartOfBase, StepCosts, chain, keep, read_costs
from hf_drafthead.generation.settings import CalibrationKey
from hf_drafthead.generation.tree import DraftTree

logger = logging.get_logger(__name__)

FEW, MOST = 4, 32  # slots that are taken by default where there is memory, at least and at most
POSITIONS = 4096  # of a slot whose memory is counted, or as many as the base has
SHARE = 0.5  # of the memory that is free; the rest is for drafters, the tensors of a step, and other programs
NODES = 4  # of a row in the steps that are timed, about as many as a batch drafts
GROWTH = 1.7  # twice as many rows are taken while a step of theirs takes at most so many times as long
MEMORY = Path("/proc/meminfo")


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
        if slots >= FEW and not cost_of_rows(costs, 2 * slots) <= GROWTH * cost_of_rows(costs, slots) < math.inf:
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


@torch.no_grad()
def cost_of_rows(costs: StepCosts, rows: int) -> float:
    """Seconds of a forward of the base over `rows` rows of `NODES` nodes, over those of one row of one node.

    They are measured once for a machine and kept with the costs of trees, so that no later call asks the clock. Rows
    that cannot be measured cost too much.
    """
    name = f"{rows} rows of {NODES} nodes"
    stored = read_costs().get(costs.situation, {})
    if name not in stored:
        try:
            seconds = [_seconds(costs.reader, *shape) for shape in ((1, 1), (rows, NODES))]
        except Exception as error:
            logger.warning_once(f"What a step of {rows} rows costs here could not be measured: {error}")
            return math.inf
        ratio = round(min(max(seconds[1] / max(seconds[0], 1e-9), 0.01), 1e6), 3)
        stored = keep(costs.situation, {name: ratio})
    return stored[name]


def _seconds(reader: BaseReader, rows: int, nodes: int) -> float:
    part, tree = PartOfBase.of(reader), chain(nodes - 1) if nodes > 1 else DraftTree.root_alone()
    cache, tokens = part.reader.cache(rows, 16, nodes), probe_tokens(reader.base)[:1].expand(rows, nodes)
    part.reader.read({"input_ids": tokens[:, :1], part.reader.cache_name: cache, "use_cache": True})
    cache.count(1)
    return min(part.seconds(tree, tokens, cache) for _ in range(ROUNDS))
