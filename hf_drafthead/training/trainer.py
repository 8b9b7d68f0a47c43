"""The Hugging Face Trainer for draft heads: a frozen base is run once per batch, every head learns from it.

Shapes: B rows, T positions, H hidden, F feature layers, V vocabulary, K heads.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.objectives import head_weights, next_token_loss, rank_counts, teacher_loss

RANKS = 5  # top-1 and top-5 accuracies are logged


@dataclass
class DraftHeadTrainingArguments(TrainingArguments):
    """Training arguments with the weights of the objectives.

    Args:
        next_token_weight: weight of the cross-entropy with the tokens of the text (Medusa's objective).
        teacher_weight: weight of the cross-entropy with the base's distribution (Hydra's objective).
        head_decay: head k (counted from 1) counts ``head_decay ** k``; 1.0 counts all the same.
    """

    next_token_weight: float = field(default=1.0, metadata={"help": "Weight of the text's own tokens."})
    teacher_weight: float = field(default=0.0, metadata={"help": "Weight of the base's distribution."})
    head_decay: float = field(default=1.0, metadata={"help": "Weight of head k is this to the power of k."})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("next_token_weight", "teacher_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 or more, give the objective a weight.")
        if self.next_token_weight == self.teacher_weight == 0:
            raise ValueError("next_token_weight and teacher_weight are both 0: nothing to learn, set one above 0.")
        if self.head_decay <= 0:
            raise ValueError(f"head_decay is {self.head_decay}: expected a number above 0, 1.0 for equal weights.")


class DraftHeadTrainer(Trainer):
    """Trains the drafter of a draft-head model; the base stays as it is and is not saved.

    Batches hold ``input_ids`` (B, T), ``labels`` (B, T) with ``-100`` where nothing is to be learnt, and an
    ``attention_mask`` (B, T) if rows are padded. The logs hold ``head{i}_top1`` and ``head{i}_top5``, the share of
    labels that are among a head's best guesses, with ``eval_`` in front where they come from the evaluation rows.

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
        self.model_accepts_loss_kwargs = False  # the loss is a mean: accumulation must divide it
        self._counts = self._no_counts()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Weighted sum of the objectives over all heads; counts on the side at which rank each head had the label."""
        heads = self.accelerator.unwrap_model(model)
        input_ids, labels = inputs["input_ids"], inputs["labels"]
        attention_mask = inputs.get("attention_mask")
        features, base_logits = self._run_base(heads, input_ids, attention_mask)
        hidden = heads.drafter.head_states(features, input_ids, attention_mask)
        loss = features.new_zeros((), dtype=torch.float32)
        for head, weight in enumerate(head_weights(len(hidden), self.args.head_decay)):
            logits = heads.drafter.head_logits(head, hidden[head])  # (B, T, V)
            shift = 2 + head
            if self.args.next_token_weight:
                loss = loss + weight * self.args.next_token_weight * next_token_loss(logits, labels, shift)
            if self.args.teacher_weight:
                loss = loss + weight * self.args.teacher_weight * teacher_loss(logits, base_logits, labels, shift)
            self._counts[head] += rank_counts(logits.detach(), labels, shift, RANKS).cpu()
        return (loss, {}) if return_outputs else loss

    def _run_base(
        self, model: DraftHeadPreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features (B, T, F*H) that the drafter reads, and the base's logits (B, T, V)."""
        model.base.eval()  # the Trainer turns on dropout everywhere
        with torch.no_grad():
            outputs = model.base(
                input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, use_cache=False
            )
        layers = [outputs.hidden_states[layer] for layer in model.drafter.feature_layers]
        return torch.cat(layers, dim=-1), outputs.logits

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, with the heads' accuracies among the metrics."""
        training_counts, self._counts = self._counts, self._no_counts()
        output = super().evaluation_loop(*args, **kwargs)
        prefix = kwargs.get("metric_key_prefix", "eval")
        output.metrics.update({f"{prefix}_{name}": value for name, value in _accuracies(self._counts)})
        self._counts = training_counts
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As the Trainer's, with the accuracies since the last training log."""
        if "loss" in logs:
            logs.update(_accuracies(self._counts))
            self._counts = self._no_counts()
        super().log(logs, start_time)

    def _no_counts(self) -> torch.Tensor:
        heads = self.accelerator.unwrap_model(self.model).drafter.config.num_draft_heads
        return torch.zeros(heads, RANKS + 1, dtype=torch.long)  # (K, RANKS + 1)


def _accuracies(counts: torch.Tensor) -> Iterable[tuple[str, float]]:
    """Top-1 and top-5 accuracy of each head from its counts (K, RANKS + 1)."""
    for head, ranks in enumerate(counts.tolist()):
        total = max(sum(ranks), 1)
        yield f"head{head}_top1", ranks[0] / total
        yield f"head{head}_top5", sum(ranks[:RANKS]) / total
