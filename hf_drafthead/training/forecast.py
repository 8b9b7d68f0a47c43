"""The cost of a training, before it begins: parameters, rows, steps and time.

Time comes from trying one step on held-out rows, whose gradients are discarded.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_drafthead.training.callbacks import duration
from hf_drafthead.training.examples import PreparedData
from hf_drafthead.training.trainer import DraftHeadTrainer

TIMED_TOKENS = 3000  # of the base, that take as long as what a calibration times of base and trees
LOOKED_AT = 256  # rows, at most, whose mean length is taken for that of all


@dataclass(frozen=True)
class Forecast:
    """What to expect of a training; None where it cannot be known.

    parameters: of the heads; trained: all that are trained, the base's included if it is; rows: of an epoch; steps:
    optimizer steps; batch: rows of a step, in all processes together; evaluations: on the held-out rows, at most;
    epoch: seconds of the steps of an epoch; seconds: of steps, evaluations and calibration.
    """

    parameters: int
    trained: int
    rows: int
    steps: int
    batch: int
    evaluations: int
    epoch: float | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        also = "" if self.trained == self.parameters else f", {self.trained:,} trained with those of the base"
        lasts = "time cannot be estimated" if self.seconds is None else f"about {duration(self.seconds)}"
        return (
            f"heads: {self.parameters:,} parameters{also}\n"
            f"data: {self.rows:,} rows; {self.steps:,} steps of {self.batch} rows, "
            f"{self.evaluations} evaluations at most: {lasts}"
        )


def forecast(trainer: DraftHeadTrainer, data: PreparedData, share: float | None = None) -> Forecast:
    """Estimate what a training will take; where there is a limit of hours, set the epochs that fit into it, of which
    evaluations take a tenth. Where a `share` is given, evaluate so seldom that it takes no more of the time."""
    args = trainer.args
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    batch, rows = args.per_device_train_batch_size, len(data.rows)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    in_epoch = math.ceil(math.ceil(rows / (batch * args.world_size)) / args.gradient_accumulation_steps)
    times, hours = None, trainer.clock.limit
    if not trainer.is_fsdp_enabled:  # only the Trainer can run a sharded model
        times = _tried(trainer, data.held_out, batch * _row_length(data.rows))
        if hours and args.max_steps <= 0:
            fitting = 0.9 * 3600 * hours / (in_epoch * times.step)
            args.num_train_epochs = min(args.num_train_epochs, fitting)
    steps = args.max_steps if args.max_steps > 0 else math.ceil(in_epoch * args.num_train_epochs)
    every = args.eval_steps if args.eval_steps and args.eval_strategy == "steps" else None
    every = None if every is None else max(math.ceil(steps * every), 1) if every < 1 else int(every)
    if every and share and times is not None:
        every = args.eval_steps = max(every, math.ceil(times.evaluation / (share * times.step)))
    evaluations = math.ceil(steps / (every or in_epoch)) if args.eval_strategy != "no" else 1
    seconds = None
    if times is not None:
        training = min(steps * times.step, 3600 * hours if hours else math.inf)
        seconds = training + max(evaluations, 1) * times.evaluation + times.once
    return Forecast(
        parameters=sum(parameter.numel() for parameter in model.drafter.parameters()),
        trained=trained,
        rows=rows,
        steps=steps,
        batch=batch * args.gradient_accumulation_steps * args.world_size,
        evaluations=evaluations,
        epoch=None if times is None else in_epoch * times.step,
        seconds=seconds,
    )


def _row_length(rows: Sequence[Any]) -> float:
    """The mean of some of them."""
    some = range(0, len(rows), math.ceil(len(rows) / LOOKED_AT))
    return sum(len(rows[number]["input_ids"]) for number in some) / len(some)


class Times(NamedTuple):
    """Seconds of an optimizer step, of an evaluation, and of what is done once: the base's answers, the calibration."""

    step: float
    evaluation: float
    once: float


def _tried(trainer: DraftHeadTrainer, rows: Sequence[Any], length: float) -> Times:
    """Tries a step and an evaluation, which change nothing; a batch of the training has `length` tokens on average."""
    args, expected, device = trainer.args, trainer.expected_tokens_per_step, trainer.args.device
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    training, batch = model.training, args.per_device_train_batch_size
    once, some = 0.0, [rows[number % len(rows)] for number in range(batch)]
    tried_length = sum(len(row["input_ids"]) for row in some)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)

    def loss(learning: bool) -> Tensor:
        model.train(learning)
        with trainer.compute_loss_context_manager(), torch.set_grad_enabled(learning):
            return trainer.compute_loss(model, inputs, num_items_in_batch=totals)  # type: ignore[no-any-return]

    def learn() -> Tensor:
        (tried := loss(True)).backward()
        return tried

    def update() -> Tensor:
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return trained[0].flatten()[0]

    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        passings = []
        for _ in range(3):  # the first includes one-time work, and makes the moments
            start = time.perf_counter()
            inputs = trainer.data_collator(some)
            loading = time.perf_counter() - start
            inputs = {name: value.to(device) for name, value in inputs.items()}
            inputs = trainer.heads_loss.with_anchors(model, inputs)
            totals = trainer.heads_loss.totals(model, inputs).clamp(min=1)
            passings.append(_seconds(learn))
            model.zero_grad(set_to_none=False)  # so that no update moves a weight
            updating, evaluating = _seconds(update), _seconds(lambda: loss(False))
        model.zero_grad(set_to_none=True)
        passing = min(passings) * length / tried_length + loading
        evaluation = evaluating * math.ceil(len(rows) / (batch * args.world_size))
        if expected is not None:
            answering, guessing, token = expected.tried(model.eval())
            evaluation += guessing
            once = answering + (answering + guessing + TIMED_TOKENS * token if args.calibrate_tree else 0.0)
    model.train(training)
    return Times(args.gradient_accumulation_steps * passing + updating, evaluation, once)


def _seconds(run: Callable[[], Tensor]) -> float:
    """Of a call, until the device has computed what it returns."""
    start = time.perf_counter()
    run().item()
    return time.perf_counter() - start
