"""Guesses copied from the text itself: what followed the last tokens of a row where they occurred before.

Prompt lookup (`prompt_lookup_num_tokens` of transformers) checks such a copy alone, for one row. Here it is one more
path in the tree of the heads' guesses, in every row that has a match, in place of the least valuable nodes. The number
of nodes stays the same, and nothing waits for the device.

    the text     d e f  m a i n ( ) ... d e f          the last tokens "d e f" occurred before
    the copy     m a i n                               L = 4 tokens, which hang below the root "f"

Other texts, which the user names or which were answered before, are a second place to copy from. Where they agree with
more of a row's last tokens than its own text does, the copy is theirs (`TextIndex`).

Shapes: B rows, W width of the sequences, L copied tokens, M nodes that were guessed (root included), N nodes of a step.
"""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import torch

from hf_drafthead.generation.text_index import LEAST_MATCH, HeldTexts, copied_from
from hf_drafthead.generation.tree import LookupTree, Topology


class Copies(NamedTuple):
    """What the text itself suggests. tokens (B, L); matched (B,) whether the last tokens occurred before."""

    tokens: torch.Tensor
    matched: torch.Tensor


def copies(sequences: torch.Tensor, lengths: torch.Tensor, count: int, longest_match: int, vocabulary: int) -> Copies:
    """What followed the last tokens of each row where they occurred before: the longest match, of equal ones the last.

    The longest of `longest_match`, ... 2 last tokens that occurred before is taken (1 where `longest_match` is 1). A
    copy that reaches the end of the text goes on with its own beginning, as a text that repeats itself does. A copy
    that was wrong is not made again at the same place: the root differs from it there.

    Args:
        sequences: (B, W) token ids; of row b the first `lengths[b]` count.
        lengths: (B,), at least 1.
        count: L.
        longest_match: tokens compared at most, at least 1.
        vocabulary: tokens of the base; a row may hold other ids, such as placeholders, and these are not guessed.

    >>> text = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 0], [1, 2, 3, 4, 5, 6, 7, 0]])
    >>> copies(text, torch.tensor([7, 7]), count=4, longest_match=3, vocabulary=10)
    Copies(tokens=tensor([[7, 8, 9, 5],
            [0, 0, 0, 0]]), matched=tensor([ True, False]))
    """
    tokens, agreed = _copied(sequences, lengths, count, longest_match, vocabulary)
    return Copies(tokens, agreed > 0)


