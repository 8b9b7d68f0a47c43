"""The output of a running training: a progress bar, and a line for every evaluation."""

import sys
import time
from typing import Any

from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import logging


class TrainingProgress(ProgressCallback):
    """A progress bar with the loss and the tokens per step to expect; the Trainer's own prints dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self._beside: dict[str, str] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """The loss beside the bar."""
        if logs and "loss" in logs:
            self._show(loss=f"{float(logs['loss']):.3g}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """The tokens per step to expect beside the bar, and a line that remains."""
        super().on_evaluate(args, state, control, **kwargs)
        if not metrics or not state.is_world_process_zero or self.training_bar is None:
            return
        expected = metrics.get("eval_tokens_per_step")
        if expected is not None:
            self._show(expected=f"{expected:.2f} tokens/step")
        self.training_bar.write(evaluation_line(state.global_step, state.max_steps, metrics))

    def _show(self, **values: str) -> None:
        self._beside.update(values)
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._beside)


def evaluation_line(step: int, steps: int, metrics: dict[str, Any]) -> str:
    """One evaluation as a line.

    >>> evaluation_line(24, 240, {"eval_loss": 2.5, "eval_head0_top1": 0.61, "eval_tokens_per_step": 2.0})
    'step 24 of 240: held-out loss 2.500, expected tokens per step 2.00; first guess right: head 1 61.0 %'
    """
    line = f"step {step} of {steps}: held-out loss {metrics['eval_loss']:.3f}"
    expected = metrics.get("eval_tokens_per_step")
    line += "" if expected is None else f", expected tokens per step {expected:.2f}"
    heads = heads_of({name.removeprefix("eval_"): value for name, value in metrics.items()}, 1)
    return line + "; first guess right: " + ", ".join(f"head {n} {share:.1%}" for n, share in heads).replace("%", " %")


def heads_of(metrics: dict[str, Any], k: int) -> list[tuple[int, float]]:
    """Number of each head, counted from 1, and how often the true token was among its best k guesses.

    Args:
        metrics: `head0_top1`, `head0_top5`, `head1_top1`, ..., counted from 0.
        k: 1 or 5.
    """
    found: list[tuple[int, float]] = []
    while (name := f"head{len(found)}_top{k}") in metrics:
        found.append((len(found) + 1, metrics[name]))
    return found


class TrainingLog(TrainerCallback):
    """Lines for a log file: one for each tenth of the training, and one for every evaluation."""

    def __init__(self) -> None:
        self._loss = ""
        self._started = 0.0
        self._first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started, self._first = time.monotonic(), state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self._loss = f", loss {float(logs['loss']):.3g}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, steps = state.global_step, state.max_steps
        if step * 10 // steps > (step - 1) * 10 // steps and state.is_world_process_zero:
            done = step - self._first
            left = (time.monotonic() - self._started) / done * (steps - step)
            print(f"step {step} of {steps}{self._loss}, about {duration(left)} left", file=sys.stderr, flush=True)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        if metrics and state.is_world_process_zero:
            print(evaluation_line(state.global_step, state.max_steps, metrics), file=sys.stderr, flush=True)


def show_progress(trainer: Trainer) -> None:
    """Replace a trainer's progress bar by this one, and by lines in a log, unless its progress is turned off."""
    for own in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(own)
    if trainer.args.disable_tqdm:
        return
    if sys.stderr.isatty():
        trainer.add_callback(TrainingProgress())
    else:
        trainer.args.disable_tqdm = True  # of the bars that are not the callback's
        trainer.add_callback(TrainingLog())


def plain_log() -> None:
    """No bars of other libraries, which in a log would be one line without an end."""
    from datasets import disable_progress_bars

    disable_progress_bars()
    logging.disable_progress_bar()


def duration(seconds: float) -> str:
    """Seconds in the usual units.

    >>> duration(42), duration(3000), duration(9000)
    ('42 s', '50 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
