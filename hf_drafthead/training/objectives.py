"""The objectives of a draft head, as functions of the positions that have a label.

Shapes: B rows, T positions, M labelled positions, H hidden, V vocabulary. `shift` is how far ahead a head guesses: its
logits at position t are for the token at t + shift. The base's own lm_head has shift 1, head i (0-based) has 2 + i.
"""

import torch
import torch.nn.functional as F

IGNORED = -100  # label without a loss, as everywhere in transformers


def labelled(labels: torch.Tensor, shift: int) -> torch.Tensor:
    """Which positions t of (B, T) have a label at t + shift; none in rows of at most `shift` tokens."""
    if labels.shape[1] <= shift:
        return torch.zeros_like(labels, dtype=torch.bool)
    return F.pad(labels[:, shift:] != IGNORED, (0, shift))


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the tokens of the text (Medusa, section 2.1.1; Amphista, eq. 9).

    Args:
        logits: (M, V) of one head.
        targets: (M,) token ids, or IGNORED.

    Returns:
        (M,) in nats, 0 where there is no target.
    """
    return F.cross_entropy(logits.float(), targets, reduction="none")


def teacher_loss(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy with the base's own distribution (Hydra, section 3.1; Amphista, eq. 8; EAGLE's
    classification loss).

    Args:
        logits: (M, V) of one head.
        teacher_logits: (M, V) of the base for the same tokens; no gradient needed.

    Returns:
        (M,) in nats.
    """
    return F.cross_entropy(logits.float(), teacher_logits.float().softmax(-1), reduction="none")


def feature_loss(states: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Smooth L1 distance, averaged over H, to the base's hidden state for the same token (EAGLE's regression loss).

    Hydra's code has it too, as its reconstruction loss.

    Args:
        states: (M, H) what a head projects.
        hidden: (M, H) what the base projects; no gradient needed.

    Returns:
        (M,).
    """
    return F.smooth_l1_loss(states.float(), hidden.float(), reduction="none").mean(-1)


def head_weights(heads: int, decay: float) -> list[float]:
    """Weight of each head in the total loss: ``decay ** k`` for the k-th, counted from 1 (Medusa, section 2.2.1)."""
    return [decay ** (head + 1) for head in range(heads)]


def label_positions(labels: torch.Tensor) -> torch.Tensor:
    """Where in the flattened labels (B, T) there is one that the base predicts, (N,); the host waits for the device."""
    return F.pad(labels[:, 1:] != IGNORED, (1, 0)).flatten().nonzero().flatten()


def rank_counts(
    logits: torch.Tensor, targets: torch.Tensor, ranks: int, counted: torch.Tensor | None = None
) -> torch.Tensor:
    """How often the label was a head's best guess, its second best, and so on.

    Args:
        logits: (M, V) of one head.
        targets: (M,) token ids, or IGNORED for one that the head cannot guess.
        ranks: number of ranks to count separately.
        counted: (M,) which positions count; None for all.

    Returns:
        LongTensor (ranks + 1,): labels found at each rank, then those found at none, which is where a NaN is. The sum
        of the first k over the sum of all is the top-k accuracy.
    """
    rank = (~(logits <= logits.gather(1, targets.clamp(min=0)[:, None]))).sum(1).clamp(max=ranks)
    rank = rank.where(targets != IGNORED, ranks)
    rank = rank if counted is None else rank.where(counted, -1)
    return (rank[:, None] == torch.arange(ranks + 1, device=rank.device)).sum(0)


def draft_targets(draft_tokens: torch.Tensor, targets: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Targets for a drafter with a reduced vocabulary.

    A token that it cannot guess has no loss. EAGLE-3's trainer leaves out the positions where the base's own choice is
    no draft token, which on the base's own greedy text are the same.

    Args:
        draft_tokens: (D,) the base's ids of its tokens.
        targets: (M,) token ids of the base.
        vocabulary: V, of the base.

    Returns:
        (M,) targets among the D, IGNORED where there is none.
    """
    places = torch.full((vocabulary,), IGNORED, device=targets.device)
    places[draft_tokens] = torch.arange(len(draft_tokens), device=places.device)
    return places[targets]
