"""The wall time of a training: added up over interruptions, limited, and how much of it evaluations may take."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from transformers import TrainerCallback

from hf_drafthead.training.record import write_whole


class Clock(TrainerCallback):
    """Counts a Trainer's wall time; the time up to each checkpoint is stored in ``file``.

    Args:
        file: JSON file in the folder of the checkpoints, from which a resumed training continues to count.
        limit: hours after which the training is stopped; None for no limit.
        evaluations: an evaluation is left out where all of them would take more than this share of the time so far;
            None to leave out none. There is always one at the end.

    Attributes:
        expected_evaluation: seconds that the first evaluation is expected to take.
    """

    def __init__(self, file: Path, limit: float | None = None, evaluations: float | None = None) -> None:
        self.file, self.limit, self.evaluations = file, limit, evaluations
        self.seconds = 0.0
        self.started: float | None = None
        self.expected_evaluation = 0.0
        self._evaluating = 0.0
        self._evaluation_started: float | None = None

    @property
    def hours(self) -> float:
        """Hours up to now; for a training that was finished before, its total."""
        if self.started is None:
            return self._kept() / 3600
        return (self.seconds + time.monotonic() - self.started) / 3600

    def share(self, args: Any) -> float:
        """How much of the limit has passed, the same in all processes; 0 without one."""
        return agreed(self.hours / self.limit, args) if self.limit else 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.monotonic()
        if state.global_step > 0:
            self.seconds = self._kept()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.limit and self.share(args) >= 1:
            control.should_training_stop = True
        last = control.should_training_stop or state.global_step >= state.max_steps
        if self.evaluations is not None and last:
            control.should_evaluate = True
        if not control.should_evaluate:
            return
        if self.evaluations is not None and not last:
            most = self.evaluations * 3600 * self.hours
            control.should_evaluate = agreed(self._evaluating + self.expected_evaluation <= most, args) > 0
        if control.should_evaluate:
            self._evaluation_started = time.monotonic()

    def on_evaluate(self, args, state, control, **kwargs) -> None:
        if self._evaluation_started is not None:
            self.expected_evaluation = time.monotonic() - self._evaluation_started
            self._evaluating += self.expected_evaluation
            self._evaluation_started = None

    def _kept(self) -> float:
        return json.loads(self.file.read_text())["seconds"] if self.file.is_file() else 0.0

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            write_whole(self.file, json.dumps({"step": state.global_step, "seconds": self.hours * 3600}))


def agreed(value: float, args: Any) -> float:
    """The first process's value, in all of them."""
    if args.world_size == 1:
        return value
    return broadcast(torch.tensor(float(value), device=args.device)).item()
