"""One step: draft, verify, walk, commit. Each stage returns what it found; `commit` is the only writer.

    draft    the drafter guesses the tokens of a tree below the root, the token that the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    walk     down from the root as long as a child carries what the base chooses (`acceptance`)
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.acceptance import preferred_choices, walk_greedily, walk_on_device, walk_on_host
from hf_drafthead.generation.drafting import draft_dynamic, draft_static
from hf_drafthead.generation.lookup import copies, joined
from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.slots import DoesNotFit, SlotCache, out_of_memory
from hf_drafthead.generation.state import (
    NOT_A_DISTRIBUTION,
    Candidates,
    DecodingState,
    Limits,
    Rows,
    Verified,
    Walk,
    packed,
    running,
    unpacked,
)
from hf_drafthead.generation.tree import DynamicTree, Level, LookupTree, Tree

MOST_PENDING = 128  # positions that wait for the drafter: as many as the longest pause of "auto"


# (rows, the base's cache, limits, what else) -> (what was found, rows after it)
Function = Callable[[Rows, SlotCache, Limits, Any], tuple[Any, Rows]]


class Program(NamedTuple):
    """What a step can be run by: the whole of a greedy one, else what comes before a walk and what after it."""

    whole: Function
    first: Function
    last: Function


@dataclass(frozen=True)
class Stages:
    """The stages of a step with one tree. They hold the base and the drafter, and nothing of a call.

    levels, topology: of a static tree, as tensors where the rows are; values: (1, N) by which its nodes go where copies
    need their place; observer: the drafter, or None where copies are all that is guessed.
    """

    reader: BaseReader
    drafter: Any
    tree: Tree
    keeps_guesses: bool
    levels: tuple[Level, ...] = ()
    topology: Any = None
    values: Any = None
    observer: Any = None

    @classmethod
    def of(cls, reader: BaseReader, drafter: Any, tree: Tree, keeps_guesses: bool, device: torch.device) -> Stages:
        """The stages, with the tensors of the tree."""
        heads = tree.tree if isinstance(tree, LookupTree) else tree
        if isinstance(heads, DynamicTree):
            return cls(reader, drafter, tree, keeps_guesses, observer=drafter)
        values = None
        if heads is not tree:  # minus a node's depth and ranks, which is less than its parent's
            values = torch.tensor([[-float(len(path) + sum(path)) for path in ((), *heads.paths)]], device=device)
        observer = drafter if heads is tree or heads.num_nodes > 1 else None
        return cls(reader, drafter, tree, keeps_guesses, heads.levels(device), heads.topology(device), values, observer)

    def whole(self, rows: Rows, cache: SlotCache, limits: Limits, _: None) -> tuple[torch.Tensor, Rows]:
        """A greedy step; also returns its walk, `packed`."""
        reach = deepest(limits, cache)
        draft_state, candidates = self.draft(rows, limits, None)
        verified = self.verify(cache, candidates, rows, limits)
        choice = verified.logits.to(rows.lengths.device).argmax(-1)
        valid = torch.ones_like(choice, dtype=torch.bool)
        walk = walk_on_device(choice, valid, candidates, rows, limits, reach)
        return packed(walk), commit(self.observer, draft_state, cache, rows, verified.features, walk)

    def first(
        self, rows: Rows, cache: SlotCache, limits: Limits, tilt: torch.Tensor | None
    ) -> tuple[tuple[Any, Candidates, Verified], Rows]:
        """What comes before a walk that is not part of a program."""
        draft_state, candidates = self.draft(rows, limits, tilt)
        return (draft_state, candidates, self.verify(cache, candidates, rows, limits)), rows

    def last(
        self, rows: Rows, cache: SlotCache, limits: Limits, kept: tuple[Any, torch.Tensor, Walk]
    ) -> tuple[None, Rows]:
        """What comes after it."""
        draft_state, features, walk = kept
        return None, commit(self.observer, draft_state, cache, rows, features, walk)

    def draft(self, rows: Rows, limits: Limits, tilt: torch.Tensor | None) -> tuple[Any, Candidates]:
        """Let the drafter fill the tree below each row's newest token, see `draft_static`; also returns its state.

        Below a row that has ended there is padding alone, which is what the base reads there.
        """
        root = rows.sequences.gather(1, rows.lengths[:, None] - 1)  # (B, 1) the newest tokens
        if isinstance(self.tree, LookupTree):
            draft_state, candidates = self._draft_with_copies(self.tree, rows, root, tilt)
        elif isinstance(self.tree, DynamicTree):
            draft_state, candidates = draft_dynamic(self.drafter, rows.draft_state, root, self.tree, tilt)
        else:
            tree = self.levels, self.topology, tilt, self.keeps_guesses
            draft_state, candidates = draft_static(self.drafter, rows.draft_state, root, *tree)
        if len(root) == 1 or candidates.tokens.shape[1] == 1:  # once a single row has ended, no step of it counts
            return draft_state, candidates
        padded = ((rows.ends > 0) & limits.pads)[:, None]
        embedded = limits.padding.clamp(0, self.reader.vocabulary - 1)  # where no row is padded it may be any number
        below = torch.where(padded, embedded, candidates.tokens[:, 1:])
        # made anew, not by `_replace`: in a program torch 2.11 returns a tuple without its fields then
        return draft_state, Candidates(torch.cat([root, below], dim=1), candidates.topology, candidates.guesses)

    def _draft_with_copies(
        self, tree: LookupTree, rows: Rows, root: torch.Tensor, tilt: torch.Tensor | None
    ) -> tuple[Any, Candidates]:
        """The tree of the heads, in which what the text itself suggests takes the place of the least valuable nodes."""
        copied = copies(rows.sequences, rows.lengths, tree.copies, tree.longest_match, tree.vocabulary)
        if isinstance(tree.tree, DynamicTree):
            return draft_dynamic(self.drafter, rows.draft_state, root, tree.tree, tilt, copied)
        static = self.levels, self.topology, tilt, self.keeps_guesses
        draft_state, (tokens, topology, guesses) = draft_static(self.drafter, rows.draft_state, root, *static)
        of_tree = (topology.parents, topology.depths, self.values)
        parents, depths, values = (part.expand_as(tokens) for part in of_tree)
        tokens, topology = joined(tokens, parents, depths, values, copied, tree.num_nodes, tree.tree.max_depth)
        return draft_state, Candidates(tokens, topology, guesses)

    def verify(self, cache: SlotCache, candidates: Candidates, rows: Rows, limits: Limits) -> Verified:
        """One forward of the base over all nodes.

        Nodes behind the last position that the base would be asked about stay on that position, which exists; the walk
        does not go there.
        """
        positions = past = cache.lengths[:, None]  # the root's
        if candidates.tokens.shape[1] > 1:
            positions = torch.minimum(past + candidates.topology.depths, torch.maximum(limits.last_position, past))
        logits, features = self.reader.nodes(
            candidates.tokens, candidates.topology, cache, positions + rows.position_shift, rows.visible
        )
        # as the base rounds before it chooses
        return Verified(logits.float() if logits.dtype == torch.float64 else logits, features)


def deepest(limits: Limits, cache: SlotCache) -> torch.Tensor:
    """(B,) depth of the deepest nodes at positions that the base can be asked about."""
    return (limits.last_position - cache.lengths[:, None]).clamp(min=0)[:, 0]


def commit(drafter: Any, draft_state: Any, cache: SlotCache, rows: Rows, features: torch.Tensor, walk: Walk) -> Rows:
    """Keep what was walked: keys and values, tokens, lengths, and hidden states for the drafter; drop the rest."""
    nodes, depth = walk.nodes, walk.nodes.shape[1]
    cache.keep(nodes, walk.counts)
    places = rows.lengths[:, None] + torch.arange(depth, device=nodes.device)
    rows.sequences.scatter_(1, places, walk.tokens)
    # a wrong node here costs speed and never correctness: the tests look at it by itself
    if features.shape[1] > 1:
        nodes = nodes.to(features.device)[..., None]
        features = features.gather(1, nodes.expand(-1, -1, features.shape[2]))  # (B, D, F*H)
    if drafter is not None:  # else it observes later
        draft_state = drafter.observe(draft_state, features, walk.tokens, walk.own)
    ends = walk.ends.contiguous()  # a program takes the strides of what it was made with for those of all steps
    return Rows(rows.sequences, rows.lengths + walk.counts, ends, rows.position_shift, rows.visible, draft_state)


class Step:
    """A step of one call with one tree, run operation by operation.

    Args:
        reader, drafter, tree: how to run the base, what guesses, and what it fills.
        device: where the rows are.
        settings, rules: of the call.
        show: is given every token before the next one is chosen, see `walk_on_host`.
        timed: note the seconds of every stage, for which the host waits after each.
    """

    def __init__(
        self,
        reader: BaseReader,
        drafter: Any,
        tree: Tree,
        *,
        device: torch.device,
        settings: DraftPlan,
        rules: Rules,
        show: Callable[[torch.Tensor], None] | None = None,
        timed: bool = False,
    ):
        self.stages = Stages.of(reader, drafter, tree, rules.rejects, device)
        self.tree, self.num_nodes, self.depth = tree, tree.num_nodes, tree.max_depth + 1
        self.device, self.settings, self.rules, self.show, self.timed = device, settings, rules, show, timed
        self.draws_otherwise = settings.acceptance != "exact" and rules.config.do_sample
        self.greedy = rules.greedy and not self.draws_otherwise  # then the walk needs nothing of the host
        self.on_device = rules.on_device and (device.type != "cpu" or rules.rejects)
        self.defers = drafter.keeps_history and tree.num_nodes == 1

    @property
    def functions(self) -> Program:
        """What programs are made of."""
        return Program(self.stages.whole, self.stages.first, self.stages.last)

    def __call__(self, state: DecodingState) -> tuple[torch.Tensor, dict[str, float]]:
        """Take one step; returns its walk, `packed`, and the seconds of its stages."""
        watch = Stopwatch(self.timed, self.device)
        state.reserve(2 * (self.depth + 1), self.rules.pad_token)  # the host may not know of the last step yet
        cache, limits, stages = state.cache, state.limits, self.stages
        noise, tilt = (None, None) if self.greedy else self.noise_ahead(state)
        try:
            if len(state.pending) >= (MOST_PENDING if self.defers else 1):
                observe_pending(stages.drafter, state)
            rows = state.rows
            draft_state, candidates = stages.draft(rows, limits, tilt)
            watch.lap("draft")
            verified = stages.verify(cache, candidates, rows, limits)
            watch.lap("verify")
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise DoesNotFit(str(error).partition("\n")[0]) from error
        pack = self.walk(state, candidates, verified, noise)
        walk = unpacked(pack)
        watch.lap("walk")
        observer = None if self.defers else stages.observer
        state.rows = commit(observer, draft_state, cache, rows, verified.features, walk)
        if self.defers:
            state.pending.append((verified.features, walk.tokens, walk.own))
        watch.lap("commit")
        return pack, watch.seconds

    def noise_ahead(self, state: DecodingState) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(B, D, V) the base's noise of the next positions, and how it tilts guesses; None where there is none."""
        rules, moving = self.rules, running(state.lengths, state.ends, self.rules.pads)
        noise = rules.noise_ahead(state.lengths, moving, self.depth, self.stages.reader.vocabulary)
        if noise is None:
            return None, None
        return None if rules.rejects else noise.to(self.device), rules.tilt(noise).to(self.device)

    def walk(
        self, state: DecodingState, candidates: Candidates, verified: Verified, noise: torch.Tensor | None
    ) -> torch.Tensor:
        """The walk, `packed`, that suits the call: on the device where it can be; a CPU looks at few nodes."""
        depth = self.depth if state.cache.fixed else None
        if self.greedy and self.show is None and not self.on_device:
            return walk_greedily(verified.logits, candidates, state, self.rules, depth)
        return self._walk_by_rules(state, candidates, verified.logits, noise, depth)

    def _walk_by_rules(
        self,
        state: DecodingState,
        candidates: Candidates,
        logits: torch.Tensor,
        noise: torch.Tensor | None,
        depth: int | None,
    ) -> torch.Tensor:
        """The walk of a call that samples, processes scores, or shows every token."""
        rules, reach = self.rules, deepest(state.limits, state.cache)
        preferred = valid = None
        if self.draws_otherwise:
            preferred, valid = preferred_choices(self.settings, self.tree, rules, logits, candidates, state, reach)
        if self.on_device:
            choice, are_numbers = rules.choose_everywhere(logits.to(self.device), candidates.topology.depths, noise)
            if preferred is not None and valid is not None:
                choice, are_numbers = torch.where(preferred < 0, choice, preferred), valid
            return packed(walk_on_device(choice, are_numbers, candidates, state.rows, state.limits, reach))
        if valid is not None and not valid.all():
            raise RuntimeError(NOT_A_DISTRIBUTION)
        return walk_on_host(logits, candidates, state, rules, preferred=preferred, show=self.show, depth=depth)


def observe_pending(drafter: Any, state: DecodingState) -> None:
    """Let the drafter observe what steps of the root alone have verified.

    Such a step drafts nothing. A drafter that keeps a history would run a layer, or a model, in each of them all the
    same, to remember one position. A row that has ended has counts of 0 from there on, so its valid positions come
    first, as `observe` wants them.
    """
    features, tokens, counts = zip(*state.pending)
    seen = torch.cat(features, 1), torch.cat(tokens, 1), torch.stack(counts).sum(0)
    draft_state = drafter.observe(state.rows.draft_state, *seen)
    state.rows, state.pending = state.rows._replace(draft_state=draft_state), []


class Stopwatch:
    """Seconds between laps; does nothing unless it is switched on."""

    def __init__(self, on: bool, device: torch.device):
        self.on, self.device = on, device
        self.seconds: dict[str, float] = {}
        self.last = self._now() if on else 0.0

    def lap(self, name: str) -> None:
        """Note what has passed since the last lap under this name."""
        if self.on:
            now = self._now()
            self.seconds[name], self.last = now - self.last, now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
