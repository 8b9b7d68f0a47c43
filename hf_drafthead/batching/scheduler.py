"""Which request is decoded when: what is done between two steps, and after one. Nothing here knows a thread."""

from __future__ import annotations

import functools
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import Any

from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, Unsupported, out_of_memory
from hf_drafthead.bases.hooks import input_device
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.releases import RequestStatus
from hf_drafthead.batching.requests import Metrics, Request, begin_request, decode_by_itself
from hf_drafthead.batching.tracker import RequestTracker
from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.lookup import LONGEST_GRAM, TextIndex
from hf_drafthead.generation.rows import SharedBatch, refuse_training
from hf_drafthead.generation.settings import Plans
from hf_drafthead.generation.state import Member
from hf_drafthead.generation.tree import ROOT_ALONE, copies_alone

logger = logging.get_logger(__name__)

WARM_STEPS = 4  # with a tree; a step is recorded when it is taken for the second time
LEAST_PIECE = 128  # tokens of a prompt that are read at once


class Scheduler(RequestTracker):
    """Lets requests join a batch, takes its steps, and ends requests.

    _plans: how steps may draft; _longest_pause: see `Manager`; _answers: where texts are put that were answered, to be
    copied from, None for nowhere; slots: as planned, fewer once memory was short; _batch: of those that run, None
    before the first; _aside: those that join it before others, for they were begun or had to leave it.
    """

    def __init__(
        self, model: Any, plans: Plans, slots: int, most_waiting: int, pause: float, answers: TextIndex | None = None
    ):
        super().__init__(most_waiting)
        self.model, self._plans, self._answers = model, plans, answers
        self.slots, self._longest_pause = slots, pause
        self._figures = Metrics()
        self._batch: SharedBatch | None = None
        self._aside: deque[Member] = deque()
        self._epoch = 0  # how often the base may have been changed while requests ran
        self.learner: Any = None  # see `Manager.learn`

    @property
    def _has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._waiting or self._aside or (self._batch and self._batch.running))

    def _advance(self) -> None:
        """End what was cancelled, let others join, and take a step. What raises in what all share, such as a hook of
        the base, ends those that run, or where nobody does the one whose turn it is; others go on."""
        began = time.perf_counter()
        try:
            if self._cancelling:
                self._end_cancelled()
            self._fill()
            if self._batch is not None:
                self._step(self._batch)
        except BaseException as error:
            self._recover(error)
        if self.learner is not None:
            self.learner.between(time.perf_counter() - began, idle=not self._has_work)

    def _prepared(self) -> SharedBatch | None:
        """The batch, begun anew where the base or the heads have changed and nobody runs; None where nothing drafts."""
        batch = self._batch
        if batch is not None and (batch.running or self._aside):
            return batch
        try:
            reader = self.model._base_reader()
            if batch is None or batch.reader is not reader or batch.model.drafter is not batch.drafter:
                self._batch = SharedBatch(self.model, reader, self._plans, self.slots)
        except Unsupported:
            self._batch = None
        return self._batch

    @with_room
    def warmup(self) -> None:
        """Find out how to run the base and how to draft, before requests come, and make programs of compiled steps.

        These are of the slots and of texts that are not long; steps of longer ones are compiled when these come. They
        are run with a short request that nobody has asked for.
        """
        if self.is_running():
            raise RuntimeError("the manager runs already: warm it up before start().")
        batch = self._prepared()
        if batch is None:
            return
        plan = batch.plan
        if self._plans.execution.name == "eager" or batch.running:
            return
        alone = plan.sizes or (copies_alone(plan.tree) and input_device(self.model.base).type == "cpu")
        trees = [plan.tree, ROOT_ALONE] if alone else [plan.tree]
        steps = [tree for tree in trees for _ in range(WARM_STEPS)]
        vocabulary = self.model.base.config.get_text_config(decoder=True).vocab_size
        settings = {
            "max_new_tokens": 1 + sum(tree.max_depth + 1 for tree in steps),
            "do_sample": False,
            "eos_token_id": vocabulary,  # no token, so that the text goes on; programs take as many ends as of others
        }
        request = Request("", probe_tokens(self.model.base)[:2].tolist(), settings)
        try:
            batch.join(begin_request(self.model, request, plan, joins=batch.reader))
            for tree in steps:
                if batch.state is not None and not batch.running[0].has_ended(batch.state):
                    batch.step(tree)
        except Exception as error:  # requests that come are told what is wrong with theirs
            logger.warning(f"The steps could not be warmed up: {type(error).__name__}: {error}")
        batch.close()

    # ---- requests that join

    def _fill(self) -> None:
        """Let requests join as long as there are slots; where the heads are others now, once nobody runs."""
        while (batch := self._prepared()) is None or len(batch.running) < batch.slots:
            if self._aside and batch is not None:
                member = self._aside.popleft()
                try:
                    batch.join(member, len(self._waiting) + len(self._aside))
                except Exception as error:
                    self._end(member.request, error)
                continue
            if batch is not None and batch.running and batch.drafter is not self.model.drafter:
                break
            request = self._next()
            if request is None:
                break
            request.status, request.began = RequestStatus.PREFILLING, time.perf_counter()
            try:
                self._begin(batch, request)
            except BaseException as error:  # of objects of the user's, what would end a process ends a request
                self._end(request, None if request.cancelled else error)
        if batch is not None:
            batch.pack()

    def _begin(self, batch: SharedBatch | None, request: Request) -> None:
        refuse_training(self.model.base)
        try:
            if batch is None:
                raise Unsupported("the base does not draft")
            weights = self._epoch, batch.weights()
            how: dict[str, Any] = {"joins": batch.reader, "begun": batch.beginning(request.prompt, weights)}
            if batch.running:
                rows = len(batch.running)
                piece = int(self._longest_pause * rows * batch.plan_of(rows).tree.num_nodes)
                how |= {"piece": max(piece, LEAST_PIECE), "between": functools.partial(self._between, batch, request)}
            request.member = member = begin_request(self.model, request, batch.plan, **how)
            member.weights = weights
        except Unsupported as reason:
            logger.warning_once(f"A request is decoded alone, and others wait for it: {reason}.")
            request.status = RequestStatus.DECODING
            decode_by_itself(self.model, request, self._deliver)
            self._figures.first(request)
            self._end(request)
            return
        self._figures.first(request)
        request.status = RequestStatus.DECODING
        assert member.state is not None
        if member.has_ended(member.state) or request.cancelled:
            self._end(request)
            return
        if request.streaming:
            self._deliver(request)
        self._aside.append(member)

    def _between(self, batch: SharedBatch, request: Request) -> None:
        """Between two pieces of a prompt: a step of those that run; CancelledError where nobody waits for it."""
        if self._cancelling:
            self._end_cancelled()
        if request.cancelled:
            raise CancelledError
        self._step(batch)

    # ---- steps

    def _step(self, batch: SharedBatch) -> None:
        if batch.positions is not None:
            self._end_those_without_positions(batch, batch.positions)
        if not batch.running:
            return
        try:
            batch.check_base()
            (record,) = batch.step()
            batch.check_base()  # another thread may have changed it meanwhile
        except BaseException as error:
            self._failed(batch, error)
            return
        self._figures.steps += 1
        self._figures.rows += len(batch.running)
        self._figures.tokens += sum(record.counts)
        leaving: list[int] = []
        for member in batch.running:
            row, request = member.rows.start, member.request
            try:
                request.take(record.tokens[row][: record.counts[row]], member.rules.scores, record.drafted)
            except BaseException as error:
                member.error = error
            if batch.state is None or member.has_ended(batch.state):
                leaving.append(row)
            elif request.streaming and record.counts[row]:
                self._deliver(request)
        if leaving:
            self._leave(batch, leaving)

    def _end_those_without_positions(self, batch: SharedBatch, positions: int) -> None:
        """End requests that have come to the end of the base's table of positions, which would raise for all."""
        line = f"the text has reached the end of the base's {positions} positions: ask for fewer tokens."
        rows = [] if batch.state is None else [row for row, at in enumerate(batch.state.lengths) if at > positions]
        for row in rows:
            batch.members[row].error = IndexError(line)  # type: ignore[union-attr]
        self._leave(batch, rows)

    def metrics(self) -> dict[str, float]:
        """Requests waiting, running and ended, tokens per step and per second, and seconds to the first token."""
        with self._changed:
            now = {"waiting": len(self._waiting), "running": len(self._known) - len(self._waiting)}
        return {**now, **self._figures.values(), **({} if self.learner is None else self.learner.counts())}

    def _failed(self, batch: SharedBatch, error: BaseException) -> None:
        """After a step that has raised: with fewer rows where memory was short, else none of them can go on."""
        short = isinstance(error, DoesNotFit) or out_of_memory(error)
        if short and len(batch.running) > 1:
            try:
                self._aside.extendleft(reversed(batch.halve()))
                self.slots = batch.slots
                return
            except BaseException as another:
                error, short = another, False
        members = batch.running
        batch.close()
        for member in members:
            self._end(member.request, (short and error.__cause__) or error)

    def _recover(self, error: BaseException, everybody: bool = False) -> None:
        """Behind an error of what all share: begin anew, without the requests that were begun, or else without the one
        whose turn it is; where there is none, it is raised. Or without any, where `everybody` ends.
        """
        batch, self._batch = self._batch, None
        self._aside.clear()
        if batch is not None:
            batch.close()
        with self._changed:
            if everybody:
                self._waiting.clear()
            begun = (request for request in self._known.values() if request.status != RequestStatus.PENDING)
            left = [*(self._known.values() if everybody else begun)]
        if not left and not everybody:
            if (waiting := self._next()) is None:
                raise error
            left = [waiting]
        for request in left:
            self._end(request, error)

    # ---- requests that end

    def _end_cancelled(self) -> None:
        with self._changed:
            self._cancelling = False
            gone = [request for request in self._waiting if request.cancelled]
            self._waiting = deque(request for request in self._waiting if not request.cancelled)
        gone += [member.request for member in self._aside if member.request.cancelled]
        self._aside = deque(member for member in self._aside if not member.request.cancelled)
        for request in gone:
            self._end(request)
        if self._batch is not None:
            running = self._batch.running
            self._leave(self._batch, [member.rows.start for member in running if member.request.cancelled])

    def _leave(self, batch: SharedBatch, rows: list[int]) -> None:
        members = [batch.members[row] for row in rows]
        batch.leave(rows)
        for member in filter(None, members):
            self._end(member.request)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        """Give a request, which is in no slot any more, its last result."""
        member, request.member = request.member, None
        try:
            error = error if member is None else member.error or error
            if error is None and member is not None and member.stream is not None:
                member.stream.end()
        except BaseException as raised:
            error = raised
        request.ended = time.perf_counter()
        if error is not None:
            request.error = f"{type(error).__name__}: {error}"
        elif request.cancelled:
            request.error = "the request was cancelled"
        request.status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
        self._figures.end(request)
        if self._answers is not None and request.tokens:
            self._answers.put([*request.prompt[-LONGEST_GRAM:], *request.tokens])  # found from its first token on
        if self.learner is not None and request.error is None:
            self.learner.offer(request.prompt, request.tokens, request.learn, request.accepted)
        self._deliver(request)
