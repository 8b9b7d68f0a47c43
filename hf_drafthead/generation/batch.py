"""One batch: the calls in it, their state, and the step of all of them.

`generate` makes a batch of one call, whose rows begin together (`of_one`). A manager makes one of many calls of one row
each, which were prefilled alone, join between two steps, and leave when they end. Steps that are eager run over the
rows that are there. Compiled and recorded ones have fixed shapes: then all slots are rows from the first call on, and
an empty one is a row that has ended.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.hooks import parts
from hf_drafthead.bases.limits import table_of_positions
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import matches
from hf_drafthead.generation.rows import Axes, alone, axes_of, make_room, put, select, vacate
from hf_drafthead.generation.runner import Execution, Runner
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import DecodingState, Member, Outcome, StepRecord
from hf_drafthead.generation.step import Step
from hf_drafthead.generation.tree import ROOT_ALONE, LookupTree, Tree, copies_alone

logger = logging.get_logger(__name__)

TRAINED = "the model is in training mode, in which dropout changes texts: train it within pause(), then call eval()."
ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of a layer that has some
LEAST_SHARED = 32  # tokens of a prompt that are copied from another row; fewer are read as soon


def chooser(plan: DraftPlan, on_cpu: bool) -> Callable[[DecodingState], Tree] | None:
    """What says which tree the next step takes, the call's or the root alone; None where that is always the call's.

    The root alone is taken while a switch pauses, and on a CPU, where each node costs, where copies from the text are
    all that is guessed and no row has a match. Only tokens decide.
    """
    tree, alone, drafts = plan.tree, ROOT_ALONE, False
    switch = None if plan.switch is None else plan.switch.begin()
    lookup = tree if isinstance(tree, LookupTree) and copies_alone(tree) and on_cpu else None
    if switch is None and lookup is None:
        return None
    texts = None if lookup is None else plan.texts_on(torch.device("cpu"))

    def choose(state: DecodingState) -> Tree:
        nonlocal drafts
        counts = state.counted if drafts else []
        moved = [row for row, count in enumerate(counts) if count]  # 0 in those that had ended
        if moved and switch is not None:  # the call ends with the row that is the furthest behind
            switch.note(counts[min(moved, key=lambda row: state.lengths[row] - counts[row])])
        drafts = lookup is None or matches(lookup, state.rows.sequences, state.rows.lengths, texts)
        if switch is not None:
            drafts = switch.drafts() and drafts
        return tree if drafts else alone

    return choose


class Batch:
    """Calls that are decoded together.

    Args:
        model: with `base` and `drafter`.
        reader: how to run the base.
        plan_of: how steps of so many running rows draft.
        largest: the plan of the largest tree.
        execution: how steps run.
        slots: rows at most.
        shared: whether others may join.
        timed: whether the stages of eager steps are timed.

    Attributes:
        members: by row, None where nobody is; a call of g rows stands there g times.
        slots: as given, fewer once memory was short.
    """

    def __init__(
        self,
        model: Any,
        reader: BaseReader,
        plan_of: Callable[[int], DraftPlan],
        largest: DraftPlan,
        execution: Execution,
        slots: int,
        shared: bool = True,
        timed: bool = False,
    ):
        self.model, self.drafter, self.reader, self.slots = model, model.drafter, reader, slots
        self.plan_of, self.largest, self.execution, self.shared, self.timed = plan_of, largest, execution, shared, timed
        self.placed = model.base.dtype, model.base.device
        self.members: list[Member | None] = []
        self.state: DecodingState | None = None
        self.runner: Runner | None = None
        self.choosers: dict[int, Callable[[DecodingState], Tree] | None] = {}
        self.launched: deque[Outcome] = deque()

    @classmethod
    def of_one(cls, model: Any, member: Member, execution: Execution, timed: bool = False) -> Batch:
        """The batch of one call, which no other joins."""
        if member.reader.more:  # of this call alone, and a program is for all
            execution = Execution("eager")
        count, plan = len(member.rows), member.plan
        batch = cls(model, member.reader, lambda rows: plan, plan, execution, count, shared=False, timed=timed)
        assert member.state is not None
        batch.members += [member] * count
        choose = chooser(plan, member.state.rows.lengths.device.type == "cpu")
        batch._begin(member.state, choose)
        return batch

    def _begin(self, first: DecodingState, choose: Callable[[DecodingState], Tree] | None) -> None:
        """Make the steps of a batch from the state of the first call."""
        make = functools.partial(
            Step,
            self.reader,
            self.drafter,
            device=first.rows.lengths.device,
            plan=self.largest,
            shared=self.shared,
            timed=self.timed and self.execution.name == "eager",
        )
        of_model = self.model, self.reader, self.execution, make, self.largest.tree
        self.state, self.runner = first, Runner(*of_model, first, self.members, choose, self.shared)

    @property
    def running(self) -> list[Member]:
        """Who is in the batch, by row."""
        return [member for member in self.members if member is not None]

    @property
    def has_room(self) -> bool:
        """Whether another call may join."""
        return len(self.running) < self.slots

    @torch.no_grad()
    def join(self, member: Member, others: int = 0) -> None:
        """Give a call of one row a slot; its state is copied there. Rows for `others` to come are made at once."""
        member_state, state = member.state, self.state
        assert member_state is not None and self.has_room
        self._settle()
        if state is None or self.runner is None:
            rows = 1 if self.execution.name == "eager" else self.slots
            self.members[:] = [None] * rows
            self._begin(member_state, self._tree)
            if rows > 1:
                select(member_state, [0] * rows, self._axes)
                for row in range(1, rows):
                    vacate(member_state, row)
            row = 0
        else:
            if None not in self.members:
                rows = len(self.members)
                more = min(1 + others, self.slots - rows)
                select(state, [*range(rows), *[0] * more], self._axes)
                self.members += [None] * more
                for row in range(rows, rows + more):
                    vacate(state, row)
            row = self.members.index(None)
            if state.rows.cache.fixed and member_state.lengths[0] > min(cache.capacity for cache in state.caches):
                self.runner._leave_fixed(state)
            if not state.rows.cache.fixed:
                make_room(state, member_state, 0)
            ends = state.limits.eos.shape
            put(state, row, member_state, self._axes)
            if state.limits.eos.shape != ends:
                self.runner.recorded.clear()
        self._place(row, member)
        member.state = None

    def _place(self, row: int, member: Member | None) -> None:
        self.members[row] = member
        if member is not None:
            member.rows = range(row, row + 1)

    @functools.cached_property
    def _axes(self) -> Axes:
        return axes_of(self.drafter)

    @functools.cached_property
    def positions(self) -> int | None:
        """How many positions the base can embed; None where it has no table of them."""
        return table_of_positions(self.model.base)

    def _tree(self, state: DecodingState) -> Tree:
        """The tree of the next step: that for the number of running rows, as long as it pays."""
        count = len(self.running)
        plan = self.plan_of(count)
        if count not in self.choosers:
            self.choosers[count] = chooser(plan, state.rows.lengths.device.type == "cpu")
        choose = self.choosers[count]
        return plan.tree if choose is None else choose(state)

    def check_base(self) -> None:
        """See that the base is where, and of what dtype, the keys of those that run are, and in eval mode.

        Raises:
            RuntimeError: it was moved, or is trained.
        """
        if self.model.base.training:
            raise RuntimeError(TRAINED)
        if (now := (self.model.base.dtype, self.model.base.device)) != self.placed:
            before, after = (f"{str(dtype).removeprefix('torch.')} on {device}" for dtype, device in (self.placed, now))
            raise RuntimeError(
                f"the model was moved from {before} to {after} while it served: requests that ran are lost; stop() the "
                "manager before, and start() it behind that."
            )

    def _settle(self) -> None:
        """Let the drafter observe what waits for it, before rows change."""
        if self.state is not None and self.state.pending and self.runner is not None:
            self.runner._observe(next(iter(self.runner.steps.values())), self.state)

    @torch.no_grad()
    def step(self) -> list[StepRecord]:
        """Take one step: the records of those whose outcome is known by then.

        Members whose own rules have raised have an `error`; they stand still.

        Raises:
            DoesNotFit: there is no memory for so many rows; all are as they were.
            Exception: whatever the base raises, in which case nothing can go on.
        """
        assert self.state is not None and self.runner is not None
        self.launched.append(self.runner.step(self.state))
        records = []
        while len(self.launched) > self.runner.ahead:
            records.append(self.state.note(self.launched.popleft()))
            for member in dict.fromkeys(self.members):
                if member is not None:
                    member.take(self.state, records[-1])
        return records

    def weights(self) -> list[Any]:
        """What the keys that rows hold depend on: the base's weights as they are now, and its adapters."""
        tensors = [*self.model.base.parameters(), *self.model.base.buffers()]
        versions = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in tensors]
        adapters = [repr([vars(part).get(name) for name in ADAPTERS]) for part in parts(self.model.base)]
        return [versions, adapters]

    @torch.no_grad()
    def beginning(self, prompt: list[int], weights: Any) -> DecodingState | None:
        """A copy of what a running row knows of the beginning of a prompt, where much of both is the same.

        Only rows are asked whose keys are of these `weights`.

        Behind the last position that both have in common another token follows, so that it is read again. A layer that
        keeps a state cannot go back.
        """
        if self.state is None or self.reader.mixers:
            return None
        self._settle()
        best, longest = None, LEAST_SHARED
        for row, member in enumerate(self.members):
            if member is not None and member.weights == weights:
                text = [*member.request.prompt, *member.request.tokens]
                alike = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, text[:-1], prompt)))
                if alike - 1 >= longest:
                    best, longest = row, alike - 1
        if best is None:
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
        self._settle()
        for row in rows:
            self._place(row, None)
            vacate(self.state, row)
        if not self.running:
            self.close()

    @torch.no_grad()
    def pack(self) -> None:
        """Take rows that nobody is in out of steps, where shapes may change."""
        if self.state is None or self.execution.name != "eager" or None not in self.members:
            return
        self._settle()
        rows = [row for row, member in enumerate(self.members) if member is not None]
        select(self.state, rows, self._axes)
        self.members[:] = [self.members[row] for row in rows]
        for row, member in enumerate(self.members):
            self._place(row, member)

    @torch.no_grad()
    def halve(self) -> list[Member]:
        """Set the younger half of the members aside, each with a state of its own to join with again.

        Raises:
            RuntimeError: there is not even memory to set them aside.
        """
        assert self.state is not None
        self._settle()
        rows = [row for row, member in enumerate(self.members) if member is not None]
        oldest_first = sorted(rows, key=lambda row: self.members[row].request.number)  # type: ignore[union-attr]
        self.slots = max(len(rows) // 2, 1)
        aside = oldest_first[self.slots :]
        for row in aside:
            member = self.members[row]
            assert member is not None
            member.state = alone(self.state, row, self._axes)
        logger.warning(
            f"Memory does not hold a step of {len(rows)} rows: {self.slots} request(s) at once are decoded from now on."
        )
        members = [member for row in aside if (member := self.members[row]) is not None]
        self.leave(aside)
        if self.execution.name == "eager":
            self.pack()
        elif self.state is not None:  # fixed shapes of fewer rows: the members that stay join anew
            stay = [row for row, member in enumerate(self.members) if member is not None]
            staying = [self.members[row] for row in stay]
            for row, member in zip(stay, staying):
                assert member is not None
                member.state = alone(self.state, row, self._axes)
            self.close()
            for member in staying:
                assert member is not None
                self.join(member)
        return members

    def close(self) -> None:
        """Let go of all memory; members that are still there are lost."""
        self.launched.clear()
        if self.runner is not None:
            self.runner.close()
        self.members.clear()
        self.state = self.runner = None
        self.choosers.clear()


def is_short(error: BaseException) -> bool:
    """Whether an error of a step says that it had too many rows."""
    return isinstance(error, DoesNotFit) or out_of_memory(error)
