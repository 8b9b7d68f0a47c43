"""Which nodes of a step are kept: walks down the tree. They only look; `Batch.take` writes.

At a node the base's own next token is chosen, emitted and looked for among the node's children; if a child carries it
the walk goes on there, else it ends. So the text is the base's whatever was drafted, and the chance to go on at a node
is the probability of all its children together.

    tokens     A ── B ── D        the base's choice after A is B, after B it is D, after D it is F:
               └─── C             emitted are B, D, F; F is the next root

`walk_on_device` looks at all nodes at once and never waits for the device. `walk_on_host` goes node by node and shows
every processor and criterion exactly the prefixes that the base would show them.

A walk ends before a node whose logits are no numbers: attention multiplies what it must not see by zero, so that one
guess of which the base makes NaN is in all nodes. Where that is the root, the row stands still, and the call goes on
with the root alone (`Batch.step`), where NaN is the base's own.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, g rows of a group.
"""

from __future__ import annotations

import torch

from hf_drafthead.generation.rules import UNKNOWN_TOKEN, Rules
from hf_drafthead.generation.state import Candidates, DecodingState, Limits, Rows, RowWalk, Stream, Walk, running


def walk_on_device(
    choice: torch.Tensor, valid: torch.Tensor, candidates: Candidates, rows: Rows, limits: Limits, reach: torch.Tensor
) -> Walk:
    """The walk of all rows at once, where nothing but scores, length and EOS decide: at every node the base's choice
    (B, N), and whether no NaN stands there (B, N); reach (B,): see `step.deepest`.
    """
    tokens, topology = candidates.tokens, candidates.topology
    batch = tokens.shape[0]
    parents, depths = topology.parents.expand(batch, -1), topology.depths.expand(batch, -1)
    right = tokens == choice.gather(1, parents)  # (B, N)
    reached = ((right & valid)[:, None] | topology.unrelated).all(-1) & (depths <= reach[:, None])
    if tokens.shape[1] > 1:
        reached = reached & valid[:, :1]
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
    tokens = torch.where(walked, emitted, limits.padding)
    return Walk.of(counts, counts, ends, (valid.gather(1, nodes) | ~walked).all(1), tokens, nodes)


def walk_on_host(
    logits: torch.Tensor, candidates: Candidates, state: DecodingState, rules: Rules, stream: Stream | None = None
) -> list[RowWalk]:
    """The walk token by token, with every processor and criterion applied to exactly the row's own prefix, of logits
    (B, N, V). The stream shows every token (B,) once the criteria were asked about it, in lockstep."""
    tokens, reach = candidates.tokens, state.reach()
    before, lengths, ends = state.lengths, list(state.lengths), list(state.ends)
    batch = tokens.shape[0]
    everyone = list(range(batch))
    parents, drafted = candidates.topology.parents.tolist(), tokens.tolist()
    parents *= batch  # one tree for all rows, or one for each, and then more than are looked at
    sequences = state.rows.sequences.to(rules.device, copy=True)
    at = [0] * batch
    nodes: list[list[int]] = [[] for _ in range(batch)]
    emitted: list[list[int]] = [[] for _ in range(batch)]

    def still_moving() -> list[int]:
        emitting = running(lengths, ends, rules.pads)
        return everyone if rules.lockstep and emitting else emitting  # in lockstep rows that have ended emit padding

    moving = still_moving()
    while moving:
        group = everyone if rules.lockstep else moving
        here = [at[row] for row in group]
        seen = logits[group, here]
        if tokens.shape[1] > 1 and (lost := seen.amax(-1).isnan().tolist()) and any(lost):
            moving = [] if rules.lockstep else [row for row, was_lost in zip(moving, lost) if not was_lost]
            continue
        chosen = rules.choose(group, seen, sequences, lengths)  # (g,)
        token_of = dict(zip(group, chosen.tolist()))
        for row in moving:
            if rules.pads and ends[row] is not None:
                token_of[row] = rules.pad_token
            sequences[row, lengths[row]] = token_of[row]
            lengths[row] += 1
            nodes[row].append(at[row])
            emitted[row].append(token_of[row])
        newest = [token_of[row] for row in group]
        for row, fired in zip(group, rules.stops(group, newest, sequences, lengths)):
            if fired and ends[row] is None:
                ends[row] = lengths[row]
            elif ends[row] is None and token_of[row] >= logits.shape[-1]:
                raise IndexError(UNKNOWN_TOKEN)
        if stream is not None and rules.lockstep:
            stream.show(sequences[:, max(lengths) - 1])
        now = still_moving()
        going_on = []
        for row in moving:
            at[row] = _child(parents[row], drafted[row], at[row], token_of[row])
            if at[row] and row in now and len(nodes[row]) <= reach[row]:
                going_on.append(row)
        if rules.lockstep and len(going_on) < len(now):
            break
        moving = going_on
    walks: list[RowWalk] = []
    for length, end, walked, row_tokens in zip(before, ends, nodes, emitted):
        observed = max(min(len(walked), end - length), 0) if end and rules.pads else len(walked)
        walks.append((len(walked), observed, end, row_tokens, walked))
    return walks


def walk_greedily(logits: torch.Tensor, candidates: Candidates, state: DecodingState, rules: Rules) -> list[RowWalk]:
    """As `walk_on_host`, for calls that are `Rules.greedy` on a CPU: looks at no node but those visited."""
    parents, drafted = candidates.topology.parents.tolist(), candidates.tokens.tolist()
    assert rules.max_length is not None
    rows: list[RowWalk] = []
    for row, (length, end, reach) in enumerate(zip(state.lengths, state.ends, state.reach())):
        tokens: list[int] = []
        nodes: list[int] = []
        node = 0
        while end is None and len(nodes) <= reach:
            token = int(logits[row, node].argmax())
            if logits.shape[1] > 1 and logits[row, node, token].isnan():
                break
            tokens.append(token)
            nodes.append(node)
            if token in rules.eos_tokens or length + len(nodes) >= rules.max_length:
                end = length + len(nodes)
            elif not (node := _child(parents[row % len(parents)], drafted[row], node, token)):
                break
        rows.append((len(nodes), len(nodes), end, tokens, nodes))
    return rows


def _child(parents: list[int], tokens: list[int], node: int, token: int) -> int:
    """The child of a node that carries a token, of equal ones the first; 0, the root, where there is none."""
    try:
        child = tokens.index(token, node + 1)  # children come behind their parent
        while parents[child] != node:
            child = tokens.index(token, child + 1)
        return child
    except ValueError:
        return 0


def typical_choices(
    probabilities: torch.Tensor, candidates: Candidates, reach: torch.Tensor, threshold: float, alpha: float
) -> torch.Tensor:
    """Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.2): NOT the base's distribution, but longer steps.

    A node is accepted if p(token) > min(threshold, alpha * exp(-entropy)) at its parent, with the base's probabilities
    (B, N, V) after the processors; of the longest accepted paths the likeliest is taken, and the token after it is the
    base's greedy choice.

    Returns:
        (B, N): at every node of the accepted path the token of the next one, elsewhere -1.
    """
    tokens, topology = candidates.tokens, candidates.topology
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
    on_path = topology.ancestors.expand(len(best), -1, -1)[rows[:, 0], best]  # (B, N), a copy, the root included
    on_path[:, 0] = False
    # every node of the path but the root writes its token to its parent; all others write to a spare column
    choices = torch.full_like(torch.cat([tokens, tokens[:, :1]], dim=1), -1)
    choices.scatter_(1, torch.where(on_path, parents, tokens.shape[1]), tokens)
    return choices[:, :-1]
