"""Which nodes of a step are kept: the walk down the tree, with exact or typical acceptance.

At a node the base's own next token is chosen, emitted and looked for among the node's children; if a child carries it
the walk goes on there, else it ends. So the text is the base's whatever was drafted, and the chance to go on at a node
is the probability of all its children together.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, g rows of a group, m tokens kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.tree import Topology

if TYPE_CHECKING:
    from hf_drafthead.generation.decoding import DecodingState


@dataclass
class Accepted:
    """The outcome of a walk, row by row; a row that stood still has empty lists.

    nodes: from the root down, those whose keys and values become past; tokens: the choice of the base at each of them,
    which is what was emitted. The last token is the next root.
    """

    nodes: list[list[int]]
    tokens: list[list[int]]


def greedy_walk(
    logits: torch.Tensor, tokens: torch.Tensor, topology: Topology, state: DecodingState, rules: Rules
) -> Accepted:
    """The exact walk of all rows at once, where nothing but greedy choice, length and EOS decide (`rules.vectorized`).

            tokens     A ── B ── D        the base's choice after A is B, after B it is D, after D it is F:
                       └─── C             emitted are B, D, F; F is the next root

    Args:
        logits: (B, N, V) of the base at every node.
        tokens: (B, N) of the nodes.
        topology: how the nodes hang together.
        state: sequences and lengths are brought up to date.
        rules: gives the EOS tokens and the longest length.
    """
    choice, drafted = _on_host(logits, tokens)
    nodes: list[list[int]] = [[] for _ in drafted]
    emitted: list[list[int]] = [[] for _ in drafted]
    longest = rules.max_length
    assert longest is not None  # `rules.vectorized` says so
    for row in state.running(rules.pads):
        children = topology.children[row % len(topology.children)]
        room = longest - state.lengths[row]
        at = 0
        while True:
            token = choice(row, at)
            nodes[row].append(at)
            emitted[row].append(token)
            if len(emitted[row]) == room or token in rules.eos_tokens:
                state.ends[row] = state.lengths[row] + len(emitted[row])
                break
            at = next((child for child in children[at] if drafted[row][child] == token), 0)
            if at == 0:
                break
    state.emit(emitted)
    return Accepted(nodes, emitted)


def _on_host(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[Callable[[int, int], int], list[list[int]]]:
    """The base's greedy choice at (row, node), of logits (B, N, V), and the tokens (B, N) of the nodes."""
    if logits.device.type == "cpu":  # nothing to wait for, so only the nodes that are walked are looked at
        return lambda row, node: int(_rounded(logits[row, node]).argmax()), tokens.tolist()
    choices, drafted = torch.stack([_rounded(logits).argmax(-1), tokens]).tolist()  # the only host sync of the step
    return lambda row, node: choices[row][node], drafted


def _rounded(logits: torch.Tensor) -> torch.Tensor:
    """As the base rounds before it chooses."""
    return logits.float() if logits.dtype == torch.float64 else logits


def walk(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    topology: Topology,
    state: DecodingState,
    rules: Rules,
    preferred: torch.Tensor | None = None,
) -> Accepted:
    """The walk token by token, with every processor and criterion applied to exactly the row's own prefix.

    Args:
        logits: (B, N, V) of the base at every node.
        tokens: (B, N) of the nodes.
        topology: how the nodes hang together.
        state: sequences, lengths and ends are brought up to date.
        rules: chooses tokens and says which rows end.
        preferred: (B, N) token to emit at a node instead of the base's choice, -1 for none (`typical_choices`).
    """
    drafted = tokens.tolist()
    all_rows = list(range(len(drafted)))
    at = [0] * len(all_rows)
    nodes: list[list[int]] = [[] for _ in all_rows]
    emitted: list[list[int]] = [[] for _ in all_rows]
    moving = state.running(rules.pads)
    while moving:
        group = all_rows if rules.lockstep else moving
        here = [at[row] for row in group]
        chosen = rules.choose(group, logits[group, here], state.sequences, state.lengths)  # (g,)
        if preferred is not None:
            instead = preferred[group, here].to(chosen.device)
            chosen = torch.where(instead >= 0, instead, chosen)
        token_of = dict(zip(group, chosen.tolist()))
        state.emit([[token_of[row]] if row in moving else [] for row in all_rows])
        for row in moving:
            nodes[row].append(at[row])
            emitted[row].append(token_of[row])
        for row, fired in zip(group, rules.stops(group, state.sequences, state.lengths)):
            if fired and state.ends[row] is None:
                state.ends[row] = state.lengths[row]
        running = state.running(rules.pads)
        going_on = []
        for row in moving:
            children = topology.children[row % len(topology.children)][at[row]]
            at[row] = next((child for child in children if drafted[row][child] == token_of[row]), 0)
            if at[row] and row in running:
                going_on.append(row)
        if rules.lockstep and len(going_on) < len(running):
            break
        moving = going_on
    return Accepted(nodes, emitted)


def typical_choices(
    probabilities: torch.Tensor, tokens: torch.Tensor, topology: Topology, threshold: float, alpha: float
) -> torch.Tensor:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.2): NOT the base's distribution, but longer steps.

    A node is accepted if p(token) > min(threshold, alpha * exp(-entropy)) at its parent; of the longest accepted paths
    the likeliest is taken, and the token after it is the base's greedy choice.

    Args:
        probabilities: (B, N, V) of the base at every node, after the processors.
        tokens: (B, N) of the nodes.
        topology: how the nodes hang together.
        threshold: epsilon, in probability.
        alpha: delta, in probability.

    Returns:
        (B, N): at every node of the accepted path the token of the next one, elsewhere -1.
    """
    parents = topology.parents.expand_as(tokens)
    entropy = -(probabilities * (probabilities + 1e-5).log()).sum(-1)  # (B, N)
    enough = torch.clamp(alpha * torch.exp(-entropy), max=threshold)
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    chance = probabilities[rows, parents, tokens]  # (B, N)
    accepted = chance > enough.gather(1, parents)
    reached = (accepted[:, None] | topology.unrelated).all(-1)  # (B, N)
    depths = reached * topology.depths
    longest = depths == depths.max(-1, keepdim=True).values
    logs = chance.clamp_min(1e-30).log()
    logs[:, 0] = 0
    likelihood = (logs[:, None] * topology.ancestors).sum(-1)  # (B, N)
    best = likelihood.masked_fill(~(longest & reached), -torch.inf).argmax(-1)  # (B,)
    on_path = topology.ancestors.expand(len(best), -1, -1)[rows[:, 0], best]  # (B, N), the root included
    choices = torch.full_like(tokens, -1)
    below = on_path.clone()
    below[:, 0] = False
    # every node but the root writes its token to its parent; those off the path write to a spare column
    spare = torch.cat([choices, choices[:, :1]], dim=1)
    spare.scatter_(1, torch.where(below, parents, tokens.shape[1]), tokens)
    return spare[:, :-1]
