"""The plain way to train heads: all logits at once, one cross-entropy per head. What `HeadsLoss` has to equal."""

import torch
import torch.nn.functional as F

from hf_drafthead.training.heads_loss import feature_loss
from tests.families import FAMILIES, features_of

# DFlash 2 learns to choose among its candidates as well: `test_golden_dflash2` compares its loss
PLAIN = [family for family in FAMILIES if not family.name.startswith("dflash2")]


def next_token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (M,) of one head's logits (M, V) with the tokens of the text (Medusa, section 2.1.1)."""
    return F.cross_entropy(logits.float(), targets, reduction="none")


def teacher_loss(logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """Cross-entropy (M,) of one head's logits (M, V) with the base's own distribution (Hydra, section 3.1; EAGLE's
    classification loss)."""
    return F.cross_entropy(logits.float(), teacher_logits.float().softmax(-1), reduction="none")


def plain_loss(model, input_ids, labels, *, next_token=1.0, teacher=0.0, feature=0.0, confidence=0.0, decay=1.0):
    """Weighted sum over heads (scalar); heads with a vocabulary of their own learn the tokens that are in it.

    Where guesses begin at anchors, every position is one: a missing label ends what is learnt behind it, and all heads
    share one mean.
    """
    with torch.no_grad():
        output = model.base(input_ids, use_cache=False, output_hidden_states=True)
    scores, states = output.logits, output.hidden_states[-1]
    own, size = model.drafter.draft_tokens, scores.shape[-1]
    own = torch.arange(size) if own is None else own
    places = torch.full((size,), -100)
    places[own] = torch.arange(len(own))
    losses, counts = [], []
    there = torch.ones_like(labels, dtype=torch.bool)  # of a block that begins at a position, all labels so far
    for head, hidden in enumerate(model.drafter.head_states(features_of(model, input_ids), input_ids)):
        shift = 2 + head
        logits = model.drafter.head_logits(head, hidden)[:, :-shift].flatten(0, 1).float()
        kept = labels[:, shift:] != -100
        if model.drafter.starts_at_anchors:
            there = kept = there[:, : kept.shape[1]] & kept
        targets, teachers = labels[:, shift:].flatten(), scores[:, shift - 1 : -1].flatten(0, 1).float()
        kept = kept.flatten()
        learnt = kept & (places[targets.clamp(min=0)] != -100)
        wanted = teachers[learnt][:, own].softmax(-1)
        lost = next_token * next_token_loss(logits[learnt], places[targets[learnt]]).sum()
        lost = lost + teacher * F.cross_entropy(logits[learnt], wanted, reduction="sum")
        if feature:
            guessed = hidden[:, :-shift, : states.shape[-1]].flatten(0, 1)[learnt]
            lost = lost + feature * feature_loss(guessed, states[:, shift - 1 : -1].flatten(0, 1)[learnt]).sum()
        if confidence and (sure := model.drafter.confidence_logits(hidden)) is not None:
            accepted = 1 - (logits[learnt].softmax(-1) - wanted).abs().sum(-1).detach() / 2
            sure = sure[:, :-shift].flatten()[learnt]
            lost = lost + confidence * F.binary_cross_entropy_with_logits(sure, accepted, reduction="sum")
        losses.append(decay ** (head + 1) * lost)
        counts.append(kept.sum())
    if model.drafter.starts_at_anchors:
        return sum(losses) / sum(decay ** (head + 1) * count for head, count in enumerate(counts))
    return sum(lost / count for lost, count in zip(losses, counts))
