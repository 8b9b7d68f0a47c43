"""Memory: its peak during a call, and what running out of it looks like."""

from pathlib import Path

import torch

PROCESS = Path("/proc/self")


class PeakMemory:
    """The most bytes in use since `reset`: of the GPU, or of the whole process where the system tells (Linux)."""

    def __init__(self, device: torch.device):
        self._device = device

    def reset(self) -> None:
        """Forget what was before."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        elif (PROCESS / "clear_refs").exists():
            (PROCESS / "clear_refs").write_text("5")

    def read(self) -> int | None:
        """Bytes; None where the system does not tell."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not (PROCESS / "clear_refs").exists():
            return None
        line = next(line for line in (PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])


def out_of_memory(error: BaseException) -> bool:
    """Whether this is how a device says that it has no memory left."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "can't allocate memory")
    )
