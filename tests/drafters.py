"""Drafters that know the text: always right, always wrong, right now and then; and a model that holds any drafter.

They know it from observing the base beforehand: the tokens of every row, and the base's own hidden state at each of
them. So they also check what they are given: a hidden state that is not the base's own at the next position, or a
token that is not the one that follows it, fails the test at once ("remembers right").

Shapes: B rows, A newly verified positions, n nodes of a level, V vocabulary, H hidden, T tokens of a row.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hf_drafthead.generation import DraftHeadGenerationMixin, Guesses

SURE = 1e4  # between the logits of two ranks: more than any noise of sampling tilts them
# Rank at which the right token for position `position` of row `row` is guessed; None = not at all.
Guess = Callable[[int, int], int | None]


def right(row: int, position: int) -> int | None:
    """The right token is always the best guess."""
    return 0


def wrong(row: int, position: int) -> int | None:
    """The right token is never guessed."""
    return None


def at_rank(rank: int) -> Guess:
    """The right token is always guessed at this rank."""
    return lambda row, position: rank


def half_right(row: int, position: int) -> int | None:
    """Right at scattered places, sometimes at the second or third rank; different from row to row."""
    dice = (position * 2654435761 + row * 40503 + (position * row) % 7 * 97) >> 4
    return (0, None, 1, 0, 2, 0, 0, None)[dice % 8]


@dataclass
class Knowledge:
    """The state of one call.

    at: position last observed in each row, None before the first; seen: all positions observed, in order; level: of
    the tree; followed (B, n): whether a node of the last level lies on the text.
    """

    capacity: int
    at: list[int | None]
    seen: list[list[int]]
    level: int = 0
    followed: torch.Tensor | None = None
    steps: int = 0


@dataclass
class Oracle:
    """A drafter that was told each row's text.

    Args:
        base: whose hidden states it knows.
        texts: the tokens of each row without padding, up to the row's own end.
        guess: how good it is.
        keeps_history: whether it asks for every verified position, or of the prompt for the last alone.
        per_node: give every node its own logits, and none worth having to a node that is off the text; else all nodes
            of a level share one guess.
        max_depth: its number of heads.
        tolerance: how far a hidden state may be from the base's.
    """

    base: torch.nn.Module
    texts: Sequence[Sequence[int]]
    guess: Guess = right
    keeps_history: bool = False
    per_node: bool = False
    max_depth: int | None = None
    draft_tokens: torch.Tensor | None = None
    copies: int | None = None
    tolerance: float = 1e-9
    reads: tuple[int, ...] = (-1,)
    states: list[Knowledge] = field(default_factory=list)
    training: bool = False

    def __post_init__(self):
        self.vocabulary = self.base.config.vocab_size
        with torch.no_grad():
            self.features = [hidden_states(self.base, text[:-1]) for text in self.texts]  # the last token is not read

    def prepare(self) -> None:
        """Nothing is found out by running."""

    def start(self, batch_size: int, capacity: int) -> Knowledge:
        assert batch_size == len(self.texts)
        self.states.append(Knowledge(capacity, [None] * batch_size, [[] for _ in range(batch_size)]))
        return self.states[-1]

    def observe(self, state: Knowledge, features, tokens, lengths) -> Knowledge:
        assert features.shape[:2] == tokens.shape and lengths.shape == tokens.shape[:1]
        assert lengths.dtype == tokens.dtype == torch.long
        for row, length in enumerate(lengths.tolist()):
            assert 0 <= length <= tokens.shape[1]
            for hidden, token in zip(features[row, :length], tokens[row, :length].tolist()):
                self._check(state, row, hidden, token)
            assert len(self.texts[row]) <= state.capacity
        state.level, state.followed, state.steps = 0, None, state.steps + 1
        return state

    def _check(self, state: Knowledge, row: int, hidden: torch.Tensor, token: int) -> None:
        text, before = self.texts[row], state.at[row]
        distances = (self.features[row] - hidden).abs().amax(-1)
        first = 0 if before is None else before + 1
        assert first < len(text) - 1, f"row {row} goes on behind its end"
        position = first
        if before is None:
            # a text that repeats one token from its start has one hidden state at all positions
            near = [at for at in range(first, len(text) - 1) if distances[at] <= self.tolerance]
            nearest = first + int(distances[first:].argmin())
            position = next((at for at in near if text[at + 1] == token), nearest)
        assert distances[position] <= self.tolerance, f"row {row}: no hidden state of position {position}"
        assert text[position + 1] == token, f"row {row}: {token} does not follow position {position}"
        state.at[row] = position
        state.seen[row].append(position)

    def expand(self, state: Knowledge, tokens, parents):
        assert tokens.shape == parents.shape
        assert self.max_depth is None or state.level < self.max_depth
        rows, nodes = tokens.shape
        if state.level == 0:
            assert nodes == 1
            above = torch.ones(rows, 1, dtype=torch.bool)
        else:
            above = state.followed.gather(1, parents)
        here = torch.tensor([self._token(row, at + 1 + state.level) for row, at in enumerate(state.at)])
        if state.level == 0:
            on = [at + 2 < len(text) for at, text in zip(state.at, self.texts)]  # below an end there is padding
            assert torch.equal(tokens[on, 0], here[on]), "the root is not the token that follows what was observed"
        state.followed = above & (tokens == here[:, None])
        state.level += 1
        logits = torch.stack([self._guesses(row, at + 1 + state.level) for row, at in enumerate(state.at)])[:, None]
        if not self.per_node:
            return state, Guesses(logits)
        useless = -torch.arange(self.vocabulary, dtype=logits.dtype).expand(rows, nodes, -1)
        return state, Guesses(torch.where(state.followed[..., None], logits, useless))

    def _token(self, row: int, position: int) -> int:
        return self.texts[row][position] if position < len(self.texts[row]) else -1

    def _guesses(self, row: int, position: int) -> torch.Tensor:
        """(V,) logits of the token at a position of the text."""
        token = self._token(row, position)
        others = [(other + 7 * position) % self.vocabulary for other in range(self.vocabulary)]
        if token >= 0:
            others.remove(token)
            rank = self.guess(row, position)
            others.insert(len(others) if rank is None else rank, token)
        logits = torch.empty(self.vocabulary, dtype=torch.float64)
        logits[others] = -SURE * torch.arange(self.vocabulary, dtype=torch.float64)
        return logits


class Drafted(DraftHeadGenerationMixin):
    """A base and any drafter: the least that `generate` needs."""

    def __init__(self, base, drafter):
        self.base = base
        self.drafter = drafter
        self.config = base.config
        self.generation_config = copy.deepcopy(base.generation_config)
        self.generation_config._from_model_config = False  # or settings of our own would not survive being loaded


def hidden_states(base: torch.nn.Module, text: Sequence[int]) -> torch.Tensor:
    """(T, H) the base's hidden states over a text, after the final norm."""
    return base.get_decoder()(torch.tensor([list(text)]), use_cache=False).last_hidden_state[0]
