"""Which nodes of a step are kept: walks down the tree. They only look; `step.commit` writes.

At a node the base's own next token is chosen, emitted and looked for among the node's children; if a child carries it
the walk goes on there, else it ends. So the text is the base's whatever was drafted, and the chance to go on at a node
is the probability of all its children together.

    tokens     A ── B ── D        the base's choice after A is B, after B it is D, after D it is F:
               └─── C             emitted are B, D, F; F is the next root

`walk_on_device` looks at all nodes at once and never waits for the device. `walk_on_host` goes node by node and shows
every processor and criterion exactly the prefixes that the base would show them.

A walk ends before a node whose logits are no numbers: attention multiplies what it must not see by zero, so that one
guess of which the base makes NaN is in all nodes. Where that is the root, the row stands still, and the call goes on
with the root alone (`Runner.step`), where NaN is the base's own.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, g rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import Candidates, DecodingState, Limits, Rows, RowWalk, Walk, running
from hf_drafthead.generation.tree import DraftTree, Tree


def walk_on_device(
    choice: torch.Tensor, valid: torch.Tensor, candidates: Candidates, rows: Rows, limits: Limits, reach: torch.Tensor
) -> Walk:
    """The walk of all rows at once, where nothing but scores, length and EOS decide.

    At every node `choice` (B, N) is the base's, `valid` (B, N) whether no NaN stands there; reach (B,): see
    `step.deepest`.
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
    logits: torch.Tensor,
    candidates: Candidates,
    state: DecodingState,
    rules: Rules,
    *,
    preferred: torch.Tensor | None = None,
    show: Callable[[torch.Tensor], None] | None = None,
) -> list[RowWalk]:
    """The walk token by token, with every processor and criterion applied to exactly the row's own prefix.

    Args:
        logits: (B, N, V) of the base at every node.
        state: of the call, whose sequences have room for D more tokens in every row.
        preferred: (B, N) token to emit at a node instead of the base's choice, -1 for none (`typical_choices`).
        show: is given every token (B,) once the criteria were asked about it, where all rows stay at one length.
    """
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
        if preferred is not None:
            instead = preferred[group, here].to(chosen.device)
            chosen = torch.where(instead >= 0, instead, chosen)
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
        if show is not None and rules.lockstep:
            show(sequences[:, max(lengths) - 1])
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


def preferred_choices(
    settings: DraftPlan,
    tree: Tree,
    rules: Rules,
    logits: torch.Tensor,
    candidates: Candidates,
    state: DecodingState,
    reach: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What typical acceptance or rejection emit at a node, -1 for the base's own choice, (B, N); and whether the base's
    probabilities there are numbers, (B, N). Arguments as in `walk_on_host` and `walk_on_device`.
    """
    tokens, topology = candidates.tokens, candidates.topology
    sequences = state.rows.sequences.to(rules.device)
    p = rules.probabilities(logits, tokens, topology, sequences, state.lengths).to(reach.device)
    valid = p.sum(-1).isfinite()
    if settings.acceptance == "typical":
        return typical_choices(p, candidates, reach, settings.posterior_threshold, settings.posterior_alpha), valid
    assert isinstance(tree, DraftTree)  # as the settings see to
    q = torch.zeros_like(p)
    for level, guesses in zip(tree.levels(p.device), candidates.guesses):
        q[:, level.expanded] = guesses.chances(rules.temperature, p.shape[-1]).to(p)
    chance = torch.rand(tokens.shape, device=rules.device, generator=rules.generator)
    fresh = torch.empty(p.shape[0], p.shape[2], device=rules.device).exponential_(1, generator=rules.generator)
    return rejection_choices(p, q, candidates, chance.to(p.device), fresh.to(p)), valid


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


def rejection_choices(
    probabilities: torch.Tensor,
    drawn_from: torch.Tensor,
    candidates: Candidates,
    chance: torch.Tensor,
    noise: torch.Tensor,
) -> torch.Tensor:
    """Speculative sampling: the base's distribution, not its seed.

    Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (2302.01318) accept a token x that was drawn from q
    with the probability min(1, p(x) / q(x)), else they draw from norm(max(0, p - q)). Several children of a node, drawn
    from q without replacement, are tried in the order of their draws (SpecInfer, 2305.09781, algorithm 2): each refusal
    leaves p = norm(max(0, p - q)), and q without the token that was refused. Where every child is refused, and at a
    leaf, the token is drawn from what is left of p.

    Args:
        probabilities, drawn_from: p and q (B, N, V) at every node; of its children the first drawn has the lowest
        number. chance: (B, N) uniform on [0, 1), one for each node. noise: (B, V) exponential, for the last token.

    Returns:
        (B, N): at every node of the accepted path the token that follows it, elsewhere -1. A CPU passes by the nodes
        at whose parent no row is; a GPU, which would have to be waited for, computes them too.
    """
    tokens, topology = candidates.tokens, candidates.topology
    parents = topology.parents.expand_as(tokens)
    rows = torch.arange(tokens.shape[0], device=tokens.device)
    choices = torch.full_like(tokens, -1)
    at = torch.zeros_like(rows)
    p, q = probabilities[:, 0].double(), drawn_from[:, 0].double()  # (B, V)
    for node in range(1, tokens.shape[1]):  # by depth, and siblings in the order of their draws
        here = parents[:, node] == at
        if here.device.type == "cpu" and not here.any():
            continue
        token = tokens[:, node, None]
        p_of, q_of = p.gather(1, token)[:, 0], q.gather(1, token)[:, 0]
        accepted = here & (q_of > 0) & (chance[:, node] * q_of < p_of)
        refused = here & (q_of > 0) & ~accepted
        left = (p - q).clamp(min=0)
        mass = left.sum(-1, keepdim=True)
        p = torch.where(refused[:, None] & (mass > 0), left / mass, p)  # no mass: p and q differ by rounding only
        rest = q.scatter(1, token, 0.0)
        q = torch.where(refused[:, None], rest / rest.sum(-1, keepdim=True).clamp(min=1e-300), q)
        choices[rows, at] = torch.where(accepted, token[:, 0], choices[rows, at])
        at = torch.where(accepted, node, at)
        p = torch.where(accepted[:, None], probabilities[:, node].double(), p)
        q = torch.where(accepted[:, None], drawn_from[:, node].double(), q)
    choices[rows, at] = (p / noise).argmax(-1)
    return choices
