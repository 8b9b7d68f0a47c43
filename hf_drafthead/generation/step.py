"""The stages of a step: draft, verify, walk, commit. Each returns what it found; `Batch` takes it over.

    draft    the drafter guesses the tokens of a tree below the root, the token that the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    walk     down from the root as long as a child carries what the base chooses (`acceptance`)
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

They see tensors and modules alone, so that they may be compiled or recorded. A walk that asks the user's processors and
criteria is no stage, and runs as it stands (`Batch.walk`).

Shapes: B rows, N nodes, D nodes on the longest path, F*H features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.bases.errors import DoesNotFit, out_of_memory
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.acceptance import walk_on_device
from hf_drafthead.generation.grammar import copies_below
from hf_drafthead.generation.lookup import Copies, with_copies
from hf_drafthead.generation.state import Candidates, Limits, Rows, Verified, Walk, are_numbers
from hf_drafthead.generation.tree import DynamicTree, Level, LookupTree, Tree

STAGES = ("draft", "verify", "walk", "commit")
MOST_STAGES = 64  # that are kept of one base


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of steps with one tree. They hold the base and the drafter, and nothing of a call.

    What they return is made anew: of a tuple made by `_replace` a program returns in torch 2.11 one without its fields.
    heads: the tree without copies; values: (1, N) by which its nodes go where copies need their place; observer: the
    drafter, None where nothing but copies is guessed; defers: what is verified may wait until it observes.
    """

    reader: BaseReader
    drafter: Any
    tree: Tree
    heads: Any = None
    levels: tuple[Level, ...] = ()
    topology: Any = None
    values: Any = None
    observer: Any = None
    defers: bool = False

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
        defers = tree.num_nodes == 1 and drafter.keeps_history
        static = heads.levels(device), heads.topology(device), values
        return cls(reader, drafter, tree, heads, *static, observer, defers)

    def draft(
        self, rows: Rows, limits: Limits, tilt: Any, texts: Any = None, certain: Any = None, pays: Any = None
    ) -> tuple[Any, Candidates]:
        """Let the drafter fill the tree below each row's newest token; also returns its state. texts: others to copy;
        certain: (B, C), -1 behind an end; pays: see `trees.sizes.Weighed`."""
        tree, root = self.tree, rows.sequences.gather(1, rows.lengths[:, None] - 1)  # (B, 1) the newest tokens
        copied = copies_below(certain, tree, rows, texts) if isinstance(tree, LookupTree) else None
        fill = self.fill_dynamic if isinstance(self.heads, DynamicTree) else self.fill_static
        draft_state, candidates = fill(rows.draft_state, root, tilt, copied, pays)
        if len(root) == 1 or candidates.tokens.shape[1] == 1:  # once a single row has ended, no step of it counts
            return draft_state, candidates
        embedded = limits.padding.clamp(0, self.reader.vocabulary - 1)  # where no row is padded it may be any number
        below = torch.where((rows.ends > 0)[:, None] & limits.pads, embedded, candidates.tokens[:, 1:])
        return draft_state, Candidates(torch.cat([root, below], dim=1), candidates.topology)

    def fill_static(
        self, draft_state: Any, root: torch.Tensor, tilt: torch.Tensor | None, copied: Copies | None, pays: Any
    ) -> tuple[Any, Candidates]:
        """Fill a static tree below the root (B, 1) by level, as far as that pays, with the tilt (B, D, V) of
        `Guesses.top` at every depth, or None; also returns the drafter's state."""
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
        candidates = Candidates(tokens, self.topology)
        return draft_state, candidates if copied is pays is None else self._best(candidates, copied, pays)

    def fill_dynamic(
        self,
        draft_state: Any,
        root: torch.Tensor,
        tilt: torch.Tensor | None = None,
        copied: Copies | None = None,
        pays: None = None,
    ) -> tuple[Any, Candidates]:
        """As `fill_static`, of a dynamic tree, whose shapes are all its own. Nodes stay in the order in which they are
        made: the root, then level by level the children of the expanded nodes, the likeliest node's first."""
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
        """One forward of the base over all nodes; those behind the last position that it can be asked about stay there,
        where the walk does not go."""
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


def stages_of(key: tuple[int, Tree, torch.device], reader: BaseReader, drafter: Any) -> Stages:
    """The stages of steps with a tree, made and kept with the reader: by drafter, tree and device."""
    while len(reader.stages) >= MOST_STAGES:
        reader.stages.pop(next(iter(reader.stages)), None)
    stages = reader.stages[key] = Stages.of(reader, drafter, *key[1:])
    return stages


def deepest(limits: Limits, cache: SlotCache) -> torch.Tensor:
    """(B,) depth of the deepest nodes at positions that the base can be asked about."""
    return (limits.last_position - cache.lengths[:, None]).clamp(min=0)[:, 0]


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
