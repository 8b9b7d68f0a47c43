"""The wall time of a training, added up over interruptions."""

import json
import time
from pathlib import Path

from transformers import TrainerCallback

from hf_drafthead.training.record import write_whole


class Clock(TrainerCallback):
    """Counts a Trainer's wall time; the time up to each checkpoint is stored in ``file``.

    Args:
        file: JSON file in the folder of the checkpoints, from which a resumed training continues to count.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds = 0.0
        self.started: float | None = None

    @property
    def hours(self) -> float:
        """Hours up to now; for a training that was finished before, its total."""
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
