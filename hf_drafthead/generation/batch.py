"""One batch: the calls in it, their state, and the step of all of them; and the loop of one call (`decode`).

`generate` makes a batch of one call, whose rows begin together (`of_one`). A manager makes one of many calls of one row
each, which were prefilled alone, join between two steps, and leave when they end. Steps that are eager run over the
rows that are there. Compiled and recorded ones have fixed shapes: then all slots are rows from the first call on, and
an empty one is a row that has ended.

Shapes: B rows, N nodes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from transformers.utils import logging

from hf_drafthead.bases.hooks import changed_by_training, parts
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, table_of_positions
from hf_drafthead.generation.lookup import accepted_copies, matches
from hf_drafthead.generation.rows import Axes, alone, axes_of, put, select, vacate
from hf_drafthead.generation.runner import Execution, Runner
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import DecodingState, DraftHeadGenerateOutput, Member, Outcome, StepRecord
from hf_drafthead.generation.step import now
from hf_drafthead.generation.tree import ROOT_ALONE, LookupTree, Tree, copies_alone

logger = logging.get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

ADAPTERS = ("_active_adapter", "_disable_adapters", "merged_adapters", "scaling")  # of a layer that has some
LEAST_SHARED = 32  # tokens of a prompt that are copied from another row; fewer are read as soon

FRAME_WORDS = 1 << 15  # of 8 bytes; a frame of so many gets a block of twice as many: the rest is for those below it


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it and what it calls have 256 KiB for their frames in one block.

    CPython keeps frames in blocks of 16 KiB. A call whose frame does not fit into the rest of a block takes a new one
    from the operating system, and gives it back when it returns: where a block happens to end between the loop of
    decoding and the functions that it calls, up to 200 times in a step of the bundled Medusa, 26 in a captured one.

    >>> with_room(max)(1, 2)
    2
    """

    @functools.wraps(function)
    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=FRAME_WORDS)  # type: ignore[attr-defined]
    return roomy


def chooser(plan: DraftPlan, on_cpu: bool, sizes: Any) -> Callable[[DecodingState], Tree] | None:
    """What says which tree the next step takes; None where that is always the plan's.

    As many nodes as pay (`sizes`, see `trees.sizes.Sizes`). On a CPU, where each node costs, the root alone where
    copies from the text are all that is guessed and no row has a match. Only tokens and scores decide.
    """
    tree = plan.tree
    lookup = tree if isinstance(tree, LookupTree) and copies_alone(tree) and on_cpu else None
    if plan.sizes is None and lookup is None:
        return None
    texts = None if lookup is None else plan.texts_on(torch.device("cpu"))

    def choose(state: DecodingState) -> Tree:
        drafts = lookup is None or matches(lookup, state.rows.sequences, state.rows.lengths, texts)
        plain = tree if drafts else ROOT_ALONE
        return plain if plan.sizes is None else sizes.tree(plan.sizes, state, drafts)  # type: ignore[no-any-return]

    return choose


def refuse_training(base: Any) -> None:
    """Refuse a base in training mode that computes something else than in eval mode."""
    if base.training and (changed := changed_by_training(base)):
        raise RuntimeError(
            f"the model is in training mode, which changes what it computes ({changed}): train it within pause(), then "
            "call eval()."
        )


