"""The manager of many requests, with the methods and results of transformers' own for continuous batching.

One thread decodes. It alone looks at the model; others put requests, cancellations and wishes to pause or stop behind
one lock, and it takes them between two steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.utils import logging

from hf_drafthead.batching.batch import Batch, is_short
from hf_drafthead.batching.metrics import Metrics
from hf_drafthead.batching.noise import RequestNoise
from hf_drafthead.batching.plans import Plans
from hf_drafthead.batching.requests import Request, begin, config_value, decode_alone, with_config
from hf_drafthead.batching.step import Member
from hf_drafthead.generation.mixin import with_room
from hf_drafthead.generation.reader import Unsupported
from hf_drafthead.generation.settings import DraftSettings

logger = logging.get_logger(__name__)

SLOTS = 8  # requests at once where nothing else is said
WAIT = 10.0  # seconds for which `add_request` waits where the queue is full, as transformers does
LEAST_PIECE = 128  # tokens of a prompt that are read at once
LOGGED_EVERY = 1000  # steps between two lines of metrics


class Manager:
    """Decodes many requests at once, each with its own settings, and each to the text that it would have alone.

    `model.init_continuous_batching()` makes one; its methods are those of transformers' `ContinuousBatchingManager`.

    Args:
        model: with draft heads.
        generation_config: of requests that say nothing else.
        continuous_batching_config: of transformers; `max_requests_per_batch`, `max_queue_size`, `return_logprobs` and
            `seed` count here, what describes pages and graphs does not.
        slots: requests at once; default: the config's `max_requests_per_batch`, else 8.
        draft_tree: of all requests, see `generate`.
        longest_pause: for which requests that run wait while the prompt of another is read, in steps of theirs; a
            longer prompt is read in pieces, with a step between two. Tokens that are read are counted, at least 128.
    """

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        *,
        slots: int | None = None,
        draft_tree: Any = None,
        longest_pause: float = 4.0,
    ):
        self.model, self.generation_config, self.config = model, generation_config, continuous_batching_config
        asked = slots if slots is not None else getattr(self.config, "max_requests_per_batch", None)
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 1):
            raise ValueError(
                f"slots is {asked!r}: expected the number of requests that are decoded at once, from 1 on."
            )
        wanted = getattr(workload_hints, "num_requests", 0) or SLOTS
        self.slots: int = asked or min(SLOTS, wanted)
        self.most_waiting: int = getattr(self.config, "max_queue_size", 0) or 0
        self.longest_pause = longest_pause
        self.num_return_sequences: int = config_value("num_return_sequences", generation_config) or 1
        seed = getattr(self.config, "seed", None)
        self.tokenizer: Any = None  # of requests with stop strings that bring none
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed)
        self.changed = threading.Condition()
        self.waiting: deque[Request] = deque()
        self.known: dict[str, Request] = {}  # those that wait or run
        self.results: deque[GenerationOutput] = deque()
        self.handlers: dict[str, tuple[Callable[[GenerationOutput], None], Any]] = {}
        self.metrics_ = Metrics()
        self.warmed_up = False
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self._added = self._pauses = 0
        self._pausing = threading.local()
        self._paused = False
        self._stopping: str | None = None  # "drain" or "cancel"
        self._thread: threading.Thread | None = None
        self._batch: Batch | None = None
        self._plans = Plans(model, generation_config, self.slots, draft_tree)
        self._aside: deque[Member] = deque()  # had to leave the batch, and join it again before others

    @classmethod
    def of(
        cls,
        model: Any,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        **settings: Any,
    ) -> Manager:
        """The manager that an earlier session has kept with the model, else a new one."""
        kept = model.__dict__.get("_cached_continuous_batching_manager")
        if isinstance(kept, cls):
            return kept
        return cls(model, generation_config, continuous_batching_config, workload_hints, **settings)

    # ---- asking

    def add_request(
        self,
        input_ids: list[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        *,
        seed: int | None = None,
        **settings: Any,
    ) -> str:
        """Let a prompt wait for its turn.

        Args:
            input_ids: P token ids.
            request_id: by which results name it; default: a number.
            max_new_tokens, eos_token_id: as in `generate`; negative ids are none.
            streaming: a result after every step, with all tokens so far.
            record_timestamps: results say when each token came.
            seed: the text is that of `torch.manual_seed(seed)` and `generate` alone; default: the random numbers go on
                from where the process's generator stands, which is moved.
            settings: whatever else `generate` takes: `generation_config`, `temperature`, `logits_processor`,
                `stopping_criteria`, `streamer`, `stop_strings` with `tokenizer`, ...

        Returns:
            the id.

        Raises:
            ValueError: the prompt is empty or holds no token ids, or the id is that of a request that is not finished.
            RuntimeError: the manager was stopped, or its thread has died.
            queue.Full: too many requests wait already.
        """
        prompt = _checked(input_ids)
        if eos_token_id is not None:
            ends = [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
            settings["eos_token_id"] = [token for token in ends if token >= 0] or None
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        settings = {**with_config(settings.pop("generation_config", None) or self.generation_config), **settings}
        settings["num_return_sequences"] = 1
        settings.setdefault("tokenizer", self.tokenizer)
        if given := {name for name in DraftSettings.names() if settings.get(name) is not None}:
            raise ValueError(f"{', '.join(sorted(given))}: steps are shared, give it to init_continuous_batching.")
        request = Request("", prompt, settings, None, streaming=streaming, record_timestamps=record_timestamps)
        request.keeps_logprobs = bool(getattr(self.config, "return_logprobs", False))
        sampled = config_value("do_sample", settings, settings.get("generation_config"), self.model.generation_config)
        with self.changed:
            self._wait_for_room()
            if request_id is None:
                request_id = f"req_{self._added}"
            if request_id in self.known:
                raise ValueError(f"the request {request_id!r} is not finished yet: give another request_id.")
            seed = config_value("seed", {"seed": seed}, settings.get("generation_config"))
            if seed is None and self._seeds is not None:
                seed = int(torch.randint(1 << 62, (), generator=self._seeds))
            if sampled or request.objects or seed is not None:
                request.noise = RequestNoise(_device(self.model), seed)
            request.request_id, request.number = request_id, self._added
            self._added += 1
            self.known[request_id] = request
            self.waiting.append(request)
            self.changed.notify_all()
        return request_id

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **settings: Any,
    ) -> list[str]:
        """`add_request` for every prompt, with the same settings; returns the ids in this order.

        Where the generation config asks for several sequences of a prompt, the others have ids `ID__child#NUMBER`.
        """
        ids: list[str] = []
        add = self.add_request
        for prompt in inputs:
            ids.append(add(prompt, None, max_new_tokens, streaming, record_timestamps, **settings))
            for child in range(self.num_return_sequences - 1):
                name = f"{ids[-1]}__child#{child}"
                add(prompt, name, max_new_tokens, streaming, record_timestamps, **settings)
        return ids

    def _wait_for_room(self) -> None:
        """Until the queue has room; with the lock."""
        self._refuse_if_stopped()
        if not self.most_waiting:
            return
        free = self.changed.wait_for(lambda: len(self.waiting) < self.most_waiting or bool(self._stopping), WAIT)
        self._refuse_if_stopped()
        if not free:
            raise queue.Full(
                f"{len(self.waiting)} requests wait, and max_queue_size is {self.most_waiting}: ask again later."
            )

    def _refuse_if_stopped(self) -> None:
        if (error := self.background_thread_status.fatal_error) is not None:
            raise RuntimeError(f"the thread that decodes has died of {type(error).__name__}: {error}")
        if self._stopping:
            raise RuntimeError("the manager was stopped: start() it again, or make a new one.")

    def cancel_request(self, request_id: str) -> None:
        """Let a request end within a step; its last result holds what it has. An unknown id is ignored."""
        with self.changed:
            if (request := self.known.get(request_id)) is not None:
                request.cancelled = True
                self.changed.notify_all()

    # ---- results

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, or the next of one request; None after `timeout` seconds, or where none will come."""

        def place() -> int | None:
            wanted = (at for at, each in enumerate(self.results) if request_id in (None, each.request_id))
            return next(wanted, None)

        with self.changed:
            self.changed.wait_for(lambda: place() is not None or not self.is_running(), timeout)
            at = place()
            if at is None:
                return None
            result = self.results[at]
            del self.results[at]
            return result

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager is stopped and none are left."""
        while (result := self.get_result()) is not None:
            yield result

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of one request as they come, to the last."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Give the results of a request to a function, on the event loop that runs here, instead of keeping them."""
        loop = asyncio.get_running_loop()
        with self.changed:
            early = [result for result in self.results if result.request_id == request_id]
            for result in early:
                self.results.remove(result)
            if not any(result.is_finished() for result in early):
                self.handlers[request_id] = callback, loop
        for result in early:
            loop.call_soon(callback, result)

    def _deliver(self, request: Request) -> None:
        output = request.output()
        with self.changed:
            if request.finished:
                self.known.pop(request.request_id, None)
            callback, loop = self.handlers.get(request.request_id, (None, None))
            if request.finished:
                self.handlers.pop(request.request_id, None)
            if callback is None:
                self.results.append(output)
            self.changed.notify_all()
        if callback is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop of a client that has gone is closed
                loop.call_soon_threadsafe(callback, output)

    def metrics(self) -> dict[str, float]:
        """Requests waiting, running and ended, tokens per step and per second, and seconds to the first token."""
        with self.changed:
            waiting, running = len(self.waiting), len(self.known) - len(self.waiting)
        return {"waiting": waiting, "running": running, **self.metrics_.values()}

    # ---- control

    def is_running(self) -> bool:
        """Whether the thread decodes, or waits for something to decode."""
        return self._thread is not None and self._thread.is_alive()

    def warmup(self) -> None:
        """Find out how to run the base and how to draft, and run what is compiled, before requests come."""
        if self.is_running():
            raise RuntimeError("the manager runs already: warm it up before start().")
        if self._prepared() is not None:
            self._plans.largest  # noqa: B018
        self.warmed_up = True

    def start(self) -> None:
        """Start the thread that decodes; does nothing where it runs."""
        if self.is_running():
            return
        self._stopping, self.background_thread_status.fatal_error = None, None
        self._thread = threading.Thread(
            target=self._run, args=(torch.is_inference_mode_enabled(),), name="hf_drafthead batch", daemon=True
        )
        self._thread.start()

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests. Those that wait and run are finished first; with `hard_stop` they end with an error.

        Args:
            block: wait for that, `timeout` seconds at most.
            keep_for_next_session: keep this manager with the model, for `init_continuous_batching`.
        """
        if getattr(self._pausing, "depth", 0):
            raise RuntimeError("a manager cannot be stopped by a thread that pauses it: leave `pause` first.")
        begun = time.perf_counter()
        with self.changed:
            self._stopping = "cancel" if hard_stop else self._stopping or "drain"
            self.changed.notify_all()
        if block:
            self.join(begun, timeout)
        if keep_for_next_session:
            self.model.__dict__["_cached_continuous_batching_manager"] = self

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the end of the thread, `timeout` seconds at most."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        thread.join(timeout)
        if thread.is_alive():
            logger.warning(f"The thread that decodes has not ended within {timeout} s.")
        else:
            self._thread = None

    def destroy(self) -> None:
        """Stop, and let go of all memory."""
        self.stop(block=True)
        self.model.__dict__.pop("_cached_continuous_batching_manager", None)
        self._batch = None

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Between two steps nothing is decoded meanwhile, so that weights can be changed; requests go on afterwards."""
        with self.changed:
            if not self.is_running():
                raise RuntimeError("the manager does not run: there is nothing to pause.")
            self._pauses += 1
            self._pausing.depth = getattr(self._pausing, "depth", 0) + 1
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._paused or not self.is_running())
        try:
            yield
        finally:
            with self.changed:
                self._pauses -= 1
                self._pausing.depth -= 1
                self.changed.notify_all()

    # ---- the thread that decodes

    def _run(self, inference: bool) -> None:
        try:
            with torch.inference_mode(inference):
                self._loop()
        except BaseException as error:
            self.background_thread_status.fatal_error = error
            logger.error(f"The thread that decodes has died of {type(error).__name__}: {error}")
            self._fail_all(error)
        finally:
            if self._batch is not None:
                self._batch.close()
            with self.changed:
                self._paused = False
                self._stopping = self._stopping or "drain"
                self._thread = None
                self.changed.notify_all()

    @with_room
    def _loop(self) -> None:
        while self._wait():
            self._end_cancelled()
            self._fill()
            if self._batch is not None and self._batch.running:
                self._step(self._batch)
        self._fail_all(RuntimeError("the manager was stopped before this request was finished"))

    def _wait(self) -> bool:
        """Until there is something to do; False where that is to end."""

        def work() -> bool:
            batch = self._batch
            return bool(self.waiting or self._aside or (batch is not None and batch.running))

        with self.changed:
            while True:
                if self._stopping == "cancel" or (self._stopping and not work()):
                    return False
                if self._pauses:
                    self._paused = True
                    self.changed.notify_all()
                    self.changed.wait_for(lambda: not self._pauses)
                    self._paused = False
                    continue
                if work():
                    return True
                self.changed.wait()

    def _end_cancelled(self) -> None:
        with self.changed:
            gone = [request for request in self.waiting if request.cancelled]
            for request in gone:
                self.waiting.remove(request)
        for request in gone:
            self._end(request)
        if self._batch is not None:
            self._leave_cancelled(self._batch)
        for member in [each for each in self._aside if each.request.cancelled]:
            self._aside.remove(member)
            self._close(member)

    def _leave_cancelled(self, batch: Batch) -> None:
        rows = [row for row, each in enumerate(batch.members) if each is not None and each.request.cancelled]
        self._leave(batch, rows)

    def _fill(self) -> None:
        """Let requests join as long as there are slots."""
        while (batch := self._prepared()) is None or batch.has_room:
            if self._aside and batch is not None:
                self._join(batch, self._aside.popleft())
                continue
            with self.changed:
                if not self.waiting:
                    break
                request = self.waiting.popleft()
                self.changed.notify_all()
            request.status, request.began = RequestStatus.PREFILLING, time.perf_counter()
            self._begin(batch, request)
        if batch is not None:
            batch.pack()

    def _begin(self, batch: Batch | None, request: Request) -> None:
        try:
            try:
                if batch is None:
                    raise Unsupported("the base does not draft")
                pieces = (self._piece(batch), lambda: self._between(batch)) if batch.running else None
                shared = batch.beginning(request.prompt), pieces
                member = begin(self.model, request, self._plans.largest, batch.reader, _device(self.model), *shared)
            except Unsupported as reason:
                logger.warning_once(f"A request is decoded alone, and others wait for it: {reason}.")
                decode_alone(self.model, request, _device(self.model))
                self.metrics_.first(request)
                self._end(request)
                return
        except Exception as error:
            self._end(request, error)
            return
        self.metrics_.first(request)
        request.status = RequestStatus.DECODING
        if batch is None or member.state is None or member.state.ends[0] is not None:
            self._close(member)
            return
        if request.streaming:
            self._deliver(request)
        self._join(batch, member)

    def _piece(self, batch: Batch) -> int:
        """How many tokens of a prompt are read while those that run wait."""
        rows = len(batch.running)
        return max(int(self.longest_pause * rows * self._plans(rows).tree.num_nodes), LEAST_PIECE)

    def _between(self, batch: Batch) -> None:
        """Between two pieces of a prompt: a step of those that run."""
        self._leave_cancelled(batch)
        if batch.running:
            self._step(batch)

    def _join(self, batch: Batch, member: Member) -> None:
        try:
            batch.join(member, len(self.waiting) + len(self._aside))
        except Exception as error:
            member.error = error
            self._close(member)

    def _step(self, batch: Batch) -> None:
        try:
            record = batch.step()
        except Exception as error:
            self._failed(batch, error)
            return
        self.metrics_.step(len(batch.running), sum(record.counts))
        leaving = []
        for row, member in enumerate(batch.members):
            if member is None:
                continue
            request = member.request
            try:
                request.take(record.tokens[row][: record.counts[row]], member.rules)
                if member.error is None and member.stream.streamer is not None and batch.state is not None:
                    with member.drawing():
                        member.stream.committed(batch.view(row), member.rules)
            except Exception as error:
                member.error = error
            if member.error is not None or batch.ended(row):
                leaving.append(row)
            elif request.streaming and record.counts[row]:
                self._deliver(request)
        self._leave(batch, leaving)
        if self.metrics_.steps % LOGGED_EVERY == 0:
            logger.info(f"{self.metrics()}")

    def _failed(self, batch: Batch, error: Exception) -> None:
        """After a step that has raised: with fewer rows where memory was short, else none of them can go on."""
        if is_short(error) and len(batch.running) > 1:
            try:
                self._aside.extendleft(reversed(batch.halve()))
                self.slots = batch.slots
                return
            except Exception as another:
                error = another
        members = batch.running
        batch.close()
        for member in members:
            member.error = error.__cause__ if is_short(error) and isinstance(error.__cause__, Exception) else error
            self._close(member)

    def _leave(self, batch: Batch, rows: list[int]) -> None:
        members = [batch.members[row] for row in rows]
        batch.leave(rows)
        for member in members:
            if member is not None:
                self._close(member)

    def _close(self, member: Member) -> None:
        """End the request of a member that is in no slot any more."""
        try:
            with member.drawing():
                member.rules.close()
                if member.stream.streamer is not None and member.error is None:
                    member.stream.streamer.end()
        except Exception as error:
            member.error = member.error or error
        self._end(member.request, member.error)

    def _end(self, request: Request, error: BaseException | None = None) -> None:
        request.ended = time.perf_counter()
        if error is not None:
            request.error = f"{type(error).__name__}: {error}"
        elif request.cancelled:
            request.error = "the request was cancelled"
        request.status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
        self.metrics_.end(request)
        self._deliver(request)

    def _fail_all(self, error: BaseException) -> None:
        """End all requests that are left; there are none where the queue was drained."""
        with self.changed:
            left = [*self.known.values()]
            self.waiting.clear()
        self._aside.clear()
        if self._batch is not None:
            self._batch.close()
        for request in left:
            self._end(request, error)

    def _prepared(self) -> Batch | None:
        """The batch, begun anew where the base or the heads have changed and nobody runs; None where nothing drafts."""
        if self._batch is not None and self._batch.running:
            return self._batch
        try:
            reader = self.model._base_reader()
        except Unsupported:
            self._batch = None
            return None
        batch = self._batch
        if batch is None or batch.reader is not reader or batch.model.drafter is not batch.drafter:
            self._plans.renew(reader)
            self._batch = batch = Batch(self.model, reader, self._plans, self.slots)
        return batch


def _checked(input_ids: Any) -> list[int]:
    """A prompt as a list of token ids.

    Raises:
        ValueError: it is none.
    """
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and len(input_ids) == 1:
            input_ids = input_ids[0]
        input_ids = input_ids.tolist()
    prompt = list(input_ids)
    if not prompt or any(isinstance(token, bool) or not isinstance(token, int) for token in prompt):
        shown = repr(prompt if len(prompt) < 6 else [*prompt[:5], "..."])
        raise ValueError(f"the prompt is {shown}: expected the token ids of one text, at least one.")
    return prompt


def _device(model: Any) -> torch.device:
    """Where prompts are put."""
    device: torch.device = model.base.device
    return torch.device("cpu") if device.type == "meta" else device
