"""EAGLE-2's tree, one node at a time: what drafting is compared with."""

import math
from dataclasses import dataclass

import torch


@dataclass
class Drafted:
    """A dynamic tree, root first: tokens, parents (-1 for the root), depths, scores."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    scores: list[float]


def dynamic_tree(drafter, state, root: int, depth: int, top_k: int, total_token: int) -> Drafted:
    """EAGLE-2's tree (Li et al., 2024, section 4), one node at a time, for one row.

    Every level expands the top_k likeliest nodes of the level before, each to its top_k children; of all nodes so made
    the likeliest total_token - 1 stay, in the order of their making. A likelihood is the product along the path.

    Args:
        depth: levels below the first one.
    """
    made: list[tuple[int, int | None, int, float]] = []  # token, parent among the made, depth, log-likelihood
    beam: list[int | None] = [None]
    hangs = {None: 0}
    for level in range(depth + 1):
        tokens = torch.tensor([[root if node is None else made[node][0] for node in beam]])
        parents = torch.tensor([[0 if node is None else hangs[made[node][1]] for node in beam]])
        state, guesses = drafter.expand(state, tokens, parents)
        best, _ = guesses.top(top_k)
        likely = guesses.logits.log_softmax(-1).topk(top_k).values
        children = []
        for place, node in enumerate(beam):
            above = 0.0 if node is None else made[node][3]
            slot = place if best.shape[1] > 1 else 0
            chances = likely[0, slot].tolist()
            if guesses.sure is not None:  # the best guess is as likely as heads foretell, others have their share
                first, sure = math.exp(chances[0]), guesses.sure[0, slot, 0].sigmoid().item()
                shares = [math.exp(chance) * min(sure / first, (1 - sure) / (1 - first)) for chance in chances[1:]]
                chances = [math.log(chance) for chance in (sure, *shares)]
            for chance, token in zip(chances, best[0, slot].tolist(), strict=True):
                children.append(len(made))
                made.append((token, node, level + 1, above + chance))
        hangs = {node: place for place, node in enumerate(beam)}
        beam = sorted(children, key=lambda node: (-made[node][3], node))[:top_k]
    kept = sorted(sorted(range(len(made)), key=lambda node: (-made[node][3], node))[: total_token - 1])
    place = {None: 0, **{node: 1 + i for i, node in enumerate(kept)}}
    return Drafted(
        [root, *(made[node][0] for node in kept)],
        [-1, *(place[made[node][1]] for node in kept)],
        [0, *(made[node][2] for node in kept)],
        [0.0, *(made[node][3] for node in kept)],
    )
