"""How the tree of a step is filled: a drafter's guesses, and where they hang.

Shapes: B rows, N nodes, n nodes of a level, V' draft vocabulary, D nodes on the longest path.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.state import Candidates
from hf_drafthead.generation.tree import DraftTree


class Guesses(NamedTuple):
    """What a drafter says about the children of a tree level's nodes.

    logits: (B, n, V') scores over the draft vocabulary, or (B, 1, V') if they are the same for all nodes; to_base:
    (V',) the base's token id of each draft token, or None where both vocabularies are one.
    """

    logits: torch.Tensor
    to_base: torch.Tensor | None = None

    def top(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best guesses of every node: base token ids and scores, (B, n or 1, k) each, best first."""
        scores, tokens = self.logits.topk(k)
        return (tokens if self.to_base is None else self.to_base.to(tokens.device)[tokens]), scores

    def over_base(self, vocabulary: int) -> torch.Tensor:
        """Scores over the base's vocabulary (B, n or 1, V), -inf where a token is never guessed."""
        if self.to_base is None:
            return self.logits
        scores = self.logits.new_full((*self.logits.shape[:-1], vocabulary), -torch.inf)
        return scores.index_copy(-1, self.to_base.to(scores.device), self.logits)


def draft_static(drafter, draft_state: Any, root: torch.Tensor, tree: DraftTree) -> tuple[Any, Candidates]:
    """Fill a static tree below the root (B, 1), level by level; also returns the drafter's state."""
    tokens = root
    rows = tokens.shape[0]
    for level in tree.levels(tokens.device):
        expanded = tokens[:, level.expanded]  # (B, n)
        draft_state, guesses = drafter.expand(draft_state, expanded, level.hang_on.expand(rows, -1))
        guessed, _ = guesses.top(level.width)
        slots = level.slots if guessed.shape[1] > 1 else 0
        tokens = torch.cat([tokens, guessed[:, slots, level.ranks].to(tokens.device)], dim=1)
    return draft_state, Candidates(tokens, tree.topology(tokens.device))
