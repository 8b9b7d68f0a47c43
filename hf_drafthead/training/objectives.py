"""What a draft head is trained for, as functions of one head's logits.

Shapes: B rows, T positions, V vocabulary. ``shift`` is how far ahead the head guesses: its logits at position t are for
the token at t + shift. The base's own lm_head has shift 1, head i (0-based) has shift 2 + i.
"""

import torch
import torch.nn.functional as F

IGNORED = -100  # a label that no objective counts, as everywhere in transformers


def next_token_loss(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> torch.Tensor:
    """Cross-entropy with the token that really came, averaged over the labels that are not ignored (Medusa, eq. 1).

    Args:
        logits: (B, T, V) of one head.
        labels: (B, T) token ids in the place where they stand, ``-100`` where nothing is to be learnt.
        shift: how far ahead the head guesses.

    Returns:
        scalar; 0 where no label is left.
    """
    guesses, targets = _aligned(logits, labels, shift)
    total = F.cross_entropy(guesses.float(), targets, ignore_index=IGNORED, reduction="sum")
    return total / (targets != IGNORED).sum().clamp(min=1)


def teacher_loss(logits: torch.Tensor, base_logits: torch.Tensor, labels: torch.Tensor, shift: int) -> torch.Tensor:
    """Cross-entropy with the base's own distribution for the same token, averaged over the labels that are not ignored.

    The base gives its distribution for the token at t + shift at position t + shift - 1 (Hydra, section 4.1).

    Args:
        logits: (B, T, V) of one head.
        base_logits: (B, T, V) of the base, no gradient needed.
        labels: (B, T); only where they are ``-100`` matters.
        shift: how far ahead the head guesses.

    Returns:
        scalar; 0 where no label is left.
    """
    guesses, targets = _aligned(logits, labels, shift)
    teachers = base_logits[:, shift - 1 : -1].flatten(0, 1)
    kept = targets != IGNORED
    loss = F.cross_entropy(guesses.float(), teachers.float().softmax(-1), reduction="none")
    return loss.where(kept, 0).sum() / kept.sum().clamp(min=1)


def head_weights(heads: int, decay: float) -> list[float]:
    """Weight of each head in the total loss: ``decay ** k`` for the k-th, counted from 1 (Medusa, section 2.2.1)."""
    return [decay ** (head + 1) for head in range(heads)]


def rank_counts(logits: torch.Tensor, labels: torch.Tensor, shift: int, ranks: int) -> torch.Tensor:
    """How often the label was a head's best guess, its second best, and so on.

    Args:
        logits: (B, T, V) of one head.
        labels: (B, T); ``-100`` is not counted.
        shift: how far ahead the head guesses.
        ranks: how many ranks to tell apart.

    Returns:
        LongTensor (ranks + 1,): labels found at each rank, then those found at none. The sum of the first k over
        the sum of all is the top-k accuracy.
    """
    guesses, targets = _aligned(logits, labels, shift)
    kept = targets != IGNORED
    guesses, targets = guesses[kept], targets[kept]
    rank = (guesses > guesses.gather(1, targets[:, None])).sum(1)
    return torch.bincount(rank.clamp(max=ranks), minlength=ranks + 1)


def _aligned(logits: torch.Tensor, labels: torch.Tensor, shift: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Guesses (B * (T - shift), V) beside the labels (B * (T - shift),) they are for."""
    length = labels.shape[1]
    if length <= shift:
        raise ValueError(
            f"rows of {length} tokens have no label {shift} tokens ahead: give longer rows, or train fewer heads."
        )
    return logits[:, :-shift].flatten(0, 1), labels[:, shift:].flatten()
