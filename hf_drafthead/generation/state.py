"""What the stages of a step hand on, what a batch knows between two steps, and what it knows of each call in it.

Shapes: B rows, N nodes (root included), D nodes on the longest path, V vocabulary, F*H features, W width of the
sequences, E end-of-sequence tokens, S steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_drafthead.bases.releases import BaseStreamer, GenerateDecoderOnlyOutput
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.noise import NOTHING_DRAWN

FAR = 1 << 40  # where nothing limits a length
# What `torch.multinomial` says, with which the base samples.
NOT_A_DISTRIBUTION = "probability tensor contains either `inf`, `nan` or element < 0"


@dataclass
class DraftHeadGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: the base's own fields and one more.

    accepted_lengths: (B, S) tokens emitted in each step, 0 after a row's own end; a row's sum + 1 is the number of
    its new tokens up to its own end. None where the base decoded by itself.
    """

    accepted_lengths: torch.Tensor | None = None


class Guesses(NamedTuple):
    """What a drafter says about the children of a tree level's nodes.

    logits: (B, n, V') scores over the draft vocabulary, or (B, 1, V') if they are the same for all nodes; to_base:
    (V',) the base's token id of each draft token, or None where both vocabularies are one; inside: (B, n or 1, 1) the
    log-probability that the token is one of those with a score, None for certain; sure: (B, n or 1, 1) how likely each
    node's best guess is accepted, as logits, where heads foretell it.
    """

    logits: torch.Tensor
    to_base: torch.Tensor | None = None
    inside: torch.Tensor | None = None
    sure: torch.Tensor | None = None

    def top(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The k best guesses of every node: base token ids and the drafter's scores, (B, n or 1, k) each, best first.
        With a tilt (B, V) of `Rules.tilt`, which is added to the scores, their order is that of q / E."""
        scores, tokens = (self.logits if tilt is None else self.logits + self._tilt(tilt)).topk(k)
        return (tokens if self.to_base is None else self.to_base.to(tokens.device)[tokens]), scores

    def likeliest(self, k: int, tilt: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `top`, with log-probabilities of the scores, tilted ones too; NaN is taken for impossible."""
        guesses = self if tilt is None else self._replace(logits=self.logits + self._tilt(tilt))
        tokens, scores = guesses.top(k)
        exact = torch.promote_types(scores.dtype, torch.float32)
        chances = scores.to(exact) - guesses.logits.to(exact).logsumexp(-1, keepdim=True)
        chances = chances if self.inside is None else chances + self.inside
        if guesses.sure is not None:  # of the best one; others keep their share of it, or of the rest, if that is less
            sure, best = guesses.sure.to(exact), chances[..., :1]
            rest = chances - (-best.exp()).log1p() + nn.functional.logsigmoid(-sure)
            chances = chances - best + nn.functional.logsigmoid(sure)
            chances = torch.cat([chances[..., :1], torch.minimum(chances, rest)[..., 1:]], dim=-1)
        return tokens, chances.where(~chances.isnan(), -torch.inf).clamp(max=0.0)  # a sum may be rounded down

    def _tilt(self, tilt: torch.Tensor) -> torch.Tensor:
        """A tilt (B, V) over the draft vocabulary (B, 1, V')."""
        tilt = tilt.to(self.logits.device)
        return (tilt if self.to_base is None else tilt[:, self.to_base.to(tilt.device)])[:, None]

    def over_base(self, vocabulary: int) -> torch.Tensor:
        """Scores over the base's vocabulary (B, n or 1, V), -inf where a token is never guessed."""
        if self.to_base is None:
            return self.logits
        scores = self.logits.new_full((*self.logits.shape[:-1], vocabulary), -torch.inf)
        return scores.index_copy(-1, self.to_base.to(scores.device), self.logits)


def last_valid(previous: torch.Tensor, new: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Each row's last valid position of `new` (B, A, H), of `lengths` (B,); `previous` (B, H) where there is none."""
    place = lengths.to(previous.device)[:, None, None].expand(-1, 1, previous.shape[1])
    return torch.cat([previous.unsqueeze(1), new.to(previous)], dim=1).gather(1, place)[:, 0]


def guessed_among(model: Any) -> tuple[int | None, int]:
    """How deep heads guess, None where there is no limit, and among how many tokens: all of the base's, or fewer."""
    tokens, config = model.drafter.draft_tokens, model.base.config.get_text_config(decoder=True)
    return model.drafter.max_depth, config.vocab_size if tokens is None else len(tokens)


class Candidates(NamedTuple):
    """The nodes of a step: tokens (B, N), node 0 the root, and how they hang together."""

    tokens: torch.Tensor
    topology: Topology


class Verified(NamedTuple):
    """The base's answer at every node: logits (B, N, V) and features (B, N, F*H)."""

    logits: torch.Tensor
    features: torch.Tensor


def are_numbers(logits: torch.Tensor) -> torch.Tensor:
    """(B, N) whether there is no NaN among the logits (B, N, V) of a node; of the root alone NaN is the base's own."""
    if logits.shape[1] == 1:
        return torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    return ~logits.amax(-1).isnan()


RowWalk = tuple[int, int, int | None, list[int], list[int]]


class Walk(NamedTuple):
    """What a step keeps, in one tensor (B, 4 + 2 D), which the host reads at once.

    counts (B,) how many of the D nodes are kept, 0 in rows that stand still; observed (B,) how many of those the
    drafter is shown, not the padding behind a row's end; ends (B,) tokens at which a row ended, 0 where it has not;
    valid (B,) 0 where the base's probabilities are not numbers; tokens (B, D) the base's choice at each node, which is
    what is emitted, the last one being the next root, and padding behind them; nodes (B, D) from the root down, those
    whose keys and values become past.
    """

    packed: torch.Tensor

    @classmethod
    def of(cls, counts, observed, ends, valid, tokens, nodes) -> Walk:
        """Of tensors on the device."""
        facts = torch.stack([counts, observed, ends, valid.long()], dim=1)
        return cls(torch.cat([facts, tokens, nodes], dim=1))  # type: ignore[call-arg]

    @classmethod
    def of_rows(cls, rows: list[RowWalk], depth: int | None, padding: int, device: torch.device) -> Walk:
        """Of each row's count, how many are observed, end, tokens and nodes; D is the longest where `depth` is None."""
        depth = depth or max(1, *(row[0] for row in rows))
        packed = [
            [count, observed, end or 0, 1, *tokens, *[padding] * (depth - count), *nodes, *[0] * (depth - count)]
            for count, observed, end, tokens, nodes in rows
        ]
        return cls(torch.tensor(packed, device=device))  # type: ignore[call-arg]

    counts = property(lambda self: self.packed[:, 0])  # type: ignore[misc]
    observed = property(lambda self: self.packed[:, 1])  # type: ignore[misc]
    ends = property(lambda self: self.packed[:, 2])  # type: ignore[misc]
    valid = property(lambda self: self.packed[:, 3])  # type: ignore[misc]
    tokens = property(lambda self: self.packed[:, 4:].chunk(2, dim=1)[0])  # type: ignore[misc]
    nodes = property(lambda self: self.packed[:, 4:].chunk(2, dim=1)[1])  # type: ignore[misc]


class Limits(NamedTuple):
    """Where rows must stop, as tensors, so that a captured step serves every call.

    max_length: (B,) the longest length of each row; eos: (B, 1, E) tokens that end it; last_position: (B, 1) the last
    past position whose node the base may be asked about; padding: (B, 1) token behind a row's end; pads: (B, 1) whether
    a row that has ended emits padding from there on, as long as others go on.
    """

    max_length: torch.Tensor
    eos: torch.Tensor
    last_position: torch.Tensor
    padding: torch.Tensor
    pads: torch.Tensor


class Rows(NamedTuple):
    """What a step starts from and leaves behind, on the device where the base computes.

    sequences: (B, W) token ids, with padding behind each row's length; lengths: (B,) tokens of each row so far; ends:
    (B,) at how many of them it ended, 0 where it has not; position_shift: (B, 1) position id minus past position;
    visible: (B, S) False where past slots hold padding, or None; draft_state: of tensors and caches; cache: the base's,
    which holds all tokens but each row's last. Caches and sequences are written in place.
    """

    sequences: torch.Tensor
    lengths: torch.Tensor
    ends: torch.Tensor
    position_shift: torch.Tensor
    visible: torch.Tensor | None
    draft_state: Any
    cache: SlotCache

    @property
    def caches(self) -> list[SlotCache]:
        """The base's cache, and those of the drafter."""
        return [self.cache, *(leaf for leaf in tree_leaves(self.draft_state) if isinstance(leaf, SlotCache))]


@dataclass(frozen=True)
class StepRecord:
    """One step as the host sees it, row by row; `generate(on_step=...)` is given one after the prefill and every step.

    step: 0 is the prefill, which emits one token and has no nodes; tokens: emitted; nodes: walked, node 0 the root;
    counts: emitted up to the row's own end; drafted: N; seconds: of each stage (`prefill`, or `draft`, `verify`,
    `walk`, `commit` of a step that is not captured) and of the whole `step`; copied: where copies from the text stand
    in the tree, called before the next step it says how many of each row's accepted guesses they were, see
    `lookup.accepted_copies`; plan: of the call, a `DraftPlan` that prints as what was chosen and why, of the prefill.
    """

    step: int
    tokens: list[list[int]]
    nodes: list[list[int]]
    counts: list[int]
    drafted: int
    seconds: dict[str, float]
    copied: Callable[[], list[int]] | None = None
    plan: Any = None


# What steps of the root alone have verified: features (B, 1, F*H), tokens (B, 1), counts (B,).
Pending = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@dataclass
class DecodingState:
    """All that a batch knows between two steps; nothing of it lives on a module.

    last_position: B of them, of the limits, as the host knows them; past_shift: past positions minus tokens (not 0
    where the call began with a cache or embeddings); lengths, ends: what the host knows of each row, its tokens and at
    how many of them it ended, or None; counted: tokens of the last step, row by row, up to the row's own end; pending:
    what the drafter has not observed yet; stuck: whether a row emitted nothing in the last step, since the base's
    logits were no numbers; lost: rows of the last step in which the base was to sample from what is no distribution;
    certain: (B, C) what comes for certain in a step whose tree has room for that, -1 behind it; pays: what chooses
    among the nodes of a step while they are drafted, if anything does.
    """

    rows: Rows
    limits: Limits
    last_position: list[int]
    past_shift: int
    lengths: list[int]
    ends: list[int | None]
    counted: list[int] = field(default_factory=list)
    walked: list[list[int]] = field(default_factory=list)
    pending: Pending = field(default_factory=list)
    stuck: bool = False
    lost: list[int] = field(default_factory=list)
    certain: torch.Tensor | None = None
    pays: Any = None
    steps: int = 0

    def __post_init__(self) -> None:
        self.caches = self.rows.caches  # the base's, and those of the drafter

    def reach(self) -> list[int]:
        """Of each row, depth of the deepest nodes at positions that the base can be asked about."""
        pasts = (length - 1 + self.past_shift for length in self.lengths)
        return [max(last - past, 0) for last, past in zip(self.last_position, pasts)]

    def keep(self, rows: Rows, pending: Pending) -> None:
        """Go on from here: the only place where `rows` are replaced."""
        if rows.cache is not self.rows.cache:
            self.caches = rows.caches
        self.rows, self.pending = rows, pending

    def note(self, packed: torch.Tensor, ready: Any, drafted: int, seconds: dict[str, float]) -> StepRecord:
        """Read the walk of a step, which a GPU has done at an event, and remember it. Here the host waits."""
        self.counted, self.walked, self.lost, tokens = [], [], [], []
        if ready is not None:  # wait for this step, and for none that was launched after it
            with torch.cuda.stream(aside := torch.cuda.Stream(packed.device)):
                aside.wait_event(ready)
                packed = packed.cpu()
        for row, (count, _, end, valid, *walk) in enumerate(packed.tolist()):
            if not valid:
                self.lost.append(row)
            before, had_ended = self.lengths[row], self.ends[row] is not None
            self.lengths[row], self.ends[row] = before + count, end or None
            self.counted.append(0 if had_ended else (end or before + count) - before)
            tokens.append(walk[:count])
            self.walked.append(walk[len(walk) // 2 :][:count])
        self.steps += 1
        self.stuck = any(not walked and end is None for walked, end in zip(tokens, self.ends))
        return StepRecord(self.steps, tokens, self.walked, self.counted, drafted, seconds)

    def view(self, rows: range) -> DecodingState:
        """Some rows as the rules of their own call see them: tokens and lengths, and no cache of their own."""
        if len(rows) == len(self.lengths):
            return self
        part = slice(rows.start, rows.stop)
        tensors = {name: getattr(self.rows, name)[part] for name in ("sequences", "lengths", "ends")}
        on_host = {name: getattr(self, name)[part] for name in ("last_position", "lengths", "ends")}
        return replace(self, rows=self.rows._replace(**tensors), **on_host)


def running(lengths: list[int], ends: list[int | None], pads: bool) -> list[int]:
    """Rows that still emit. Without padding a row that has ended goes on until the last one ends."""
    if pads:
        return [row for row, end in enumerate(ends) if end is None]
    horizon = max(length + 1 if end is None else end for length, end in zip(lengths, ends))
    return [row for row, end in enumerate(ends) if end is None or lengths[row] < horizon]


class Stream:
    """Gives a streamer the prompt and every committed token, one put per position as in transformers."""

    def __init__(self, streamer: BaseStreamer, rules: Any):
        self.streamer, self.position, self.rules = streamer, 0, rules
        self.random = rules.random if rules.streams else NOTHING_DRAWN

    def show(self, tokens: torch.Tensor) -> None:
        """Put the prompt (B, P), or the next position (B,)."""
        with self.random.lent():
            self.streamer.put(tokens.cpu())
        self.position += tokens.shape[1] if tokens.dim() > 1 else 1

    def end(self) -> None:
        """Say that there is no more."""
        with self.random.lent():
            self.streamer.end()

    def committed(self, state: DecodingState) -> None:
        """Put every position that all rows of a state have reached and that was not shown yet."""
        still = [length for length, end in zip(state.lengths, state.ends) if end is None or not self.rules.pads]
        ready = min(still, default=max(state.lengths))
        if None not in state.ends:
            ready = min(ready, max(filter(None, state.ends)))
        while self.position < ready:
            self.show(state.rows.sequences[:, self.position])


@dataclass(eq=False)
class Member:
    """One call in a batch.

    state: of its rows alone, until it joins and while it is set aside; rows: where they are in the batch; reader: how
    its steps run the base; given: the ordinary cache of the call and the positions that it held; counted: tokens of
    each step, row by row, up to the row's own end; error: what has ended it; noise: of the coming positions, between a
    draft and its walk; request: in a manager; weights: of the base that read the prompt, see `Batch.weights`.
    """

    rules: Any
    stream: Stream | None
    state: DecodingState | None
    rows: range
    reader: Any
    given: tuple[Any, int]
    plan: Any
    prefilled_in: float = 0.0
    counted: list[list[int]] = field(default_factory=list)
    error: BaseException | None = None
    noise: torch.Tensor | None = field(default=None, repr=False)
    request: Any = None
    weights: Any = None

    def take(self, state: DecodingState, record: StepRecord) -> None:
        """Take note of a step of the batch, and show what it has given; what a streamer raises ends this call alone."""
        try:
            if any(row in self.rows for row in state.lost):
                raise RuntimeError(NOT_A_DISTRIBUTION)  # as the base
            self.counted.append(record.counts[self.rows.start : self.rows.stop])
            if self.error is None and self.stream is not None:
                self.stream.committed(state.view(self.rows))
        except BaseException as error:
            self.error = self.error or error

    def has_ended(self, state: DecodingState) -> bool:
        """Whether none of its rows emits anything more."""
        part = slice(self.rows.start, self.rows.stop)
        return self.error is not None or not running(state.lengths[part], state.ends[part], self.rules.pads)
