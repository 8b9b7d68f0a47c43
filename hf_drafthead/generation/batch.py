"""One batch: the calls in it, their state, and the step of all of them.

`generate` makes a batch of one call, whose rows begin together. A manager makes one of many calls of one row each,
which join and leave between two steps (`rows.SharedBatch`). Calls share the draft and the forward, and each walks by
its own rules.

Shapes: B rows, N nodes, D nodes on the longest path, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, ParamSpec, TypeVar

import torch
from torch.nn import functional as F
from transformers.utils import logging

from hf_drafthead.bases.errors import DoesNotFit
from hf_drafthead.bases.hooks import is_hooked
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import BUCKET, SLOTS, rounded_up
from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.acceptance import typical_choices, walk_greedily, walk_on_device, walk_on_host
from hf_drafthead.generation.grammar import certain_paths, tree_with
from hf_drafthead.generation.lookup import matches
from hf_drafthead.generation.programs import Arena, fix, out_of_arena
from hf_drafthead.generation.runner import CAPACITY_BUCKET, Execution, Runner
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import (
    FAR,
    Candidates,
    DecodingState,
    Member,
    RowWalk,
    StepRecord,
    Verified,
    Walk,
    are_numbers,
    running,
)
from hf_drafthead.generation.step import STAGES, Stages, deepest, now, shortage_undone, stages_of
from hf_drafthead.generation.tree import ROOT_ALONE, LookupTree, Tree, copies_alone, smaller

logger = logging.get_logger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

STRETCH = 32  # positions for which eager steps take a capacity, or an eighth of a long text
MOST_PENDING = 128  # positions that wait for the drafter while nothing is drafted
FRAME_WORDS = 1 << 15  # of 8 bytes; a frame of so many gets a block of twice as many: the rest is for those below it


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it and what it calls have 256 KiB for their frames in one block.

    Of CPython's own, of 16 KiB, a new one is taken from the operating system, and given back, as often as a call does
    not fit into the rest: where that is between the loop and what it calls, 200 times in a step.
    """

    @functools.wraps(function)
    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=FRAME_WORDS)  # type: ignore[attr-defined]
    return roomy


