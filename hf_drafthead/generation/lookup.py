"""Guesses copied from the text itself: what followed the last tokens of a row most often where they occurred before.

Prompt lookup (`prompt_lookup_num_tokens` of transformers) checks one such copy alone, for one row. Here the places
where the last token occurred are looked at, those first where the most tokens before it agree too. What followed there
forms a small tree, in which a node is worth as much as it is likely: by the share of the places that lead to it, and by
how many tokens agree there (SuffixDecoding, arXiv 2411.04975, counts in the same way). Beside the heads' guesses the
likelier nodes of both stand in one tree. The number of nodes stays the same, and nothing waits for the device.

    the text     d e f  m a i n ... d e f  m a x ... d e f        "d e f" occurred twice
    the copies   m ── a ─┬─ i ── n                                 which hang below the root "f"
                         └─ x

Other texts, which the user names or which were answered before, are a second place to copy from (`TextIndex`). They
lie in one tensor of fixed size. For 2 and 4 tokens a table tells from a hash where these last ended, and another from
each such place where they ended before. The host fills all of it between steps; a step only reads it, at a fixed number
of places:

    the row      ... d e f                 hash(e f) -> 7
    the texts    a b . x y d e f m a i n . n e f       at 7 ends "e f", behind it stands the copy "m a i n"

Shapes: B rows, W width of the sequences, L copied tokens, K places, M nodes that were guessed (root included), N nodes
of a step, C tokens of the texts, S hashes, G tables, X n-grams.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from hf_drafthead.bases.generators import new_lock
from hf_drafthead.generation.tree import LookupTree

SCANNED = 3  # last tokens that every place of a row is compared with; with more only those that are taken
KEPT = 16  # places of which continuations are counted
GRAMS = (4, 2)  # tokens that are looked up in other texts
LINKS = 8  # places that are followed for each of them
LONGEST_GRAM = max(GRAMS)
BEHIND = -1  # behind each text, where no token is
ANSWERS = 1 << 20  # tokens of what was answered that are kept beside named texts, in 28 bytes each
LEAST_CAPACITY = 1024  # tokens of an index; powers of two, so that calls with other texts share programs
MULTIPLIER = 1_000_003  # of hashes; times the largest table it stays far below 2**63
WEIGHT = 4.0  # of a place, for each token more that agrees there
# The odds that a copy is right where a tokens agree, measured: ODDS * a ** POWER, up to the longest match.
ODDS, POWER = 0.37, 1.75
DESERVED = 0.5  # tokens that a step of copies alone must be expected to gain, else a CPU forwards the root alone


class Places(NamedTuple):
    """Where a row's last tokens occurred before: what followed (B, K, L), -1 from where that is no token to guess; and
    how many of the last tokens agree there (B, K), 0 where there is no such place.
    """

    tokens: torch.Tensor
    agreed: torch.Tensor


class Copies(NamedTuple):
    """What the text itself suggests, as a tree below the root, which is node 0; parents come before their children.

    tokens, parents, depths: (B, L + 1); value: (B, L + 1) log-probability of the path to a node, -inf for no node.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    value: torch.Tensor


