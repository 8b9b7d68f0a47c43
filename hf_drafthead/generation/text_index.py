"""Texts that guesses are copied from beside a row's own: those that the user names, and what was answered before.

They lie in one tensor of fixed size, and so does, for each n, a table from the hash of n tokens to where these last
ended. The host fills both between steps; a step only reads them, at as many places as there are rows:

    the row      ... d e f                 hash(d e f) -> 7
    the texts    a b . x y d e f m a i n . n o           at 7 ends "d e f", behind it stands the copy "m a i n"

Shapes: B rows, W width of the sequences, L copied tokens, C tokens of the texts, S hashes, G tables, X n-grams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

LEAST_MATCH = 2  # tokens that must agree, unless fewer are asked for: a single token matches nearly everywhere
LONGEST_GRAM = 4  # tokens that are looked up at most
BEHIND = -1  # behind each text, where no token is
ANSWERS = 1 << 20  # tokens of what was answered that are kept beside named texts, in 28 bytes each
LEAST_CAPACITY = 1024  # tokens of an index; powers of two, so that calls with other texts share programs
MULTIPLIER = 1_000_003  # of hashes; times the largest table it stays far below 2**63


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
            for held in self.held.values():
                held.corpus[start : self.next] = tokens.to(held.corpus.device)
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
        for held in self.held.values():
            device = held.places.device
            held.places[number].index_copy_(0, slots.to(device), ends.to(device))


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
    held: HeldTexts, sequences: torch.Tensor, lengths: torch.Tensor, count: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What follows the last tokens of each row in these texts.

    Args:
        held: the texts.
        sequences: (B, W) token ids; of row b the first `lengths[b]` count.
        lengths: (B,).
        count: L.
        vocabulary: tokens of the base; others are not guessed.

    Returns:
        tokens (B, L), 0 where none is known, and how many of the last tokens agreed (B,), 0 where there is no match.
    """
    device, size = sequences.device, held.places.shape[1]
    back = torch.arange(LONGEST_GRAM - 1, -1, -1, device=device)
    newest = sequences.gather(1, (lengths[:, None] - 1 - back).clamp(min=0))  # (B, 4), the newest is the last
    end, agreed = torch.full_like(lengths, -1), torch.zeros_like(lengths)
    for number, length in enumerate(range(LEAST_MATCH, LONGEST_GRAM + 1)):
        grams, span = newest[:, -length:], torch.arange(1 - length, 1, device=device)
        place = held.places[number][hash_of(grams, size)].long()
        seen = held.corpus[(place[:, None] + span).clamp(min=0)]
        same = (seen == grams).all(1) & (place >= 0) & (lengths >= length)
        end, agreed = torch.where(same, place, end), torch.where(same, length, agreed)
    behind = end[:, None] + 1 + torch.arange(count, device=device)
    tokens = held.corpus[behind.clamp(max=len(held.corpus) - 1)].long()
    known = (agreed > 0)[:, None] & (tokens >= 0) & (tokens < vocabulary)
    return torch.where(known, tokens, 0), agreed
