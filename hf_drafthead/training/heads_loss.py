"""The loss of all heads on one batch: one forward of the base, logits only at labelled positions, a chunk at a time.

Shapes: B rows, T positions, M labelled positions, H hidden, F feature layers, V vocabulary, K heads.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_drafthead.generation.reader import BaseReader, Reading
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.objectives import (
    feature_loss,
    head_weights,
    in_draft_vocabulary,
    labelled,
    next_token_loss,
    rank_counts,
    teacher_loss,
)

RANKS = 5  # top-1 and top-5 accuracies are logged
CHUNK = 1 << 22  # most logits that exist at a time on a CPU; GPUs are slow at many small products: 16 times as many
SCHEDULES = ("constant", "linear", "sine")


@dataclass(frozen=True)
class Objective:
    """Weights of the three objectives, see `objectives`."""

    next_token: float = 0.0
    teacher: float = 0.0
    feature: float = 0.0

    def __call__(self, states: Tensor, logits: Tensor, targets: Tensor, hidden: Tensor, teachers: Tensor) -> Tensor:
        """Weighted sum (M,) for what one head projects (M, H), its logits (M, V), and what both should have been."""
        loss = logits.new_zeros(len(logits), dtype=torch.float32)
        if self.next_token:
            loss = loss + self.next_token * next_token_loss(logits, targets)
        if self.teacher:
            loss = loss + self.teacher * teacher_loss(logits, teachers)
        if self.feature:
            loss = loss + self.feature * feature_loss(states, hidden)
        return loss


@dataclass(frozen=True)
class HeadsLoss:
    """The loss and its weights.

    objective: of every head; head_decay: head k counts `head_decay ** k`; feature_noise: width of the uniform noise on
    the hidden states that the heads read; reader: reads the base, default: the output projection of
    the last hidden state gives the logits; base: weight of the base's own loss, 0 where it is not trained
    (Medusa-1); adapters_off: where given, the base learns its own distribution without adapters, else the text
    (Medusa-2, section 2.2.2).
    """

    objective: Objective
    head_decay: float = 1.0
    feature_noise: float = 0.0
    reader: BaseReader | None = None
    base: float = 0.0
    adapters_off: Callable[[], contextlib.AbstractContextManager] | None = None

    def __call__(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        totals: Tensor | None = None,
        heads_weight: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """The base's loss, if it is trained, plus the weighted sum of the objectives over all heads.

        Args:
            model: in training mode for noise and dropout.
            inputs: `input_ids` (B, T), `labels` (B, T), and if rows are padded `attention_mask` (B, T); `features`
                (B, T, H) if the base's last hidden states are known already, of use to heads that read no others.
            totals: (1 + K,) by how many labels the base's and each head's loss is divided; default: of this batch.
            heads_weight: of all heads' losses beside the base's.

        Returns:
            scalar loss, and LongTensor (K, RANKS + 1): how often each head gave each rank to the label.
        """
        return self.of_reading(model, inputs, self.read(model, inputs), totals, heads_weight)

    def of_reading(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        reading: Reading,
        totals: Tensor | None = None,
        heads_weight: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """As above, from the base's outputs."""
        features = model.drafter.placed(reading.features)
        labels = inputs["labels"].to(features.device)  # of a base on several devices the heads are on the last
        half = reading.features.dtype != features.dtype
        with torch.autocast(features.device.type, torch.bfloat16, enabled=half):  # of float32 heads on such a base
            loss, counts = self._of_heads(model, inputs, reading, features, labels, totals, heads_weight)
        return loss.to(inputs["labels"].device), counts

    def _of_heads(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        reading: Reading,
        features: Tensor,
        labels: Tensor,
        totals: Tensor | None,
        heads_weight: float,
    ) -> tuple[Tensor, Tensor]:
        """As above, from the base's outputs on the heads' device."""
        if self.feature_noise and model.drafter.training:
            features = features + self.feature_noise * (torch.rand_like(features) - 0.5)
        states = model.drafter.head_states(features, inputs["input_ids"], inputs.get("attention_mask"))
        totals = label_counts(labels, len(states)).clamp(min=1) if totals is None else totals.to(labels.device)
        loss = features.new_zeros((), dtype=torch.float32)
        if self.base:
            loss = loss + self.base * self._base_loss(model, inputs, reading) / totals[0]
        counts = []
        for head, weight in enumerate(head_weights(len(states), self.head_decay)):
            shift = 2 + head
            kept = labelled(labels, shift)
            same = kept.roll(shift - 1, dims=1)  # the base predicts a token from the position before it
            hidden, scores = reading.hidden[same].detach(), reading.scores[same].detach()
            targets = labels.roll(-shift, dims=1)[kept]

            def of_chunk(
                states: Tensor, targets: Tensor, hidden: Tensor, scores: Tensor, head: int = head
            ) -> tuple[Tensor, Tensor]:
                logits = model.drafter.head_logits(head, states)
                own = model.drafter.draft_tokens
                teachers = self._logits(model, scores) if self.objective.teacher or own is not None else logits
                learnt = None
                if own is not None:
                    targets, teachers, learnt = in_draft_vocabulary(own, targets, teachers)
                lost = self.objective(states, logits, targets, hidden, teachers)
                lost = lost if learnt is None else lost * learnt
                return lost.sum(), rank_counts(logits.detach(), targets, RANKS)

            summed, ranks = _in_chunks(of_chunk, model, states[head][kept], targets, hidden, scores)
            loss = loss + heads_weight * weight * summed / totals[1 + head]
            counts.append(ranks)
        return loss, torch.stack(counts)

    def read(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor], learn: bool = True) -> Reading:
        """Run the base over a batch, or take its hidden states as given; with gradients where it is trained."""
        if "features" in inputs and model.drafter.reads in ((-1,), ()):
            return Reading(inputs["features"], inputs["features"], inputs["features"])
        base, was_training = model.base, model.base.training
        learns = bool(self.base) and learn
        base.train(was_training and learns)  # no dropout in a base that is not trained
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            reading = self._reader(model).texts(inputs["input_ids"], inputs.get("attention_mask"))
        base.train(was_training)
        return reading

    def _reader(self, model: DraftHeadPreTrainedModel) -> BaseReader:
        return self.reader or BaseReader(model.base, {}, split=True, reads=model.drafter.reads)

    def _base_loss(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor], reading: Reading) -> Tensor:
        """Cross-entropy with the text, or KL divergence from the base's distribution without adapters; summed."""
        kept = labelled(inputs["labels"], 1)
        targets = inputs["labels"].roll(-1, dims=1)[kept].to(reading.scores.device)
        before = reading.scores
        if self.adapters_off is not None:
            with torch.no_grad(), self.adapters_off():
                before = self.read(model, inputs, learn=False).scores

        def of_chunk(scores: Tensor, targets: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
            logits = self._logits(model, scores, learn=True)
            if self.adapters_off is None:
                return next_token_loss(logits, targets).sum(), targets.new_zeros(())
            teachers = self._logits(model, before)
            return (teacher_loss(logits, teachers) - teacher_loss(teachers, teachers)).sum(), targets.new_zeros(())

        return _in_chunks(of_chunk, model, reading.scores[kept], targets, before[kept].detach())[0]

    def _logits(self, model: DraftHeadPreTrainedModel, scores: Tensor, learn: bool = False) -> Tensor:
        """The base's logits (M, V) from the scores of a `Reading`."""
        with torch.set_grad_enabled(learn and torch.is_grad_enabled()):
            return self._reader(model).logits(scores)


def label_counts(labels: Tensor, heads: int) -> Tensor:
    """How many labels the base and each head have in a batch (B, T): (1 + K,)."""
    return torch.stack([labelled(labels, 1 + head).sum() for head in range(1 + heads)])


def heads_share(schedule: str, step: int, steps: int) -> float:
    """The share of the heads' weight that is applied at a step: 1, or rising to 1 along a line or a quarter sine.

    Args:
        schedule: "constant", "linear" or "sine".
        step: optimizer steps done.
        steps: of the whole training.
    """
    done = min(step / max(steps, 1), 1.0)
    return {"constant": 1.0, "linear": done, "sine": math.sin(math.pi / 2 * done)}[schedule]


def _in_chunks(
    of_chunk: Callable[..., tuple[Tensor, Tensor]], model: DraftHeadPreTrainedModel, *rows: Tensor
) -> tuple[Tensor, Tensor]:
    """The sums over all M rows of what `of_chunk` returns, with at most CHUNK logits at a time."""
    most = CHUNK if rows[0].device.type == "cpu" else 16 * CHUNK
    size = max(most // model.config.get_text_config().vocab_size, 1)
    if len(rows[0]) <= size:
        return of_chunk(*rows)
    parts = zip(*(tensor.split(size) for tensor in rows), strict=True)
    # logits are recomputed for the gradient instead of kept
    sums = [checkpoint(of_chunk, *part, use_reentrant=False) for part in parts]
    return torch.stack([loss for loss, _ in sums]).sum(), torch.stack([counts for _, counts in sums]).sum(0)
