"""Guesses copied from the text itself: what followed the last tokens of a row where they occurred before.

Prompt lookup (`prompt_lookup_num_tokens` of transformers) checks such a copy alone, for one row. Here it is one more
path in the tree of the heads' guesses, in every row that has a match, in place of the least valuable nodes. The number
of nodes stays the same, and nothing waits for the device.

    the text     d e f  m a i n ( ) ... d e f          the last tokens "d e f" occurred before
    the copy     m a i n                               L = 4 tokens, which hang below the root "f"

Other texts, which the user names or which were answered before, are a second place to copy from. Where they agree with
more of a row's last tokens than its own text does, the copy is theirs (`TextIndex`). They lie in one tensor of fixed
size, and so does, for each n, a table from the hash of n tokens to where these last ended. The host fills both between
steps; a step only reads them, at as many places as there are rows:

    the row      ... d e f                 hash(d e f) -> 7
    the texts    a b . x y d e f m a i n . n o           at 7 ends "d e f", behind it stands the copy "m a i n"

Shapes: B rows, W width of the sequences, L copied tokens, M nodes that were guessed (root included), N nodes of a step,
C tokens of the texts, S hashes, G tables, X n-grams.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.tree import LookupTree

LEAST_MATCH = 2  # tokens that must agree, unless fewer are asked for: a single token matches nearly everywhere
LONGEST_GRAM = 4  # tokens that are looked up at most
BEHIND = -1  # behind each text, where no token is
ANSWERS = 1 << 20  # tokens of what was answered that are kept beside named texts, in 28 bytes each
LEAST_CAPACITY = 1024  # tokens of an index; powers of two, so that calls with other texts share programs
MULTIPLIER = 1_000_003  # of hashes; times the largest table it stays far below 2**63


class Copies(NamedTuple):
    """What the text itself suggests. tokens (B, L); matched (B,) whether the last tokens occurred before."""

    tokens: torch.Tensor
    matched: torch.Tensor


def copied_from_row(
    sequences: torch.Tensor, lengths: torch.Tensor, count: int, longest_match: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
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

    Returns:
        tokens (B, L), and how many of the last tokens agreed (B,), 0 where none occurred before.

    >>> text = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 0], [1, 2, 3, 4, 5, 6, 7, 0]])
    >>> copied_from_row(text, torch.tensor([7, 7]), count=4, longest_match=3, vocabulary=10)
    (tensor([[7, 8, 9, 5],
            [0, 0, 0, 0]]), tensor([2, 0]))
    """
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
        sequences, lengths: see `copied_from_row`.
        texts: others, on this device; None: none.
    """
    tokens, agreed = copied_from_row(sequences, lengths, tree.copies, tree.longest_match, tree.vocabulary)
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
    copies = suggested(tree, sequences, starts, texts)
    counts = []
    for tokens, copied, matched in zip(emitted, copies.tokens.tolist(), copies.matched.tolist()):
        same = map(operator.eq, tokens[:-1], copied if matched else [])
        counts.append(sum(itertools.takewhile(bool, same)))
    return counts


def with_copies(
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


class HeldTexts(NamedTuple):
    """The texts of an index on one device.

    corpus: (C,) tokens, `BEHIND` behind each text; places: (G, S) of each hash of 2, 3, ... tokens, the place of the
    last of these; -1 where there is none.
    """

    corpus: torch.Tensor
    places: torch.Tensor


class TextIndex:
    """Texts to copy guesses from, and where their n-grams last occurred.

    A step looks up the hashes of each row's last 4, 3 and 2 tokens, compares the texts there with them, and takes what
    follows the longest that agrees. That costs the same however long the texts are, and nothing waits for the host. All
    memory is taken at once: 4 bytes for each token, and 24 for its n-grams. Any thread may `put` further texts, also
    while others decode: what is read is a guess.

    Args:
        texts: token ids of each. They stay.
        capacity: tokens to hold, with one more for each text; beyond the first `texts` further ones take the place of
            the oldest. Default: those of `texts`, rounded up to a power of two.

    Raises:
        ValueError: the texts do not fit.

    >>> index = TextIndex([[5, 6, 7, 8, 9]])
    >>> text = torch.tensor([[1, 6, 7, 0], [1, 2, 3, 0]])
    >>> copied_from(index.on(text.device), text, torch.tensor([3, 3]), count=2, vocabulary=10)
    (tensor([[8, 9],
            [0, 0]]), tensor([2, 0]))
    """

    @torch.inference_mode(False)
    def __init__(self, texts: Iterable[Sequence[int]] = (), capacity: int | None = None):
        texts = [[*text] for text in texts]
        needed = _needed(texts)
        if capacity is None:
            capacity = max(1 << (needed - 1).bit_length(), LEAST_CAPACITY) if needed else LEAST_CAPACITY
        if needed > capacity:
            raise ValueError(
                f"the texts have {needed:,} tokens with one behind each, and the index holds {capacity:,}: give fewer, "
                "or a larger capacity."
            )
        self.capacity, self.size = capacity, 2 * capacity + 1
        corpus = torch.full((capacity,), BEHIND, dtype=torch.int32)
        places = torch.full((LONGEST_GRAM - LEAST_MATCH + 1, self.size), -1, dtype=torch.int32)
        self.host = HeldTexts(corpus, places)
        self.held: dict[torch.device, HeldTexts] = {corpus.device: self.host}
        self.lock = threading.Lock()
        self.first = self.next = 0  # where texts begin that may be replaced, and where the next one is put
        for text in texts:
            self.put(text)
        self.first = self.next

    @classmethod
    def of(cls, texts: Any, tokenizer: Any = None, more: int = 0) -> TextIndex | None:
        """The index that a `lookup_texts` argument means: one, or a list of strings and token ids; None for none.

        Args:
            texts, tokenizer: see `generate`.
            more: tokens beside the texts that a new index is to hold; with it there is one also without texts.

        Raises:
            TypeError: it is none of these.
            ValueError: there are strings, and no tokenizer.
        """
        if isinstance(texts, cls) or (texts is None and not more):
            return texts
        texts = () if texts is None else texts
        if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
            raise TypeError(
                f"lookup_texts is of type {type(texts).__name__}: expected a list of texts, or of their token ids, or "
                "a TextIndex."
            )
        texts = [*texts]
        if tokenizer is None and any(isinstance(text, str) for text in texts):
            raise ValueError("lookup_texts holds strings, but no tokenizer was given: pass tokenizer=, or token ids.")
        ids = [
            tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else _ids_of(text)
            for text in texts
        ]
        return cls(ids, _needed(ids) + more if more else None)

    def on(self, device: torch.device) -> HeldTexts:
        """The texts on a device, where later ones will be put as well."""
        with self.lock, torch.inference_mode(False):
            if device not in self.held:
                self.held[device] = HeldTexts(*(part.to(device) for part in self.host))
            return self.held[device]

    def put(self, text: Sequence[int]) -> None:
        """Hold a further text in place of the oldest ones that may be replaced; of a long one the end."""
        room = self.capacity - self.first - 1  # one behind it
        text = text[-room:] if room > 0 else []
        if len(text) <= LEAST_MATCH:
            return
        with self.lock, torch.no_grad(), torch.inference_mode(False):
            tokens = torch.tensor([*text, BEHIND], dtype=torch.int32)
            if self.next + len(tokens) > self.capacity:
                self.next = self.first
            start, self.next = self.next, self.next + len(tokens)
            for texts in self.held.values():
                texts.corpus[start : self.next] = tokens.to(texts.corpus.device)
            for number, length in enumerate(range(LEAST_MATCH, LONGEST_GRAM + 1)):
                if len(text) > length:
                    self._note(number, tokens[:-2].long().unfold(0, length, 1), start + length - 1)

    def _note(self, number: int, grams: torch.Tensor, first: int) -> None:
        """Note where n-grams (X, n) end, of which the first ends at `first`; of equal hashes the last.

        Hashes of texts that stay are left to these, which would be forgotten after a while.
        """
        hashes, order = hash_of(grams, self.size).sort(stable=True)
        before = self.host.places[number][hashes]
        last = torch.cat([hashes[1:] != hashes[:-1], torch.ones(1, dtype=torch.bool)])
        last &= (before < 0) | (before >= self.first)
        slots, ends = hashes[last], (first + order[last]).int()
        for texts in self.held.values():
            device = texts.places.device
            texts.places[number].index_copy_(0, slots.to(device), ends.to(device))


def _needed(texts: Sequence[Sequence[int]]) -> int:
    """Places that texts take, with one behind each."""
    return sum(len(text) + 1 for text in texts)


def _ids_of(text: Any) -> list[int]:
    """Token ids as a list."""
    ids = text.flatten().tolist() if isinstance(text, torch.Tensor) else [*text]
    if any(isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31 for token in ids):
        raise TypeError(f"a text of lookup_texts begins {str(ids[:4])[:60]}: expected a string or token ids.")
    return ids


def hash_of(grams: torch.Tensor, size: int) -> torch.Tensor:
    """(X,) numbers below `size` of n-grams (X, n)."""
    value = grams[:, 0] % size
    for place in range(1, grams.shape[1]):
        value = (value * MULTIPLIER + grams[:, place]) % size
    return value


def copied_from(
    texts: HeldTexts, sequences: torch.Tensor, lengths: torch.Tensor, count: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the last tokens of each row in these texts.

    Args:
        texts: to copy from.
        sequences: (B, W) token ids; of row b the first `lengths[b]` count.
        lengths: (B,).
        count: L.
        vocabulary: tokens of the base; others are not guessed.

    Returns:
        tokens (B, L), 0 where none is known, and how many of the last tokens agreed (B,), 0 where there is no match.
    """
    device, size = sequences.device, texts.places.shape[1]
    back = torch.arange(LONGEST_GRAM - 1, -1, -1, device=device)
    newest = sequences.gather(1, (lengths[:, None] - 1 - back).clamp(min=0))  # (B, 4), the newest is the last
    end, agreed = torch.full_like(lengths, -1), torch.zeros_like(lengths)
    for number, length in enumerate(range(LEAST_MATCH, LONGEST_GRAM + 1)):
        grams, span = newest[:, -length:], torch.arange(1 - length, 1, device=device)
        place = texts.places[number][hash_of(grams, size)].long()
        seen = texts.corpus[(place[:, None] + span).clamp(min=0)]
        same = (seen == grams).all(1) & (place >= 0) & (lengths >= length)
        end, agreed = torch.where(same, place, end), torch.where(same, length, agreed)
    behind = end[:, None] + 1 + torch.arange(count, device=device)
    tokens = texts.corpus[behind.clamp(max=len(texts.corpus) - 1)].long()
    valid = (agreed > 0)[:, None] & (tokens >= 0) & (tokens < vocabulary)
    return torch.where(valid, tokens, 0), agreed
