"""The tokens of a reduced draft vocabulary: the most frequent ones."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from datasets import IterableDataset

from hf_drafthead.training.objectives import IGNORED

COUNTED = 4096  # rows of a stream that are counted


def frequent_tokens(rows: Any, size: int, vocabulary: int) -> tuple[torch.Tensor, float]:
    """The tokens that are labels most often (EAGLE-3's trainer); if fewer occur, the lowest other ids too.

    Args:
        rows: with `labels` (T,), IGNORED at positions without a loss; of a stream the first 4096.
        size: D, how many tokens.
        vocabulary: V, tokens of the base.

    Returns:
        (D,) ascending ids, and the share of all labels that they make up.
    """
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for row in _looked_at(rows):
        labels = torch.as_tensor(row["labels"])
        counts += torch.bincount(labels[labels != IGNORED], minlength=vocabulary)
    chosen = counts.sort(descending=True, stable=True).indices[:size].sort().values
    return chosen, int(counts[chosen].sum()) / max(int(counts.sum()), 1)


def _looked_at(rows: Any) -> Iterable[Mapping[str, Any]]:
    if isinstance(rows, IterableDataset):
        return islice(iter(rows), COUNTED)
    return (rows[row] for row in range(len(rows)))
