"""The plain way to train heads: all logits at once, one cross-entropy per head. What `HeadsLoss` has to equal."""

import torch
import torch.nn.functional as F


def plain_loss(model, input_ids, labels, *, next_token=1.0, teacher=0.0, decay=1.0):
    """Weighted sum over heads (scalar)."""
    with torch.no_grad():
        outputs = model.base(input_ids, output_hidden_states=True, use_cache=False)
    loss = 0.0
    for head, hidden in enumerate(model.drafter.head_states(outputs.hidden_states[-1], input_ids)):
        shift = 2 + head
        logits = model.drafter.head_logits(head, hidden)[:, :-shift].flatten(0, 1)
        targets = labels[:, shift:].flatten()
        loss = loss + decay ** (head + 1) * next_token * F.cross_entropy(logits.float(), targets)
        if teacher:
            kept = targets != -100
            teachers = outputs.logits[:, shift - 1 : -1].flatten(0, 1).float().softmax(-1)
            loss = loss + decay ** (head + 1) * teacher * F.cross_entropy(logits.float()[kept], teachers[kept])
    return loss
