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

    def top(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best guesses of every node: base token ids and scores, (B, n or 1, k) each, best first.

        Args:
            k: guesses per node.
            tilt: (B, V) what `Rules.tilt` adds to the scores of each base token at this depth: the order is then that
                of q / E, with the base's own noise E; the scores that are returned stay the drafter's.
        """
        if tilt is None:
            scores, tokens = self.logits.topk(k)
        else:
            tilt = tilt.to(self.logits.device)
            tilt = tilt if self.to_base is None else tilt[:, self.to_base.to(tilt.device)]
            tokens = (self.logits + tilt[:, None]).topk(k).indices
            scores = self.logits.gather(-1, tokens)
        return (tokens if self.to_base is None else self.to_base.to(tokens.device)[tokens]), scores

    def over_base(self, vocabulary: int) -> torch.Tensor:
        """Scores over the base's vocabulary (B, n or 1, V), -inf where a token is never guessed."""
        if self.to_base is None:
            return self.logits
        scores = self.logits.new_full((*self.logits.shape[:-1], vocabulary), -torch.inf)
        return scores.index_copy(-1, self.to_base.to(scores.device), self.logits)

    def chances(self, temperature: float, vocabulary: int) -> torch.Tensor:
        """q (B, n or 1, V), from which guesses that are tilted by fresh noise are drawn; 0 where it is not a number."""
        return (self.over_base(vocabulary).float() / temperature).softmax(-1).nan_to_num(0.0)


def draft_static(
    drafter,
    draft_state: Any,
    root: torch.Tensor,
    tree: DraftTree,
    tilt: torch.Tensor | None = None,
    keep_guesses: bool = False,
) -> tuple[Any, Candidates]:
    """Fill a static tree below the root (B, 1), level by level; also returns the drafter's state.

    Args:
        drafter: guesses.
        draft_state: the drafter's own.
        root: (B, 1) tokens.
        tree: to fill.
        tilt: (B, D, V) of every depth, see `Guesses.top`; None for the drafter's best guesses.
        keep_guesses: hand on what the drafter said, level by level.
    """
    tokens, kept = root, []
    rows = tokens.shape[0]
    for depth, level in enumerate(tree.levels(tokens.device)):
        expanded = tokens[:, level.expanded]  # (B, n)
        draft_state, guesses = drafter.expand(draft_state, expanded, level.hang_on.expand(rows, -1))
        kept += [guesses] if keep_guesses else []
        guessed, _ = guesses.top(level.width, None if tilt is None else tilt[:, depth])
        slots = level.slots if guessed.shape[1] > 1 else 0
        tokens = torch.cat([tokens, guessed[:, slots, level.ranks].to(tokens.device)], dim=1)
    return draft_state, Candidates(tokens, tree.topology(tokens.device), tuple(kept))
