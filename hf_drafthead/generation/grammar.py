"""Tokens that a constraint leaves no choice of: they stand in the tree as a path, before anything guesses.

`prefix_allowed_tokens_fn` is asked for the token behind the root, behind that one, and on as long as one token alone is
allowed. What it has said is kept for the walk, so that it is asked once for each place, and in the order in which the
base asks: also one that keeps a state. Where anything else could end the text, choose another token or draw in between,
nothing is asked ahead. An object of a server's may tell such a path itself, by a method `certain_path`.

    the text      { "                    behind the root " the function allows "name" alone, then ", then :
    the path      name ── " ── :         and then several tokens: there it ends, and copies of the text go on below it

Shapes: B rows of a batch, g of one call, C tokens of a path at most.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F
from transformers import (
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from hf_drafthead.bases.releases import CRITERIA_ON_DEVICE, SCORES_ONLY
from hf_drafthead.generation.lookup import Copies, HeldTexts, suggested
from hf_drafthead.generation.tree import LookupTree, Tree

SEVERAL, REFUSED = -1, -2  # in the place of a token: several are allowed; the base may raise, and ask no further row
LENGTHS = (4, 8, 16)  # C: few, for each is a tree of its own
HARMLESS = {*SCORES_ONLY, RepetitionPenaltyLogitsProcessor} - {SuppressTokensLogitsProcessor}


class AskedOnce:
    """A `prefix_allowed_tokens_fn` that is asked ahead, and tells the walk what it has said. It knows prompts by
    number, of which each has `beams` rows; what it has said, or raised, of a prefix is kept by row and length.
    """

    def __init__(self, function: Callable[[int, torch.Tensor], Any], beams: int = 1):
        self.function, self.beams = function, beams
        self.asked: dict[tuple[int, int], tuple[torch.Tensor, Any, BaseException | None]] = {}

    def __call__(self, prompt: int, prefix: torch.Tensor) -> Any:
        """What is allowed behind a prefix (T,), which the base wants to know now, and does not ask for again."""
        for row in range(prompt * self.beams, (prompt + 1) * self.beams):
            before = self.asked.get((row, len(prefix)))
            if before is not None and torch.equal(before[0], prefix):
                del self.asked[row, len(prefix)]
                if before[2] is not None:
                    raise before[2]
                return before[1]
        return self.function(prompt, prefix)

    def ahead(self, row: int, prefix: torch.Tensor, vocabulary: int) -> int:
        """The only token behind a prefix that the base is going to ask for, or `SEVERAL`, or `REFUSED`."""
        key, said, error = (row, len(prefix)), None, None
        if key not in self.asked or not torch.equal(self.asked[key][0], prefix):
            try:
                said = self.function(row // self.beams, prefix)
                said = said.clone() if isinstance(said, torch.Tensor) else copy.copy(said)  # it may use it again
            except BaseException as raised:
                error = raised
            self.asked[key] = prefix.clone(), said, error
        said = self.asked[key][1]
        try:
            token = SEVERAL if len(said) > 1 else operator.index(next(iter(said)))
        except (TypeError, ValueError, StopIteration):
            return REFUSED
        return token if token == SEVERAL or 0 <= token < vocabulary else REFUSED


class Grammar:
    """The constraint of one call, among whose processors that one is replaced by one that is asked once."""

    def __init__(self, rules: Any, place: int, teller: Any):
        self.rules, self.teller, self.function = rules, teller, AskedOnce(lambda row, prefix: ())
        if teller is None:
            processor = rules.processors[place]
            self.function = AskedOnce(processor._prefix_allowed_tokens_fn, processor._num_beams)
            rules.processors[place] = PrefixConstrainedLogitsProcessor(self.function, processor._num_beams)

    @classmethod
    def of(cls, rules: Any) -> Grammar | None:
        """The constraint among the processors of a call; None where there is none that can be asked ahead."""
        tells = [place for place, each in enumerate(rules.processors) if hasattr(each, "certain_path")]
        if tells and rules.batch_size == 1:
            return cls(rules, tells[0], rules.processors[tells[0]])
        kinds = [type(each) for each in rules.processors]
        criteria = {type(each) for each in rules.criteria}
        if kinds.count(PrefixConstrainedLogitsProcessor) != 1 or not criteria <= set(CRITERIA_ON_DEVICE):
            return None
        if not {*kinds} <= {*HARMLESS, PrefixConstrainedLogitsProcessor} or rules.max_length is None:
            return None
        if rules.streams:  # to an object that may tell the function what it was given
            return None
        return cls(rules, kinds.index(PrefixConstrainedLogitsProcessor), None)

    def paths(
        self, sequences: torch.Tensor, lengths: list[int], ends: list[int | None], vocabulary: int
    ) -> list[list[int]]:
        """Of each row (g, W), the tokens that come for certain, at most C."""
        rules, length = self.rules, max(lengths)
        most = min(LENGTHS[-1], rules.max_length - length) if rules.max_length else LENGTHS[-1]
        none: list[list[int]] = [[] for _ in lengths]
        if most < 1 or all(end is not None for end in ends) or rules.random.moved:
            return none
        prefixes = sequences[:, :length].to(rules.device)
        if self.teller is not None:
            with rules.random.lent():
                told = [*map(operator.index, self.teller.certain_path(prefixes[0], most))][:most]
            return [[*itertools.takewhile(range(vocabulary).__contains__, told)]]
        paths, new = none, length - rules.prompt_length
        # all rows stay at one length, and are asked in the base's order, where the base will stand
        while len(paths[0]) < most and not rules.random.moved:
            rules.random.stand_at(new + len(paths[0]))
            with rules.random.lent():
                said = [REFUSED] * len(ends)
                for row, prefix in enumerate(prefixes):
                    said[row] = self.function.ahead(row, prefix, vocabulary)
                    if said[row] == REFUSED:
                        break
            nexts = [rules.pad_token if end is not None else token for token, end in zip(said, ends)]
            ended = any(token in rules.eos_tokens and end is None for token, end in zip(said, ends))
            if REFUSED in said or SEVERAL in nexts or ended:
                break
            paths = [[*path, token] for path, token in zip(paths, nexts)]
            prefixes = torch.cat([prefixes, prefixes.new_tensor(nexts)[:, None]], dim=1)
            if length + len(paths[0]) >= rules.max_length:
                break
        if not rules.random.moved:
            rules.random.stand_at(new)
        return paths


def certain_paths(members: Sequence[Any], state: Any, vocabulary: int) -> list[list[int]] | None:
    """Of each row of a batch of these members, what comes for certain; None where there is nothing in any row."""
    paths: list[list[int]] = [[] for _ in state.lengths]
    for member in members:
        grammar = member.rules.grammar
        if grammar is not None and member.error is None:
            part = slice(member.rows.start, member.rows.stop)
            try:
                rows = state.rows.sequences[part], state.lengths[part], state.ends[part]
                paths[part] = grammar.paths(*rows, vocabulary)
            except BaseException as error:  # of an object of the user's
                member.error = error
    return paths if any(paths) else None


def tree_with(tree: Tree, paths: list[list[int]], vocabulary: int, slots: int | None) -> LookupTree | None:
    """The tree of a step with such paths in it; None where it would need more nodes than there are `slots`."""
    around = tree if isinstance(tree, LookupTree) else LookupTree(tree, 0, 1, vocabulary)
    length = next(length for length in LENGTHS if length >= max(map(len, paths)))
    length = length if slots is None else min(length, slots - 1 - around.copies)
    return None if length < 1 else replace(around, certain=length)


def copies_below(certain: torch.Tensor | None, tree: LookupTree, rows: Any, texts: HeldTexts | None) -> Copies:
    """The copies of a step: below what comes for certain (B, C), the text is looked up as it will be then."""
    if certain is None:
        return suggested(tree, rows.sequences, rows.lengths, texts)
    length, device = certain.shape[1], certain.device
    count = (certain >= 0).sum(1)  # (B,)
    path = certain.clamp(min=0)
    depth = torch.arange(length, device=device)
    value = torch.where(certain >= 0, 0.0, -torch.inf)
    nodes = Copies(path, depth.expand_as(path), (1 + depth).expand_as(path), value)
    nodes = Copies(*(F.pad(part, (1, 0)) for part in nodes))
    if not tree.copies:
        return nodes
    places = rows.lengths[:, None] + depth
    text = rows.sequences.scatter(1, places, torch.where(certain >= 0, certain, rows.sequences.gather(1, places)))
    below = suggested(tree, text, rows.lengths + count, texts)
    parents = torch.where(below.parents == 0, count[:, None], below.parents + length)
    below = below._replace(parents=parents, depths=below.depths + count[:, None])
    return Copies(*(torch.cat([one, other[:, 1:]], dim=1) for one, other in zip(nodes, below)))
