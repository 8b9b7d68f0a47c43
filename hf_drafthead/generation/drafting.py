"""How the tree of a step is filled: a drafter's guesses, and where they hang.

Shapes: B rows, N nodes, n nodes of a level, V' draft vocabulary, D nodes on the longest path, M nodes made so far (root
included), k guesses per node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.lookup import Copies, joined
from hf_drafthead.generation.state import Candidates
from hf_drafthead.generation.tree import DynamicTree, Level, Topology


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
            tokens = (self.logits + self._tilt(tilt)).topk(k).indices
            scores = self.logits.gather(-1, tokens)
        return (tokens if self.to_base is None else self.to_base.to(tokens.device)[tokens]), scores

    def likeliest(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top`, with log-probabilities in the place of scores; what is no number is taken for impossible.

        They are the drafter's; with a tilt those of tilted scores, which already know what the base will draw.
        """
        guesses = self if tilt is None else Guesses(self.logits + self._tilt(tilt), self.to_base)
        tokens, scores = guesses.top(k)
        exact = torch.promote_types(scores.dtype, torch.float32)
        chances = scores.to(exact) - guesses.logits.to(exact).logsumexp(-1, keepdim=True)
        return tokens, chances.where(~chances.isnan(), -torch.inf)

    def _tilt(self, tilt: torch.Tensor) -> torch.Tensor:
        """A tilt (B, V) over the draft vocabulary (B, 1, V')."""
        tilt = tilt.to(self.logits.device)
        return (tilt if self.to_base is None else tilt[:, self.to_base.to(tilt.device)])[:, None]

    def over_base(self, vocabulary: int) -> torch.Tensor:
        """Scores over the base's vocabulary (B, n or 1, V), -inf where a token is never guessed."""
        if self.to_base is None:
            return self.logits
        scores = self.logits.new_full((*self.logits.shape[:-1], vocabulary), -torch.inf)
        return scores.index_copy(-1, self.to_base.to(scores.device), self.logits)

    def chances(self, temperature: float, vocabulary: int) -> torch.Tensor:
        """q (B, n or 1, V), from which guesses that are tilted by fresh noise are drawn; 0 where it is not a number."""
        return (self.over_base(vocabulary).float() / temperature).softmax(-1).nan_to_num(0.0)


def last_valid(kept: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each row's last valid position of `new` (B, A, H), of `lengths` (B,); `kept` (B, H) where there is none."""
    place = lengths.to(kept.device)[:, None, None].expand(-1, 1, kept.shape[1])
    return torch.cat([kept.unsqueeze(1), new.to(kept)], dim=1).gather(1, place)[:, 0]


def draft_vocabulary(base: Any, drafter: Any) -> int:
    """Among how many tokens a drafter chooses: all of its base's, or fewer."""
    own = drafter.draft_tokens
    return base.config.get_text_config(decoder=True).vocab_size if own is None else len(own)


def draft_static(
    drafter,
    draft_state: Any,
    root: torch.Tensor,
    levels: Iterable[Level],
    topology: Topology,
    tilt: torch.Tensor | None = None,
    keep_guesses: bool = False,
) -> tuple[Any, Candidates]:
    """Fill a static tree below the root (B, 1), level by level; also returns the drafter's state.

    Args:
        drafter, draft_state: what guesses, and its own state.
        root: (B, 1) tokens.
        levels, topology: of the tree.
        tilt: (B, D, V) of every depth, see `Guesses.top`; None for the drafter's best guesses.
        keep_guesses: hand on what the drafter said, level by level.
    """
    tokens, kept = root, []
    for depth, level in enumerate(levels):
        expanded, hang_on = tokens[:, level.expanded], level.hang_on.expand(len(root), -1)  # (B, n)
        draft_state, guesses = drafter.expand(draft_state, expanded, hang_on)
        kept += [guesses] if keep_guesses else []
        guessed, _ = guesses.top(level.width, None if tilt is None else tilt[:, depth])
        slots = level.slots if guessed.shape[1] > 1 else 0
        tokens = torch.cat([tokens, guessed[:, slots, level.ranks].to(tokens.device)], dim=1)
    return draft_state, Candidates(tokens, topology, tuple(kept))


def draft_dynamic(
    drafter,
    draft_state: Any,
    root: torch.Tensor,
    tree: DynamicTree,
    tilt: torch.Tensor | None = None,
    copied: Copies | None = None,
) -> tuple[Any, Candidates]:
    """Fill a dynamic tree below the root (B, 1), copies included; also returns the drafter's state.

    Nodes are numbered as they are made: the root, then level by level the children of the expanded nodes, the likeliest
    node's first. Those that are kept stay in this order. Every shape is fixed by `tree`, and nothing waits for the
    device.
    """
    device, rows = root.device, root.shape[0]
    tokens, parents, likely = root, torch.zeros_like(root), torch.zeros(rows, 1, device=device)  # (B, M)
    expanded = hang_on = torch.zeros_like(root)  # (B, n) numbers of nodes; places of their parents in the last call
    sizes = [1]
    for level in range(tree.depth):
        draft_state, guesses = drafter.expand(draft_state, tokens.gather(1, expanded), hang_on)
        shape = (rows, expanded.shape[1], tree.width)  # (B, n, k)
        found = guesses.likeliest(tree.width, None if tilt is None else tilt[:, level])
        guessed, chances = (part.to(device).expand(shape).flatten(1) for part in found)
        above = expanded[..., None].expand(shape).flatten(1)
        below = likely.gather(1, above) + chances  # (B, n k)
        first = tokens.shape[1]
        tokens, parents = torch.cat([tokens, guessed], dim=1), torch.cat([parents, above], dim=1)
        likely = torch.cat([likely, below], dim=1)
        sizes.append(below.shape[1])
        if level + 1 < tree.depth:
            best = below.sort(dim=1, descending=True, stable=True).indices[:, : tree.width]
            expanded, hang_on = first + best, best // tree.width
    depths = torch.cat([torch.full((rows, size), depth, device=device) for depth, size in enumerate(sizes)], dim=1)
    nodes = (tokens, parents, depths, likely)
    best_nodes = (
        Topology.of_best(*nodes, tree.nodes, tree.depth)
        if copied is None
        else joined(*nodes, copied, tree.nodes, tree.depth)
    )
    return draft_state, Candidates(*best_nodes)
