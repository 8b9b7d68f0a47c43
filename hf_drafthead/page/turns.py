"""Two generations on one device: they take turns, and each has its own clock and its own random numbers.

Running both at once would slow each down by an unknown share, and running one after the other would show nothing side
by side. So each generation runs in its own thread, only one of them computes at any moment, and the one that has used
less time goes next. Each clock counts only the time of its own turns, so the two can be compared.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hf_drafthead.bases.generators import generator_of
from hf_drafthead.trees.timing import wait

SLICE = 0.05  # seconds of a turn: long against the hand-over, short against what a reader notices


class Stopped(Exception):
    """Raised inside a generation that was asked to stop."""


class Turns:
    """Lets named runs compute one at a time, of which the first begins; the work queued on the device belongs to the
    run that queued it, and the random numbers of each begin at `seed`. A run calls `pause` often; everything between
    `with turns.hold(name)` and its end is timed, its pauses excepted."""

    def __init__(self, names: Sequence[str], device: torch.device, *, seed: int, slice_seconds: float = SLICE):
        self._device = device
        self._slice = slice_seconds
        self._seconds = dict.fromkeys(names, 0.0)
        fresh = torch.Generator(generator_of(device).device).manual_seed(seed)
        self._random = dict.fromkeys(names, fresh.get_state())
        self._open = list(names)
        self._holder: str | None = names[0]
        self._since: float | None = None  # when the holder's clock was started
        self._stopping = False
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait for the first turn of `name`, and give the last one back at the end, however the run ends."""
        self._take(name)
        try:
            yield
        finally:
            self._release(name, leaving=True)

    def pause(self, name: str) -> None:
        """Let another run continue if this one has computed long enough; Stopped once `stop` was called."""
        if self._stopping:
            raise Stopped
        if self._since is not None and time.perf_counter() - self._since >= self._slice:
            self._release(name)
            self._take(name)

    def stop(self) -> None:
        self._stopping = True

    def seconds(self, name: str) -> float:
        done, since = self._seconds[name], self._since if self._holder == name else None
        return done if since is None else done + time.perf_counter() - since

    def _take(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._holder == name)
        generator_of(self._device).set_state(self._random[name])
        self._since = time.perf_counter()

    def _release(self, name: str, leaving: bool = False) -> None:
        wait(self._device)
        assert self._since is not None
        self._seconds[name] += time.perf_counter() - self._since
        self._since = None
        self._random[name] = generator_of(self._device).get_state()
        with self._changed:
            if leaving:
                self._open.remove(name)
            self._holder = min(self._open, key=self._seconds.__getitem__, default=None)
            self._changed.notify_all()
