"""The thread that decodes, which alone looks at the model: others start, stop and pause it, between two steps."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from transformers.utils import logging

from hf_drafthead.batching.scheduler import Scheduler
from hf_drafthead.batching.tracker import RequestTracker
from hf_drafthead.generation.batch import with_room

logger = logging.get_logger(__name__)

LAST_STEP = 10.0  # seconds for which a process that ends waits for the thread
STOPPED = "the manager was stopped: start() it again, or make a new one."
FORKED = "the process was forked, and the thread that decodes is in the other one: start() the manager here."
ENDING = "the manager is being stopped: start() it in another thread than the one that decodes."


WORKERS: weakref.WeakSet[Worker] = weakref.WeakSet()  # of this process


def _forked() -> None:
    for worker in WORKERS:
        worker.forget_thread()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


class Worker:
    """Runs a scheduler in a thread of its own; the tracker's lock guards everything here. `status.fatal_error`: of the
    thread.
    """

    def __init__(self, tracker: RequestTracker, scheduler: Scheduler):
        self.tracker, self.scheduler = tracker, scheduler
        self.status = SimpleNamespace(fatal_error=None)
        self._pauses = 0
        self._pausing = threading.local()
        self._paused = False
        self._stopping: str | None = None  # "drain" or "cancel"
        self._ending = False  # the thread takes no further step
        self._starts = 0
        self._thread: threading.Thread | None = None
        WORKERS.add(self)

    def forget_thread(self) -> None:
        """In a process that was forked, which has none of the threads: requests are refused until `start`."""
        if self._thread is not None:
            self.tracker.forget_all(FORKED)
            self.scheduler.forget()
            self._thread, self._pauses, self._paused, self._ending = None, 0, False, False

    def is_running(self) -> bool:
        """Whether the thread decodes, or waits for something to decode."""
        return self._thread is not None and self._thread.is_alive()

    def refuse_own_thread(self, call: str) -> None:
        """Refuse a call that waits for the thread that decodes in this thread, which would wait for ever."""
        if self._thread is threading.current_thread():
            raise RuntimeError(f"{call} in the thread that decodes would wait for itself: call it in another thread.")

    def start(self) -> None:
        """Start the thread; does nothing where it runs. One that was told to finish what it has goes on instead."""
        with self.tracker.changed:
            while self.is_running() and (self._stopping == "cancel" or self._ending):
                if self._thread is threading.current_thread():
                    raise RuntimeError(ENDING)
                self.tracker.changed.wait()  # until it has ended, which is no longer than a step
            self._starts += 1
            self._stopping, self.status.fatal_error, self.tracker.closed = None, None, None
            self.tracker.changed.notify_all()
            if self.is_running():
                return
            self._ending = False
            self._thread = threading.Thread(
                target=self._run, args=(torch.is_inference_mode_enabled(),), name="hf_drafthead batch", daemon=True
            )
            self._thread.start()
            atexit.register(self._leave)

    def _leave(self) -> None:
        """Before the interpreter ends: a thread in the middle of torch would abort the process."""
        self.stop(cancel=True)
        self.join(LAST_STEP)

    def stop(self, cancel: bool) -> None:
        """Take no more requests. Those that wait and run are finished first, or end with an error (`cancel`)."""
        if getattr(self._pausing, "depth", 0):
            raise RuntimeError("a manager cannot be stopped by a thread that pauses it: leave `pause` first.")
        with self.tracker.changed:
            self._stopping = "cancel" if cancel else self._stopping or "drain"
            self.tracker.closed = self.tracker.closed or STOPPED
            self.tracker.changed.notify_all()

    def join(self, timeout: float | None) -> None:
        """Wait for the end of the thread, `timeout` seconds at most, or until another thread lets it go on."""
        if self._thread is threading.current_thread():
            return
        with self.tracker.changed:
            starts = self._starts
            ended = self.tracker.changed.wait_for(lambda: not self.is_running() or self._starts != starts, timeout)
        if not ended:
            logger.warning(f"The thread that decodes has not ended within {timeout} s.")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Nothing is decoded meanwhile."""
        self.refuse_own_thread("pause()")
        with self.tracker.changed:
            if not self.is_running():
                raise RuntimeError("the manager does not run: there is nothing to pause.")
            self._pauses += 1
            self._pausing.depth = getattr(self._pausing, "depth", 0) + 1
        try:
            with self.tracker.changed:
                self.tracker.changed.notify_all()
                self.tracker.changed.wait_for(lambda: self._paused or not self.is_running())
            self.scheduler.epoch += 1
            yield
        finally:
            with self.tracker.changed:
                self._pauses -= 1
                self._pausing.depth -= 1
                self.tracker.changed.notify_all()

    def _run(self, inference: bool) -> None:
        try:
            with torch.inference_mode(inference):
                self._loop()
        except BaseException as error:
            died = f"the thread that decodes has died of {type(error).__name__}: {error}"
            self.status.fatal_error, self.tracker.closed = error, died
            logger.error(died[0].upper() + died[1:])
            self.scheduler.fail_all(error)
        finally:
            atexit.unregister(self._leave)
            with self.tracker.changed:
                self._ending = True
            self.scheduler.close()
            with self.tracker.changed:
                self._paused = False
                self._stopping = self._stopping or "drain"
                self.tracker.closed = self.tracker.closed or STOPPED
                self._thread = None
                self.tracker.changed.notify_all()

    @with_room
    def _loop(self) -> None:
        while self._wait():
            self.scheduler.advance()
        self.scheduler.fail_all(RuntimeError("the manager was stopped before this request was finished"))

    def _wait(self) -> bool:
        """Until there is something to do; False where that is to end."""
        with self.tracker.changed:
            while True:
                if self._stopping == "cancel" or (self._stopping and not self.scheduler.has_work):
                    self._ending = True
                    return False
                if self._pauses:
                    self._paused = True
                    self.tracker.changed.notify_all()
                    self.tracker.changed.wait_for(lambda: not self._pauses)
                    self._paused = False
                    continue
                if self.scheduler.has_work or (self.scheduler.learner is not None and self.scheduler.learner.wants):
                    return True
                self.tracker.changed.wait()
