"""What happens beside the steps of a training: its time, what it shows, and what stops it."""

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast
from torch import nn
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback

from hf_drafthead.modeling.files import read_json
from hf_drafthead.training.record import whole_checkpoint, write_whole

LOOKS = 10  # steps between two looks at the loss on a GPU


class Clock(TrainerCallback):
    """Counts a Trainer's wall time, and stores it in a JSON file with each checkpoint: `seconds`, and those of what
    came `before` it, such as writing its text. `limit`: hours after which the training is stopped, all counted."""

    def __init__(self, file: Path, limit: float | None = None) -> None:
        self.file, self._whole = file, limit
        kept = read_json(file) if file.is_file() else {}
        self.seconds, self.before = kept.get("seconds", 0.0), kept.get("before", 0.0)
        self.started: float | None = None

    @property
    def limit(self) -> float | None:
        """Hours that are left for the training; None for no limit."""
        return None if self._whole is None else self._whole - self.before / 3600

    @property
    def hours(self) -> float:
        """Hours of the training up to now, those before it was resumed included."""
        return (self.seconds + (0.0 if self.started is None else time.monotonic() - self.started)) / 3600

    def preceded_by(self, seconds: float) -> None:
        """Take something that preceded the training off its limit, and store it for one that is resumed."""
        self.before = seconds
        self._keep(0.0)

    def share(self, args: Any) -> float:
        """How much of the limit has passed, the same in all processes; 0 without one."""
        return agreed(self.hours / self.limit, args) if self.limit else 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.started = time.monotonic()
        if state.global_step == 0:
            self.seconds = 0.0

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.limit and self.share(args) >= 1:
            control.should_training_stop = True
        last = control.should_training_stop or state.global_step >= state.max_steps
        if last and args.eval_strategy == "steps" and not args.load_best_model_at_end:
            control.should_evaluate = True

    def on_save(self, args, state, control, **kwargs) -> None:
        if state.is_world_process_zero:
            self._keep(self.hours * 3600)

    def _keep(self, seconds: float) -> None:
        write_whole(self.file, json.dumps({"seconds": seconds, "before": self.before}))


def agreed(value: float, args: Any) -> float:
    """The first process's value, in all of them."""
    if args.world_size == 1:
        return value
    return broadcast(torch.tensor(float(value), device=args.device)).item()


def evaluation_line(step: int, steps: int, metrics: dict[str, Any]) -> str:
    """One evaluation as a line.

    >>> evaluation_line(24, 240, {"eval_loss": 2.5, "eval_head0_top1": 0.61, "eval_tokens_per_step": 2.0})
    'step 24 of 240: held-out loss of all heads 2.500, expected tokens per step 2.00; first guess right: head 1 61.0 %'
    """
    line = f"step {step} of {steps}: held-out loss of all heads {metrics['eval_loss']:.3f}"
    expected = metrics.get("eval_tokens_per_step")
    line += "" if expected is None else f", expected tokens per step {expected:.2f}"
    heads = heads_of({name.removeprefix("eval_"): value for name, value in metrics.items()}, 1)
    return line + "; first guess right: " + ", ".join(f"head {n} {share:.1%}" for n, share in heads).replace("%", " %")


def heads_of(metrics: dict[str, Any], k: int) -> list[tuple[int, float]]:
    """Number of each head, counted from 1, and how often the true token was among its best k guesses (k is 1 or 5)."""
    heads = itertools.takewhile(lambda head: f"head{head}_top{k}" in metrics, itertools.count())
    return [(head + 1, metrics[f"head{head}_top{k}"]) for head in heads]


class TrainingLog(TrainerCallback):
    """A line for each tenth of the training, and one for every evaluation."""

    _loss, _started, _first = "", 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._loss = f", loss of all heads {float(logs['loss']):.3g}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, steps = state.global_step, state.max_steps
        if step * 10 // steps > (step - 1) * 10 // steps and state.is_world_process_zero:
            done = step - self._first
            left = (time.monotonic() - self._started) / done * (steps - step)
            print(f"step {step} of {steps}{self._loss}, about {duration(left)} left", file=sys.stderr, flush=True)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        if metrics and state.is_world_process_zero:
            print(evaluation_line(state.global_step, state.max_steps, metrics), file=sys.stderr, flush=True)


def show_progress(trainer: Trainer) -> None:
    """Lines in the place of a trainer's progress bar and dictionaries, unless its progress is turned off."""
    for callback_class in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(callback_class)
    if not trainer.args.disable_tqdm:
        trainer.args.disable_tqdm = True  # of the bars that are not the callback's
        trainer.add_callback(TrainingLog())


def duration(seconds: float) -> str:
    """Seconds in the usual units.

    >>> duration(42), duration(3000), duration(9000)
    ('42 s', '50 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class CheckGradients(TrainerCallback):
    """Ends the training when a gradient is not finite, on a CPU before the update; clips by value too."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = [parameter for parameter in kwargs["model"].parameters() if parameter.grad is not None]
        # the host waits for the device here; a gradient scaler skips steps that are not finite by itself
        if (args.device.type == "cpu" or (state.global_step + 1) % LOOKS == 0) and not args.fp16:
            norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
            if not torch.isfinite(norm):
                path = whole_checkpoint(Path(args.output_dir))
                raise FloatingPointError(
                    f"the gradient became {norm.item()} in step {state.global_step + 1}: lower the learning rate (now "
                    f"{args.learning_rate:g}) or check the data; "
                    + (f"{path} is complete and can be resumed from." if path else "no checkpoint was written yet.")
                )
        if args.max_grad_value is not None:
            nn.utils.clip_grad_value_(parameters, args.max_grad_value)
