"""The Hugging Face Trainer for draft heads: a frozen base is run once per batch, every head learns from it.

Shapes: B rows, T positions, K heads.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hf_drafthead.generation.forward import splits
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.heads_loss import RANKS, HeadsLoss, label_counts


@dataclass
class DraftHeadTrainingArguments(TrainingArguments):
    """Training arguments with the weights of the objectives.

    Args:
        next_token_weight: weight of the cross-entropy with the tokens of the text (Medusa's objective).
        teacher_weight: weight of the cross-entropy with the base's distribution (Hydra's objective).
        feature_weight: weight of the distance to the base's hidden states (EAGLE's objective, beside the teacher's).
        feature_noise: hidden states are read with uniform noise on them of this width, in training only (EAGLE).
        head_decay: head k (counted from 1) counts ``head_decay ** k``; 1.0 counts all the same.
    """

    next_token_weight: float = field(default=1.0, metadata={"help": "Weight of the text's own tokens."})
    teacher_weight: float = field(default=0.0, metadata={"help": "Weight of the base's distribution."})
    feature_weight: float = field(default=0.0, metadata={"help": "Weight of the base's hidden states."})
    feature_noise: float = field(default=0.0, metadata={"help": "Width of the noise on the hidden states read."})
    head_decay: float = field(default=1.0, metadata={"help": "Weight of head k is this to the power of k."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("next_token_weight", "teacher_weight", "feature_weight", "feature_noise"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 or more, 0 leaves it out.")
        if self.next_token_weight == self.teacher_weight == self.feature_weight == 0:
            raise ValueError(
                "next_token_weight, teacher_weight and feature_weight are all 0: nothing to learn, set one above 0."
            )
        if self.head_decay <= 0:
            raise ValueError(f"head_decay is {self.head_decay}: expected a number above 0, 1.0 for equal weights.")


class DraftHeadTrainer(Trainer):
    """Trains the drafter of a draft-head model; the base stays as it is and is not saved.

    Batches hold ``input_ids`` (B, T), ``labels`` (B, T) with ``-100`` where nothing is to be learnt, and an
    ``attention_mask`` (B, T) if rows are padded. Every head's loss is the mean over its labels in all of a step's
    batches, accumulated ones and those of other processes included. The logs hold ``head{i}_top1`` and
    ``head{i}_top5``, the share of labels that are among a head's best guesses, with ``eval_`` in front where they come
    from the evaluation rows.

    Args:
        model: a draft-head model with its base attached.
        args: weights of the objectives among all that the Trainer knows.
        kwargs: as for ``transformers.Trainer``.
    """

    args: DraftHeadTrainingArguments

    def __init__(self, model: DraftHeadPreTrainedModel, args: DraftHeadTrainingArguments, **kwargs: Any) -> None:
        model.base.requires_grad_(False)
        model.drafter.requires_grad_(True)
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is divided by the labels of the whole step
        self._loss = HeadsLoss(
            next_token=args.next_token_weight,
            teacher=args.teacher_weight,
            feature=args.feature_weight,
            head_decay=args.head_decay,
            feature_noise=args.feature_noise,
            split=splits(model.base),
        )
        self._heads = model.config.num_draft_heads
        self._counts = self._no_counts()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The heads' loss; counts on the side at which rank each head had the label.

        Args:
            num_items_in_batch: (K,) from `get_batch_samples`; of no use in evaluation, where every batch is a mean.
        """
        totals = num_items_in_batch if model.training else None
        loss, counts = model(training_loss=self._loss, inputs=inputs, totals=totals)
        self._counts += counts.cpu()
        if totals is not None:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        return (loss, {}) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """The batches of one step, and how many labels each head has in them, in all processes together: (K,)."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        counts = sum(label_counts(batch["labels"], self._heads) for batch in batches).to(device)  # type: ignore[union-attr]
        return batches, self.accelerator.reduce(counts).clamp(min=1)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, with the heads' accuracies among the metrics."""
        training_counts, self._counts = self._counts, self._no_counts()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in self._accuracies()})
        self._counts = training_counts
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, with the accuracies since the last training log."""
        if "loss" in logs:
            logs.update(self._accuracies())
            self._counts = self._no_counts()
        super().log(logs, start_time)

    def _no_counts(self) -> torch.Tensor:
        return torch.zeros(self._heads, RANKS + 1, dtype=torch.long)

    def _accuracies(self) -> Iterable[tuple[str, float]]:
        """Top-1 and top-5 accuracy of each head since the counts (K, RANKS + 1) were begun, over all processes."""
        counts = self.accelerator.reduce(self._counts.to(self.args.device))
        for head, ranks in enumerate(counts.tolist()):
            total = max(sum(ranks), 1)
            yield f"head{head}_top1", ranks[0] / total
            yield f"head{head}_top5", sum(ranks[:RANKS]) / total
