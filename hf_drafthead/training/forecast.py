"""The cost of a training, before it begins: parameters, memory, rows, tokens, steps and time.

Time and memory come from trying one step on held-out rows, whose gradients are discarded.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_drafthead.training.examples import PaddingCollator, PreparedData
from hf_drafthead.training.trainer import DraftHeadTrainer

MOMENTS = 8  # bytes per trained parameter that Adam keeps in float32


@dataclass(frozen=True)
class Forecast:
    """What to expect of a training; None where it cannot be known.

    parameters: of the heads; trained: all that are trained, the base's included if it is; weights: bytes of
    the weights of base and heads; memory: bytes while training, on a GPU as measured, elsewhere at least weights,
    gradients and the optimizer; rows, tokens: of an epoch; steps: optimizer steps; batch: rows of a step, in all
    processes together; evaluations: on the held-out rows; seconds: of steps and evaluations.
    """

    parameters: int
    trained: int
    weights: int
    memory: int
    rows: int | None
    tokens: int | None
    steps: int
    batch: int
    evaluations: int
    seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """All fields."""
        return asdict(self)

    def __str__(self) -> str:
        counted = "rows are counted while they are read"
        if self.rows is not None:
            counted = f"{self.rows:,} rows" + ("" if self.tokens is None else f" of {self.tokens:,} tokens")
        also = "" if self.trained == self.parameters else f", {self.trained:,} trained with those of the base"
        lasts = "time cannot be estimated" if self.seconds is None else f"about {duration(self.seconds)}"
        return (
            f"heads: {self.parameters:,} parameters{also}; memory: {size(self.weights)} of weights, "
            f"{size(self.memory)} or more while training\n"
            f"data: {counted}; {self.steps:,} steps of {self.batch} rows, {self.evaluations} evaluations at most: "
            f"{lasts}"
        )


def forecast(trainer: DraftHeadTrainer, data: PreparedData, collator: PaddingCollator) -> Forecast:
    """Estimate what a training will take.

    Args:
        trainer: ready to train.
        data: what it is to learn from.
        collator: makes a batch of rows.
    """
    args = trainer.args
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    batch = args.per_device_train_batch_size
    together = batch * args.gradient_accumulation_steps * args.world_size
    rows = len(data.rows) if hasattr(data.rows, "__len__") else None
    tokens = None if rows is None or data.report is None else data.report.tokens
    if args.max_steps > 0:
        steps = args.max_steps
    else:
        steps = math.ceil(math.ceil((rows or 0) / (batch * args.world_size)) / args.gradient_accumulation_steps)
        steps = math.ceil(steps * args.num_train_epochs)
    every = args.eval_steps if args.eval_steps and args.eval_strategy == "steps" else None
    every = None if every is None else max(math.ceil(steps * every), 1) if every < 1 else int(every)
    evaluations = math.ceil(args.num_train_epochs) if every is None else math.ceil(steps / every)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    seconds, peak = None, None
    if not trainer.is_fsdp_enabled:  # only the Trainer can run a sharded model
        step, evaluation, peak = _tried(trainer, data.held_out, collator, batch)
        share = _length(data.held_out, batch) if tokens is None or not rows else tokens / rows * batch
        step *= share / _length(data.held_out, batch)
        seconds = steps * args.gradient_accumulation_steps * step
        evaluation *= math.ceil(len(data.held_out) / (batch * args.world_size))
        if trainer.clock is not None:
            trainer.clock.expected_evaluation = evaluation
        during = (evaluations - 1) * evaluation
        if trainer.clock is not None and trainer.clock.evaluations is not None:
            during = min(during, trainer.clock.evaluations * seconds)
        seconds += during + evaluation
    return Forecast(
        parameters=sum(one.numel() for one in model.drafter.parameters()),
        trained=trained,
        weights=weights,
        memory=(weights + 4 * trained if peak is None else peak) + MOMENTS * trained,
        rows=rows,
        tokens=tokens,
        steps=steps,
        batch=together,
        evaluations=evaluations,
        seconds=seconds,
    )


def _tried(
    trainer: DraftHeadTrainer, rows: Sequence[Any], collator: PaddingCollator, batch: int
) -> tuple[float, float, int | None]:
    """Seconds of a step on some rows and of evaluating them, and the most bytes that a GPU had in use."""
    device = trainer.args.device
    inputs = {name: value.to(device) for name, value in collator(_some(rows, batch)).items()}
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[device] if on_gpu else []):  # the trial must not change the training
        trainer.try_step(inputs)  # the first call includes one-time work
        seconds, evaluating = trainer.try_step(inputs)
    return seconds, evaluating, torch.cuda.max_memory_allocated(device) if on_gpu else None


def _some(rows: Sequence[Any], batch: int) -> list[Any]:
    return [rows[number % len(rows)] for number in range(batch)]


def _length(rows: Sequence[Any], batch: int) -> int:
    """Tokens of the rows that are tried."""
    return sum(len(row["input_ids"]) for row in _some(rows, batch))


def duration(seconds: float) -> str:
    """Seconds in the usual units.

    >>> duration(42), duration(3000), duration(9000)
    ('42 s', '50 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes in the usual units.

    >>> size(3 * 2**20), size(5 * 2**30)
    ('3.0 MiB', '5.0 GiB')
    """
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"
