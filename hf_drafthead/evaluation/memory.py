"""Peak memory of a call."""

from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """Peak memory since `reset` in bytes: of the GPU, or of the whole process where the system reports it (Linux)."""

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        """Start a new measurement."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif (PROCESS / "clear_refs").exists():
            (PROCESS / "clear_refs").write_text("5")

    def read(self) -> int | None:
        """Bytes; None where the system does not report it."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not (PROCESS / "clear_refs").exists():
            return None
        line = next(line for line in (PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
