"""Which tree for these heads: measured on text that the base itself writes.

A node is on the accepted path exactly when the next tokens of the text have the ranks that the node is named by. So
one pass of the heads over a text gives the worth of every node of every tree at once, (0, 2) being the share of
positions where head 1 had the next token first and head 2 the one after third. (Medusa, arXiv 2401.10774, section
2.3.3, multiplies accuracies per head; guesses depend on each other, which counting the paths themselves takes in.)

Shapes: B rows, T tokens, K heads, V vocabulary, M positions, N nodes (root included).
"""

from __future__ import annotations

from collections import Counter

import torch

from hf_drafthead.generation.tree import DraftTree, RankPath


@torch.no_grad()
def rank_paths(model, input_ids: torch.Tensor, prompt_length: int, depth: int | None = None) -> torch.Tensor:
    """At which rank each head has the token that really follows.

    Args:
        model: with draft heads.
        input_ids: (B, T) text, without padding; what follows the prompt should be the base's own greedy answer.
        prompt_length: positions before this are not counted.
        depth: K, levels to look at; default: the number of heads.

    Returns:
        (M, K) ranks from 0, one row per counted position; M = B * (T - prompt_length - K).

    Raises:
        ValueError: the text is too short to count a position.
    """
    drafter = model.drafter
    depth = depth or drafter.max_depth or model.config.num_draft_heads
    length = input_ids.shape[1]
    if length - prompt_length <= depth:
        raise ValueError(
            f"a text of {length} tokens after a prompt of {prompt_length} leaves no position that {depth} heads can "
            f"be checked on: give more than {prompt_length + depth} tokens."
        )
    outputs = model.base(input_ids, output_hidden_states=True, use_cache=False)
    features = torch.cat([outputs.hidden_states[layer] for layer in drafter.feature_layers], dim=-1)
    first, last = prompt_length - 1, length - 1 - depth  # position t guesses t + 2 ... t + 1 + K
    ranks = []
    for head, hidden in enumerate(drafter.head_states(features, input_ids)[:depth]):
        logits = drafter.head_logits(head, hidden[:, first:last])  # (B, M / B, V)
        truth = input_ids[:, first + 2 + head : last + 2 + head, None].to(logits.device)
        ranks.append((logits > logits.gather(-1, truth)).sum(-1))
    return torch.stack(ranks, dim=-1).flatten(0, 1)


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
