"""What `accepted_lengths` tells: how far each step got, and which tokens were guessed.

Shapes: B rows, S steps.
"""

from collections.abc import Iterable

import torch


def tokens_per_step(accepted_lengths: Iterable[torch.Tensor]) -> float | None:
    """Tokens emitted per step (tau), over all rows of all calls; None where there was no step.

    Args:
        accepted_lengths: one (B, S) tensor per call, 0 after a row ended, as `generate` returns it.

    >>> tokens_per_step([torch.tensor([[3, 1], [2, 0]])])
    2.0
    """
    emitted = steps = 0
    for lengths in accepted_lengths:
        emitted += int(lengths.sum())
        steps += int((lengths > 0).sum())
    return emitted / steps if steps else None


def histogram(accepted_lengths: Iterable[torch.Tensor]) -> dict[int, int]:
    """How many steps emitted 1, 2, 3 ... tokens.

    >>> histogram([torch.tensor([[3, 1], [2, 0]]), torch.tensor([[1]])])
    {1: 2, 2: 1, 3: 1}
    """
    counts: dict[int, int] = {}
    for lengths in accepted_lengths:
        for length in lengths[lengths > 0].tolist():
            counts[length] = counts.get(length, 0) + 1
    return dict(sorted(counts.items()))


def guess_depths(accepted_lengths: torch.Tensor) -> list[int]:
    """For each new token of one row: the depth of the guess that it was, 0 for the base's own.

    The first token is the prompt's and the last of every step is the base's, so a step of three tokens reads 1, 2, 0.

    Args:
        accepted_lengths: (S,), one row.

    >>> guess_depths(torch.tensor([3, 1, 2, 0]))
    [0, 1, 2, 0, 0, 1, 0]
    """
    depths = [0]
    for length in accepted_lengths.tolist():
        depths += [*range(1, length), 0] if length else []
    return depths


def top_k_accuracy(ranks: Iterable[torch.Tensor], most: int = 5) -> list[list[float]] | None:
    """By head, how often the token that follows is among its best 1, 2 ... `most` guesses (Amphista, figure 1).

    Args:
        ranks: (..., K) from 0, one tensor per call of `generation.calibration.rank_paths`; -1 is not counted.
        most: the largest k.

    Returns:
        K lists of `most` shares; None where nothing is counted.

    >>> top_k_accuracy([torch.tensor([[0, 3], [1, 0], [0, -1]])], most=2)
    [[0.6666666666666666, 1.0], [0.5, 0.5]]
    """
    parts = [part.flatten(0, -2) for part in ranks]
    found = torch.cat(parts) if parts else torch.zeros(0, 0)
    known = found >= 0
    if not known.any():
        return None
    counts = known.sum(0).clamp(min=1).double()
    hits = [(known & (found < k)).sum(0) / counts for k in range(1, most + 1)]
    return torch.stack(hits, dim=1).tolist()
