"""Which request is decoded when: what is done between two steps, and after one. Nothing here knows a thread."""

from __future__ import annotations

import functools
import time
from collections import deque
from concurrent.futures import CancelledError
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit, Unsupported, out_of_memory
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.releases import RequestStatus
from hf_drafthead.batching.requests import Metrics, Request, begin_request, decode_by_itself
from hf_drafthead.batching.tracker import RequestTracker
from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.entry import BesideOthers
from hf_drafthead.generation.lookup import LONGEST_GRAM, TextIndex
from hf_drafthead.generation.rows import SharedBatch, refuse_training
from hf_drafthead.generation.state import Member
from hf_drafthead.generation.tree import ROOT_ALONE, copies_alone
from hf_drafthead.trees.choice import Plans

logger = logging.get_logger(__name__)

WARM_STEPS = 4  # with a tree; a step is recorded when it is taken for the second time
LEAST_PIECE = 128  # tokens of a prompt that are read at once
LOGGED_EVERY = 1000  # steps between two lines of metrics


class Scheduler(RequestTracker):
    """Lets requests join a batch, takes its steps, and ends requests.

    plans: how steps draft; longest_pause: see `Manager`; answers: where texts are put that were answered, to be copied
    from, None for nowhere; slots: as planned, fewer once memory was short; batch: of those that run, None before the
    first; aside: those that had to leave the batch, and join it again before others.
    """

    def __init__(
        self, model: Any, plans: Plans, most_waiting: int, longest_pause: float, answers: TextIndex | None = None
    ):
        super().__init__(most_waiting)
        self.model, self.plans, self.answers = model, plans, answers
        self.slots, self.longest_pause = plans.slots, longest_pause
        self.figures = Metrics()
        self.batch: SharedBatch | None = None
        self.aside: deque[Member] = deque()
        self.epoch = 0  # how often the base may have been changed while requests ran
        self.learner: Any = None  # see `Manager.learn`

    def forget(self, closed: str) -> None:
        """Have nobody's requests: the thread that decoded them is in another process."""
        super().forget(closed)
        self.batch = None
        self.aside.clear()

    @property
    def has_work(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self.waiting or self.aside or (self.batch and self.batch.running))

    def advance(self) -> None:
        """End what was cancelled, let others join, and take a step.

        Whatever raises in what all requests share, such as a hook of the base, ends those that run, or where nobody
        does the one whose turn it is. Others go on.
        """
        began = time.perf_counter()
        try:
            if self.cancelling:
                self._end_cancelled()
            self._fill()
            if self.batch is not None:
                self._step(self.batch)
        except BaseException as error:
            self._recover(error)
        if self.learner is not None:
            self.learner.between(time.perf_counter() - began, idle=not self.has_work)

    def fail_all(self, error: BaseException) -> None:
        """End all requests that are left; there are none where the queue was drained."""
        self.aside.clear()
        if self.batch is not None:
            self.batch.close()
        with self.changed:
            self.waiting.clear()
            left = [*self.known.values()]
        for request in left:
            self._end(request, error)

    def prepared(self) -> SharedBatch | None:
        """The batch, begun anew where the base or the heads have changed and nobody runs; None where nothing drafts."""
        batch = self.batch
        if batch is not None and (batch.running or self.aside):
            return batch
        try:
            reader = self.model._base_reader()
            if batch is None or batch.reader is not reader or batch.model.drafter is not batch.drafter:
                self.plans.renew(reader)
                self.batch = SharedBatch(self.model, reader, self.plans, self.slots)
        except Unsupported:
            self.batch = None
        return self.batch

    @with_room
    def warmup(self) -> None:
        """Find out how to run the base and how to draft, before requests come, and make programs of compiled steps.

        These are of the slots and of texts that are not long; steps of longer ones are compiled when these come. They
        are run with a short request that nobody has asked for.
        """
        if self.is_running():
            raise RuntimeError("the manager runs already: warm it up before start().")
        batch = self.prepared()
        if batch is None:
            return
        plan, device = self.plans.largest, device_of(self.model)
        if self.plans.execution.name == "eager" or batch.running:
            return
        alone = plan.sizes or (copies_alone(plan.tree) and device.type == "cpu")
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
            batch.join(begin_request(self.model, request, plan, device, BesideOthers(batch.reader)))
            for tree in steps:
                if batch.state is not None and not batch.running[0].has_ended(batch.state):
                    batch.step(tree)
        except Exception as error:  # requests that come are told what is wrong with theirs
            logger.warning(f"The steps could not be warmed up: {type(error).__name__}: {error}")
        batch.close()

    # ---- requests that join

    def _fill(self) -> None:
        """Let requests join as long as there are slots; where the heads are others now, once nobody runs."""
        while (batch := self.prepared()) is None or batch.has_room:
            if self.aside and batch is not None:
                self._join(batch, self.aside.popleft())
                continue
            if batch is not None and batch.running and batch.drafter is not self.model.drafter:
                break
            request = self.next()
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
        device = device_of(self.model)
        try:
            if batch is None:
                raise Unsupported("the base does not draft")
            weights = self.epoch, batch.weights()
            others = BesideOthers(batch.reader, batch.beginning(request.prompt, weights))
            if batch.running:
                rows = len(batch.running)
                piece = int(self.longest_pause * rows * self.plans(rows).tree.num_nodes)
                between = functools.partial(self._between, batch, request)
                others = others._replace(piece=max(piece, LEAST_PIECE), between=between)
            member = begin_request(self.model, request, self.plans.largest, device, others)
            member.weights = weights
        except Unsupported as reason:
            logger.warning_once(f"A request is decoded alone, and others wait for it: {reason}.")
            request.status = RequestStatus.DECODING
            decode_by_itself(self.model, request, device, self.deliver)
            self.figures.first(request)
            self._end(request)
            return
        self.figures.first(request)
        request.status = RequestStatus.DECODING
        assert member.state is not None
        if member.has_ended(member.state) or request.cancelled:
            self._close(member)
            return
        if request.streaming:
            self.deliver(request)
        if batch.has_room:
            self._join(batch, member)
        else:  # memory was short for the steps that were taken meanwhile
            self.aside.append(member)

    def _between(self, batch: SharedBatch, request: Request) -> None:
        """Between two pieces of a prompt: a step of those that run; CancelledError where nobody waits for it."""
        self._leave_cancelled(batch)
        if request.cancelled:
            raise CancelledError
        self._step(batch)

    def _join(self, batch: SharedBatch, member: Member) -> None:
        try:
            batch.join(member, len(self.waiting) + len(self.aside))
        except Exception as error:
            self._close(member, error)

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
        self.figures.steps += 1
        self.figures.rows += len(batch.running)
        self.figures.tokens += sum(record.counts)
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
                self.deliver(request)
        if leaving:
            self._leave(batch, leaving)
        if self.figures.steps % LOGGED_EVERY == 0:
            logger.info(f"{self.metrics()}")

    def _end_those_without_positions(self, batch: SharedBatch, positions: int) -> None:
        """End requests that have come to the end of the base's table of positions, which would raise for all."""
        line = f"the text has reached the end of the base's {positions} positions: ask for fewer tokens."
        rows = [] if batch.state is None else [row for row, at in enumerate(batch.state.lengths) if at > positions]
        for row in rows:
            batch.members[row].error = IndexError(line)  # type: ignore[union-attr]
        self._leave(batch, rows)

    def metrics(self) -> dict[str, float]:
        """Requests waiting, running and ended, tokens per step and per second, and seconds to the first token."""
        with self.changed:
            now = {"waiting": len(self.waiting), "running": len(self.known) - len(self.waiting)}
        return {**now, **self.figures.values(), **({} if self.learner is None else self.learner.counts())}

    def _failed(self, batch: SharedBatch, error: BaseException) -> None:
        """After a step that has raised: with fewer rows where memory was short, else none of them can go on."""
        short = isinstance(error, DoesNotFit) or out_of_memory(error)
        if short and len(batch.running) > 1:
            try:
                self.aside.extendleft(reversed(batch.halve()))
                self.slots = batch.slots
                return
            except BaseException as another:
                error, short = another, False
        members = batch.running
        batch.close()
        for member in members:
            self._close(member, (short and error.__cause__) or error)

    def _recover(self, error: BaseException) -> None:
        """Behind an error of what all share: begin anew, without the requests that were begun, or else without the one
        whose turn it is; where there is none, it is raised.
        """
        batch, self.batch = self.batch, None
        members = [*(() if batch is None else batch.running), *self.aside]
        self.aside.clear()
        if batch is not None:
            batch.close()
        for member in members:
            self._close(member, error)
        with self.changed:
            left = [request for request in self.known.values() if request.status != RequestStatus.PENDING]
        if not members and not left:
            if (waiting := self.next()) is None:
                raise error
            left = [waiting]
        for request in left:
            self._end(request, error)

    # ---- requests that end

    def _end_cancelled(self) -> None:
        for request in self.take_cancelled():
            self._end(request)
        if self.batch is not None:
            self._leave_cancelled(self.batch)
        for member in [member for member in self.aside if member.request.cancelled]:
            self.aside.remove(member)
            self._close(member)

    def _leave_cancelled(self, batch: SharedBatch) -> None:
        self._leave(batch, [member.rows.start for member in batch.running if member.request.cancelled])

    def _leave(self, batch: SharedBatch, rows: list[int]) -> None:
        members = [batch.members[row] for row in rows]
        batch.leave(rows)
        for member in filter(None, members):
            self._close(member)

    def _close(self, member: Member, error: BaseException | None = None) -> None:
        """End the request of a member that is in no slot any more."""
        member.error = member.error or error
        try:
            if member.error is None and member.stream is not None:
                member.stream.end()
        except BaseException as raised:
            member.error = raised
        self._end(member.request, member.error)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        request.ended = time.perf_counter()
        if error is not None:
            request.error = f"{type(error).__name__}: {error}"
        elif request.cancelled:
            request.error = "the request was cancelled"
        request.status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
        self.figures.end(request)
        if self.answers is not None and request.tokens:
            self.answers.put([*request.prompt[-LONGEST_GRAM:], *request.tokens])  # found from its first token on
        if self.learner is not None and request.error is None:
            self.learner.offer(request.prompt, request.tokens, request.learn)
        self.deliver(request)


def device_of(model: Any) -> torch.device:
    """Where prompts are put."""
    device: torch.device = model.base.device
    return torch.device("cpu") if device.type == "meta" else device
