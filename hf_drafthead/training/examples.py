"""Rows of token ids that are ready for training: batches of them, checks, and what is taken from them.

Nothing here needs a tokenizer or a library of data sets: rows may be lists of dictionaries of lists or tensors.

Shapes: B rows, T positions, P tokens of a prompt, N labelled positions, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.heads_loss import CHUNK
from hf_drafthead.training.objectives import IGNORED, label_positions, labelled, next_token_loss, teacher_loss

if TYPE_CHECKING:
    from hf_drafthead.training.data import DataReport

logger = logging.get_logger(__name__)

USUAL_LENGTH = 2048  # tokens of a row, as in the papers
COUNTED = 4096  # rows of a stream that are counted


@dataclass(frozen=True)
class PreparedData:
    """Tokenized rows, ready for training.

    rows: each with `input_ids` and `labels` (T,), -100 at positions without a loss, and if the base's last hidden
    states are known, `features` (T, H); held_out: rows to evaluate on; source: what they were made from, for the
    training summary; sha256: of that; report: how its rows were used.
    """

    rows: Any
    held_out: Any
    source: str
    sha256: str
    report: DataReport | None = None


class PaddingCollator:
    """Makes a batch of rows: padded on the right to the longest.

    Args:
        pad_token_id: what `input_ids` are filled up with.
    """

    def __init__(self, pad_token_id: int) -> None:
        if not isinstance(pad_token_id, int):
            raise TypeError(
                f"pad_token_id is {pad_token_id!r}: expected a token id, any token, since padding is masked."
            )
        self.pad_token_id = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Tensors `input_ids` and `labels`, each (B, T), and `label_positions` (N,) in them; also `features` of rows.

        There is no mask: behind a text's end is what nothing in it sees, and a mask would cost the fast attention.
        """
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        labels = [torch.as_tensor(row["labels"], dtype=torch.long) for row in rows]
        batch = {
            "input_ids": _pad(ids, self.pad_token_id),
            "labels": _pad(labels, IGNORED),
        }
        batch["label_positions"] = label_positions(batch["labels"])
        if "features" in rows[0]:
            batch["features"] = _pad([torch.as_tensor(row["features"]) for row in rows], 0)
        return batch


def padding_token(model: Any, tokenizer: Any) -> int:
    """A token to fill batches up with that the base can embed: under the mask any will do."""
    ends = model.generation_config.eos_token_id
    known = (
        tokenizer.pad_token_id,
        model.generation_config.pad_token_id,
        *(ends if isinstance(ends, list) else [ends]),
    )
    size = model.config.get_text_config().vocab_size
    return next((token for token in known if isinstance(token, int) and 0 <= token < size), 0)


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def own_prompts(rows: Sequence[dict[str, Any]], count: int, longest: int) -> list[Tensor]:
    """What comes before the first answer of some rows; of a row that is all text, its first quarter.

    Args:
        rows: with `input_ids` and `labels`.
        count: of prompts, at most.
        longest: tokens of a prompt; longer ones are left out.
    """
    prompts = []
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["labels"])
        answered = (labels != IGNORED).nonzero().flatten()
        first = int(answered[0]) if len(answered) else 0
        first = first or len(ids) // 4
        if 0 < first <= longest:
            prompts.append(ids[:first])
    return prompts[:count]


def refuse_short_rows(model: DraftHeadPreTrainedModel, rows: Any) -> None:
    """Refuse data in which the last head never has a label."""
    ahead = model.config.num_draft_heads + 1
    longest = max(len(rows[row]["input_ids"]) for row in range(len(rows)))
    if longest <= ahead:
        raise ValueError(
            f"rows of {longest} tokens have no label {ahead} tokens ahead: give longer rows, or train fewer heads."
        )


def most_tokens(model: DraftHeadPreTrainedModel) -> int:
    """The default limit of a row's tokens."""
    return min(USUAL_LENGTH, longest_text_of(model))


def longest_text_of(model: DraftHeadPreTrainedModel) -> int:
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None) or 2048


def choose_vocabulary(model: DraftHeadPreTrainedModel, rows: Any) -> float | None:
    """Give heads with a reduced vocabulary the most frequent tokens of the data; returns their share of all labels."""
    size, known = model.config.draft_vocab_size, model.config.known_tokens
    if size is None or known is None or size >= known:
        return None
    tokens, share = frequent_tokens(rows, size, known)
    model.drafter.choose_vocabulary(tokens)
    return share


def frequent_tokens(rows: Any, size: int, vocabulary: int) -> tuple[Tensor, float]:
    """The tokens that are labels most often (EAGLE-3's trainer); if fewer occur, the lowest other ids too.

    Args:
        rows: with `labels` (T,), IGNORED at positions without a loss; of a stream the first 4096.
        size: D, how many tokens.
        vocabulary: V, tokens of the base.

    Returns:
        (D,) ascending ids, and the share of all labels that they make up.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)
    indexed = hasattr(rows, "__len__")  # which may have no iterator
    for row in (rows[row] for row in range(len(rows))) if indexed else islice(rows, COUNTED):
        labels = torch.as_tensor(row["labels"])
        counts += torch.bincount(labels[labels != IGNORED], minlength=vocabulary)
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, int(counts[chosen].sum()) / max(int(counts.sum()), 1)


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
def likeness(base: Any, rows: Sequence[Mapping[str, Any]], batch_size: int) -> Likeness | None:
    """Run the base over some rows.

    Args:
        base: causal LM in eval mode.
        rows: with `input_ids` and `labels`, (T,) each.
        batch_size: rows at a time.

    Returns:
        None where nothing is labelled.
    """
    device, vocabulary = base.get_input_embeddings().weight.device, base.config.get_text_config().vocab_size
    reader, size, collator = BaseReader.of_texts(base), max(CHUNK // vocabulary, 1), PaddingCollator(0)
    count, agreed, excess = 0, 0.0, 0.0
    for first in range(0, len(rows), batch_size):
        batch = collator([rows[row] for row in range(first, min(first + batch_size, len(rows)))])
        labels = batch["labels"].to(device)
        kept = labelled(labels, 1)
        scores = reader.texts(batch["input_ids"].to(device)).scores[kept]  # (M, H) or (M, V)
        count += len(scores)
        for some, targets in zip(scores.split(size), labels.roll(-1, dims=1)[kept].to(scores.device).split(size)):
            logits = reader.logits(some)
            agreed += (logits.argmax(-1) == targets).sum().item()
            excess += (next_token_loss(logits, targets) - teacher_loss(logits, logits)).sum().item()
    return Likeness(agreed / count, excess / count) if count else None
