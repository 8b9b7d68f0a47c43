"""One batch of slots: requests that were prefilled alone join between two steps, and leave when they end.

Steps that are eager run over the rows that are there. Compiled and recorded ones have fixed shapes: then all slots are
rows from the first request on, and an empty one is a row that has ended.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.batching.rows import Axes, alone, axes_of, make_room, of_rows, put, select, vacate, view
from hf_drafthead.batching.step import Member, SharedStep
from hf_drafthead.generation.decoding import chooser
from hf_drafthead.generation.runner import Runner
from hf_drafthead.generation.state import NOT_A_DISTRIBUTION, DecodingState, StepRecord
from hf_drafthead.generation.tree import Tree
from hf_drafthead.trees.rows import Plans

logger = logging.get_logger(__name__)

TRAINED = "the model is in training mode, in which dropout changes texts: train it within pause(), then call eval()."
LEAST_SHARED = 32  # tokens of a prompt that are copied from another row; fewer are read as soon


class SharedRunner(Runner):
    """Takes the steps of a batch. Where memory is short the batch gets smaller before the tree does."""

    members: list[Member | None]

    def _smaller(self, tree: Tree, short: DoesNotFit) -> Tree:
        if sum(member is not None for member in self.members) > 1:
            raise short
        return super()._smaller(tree, short)


class Batch:
    """The slots, and who is in them.

    Args:
        model: with `base` and `drafter`.
        reader: how to run the base.
        plans: how steps of so many rows draft, and how they run.
        slots: requests that run at once.

    Attributes:
        members: by row, None where nobody is.
        slots: as given, fewer once memory was short.
    """

    def __init__(self, model: Any, reader: BaseReader, plans: Plans, slots: int):
        self.model, self.drafter, self.reader, self.plans, self.slots = model, model.drafter, reader, plans, slots
        self.axes: Axes = axes_of(model.drafter)
        self.placed = model.base.dtype, model.base.device
        self.members: list[Member | None] = []
        self.state: DecodingState | None = None
        self.runner: SharedRunner | None = None
        self.choosers: dict[int, Callable[[DecodingState], Tree] | None] = {}

    @property
    def running(self) -> list[Member]:
        """Who is in the batch, by row."""
        return [member for member in self.members if member is not None]

    @property
    def has_room(self) -> bool:
        """Whether another request may join."""
        return len(self.running) < self.slots

    @torch.no_grad()
    def join(self, member: Member, others: int = 0) -> None:
        """Give a request a slot; its state of one row is copied there. Rows for `others` to come are made at once."""
        member_state, state = member.state, self.state
        assert member_state is not None and self.has_room
        limits = member_state.limits
        member_state.limits = of_rows(limits) if limits.max_length.dim() == 0 else limits
        self._settle()
        if state is None or self.runner is None:
            self._begin(member_state)
            row = 0
        else:
            if None not in self.members:
                rows = len(self.members)
                more = min(1 + others, self.slots - rows)
                select(state, [*range(rows), *[0] * more], self.axes)
                self.members += [None] * more
                for row in range(rows, rows + more):
                    vacate(state, row)
            row = self.members.index(None)
            if state.rows.cache.fixed and member_state.lengths[0] > min(cache.capacity for cache in state.caches):
                self.runner._leave_fixed(state)
            if not state.rows.cache.fixed:
                make_room(state, member_state, 0)
            ends = state.limits.eos.shape
            put(state, row, member_state, self.axes)
            if state.limits.eos.shape != ends:
                self.runner.recorded.clear()
        self.members[row], member.state = member, None

    def _begin(self, first_state: DecodingState) -> None:
        """Make a batch of the first request's state."""
        plan = self.plans.largest
        make = functools.partial(
            SharedStep,
            self.reader,
            self.drafter,
            device=first_state.rows.lengths.device,
            plan=plan,
            members=self.members,
        )
        runner_arguments = self.model, self.reader, self.plans.execution, make, plan.tree, first_state
        self.state, self.runner = first_state, SharedRunner(*runner_arguments, choose=self._tree)
        self.runner.members = self.members
        rows = 1 if self.plans.execution.name == "eager" else self.slots
        self.members[:] = [None] * rows
        if rows > 1:
            select(first_state, [0] * rows, self.axes)
            for row in range(1, rows):
                vacate(first_state, row)

    def _tree(self, state: DecodingState) -> Tree:
        """The tree of the next step: that for the number of running rows, as long as it pays."""
        count = len(self.running)
        plan = self.plans(count)
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
    def step(self) -> StepRecord:
        """Take one step. Members whose own rules have raised have an `error`; they stand still.

        Raises:
            DoesNotFit: there is no memory for so many rows; all are as they were.
            Exception: whatever the base raises, in which case nothing can go on.
        """
        assert self.state is not None and self.runner is not None
        del self.state.counted[:-1]  # what is not the last step's is of no use to a batch that goes on for ever
        outcome = self.runner.step(self.state)
        if outcome.packed.is_cuda:
            for row, (_, _, _, valid, *_) in enumerate(outcome.read()):
                member = self.members[row]
                if not valid and member is not None:
                    member.error = RuntimeError(NOT_A_DISTRIBUTION)
            outcome.packed[:, 3] = 1
        return self.state.note(outcome)

    def ended(self, row: int) -> bool:
        """Whether a row has reached its end."""
        return self.state is not None and self.state.ends[row] is not None

    def view(self, row: int) -> DecodingState:
        """A row as the rules of its own call see it."""
        member = self.members[row]
        assert self.state is not None and member is not None
        return view(self.state, row, member.prompt_length)

    @torch.no_grad()
    def beginning(self, prompt: list[int]) -> DecodingState | None:
        """A copy of what a running row knows of the beginning of a prompt, where much of both is the same.

        Behind the last position that both have in common another token follows, so that it is read again. A layer that
        keeps a state cannot go back.
        """
        if self.state is None or self.reader.mixers:
            return None
        self._settle()
        best, longest = None, LEAST_SHARED
        for row, member in enumerate(self.members):
            if member is not None:
                text = [*member.request.prompt, *member.request.tokens]
                alike = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, text[:-1], prompt)))
                if alike - 1 >= longest:
                    best, longest = row, alike - 1
        if best is None:
            return None
        begun = alone(self.state, best, self.axes)
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
            self.members[row] = None
            vacate(self.state, row)
        if not self.running:
            self.close()

    @torch.no_grad()
    def pack(self) -> None:
        """Take rows that nobody is in out of steps, where shapes may change."""
        if self.state is None or self.plans.execution.name != "eager" or None not in self.members:
            return
        self._settle()
        rows = [row for row, member in enumerate(self.members) if member is not None]
        select(self.state, rows, self.axes)
        self.members[:] = [self.members[row] for row in rows]

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
            member.state = alone(self.state, row, self.axes)
        logger.warning(
            f"Memory does not hold a step of {len(rows)} rows: {self.slots} request(s) at once are decoded from now on."
        )
        members = [member for row in aside if (member := self.members[row]) is not None]
        self.leave(aside)
        if self.plans.execution.name == "eager":
            self.pack()
        elif self.state is not None:  # fixed shapes of fewer rows: the members that stay join anew
            stay = [row for row, member in enumerate(self.members) if member is not None]
            staying = [self.members[row] for row in stay]
            for row, member in zip(stay, staying):
                assert member is not None
                member.state = alone(self.state, row, self.axes)
            self.close()
            for member in staying:
                assert member is not None
                self.join(member)
        return members

    def close(self) -> None:
        """Let go of all memory; members that are still there are lost."""
        if self.runner is not None:
            self.runner.close()
        self.members.clear()
        self.state = self.runner = None
        self.choosers.clear()


def is_short(error: BaseException) -> bool:
    """Whether an error of a step says that it had too many rows."""
    return isinstance(error, DoesNotFit) or out_of_memory(error)