def _copied(
    sequences: torch.Tensor, lengths: torch.Tensor, count: int, longest_match: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `copies` gives: tokens (B, L), and how many of the last tokens agreed (B,), 0 where none occurred before."""
    width, device = sequences.shape[1], sequences.device
    least = min(LEAST_MATCH, longest_match)
    place = torch.arange(width, device=device)
    last = lengths[:, None] - 1  # (B, 1) of the newest token
    agree = torch.ones_like(sequences, dtype=torch.bool)
    agreed = torch.zeros_like(sequences)  # (B, W) how many of the last tokens agree with those up to this place
    for back in range(min(longest_match, width)):
        wanted = sequences.gather(1, (last - back).clamp(min=0))
        same = (sequences[:, : width - back] == wanted) & (back <= last)
        agree = agree & torch.nn.functional.pad(same, (back, 0), value=False)
        agreed = agreed + agree
    value = torch.where((agreed >= least) & (place < last), agreed * width + place, -1)
    best, end = value.max(1)  # (B,) the last token of the earlier occurrence
    matched = best >= 0
    period = (last[:, 0] - end).clamp(min=1)[:, None]
    steps = torch.arange(count, device=device)
    tokens = sequences.gather(1, (end[:, None] + 1 + steps % period).clamp(max=width - 1))
    agreed_at_end = torch.where(matched, best.div(width, rounding_mode="floor"), 0)
    return torch.where(matched[:, None] & (tokens < vocabulary), tokens, 0), agreed_at_end


def suggested(
    tree: LookupTree, sequences: torch.Tensor, lengths: torch.Tensor, texts: HeldTexts | None = None
) -> Copies:
    """The copies of a step: of the row's own text, or of others where these agree with more of its last tokens.

    Args:
        tree: of the step.
        sequences, lengths: see `copies`.
        texts: others, on this device; None: none.
    """
    tokens, agreed = _copied(sequences, lengths, tree.copies, tree.longest_match, tree.vocabulary)
    if texts is not None:
        others, more = copied_from(texts, sequences, lengths, tree.copies, tree.vocabulary)
        tokens = torch.where((more > agreed)[:, None], others, tokens)
        agreed = torch.maximum(agreed, more)
    return Copies(tokens, agreed > 0)


def matches(tree: LookupTree, sequences: torch.Tensor, lengths: torch.Tensor, texts: HeldTexts | None = None) -> bool:
    """Whether any row's last tokens occurred before, or in other texts; the host waits for the answer."""
    return bool(suggested(tree, sequences, lengths, texts).matched.any())


def accepted_copies(
    tree: LookupTree,
    texts: HeldTexts | None,
    sequences: torch.Tensor,
    lengths: list[int],
    emitted: list[list[int]],
) -> list[int]:
    """Row by row, how many of the guesses that a step accepted were copies: from the first on, until one was not.

    The copies are found again, as in the step. The heads may have guessed the same tokens.

    Args:
        tree: of the step.
        texts: others than the rows' own, as in the step.
        sequences: (B, W) token ids.
        lengths: B of them, after the step.
        emitted: the tokens of the step, of each row; the last one was no guess.
    """
    before = [length - len(tokens) for length, tokens in zip(lengths, emitted, strict=True)]
    starts = torch.tensor(before, device=sequences.device)
    found = suggested(tree, sequences, starts, texts)
    counts = []
    for tokens, copied, matched in zip(emitted, found.tokens.tolist(), found.matched.tolist()):
        same = map(operator.eq, tokens[:-1], copied if matched else [])
        counts.append(sum(itertools.takewhile(bool, same)))
    return counts


def joined(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    value: torch.Tensor,
    copied: Copies,
    nodes: int,
    deepest: int,
) -> tuple[torch.Tensor, Topology]:
    """The most valuable of the guessed nodes and the copies in one tree, row by row.

    Copied tokens that were guessed at the same place are not added again: the rest of the copy hangs below them.

    Args:
        tokens, parents, depths: (B, M) of the guessed nodes; node 0 is the root, parents come before their children.
        value: (B, M), by which nodes are kept; no node is worth more than its parent; of equal ones the first.
        copied: of every row.
        nodes: N, of which L + 1 at least are there.
        deepest: levels below the root of the guessed nodes.

    Returns:
        tokens (B, N) and how they hang together; a row without a match has guessed nodes only, and where these are
        fewer than N, copies that carry token 0.
    """
    rows, made = tokens.shape
    count = copied.tokens.shape[1]
    device = tokens.device
    matched = copied.matched[:, None]
    guess = copied.tokens.gather(1, (depths - 1).clamp(0, count - 1))
    on_copy = (tokens == guess) & (depths <= count) & matched
    on_copy[:, 0] = True
    for _ in range(min(deepest, count)):  # and so are all nodes above
        on_copy = on_copy & on_copy.gather(1, parents)
    # (B, L + 1) of the copy's nodes by depth: guessed ones where there are, else those that are added behind them
    added = torch.arange(made - 1, made + count, device=device).expand(rows, -1)
    number = torch.arange(made, device=device).expand(rows, -1)
    line = torch.full_like(added, -1).scatter(1, torch.where(on_copy, depths, 0), number)
    line[:, 0] = 0
    new = line < 0
    line = torch.where(new, added, line)
    added_value = torch.where(new[:, 1:] & matched, torch.inf, -torch.inf)
    value = torch.cat([torch.where(on_copy, torch.inf, value), added_value], dim=1)
    tokens = torch.cat([tokens, copied.tokens], dim=1)
    parents = torch.cat([parents, line[:, :-1]], dim=1)
    depths = torch.cat([depths, torch.arange(1, count + 1, device=device).expand(rows, -1)], dim=1)
    return Topology.of_best(tokens, parents, depths, value, nodes, max(deepest, count))
