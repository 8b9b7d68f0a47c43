"""The right tree for these heads, on this machine, at this batch size.

    text       the base continues some prompts
    grow       one pass of the heads over two thirds of it counts which rank paths were right: a tree of every size, and
               how many steps a generation takes with it (`grow`)
    time       short calls with every tree and of the base take turns; the better half goes on, until one tree is left
    compare    such calls on the other third, with copies from the text and without: as many times as fast as the base

Shapes: P prompt tokens, B rows, N nodes (root included).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from hf_drafthead.generation.decoding import with_room
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import MAX_NODES
from hf_drafthead.trees.entries import CalibrationKey, matching, merged
from hf_drafthead.trees.grow import ALONE, MOST_RANK, Size, TreeStatistics
from hf_drafthead.trees.rank_paths import (
    TO_THE_END,
    TOKENS_ALONE,
    check_prompts,
    check_temperature,
    left_padded,
    own_seed,
    ranks_by_text,
    sampled_prompts,
)
from hf_drafthead.trees.timing import StepClock, time_interleaved

LEAST_POSITIONS = 60  # on which guesses are counted
HELD_OUT = 3  # of the prompts, one in so many is not counted on
COMPILED_NODES = (4, 8, 16, 32)  # compiling a step takes longer than everything else
TIMED_TOKENS, WARM_TOKENS = 48, 4  # short calls: the speed of a machine changes meanwhile
FIRST_ROUNDS, ROUNDS = 2, (3, 6)  # of all trees; of the better half, of its better half, and so on
PAIRS, FEW_PAIRS = 12, 3  # of calls of the base and of the fastest tree on held-out prompts; where time is over
HOPELESS = 0.7  # of the fastest: larger trees are not timed where one is slower than this
COPIES = (0, 4, 8)  # tokens of a step that are copied from the text
PAYS = 1.02  # times as fast as the base, or as without copies
INTERRUPTED, OUT_OF_TIME = "interrupted", "out of time"
PARTS = 10  # of a batch size, after each of which progress is shown

# given the number of steps, begins a part of the work by its name, and returns what is called for each step
Bar = Callable[[int], AbstractContextManager[Callable[[str], Callable[[], object]]]]


def calibrate(
    model: Any,
    prompts: Sequence[torch.Tensor] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    captured: bool = False,
    max_nodes: int = 100,
    new_tokens: int = 128,
    temperature: float = 0.0,
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    bar: Bar | None = None,
    notify: Callable[[str], object] = lambda notice: None,
    keep: Callable[[dict[str, Any]], object] = lambda entry: None,
) -> list[dict[str, Any]]:
    """Find the tree that gives most tokens per second here, for each batch size, and store it in the generation config.

    Where no tree pays, that is the root alone: `generate` then leaves the call to the base. An entry also says how many
    tokens each step copies from the text (`prompt_lookup_num_tokens`), 0 where that does not pay on these prompts.

    Args:
        model: with draft heads, in eval mode.
        prompts: (P,) token ids each; by default the base writes some itself, from its beginning of text.
        batch_sizes: rows of a call.
        captured: measure compiled steps (`cache_implementation="static"`).
        max_nodes: of a tree, the root included.
        new_tokens: of each of the base's answers, at most.
        temperature: the base samples its answers; 0 is greedy.
        resume: keep the entries that are there for these heads, and measure only what is missing.
        about: what else `measured` shall hold, such as the hash of the prompts.
        minutes: to spend on timing, shared out evenly among the batch sizes, beside the text and a few calls; what is
            the fastest by then is stored.
        bar: shows how much is done.
        notify: is given a line about how long a batch size will take, before most of its time.
        keep: is given every new entry at once; it is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `trees.entries`. `measured` holds what short calls in turn with the
        base gave on prompts that the tree was not grown on: tokens_per_step, speedup with its 95 % `interval` (None of
        a single call), step_cost (seconds of a step in steps of the base), tokens_per_second and
        base_tokens_per_second, and whether all texts were identical; `candidates` as (nodes, depth, tokens per step,
        speedup) without copies, on the others; `copies` as (tokens copied, times as fast as without, times as many
        tokens per step); and how it was measured.

    Raises:
        KeyboardInterrupt: after the fastest tree so far was stored, with `stopped` in its `measured`.
        ValueError: prompts that are empty, too long or too few; sizes or a temperature out of range.
    """
    _check(model, batch_sizes, max_nodes, minutes)
    execution = Execution.wanted(model, GenerationConfig(cache_implementation="static" if captured else None)).name
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    keys = {size: CalibrationKey.of(model.base, model.drafter, size, execution) for size in batch_sizes}
    entries = {size: matching(stored, keys[size]) if resume else None for size in batch_sizes}
    missing = [size for size in batch_sizes if entries[size] is None]
    if not missing:
        return [entry for entry in entries.values() if entry is not None]
    call: dict[str, Any] = {**TOKENS_ALONE, **TO_THE_END, "do_sample": bool(temperature), "min_new_tokens": None}
    call |= {"temperature": float(temperature)} if temperature else {}
    call["max_new_tokens"] = min(new_tokens, TIMED_TOKENS)
    with contextlib.nullcontext(_no_bar) if bar is None else bar(1 + PARTS * len(missing)) as begin:
        prompts = [*(sampled_prompts(model, new_tokens=new_tokens) if prompts is None else prompts)]
        advance = begin("text")
        check_prompts(model, prompts, new_tokens)
        held_out = prompts[HELD_OUT - 1 :: HELD_OUT] or prompts
        rest = [prompt for number, prompt in enumerate(prompts, start=1) if number % HELD_OUT] or prompts
        counted = count_trees(model, rest, new_tokens, max_nodes, temperature)
        advance()
        how = {"temperature": temperature, "prompts": len(prompts), "positions": counted.positions}
        how["held_out"] = len(held_out)
        share = math.inf if minutes is None else 60 * minutes / len(missing)
        for size in missing:
            calls, others = (
                [{**batch, **call} for batch in batches_of(model, some, size)] for some in (rest, held_out)
            )
            tell = functools.partial(_tell_estimate, notify, size)
            parts = _in_parts(begin(f"batch size {size}"))
            comparison = Comparison(model, counted, calls, others, captured, share, parts, tell)
            fastest, figures = comparison.fastest()
            measured = {**figures, **how, **(about or {})}
            entries[size] = entry = {**keys[size]._asdict(), **fastest, "measured": measured}
            model.generation_config.calibration = stored = merged(stored, entry)
            keep(entry)
            if comparison.stopped == INTERRUPTED:
                raise KeyboardInterrupt
    return [entry for entry in entries.values() if entry is not None]


def _check(model: Any, batch_sizes: Sequence[int], max_nodes: int, minutes: float | None) -> None:
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes is {minutes}: expected a number above 0.")
    if model.drafter.copies is not None:
        raise ValueError("this model has no heads and guesses copies of the text alone: there is no tree to choose.")
    if (reason := model.why_no_drafts()) is not None:
        raise ValueError(f"there is no tree to choose, for these heads never draft on this base: {reason}.")
    if not 2 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}: expected 2 (the root and one guess) to {MAX_NODES:,}.")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {list(batch_sizes)}: expected whole numbers above 0.")
    model._base_reader()  # raises where trees cannot go, before any work is done


def _no_bar(part: str) -> Callable[[], None]:
    return lambda: None


def _in_parts(step: Callable[[], object]) -> Callable[[float], None]:
    """What is told how much of a stage is done, and calls `step` for each further one of `PARTS`."""
    done = 0

    def advance(share: float) -> None:
        nonlocal done
        while done < int(PARTS * share + 1e-9):
            done += 1
            step()

    return advance


def _tell_estimate(notify: Callable[[str], object], size: int, calls: int, seconds: float) -> None:
    minutes = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} s"
    notify(f"batch size {size}: at most {calls} short calls, about {minutes}; Ctrl-C stores the fastest tree so far.")


def count_trees(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    max_nodes: int,
    temperature: float = 0.0,
) -> TreeStatistics:
    """Let the base continue the prompts, and count what trees are worth on that text; arguments as of `calibrate`."""
    check_temperature(temperature)
    check_prompts(model, prompts, new_tokens)
    ranks = ranks_by_text(model, prompts, new_tokens, temperature)
    positions = sum(int((text[:, -1] >= 0).sum()) for text in ranks)
    if len(ranks) < 2 or positions < LEAST_POSITIONS:
        raise ValueError(
            f"the answers to {len(prompts)} prompts are too few: they have {positions} positions to count guesses on, "
            f"expected {LEAST_POSITIONS} in two answers or more; give more prompts, or let the answers be longer."
        )
    counted = TreeStatistics.of(ranks, max_nodes, min(MOST_RANK, draft_vocabulary(model.base, model.drafter)))
    if counted.steps.keys() == {ALONE}:
        raise ValueError(f"no guess of these heads is right at any of {positions} positions: train them first.")
    return counted


class Timed(NamedTuple):
    """A call: its texts; seconds of a step, the median; of all steps together; and how many there were."""

    text: torch.Tensor
    step: float
    total: float
    steps: int


@dataclass
class Comparison:
    """Trees and the base in turn, on the same short calls.

    counted: the trees; calls, held_out: arguments of `generate`, of a batch each, without end-of-sequence tokens, so
    that all are of one length; seconds: after which no further round is begun; advance: is told how much is done;
    estimate: is told of how many calls at most, and of their seconds; costs: by size, of each round, seconds of a step
    in steps of the base; base_rates: tokens per second; rounds, made: of calls, and calls, so far; most_calls: that
    there can be, once that is known; begun: when; stopped: why it ended early, if it did.
    """

    model: Any
    counted: TreeStatistics
    calls: Sequence[dict[str, Any]]
    held_out: Sequence[dict[str, Any]]
    captured: bool
    seconds: float = math.inf
    advance: Callable[[float], object] = lambda share: None
    estimate: Callable[[int, float], object] = lambda calls, seconds: None
    costs: dict[Size, list[float]] = field(default_factory=dict)
    base_rates: list[float] = field(default_factory=list)
    identical: bool = True
    rounds: int = 0
    made: int = 0
    most_calls: int = 0
    begun: float = 0.0
    stopped: str | None = None

    def fastest(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`tree` and `lookup` of an entry, the fastest; and the figures of `measured`.

        Raises:
            KeyboardInterrupt: before any tree was timed.
        """
        pairs: list[dict[int, Timed]] = []
        self.begun = time.perf_counter()
        try:
            self._time_trees(itertools.cycle(self.calls))
            for number, call in zip(range(PAIRS), itertools.cycle(self.held_out)):
                if self._is_over() and number >= FEW_PAIRS:
                    break
                pairs.append(self._compared(call))
        except KeyboardInterrupt:
            if not self.costs:
                raise
            self.stopped = INTERRUPTED
        self.advance(1.0)
        tree, copies, figures = self._figures(pairs)
        timed = [(*size, self.counted.tokens_per_step(size), self.speedup(size)) for size in sorted(self.costs)]
        rounded = [[nodes, depth, round(tau, 4), round(faster, 4)] for nodes, depth, tau, faster in timed]
        figures |= {"identical": self.identical, "candidates": rounded}
        figures |= {"stopped": self.stopped} if self.stopped else {}
        return {"tree": [list(path) for path in self.counted.paths[tree]], "lookup": copies}, figures

    def _time_trees(self, batches: Iterator[dict[str, Any]]) -> None:
        """All trees, few nodes first, then the faster half of them, and so on."""
        sizes_by_nodes = [*self._by_nodes()]
        for sizes in sizes_by_nodes:
            if self._is_over():
                return
            self._round(sizes, {**next(batches), "max_new_tokens": WARM_TOKENS}, counts=False)
            for _ in range(FIRST_ROUNDS):
                self._round(sizes, next(batches))
            if sizes is sizes_by_nodes[0]:
                self._estimate(sizes_by_nodes)
            if max(map(self.speedup, sizes)) < HOPELESS * max(map(self.speedup, self.costs)):
                break
        left = self._ranked(self.costs)
        for rounds in ROUNDS:
            left = left[: max(len(left) // 2, 2)]
            for _ in range(rounds):
                if self._is_over():
                    return
                self._round(left, next(batches))
            left = self._ranked(left)

    def _best(self) -> Size:
        """The fastest of those that were timed most often, where it pays."""
        rounds = max(map(len, self.costs.values()))
        best = self._ranked(size for size, costs in self.costs.items() if len(costs) == rounds)[0]
        return best if self.speedup(best) >= PAYS else ALONE

    def _is_over(self) -> bool:
        over = time.perf_counter() - self.begun > self.seconds
        self.stopped = OUT_OF_TIME if over and self.costs else None
        return over and bool(self.costs)

    def _estimate(self, sizes_by_nodes: Sequence[Sequence[Size]]) -> None:
        """Say how many calls there are at most, and how long they take at the rate so far."""
        calls = sum((1 + FIRST_ROUNDS) * (1 + len(sizes)) for sizes in sizes_by_nodes)
        left = sum(map(len, sizes_by_nodes))
        for rounds in ROUNDS:
            left = max(left // 2, 2)
            calls += rounds * (1 + left)
        self.most_calls = calls + PAIRS * (1 + len(COPIES))
        left_of_calls = (self.most_calls - self.made) * (time.perf_counter() - self.begun) / self.made
        self.estimate(self.most_calls, min(left_of_calls, self.seconds))

    def speedup(self, size: Size) -> float:
        """How many times as fast as the base the texts are: fewer steps, each of which costs more."""
        if size == ALONE:
            return 1.0
        return self.counted.fewer_steps(size, len(self.calls[0]["input_ids"])) / statistics.median(self.costs[size])

    def _ranked(self, sizes: Iterable[Size]) -> list[Size]:
        return sorted(sizes, key=self.speedup, reverse=True)

    def _by_nodes(self) -> Iterator[list[Size]]:
        """The sizes to try, few nodes first, without those that promise no more than one of fewer nodes and levels; of
        compiled steps the deepest of a few numbers of nodes."""
        rows, every = len(self.calls[0]["input_ids"]), sorted(set(self.counted.steps) - {ALONE})
        worth = {size: self.counted.fewer_steps(size, rows) for size in every}

        def exceeds(size: Size) -> bool:
            less = (
                other for other in every if other != size and other.nodes <= size.nodes and other.depth <= size.depth
            )
            return all(worth[other] < worth[size] for other in less)

        sizes = every if self.captured else [*filter(exceeds, every)]
        for nodes, alike in itertools.groupby(sizes, key=lambda size: size.nodes):
            if not self.captured:
                yield [*alike]
            elif nodes in COMPILED_NODES or nodes == sizes[-1].nodes <= COMPILED_NODES[-1]:
                yield [max(alike)]

    def _round(self, sizes: Sequence[Size], call: dict[str, Any], counts: bool = True) -> None:
        timed = self._in_turn({size: functools.partial(self._timed, size, call) for size in (ALONE, *sizes)})
        if counts:
            self.base_rates.append(len(timed[ALONE].text) / timed[ALONE].step)
        for size in sizes if counts else ():
            self.costs.setdefault(size, []).append(timed[size].step / timed[ALONE].step)

    def _compared(self, call: dict[str, Any]) -> dict[int, Timed]:
        """A call of the base, under -1, and with the best tree, by the number of tokens that steps copy."""
        best = self._best()
        counts = {copies if best == ALONE else min(copies, best.nodes - 1) for copies in COPIES}
        runs = {count: functools.partial(self._timed, best, call, count) for count in sorted(counts)}
        return self._in_turn({-1: functools.partial(self._timed, ALONE, call), **runs})

    def _figures(self, pairs: Sequence[dict[int, Timed]]) -> tuple[Size, int, dict[str, Any]]:
        """The tree and the copies that are kept, and their figures; without pairs those of the trees' rounds."""
        best, gains, logs = self._best(), {0: (1.0, 1.0)}, [math.log(self.speedup(self._best()))]
        copies, tau = 0, self.counted.tokens_per_step(best)
        if pairs:
            for count in pairs[0].keys() - {-1, 0}:
                fewer = sum(pair[0].steps for pair in pairs) / sum(pair[count].steps for pair in pairs)
                gains[count] = statistics.median(pair[0].total / pair[count].total for pair in pairs), fewer
            *_, copies = max((*gain, count) for count, gain in gains.items() if gain[0] >= PAYS or not count)
            logs = [math.log(pair[-1].total / pair[copies].total) for pair in pairs]
            tau = sum(pair[-1].steps for pair in pairs) / sum(pair[copies].steps for pair in pairs)
        speedup, interval = math.exp(statistics.mean(logs)), interval_of(logs, len(self.held_out))
        if speedup < PAYS or (best == ALONE and not copies):
            best, copies, speedup, tau, interval = ALONE, 0, 1.0, 1.0, None
        rate = statistics.median(self.base_rates)
        figures = {"tokens_per_step": tau, "step_cost": tau / speedup, "speedup": speedup}
        figures |= {"tokens_per_second": speedup * rate, "base_tokens_per_second": rate}
        rounded: dict[str, Any] = {name: round(value, 4) for name, value in figures.items()}
        rounded["interval"] = interval and [round(end, 4) for end in interval]
        rounded["copies"] = [[count, *(round(value, 4) for value in gains[count])] for count in sorted(gains)]
        return best, copies, rounded

    def _in_turn(self, runs: Mapping[Any, Callable[[], Timed]]) -> dict[Any, Timed]:
        """Each call once, beginning with another one each time; the texts should all be the same."""
        timed, _ = time_interleaved(runs, 1, self.model.base.device, first=self.rounds, after=self._made)
        self.rounds += 1
        texts = [run.text for run in timed.values()]
        self.identical &= all(torch.equal(text, texts[0]) for text in texts)
        return timed

    def _made(self, _: Any) -> None:
        """Count a call, and say how much is done: of the calls, or of the time."""
        self.made += 1
        if self.most_calls:
            of_time = (time.perf_counter() - self.begun) / self.seconds
            self.advance(min(max(self.made / self.most_calls, of_time), 1.0))

    def _timed(self, size: Size, call: dict[str, Any], copies: int = 0) -> Timed:
        """A call with a tree and copies from the text, or of the base."""
        clock, static = StepClock(), {"cache_implementation": "static"} if self.captured else {}
        with own_seed(self.model):
            if size == ALONE and not copies:
                text = with_room(self.model.base.generate)(**call, streamer=clock)
            else:
                how = {"draft_tree": self.counted.tree(size), "prompt_lookup_num_tokens": copies or None}
                text = self.model.generate(**call, **static, **how, on_step=clock.put)
        return Timed(text, *clock.figures(prompts=int(size == ALONE and not copies)))


def batches_of(model: Any, prompts: Sequence[torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The prompts in batches of `size`; for the last one the first are taken again."""
    rows = [*prompts, *itertools.islice(itertools.cycle(prompts), -len(prompts) % size)]
    return [left_padded(model, rows[first : first + size]) for first in range(0, len(rows), size)]


def interval_of(logs: Sequence[float], texts: int) -> list[float] | None:
    """Of 95 %, for the mean over all texts such as these; None of a single one.

    Args:
        logs: of how many times as fast, of pairs of calls on so many texts in turn.

    >>> tuple(round(end, 2) for end in interval_of([0.1, 0.3, 0.2, 0.1, 0.3, 0.2], 3))
    (1.02, 1.46)
    """
    by_text = [statistics.mean(logs[text::texts]) for text in range(min(texts, len(logs)))]
    if len(by_text) < 2:
        return None
    normal, freedom = 1.96, len(by_text) - 1
    quantile = normal + (normal**3 + normal) / (4 * freedom)  # of Student's distribution, nearly
    mean, wide = statistics.mean(by_text), quantile * statistics.stdev(by_text) / math.sqrt(len(by_text))
    return [math.exp(mean - wide), math.exp(mean + wide)]
