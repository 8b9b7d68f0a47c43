"""Rows of token ids that are ready for training: batches of them, checks, and what is taken from them.

Nothing here needs a tokenizer or a library of data sets: rows may be lists of dictionaries of lists or tensors.

Shapes: B rows, T positions, P tokens of a prompt, N labelled positions, D draft vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.training.heads_loss import IGNORED, label_positions

if TYPE_CHECKING:
    from hf_drafthead.training.data import DataReport

logger = logging.get_logger(__name__)

USUAL_LENGTH = 2048  # tokens of a row, as in the papers


@dataclass(frozen=True)
class PreparedData:
    """Tokenized rows, ready for training.

    rows: each with `input_ids` and `labels` (T,), -100 at positions without a loss; held_out: rows to evaluate on;
    source: what they were made from, for the training summary; sha256: of that; report: how its rows were used.
    """

    rows: Any
    held_out: Any
    source: str
    sha256: str
    report: DataReport | None = None


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """A batch of rows, padded on the right: `input_ids` and `labels`, each (B, T), and `label_positions` (N,) in them;
    without a mask, which would cost the fast attention: nothing in a text sees what is behind its end."""
    batch = {}
    for name, padding in (("input_ids", 0), ("labels", IGNORED)):
        values = [torch.as_tensor(row[name], dtype=torch.long) for row in rows]
        batch[name] = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=padding)
    return {**batch, "label_positions": label_positions(batch["labels"])}


def check_rows(rows: Any, vocabulary: int) -> None:
    """A ValueError for a row with a token beyond the vocabulary, and where no row has a label that can be guessed."""
    labelled = False
    for number in range(len(rows)):
        ids, labels = (torch.as_tensor(rows[number][name]) for name in ("input_ids", "labels"))
        tokens = torch.cat([ids, labels[labels != IGNORED]])
        if (unknown := (tokens < 0) | (tokens >= vocabulary)).any():
            what = f"row {number} has the token {int(tokens[unknown][0])}, but the base's vocabulary has {vocabulary}"
            raise ValueError(f"{what}: tokenize the text with the tokenizer of the base.")
        labelled = labelled or bool((labels[1:] != IGNORED).any())
    if not labelled:
        raise ValueError(f"none of the {len(rows)} rows has a label other than {IGNORED}: nothing can be learnt.")


def own_prompts(rows: Sequence[dict[str, Any]], count: int, longest: int) -> list[Tensor]:
    """What comes before the first answer of at most `count` rows; of a row that is all text, its first quarter."""
    prompts = []
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["labels"])
        answered = (labels != IGNORED).nonzero().flatten()
        first = int(answered[0]) if len(answered) else 0
        first = first or len(ids) // 4
        if 0 < first <= longest:
            prompts.append(ids[:first])
    return prompts[:count]


def longest_text_of(model: DraftHeadPreTrainedModel) -> int:
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None) or USUAL_LENGTH


def frequent_tokens(counts: Tensor, size: int) -> tuple[Tensor, float]:
    """The tokens (size,) of the greatest counts (EAGLE-3's trainer), these first, and their share of all counts."""
    tokens = counts.sort(descending=True, stable=True).indices[:size]
    return tokens, int(counts[tokens].sum()) / max(int(counts.sum()), 1)


def label_frequencies(rows: Any, vocabulary: int) -> Tensor:
    """How often each token (vocabulary,) is a label."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for row in map(rows.__getitem__, range(len(rows))):  # which may have no iterator
        labels = torch.as_tensor(row["labels"])
        tokens, times = labels[labels != IGNORED].unique(return_counts=True)
        counts[tokens] += times
    return counts
