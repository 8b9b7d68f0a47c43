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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList

from hf_drafthead.bases.releases import (
    CRITERIA_ON_DEVICE,
    CRITERIA_ROW_BY_ROW,
    ROW_BY_ROW,
    SCORES_ONLY,
    limits_of,
    temperature_of,
)
from hf_drafthead.generation.grammar import Grammar
from hf_drafthead.generation.noise import NOTHING_DRAWN, RandomNumbers
from hf_drafthead.generation.state import NOT_A_DISTRIBUTION, are_numbers

UNKNOWN_TOKEN = "a logits processor chose a token that the base does not have"


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
    streams: bool = False  # to an object that may draw
    random: RandomNumbers = NOTHING_DRAWN
    scores: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position
    logits: list[torch.Tensor] = field(default_factory=list)  # (B, V) per new position

    def __post_init__(self):
        config = self.config
        self.keeps_scores = bool(config.return_dict_in_generate and config.output_scores)
        self.keeps_logits = bool(config.return_dict_in_generate and config.output_logits)
        self.max_length, self.eos_tokens = limits_of(self.criteria)
        # As in transformers: only then do finished rows emit padding; else they go on until all are finished.
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in self.criteria)
        self.pad_token = config._pad_token_tensor.item() if self.pads else 0
        kinds, ends = {*map(type, self.processors)}, {*map(type, self.criteria)}
        # the base draws for all rows at once, behind what an object has drawn that it has shown a token of all rows
        self.drawn_between, keeps = self.samples and self.streams, self.keeps_scores or self.keeps_logits
        self.scores_only = kinds.issubset(SCORES_ONLY)
        at_once = self.scores_only and ends.issubset(CRITERIA_ON_DEVICE) and self.max_length is not None
        self.on_device = at_once and not (keeps or self.drawn_between)
        self.greedy = self.on_device and not (self.samples or self.processors)
        others = [each for each in self.processors if type(each) not in ROW_BY_ROW]
        apart = ends.issubset(CRITERIA_ROW_BY_ROW) and all(hasattr(each, "for_rows") for each in others)
        # what the base says of padding behind the end of a row is asked for as well
        self.lockstep = self.batch_size == 1 or self.drawn_between or not apart or (self.pads and keeps)
        # rows that have ended go on for as long as others do, and some of them for longer
        self.overruns = not (self.pads or self.lockstep or ends <= {MaxLengthCriteria})
        if self.samples:
            self.random = RandomNumbers() if self.random is NOTHING_DRAWN else self.random
            self.random.sample(self.batch_size, self.device)
        self.asks_others = self.random is not NOTHING_DRAWN and self.lockstep and bool(others or not apart)
        self.grammar = Grammar.of(self) if self.processors else None

    def choose(self, rows: list[int], logits: torch.Tensor, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """The token (g,) that each of g rows, of all in lockstep, emits next, as the base chooses it: of logits (g, V)
        after its last token, and tokens (B, L), of which the first `lengths[b]` are row b's prefix."""
        logits = logits.to(tokens.device, torch.float32, copy=True)
        with self.random.lent() if self.asks_others else contextlib.nullcontext():
            scores = self._process(rows, logits, tokens, lengths) if self.processors else logits
        if self.keeps_scores:
            self._keep(self.scores, rows, scores, lengths)
        if self.keeps_logits:
            self._keep(self.logits, rows, logits, lengths)
        return self._sampled(rows, scores, lengths) if self.samples else scores.argmax(-1)

    def _sampled(self, rows: list[int], scores: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """What the base draws of scores (g, V)."""
        chances = scores.softmax(-1)
        if not chances.isfinite().all():
            raise RuntimeError(NOT_A_DISTRIBUTION)
        positions = [lengths[row] - self.prompt_length for row in rows]
        tape = self.random.tape
        assert tape is not None
        noise = torch.stack([tape.noise(position, chances)[row] for row, position in zip(rows, positions)])
        self.random.chosen(max(self.random.position, *(position + 1 for position in positions)))
        return (chances / noise).argmax(-1)

    def choose_everywhere(
        self, logits: torch.Tensor, depths: torch.Tensor, noise: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The base's choice (B, N) at every node, and whether logits and probabilities are numbers; if `on_device`. Of
        logits (B, N, V), nodes at depths (R, N), and under sampling the noise (B, D, V) of the next D positions."""
        scores = self.scores_everywhere(logits)
        if noise is None:
            return scores.argmax(-1), are_numbers(logits)
        chances = scores.float().softmax(-1)
        at_node = noise.take_along_dim(depths.expand(noise.shape[0], -1)[..., None], dim=1)  # (B, N, V)
        return (chances / at_node).argmax(-1), chances.sum(-1).isfinite() & are_numbers(logits)

    def scores_everywhere(self, logits: torch.Tensor) -> torch.Tensor:
        """What the processors make of logits (B, N, V) of all nodes; if `on_device`."""
        if not self.processors:
            return logits
        flat = logits.float().flatten(0, 1)
        scores: torch.Tensor = self.processors(flat.new_zeros(len(flat), 1, dtype=torch.long), flat)
        return scores.view(logits.shape)

    def noise_ahead(self, lengths: list[int], moving: list[int], depth: int, vocabulary: int) -> torch.Tensor | None:
        """(B, D, V) noise with which the base will choose each row's next D tokens, without meaning in rows that are
        not `moving`; None where it does not sample."""
        tape = self.random.tape
        if tape is None:
            return None
        latest = max(lengths)
        if self.random.moved:  # what will be drawn next is not known: ones, by which no guess gains
            return torch.ones(self.batch_size, depth, vocabulary, device=self.device)
        firsts = [(lengths[row] if row in moving else latest) - self.prompt_length for row in range(len(lengths))]
        noise = tape.ahead(firsts, depth)
        self.random.chosen(latest - self.prompt_length)
        return noise

    def tilt(self, noise: torch.Tensor) -> torch.Tensor:
        """What makes the base's coming choices likely guesses: added to logits l (..., V), the order is that of q / E.

        q is the softmax of l / T, with the call's temperature T, and log(q / E) = (l - T log E) / T + constant; the
        noise is E (B, D, V), from `noise_ahead`.
        """
        return noise.log() * -temperature_of(self.processors)

    def stops(self, rows: list[int], newest: list[int], sequences: torch.Tensor, lengths: list[int]) -> list[bool]:
        """Whether a criterion fires on each row's prefix, of which `newest` is the last token; g answers."""
        if self.on_device:
            assert self.max_length is not None
            return [token in self.eos_tokens or lengths[row] >= self.max_length for row, token in zip(rows, newest)]
        if self.lockstep:
            scores = tuple(self.scores) if self.keeps_scores else None
            with self.random.lent() if self.asks_others else contextlib.nullcontext():
                return self.criteria(sequences[:, : max(lengths)], scores).tolist()
        answers = torch.zeros(len(rows), dtype=torch.bool)
        for length, places in _by_length(rows, lengths).items():
            answers[places] = self.criteria(sequences[[rows[place] for place in places], :length], None).cpu()
        return answers.tolist()

    def _process(self, rows, logits, sequences, lengths):
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
