"""The right tree for these heads, on this machine, at this batch size.

    text       the base continues some prompts
    grow       one pass of the heads over it counts which rank paths were right: a tree of every size, and how many
               steps a generation takes with it (`grow`)
    time       short calls with every tree and of the base take turns; the better half goes on, until one tree is left
    copy       such calls with this tree, and with copies from the text in it, tell whether copies pay

Shapes: P prompt tokens, B rows, N nodes (root included).
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from hf_drafthead.generation.mixin import with_room
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import MAX_NODES
from hf_drafthead.trees.entries import CalibrationKey, matching
from hf_drafthead.trees.grow import ALONE, METHODS, MOST_RANK, Size, TreeStatistics
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

LEAST_POSITIONS = 100  # on which guesses are counted
COMPILED_NODES = (4, 8, 16, 32)  # compiling a step takes longer than everything else
TIMED_TOKENS, WARM_TOKENS = 48, 4  # short calls: the speed of a machine changes meanwhile
FIRST_ROUNDS, ROUNDS = 2, (3, 6, 12)  # of all trees; of the better half, of its better half, and so on down to two
HOPELESS = 0.7  # of the fastest: larger trees are not timed where one is slower than this
COPIES = (0, 4, 8)  # tokens of a step that are copied from the text
PAYS = 1.02  # times as fast as the base, or as without copies
INTERRUPTED, OUT_OF_TIME = "interrupted", "out of time"

Progress = Callable[[str], Callable[[float], object]]  # given a stage, gives what is told how much of it is done


def calibrate(
    model: Any,
    prompts: Sequence[torch.Tensor] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    captured: bool = False,
    max_nodes: int = 100,
    new_tokens: int = 128,
    temperature: float = 0.0,
    method: str = "paths",
    resume: bool = False,
    about: Mapping[str, Any] | None = None,
    minutes: float | None = None,
    progress: Progress = lambda stage: lambda share: None,
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
        method: "paths" counts rank paths; "product" multiplies accuracies per head, as Medusa does.
        resume: keep the entries that are there for these heads, and measure only what is missing.
        about: what else `measured` shall hold, such as the hash of the prompts.
        minutes: to spend on timing, shared out evenly among the batch sizes, beside the text and one round of calls;
            what is the fastest by then is stored.
        progress: is given the name of each stage before it begins, the text and each batch size, and returns what is
            told how much of it is done, from 0 to 1.
        notify: is given a line about how long a batch size will take, before most of its time.
        keep: is given every new entry at once; it is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `trees.entries`. `measured` holds tokens_per_step, on texts
        that the tree was not grown on; in short calls in turn with the base step_cost (seconds of a step in steps of
        the base), speedup, tokens_per_second and base_tokens_per_second, and whether all texts were identical;
        `candidates` as (nodes, depth, tokens per step, speedup) without copies; `copies` as (tokens copied, times as
        fast as without, times as many tokens per step); and how it was measured.

    Raises:
        KeyboardInterrupt: after the fastest tree so far was stored, with `stopped` in its `measured`.
        ValueError: prompts that are empty, too long or too few; sizes or a temperature out of range.
    """
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
    execution = Execution.wanted(model, GenerationConfig(cache_implementation="static" if captured else None)).name
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    keys = {size: CalibrationKey.of(model.base, model.drafter, size, execution) for size in batch_sizes}
    entries = {size: matching(stored, keys[size]) if resume else None for size in batch_sizes}
    if not all(entries.values()):
        prompts = sampled_prompts(model, new_tokens=new_tokens) if prompts is None else prompts
        advance = progress("text")
        counted = count_trees(model, prompts, new_tokens, max_nodes, temperature, method, advance)
        how = {"temperature": temperature, "method": method, "prompts": len(prompts), "positions": counted.positions}
        call: dict[str, Any] = {**TOKENS_ALONE, **TO_THE_END, "do_sample": bool(temperature), "min_new_tokens": None}
        call |= {"temperature": float(temperature)} if temperature else {}
        call["max_new_tokens"] = min(new_tokens, TIMED_TOKENS)
        missing = [size for size in batch_sizes if entries[size] is None]
        for size in missing:
            calls = [{**batch, **call} for batch in batches_of(model, prompts, size)]
            share = math.inf if minutes is None else 60 * minutes / len(missing)
            tell = functools.partial(_tell_estimate, notify, size)
            comparison = Comparison(model, counted, calls, captured, share, progress(f"batch size {size}"), tell)
            fastest, figures = comparison.fastest()
            measured = {**figures, **how, **(about or {})}
            entries[size] = entry = {**keys[size]._asdict(), **fastest, "measured": measured}
            model.generation_config.calibration = stored = merged(stored, entry)
            keep(entry)
            if comparison.stopped == INTERRUPTED:
                raise KeyboardInterrupt
    return [entry for entry in entries.values() if entry is not None]


