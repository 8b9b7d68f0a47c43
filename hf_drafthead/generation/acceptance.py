"""Which nodes of a step are kept: walks down the tree. They only look; `step.commit` writes.

At a node the base's own next token is chosen, emitted and looked for among the node's children; if a child carries it
the walk goes on there, else it ends. So the text is the base's whatever was drafted, and the chance to go on at a node
is the probability of all its children together.

    tokens     A ── B ── D        the base's choice after A is B, after B it is D, after D it is F:
               └─── C             emitted are B, D, F; F is the next root

`walk_on_device` looks at all nodes at once and never waits for the device. `walk_on_host` goes node by node and shows
every processor and criterion exactly the prefixes that the base would show them.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, g rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.state import Candidates, Limits, Rows, Walk, running


def walk_on_device(
    choice: torch.Tensor, valid: torch.Tensor, candidates: Candidates, rows: Rows, limits: Limits, reach: torch.Tensor
) -> Walk:
    """The walk of all rows at once, where nothing but scores, length and EOS decide.

    Args:
        choice: (B, N) the base's choice at every node.
        valid: (B, N) whether it could choose there.
        candidates: the nodes.
        rows: lengths, and which rows have ended.
        limits: EOS tokens and longest length.
        reach: (B,) depth of the deepest nodes at positions that the base can be asked about.
    """
    tokens, topology = candidates
    batch = tokens.shape[0]
    parents, depths = topology.parents.expand(batch, -1), topology.depths.expand(batch, -1)
    right = tokens == choice.gather(1, parents)  # (B, N)
    reached = (right[:, None] | topology.unrelated).all(-1) & (depths <= reach[:, None])
    deepest, last = torch.where(reached, depths, -1).max(1)  # (B,); siblings differ, so that there is one such node
    nodes = topology.paths.expand(batch, -1, -1)[torch.arange(batch, device=last.device), last]  # (B, D)
    emitted = choice.gather(1, nodes)
    place = torch.arange(nodes.shape[1], device=nodes.device)
    stops = (emitted[..., None] == limits.eos).any(-1) & (place <= deepest[:, None])
    first_stop = torch.where(stops, place, nodes.shape[1]).min(1).values
    room = limits.max_length - rows.lengths
    counts = torch.minimum(torch.minimum(deepest, first_stop) + 1, room)
    counts = torch.where(rows.ends > 0, 0, counts)
    ends_now = (rows.ends == 0) & ((first_stop < counts) | (counts >= room))
    ends = torch.where(ends_now, rows.lengths + counts, rows.ends)
    walked = place < counts[:, None]
    return Walk(nodes, emitted, counts, ends, (valid.gather(1, nodes) | ~walked).all(1))


def walk_on_host(
    logits: torch.Tensor,
    candidates: Candidates,
    sequences: torch.Tensor,
    lengths: list[int],
    ends: list[int | None],
    reach: list[int],
    rules: Rules,
    *,
    preferred: torch.Tensor | None = None,
    show: Callable[[torch.Tensor], None] | None = None,
) -> Walk:
    """The walk token by token, with every processor and criterion applied to exactly the row's own prefix.

    Args:
        logits: (B, N, V) of the base at every node.
        candidates: the nodes.
        sequences: (B, W) with room for D more tokens in every row; this one is written to.
        lengths: B of them: tokens of each row.
        ends: B of them: at which length each row ended, or None.
        reach: B of them, see `walk_on_device`.
        rules: chooses tokens and says which rows end.
        preferred: (B, N) token to emit at a node instead of the base's choice, -1 for none (`typical_choices`).
        show: is given every token (B,) before the criteria are asked, where all rows stay at one length.
    """
    tokens, topology = candidates
    lengths, ends = list(lengths), list(ends)
    batch, depth = tokens.shape[0], topology.paths.shape[-1]
    drafted, parents = tokens.tolist(), topology.parents.expand_as(tokens).tolist()
    depths = topology.depths.expand_as(tokens).tolist()
    below = [
        {(parents[row][node], drafted[row][node]): node for node in reversed(range(1, tokens.shape[1]))}
        for row in range(batch)
    ]
    at = [0] * batch
    nodes: list[list[int]] = [[] for _ in range(batch)]
    emitted: list[list[int]] = [[] for _ in range(batch)]
    moving = running(lengths, ends, rules.pads)
    while moving:
        group = list(range(batch)) if rules.lockstep else moving
        here = [at[row] for row in group]
        chosen = rules.choose(group, logits[group, here], sequences, lengths)  # (g,)
        if preferred is not None:
            instead = preferred[group, here].to(chosen.device)
            chosen = torch.where(instead >= 0, instead, chosen)
        token_of = dict(zip(group, chosen.tolist()))
        for row in moving:
            sequences[row, lengths[row]] = token_of[row]
            lengths[row] += 1
            nodes[row].append(at[row])
            emitted[row].append(token_of[row])
        if show is not None and rules.lockstep:
            show(sequences[:, max(lengths) - 1])
        for row, fired in zip(group, rules.stops(group, sequences, lengths)):
            if fired and ends[row] is None:
                ends[row] = lengths[row]
        now = running(lengths, ends, rules.pads)
        going_on = []
        for row in moving:
            at[row] = below[row].get((at[row], token_of[row]), 0)
            if at[row] and row in now and depths[row][at[row]] <= reach[row]:
                going_on.append(row)
        if rules.lockstep and len(going_on) < len(now):
            break
        moving = going_on
    device = tokens.device

    def padded(lists: list[list[int]]) -> torch.Tensor:
        return torch.tensor([one + [0] * (depth - len(one)) for one in lists], device=device)

    counts = torch.tensor([len(one) for one in nodes], device=device)
    ended = torch.tensor([end or 0 for end in ends], device=device)
    return Walk(padded(nodes), padded(emitted), counts, ended, torch.ones_like(ended, dtype=torch.bool))


def typical_choices(
    probabilities: torch.Tensor, candidates: Candidates, reach: torch.Tensor, threshold: float, alpha: float
) -> torch.Tensor:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.2): NOT the base's distribution, but longer steps.

    A node is accepted if p(token) > min(threshold, alpha * exp(-entropy)) at its parent; of the longest accepted paths
    the likeliest is taken, and the token after it is the base's greedy choice.

    Args:
        probabilities: (B, N, V) of the base at every node, after the processors.
        candidates: the nodes.
        reach: (B,), see `walk_on_device`.
        threshold: epsilon, in probability.
        alpha: delta, in probability.

    Returns:
        (B, N): at every node of the accepted path the token of the next one, elsewhere -1.
    """
    tokens, topology = candidates
    parents = topology.parents.expand_as(tokens)
    entropy = -(probabilities * (probabilities + 1e-5).log()).sum(-1)  # (B, N)
    enough = torch.clamp(alpha * torch.exp(-entropy), max=threshold)
    rows = torch.arange(tokens.shape[0], device=tokens.device)[:, None]
    chance = probabilities[rows, parents, tokens]  # (B, N)
    accepted = chance > enough.gather(1, parents)
    reached = (accepted[:, None] | topology.unrelated).all(-1) & (topology.depths <= reach[:, None])  # (B, N)
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