class Batch:
    """Calls that are decoded together.

    plan: of the largest tree; execution: as asked for; only: the call of a batch that no other joins; timed: whether
    the stages of eager steps are timed. members: by row, None where nobody is; a call of g rows stands there g times;
    tree: of the most nodes that a step takes, a smaller one since memory was `short`; runner: None where steps are
    eager; held: memory of programs, in which a call may go on without them until it ends; ahead: whether the next step
    is launched before the host reads the outcome of one.
    """

    def __init__(
        self,
        model: Any,
        reader: BaseReader,
        plan: DraftPlan,
        execution: Execution,
        only: Member | None = None,
        timed: bool = False,
    ):
        self.model, self.drafter, self.reader = model, model.drafter, reader
        self.plan, self.only = plan, only
        self.plan_of: Callable[[int], DraftPlan] = lambda rows: plan  # by the number of running rows
        # what a reader gives every forward is of one call, and a program is for all
        self.execution = Execution("eager") if reader.more else execution
        self.timed = timed and self.execution.name == "eager"
        self.members: list[Member | None] = []
        self.state: DecodingState | None = None
        self.runner: Runner | None = None
        self.sizes: Any = None  # what the last steps say of how many nodes pay
        self.held: list[Arena] = []
        self.launched: deque[Callable[[], StepRecord]] = deque()
        if only is not None and only.state is not None:
            self.begin(only.state, [only] * len(only.rows))

    def begin(self, state: DecodingState, members: list[Member | None]) -> None:
        """Go on from the state of these members."""
        self.state, self.members, self.device = state, members, state.rows.lengths.device
        self.tree, self.short = self.plan.tree, False
        rules = None if self.only is None else self.only.rules  # programs must know nothing of those that may join
        self.typical = rules is not None and self.plan.settings.acceptance == "typical" and bool(rules.config.do_sample)
        self.samples, self.padding, self.longest = True, 0, FAR
        if rules is not None:
            self.samples, self.padding, self.longest = rules.samples, rules.pad_token, rules.max_length or FAR
        if self.execution.name != "eager":
            self.runner = Runner(self)
            if is_hooked(self.reader.base):  # which may do something else within a call; one that counts, for ever
                self.runner.stop("the base has hooks or forwards of the user's own, which a program would pass by")
        self.ahead = self.runner is not None and self.runner.graphs and rules is not None and rules.greedy
        self.ahead = self.ahead and not self.typical

    @property
    def running(self) -> list[Member]:
        """Who is in the batch, by row, each once."""
        return [member for member in dict.fromkeys(self.members) if member is not None]

    @torch.no_grad()
    def step(self, tree: Tree | None = None) -> list[StepRecord]:
        """Take one step, with a tree or the one that is next: the records of those whose outcome is known by then.
        DoesNotFit where there is no memory for so many rows; behind what the base raises nothing can go on."""
        state = self.state
        assert state is not None
        state.pays = state.certain = None
        tree = tree or self._next_tree(state)
        if not state.stuck and any(member.rules.grammar for member in self.running):
            tree = self._with_certain(tree, state)
        while True:
            key = id(self.drafter), tree, self.device
            stages = self.reader.stages.get(key) or stages_of(key, self.reader, self.drafter)
            try:
                self.fit(state, tree.max_depth + 1)
                runs = stages if self.runner is None else self.runner.of(stages, len(state.lengths))
                if len(state.pending) >= (MOST_PENDING if stages.defers and runs is stages else 1):
                    self.observe()
                self.launched.append(self.take(state, stages, runs))
                break
            except DoesNotFit as short:
                tree, state.pays = self._smaller(tree, short), None
        records = []
        while len(self.launched) > (self.ahead and self.runner is not None):
            records.append(self.launched.popleft()())
            for member in self.running:
                member.take(state, records[-1])
        return records

    def _next_tree(self, state: DecodingState) -> Tree:
        """As many nodes of the plan's tree as pay; the root alone where a guess is of no use, or would spread NaN."""
        plan, drafts = self.plan_of(len(self.running)), not state.stuck
        if state.stuck:
            for cache in state.caches:
                cache.clear()
        elif self.short:
            return self.tree
        elif isinstance(plan.tree, LookupTree) and copies_alone(plan.tree) and self.device.type == "cpu":
            drafts = matches(plan.tree, state.rows.sequences, state.rows.lengths, plan.texts_on(self.device))
        if plan.sizes is not None and not self.short:
            self.sizes = self.sizes or plan.sizes.begin(self.only is None)
            return self.sizes.tree(plan.sizes, state, drafts)  # type: ignore[no-any-return]
        return plan.tree if drafts else ROOT_ALONE

    def _with_certain(self, tree: Tree, state: DecodingState) -> Tree:
        """The tree with room for what comes for certain, where a constraint says that something does."""
        paths = certain_paths(self.running, state, self.reader.vocabulary)
        if paths is None or (self.runner is not None and self.execution.config is not None):  # compiled for each
            return tree
        slots = None if self.runner is None else rounded_up(self.tree.slots, SLOTS)
        found = tree_with(tree, paths, self.reader.vocabulary, slots)
        if found is None:
            return tree
        padded = [[*path[: found.certain], *[-1] * (found.certain - len(path))] for path in paths]
        state.certain = torch.tensor(padded, device=self.device)
        return found

    def _smaller(self, tree: Tree, short: DoesNotFit) -> Tree:
        """The tree of this step and of all that follow, after one for which memory is short; DoesNotFit in a batch of
        several calls, which gets smaller before the tree does.
        """
        if self.only is None and len(self.running) > 1:
            raise short
        if tree.num_nodes == 1:
            raise short.__cause__ or short from None
        logger.warning_once("Memory does not hold the nodes of a step: this call goes on with smaller trees.")
        self.tree, self.short = smaller(tree), True
        return self.tree

    def take(self, state: DecodingState, stages: Stages, runs: Any) -> Callable[[], StepRecord]:
        """Take a step from a state that has room for it, by its stages or programs of them: what reads the outcome."""
        rows, limits, tree = state.rows, state.limits, stages.tree
        clock: Callable[[], float] = functools.partial(now, self.device) if self.timed else float
        times = [clock()]
        tilt = self.tilts(state, tree.max_depth + 1) if self.samples else None
        texts = self.plan.texts_on(self.device) if isinstance(tree, LookupTree) else None
        with shortage_undone(state.caches):
            draft_state, candidates = runs.draft(rows, limits, tilt, texts, state.certain, state.pays)
            times.append(clock())
            verified = runs.verify(rows, limits, candidates)
        times.append(clock())
        walk = self.walk(state, candidates, verified, runs)
        times.append(clock())
        later = [(verified.features, walk.tokens, walk.observed)] if stages.defers else []
        state.keep(runs.commit(rows, draft_state, verified.features, walk, not later), state.pending + later)
        times.append(clock())
        seconds = {name: end - start for name, (start, end) in zip(STAGES, pairwise(times))} if self.timed else {}
        ready = torch.cuda.current_stream(walk.packed.device).record_event() if walk.packed.is_cuda else None
        return functools.partial(state.note, walk.packed, ready, candidates.tokens.shape[1], seconds)

    def tilts(self, state: DecodingState, depth: int) -> torch.Tensor | None:
        """How the noise with which the base will choose tilts the guesses (B, D, V), by 0 where a processor leaves no
        score; None where nobody samples. Members keep their noise (g, D, V) for the walk."""
        tilts: dict[int, torch.Tensor] = {}
        vocabulary = self.reader.vocabulary
        for member in (member for member in self.running if member.error is None and member.rules.samples):
            part, rules = slice(member.rows.start, member.rows.stop), member.rules
            try:
                moving = running(state.lengths[part], state.ends[part], rules.pads)
                noise = rules.noise_ahead(state.lengths[part], moving, depth, vocabulary)
                if noise is None:  # "typical" chooses without
                    continue
                member.noise = noise.to(self.device)
                tilt = F.pad(rules.tilt(noise).to(self.device), (0, vocabulary - noise.shape[-1]))
                if len(member.rows) == len(state.lengths):
                    return tilt
                tilts |= zip(member.rows, tilt)
            except BaseException as error:
                member.error = error
        if not tilts and not (self.only is None and state.rows.cache.fixed):  # a program takes the same in every step
            return None
        shape = next((tilt.shape for tilt in tilts.values()), (depth, vocabulary))
        nothing = torch.zeros(shape, device=self.device)
        return torch.stack([tilts.get(row, nothing) for row in range(len(state.lengths))])

    def walk(self, state: DecodingState, candidates: Candidates, verified: Verified, runs: Any) -> Walk:
        """Each call's walk: on the device where it can be; a CPU looks at few nodes."""
        if self.ahead:  # the next replay may be launched before this one's outcome is read
            walk: Walk = runs.walk(state.rows, state.limits, candidates, verified)
            return walk._replace(packed=walk.packed.clone())
        calls = [member for member in self.running if member.error is None]
        everywhere = self.typical or self.device.type != "cpu"
        if at_once := [member for member in calls if everywhere and member.rules.on_device]:
            return self._walk_at_once(at_once, calls, state, candidates, verified.logits)
        walks = self._walk_apart(calls, state, candidates, verified.logits)
        depth = candidates.topology.paths.shape[2] if state.rows.cache.fixed else None
        return Walk.of_rows(walks, depth, self.padding, self.device)

    def _walk_at_once(
        self,
        at_once: list[Member],
        calls: list[Member],
        state: DecodingState,
        candidates: Candidates,
        logits: torch.Tensor,
    ) -> Walk:
        """The walk of all calls, of which some are chosen for at all nodes."""
        on_device, reach = logits.to(self.device), deepest(state.limits, state.rows.cache)
        choice, valid = on_device.argmax(-1), are_numbers(on_device)
        for member in at_once:
            if member.rules.greedy and not self.typical:
                continue
            part, depths = slice(member.rows.start, member.rows.stop), candidates.topology.depths
            of_rows = depths if len(depths) == 1 else depths[part]
            chosen, sound = member.rules.choose_everywhere(on_device[part], of_rows, member.noise)
            if self.typical:  # a call without others
                chances = member.rules.scores_everywhere(on_device).float().softmax(-1)
                bounds = self.plan.settings.posterior_threshold, self.plan.settings.posterior_alpha
                likely = typical_choices(chances, candidates, reach, *bounds)
                chosen, sound = torch.where(likely < 0, chosen, likely), sound & chances.sum(-1).isfinite()
            choice[part], valid[part] = chosen, sound
        together = walk_on_device(choice, valid, candidates, state.rows, state.limits, reach)
        rows = {row for member in at_once for row in member.rows}
        if len(rows) == len(state.lengths):
            return together
        walks = self._walk_apart([each for each in calls if each not in at_once], state, candidates, logits)
        apart = Walk.of_rows(walks, candidates.topology.paths.shape[2], self.padding, self.device)
        mask = torch.tensor([row in rows for row in range(len(walks))], device=self.device)[:, None]
        return Walk(torch.where(mask, together.packed, apart.packed))  # type: ignore[call-arg]

    def _walk_apart(
        self, calls: list[Member], state: DecodingState, candidates: Candidates, logits: torch.Tensor
    ) -> list[RowWalk]:
        """The walks of some calls, each as if there were no other; no row of others goes on."""
        walks: list[RowWalk] = [(0, 0, end, [], []) for end in state.ends]
        for member in calls:
            part, rules, stream = slice(member.rows.start, member.rows.stop), member.rules, member.stream
            own = logits, candidates, state
            if len(member.rows) < len(state.lengths):
                topology = Topology(*(each if len(each) == 1 else each[part] for each in candidates.topology))
                own = logits[part], Candidates(candidates.tokens[part], topology), state.view(member.rows)
            try:
                plain = rules.greedy and stream is None
                walks[part] = walk_greedily(*own, rules) if plain else walk_on_host(*own, rules, stream)
            except BaseException as error:  # of a processor, a criterion, a streamer: it ends this call alone
                member.error = error
        return walks

    def observe(self) -> None:
        """Let the drafter observe what waits for it: what steps of the root alone have verified, in each of which it
        would run a layer for one position. Rows that have ended have counts of 0: their valid positions come first."""
        state = self.state
        if state is None or not state.pending:
            return
        features, tokens, counts = zip(*state.pending)
        with shortage_undone(state.caches):
            seen = torch.cat(features, 1), torch.cat(tokens, 1), torch.stack(counts).sum(0)
            draft_state = self.drafter.observe(state.rows.draft_state, *seen)
        state.keep(state.rows._replace(draft_state=draft_state), [])

    def fit(self, state: DecodingState, depth: int, longest: int = 0) -> None:
        """See that there is room for a step of `depth` nodes, and for a row of `longest` tokens that joins."""
        longest, cache, runner = max(longest, *state.lengths), state.rows.cache, self.runner
        past = longest + state.past_shift
        # of a step that was launched ahead the host does not know
        more = 2 * depth if runner is not None and runner.graphs else depth
        need = past + max(more, len(state.pending))
        # eager steps attend to few positions in vain
        most = need + 2 * max(STRETCH, longest // 8) + BUCKET if runner is None else math.inf
        fits = cache.fixed == (runner is not None) and cache.nodes >= self.tree.slots
        fits = fits and longest + more <= state.rows.sequences.shape[1]
        if not fits or any(not need <= other.capacity <= most for other in state.caches):
            if runner is not None:
                runner.reshape(state, depth, longest, need)
            if self.runner is None:  # or there is no memory for programs
                if state.rows.cache.fixed:  # memory of the call's own again, which no program works on
                    state.keep(out_of_arena(state.rows) if self.held else state.rows, state.pending)
                    for other in state.caches:
                        other.fixed, other.extent = False, int(other.lengths.max())
                capacity = need + min(self.longest - longest, max(STRETCH, longest // 8))
                bucket = BUCKET if self.device.type == "cuda" else CAPACITY_BUCKET
                fix(state, rounded_up(capacity, bucket), self.tree.slots, depth, self.padding, False, False)
        for other in state.caches if runner is None else ():  # a GPU does not say how far rows reach
            other.extent = min(other.extent, past - (other is cache))

    def close(self) -> None:
        """Let go of all memory; members that are still there are lost."""
        self.launched.clear()
        for arena in self.held:
            arena.free = True  # for other calls; a traceback may hold this state for long
        self.held.clear()
        self.members = []
        self.state = self.runner = self.sizes = None
