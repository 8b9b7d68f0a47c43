"""How much the data resembles the base's own text: heads have to predict the base, not the data.

Shapes: B rows, T positions, M labelled positions, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.training.heads_loss import CHUNK
from hf_drafthead.training.objectives import labelled, next_token_loss, teacher_loss

MOST_EXCESS = 0.25  # nats per token


@dataclass(frozen=True)
class Likeness:
    """How well a base predicts the labels of some rows.

    agreement: share of labels that are the base's own best guess; excess: by how many nats per token the
    labels' negative log-likelihood exceeds that of the base's own samples: about 0 for its own text, below 0 for greedy
    text.
    """

    agreement: float
    excess: float

    def warning(self) -> str | None:
        """One line, if heads trained on this data will guess worse than they could; else None."""
        if self.excess <= MOST_EXCESS:
            return None
        return (
            f"the data does not look like what the base writes ({self.excess:.2f} nats per token more surprising than "
            f"its own text, {self.agreement:.0%} of the tokens are its first choice): let the base answer the prompts "
            "itself, with `hf-drafthead distill`, and train on that."
        )


@torch.no_grad()
def likeness(base: Any, batches: Iterable[Mapping[str, Tensor]]) -> Likeness | None:
    """Run the base over some rows.

    Args:
        base: causal LM in eval mode.
        batches: `input_ids`, `labels` and `attention_mask`, (B, T) each.

    Returns:
        None where nothing is labelled.
    """
    device = base.get_input_embeddings().weight.device
    reader, size = BaseReader.of_texts(base), max(CHUNK // base.config.get_text_config().vocab_size, 1)
    count, agreed, excess = 0, 0.0, 0.0
    for batch in batches:
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask") if name in batch}
        labels = batch["labels"].to(device)
        kept = labelled(labels, 1)
        scores = reader.texts(**inputs).scores[kept]  # (M, H) or (M, V)
        count += len(scores)
        for some, targets in zip(scores.split(size), labels.roll(-1, dims=1)[kept].to(scores.device).split(size)):
            logits = reader.logits(some)
            agreed += (logits.argmax(-1) == targets).sum().item()
            excess += (next_token_loss(logits, targets) - teacher_loss(logits, logits)).sum().item()
    return Likeness(agreed / count, excess / count) if count else None
