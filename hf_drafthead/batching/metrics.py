"""What a manager counts: requests, tokens, steps, and how long the first token takes."""

from __future__ import annotations

import time
from typing import Any

from hf_drafthead.bases.releases import RequestStatus

SHARE = 0.05  # of the newest request in the mean time to the first token


class Metrics:
    """Counts since the manager was made, and means."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = self.steps = self.rows = self.tokens = 0
        self.drafted = self.accepted = 0  # of requests that have ended
        self.first_token = 0.0  # seconds
        self.started = 0.0
        self.began = 0

    def first(self, request: Any) -> None:
        """A request has its first token."""
        now = time.perf_counter()
        self.started = self.started or now
        self.tokens += len(request.tokens)
        seconds = now - request.created
        self.first_token += (seconds - self.first_token) * (SHARE if self.began else 1.0)
        self.began += 1

    def step(self, rows: int, tokens: int) -> None:
        """A step of so many rows has given so many tokens."""
        self.steps += 1
        self.rows += rows
        self.tokens += tokens

    def end(self, request: Any) -> None:
        """A request has its last result."""
        if request.status == RequestStatus.FINISHED:
            self.finished += 1
        elif request.cancelled:
            self.cancelled += 1
        else:
            self.failed += 1
        self.drafted, self.accepted = self.drafted + request.drafted, self.accepted + request.accepted

    def values(self) -> dict[str, float]:
        """As JSON takes it."""
        seconds = time.perf_counter() - self.started if self.started else 0.0
        return {
            "finished": self.finished,
            "failed": self.failed,
            "cancelled": self.cancelled,
            "steps": self.steps,
            "tokens": self.tokens,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": round((self.tokens - self.began) / self.steps, 3) if self.steps else 0.0,
            "tokens_per_step_and_request": round((self.tokens - self.began) / self.rows, 3) if self.rows else 0.0,
            "tokens_per_second": round(self.tokens / seconds, 3) if seconds else 0.0,
            "seconds_to_first_token": round(self.first_token, 4),
        }
