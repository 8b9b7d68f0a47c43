"""The manager of many requests, with the methods and results of transformers' own for continuous batching.

RequestTracker   requests that wait, results that nobody has taken, behind one lock
Scheduler        is one: who joins a batch, who leaves, and what happens to those that fail
Manager          is one: arguments into requests, and the thread that decodes
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.utils import logging

from hf_drafthead.bases.hooks import input_device
from hf_drafthead.bases.releases import table_of_positions
from hf_drafthead.batching.requests import OBJECTS, Request, config_value
from hf_drafthead.batching.scheduler import Scheduler
from hf_drafthead.batching.tracker import OWN_THREAD
from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.lookup import ANSWERS, TextIndex
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.generation.settings import DraftSettings, Plans

logger = logging.get_logger(__name__)

SHARED = (*DraftSettings.names(), "lookup_texts")  # by all requests
SLOTS, SLOTS_ON_CPU = 32, 8  # requests at once where nobody says; on a CPU each further token of a step costs
LAST_STEP = 10.0  # seconds for which a process that ends waits for the thread
STOPPED = "the manager was stopped: start() it again, or make a new one."
FORKED = "the process was forked, and the thread that decodes is in the other one: start() the manager here."
ENDING = "the manager is being stopped: start() it in another thread than the one that decodes."

MANAGERS: weakref.WeakSet[Manager] = weakref.WeakSet()  # of this process


def _forked() -> None:
    for manager in MANAGERS:
        manager._forget_thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Manager(Scheduler):
    """Decodes many requests at once, each with its own settings, and each to the text that it would have alone.

    `model.init_continuous_batching()` makes one; its methods are those of transformers' `ContinuousBatchingManager`.

    Args:
        model: with draft heads. It is put into eval mode, as transformers does.
        generation_config: of requests that say nothing else.
        continuous_batching_config: of transformers; `max_requests_per_batch`, `max_queue_size`, `return_logprobs` and
            `seed` count here, what describes pages and graphs does not.
        slots: requests at once; default: the config's `max_requests_per_batch`, else 32, on a CPU 8, where each further
            token of a step costs; fewer where fewer will come.
        max_queue_size: requests that may wait beside them; default: the config's, else any number.
        draft_tree: of all requests, see `generate`.
        lookup_texts: to copy guesses from, in all requests, see `generate`; strings need `tokenizer`.
        lookup_answers: what was answered is copied from as well: the newest million tokens, or as many as a `TextIndex`
            that is given holds beside its own.
        tokenizer: of `lookup_texts`, and of requests with stop strings that bring none.
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
        max_queue_size: int | None = None,
        draft_tree: Any = None,
        lookup_texts: Any = None,
        lookup_answers: bool = False,
        tokenizer: Any = None,
        longest_pause: float = 4.0,
    ):
        self.generation_config, self._config, self._tokenizer = generation_config, continuous_batching_config, tokenizer
        asked = _count("slots", slots, getattr(self._config, "max_requests_per_batch", None), 1)
        wanted = getattr(workload_hints, "num_requests", None)
        most_waiting = _count("max_queue_size", max_queue_size, getattr(self._config, "max_queue_size", None), 0)
        seed = getattr(self._config, "seed", None)
        self._seeds = None if seed is None else torch.Generator().manual_seed(seed)
        looks_up = lookup_answers or lookup_texts is not None
        texts = TextIndex.of(lookup_texts, tokenizer, more=ANSWERS if lookup_answers else 0) if looks_up else None
        config, drafting, _ = model.eval()._merged_config(generation_config, {"use_cache": True}, draft_tree=draft_tree)
        plans = Plans(model, config, drafting, draft_tree, config.prompt_lookup_num_tokens or None, texts)
        if model.drafter.copies is not None:
            model._check_copies(plans)
        most = SLOTS_ON_CPU if model.base.device.type == "cpu" else SLOTS
        slots, answers = asked or min(wanted or most, most), texts if lookup_answers else None
        super().__init__(model, plans, slots, most_waiting or 0, longest_pause, answers)
        self.background_thread_status = SimpleNamespace(fatal_error=None)  # of what the thread has died
        self._stopping: str | None = None  # "drain", or "cancel", after which no further step is taken
        self._stepping = threading.RLock()  # held by the thread within a step, and by others while they pause it
        self._pauses = 0  # threads that pause it, or wait for that
        self._pausing: int | None = None  # which of them does
        MANAGERS.add(self)

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
        learn: bool | None = None,
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
            learn: whether heads may learn from its text; by default as `learn(everybody=)` says.
            settings: whatever else `generate` takes: `generation_config`, `temperature`, `logits_processor`,
                `stopping_criteria`, `streamer`, `stop_strings` with `tokenizer`, ...

        Returns:
            the id.

        Raises:
            ValueError: the prompt is empty, holds no token ids or other ones than the base has, or is longer than the
                base's table of positions; or the id is that of a request that is not finished.
            RuntimeError: the manager was stopped, or its thread has died.
            queue.Full: too many requests wait already, and still after ten seconds; at once where this thread runs an
                event loop.
        """
        if eos_token_id is not None:
            ends = [eos_token_id] if isinstance(eos_token_id, int) else [*eos_token_id]
            settings["eos_token_id"] = [token for token in ends if token >= 0] or None
        if max_new_tokens is not None:
            settings["max_new_tokens"] = max_new_tokens
        try:
            prompt = _checked(input_ids, self.model.base)
            if (config_value("num_return_sequences", settings, settings.get("generation_config")) or 1) != 1:
                raise ValueError(
                    "num_return_sequences: a request is one text; give it to generate_batch, or in a manager's config."
                )
            if (config := settings.pop("generation_config", None) or self.generation_config) is not None:
                # that of transformers' server turns the cache off
                settings = {"generation_config": config, "use_cache": True, **settings}
            settings["num_return_sequences"] = 1
            settings.setdefault("tokenizer", self._tokenizer)
            if shared := {name for name in SHARED if settings.get(name) is not None}:
                raise ValueError(f"{', '.join(sorted(shared))}: steps are shared, give it to init_continuous_batching.")
            seed = config_value("seed", {"seed": seed}, config)
            if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 64):
                raise ValueError(f"seed is {seed!r}: expected a whole number, of 64 bits.")
            request = Request("", prompt, settings, 0, streaming, record_timestamps, learn)
            request.keeps_logprobs = bool(getattr(self._config, "return_logprobs", False))
            return self._put(request, request_id, lambda: self._give_noise(request, seed))
        except BaseException:
            with self._changed:
                if request_id is not None and request_id not in self._known:  # else it is that of another request
                    self._handlers.pop(request_id, None)
            raise

    def _give_noise(self, request: Request, seed: int | None) -> None:
        """Let a request draw from where its own call would; where it has no seed that moves a generator."""
        settings = request.settings
        sampled = config_value("do_sample", settings, settings.get("generation_config"), self.model.generation_config)
        request.samples = bool(sampled)
        if seed is None and self._seeds is not None:
            seed = int(torch.randint(1 << 62, (), generator=self._seeds))
        if sampled or any(settings.get(name) for name in OBJECTS):
            request.random = RandomNumbers.of_request(input_device(self.model.base), seed)

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        num_return_sequences: int | None = None,
        **settings: Any,
    ) -> list[str]:
        """`add_request` for every prompt, with the same settings; returns the ids in this order.

        Where these or the generation config ask for several sequences of a prompt, the others have ids
        `ID__child#NUMBER`, and where there is a seed, those that follow it.
        """
        ids: list[str] = []
        config = settings.get("generation_config") or self.generation_config
        asked = {"num_return_sequences": num_return_sequences}
        several = config_value("num_return_sequences", asked, config, self.model.generation_config) or 1
        seed = config_value("seed", settings, config)
        settings["num_return_sequences"] = 1
        for prompt in inputs:
            for child in range(-1, several - 1):
                name = f"{ids[-1]}__child#{child}" if child >= 0 else None
                request_settings = settings if seed is None else {**settings, "seed": seed + child + 1}
                name = self.add_request(prompt, name, max_new_tokens, streaming, record_timestamps, **request_settings)
                ids += [name] if child < 0 else []
        return ids

    # ---- control

    def start(self) -> None:
        """Start the thread that decodes; where it runs, let it take requests again.

        A thread that finishes what it has, after `stop(block=False)`, goes on instead of ending, and so does whoever
        waits for its end.
        """
        with self._changed:
            if self._stopping == "cancel" and self._thread is threading.current_thread():
                raise RuntimeError(ENDING)
            # until it has ended, which is no longer than a step
            self._changed.wait_for(lambda: not (self.is_running() and self._stopping == "cancel"))
            self._stopping = self.background_thread_status.fatal_error = self._closed = None
            self._changed.notify_all()
            if not self.is_running():
                inference = (torch.is_inference_mode_enabled(),)
                self._thread = threading.Thread(None, self._run, "hf_drafthead batch", inference, daemon=True)
                self._thread.start()
                atexit.register(self._end_with_process)

    def stop(self, block: bool = True, timeout: float | None = None, hard_stop: bool = False) -> None:
        """Take no more requests. Those that wait and run are finished first; with `hard_stop` they end with an error.

        `block` waits for that, `timeout` seconds at most.
        """
        if self._pausing == threading.get_ident():
            raise RuntimeError("a manager cannot be stopped by a thread that pauses it: leave `pause` first.")
        with self._changed:
            self._stopping = "cancel" if hard_stop else self._stopping or "drain"
            self._closed = self._closed or STOPPED
            self._changed.notify_all()
        if block:
            self.join(timeout)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of a thread that was told to stop, `timeout` seconds at most, or until it is to go on."""
        if self._thread is threading.current_thread():
            return
        with self._changed:
            ended = self._changed.wait_for(lambda: not (self.is_running() and self._stopping), timeout)
        if not ended:
            logger.warning(f"The thread that decodes has not ended within {timeout} s.")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Between two steps nothing is decoded meanwhile, so that weights can be changed; requests go on afterwards."""
        if self._thread is threading.current_thread():
            raise RuntimeError(OWN_THREAD.format("pause()"))
        with self._changed:
            if not self.is_running():
                raise RuntimeError("the manager does not run: there is nothing to pause.")
            self._pauses += 1
        try:
            with self._stepping:
                before, self._pausing = self._pausing, threading.get_ident()
                self._epoch += 1
                try:
                    yield
                finally:
                    self._pausing = before
        finally:
            with self._changed:
                self._pauses = max(self._pauses - 1, 0)  # 0 behind a fork
                self._changed.notify_all()

    def learn(self, **settings: Any) -> Any:
        """Let the heads learn from what they serve, from now on, while nobody waits and in a share of the other time.

        Their weights change in place, between two steps, where that raises the tokens per step on recent texts; no text
        changes. Where it is called again, learning begins anew.

        Args:
            settings: of `learning.Learner`: `share` of the time (0.1), `memory` of recent texts in tokens, `everybody`.

        Returns:
            the learner: `counts()` tells what was gained, `save_pretrained(folder)` saves the heads, `stop()` ends it.

        Raises:
            ValueError: these heads cannot learn here, in one line; requests go on.
        """
        learner = _learning().Learner(self.model, **settings)
        with self._changed:
            self.learner = learner
            self._changed.notify_all()
        return learner

    # ---- the thread

    def _forget_thread(self) -> None:
        """In a process that was forked, which has none of the threads: nobody serves here what was asked there, locks
        may be held for ever, and requests are refused until `start`."""
        if self._thread is not None:
            self._changed, self._closed, self._thread, self._batch = threading.Condition(), FORKED, None, None
            for those in (self._waiting, self._known, self._results, self._handlers, self._aside):
                those.clear()
            self._pauses, self._pausing, self._stepping = 0, None, threading.RLock()

    def _end_with_process(self) -> None:
        """Before the interpreter ends: a thread in the middle of torch would abort the process."""
        self._pausing = None  # a pause that was not left ends here
        self.stop(timeout=LAST_STEP, hard_stop=True)

    @with_room
    def _run(self, inference: bool) -> None:
        error: BaseException = RuntimeError("the manager was stopped before this request was finished")
        try:
            with torch.inference_mode(inference):
                while self._wait():
                    with self._stepping:
                        self._advance()
        except BaseException as fatal:
            error, died = fatal, f"the thread that decodes has died of {type(fatal).__name__}: {fatal}"
            self._stopping, self.background_thread_status.fatal_error, self._closed = "cancel", fatal, died
            logger.error(died[0].upper() + died[1:])
        try:
            with torch.inference_mode(inference):
                self._recover(error, everybody=True)
        finally:
            atexit.unregister(self._end_with_process)
            with self._changed:
                self._stopping, self._closed = "cancel", self._closed or STOPPED
                self._thread = None
                self._changed.notify_all()

    def _wait(self) -> bool:
        """Until there is something to do; False where that is to end."""
        with self._changed:
            while True:
                if self._stopping == "cancel" or (self._stopping and not self._has_work):
                    self._stopping = "cancel"
                    return False
                learner = self.learner
                busy = self._has_work or (learner is not None and learner.wants)
                if busy and not self._pauses:
                    return True
                self._changed.wait()


def _learning() -> Any:
    """The room in which heads learn, imported when it is asked for: it knows how they are trained."""
    from hf_drafthead import learning

    return learning


def _checked(input_ids: Any, base: Any) -> list[int]:
    """A prompt as a list of token ids that the base reads, else ValueError: on a GPU others would end all that runs."""
    if isinstance(input_ids, torch.Tensor):
        if input_ids.dim() == 2 and len(input_ids) == 1:
            input_ids = input_ids[0]
        input_ids = input_ids.tolist()
    prompt = list(input_ids)
    if not prompt or any(type(token) is not int for token in prompt):
        shown = repr(prompt if len(prompt) < 6 else [*prompt[:5], "..."])
        raise ValueError(f"the prompt is {shown}: expected the token ids of one text, at least one.")
    rows = getattr(base.get_input_embeddings(), "num_embeddings", None)
    if rows is not None and not 0 <= (outside := min(prompt) if min(prompt) < 0 else max(prompt)) < rows:
        raise ValueError(
            f"the prompt holds the token {outside}: expected ids from 0 to {rows - 1}, which the base has."
        )
    if (positions := table_of_positions(base)) is not None and len(prompt) > positions:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, and the base {positions} positions: give a shorter one."
        )
    return prompt


def _count(name: str, argument: int | None, of_config: int | None, least: int) -> int | None:
    """A number of requests, given or the config's; None where none is said."""
    value = of_config if argument is None else argument
    if value is not None and (type(value) is not int or value < least):
        what = {"slots": "requests that are decoded at once", "max_queue_size": "requests that wait, 0 for any"}[name]
        raise ValueError(f"{name} is {value!r}: expected the number of {what}, from {least} on.")
    return value