def _tell_estimate(notify: Callable[[str], object], size: int, calls: int, seconds: float) -> None:
    minutes = f"{seconds / 60:.0f} minutes" if seconds > 90 else f"{seconds:.0f} s"
    notify(f"batch size {size}: at most {calls} short calls, about {minutes}; Ctrl-C stores the fastest tree so far.")


def count_trees(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    max_nodes: int,
    temperature: float = 0.0,
    method: str = "paths",
    advance: Callable[[float], object] = lambda share: None,
) -> TreeStatistics:
    """Let the base continue the prompts, and count what trees are worth on that text; arguments as of `calibrate`."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected one of {', '.join(METHODS)}.")
    check_temperature(temperature)
    check_prompts(model, prompts, new_tokens)
    ranks = ranks_by_text(model, prompts, new_tokens, temperature, advance=advance)
    positions = sum(int((text[:, -1] >= 0).sum()) for text in ranks)
    if len(ranks) < 2 or positions < LEAST_POSITIONS:
        raise ValueError(
            f"{len(prompts)} prompts are too few: their answers have {positions} positions to count guesses on, "
            f"expected {LEAST_POSITIONS} in two answers or more; give more prompts, or let the answers be longer."
        )
    counted = TreeStatistics.of(ranks, max_nodes, method, min(MOST_RANK, draft_vocabulary(model.base, model.drafter)))
    if counted.steps.keys() == {ALONE}:
        raise ValueError(f"no guess of these heads is right at any of {positions} positions: train them first.")
    return counted


Timed = tuple[torch.Tensor, float, int]  # the texts of a call, the seconds of a step, and how many there were


@dataclass
class Comparison:
    """Trees and the base in turn, on the same short calls.

    counted: the trees; calls: arguments of `generate`, of a batch each, without end-of-sequence tokens, so that all are
    of one length; seconds: after which no further round is begun; advance: is told how much is done; estimate: is told
    of how many calls at most, and of their seconds; costs: by size, of each round, seconds of a step in steps of the
    base; base_rates: tokens per second; rounds, made: of calls, and calls, so far; most_calls: that there can be, once
    that is known; begun: when; stopped: why it ended early, if it did.
    """

    model: Any
    counted: TreeStatistics
    calls: Sequence[dict[str, Any]]
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
        best, gains = ALONE, dict[int, tuple[float, float]]()
        batches, self.begun = itertools.cycle(self.calls), time.perf_counter()
        try:
            self._time_trees(batches)
            best = self._best()
            if not self.stopped:
                gains = self._gains_of_copies(best, itertools.islice(batches, ROUNDS[-1]))
        except KeyboardInterrupt:
            if not self.costs:
                raise
            self.stopped, best = INTERRUPTED, self._best()
        self.advance(1.0)
        gains = gains or {0: (1.0, 1.0)}
        faster, fewer, copies = max((*gain, copies) for copies, gain in gains.items() if gain[0] >= PAYS or not copies)
        base_rate, speedup = statistics.median(self.base_rates), self.speedup(best) * faster
        figures = {
            "tokens_per_step": self.counted.tokens_per_step(best) * fewer,
            "step_cost": statistics.median(self.costs.get(best, [1.0])) * fewer / faster,
            "speedup": speedup,
            "tokens_per_second": speedup * base_rate,
            "base_tokens_per_second": base_rate,
        }
        timed = [(*size, self.counted.tokens_per_step(size), self.speedup(size)) for size in sorted(self.costs)]
        return {"tree": [list(path) for path in self.counted.paths[best]], "lookup": copies}, {
            **{name: round(value, 4) for name, value in figures.items()},
            "identical": self.identical,
            "candidates": [[nodes, depth, round(tau, 4), round(faster, 4)] for nodes, depth, tau, faster in timed],
            "copies": [[copies, *(round(value, 4) for value in gain)] for copies, gain in gains.items()],
            **({"stopped": self.stopped} if self.stopped else {}),
        }

    def _time_trees(self, batches: Iterator[dict[str, Any]]) -> None:
        """All trees, few nodes first, then the faster half of them, and so on down to two."""
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
        self.most_calls = calls + ROUNDS[-1] * len(COPIES)
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
        """The sizes to try, few nodes first; of compiled steps the deepest of a few numbers of nodes."""
        sizes = sorted(set(self.counted.steps) - {ALONE})
        for nodes, alike in itertools.groupby(sizes, key=lambda size: size.nodes):
            if not self.captured:
                yield [*alike]
            elif nodes in COMPILED_NODES or nodes == sizes[-1].nodes <= COMPILED_NODES[-1]:
                yield [max(alike)]

    def _round(self, sizes: Sequence[Size], call: dict[str, Any], counts: bool = True) -> None:
        timed = self._in_turn({size: functools.partial(self._timed, size, call) for size in (ALONE, *sizes)})
        text, base_step, _ = timed[ALONE]
        if counts:
            self.base_rates.append(len(text) / base_step)
            for size in sizes:
                self.costs.setdefault(size, []).append(timed[size][1] / base_step)

    def _gains_of_copies(self, size: Size, calls: Iterable[dict[str, Any]]) -> dict[int, tuple[float, float]]:
        """By tokens copied: how many times as fast the texts are as without, and as many tokens a step emits."""
        counts = sorted({copies if size == ALONE else min(copies, size.nodes - 1) for copies in COPIES})
        runs = ({count: functools.partial(self._timed, size, call, count) for count in counts} for call in calls)
        timed, gains = [*map(self._in_turn, runs)], {}
        for count in counts:
            fewer = sum(steps[0][2] for steps in timed) / sum(steps[count][2] for steps in timed)
            gains[count] = fewer / statistics.median(steps[count][1] / steps[0][1] for steps in timed), fewer
        return gains

    def _in_turn(self, runs: Mapping[Any, Callable[[], Timed]]) -> dict[Any, Timed]:
        """Each call once, beginning with another one each time; the texts should all be the same."""
        timed, _ = time_interleaved(runs, 1, self.model.base.device, first=self.rounds, after=self._made)
        self.rounds += 1
        texts = [text for text, *_ in timed.values()]
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
                return with_room(self.model.base.generate)(**call, streamer=clock), clock.step(1), clock.steps(1)
            how = {"draft_tree": self.counted.tree(size), "prompt_lookup_num_tokens": copies or None}
            return self.model.generate(**call, **static, **how, on_step=clock.put), clock.step(), clock.steps()


def batches_of(model: Any, prompts: Sequence[torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The prompts in batches of `size`; for the last one the first are taken again."""
    rows = [*prompts, *itertools.islice(itertools.cycle(prompts), -len(prompts) % size)]
    return [left_padded(model, rows[first : first + size]) for first in range(0, len(rows), size)]


def merged(entries: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with a new one, in place of the one of its key and of those of its dtype for other heads.

    Entries of earlier versions that it stands for go as well, and damaged ones.
    """
    key = CalibrationKey.of_entry(new)

    def stays(entry: dict[str, Any]) -> bool:
        try:
            its = CalibrationKey.of_entry(entry)
        except ValueError:
            return False
        if its.dtype != key.dtype:  # the same heads have another hash where their values are rounded
            return True
        if its.device == "cpu" and key.on_cpu:
            its = its._replace(device=key.device, threads=key.threads)
        return its.heads_hash == key.heads_hash and its != key

    return [*filter(stays, entries), new]
