"""Rows of a batch's state that join and leave: each is the state of a call with one row.

Everything that a step starts from has one entry per row: caches, sequences, lengths, and the drafter's own state, whose
tensors have the rows on an axis that the drafter itself tells by starting with two and with three rows.

Shapes: B rows, W width of the sequences, E end-of-sequence tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation.programs import written
from hf_drafthead.generation.state import DecodingState, Limits, Rows

Axes = list[int | None]  # of the leaves of a drafter's state, the axis of the rows; None: it has no rows, or is a cache


def axes_of(drafter: Any) -> Axes:
    """On which axis each tensor of a drafter's state has its rows."""
    two, three = (tree_leaves(drafter.start(count, 16)) for count in (2, 3))
    axes: Axes = []
    for leaf_of_two, leaf_of_three in zip(two, three, strict=True):
        sizes = zip(leaf_of_two.shape, leaf_of_three.shape) if isinstance(leaf_of_two, torch.Tensor) else ()
        axes.append(next((axis for axis, (few, more) in enumerate(sizes) if few != more), None))
    return axes


def select(state: DecodingState, rows: Sequence[int], axes: Axes) -> None:
    """Go on with these rows alone, in this order; one may be taken several times, to be written over."""
    before, index = state.rows, torch.tensor(rows, device=state.rows.lengths.device)
    leaves, form = tree_flatten(before.draft_state)
    for cache in state.caches:
        cache.select([*rows])
    draft_leaves = [
        leaf if axis is None else leaf.index_select(axis, index.to(leaf.device)) for leaf, axis in zip(leaves, axes)
    ]
    sequences, lengths, ends, shift = (
        part.index_select(0, index) for part in (before.sequences, before.lengths, before.ends, before.position_shift)
    )
    state.keep(Rows(sequences, lengths, ends, shift, None, tree_unflatten(draft_leaves, form), before.cache), [])
    state.limits = Limits(*(part.index_select(0, index) for part in state.limits))
    state.lengths[:] = [state.lengths[row] for row in rows]
    state.ends[:] = [state.ends[row] for row in rows]
    state.last_position[:] = [state.last_position[row] for row in rows]
    state.counted.clear()


def put(state: DecodingState, row: int, one: DecodingState, axes: Axes) -> None:
    """Write the only row of another state over a row of this one, which has room for it (`Runner.fit`)."""
    rows, other = state.rows, one.rows
    for mine, theirs in zip(state.caches, one.caches, strict=True):
        mine.put_row(row, theirs)
    leaves, form = tree_flatten(rows.draft_state)
    joined = []
    for leaf, value, axis in zip(leaves, tree_leaves(other.draft_state), axes, strict=True):
        if axis is not None:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
            leaf.select(axis, row).copy_(value.select(axis, 0))
        joined.append(leaf)
    length = one.lengths[0]
    sequences, lengths, ends, shift = (
        part.clone() for part in (rows.sequences, rows.lengths, rows.ends, rows.position_shift)
    )
    sequences[row, :length] = other.sequences[0, :length]
    lengths[row], ends[row], shift[row] = other.lengths[0], other.ends[0], other.position_shift[0]
    after = Rows(sequences, lengths, ends, shift, None, tree_unflatten(joined, form), rows.cache)
    state.keep(written(rows, after) if rows.cache.fixed else after, [])
    more = one.limits.eos.shape[-1] - state.limits.eos.shape[-1]  # let it stop where its own call would
    state.limits = state.limits._replace(eos=F.pad(state.limits.eos, (0, max(more, 0)), value=-1))
    limits = one.limits._replace(eos=F.pad(one.limits.eos, (0, max(-more, 0)), value=-1))
    for place, entry in zip(state.limits, limits):
        place[row] = entry[0]
    state.lengths[row], state.ends[row], state.last_position[row] = length, one.ends[0], one.last_position[0]
    state.counted.clear()


def vacate(state: DecodingState, row: int) -> None:
    """Let a row stand still from now on, with nothing behind it that the others would have to look at."""
    rows = state.rows
    rows.lengths[row] = rows.ends[row] = 1
    for cache in state.caches:
        cache.lengths[row] = 0
        if not cache.fixed:
            cache.extent = cache.longest(cache.extent)
    state.lengths[row] = state.ends[row] = 1
    state.counted.clear()


def alone(state: DecodingState, row: int, axes: Axes) -> DecodingState:
    """A row as the state of a call of its own, which `put` takes back; this state stays as it is."""
    caches = {id(cache): cache.twin() for cache in state.caches}
    leaves, form = tree_flatten(state.rows.draft_state)
    leaves = [caches[id(leaf)] if isinstance(leaf, SlotCache) else leaf for leaf in leaves]
    rows = state.rows._replace(draft_state=tree_unflatten(leaves, form), cache=caches[id(state.rows.cache)])
    row_state = DecodingState(
        rows=rows,
        limits=state.limits,
        last_position=[*state.last_position],
        past_shift=0,
        lengths=[*state.lengths],
        ends=[*state.ends],
    )
    select(row_state, [row], axes)
    for cache in row_state.caches:
        cache.fixed, cache.extent = False, int(cache.lengths[0])
    return row_state
