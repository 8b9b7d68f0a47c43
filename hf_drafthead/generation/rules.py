"""What one call asks of every emitted token: processors, the choice, the stopping criteria.

The base applies its processors and criteria once per position, to all rows at once. Rows that advance at their own pace
cannot always be shown that way. Three kinds of call follow:

- on device: processors that look at scores only, and only length and EOS criteria; all nodes can be chosen at once.
- own pace: every processor and criterion is known to treat each row by itself, or makes a view of some rows by a method
  `for_rows(rows)`; rows of one length are shown together, node by node.
- lockstep: anything else. All rows stay at one length, and each processor and criterion sees exactly the calls that the
  base would make, in order, so even one that keeps a state or knows its batch works. A row that has ended emits padding
  then, and the base is asked about it as of any other row. One row is always lockstep.

Shapes: B rows, N nodes, D nodes on the longest path, g rows of a group, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation.state import NOT_A_DISTRIBUTION, are_numbers

# They look at nothing but a row's scores.
SCORES_ONLY = (
    processors.TemperatureLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopHLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.SuppressTokensLogitsProcessor,
)
# They look at a row's own prefix and scores.
ROW_BY_ROW = (
    *SCORES_ONLY,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensAtBeginLogitsProcessor,
)
CRITERIA_ROW_BY_ROW = (
    criteria.MaxLengthCriteria,
    criteria.MaxTimeCriteria,
    criteria.StopStringCriteria,
    criteria.EosTokenCriteria,
)
CRITERIA_ON_DEVICE = (criteria.MaxLengthCriteria, criteria.EosTokenCriteria)


@dataclass
class Rules:
    """The processors, choice and criteria of one call, and what it asked to be told of them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    batch_size: int
    prompt_length: int
    device: torch.device  # of the caller's token ids, where processors and criteria look at them
    samples: bool
    rejects: bool = False  # samples by rejection, from noise of its own
    generator: torch.Generator | None = None  # of the call's own, in the place of the process's
    scores: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position
    logits: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position
    tape: NoiseTape | None = None

    def __post_init__(self):
        config = self.config
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        lengths = (c.max_length for c in self.criteria if isinstance(c, criteria.MaxLengthCriteria))
        self.max_length = math.ceil(shortest) if (shortest := min(lengths, default=None)) is not None else None
        # As in transformers: only then do finished rows emit padding; else they go on until all are finished.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad_token = config._pad_token_tensor.item() if self.pads else 0
        types_of = {type(criterion) for criterion in self.criteria}
        self.scores_only = all(type(processor) in SCORES_ONLY for processor in self.processors)
        self.on_device = (
            self.scores_only
            and not (self.keeps_scores or self.keeps_logits)
            and types_of.issubset(CRITERIA_ON_DEVICE)
            and self.max_length is not None
        )
        self.greedy = self.on_device and not (self.samples or self.processors)
        self.lockstep = self.batch_size == 1 or not (
            all(type(processor) in ROW_BY_ROW or hasattr(processor, "for_rows") for processor in self.processors)
            and types_of.issubset(CRITERIA_ROW_BY_ROW)
            # what the base says of padding behind the end of a row is asked for as well
            and not (self.pads and (self.keeps_scores or self.keeps_logits))
        )
        # rows that have ended go on for as long as others do, and some of them for longer
        self.overruns = not (self.pads or self.lockstep or types_of <= {criteria.MaxLengthCriteria})
        ends = [c.eos_token_id.flatten() for c in self.criteria if isinstance(c, criteria.EosTokenCriteria)]
        self.eos_tokens = sorted({token for tokens in ends for token in tokens.tolist()})
        self.draws_ahead = self.on_device or not self.lockstep
        warpers = (p for p in self.processors if isinstance(p, processors.TemperatureLogitsWarper))
        self.temperature = math.prod(warper.temperature for warper in warpers)
        if self.samples and not self.rejects:
            with GENERATOR:  # no other call begins where this one does
                self.tape = NoiseTape(self.batch_size, self.device, self.generator)
                if self.draws_ahead:
                    self.tape.park()

    @property
    def _follows(self) -> bool:
        """Whether a processor or a streamer of the user has drawn from the generator, so that this call draws there."""
        on_host = self.lockstep and (not self.on_device or self.device.type == "cpu")
        return on_host and self.tape is not None and self.tape.shared

    def close(self) -> None:
        """Leave the process's generator where the base's call would, as the call ends, also by an exception."""
        if self.tape is not None:
            self.tape.leave(self.tape.chosen)

    @contextlib.contextmanager
    def showing(self, position: int) -> Iterator[None]:
        """Meanwhile the process's generator stands where the base has it when it hands on the token at a position."""
        if self.tape is not None:
            self.tape.leave(position + 1 - self.prompt_length)
        yield
        if self.tape is not None and self.draws_ahead:
            self.tape.park()

    def choose(
        self, rows: list[int], logits: torch.Tensor, sequences: torch.Tensor, lengths: list[int]
    ) -> torch.Tensor:
        """The token (g,) that each of `rows` emits next, chosen as the base chooses it.

        Args:
            rows: g row numbers; all B of them in lockstep.
            logits: (g, V) of the base after each row's last token.
            sequences: (B, L) token ids; row b's prefix is its first `lengths[b]`.
            lengths: B of them; in lockstep all are alike.
        """
        logits = logits.to(sequences.device, torch.float32, copy=True)
        scores = self._process(rows, logits, sequences, lengths)
        if self.keeps_scores:
            self._keep(self.scores, rows, scores, lengths)
        if self.keeps_logits:
            self._keep(self.logits, rows, logits, lengths)
        if not self.samples:
            return scores.argmax(-1)
        chances = scores.softmax(-1)
        if self.tape is None:
            return torch.multinomial(chances, num_samples=1)[:, 0]
        if not chances.isfinite().all():
            raise RuntimeError(NOT_A_DISTRIBUTION)
        latest = max(lengths[row] for row in rows) - self.prompt_length
        if self.draws_ahead and not self._follows:
            noise = torch.stack([self.tape.noise(lengths[row] - self.prompt_length, chances)[row] for row in rows])
        else:
            noise = self.tape.next(latest, chances)
        self.tape.chosen = max(self.tape.chosen, latest + 1)
        return (chances / noise).argmax(-1)

    def choose_everywhere(
        self, logits: torch.Tensor, depths: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's choice (B, N) at every node, and whether logits and probabilities are numbers; if `on_device`.

        Args:
            logits: (B, N, V) of the base, see `Verified`.
            depths: (R, N) of the nodes.
            noise: (B, D, V) of the next D positions, under sampling.
        """
        scores = logits
        if self.processors:
            flat = logits.float().flatten(0, 1)
            scores = self.processors(flat.new_zeros(len(flat), 1, dtype=torch.long), flat).view(logits.shape)
        if noise is None:
            return scores.argmax(-1), are_numbers(logits)
        chances = scores.float().softmax(-1)
        at_node = noise.take_along_dim(depths.expand(noise.shape[0], -1)[..., None], dim=1)  # (B, N, V)
        return (chances / at_node).argmax(-1), chances.sum(-1).isfinite() & are_numbers(logits)

    def noise_ahead(self, lengths: list[int], moving: list[int], depth: int, vocabulary: int) -> torch.Tensor | None:
        """(B, D, V) noise with which the base will choose each row's next D tokens; None where it does not sample.

        Sampling by rejection has no such noise: this is then fresh.

        Args:
            lengths: B of them: tokens of each row.
            moving: rows that still emit; what the others get has no meaning.
            depth: D.
            vocabulary: V.
        """
        if self.rejects:
            return torch.empty(self.batch_size, depth, vocabulary, device=self.device).exponential_(1)
        tape = self.tape
        if tape is None:
            return None
        latest = max(lengths)
        if self._follows:  # what will be drawn next is not known: ones, by which no guess gains
            return torch.ones(self.batch_size, depth, vocabulary, device=self.device)
        firsts = [(lengths[row] if row in moving else latest) - self.prompt_length for row in range(len(lengths))]
        noise = tape.ahead(firsts, depth)
        tape.forget(min(firsts))
        tape.chosen = latest - self.prompt_length
        return noise

    def tilt(self, noise: torch.Tensor) -> torch.Tensor:
        """What makes the base's coming choices likely guesses: added to logits l (..., V), the order is that of q / E.

        q is the softmax of l / T, with the call's temperature T, and log(q / E) = (l - T log E) / T + constant; the
        noise is E (B, D, V), from `noise_ahead`.
        """
        return noise.log() * -self.temperature

    def probabilities(
        self,
        logits: torch.Tensor,
        tokens: torch.Tensor,
        topology: Topology,
        sequences: torch.Tensor,
        lengths: list[int],
    ) -> torch.Tensor:
        """Processed probabilities at every node, (B, N, V); for processors of ROW_BY_ROW.

        Args:
            logits, tokens, topology: (B, N, V) of the base at every node, the nodes (B, N), and how they hang together.
            sequences, lengths: as in `choose`, the root included.
        """
        scores = logits.to(sequences.device, torch.float32, copy=True)
        if self.scores_only:
            flat = scores.flatten(0, 1)
            scores = self.processors(sequences[:1, :1].expand(len(flat), 1), flat).view(logits.shape)
        else:
            for row, length in enumerate(lengths):
                kind = row % len(topology.depths)
                # nodes of one depth have prefixes of one length, which the processors can be shown together
                for depth, nodes in _by_length(range(tokens.shape[1]), topology.depths[kind].tolist()).items():
                    below_root = topology.paths[kind, nodes, 1 : depth + 1]  # (n, depth)
                    drafted = tokens[row, below_root].to(sequences.device)
                    prefixes = torch.cat([sequences[row, :length].expand(len(nodes), -1), drafted], dim=1)
                    seen = _seen_by(self.processors, [row] * len(nodes))
                    scores[row, nodes] = seen(prefixes, scores[row, nodes])
        return scores.softmax(-1).to(logits.device)

    def stops(self, rows: list[int], newest: list[int], sequences: torch.Tensor, lengths: list[int]) -> list[bool]:
        """Whether a criterion fires on each row's prefix, of which `newest` is the last token; g answers.

        Arguments as in `choose`; the sequences are not looked at in calls on device.
        """
        if self.on_device:
            assert self.max_length is not None
            return [token in self.eos_tokens or lengths[row] >= self.max_length for row, token in zip(rows, newest)]
        if self.lockstep:
            scores = tuple(self.scores) if self.keeps_scores else None
            return self.criteria(sequences[:, : max(lengths)], scores).tolist()
        answers = torch.zeros(len(rows), dtype=torch.bool)
        for length, places in _by_length(rows, lengths).items():
            answers[places] = self.criteria(sequences[[rows[place] for place in places], :length], None).cpu()
        return answers.tolist()

    def _process(self, rows, logits, sequences, lengths):
        if not self.processors:
            return logits
        if self.lockstep:
            return self.processors(sequences[:, : max(lengths)], logits)
        if self.scores_only:
            return self.processors(sequences[rows, :1], logits)
        scores = torch.empty_like(logits)
        for length, places in _by_length(rows, lengths).items():
            group = [rows[place] for place in places]
            scores[places] = _seen_by(self.processors, group)(sequences[group, :length], logits[places])
        return scores

    def _keep(self, by_position: list[torch.Tensor], rows, values, lengths) -> None:
        if self.lockstep:
            by_position.append(values)
            return
        for row, value in zip(rows, values):
            position = lengths[row] - self.prompt_length
            while len(by_position) <= position:
                by_position.append(value.new_zeros(self.batch_size, value.shape[-1]))
            by_position[position][row] = value


class NoiseTape:
    """The exponential noise of the base's sampling, position by position, drawn ahead of the base's own choices.

    `torch.multinomial(p, 1)` is `argmax(p / noise)` with noise (B, V) drawn anew at every position. The tape draws it
    from a generator of the call's own, which begins where the process's generator stands, and remembers the state
    before each position: every noise is drawn once, a row that lags can have its position's noise drawn again, and the
    process's generator can be left where the base would leave it. Positions that every row has left behind are
    forgotten.

    A call may have a generator that nobody else draws from, which then stands in the place of the process's.

    Other threads draw from the process's generator as well. While a call draws ahead of it, it stands elsewhere
    (`park`), so that nobody draws the same noise; and where somebody has moved it, it is left alone.
    """

    KEPT = 32  # positions whose noise is held; older ones are redrawn from their state

    def __init__(self, batch_size: int, device: torch.device, call_generator: torch.Generator | None = None):
        self.batch_size = batch_size
        self.process = generator_of(device) if call_generator is None else call_generator
        self.parks = call_generator is None
        self.generator = torch.Generator(self.process.device)
        self.newest = 0  # position that is drawn next
        self.chosen = 0  # positions at which a token was chosen
        self.left_at = self._stands()  # where this call has left the process's generator
        self.states: dict[int, torch.Tensor] = {0: self.left_at}  # before every position drawn, and after the last one
        self.drawn: dict[int, torch.Tensor] = {}
        self.shared = False  # whether somebody else has drawn from the process's generator meanwhile
        self._parked: torch.Tensor | None = None

    def noise(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """(B, V) noise of a position, counted from 0; `like` gives V and dtype."""
        while self.newest <= position:
            self._restore(self.states[self.newest])
            self.drawn[self.newest] = self._draw(like, self.generator)
            self.drawn.pop(self.newest - self.KEPT, None)
            self.newest += 1
            self.states[self.newest] = self._state()
        if position in self.drawn:
            return self.drawn[position]
        self._restore(self.states[position])
        return self._draw(like, self.generator)

    def ahead(self, firsts: list[int], depth: int) -> torch.Tensor:
        """(B, D, V) noise of D positions from each row's first, once that of any position was drawn."""
        like = next(reversed(self.drawn.values()))
        rows = [[self.noise(first + more, like)[row] for more in range(depth)] for row, first in enumerate(firsts)]
        return torch.stack([torch.stack(row) for row in rows])

    def next(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """As `noise`, and leaves the process's generator behind this draw, as the base does.

        Once somebody else has drawn from it the noise comes from there, as the base's.
        """
        with GENERATOR:
            if self._moved():
                return self._draw(like, self.process)
            noise = self.noise(position, like)
            self._leave_at(self.states[position + 1])
            return noise

    def forget(self, position: int) -> None:
        """No row will ask for what lies before this position."""
        for earlier in [earlier for earlier in self.states if earlier < position]:
            del self.states[earlier]

    def leave(self, positions: int) -> None:
        """Leave the process's generator, where it is parked, as it was after the first `positions` draws."""
        with GENERATOR:
            if self.left_at is self._parked and not self._moved():
                self._leave_at(self.states[positions])

    def park(self) -> None:
        """Let others that draw from the process's generator meanwhile draw other noise."""
        if not self.parks:
            return
        with GENERATOR:
            if self._parked is None:
                self.generator.manual_seed(_hash_of(self.left_at) % (1 << 62))
                self._parked = self.generator.get_state()
            if not self._moved():
                self._leave_at(self._parked)

    def _moved(self) -> bool:
        self.shared = self.shared or not torch.equal(self._stands(), self.left_at)
        return self.shared

    def _stands(self) -> torch.Tensor:
        """Where the process's generator stands, once a compilation's putting it back is undone."""
        state = self.process.get_state()
        left = LEFT.get(self.process) if self.parks else None
        if left is not None and _hash_of(state) in left.earlier:
            state = left.last
            self.process.set_state(state)
        return state

    def _leave_at(self, state: torch.Tensor) -> None:
        self.left_at = state
        if self.parks and self.process in LEFT:
            LEFT[self.process].go_on(state)
        self.process.set_state(state)

    def _draw(self, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = like.new_empty(self.batch_size, like.shape[-1], device=generator.device)
        return noise.exponential_(1, generator=generator)

    def _state(self):
        return self.generator.get_state()

    def _restore(self, state):
        self.generator.set_state(state)


class Left:
    """Where calls leave a process's generator while a program is compiled: last, and at which states before."""

    def __init__(self, state: torch.Tensor):
        self.last, self.earlier = state, set[int]()

    def go_on(self, state: torch.Tensor) -> None:
        self.earlier.add(_hash_of(self.last))
        self.earlier.discard(_hash_of(state))
        self.last = state


LEFT: dict[torch.Generator, Left] = {}  # of the generators that compilations may put back


@contextlib.contextmanager
def not_put_back(device: torch.device) -> Iterator[None]:
    """Around a compilation, of which there is one at a time: dynamo puts the process's generators back to where they
    stood as it began. Calls of other threads that begin meanwhile would write what others wrote: they undo it."""
    generators = {generator_of(device), generator_of(torch.device("cpu"))}
    with GENERATOR:
        LEFT.update({generator: Left(generator.get_state()) for generator in generators})
    try:
        yield
    finally:
        with GENERATOR:
            for generator in generators:
                left = LEFT.pop(generator)
                if _hash_of(generator.get_state()) in left.earlier:
                    generator.set_state(left.last)


def _hash_of(state: torch.Tensor) -> int:
    return hash(state.numpy().tobytes())


GENERATOR = threading.RLock()  # of all calls: where the process's generator stands is looked at and changed together


def generator_of(device: torch.device) -> torch.Generator:
    """The random generator that sampling on a device draws from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def _by_length(rows: Iterable[int], lengths: list[int]) -> dict[int, list[int]]:
    """Places in `rows`, grouped by the length of the row's prefix."""
    groups: dict[int, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        groups[lengths[row]].append(place)
    return groups


def _seen_by(all_processors: LogitsProcessorList, rows: list[int]) -> LogitsProcessorList:
    """The processors as these rows see them: a repetition penalty holds the padding of every row of the batch."""
    views = LogitsProcessorList()
    for processor in all_processors:
        if hasattr(processor, "for_rows"):
            processor = processor.for_rows(rows)
        padding = getattr(processor, "prompt_ignore_length", None)
        if isinstance(padding, torch.Tensor):
            processor = copy.copy(processor)
            processor.prompt_ignore_length = padding[rows]
        views.append(processor)
    return views
