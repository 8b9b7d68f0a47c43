"""What the threads of a manager share: requests that wait, and results, behind one lock.

Any thread puts requests and takes results. The one that decodes takes requests and delivers results.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from hf_drafthead.bases.releases import GenerationOutput
from hf_drafthead.batching.requests import Request

OWN_THREAD = "{} in the thread that decodes would wait for itself: call it in another thread."
WAIT = 10.0  # seconds for which a thread waits where the queue is full, as transformers does


class RequestTracker:
    """Requests from the moment they are asked for until their last result is taken.

    _changed: the lock, and what tells threads that something is new; _waiting: those that were not begun, at most
    `_most_waiting`, 0 for any number; _known: by id, those that wait or run; _results: what nobody has taken yet, with
    the number of its request; _handlers: who takes the results of a request as they come; _closed: why no further
    request is taken, in one line, None while they are; _thread: that decodes, None where there is none.
    """

    def __init__(self, most_waiting: int):
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Request] = deque()
        self._known: dict[str, Request] = {}
        self._results: deque[tuple[int, GenerationOutput]] = deque()
        self._handlers: dict[str, tuple[Callable[[GenerationOutput], None], Any]] = {}
        self._closed: str | None = None
        self._cancelling = False  # since the scheduler has looked
        self._added = 0
        self._thread: threading.Thread | None = None

    def _put(self, request: Request, request_id: str | None, prepare: Callable[[], None]) -> str:
        """Let a request wait for its turn; returns its id, a number where none is given. Errors as of `add_request`.

        Where the queue is full the thread waits for a place in it, `WAIT` seconds at most; not where it runs an event
        loop, whose other clients would wait. `prepare` is called once the request is sure to be taken, in their order.
        """
        seconds = WAIT
        with contextlib.suppress(RuntimeError):  # where no event loop runs
            asyncio.get_running_loop()
            seconds = 0.0
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: self._closed or not 0 < self._most_waiting <= len(self._waiting), seconds
            )
            if self._closed is not None:
                raise RuntimeError(self._closed)
            if not has_room:
                raise queue.Full(
                    f"{len(self._waiting)} requests wait, and max_queue_size is {self._most_waiting}: ask again later."
                )
            if request_id is None:
                numbers = (f"req_{number}" for number in itertools.count(self._added))
                request_id = next(name for name in numbers if name not in self._known)
            if request_id in self._known:
                raise ValueError(f"the request {request_id!r} is not finished yet: give another request_id.")
            prepare()
            request.request_id, request.number = request_id, self._added
            self._added += 1
            self._known[request_id] = request
            self._waiting.append(request)
            self._changed.notify_all()
        return request_id

    def cancel_request(self, request_id: str) -> None:
        """Let a request end within a step; its last result holds what it has. An unknown id is ignored."""
        with self._changed:
            if (request := self._known.get(request_id)) is not None:
                request.cancelled = self._cancelling = True
                self._changed.notify_all()

    def _next(self) -> Request | None:
        """The request whose turn it is, which does not wait any more; None where nobody waits."""
        with self._changed:
            if not self._waiting:
                return None
            request = self._waiting.popleft()
            self._changed.notify_all()
            return request

    def is_running(self) -> bool:
        """Whether the thread decodes, or waits for something to decode."""
        return self._thread is not None and self._thread.is_alive()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> GenerationOutput | None:
        """The next result, or the next of one request; None after `timeout` seconds, or where none will come."""
        if timeout is None and self._thread is threading.current_thread():
            raise RuntimeError(OWN_THREAD.format("get_result()"))
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                newest = None if request_id is None else self._newest(request_id)
                for at, (number, result) in enumerate(self._results):
                    if newest == number or request_id is None:
                        del self._results[at]
                        return result
                left = None if end is None else end - time.monotonic()
                is_over = not self.is_running() or not (request_id is None or request_id in self._known)
                if is_over or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)

    def __iter__(self) -> Iterator[GenerationOutput]:
        """Results as they come, until the manager is stopped and none are left."""
        return iter(self.get_result, None)

    def request_id_iter(self, request_id: str) -> Iterator[GenerationOutput]:
        """The results of one request as they come, to the last."""
        while (result := self.get_result(request_id)) is not None:
            yield result
            if result.is_finished():
                return

    def _newest(self, request_id: str) -> int | None:
        """The number of the newest request of an id: of the one that is not finished, else of untaken results."""
        if (request := self._known.get(request_id)) is not None:
            return request.number
        return max((number for number, result in self._results if result.request_id == request_id), default=None)

    def register_result_handler(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Give the results of a request to a function, on the event loop that runs here, instead of keeping them.

        Raises:
            ValueError: somebody else is given them, who would wait for ever.
        """
        loop = asyncio.get_running_loop()
        with self._changed:
            if request_id in self._known and request_id in self._handlers:
                raise ValueError(f"the request {request_id!r} has a handler, and is not finished yet: give another id.")
            self._handlers[request_id] = callback, loop
            loop.call_soon(self._give_early, request_id, callback)  # before later ones, which come behind the lock

    def _give_early(self, request_id: str, callback: Callable[[GenerationOutput], None]) -> None:
        """Give a handler what came before it, of the newest request of its id: a new one may have been put since."""
        with contextlib.ExitStack() as given, self._changed:  # where one raises the others are given all the same
            newest = self._newest(request_id)
            early = [pair for pair in self._results if pair[0] == newest and pair[1].request_id == request_id]
            for pair in reversed(early):
                self._results.remove(pair)
                given.callback(callback, pair[1])
            if any(result.is_finished() for _, result in early):
                self._handlers.pop(request_id, None)

    def _deliver(self, request: Request) -> None:
        """Give what a request has so far to its handler, or keep it until somebody asks."""
        output = request.output()
        with self._changed:
            callback, loop = self._handlers.get(request.request_id, (None, None))
            if output.is_finished():
                self._known.pop(request.request_id, None)
                self._handlers.pop(request.request_id, None)
            if callback is None:
                self._results.append((request.number, output))
            self._changed.notify_all()
        if callback is not None and loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop of a client that has gone is closed
                loop.call_soon_threadsafe(callback, output)