class Batch:
    """Calls that are decoded together.

    plan_of: how steps of so many running rows draft; largest: the plan of the largest tree; slots: rows at most, fewer
    once memory was short; shared: whether others may join; timed: whether the stages of eager steps are timed; members:
    by row, None where nobody is; a call of g rows stands there g times.
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
        self.sizes: Any = None  # what the last steps say of how many nodes pay
        self.launched: deque[Outcome] = deque()

    @classmethod
    def of_one(cls, model: Any, member: Member, execution: Execution, timed: bool = False) -> Batch:
        """The batch of one call, which no other joins."""
        if member.reader.more:  # of this call alone, and a program is for all
            execution = Execution("eager")
        count, plan, state = len(member.rows), member.plan, member.state
        assert state is not None
        batch = cls(model, member.reader, lambda rows: plan, plan, execution, count, shared=False, timed=timed)
        batch.members += [member] * count
        batch.state, batch.runner = state, Runner(batch, state, batch._chooser(plan, state))
        return batch

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
        joins, state = member.state, self.state
        assert joins is not None and self.has_room
        if state is None or self.runner is None:
            rows = 1 if self.execution.name == "eager" else self.slots
            self.members[:] = [None] * rows
            self.state, self.runner = joins, Runner(self, joins, self._tree)
            if rows > 1:
                select(joins, [0] * rows, self._axes)
                for row in range(1, rows):
                    vacate(joins, row)
            row = 0
        else:
            self._settle()
            if None not in self.members:
                rows = len(self.members)
                more = min(1 + others, self.slots - rows)
                select(state, [*range(rows), *[0] * more], self._axes)
                self.members += [None] * more
                for row in range(rows, rows + more):
                    vacate(state, row)
            row, ends = self.members.index(None), state.limits.eos.shape
            self.runner.fit(state, self.runner.tree.max_depth + 1, joins.lengths[0])
            put(state, row, joins, self._axes)
            if state.limits.eos.shape != ends:
                self.runner.recorded.clear()
        self.members[row], member.rows, member.state = member, range(row, row + 1), None

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
            self.choosers[count] = self._chooser(plan, state)
        choose = self.choosers[count]
        return plan.tree if choose is None else choose(state)

    def _chooser(self, plan: DraftPlan, state: DecodingState) -> Callable[[DecodingState], Tree] | None:
        if self.sizes is None and plan.sizes is not None:
            self.sizes = plan.sizes.begin(self.shared)
        return chooser(plan, state.rows.lengths.device.type == "cpu", self.sizes)

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

    def _settle(self) -> None:
        """Let the drafter observe what waits for it, before rows change."""
        if self.state is not None and self.state.pending and self.runner is not None:
            self.runner.observe(self.state)

    @torch.no_grad()
    def step(self) -> list[StepRecord]:
        """Take one step: the records of those whose outcome is known by then.

        Members whose own rules have raised have an `error`. DoesNotFit where there is no memory for so many rows, which
        are as they were; behind what the base raises nothing can go on.
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
        """A copy of what a running row, whose keys are of these `weights`, knows of the beginning of a prompt, if much.

        Behind the last position that both have in common another token follows, so that it is read again. A layer that
        keeps a state cannot go back.
        """
        if self.state is None or self.reader.mixers:
            return None
        self._settle()
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
        self._settle()
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
        self._settle()
        select(self.state, [row for row, member in enumerate(self.members) if member is not None], self._axes)
        self.members[:] = self.running
        for row, member in enumerate(self.running):
            member.rows = range(row, row + 1)

    @torch.no_grad()
    def halve(self) -> list[Member]:
        """Set the younger half of the members aside, each with a state of its own to join with again."""
        assert self.state is not None
        self._settle()
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

    def close(self) -> None:
        """Let go of all memory; members that are still there are lost."""
        self.launched.clear()
        for arena in () if self.runner is None else self.runner.held:
            arena.free = True  # for other calls; a traceback may hold this state for long
        self.members.clear()
        self.state = self.runner = self.sizes = None
        self.choosers.clear()


@torch.no_grad()
def decode(
    member: Member,
    model: Any,
    execution: Execution,
    on_step: Callable[[StepRecord], None] | None = None,
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate behind a prompt that was read, by a batch of this call alone, until every row has ended."""
    device, start = model.base.device, 0.0
    with contextlib.closing(Batch.of_one(model, member, execution, timed=on_step is not None)) as batch:
        state = batch.state
        assert state is not None
        if on_step is not None:
            start = now(device)
            roots = state.rows.sequences.gather(1, state.rows.lengths[:, None] - 1)[..., None].tolist()
            on_step(StepRecord(0, roots, [], [1] * len(roots), 0, {"prefill": member.prefilled_in}, plan=member.plan))
        while not member.has_ended(state):
            for record in batch.step():
                if on_step is not None:
                    start, last = now(device), start
                    record.seconds["step"] = start - last
                    if isinstance(tree := member.plan.tree, LookupTree):
                        texts, tokens = member.plan.texts_on(state.rows.lengths.device), state.rows.sequences
                        of_step = tree, texts, tokens, [*state.lengths], record.tokens
                        record = replace(record, copied=functools.partial(accepted_copies, *of_step))
                    on_step(record)
        if member.error is not None:
            raise member.error
        return finish(member, state)


def finish(member: Member, state: DecodingState) -> DraftHeadGenerateOutput | torch.Tensor:
    """What the base's generate would return, in its form."""
    rules, (ordinary_cache, cached_length) = member.rules, member.given
    length = max(end for end in state.ends if end is not None)
    if rules.samples:
        rules.random.chosen(length - rules.prompt_length)
    if member.stream is not None:
        member.stream.end()
    sequences = state.rows.sequences[:, :length].to(rules.device, copy=True)
    in_dict = rules.config.return_dict_in_generate
    if in_dict or getattr(ordinary_cache, "_is_user_defined", False):
        cache = state.rows.cache
        if (first := min(state.lengths) - 1) < length - 1:  # the base has read the padding behind a row's end, too
            if cache.recurrent:  # what grows must not be a program's
                cache = cache.twin()
                cache.fixed, cache.extent = False, int(cache.lengths.max())
            rows, start = state.rows, first + state.past_shift
            member.reader.rewrite(
                rows.sequences[:, first : length - 1], cache, start, rows.position_shift, rows.visible
            )
        cache.unload(ordinary_cache, cached_length, length - 1 + state.past_shift)
    if not in_dict:
        return sequences
    steps = torch.tensor(member.counted, dtype=torch.long, device=sequences.device)
    new = length - rules.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        accepted_lengths=steps.reshape(-1, len(state.lengths)).T,
        **{CACHE: ordinary_cache},
    )
