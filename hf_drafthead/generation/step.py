"""One step: draft, verify, walk, commit. Each stage returns what it found; `commit` is the only writer.

    draft    the drafter guesses the tokens of a tree below the root, the token that the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    walk     down from the root as long as a child carries what the base chooses (`acceptance`)
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_drafthead.generation.acceptance import preferred_choices, walk_on_device, walk_on_host
from hf_drafthead.generation.drafting import draft_dynamic, draft_static
from hf_drafthead.generation.dynamic import DynamicTree, Tree
from hf_drafthead.generation.later import catch_up, observer_of
from hf_drafthead.generation.memory import nodes_in_memory
from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.slots import SlotCache, fixed_slots
from hf_drafthead.generation.state import NOT_A_DISTRIBUTION, Candidates, DecodingState, Limits, Rows, Verified, Walk
from hf_drafthead.generation.stopwatch import Stopwatch


def draft(
    drafter, rows: Rows, tree: Tree, limits: Limits, tilt: torch.Tensor | None, keep_guesses: bool = False
) -> tuple[Any, Candidates]:
    """Let the drafter fill the tree below each row's newest token, see `draft_static`; also returns its state.

    Below a row that has ended there is padding alone, which is what the base reads there.
    """
    root = rows.newest()
    if isinstance(tree, DynamicTree):
        draft_state, candidates = draft_dynamic(drafter, rows.draft_state, root, tree, tilt)
    else:
        draft_state, candidates = draft_static(drafter, rows.draft_state, root, tree, tilt, keep_guesses)
    if len(root) == 1 or tree.num_nodes == 1:  # once a single row has ended, no step of it counts
        return draft_state, candidates
    padded = ((rows.ends > 0) & limits.pads)[:, None]
    below = torch.where(padded, limits.padding, candidates.tokens[:, 1:])
    # made anew, not by `_replace`: in a program torch 2.11 returns a tuple without its fields then
    return draft_state, Candidates(torch.cat([root, below], dim=1), candidates.topology, candidates.guesses)


def verify(reader: BaseReader, cache: SlotCache, candidates: Candidates, rows: Rows, limits: Limits) -> Verified:
    """One forward of the base over all nodes.

    Nodes behind the last position that the base would be asked about stay on that position, which exists; the walk does
    not go there.
    """
    positions = past = cache.lengths[:, None]  # the root's
    if candidates.tokens.shape[1] > 1:
        positions = torch.minimum(past + candidates.topology.depths, torch.maximum(limits.last_position, past))
    logits, features = reader.nodes(
        candidates.tokens, candidates.topology, cache, positions + rows.position_shift, rows.visible
    )
    return Verified(logits, features)


def deepest(limits: Limits, cache: SlotCache) -> torch.Tensor:
    """(B,) depth of the deepest nodes at positions that the base can be asked about."""
    return (limits.last_position - cache.lengths[:, None]).clamp(min=0)[:, 0]


def commit(drafter, draft_state: Any, cache: SlotCache, rows: Rows, verified: Verified, walk: Walk) -> Rows:
    """Keep what was walked: keys and values, tokens, lengths, and hidden states for the drafter; drop the rest."""
    nodes, tokens, counts = walk.nodes, walk.tokens, walk.counts
    cache.keep(nodes, counts)
    rows.sequences.scatter_(1, rows.lengths[:, None] + cache.numbers(walk.depth, tokens.device), tokens)
    # a wrong node here costs speed and never correctness: the tests look at it by itself
    features = verified.features
    if features.shape[1] > 1:
        nodes = nodes.to(features.device)[..., None]
        features = features.gather(1, nodes.expand(-1, -1, features.shape[2]))  # (B, D, F*H)
    draft_state = drafter.observe(draft_state, features, tokens, walk.own)
    ends = walk.ends.contiguous()  # a program takes the strides of what it was made with for those of all steps
    return Rows(rows.sequences, rows.lengths + counts, ends, rows.position_shift, rows.visible, draft_state)


class Step:
    """A step that is run operation by operation.

    Args:
        reader: how to run the base.
        drafter: what guesses.
        settings: tree and acceptance.
        rules: of the call.
        show: is given every token before the next one is chosen, see `walk_on_host`.
        timed: note the seconds of every stage, for which the host waits after each.
    """

    ahead = 0  # steps that are launched before the result of the first of them is read

    def __init__(
        self, reader: BaseReader, drafter, settings: DraftSettings, rules: Rules, show=None, timed: bool = False
    ):
        self.reader, self.drafter, self.settings, self.rules, self.show = reader, drafter, settings, rules, show
        self.tree = settings.tree
        self.vocabulary = reader.base.config.get_text_config(decoder=True).vocab_size
        self.slots = fixed_slots(self.tree.slots)  # of the caches, for the nodes of a step of fixed shapes
        self.timed, self.observer = timed, observer_of(drafter, self.tree)

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages."""
        watch = Stopwatch(self.timed, state.rows.lengths.device)
        state.reserve(2 * (self.tree.max_depth + 2), self.rules.pad_token)  # the host may not know of the last step yet
        catch_up(self.observer, state)
        rows, cache, limits = state.rows, state.cache, state.limits
        noise, tilt = self.noise_ahead(state)
        with nodes_in_memory(state.caches):
            draft_state, candidates = draft(self.drafter, rows, self.tree, limits, tilt, self.rules.rejects)
            watch.lap("draft")
            verified = verify(self.reader, cache, candidates, rows, limits)
            watch.lap("verify")
        walk = self.walk(state, candidates, verified, noise)
        watch.lap("walk")
        state.rows = commit(self.observer, draft_state, cache, rows, verified, walk)
        watch.lap("commit")
        return walk, watch.seconds

    def noise_ahead(self, state: DecodingState) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, D, V) the base's noise of the next positions, and how it tilts guesses; None where it does not sample."""
        rules, depth = self.rules, self.tree.max_depth + 1
        noise = rules.noise_ahead(state.lengths, state.running(rules.pads), depth, self.vocabulary)
        return noise, None if noise is None else rules.tilt(noise).to(state.rows.lengths.device)

    def walk(
        self, state: DecodingState, candidates: Candidates, verified: Verified, noise: torch.Tensor | None
    ) -> Walk:
        """The walk that suits the call: on the device where it can be."""
        rules, logits, rows, limits = self.rules, verified.logits, state.rows, state.limits
        preferred, waits = None, logits.device.type != "cpu"  # a CPU waits for nothing, and looks at few nodes
        if self.settings.acceptance != "exact" and rules.config.do_sample:
            reach, sequences = deepest(limits, state.cache), rows.sequences.to(rules.device)
            preferred, valid = preferred_choices(
                self.settings, rules, logits, candidates, sequences, state.lengths, reach
            )
            if rules.on_device and (waits or rules.rejects):
                if not rules.rejects:
                    choice, _ = rules.choose_everywhere(logits.to(reach.device), candidates.topology.depths, None)
                    preferred = torch.where(preferred < 0, choice, preferred)
                return walk_on_device(preferred, valid, candidates, rows, limits, reach)
            if not valid.all():
                raise RuntimeError(NOT_A_DISTRIBUTION)
        elif rules.on_device and waits:
            logits = logits.to(rows.lengths.device)
            noise = None if noise is None else noise.to(logits.device)
            choice, valid = rules.choose_everywhere(logits, candidates.topology.depths, noise)
            return walk_on_device(choice, valid, candidates, rows, limits, deepest(limits, state.cache))
        return walk_on_host(
            logits,
            candidates,
            rows.sequences.to(rules.device),
            state.lengths,
            state.ends,
            state.reach(),
            rules,
            preferred=preferred,
            show=self.show,
            depth=self.tree.max_depth + 1 if state.cache.fixed else None,
        )