def places_in_row(
    sequences: torch.Tensor, lengths: torch.Tensor, count: int, longest_match: int, vocabulary: int
) -> Places:
    """Where the last token of each row occurred before: those places where the most tokens agree, then the latest.

    A copy that reaches the end of the text goes on with its own beginning, as a text that repeats itself does.

    Of sequences (B, W), in which the first `lengths` (B,) tokens count, L as `count`; `longest_match` tokens are
    compared at most. A row may hold other ids than the base's, such as placeholders, and these are not guessed.

    >>> text = torch.tensor([[5, 6, 7, 8, 9, 5, 6, 0], [1, 2, 3, 4, 5, 6, 7, 0]])
    >>> tokens, agreed = places_in_row(text, torch.tensor([7, 7]), count=4, longest_match=3, vocabulary=10)
    >>> tokens[0, 0], agreed[:, 0]
    (tensor([7, 8, 9, 5]), tensor([2, 0]))
    """
    width, device = sequences.shape[1], sequences.device
    place = torch.arange(width, device=device)
    last = lengths[:, None] - 1  # (B, 1) of the newest token
    agree = torch.ones_like(sequences, dtype=torch.bool)
    alike = torch.zeros_like(sequences)  # (B, W) how many of the last tokens agree with those up to this place
    for back in range(min(longest_match, SCANNED, width)):
        wanted = sequences.gather(1, (last - back).clamp(min=0))
        same = (sequences[:, : width - back] == wanted) & (back <= last)
        agree = agree & F.pad(same, (back, 0), value=False)
        alike = alike + agree
    value = torch.where((alike > 0) & (place < last), alike * width + place, -1)
    best = F.pad(value, (0, KEPT), value=-1).topk(KEPT).values  # (B, K)
    end = torch.where(best >= 0, best % width, -1)
    before = torch.arange(min(longest_match, width), device=device)
    newest = torch.where(before <= last, sequences.gather(1, (last - before).clamp(min=0)), BEHIND)
    period = (last - end).clamp(min=1)[..., None]
    behind = end[..., None] + 1 + torch.arange(count, device=device) % period
    tokens = _at(sequences, behind)
    return Places(torch.where(tokens < vocabulary, tokens, BEHIND), _agreed(sequences, end, newest))


