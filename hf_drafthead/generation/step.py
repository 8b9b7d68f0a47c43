"""One step: draft, verify, walk, commit. Each stage returns what it found, and `DecodingState.keep` takes it over.

    draft    the drafter guesses the tokens of a tree below the root, the token that the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    walk     down from the root as long as a child carries what the base chooses (`acceptance`)
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

`Step.__call__` is the step of every call, and of many at once. Draft, verify and commit see tensors and modules alone:
they may be compiled or recorded. The walk asks the user's processors and criteria, and is run as it stands.

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.acceptance import typical_choices, walk_greedily, walk_on_device, walk_on_host
from hf_drafthead.generation.grammar import copies_below
from hf_drafthead.generation.lookup import Copies, with_copies
from hf_drafthead.generation.state import (
    Candidates,
    DecodingState,
    Limits,
    Member,
    Outcome,
    Rows,
    RowWalk,
    Verified,
    Walk,
    are_numbers,
    running,
)
from hf_drafthead.generation.tree import DynamicTree, Level, LookupTree, Tree

MOST_STAGES = 64  # that are kept of one base
MOST_PENDING = 128  # positions that wait for the drafter while nothing is drafted


@dataclass(frozen=True)
class Stages:
    """The stages of a step with one tree. They hold the base and the drafter, and nothing of a call.

    What they return is made anew: of a tuple made by `_replace` a program returns in torch 2.11 one without its fields.
    heads: the tree without copies; values: (1, N) by which its nodes go where copies need their place; observer: the
    drafter, None where nothing but copies is guessed.
    """

    reader: BaseReader
    drafter: Any
    tree: Tree
    heads: Any = None
    levels: tuple[Level, ...] = ()
    topology: Any = None
    values: Any = None
    observer: Any = None

    @classmethod
    def of(cls, reader: BaseReader, drafter: Any, tree: Tree, device: torch.device) -> Stages:
        """The stages, with the tensors of the tree."""
        heads = tree.tree if isinstance(tree, LookupTree) else tree
        if isinstance(heads, DynamicTree):
            return cls(reader, drafter, tree, heads, observer=drafter)
        values = None
        if heads is not tree:  # about the logarithm of how likely a node is, less than its parent's
            values = torch.tensor([[-0.7 * (len(path) + sum(path)) for path in ((), *heads.paths)]], device=device)
        copies_alone = isinstance(tree, LookupTree) and tree.copies > 0 and heads.num_nodes == 1
        observer = None if copies_alone else drafter
        static = heads.levels(device), heads.topology(device), values
        return cls(reader, drafter, tree, heads, *static, observer)

    def draft(
        self, rows: Rows, limits: Limits, tilt: Any, texts: Any = None, certain: Any = None, pays: Any = None
    ) -> tuple[Any, Candidates]:
        """Let the drafter fill the tree below each row's newest token, see `fill_static`; also returns its state.

        Below a row that has ended there is padding alone. `texts`: others to copy; `certain`: (B, C), -1 behind an end;
        `pays`: chooses among the nodes of a static tree, see `trees.sizes.Weighed`.
        """
        tree, root = self.tree, rows.sequences.gather(1, rows.lengths[:, None] - 1)  # (B, 1) the newest tokens
        copied = copies_below(certain, tree, rows, texts) if isinstance(tree, LookupTree) else None
        if isinstance(self.heads, DynamicTree):
            draft_state, candidates = self.fill_dynamic(rows.draft_state, root, tilt, copied)
        else:
            draft_state, candidates = self.fill_static(rows.draft_state, root, tilt, pays)
            if copied is not None or pays is not None:
                candidates = self._best(candidates, copied, pays)
        if len(root) == 1 or candidates.tokens.shape[1] == 1:  # once a single row has ended, no step of it counts
            return draft_state, candidates
        embedded = limits.padding.clamp(0, self.reader.vocabulary - 1)  # where no row is padded it may be any number
        below = torch.where((rows.ends > 0)[:, None] & limits.pads, embedded, candidates.tokens[:, 1:])
        return draft_state, Candidates(torch.cat([root, below], dim=1), candidates.topology)

    def fill_static(
        self, draft_state: Any, root: torch.Tensor, tilt: torch.Tensor | None = None, pays: Any = None
    ) -> tuple[Any, Candidates]:
        """Fill a static tree below the root (B, 1) by level, as far as that pays; also returns the drafter's state.

        The tilt (B, D, V) is that of `Guesses.top` at every depth; None for the drafter's best guesses.
        """
        tokens = root
        for depth, (level, below) in enumerate(zip(self.levels, (*self.levels[1:], None))):
            expanded, hang_on = tokens[:, level.expanded], level.hang_on.expand(len(root), -1)  # (B, n)
            draft_state, guesses = self.drafter.expand(draft_state, expanded, hang_on)
            best = guesses.top if pays is None else guesses.likeliest
            guessed, scores = best(level.width, None if tilt is None else tilt[:, depth])
            slots = level.slots if guessed.shape[1] > 1 else 0
            tokens = torch.cat([tokens, guessed[:, slots, level.ranks].to(tokens.device)], dim=1)
            if pays is not None and not pays.goes_on(level, scores, below):
                break
        return draft_state, Candidates(tokens, self.topology)

    def fill_dynamic(
        self, draft_state: Any, root: torch.Tensor, tilt: torch.Tensor | None = None, copied: Copies | None = None
    ) -> tuple[Any, Candidates]:
        """As `fill_static`, of a dynamic tree, copies included: every shape is the tree's.

        Nodes are numbered as they are made: the root, then level by level the children of the expanded nodes, the
        likeliest node's first. Those that are kept stay in this order.
        """
        tree, device, rows = self.heads, root.device, root.shape[0]
        tokens, parents, likely = root, torch.zeros_like(root), torch.zeros(rows, 1, device=device)  # (B, M)
        expanded = hang_on = torch.zeros_like(root)  # (B, n) numbers of nodes; places of their parents in the last call
        sizes = [1]
        for level in range(tree.depth):
            draft_state, guesses = self.drafter.expand(draft_state, tokens.gather(1, expanded), hang_on)
            shape = (rows, expanded.shape[1], tree.width)  # (B, n, k)
            likeliest = guesses.likeliest(tree.width, None if tilt is None else tilt[:, level])
            guessed, chances = (part.to(device).expand(shape).flatten(1) for part in likeliest)
            above = expanded[..., None].expand(shape).flatten(1)
            below = likely.gather(1, above) + chances  # (B, n k)
            first = tokens.shape[1]
            tokens, parents = torch.cat([tokens, guessed], dim=1), torch.cat([parents, above], dim=1)
            likely = torch.cat([likely, below], dim=1)
            sizes.append(below.shape[1])
            if level + 1 < tree.depth:
                best = below.sort(dim=1, descending=True, stable=True).indices[:, : tree.width]
                expanded, hang_on = first + best, best // tree.width
        depths = torch.cat([torch.full((rows, size), depth, device=device) for depth, size in enumerate(sizes)], dim=1)
        nodes = (tokens, parents, depths, likely)
        nodes = nodes if copied is None else with_copies(*nodes, copied, tree.depth)
        return draft_state, Candidates(*Topology.of_best(*nodes, self.tree.num_nodes, self.tree.max_depth)[:2])

    def _best(self, candidates: Candidates, copied: Copies | None, pays: Any) -> Candidates:
        """Of a static tree and what the text itself suggests the nodes that pay, or the likeliest."""
        tokens, topology = candidates
        values = self.values if pays is None or pays.value is None else pays.value
        of_tree = (topology.parents, topology.depths, values)
        parents, depths, values = (part[:, : tokens.shape[1]].expand_as(tokens) for part in of_tree)
        nodes = (tokens, parents, depths, values)
        nodes = nodes if copied is None else with_copies(*nodes, copied, self.heads.max_depth)
        size = self.tree.num_nodes if pays is None else pays.size(nodes[-1], self.tree.num_nodes)
        tokens, topology, values = Topology.of_best(*nodes, size, self.tree.max_depth)
        if pays is not None:
            pays.keep(topology.parents, values)
        return Candidates(tokens, topology)

    def verify(self, rows: Rows, limits: Limits, candidates: Candidates) -> Verified:
        """One forward of the base over all nodes.

        Nodes behind the last position that the base can be asked about stay on that one; the walk does not go there.
        """
        cache = rows.cache
        positions = past = cache.lengths[:, None]  # the root's
        if candidates.tokens.shape[1] > 1:
            positions = torch.minimum(past + candidates.topology.depths, torch.maximum(limits.last_position, past))
        logits, features = self.reader.nodes(
            candidates.tokens, candidates.topology, cache, positions + rows.position_shift, rows.visible
        )
        # as the base rounds before it chooses
        return Verified(logits.float() if logits.dtype == torch.float64 else logits, features)

    def walk(self, rows: Rows, limits: Limits, candidates: Candidates, verified: Verified) -> Walk:
        """The walk of a greedy step, on the device."""
        logits = verified.logits.to(rows.lengths.device)
        return walk_on_device(
            logits.argmax(-1), are_numbers(logits), candidates, rows, limits, deepest(limits, rows.cache)
        )

    def commit(self, rows: Rows, draft_state: Any, features: torch.Tensor, walk: Walk, observes: bool = True) -> Rows:
        """Keep what was walked: keys and values, tokens, lengths, and hidden states for the drafter; drop the rest."""
        nodes, tokens = walk.nodes, walk.tokens
        rows.cache.keep(nodes, walk.counts)
        places = rows.lengths[:, None] + torch.arange(nodes.shape[1], device=nodes.device)
        rows.sequences.scatter_(1, places, tokens)
        # a wrong node here costs speed and never correctness: the tests look at it by itself
        if features.shape[1] > 1:
            nodes = nodes.to(features.device)[..., None]
            features = features.gather(1, nodes.expand(-1, -1, features.shape[2]))  # (B, D, F*H)
        if self.observer is not None and observes:  # else it observes later
            draft_state = self.observer.observe(draft_state, features, tokens, walk.observed)
        # a program takes the strides of what it was made with for those of all steps
        lengths, ends = rows.lengths + walk.counts, walk.ends.contiguous()
        return Rows(rows.sequences, lengths, ends, rows.position_shift, rows.visible, draft_state, rows.cache)


def stages_of(reader: BaseReader, drafter: Any, tree: Tree, device: torch.device) -> Stages:
    """The stages of steps with a tree; they are kept with the reader, unless it holds something of a call."""
    if reader.more:
        return Stages.of(reader, drafter, tree, device)
    key = id(drafter), id(tree), device
    if key not in reader.stages:
        while len(reader.stages) >= MOST_STAGES:
            reader.stages.pop(next(iter(reader.stages)), None)
        reader.stages[key] = Stages.of(reader, drafter, tree, device)
    kept: Stages = reader.stages[key]
    return kept


def deepest(limits: Limits, cache: SlotCache) -> torch.Tensor:
    """(B,) depth of the deepest nodes at positions that the base can be asked about."""
    return (limits.last_position - cache.lengths[:, None]).clamp(min=0)[:, 0]


class Step:
    """The steps of a batch with one tree: its calls share the draft and the forward, and each walks by its own rules.

    timed: note the seconds of every stage, for which the host waits after each; ahead: the host may launch the next
    step before it reads this one's outcome, where nothing is asked of it.
    """

    def __init__(self, batch: Any, tree: Tree, *, device: torch.device, timed: bool, ahead: bool):
        self.plan, self.members, self.shared, drafter = batch.largest, batch.members, batch.shared, batch.drafter
        first = next((member.rules for member in self.members if member is not None), None)
        rules = None if self.shared else first  # of the only call; programs must know nothing of those that may join
        self.stages = stages_of(batch.reader, drafter, tree, device)
        self.tree, self.num_nodes, self.depth, self.device = tree, tree.num_nodes, tree.max_depth + 1, device
        self.padding = 0 if rules is None else rules.pad_token
        self.samples = rules is None or rules.samples
        # some tokens to the base's choice
        self.typical = self.plan.acceptance == "typical" and rules is not None and bool(rules.config.do_sample)
        self.ahead = ahead and rules is not None and rules.greedy and not self.typical
        self.texts = self.plan.texts_on(device) if isinstance(tree, LookupTree) else None
        self.defers = drafter.keeps_history and tree.num_nodes == 1
        self.seconds: dict[str, float] = {}  # of the stages of a step, where they are timed
        self.timed: Any = None
        if timed:
            names = ("draft", "verify", "commit")
            self.timed = SimpleNamespace(**{name: self._timed(name, getattr(self.stages, name)) for name in names})
            vars(self).update(walk=self._timed("walk", self.walk), tilts=self._timed("draft", self.tilts))

    def __call__(self, state: DecodingState, stages: Any = None) -> Outcome:
        """Take one step from a state that has room for it; `stages` are programs of them, where there are any."""
        stages, rows, limits = stages or self.timed or self.stages, state.rows, state.limits
        tilt = self.tilts(state) if self.samples else None
        with shortage_undone(state.caches):
            draft_state, candidates = stages.draft(rows, limits, tilt, self.texts, state.certain, state.pays)
            verified = stages.verify(rows, limits, candidates)
        walk = self.walk(state, candidates, verified, stages)
        later = [(verified.features, walk.tokens, walk.observed)] if self.defers else []
        state.keep(stages.commit(rows, draft_state, verified.features, walk, not later), state.pending + later)
        packed, seconds, self.seconds = walk.packed, self.seconds, {}
        ready = torch.cuda.current_stream(packed.device).record_event() if packed.is_cuda else None
        return Outcome(packed, seconds, candidates.tokens.shape[1], ready)

    def _timed(self, name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
        """A stage whose seconds are noted, for which the host waits before and after it."""

        def run(*arguments: Any) -> Any:
            start = now(self.device)
            result = stage(*arguments)
            self.seconds[name] = self.seconds.get(name, 0.0) + now(self.device) - start
            return result

        return run

    def calls(self) -> list[Member]:
        """Who is in the batch and has not failed, each once."""
        found = [member for member in self.members if member is not None and member.error is None]
        return found if len(found) < 2 else list(dict.fromkeys(found))

    def tilts(self, state: DecodingState) -> torch.Tensor | None:
        """How the noise with which the base will choose tilts the guesses (B, D, V); None where nobody samples.

        Members keep their noise (g, D, V) for the walk.
        """
        tilts: dict[int, torch.Tensor] = {}
        vocabulary = self.stages.reader.vocabulary
        for member in (member for member in self.calls() if member.rules.samples):
            part, rules = slice(member.rows.start, member.rows.stop), member.rules
            try:
                moving = running(state.lengths[part], state.ends[part], rules.pads)
                noise = rules.noise_ahead(state.lengths[part], moving, self.depth, vocabulary)
                if noise is None:  # "typical" chooses without
                    continue
                member.noise = noise.to(self.device)
                tilt = rules.tilt(noise).to(self.device)
                if len(member.rows) == len(state.lengths):
                    return tilt
                tilts |= zip(member.rows, tilt)
            except BaseException as error:
                member.error = error
        if not tilts and not (self.shared and state.rows.cache.fixed):  # a program takes the same in every step
            return None
        shape = next((tilt.shape for tilt in tilts.values()), (self.depth, vocabulary))
        nothing = torch.zeros(shape, device=self.device)
        return torch.stack([tilts.get(row, nothing) for row in range(len(state.lengths))])

    def walk(self, state: DecodingState, candidates: Candidates, verified: Verified, stages: Any) -> Walk:
        """Each call's walk: on the device where it can be; a CPU looks at few nodes."""
        if self.ahead:  # the next replay may be launched before this one's outcome is read
            walk: Walk = stages.walk(state.rows, state.limits, candidates, verified)
            return walk._replace(packed=walk.packed.clone())
        logits, calls = verified.logits, self.calls()
        on_cpu = self.device.type == "cpu"  # which looks at few nodes
        at_once = [member for member in calls if member.rules.on_device and (self.typical or not on_cpu)]
        together = self._walk_at_once(at_once, state, candidates, logits) if at_once else None
        rows_at_once = {row for member in at_once for row in member.rows}
        if together is not None and len(rows_at_once) == len(state.lengths):
            return together
        walks: list[RowWalk] = [(0, 0, end, [], []) for end in state.ends]  # nobody's, and of those that failed
        for member in calls:
            if member not in at_once:
                try:
                    walks[member.rows.start : member.rows.stop] = self._walk_alone(member, state, candidates, logits)
                except BaseException as error:  # of a processor, a criterion, a streamer: it ends this call alone
                    member.error = error
        depth = self.depth if state.rows.cache.fixed or together is not None else None
        apart = Walk.of_rows(walks, depth, self.padding, self.device)
        if together is None:
            return apart
        mask = torch.tensor([row in rows_at_once for row in range(len(walks))], device=self.device)[:, None]
        return Walk(torch.where(mask, together.packed, apart.packed))  # type: ignore[call-arg]

    def _walk_at_once(
        self, calls: list[Member], state: DecodingState, candidates: Candidates, logits: torch.Tensor
    ) -> Walk:
        """The walk of all rows of some calls; what it says of others has no meaning."""
        logits = logits.to(self.device)
        reach = deepest(state.limits, state.rows.cache)
        choice, valid = logits.argmax(-1), are_numbers(logits)
        for member in calls:
            if member.rules.greedy and not self.typical:
                continue
            part = slice(member.rows.start, member.rows.stop)
            depths = candidates.topology.depths
            of_rows = depths if len(depths) == 1 else depths[part]
            chosen, sound = member.rules.choose_everywhere(logits[part], of_rows, member.noise)
            if self.typical:  # a call without others
                chances = member.rules.scores_everywhere(logits).float().softmax(-1)
                likely = typical_choices(
                    chances, candidates, reach, self.plan.posterior_threshold, self.plan.posterior_alpha
                )
                chosen, sound = torch.where(likely < 0, chosen, likely), sound & chances.sum(-1).isfinite()
            choice[part], valid[part] = chosen, sound
        return walk_on_device(choice, valid, candidates, state.rows, state.limits, reach)

    def _walk_alone(
        self, member: Member, state: DecodingState, candidates: Candidates, logits: torch.Tensor
    ) -> list[RowWalk]:
        """The walk of a call's rows, as if these were all."""
        rules, show = member.rules, None if member.stream is None else member.stream.show
        if len(member.rows) < len(state.lengths):
            part = slice(member.rows.start, member.rows.stop)
            topology = Topology(*(tensor if len(tensor) == 1 else tensor[part] for tensor in candidates.topology))
            candidates, logits = Candidates(candidates.tokens[part], topology), logits[part]
            state = state.view(member.rows)
        if rules.greedy and show is None:
            return walk_greedily(logits, candidates, state, rules)
        return walk_on_host(logits, candidates, state, rules, show)


@contextlib.contextmanager
def shortage_undone(caches: list[SlotCache]) -> Iterator[None]:
    """Raise `DoesNotFit` where memory is short for what is done meanwhile, and leave caches as they were."""
    before = [(cache, cache.lengths, cache.lengths.clone()) for cache in caches]
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        for cache, lengths, values in before:  # what lies behind them is not seen
            cache.lengths = lengths.copy_(values)
        raise DoesNotFit(str(error).partition("\n")[0]) from error


def now(device: torch.device) -> float:
    """Seconds of a clock, once a device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
