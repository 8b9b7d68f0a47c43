"""A batch whose calls join and leave: the row of each is a state of its own before, and aside.

Everything that a step starts from has one entry per row: caches, sequences, lengths, and the drafter's own state, whose
tensors have the rows on an axis that the drafter itself tells by starting with two and with three rows.

Shapes: B rows, W width of the sequences, E end-of-sequence tokens.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers.utils import logging

from hf_drafthead.bases.hooks import changed_by_training, parts
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import table_of_positions
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.programs import written
from hf_drafthead.generation.state import DecodingState, Limits, Member

logger = logging.get_logger(__name__)

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of a layer that has some
PER_ROW = ("sequences", "lengths", "ends", "position_shift")  # of `Rows`
LEAST_SHARED = 32  # tokens of a prompt that are copied from another row; fewer are read as soon

Axes = list[int | None]  # of the leaves of a drafter's state, the axis of the rows; None: it has no rows, or is a cache


def select(state: DecodingState, rows: Sequence[int], axes: Axes) -> None:
    """Go on with these rows alone, in this order; one may be taken several times, to be written over."""
    before, index = state.rows, torch.tensor(rows, device=state.rows.lengths.device)
    for cache in state.caches:
        cache.select([*rows])
    leaves, form = tree_flatten(before.draft_state)
    of_leaves = zip(leaves, axes)
    taken = [leaf if axis is None else leaf.index_select(axis, index.to(leaf.device)) for leaf, axis in of_leaves]
    of_rows = {name: getattr(before, name).index_select(0, index) for name in PER_ROW}
    state.keep(before._replace(**of_rows, visible=None, draft_state=tree_unflatten(taken, form)), [])
    state.limits = Limits(*(part.index_select(0, index) for part in state.limits))
    for known in (state.lengths, state.ends, state.last_position):
        known[:] = [known[row] for row in rows]  # type: ignore[index, misc]
    state.counted.clear()


def put(state: DecodingState, row: int, one: DecodingState, axes: Axes) -> None:
    """Write the only row of another state over a row of this one, which has room for it (`Batch.fit`)."""
    rows, other, length = state.rows, one.rows, one.lengths[0]
    for mine, theirs in zip(state.caches, one.caches, strict=True):
        mine.put_row(row, theirs)
    leaves, form = tree_flatten(rows.draft_state)
    joined = []
    for leaf, value, axis in zip(leaves, tree_leaves(other.draft_state), axes, strict=True):
        if axis is not None:
            leaf = leaf.clone(memory_format=torch.contiguous_format)
            leaf.select(axis, row).copy_(value.select(axis, 0))
        joined.append(leaf)
    of_rows = {name: getattr(rows, name).clone() for name in PER_ROW}
    of_rows["sequences"][row, :length] = other.sequences[0, :length]
    for name in PER_ROW[1:]:
        of_rows[name][row] = getattr(other, name)[0]
    after = rows._replace(**of_rows, visible=None, draft_state=tree_unflatten(joined, form))
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
    draft_state = tree_map(lambda leaf: caches.get(id(leaf), leaf), state.rows.draft_state)
    rows = state.rows._replace(draft_state=draft_state, cache=caches[id(state.rows.cache)])
    known = [*state.last_position], 0, [*state.lengths], [*state.ends]
    row_state = DecodingState(rows, state.limits, *known)
    select(row_state, [row], axes)
    for cache in row_state.caches:
        cache.fixed, cache.extent = False, int(cache.lengths[0])
    return row_state


def refuse_training(base: Any) -> None:
    """Refuse a base in training mode that computes something else than in eval mode."""
    if base.training and (changed := changed_by_training(base)):
        raise RuntimeError(
            f"the model is in training mode, which changes what it computes ({changed}): train it within pause(), then "
            "call eval()."
        )


class SharedBatch(Batch):
    """Calls of one row each, which were prefilled alone, join between two steps, and leave when they end.

    Steps that are eager run over the rows that are there. Compiled and recorded ones have fixed shapes: then all slots
    are rows from the first call on, and an empty one is a row that has ended. plans: of which one is chosen for each
    number of running rows, rounded up to a power of two; slots: rows at most, fewer once memory was short.
    """

    def __init__(self, model: Any, reader: BaseReader, plans: Any, slots: int):
        planned, fixed = functools.cache(functools.partial(plans.choose, reader)), plans.execution.name != "eager"
        of_rows = [planned(slots if fixed else min(1 << rows.bit_length(), slots)) for rows in range(slots)]
        super().__init__(model, reader, max(of_rows, key=lambda plan: plan.tree.num_nodes), plans.execution)
        self.plan_of = lambda rows: of_rows[rows - 1]
        self.slots, self.placed = slots, (model.base.dtype, model.base.device)
        self.positions = table_of_positions(model.base)  # that the base can embed; None where it has no table of them

    @torch.no_grad()
    def join(self, member: Member, others: int = 0) -> None:
        """Give a call of one row a slot; its state is copied there. Rows for `others` to come are made at once."""
        joins, state = member.state, self.state
        assert joins is not None
        if state is None:
            rows = 1 if self.execution.name == "eager" else self.slots
            self.begin(joins, [None] * rows)
            if rows > 1:
                select(joins, [0] * rows, self._axes)
                for row in range(1, rows):
                    vacate(joins, row)
            row = 0
        else:
            self.observe()
            if None not in self.members:
                rows = len(self.members)
                more = min(1 + others, self.slots - rows)
                select(state, [*range(rows), *[0] * more], self._axes)
                self.members += [None] * more
                for row in range(rows, rows + more):
                    vacate(state, row)
            row, ends = self.members.index(None), state.limits.eos.shape
            self.fit(state, self.tree.max_depth + 1, joins.lengths[0])
            put(state, row, joins, self._axes)
            if self.runner is not None and state.limits.eos.shape != ends:
                self.runner.recorded.clear()
        self.members[row], member.rows, member.state = member, range(row, row + 1), None

    @functools.cached_property
    def _axes(self) -> Axes:
        two, three = (tree_leaves(self.drafter.start(count, 16)) for count in (2, 3))
        axes: Axes = []
        for leaf_of_two, leaf_of_three in zip(two, three, strict=True):
            sizes = zip(leaf_of_two.shape, leaf_of_three.shape) if isinstance(leaf_of_two, torch.Tensor) else ()
            axes.append(next((axis for axis, (few, more) in enumerate(sizes) if few != more), None))
        return axes

    def check_base(self) -> None:
        """RuntimeError where the base was moved, or cast, since those that run began, or is trained."""
        base = self.model.base
        refuse_training(base)
        if (now := (base.dtype, base.device)) != self.placed:
            before, after = (f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in (self.placed, now))
            raise RuntimeError(
                f"the model was moved from {before} to {after} while it served: requests that ran are lost; stop() the "
                "manager before, and start() it behind that."
            )

    def weights(self) -> list[Any]:
        """What the keys that rows hold depend on: the base's weights as they are now, and its adapters."""
        tensors = [*self.model.base.parameters(), *self.model.base.buffers()]
        versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        adapters = [repr([vars(part).get(name) for name in ADAPTERS]) for part in parts(self.model.base)]
        return [versions, adapters]

    @torch.no_grad()
    def beginning(self, prompt: list[int], weights: Any) -> DecodingState | None:
        """A copy of what a running row, whose keys are of these `weights`, knows of the beginning of a prompt, if much,
        without the last position, behind which another token follows. A layer that keeps a state cannot go back."""
        if self.state is None or self.reader.mixers:
            return None
        self.observe()
        alike = {row: 0 for row, member in enumerate(self.members) if member is not None and member.weights == weights}
        for row in alike:
            request = self.members[row].request  # type: ignore[union-attr]
            text = [*request.prompt, *request.tokens]
            alike[row] = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, text[:-1], prompt)))
        best = max(alike, key=alike.__getitem__, default=0)
        if (longest := alike.get(best, 0) - 1) < LEAST_SHARED:
            return None
        begun = alone(self.state, best, self._axes)
        for cache in begun.caches:
            cache.lengths.clamp_(max=longest)
            cache.extent = min(cache.extent, longest)
        return begun

    @torch.no_grad()
    def leave(self, rows: list[int]) -> None:
        """Free the slots of these rows."""
        if not rows or self.state is None:
            return
        self.observe()
        for row in rows:
            self.members[row] = None
        if not self.running:
            self.close()
            return
        for row in rows:
            vacate(self.state, row)

    @torch.no_grad()
    def pack(self) -> None:
        """Take rows that nobody is in out of steps, where shapes may change."""
        if self.state is None or self.execution.name != "eager" or None not in self.members:
            return
        self.observe()
        select(self.state, [row for row, member in enumerate(self.members) if member is not None], self._axes)
        self.members = [*self.running]
        for row, member in enumerate(self.running):
            member.rows = range(row, row + 1)

    @torch.no_grad()
    def halve(self) -> list[Member]:
        """Set the younger half of the members aside, each with a state of its own to join with again."""
        assert self.state is not None
        self.observe()
        oldest_first = sorted(self.running, key=lambda member: member.request.number)
        for member in oldest_first:
            member.state = alone(self.state, member.rows.start, self._axes)
        self.slots = max(len(oldest_first) // 2, 1)
        logger.warning(
            f"Memory does not hold a step of {len(oldest_first)} rows: {self.slots} request(s) at once are decoded "
            "from now on."
        )
        self.close()
        for member in oldest_first[: self.slots]:
            self.join(member, self.slots)
        return oldest_first[self.slots :]
