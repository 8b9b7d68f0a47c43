"""The seconds that the stages of a call take."""

from __future__ import annotations

import time

import torch


class Stopwatch:
    """Seconds between laps; does nothing unless it is switched on."""

    def __init__(self, on: bool, device: torch.device):
        self.on, self.device = on, device
        self.seconds: dict[str, float] = {}
        self.last = self._now() if on else 0.0

    def lap(self, name: str) -> None:
        """Note what has passed since the last lap under this name."""
        if self.on:
            now = self._now()
            self.seconds[name], self.last = now - self.last, now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
