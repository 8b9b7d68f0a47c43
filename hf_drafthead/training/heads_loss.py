"""The loss of all heads on one batch: the base is run once, projections only where there is a label, a chunk at a time.

Shapes: B rows, T positions, M labelled positions, H hidden, F feature layers, V vocabulary, K heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.objectives import (
    feature_loss,
    head_weights,
    labelled,
    next_token_loss,
    rank_counts,
    teacher_loss,
)

RANKS = 5  # top-1 and top-5 accuracies are logged
CHUNK = 1 << 22  # most logits that exist at a time


@dataclass(frozen=True)
class Reading:
    """What the base says about a batch.

    features: (B, T, F*H) for the heads to read; hidden: (B, T, H) after the final norm; logits: (B, T, V), None where
    the base's lm_head gives them from `hidden`.
    """

    features: Tensor
    hidden: Tensor
    logits: Tensor | None


@dataclass(frozen=True)
class HeadsLoss:
    """What counts how much in the loss of all heads.

    next_token, teacher, feature: weights of the three objectives; head_decay: head k counts `head_decay ** k`;
    feature_noise: width of the uniform noise on the hidden states that the heads read; split: whether the base's
    lm_head on its last hidden state gives its logits, so that they can be had for some positions only.
    """

    next_token: float = 1.0
    teacher: float = 0.0
    feature: float = 0.0
    head_decay: float = 1.0
    feature_noise: float = 0.0
    split: bool = True

    def __call__(
        self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor], totals: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of the objectives over all heads.

        Args:
            model: in training mode if noise and dropout are wanted.
            inputs: `input_ids` (B, T), `labels` (B, T), and if rows are padded `attention_mask` (B, T); `features`
                (B, T, H) if the base's last hidden states are known already.
            totals: (K,) by how many labels each head's loss is divided; those of this batch by default.

        Returns:
            scalar loss, and LongTensor (K, RANKS + 1): at which rank each head had its labels.
        """
        labels = inputs["labels"]
        reading = self._read(model, inputs)
        features = reading.features
        if self.feature_noise and model.drafter.training:
            features = features + self.feature_noise * (torch.rand_like(features) - 0.5)
        states = model.drafter.head_states(features, inputs["input_ids"], inputs.get("attention_mask"))
        loss = features.new_zeros((), dtype=torch.float32)
        counts = []
        for head, weight in enumerate(head_weights(len(states), self.head_decay)):
            shift = 2 + head
            kept = labelled(labels, shift)
            same = kept.roll(shift - 1, dims=1)  # the base guesses a token one position before it
            logits = None if reading.logits is None else reading.logits[same]
            summed, ranks = self._summed(
                model, head, states[head][kept], labels.roll(-shift, dims=1)[kept], reading.hidden[same], logits
            )
            total = kept.sum().clamp(min=1) if totals is None else totals[head]
            loss = loss + weight * summed / total
            counts.append(ranks)
        return loss, torch.stack(counts)

    @torch.no_grad()
    def _read(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor]) -> Reading:
        """Run the base over a batch, or take its hidden states as given."""
        if "features" in inputs:
            return Reading(inputs["features"], inputs["features"], None)
        base, was_training = model.base, model.base.training
        base.eval()  # the Trainer turns on dropout everywhere
        outputs = (base.get_decoder() if self.split else base)(
            input_ids=inputs["input_ids"],
            attention_mask=inputs.get("attention_mask"),
            output_hidden_states=True,
            use_cache=False,
        )
        base.train(was_training)
        hidden = outputs.hidden_states
        features = torch.cat([hidden[layer] for layer in model.drafter.feature_layers], dim=-1)
        return Reading(features, hidden[-1], None if self.split else outputs.logits)

    def _summed(
        self,
        model: DraftHeadPreTrainedModel,
        head: int,
        states: Tensor,
        targets: Tensor,
        hidden: Tensor,
        teachers: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """One head's objectives summed over M positions, and its ranks; never more than CHUNK logits at a time.

        Args:
            states: (M, H) of the head.
            targets: (M,) token ids.
            hidden: (M, H) of the base for the same tokens.
            teachers: (M, V) logits of the base for the same tokens, None where its lm_head gives them.
        """

        def of_chunk(states: Tensor, targets: Tensor, hidden: Tensor, teachers: Tensor | None) -> tuple[Tensor, Tensor]:
            logits = model.drafter.head_logits(head, states)
            loss = logits.new_zeros(len(states), dtype=torch.float32)
            if self.next_token:
                loss = loss + self.next_token * next_token_loss(logits, targets)
            if self.teacher:
                if teachers is None:
                    with torch.no_grad():
                        teachers = model.base.get_output_embeddings()(hidden)
                loss = loss + self.teacher * teacher_loss(logits, teachers)
            if self.feature:
                loss = loss + self.feature * feature_loss(states, hidden)
            return loss.sum(), rank_counts(logits.detach(), targets, RANKS)

        size = max(CHUNK // model.config.get_text_config().vocab_size, 1)
        if len(states) <= size:
            return of_chunk(states, targets, hidden, teachers)
        total = states.new_zeros((), dtype=torch.float32)
        counts = torch.zeros(RANKS + 1, dtype=torch.long, device=states.device)
        for first in range(0, len(states), size):
            rows = slice(first, first + size)
            part = (states[rows], targets[rows], hidden[rows], None if teachers is None else teachers[rows])
            loss, ranks = checkpoint(of_chunk, *part, use_reentrant=False)  # the gradient computes logits again
            total, counts = total + loss, counts + ranks
        return total, counts


def label_counts(labels: Tensor, heads: int) -> Tensor:
    """How many labels each head has in a batch (B, T): (K,)."""
    return torch.stack([labelled(labels, 2 + head).sum() for head in range(heads)])
