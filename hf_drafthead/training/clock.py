"""How long a training took, added up over its interruptions."""

import json
import time
from pathlib import Path

from transformers import TrainerCallback

from hf_drafthead.training.record import write_whole


class Clock(TrainerCallback):
    """Counts a Trainer's wall time; what was counted up to each checkpoint is kept in ``file``.

    Args:
        file: JSON file beside the checkpoints, so that a resumed training goes on counting.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds = 0.0
        self.started: float | None = None

    @property
    def hours(self) -> float:
        """Hours up to now; of a training that had come to its end before, all that it took."""
        if self.started is None:
            return self._kept() / 3600
        return (self.seconds + time.monotonic() - self.started) / 3600

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.monotonic()
        if state.global_step > 0:
            self.seconds = self._kept()

    def _kept(self) -> float:
        return json.loads(self.file.read_text())["seconds"] if self.file.is_file() else 0.0

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            write_whole(self.file, json.dumps({"step": state.global_step, "seconds": self.hours * 3600}))