def _at(texts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The tokens at places (B, K, X) of each row's text (B, W), or of one for all (C,)."""
    places = places.clamp(0, texts.shape[-1] - 1)
    return texts[places] if texts.dim() == 1 else texts.gather(1, places.flatten(1)).view(places.shape)


def _agreed(texts: torch.Tensor, end: torch.Tensor, newest: torch.Tensor) -> torch.Tensor:
    """How many tokens up to places (B, K) are the newest of each row (B, X), the last of these first; (B, K)."""
    at = end[..., None] - torch.arange(newest.shape[1], device=end.device)
    same = (_at(texts, at) == newest[:, None]) & (at >= 0)
    return same.long().cumprod(2).sum(2)


def most_frequent(places: Places) -> Copies:
    """The tree of what followed, cut to the L likeliest nodes."""
    agreed, order = places.agreed.sort(dim=1, descending=True, stable=True)
    agreed, order = agreed[:, :KEPT], order[:, :KEPT]
    tokens = places.tokens.take_along_dim(order[..., None], dim=1)
    (rows, kept, count), device = tokens.shape, tokens.device
    weight = torch.where(agreed > 0, WEIGHT ** agreed.clamp(max=8), 0.0)  # powers of two, whose sums are exact
    alike = (tokens[:, :, None] == tokens[:, None]).long().cumprod(3)  # (B, K, K, L) whether two begin alike
    share = (alike * weight[:, None, :, None]).sum(2) / weight.sum(1).clamp(min=1.0)[:, None, None]  # (B, K, L)
    first = alike.argmax(2)  # (B, K, L) the place that stands for all that begin like this one
    depth, number = torch.arange(count, device=device), torch.arange(kept, device=device)
    odds = math.log(ODDS) + POWER * (agreed.clamp(min=1)[..., None] + depth).log()
    value = share.log() + F.logsigmoid(odds).cumsum(2)
    is_node = (first == number[:, None]) & ((tokens >= 0).long().cumprod(2) > 0) & (agreed > 0)[..., None]
    value = torch.where(is_node, value, -torch.inf)
    parents = F.pad(1 + depth[:-1] * kept + first[:, :, :-1], (1, 0))  # the root's children first, then theirs
    of_nodes = [part.transpose(1, 2).flatten(1) for part in (tokens, parents, value)]
    tokens, parents, value = (F.pad(part, (1, 0)) for part in of_nodes)
    depths = F.pad((1 + depth).repeat_interleave(kept), (1, 0)).expand(rows, -1)
    best = value.sort(dim=1, descending=True, stable=True).indices[:, : count + 1].sort(dim=1).values
    place = torch.zeros_like(tokens).scatter(1, best, torch.arange(count + 1, device=device).expand_as(best))
    parents = place.gather(1, parents.gather(1, best))
    return Copies(tokens.gather(1, best).clamp(min=0), parents, depths.gather(1, best), value.gather(1, best))


def suggested(
    tree: LookupTree, sequences: torch.Tensor, lengths: torch.Tensor, texts: HeldTexts | None = None
) -> Copies:
    """The copies of a step, of the row's own text and of others on this device; arguments as of `places_in_row`."""
    places = places_in_row(sequences, lengths, tree.copies, tree.longest_match, tree.vocabulary)
    if texts is not None:
        others = places_in(texts, sequences, lengths, tree.copies, tree.vocabulary)
        places = Places(*(torch.cat(parts, dim=1) for parts in zip(places, others)))
    return most_frequent(places)


def matches(tree: LookupTree, sequences: torch.Tensor, lengths: torch.Tensor, texts: HeldTexts | None = None) -> bool:
    """Whether copies are expected to gain something in any row; the host waits for the answer."""
    return bool((suggested(tree, sequences, lengths, texts).value[:, 1:].exp().sum(1) >= DESERVED).any())


def accepted_copies(
    tree: LookupTree, texts: HeldTexts | None, sequences: torch.Tensor, lengths: list[int], emitted: list[list[int]]
) -> list[int]:
    """Row by row, how many of the guesses that a step accepted were copies: from the first on, until one was not.

    The copies are found again, as in the step, of sequences (B, W) with the B lengths behind it. The heads may have
    guessed the same tokens. The last one that a row has emitted was no guess.
    """
    before = [length - len(tokens) for length, tokens in zip(lengths, emitted, strict=True)]
    copies = suggested(tree, sequences, torch.tensor(before, device=sequences.device), texts)
    of_rows = zip(*(part.tolist() for part in (copies.tokens, copies.parents, copies.value)))
    counts = []
    for tokens, (copied, parents, values) in zip(emitted, of_rows):
        nodes = {pair: node for node, pair in enumerate(zip(parents, copied)) if values[node] > -math.inf}
        node = count = 0
        for token in tokens[:-1]:
            if not (node := nodes.get((node, token), 0)):
                break
            count += 1
        counts.append(count)
    return counts


def with_copies(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, value: torch.Tensor, copied: Copies, deepest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The guessed nodes and the copies together, row by row.

    Copied tokens that were guessed at the same place are not added again: what follows them hangs below the guesses.

    Of tokens, parents, depths and log-probabilities (B, M) of the guessed nodes, `deepest` levels below the root, which
    is node 0: the same of all (B, M + L), -inf of those that are no nodes of their own. Parents come before their
    children, and no node is worth more than its parent.
    """
    made, count = tokens.shape[1], copied.tokens.shape[1] - 1
    same = (copied.tokens[:, :, None] == tokens[:, None]) & (copied.depths[:, :, None] == depths[:, None])
    is_root = F.pad(torch.ones_like(same[:1, :1, :1]), (0, made - 1, 0, count))
    same = torch.where(copied.depths[:, :, None] == 0, is_root, same)  # (B, L + 1, M)
    above, of_guess = copied.parents[:, :, None].expand_as(same), parents[:, None].expand_as(same)
    for _ in range(min(deepest, count)):  # and so are all nodes above
        same = same & same.gather(1, above).gather(2, of_guess)
    again = same.any(2)
    added = torch.arange(made - 1, made + count, device=tokens.device).expand_as(again)
    number = torch.where(again, same.long().argmax(2), added)  # (B, L + 1) of each copied node among all
    value = torch.maximum(value, torch.where(same, copied.value[:, :, None], -torch.inf).amax(1))
    added_value = torch.where(again, -torch.inf, copied.value)[:, 1:]
    tokens, depths = (
        torch.cat([guessed, copies[:, 1:]], dim=1)
        for guessed, copies in ((tokens, copied.tokens), (depths, copied.depths))
    )
    parents = torch.cat([parents, number.gather(1, copied.parents)[:, 1:]], dim=1)
    return tokens, parents, depths, torch.cat([value, added_value], dim=1)


class HeldTexts(NamedTuple):
    """The texts of an index on one device: tokens (C,), `BEHIND` behind each text; of each hash of so many tokens the
    place of the last of these (G, S); where tokens of the same hash ended before (G, C); -1 where there is none.
    """

    corpus: torch.Tensor
    places: torch.Tensor
    earlier: torch.Tensor


class TextIndex:
    """Texts to copy guesses from, and where their n-grams last occurred.

    A step looks up the hashes of each row's last 4 and 2 tokens, compares the texts there with the row, and takes what
    follows. That costs the same however long the texts are, and nothing waits for the host. All memory is taken at
    once: 4 bytes for each token, and 24 for its n-grams. Any thread may `put` further texts, also while others decode:
    what is read is a guess.

    Args:
        texts: token ids of each. They stay.
        capacity: tokens to hold, with one more for each text; beyond the first `texts` further ones take the place of
            the oldest. Default: those of `texts`, rounded up to a power of two.

    Raises:
        ValueError: the texts do not fit.

    >>> index = TextIndex([[5, 6, 7, 8, 9]])
    >>> text = torch.tensor([[1, 6, 7, 0], [1, 2, 3, 0]])
    >>> tokens, agreed = places_in(index.on(text.device), text, torch.tensor([3, 3]), count=2, vocabulary=10)
    >>> tokens[0, -8], agreed[:, -8]
    (tensor([8, 9]), tensor([2, 0]))
    """

    @torch.inference_mode(False)
    def __init__(self, texts: Iterable[Sequence[int]] = (), capacity: int | None = None):
        texts = [ids_of(text) for text in texts]
        needed = sum(len(text) + 1 for text in texts)  # one behind each
        if capacity is None:
            capacity = max(1 << (needed - 1).bit_length(), LEAST_CAPACITY) if needed else LEAST_CAPACITY
        if needed > capacity:
            raise ValueError(
                f"the texts have {needed:,} tokens with one behind each, and the index holds {capacity:,}: give fewer, "
                "or a larger capacity."
            )
        self.capacity, self.size = capacity, 2 * capacity + 1
        corpus = torch.full((capacity,), BEHIND, dtype=torch.int32)
        places = torch.full((len(GRAMS), self.size), -1, dtype=torch.int32)
        self.host = HeldTexts(corpus, places, torch.full((len(GRAMS), capacity), -1, dtype=torch.int32))
        self.held: dict[torch.device, HeldTexts] = {corpus.device: self.host}
        self.lock = new_lock()
        self.first = self.next = 0  # where texts begin that may be replaced, and where the next one is put
        for text in texts:
            self.put(text)
        self.first = self.next

    @classmethod
    def of(cls, texts: Any, tokenizer: Any = None, more: int = 0) -> TextIndex | None:
        """The index that a `lookup_texts` argument means: one, or a list of strings and token ids; None for none. A new
        one holds so many tokens `more`, and is made also without texts then."""
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
            tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else ids_of(text)
            for text in texts
        ]
        return cls(ids, sum(len(text) + 1 for text in ids) + more if more else None)

    def on(self, device: torch.device) -> HeldTexts:
        """The texts on a device, where later ones will be put as well."""
        with self.lock, torch.inference_mode(False):
            if device not in self.held:
                self.held[device] = HeldTexts(*(part.to(device) for part in self.host))
            return self.held[device]

    def put(self, text: Sequence[int]) -> None:
        """Hold a further text in place of the oldest ones that may be replaced; of a long one the end."""
        room = self.capacity - self.first - 1  # one behind it
        text = ids_of(text)[-room:] if room > 0 else []
        if len(text) <= min(GRAMS):
            return
        with self.lock, torch.no_grad(), torch.inference_mode(False):
            tokens = torch.tensor([*text, BEHIND], dtype=torch.int32)
            if self.next + len(tokens) > self.capacity:
                self.next = self.first
            start, self.next = self.next, self.next + len(tokens)
            for texts in self.held.values():
                texts.corpus[start : self.next] = tokens.to(texts.corpus.device)
            for number, length in enumerate(GRAMS):
                if len(text) > length:
                    self._note(number, tokens[:-2].long().unfold(0, length, 1), start + length - 1)

    def _note(self, number: int, grams: torch.Tensor, first: int) -> None:
        """Note where n-grams (X, n) end, of which the first ends at `first`; of equal hashes the last, and the others.

        Hashes of texts that stay are left to these, which would be forgotten after a while.
        """
        hashes, order = hash_of(grams, self.size).sort(stable=True)
        ends, before = (first + order).int(), self.host.places[number][hashes]
        again = hashes[1:] == hashes[:-1]
        earlier = torch.cat([before[:1], torch.where(again, ends[:-1], before[1:])])
        free = (before < 0) | (before >= self.first)
        last = torch.cat([~again, torch.ones(1, dtype=torch.bool)]) & free
        for texts in self.held.values():
            device = texts.places.device
            texts.earlier[number].index_copy_(0, ends[free].long().to(device), earlier[free].to(device))
            texts.places[number].index_copy_(0, hashes[last].to(device), ends[last].to(device))


def ids_of(text: Any, what: str = "a text of lookup_texts", least: int = 0) -> list[int]:
    """Token ids as a list; a TypeError, in one line, where they are none."""
    try:
        ids = text.flatten().tolist() if getattr(text, "ndim", 0) else [*text]
        if any(isinstance(token, bool) or not least <= operator.index(token) < 1 << 31 for token in ids):
            raise TypeError
    except TypeError:
        shown = " ".join(reprlib.repr(text).split())
        raise TypeError(f"{what} is {shown}: expected a list of token ids.") from None
    return [*map(int, ids)]


def hash_of(grams: torch.Tensor, size: int) -> torch.Tensor:
    """(X,) numbers below `size` of n-grams (X, n)."""
    value = grams[:, 0] % size
    for place in range(1, grams.shape[1]):
        value = (value * MULTIPLIER + grams[:, place]) % size
    return value


def places_in(texts: HeldTexts, sequences: torch.Tensor, lengths: torch.Tensor, count: int, vocabulary: int) -> Places:
    """Where the last tokens of each row, two at least, occur in these texts; arguments as of `places_in_row`."""
    device, size = sequences.device, texts.places.shape[1]
    back, last = torch.arange(2 * LONGEST_GRAM, device=device), lengths[:, None] - 1
    newest = torch.where(back <= last, sequences.gather(1, (last - back).clamp(min=0)), 2 * BEHIND)
    found = []
    for number, length in enumerate(GRAMS):
        place = texts.places[number][hash_of(newest[:, :length].flip(1), size)].long()
        for _ in range(LINKS):
            found.append(place)
            place = torch.where(place < 0, place, texts.earlier[number][place.clamp(min=0)])
    end = torch.stack(found, dim=1)  # (B, K)
    again = (end[:, :, None] == end[:, None]).tril(-1).any(2)  # a place in both tables, or one that was written over
    agreed = _agreed(texts.corpus, end, newest)
    tokens = _at(texts.corpus, end[..., None] + 1 + torch.arange(count, device=device)).long()
    return Places(
        torch.where(tokens < vocabulary, tokens, BEHIND), torch.where(again | (agreed < min(GRAMS)), 0, agreed)
    )
