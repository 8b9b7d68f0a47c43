"""Which tree for these heads: measured on text that the base itself writes.

A node is on the accepted path exactly when the next tokens of the text have the ranks that the node is named by. So
one pass of the heads over a text gives the worth of every node of every tree at once, that of (0, 2) being the share
of positions where head 1 had the next token first and head 2 the one after third. (Medusa, arXiv 2401.10774, section
2.3.3, multiplies accuracies per head; guesses depend on each other, which counting the paths themselves takes in.)

Shapes: B rows, T tokens, K heads, V vocabulary, M positions, N nodes (root included).
"""

from __future__ import annotations

from collections import Counter

import torch

from hf_drafthead.generation.tree import DraftTree, RankPath

UNLIMITED_DEPTH = 5  # levels that are looked at where the drafter could go on for ever


@torch.no_grad()
def rank_paths(model, input_ids: torch.Tensor, prompt_length: int, depth: int | None = None) -> torch.Tensor:
    """At which rank each level of guesses has the token that really follows.

    The drafter is asked as in a generation: it observes the text position by position, and guesses along the tokens
    that follow.

    Args:
        model: with draft heads.
        input_ids: (B, T) text, without padding; what follows the prompt should be the base's own greedy answer.
        prompt_length: P; positions before its last are not counted.
        depth: K, levels to look at; default: the number of heads, or 5 where there is no such limit.

    Returns:
        (M, K) ranks from 0, row by row of the text; M = B * (T - P - K).

    Raises:
        ValueError: the text is too short to count a position.
    """
    drafter = model.drafter
    depth = depth or drafter.max_depth or UNLIMITED_DEPTH
    rows, length = input_ids.shape
    positions = length - prompt_length - depth
    if positions < 1:
        raise ValueError(
            f"a text of {length} tokens after a prompt of {prompt_length} leaves no position that {depth} heads can "
            f"be checked on: give more than {prompt_length + depth} tokens."
        )
    outputs = model.base(input_ids, output_hidden_states=True, use_cache=False)
    features = torch.cat([outputs.hidden_states[layer] for layer in drafter.feature_layers], dim=-1)
    on_path = torch.zeros(rows, 1, dtype=torch.long, device=input_ids.device)
    state = drafter.start(rows, length)
    ranks, seen = [], 0
    for position in range(prompt_length - 1, prompt_length - 1 + positions):
        new = slice(seen, position + 1)
        seen = position + 1
        counts = torch.full((rows,), new.stop - new.start, device=input_ids.device)
        state = drafter.observe(state, features[:, new], input_ids[:, new.start + 1 : new.stop + 1], counts)
        for level in range(depth):
            node = input_ids[:, seen + level : seen + level + 1]
            state, logits = drafter.expand(state, node, on_path)
            truth = input_ids[:, seen + level + 1, None].to(logits.device)
            scores = logits[:, 0]  # (B, V)
            ranks.append((scores > scores.gather(-1, truth)).sum(-1))
    return torch.stack(ranks, dim=1).view(rows * positions, depth)


def grow_tree(ranks: torch.Tensor, nodes: int) -> list[RankPath]:
    """The most valuable rank paths, best first: every beginning of the list is the best tree of its size.

    Args:
        ranks: (M, K) from `rank_paths`.
        nodes: N, the root included; fewer come back where the text shows no more.

    Raises:
        ValueError: fewer than 2 nodes.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    worth = _worth(ranks)
    # a parent is worth at least as much as its children and is shorter, so it always comes first
    return sorted(worth, key=lambda path: (-worth[path], len(path), path))[: nodes - 1]


def expected_tokens_per_step(tree: DraftTree, ranks: torch.Tensor) -> float:
    """Tokens per step that a tree would give on the text behind `ranks` (M, K): 1 + the chances of all its nodes."""
    worth = _worth(ranks)
    return 1 + sum(worth[path] for path in tree.paths) / len(ranks)


def _worth(ranks: torch.Tensor) -> Counter[RankPath]:
    """At how many positions each rank path is what really follows."""
    worth: Counter[RankPath] = Counter()
    for path in map(tuple, ranks.tolist()):
        worth.update(path[:depth] for depth in range(1, len(path) + 1))
    return worth
