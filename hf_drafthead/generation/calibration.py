"""Which tree for these heads: measured on text that the base itself writes.

A node is on the accepted path exactly when the next tokens of the text have the ranks that the node is named by. So
one pass of the heads over a text gives the worth of every node of every tree at once, that of (0, 2) being the share
of positions where head 1 had the next token first and head 2 the one after third. (Medusa, arXiv 2401.10774, section
2.3.3, multiplies accuracies per head; guesses depend on each other, which counting the paths themselves takes in.)

Shapes: B rows, T tokens, S positions, K levels, V vocabulary, N nodes (root included).
"""

from __future__ import annotations

from collections import Counter

import torch

from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.generation.tree import DraftTree, RankPath

UNLIMITED_DEPTH = 5  # levels that are looked at where the drafter could go on for ever
UNKNOWN = -1  # rank of a token behind the end of its row


@torch.no_grad()
def rank_paths(
    model,
    input_ids: torch.Tensor,
    prompt_lengths: int | torch.Tensor,
    lengths: torch.Tensor | None = None,
    depth: int | None = None,
    tilt: torch.Tensor | None = None,
) -> torch.Tensor:
    """At which rank each level of guesses has the token that really follows.

    The drafter is asked as in a generation: it observes the text position by position, and guesses along the tokens
    that follow.

    Args:
        model: with draft heads, in eval mode.
        input_ids: (B, T) texts, padded on the right; what follows the prompts should be the base's own greedy answers.
        prompt_lengths: (B,), or one number for all; positions before a prompt's last are not counted.
        lengths: (B,) tokens of each text, prompt included; default: T.
        depth: K, levels to look at; default: the number of heads, or 5 where there is no such limit.
        tilt: (B, M, V) for each of M new tokens, where the texts were sampled (`tilt_of_seed`): the ranks are then
            those of guesses that know the noise.

    Returns:
        (B, S, K) ranks from 0, S as many as new tokens in the longest answer less one; -1 behind a row's end.

    Raises:
        ValueError: the text is too short to count a position.
    """
    drafter = model.drafter
    depth = depth or drafter.max_depth or UNLIMITED_DEPTH
    rows, width = input_ids.shape
    device = input_ids.device
    prompts = torch.as_tensor(prompt_lengths, device=device).expand(rows)
    ends = torch.full((rows,), width, device=device) if lengths is None else lengths
    positions = int((ends - prompts).max()) - 1
    if positions < 1:
        raise ValueError(
            f"texts of up to {int(ends.max())} tokens after prompts of {int(prompts.min())} or more leave no position "
            "to check a guess on: give at least two tokens after a prompt."
        )
    attention_mask = (torch.arange(width, device=device) < ends[:, None]).long()
    features = BaseReader.of_texts(model.base, drafter.reads).texts(input_ids, attention_mask).features
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    every_row = torch.arange(rows, device=device)
    on_path = torch.zeros(rows, 1, dtype=torch.long, device=device)

    def token(at: torch.Tensor) -> torch.Tensor:
        return input_ids[every_row, at.clamp(max=width - 1)].unsqueeze(1)  # (B, 1)

    longest = int(prompts.max())
    state = drafter.start(rows, width)
    if drafter.reads:
        state = drafter.observe(state, features[:, :longest], input_ids.roll(-1, dims=1)[:, :longest], prompts)
    else:  # a model of its own reads every token, the first one too
        state = drafter.observe(state, features[:, : longest + 1], input_ids[:, : longest + 1], prompts + 1)
    ranks = torch.full((rows, positions, depth), UNKNOWN, device=device)
    for position in range(positions):
        at = prompts + position - 1
        if position:
            new = features[every_row, at.clamp(max=width - 1)].unsqueeze(1)
            state = drafter.observe(state, new, token(at + 1), (at + 1 < ends).long())
        for level in range(depth):
            state, guesses = drafter.expand(state, token(at + 1 + level), on_path)
            scores = guesses.over_base(vocabulary)[:, 0]  # (B, V)
            if tilt is not None:
                scores = scores + tilt[:, min(position + 1 + level, tilt.shape[1] - 1)].to(scores.device)
            better = ~(scores <= scores.gather(-1, token(at + 2 + level).to(scores.device)))  # a NaN guesses nothing
            ranks[:, position, level] = better.sum(-1).to(device).where(at + 2 + level < ends, UNKNOWN)
    return ranks


def tilt_of_seed(seed: int, rows: int, new_tokens: int, vocabulary: int, temperature: float) -> torch.Tensor:
    """What tilts the guesses of texts that `generate` samples on the CPU after `torch.manual_seed(seed)`.

    With `rank_paths` and `foretold_steps` this gives the tokens per step at a temperature from one pass over the texts.

    Args:
        seed: of the call.
        rows: B texts.
        new_tokens: M of each.
        vocabulary: V.
        temperature: of the call.

    Returns:
        (B, M, V), as `Rules.tilt` has it.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        noise = [torch.empty(rows, vocabulary).exponential_(1) for _ in range(new_tokens)]
    return torch.stack(noise, dim=1).log() * -temperature


def foretold_steps(tree: DraftTree, ranks: torch.Tensor) -> list[list[int]]:
    """Tokens emitted by each step of generating the texts behind `ranks` with this tree, row by row.

    Args:
        tree: any.
        ranks: (B, S, K) from `rank_paths`.
    """
    paths = set(tree.paths)
    steps = []
    for row in ranks.tolist():
        taken, position = [], 0
        end = sum(levels[0] != UNKNOWN for levels in row)  # new tokens after the first, which needs no step
        while position < end:
            depth = 0
            while depth < len(row[position]) and tuple(row[position][: depth + 1]) in paths:
                depth += 1
            taken.append(min(depth + 1, end - position))
            position += taken[-1]
        steps.append(taken)
    return steps


def grow_tree(ranks: torch.Tensor, nodes: int) -> list[RankPath]:
    """The most valuable rank paths, best first: every beginning of the list is the best tree of its size.

    Args:
        ranks: (..., K) from `rank_paths`.
        nodes: N, the root included; fewer come back where the text shows no more.

    Raises:
        ValueError: fewer than 2 nodes.
    """
    if nodes < 2:
        raise ValueError(f"a tree of {nodes} nodes drafts nothing: ask for at least 2, the root and one guess.")
    worth = _worth(ranks)
    # a parent is worth at least as much as its children and is shorter, so it always comes first
    return sorted(worth, key=lambda path: (-worth[path], len(path), path))[: nodes - 1]


def _worth(ranks: torch.Tensor) -> Counter[RankPath]:
    """At how many positions each rank path is what really follows; those near a row's end do not tell."""
    ranks = ranks.flatten(0, -2)
    worth: Counter[RankPath] = Counter()
    for path in map(tuple, ranks[ranks[:, -1] != UNKNOWN].tolist()):
        worth.update(path[:depth] for depth in range(1, len(path) + 1))
    return worth
