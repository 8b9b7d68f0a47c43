"""The right tree for these heads, on this machine, at this batch size.

text       the base continues some prompts
grow       one pass of the heads over two thirds of it counts which rank paths were right: a tree of every size, and
           how many steps a generation takes with it (`grow`)
time       what a step with each tree costs (`costs`); the tree that promises most goes on
compare    short calls of it, with copies from the text and without, and of the base take turns on the other third
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import MAX_NODES
from hf_drafthead.trees.costs import seconds_in_turn
from hf_drafthead.trees.entries import key_of_calls, matching, merged
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
TIMED_TOKENS = 48  # short calls: the speed of a machine changes meanwhile
PAIRS, FEW_PAIRS = 12, 3  # of calls of the base and of the fastest tree on held-out prompts; where time is over
HOPELESS = 0.7  # of the fastest: larger trees are not timed where all of one size promise less than this
COPIES = (0, 4, 8)  # tokens of a step that are copied from the text
PAYS = 1.02  # times as fast as the base, or as without copies
INTERRUPTED, OUT_OF_TIME = "interrupted", "out of time"

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
        captured: measure compiled steps (`cache_implementation="static"`).
        max_nodes: of a tree, the root included.
        new_tokens: of each of the base's answers, at most.
        temperature: the base samples its answers; 0 is greedy.
        resume: keep the entries that are there for these heads, and measure only what is missing.
        about: what else `measured` shall hold, such as the hash of the prompts.
        minutes: to spend on short calls, for all batch sizes; what is the fastest by then is stored.
        bar: shows how much is done; notify: is given a line about how long a batch size will take.
        keep: is given every new entry at once; it is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `trees.entries`. `measured` holds what short calls in turn with the
        base gave on prompts that the tree was not grown on: tokens_per_step, speedup with its 95 % `interval` (None of
        a single text), step_cost (in steps of the base), tokens_per_second and base_tokens_per_second, whether all
        texts were identical, and `copies` as (tokens copied, times as fast as without, times as many tokens per step);
        what the costs of steps promise, `candidates` as (nodes, depth, tokens per step, speedup); and how it was
        measured.

    Raises:
        KeyboardInterrupt: after what was the fastest by then was stored, with `stopped` in its `measured`.
        ValueError: prompts that are empty, too long or too few; sizes or a temperature out of range.
    """
    _check(model, batch_sizes, max_nodes, minutes)
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    keys = {size: key_of_calls(model, size, captured) for size in batch_sizes}
    found = {size: matching(stored, key) for size, key in keys.items()} if resume else {}
    entries = {size: entry for size, entry in found.items() if entry is not None}
    if not (missing := [size for size in batch_sizes if size not in entries]):
        return [entries[size] for size in batch_sizes]
    call: dict[str, Any] = {**TOKENS_ALONE, **TO_THE_END, "do_sample": bool(temperature), "min_new_tokens": None}
    call |= {"temperature": float(temperature)} if temperature else {}
    call["max_new_tokens"] = min(new_tokens, TIMED_TOKENS)
    steps, nothing = 1 + (1 + PAIRS) * len(missing), contextlib.nullcontext(lambda part: lambda: None)
    with nothing if bar is None else bar(steps) as begin:
        prompts = [*(sampled_prompts(model, new_tokens=new_tokens) if prompts is None else prompts)]
        advance = begin("text")
        check_prompts(model, prompts, new_tokens)
        held_out = prompts[HELD_OUT - 1 :: HELD_OUT] or prompts
        rest = [prompt for number, prompt in enumerate(prompts, start=1) if number % HELD_OUT] or prompts
        counted = count_trees(model, rest, new_tokens, max_nodes, temperature)
        advance()
        how = {"temperature": temperature, "prompts": len(prompts), "positions": counted.positions}
        how["held_out"] = len(held_out)
        seconds = math.inf if minutes is None else 60 * minutes / len(missing)
        for size in missing:
            advance = begin(f"batch size {size}")
            costs = costs_of_trees(model, counted, size, captured)
            advance()
            speedups = {tree: counted.fewer_steps(tree, size) / cost for tree, cost in costs.items()}
            calls = [{**batch, **call} for batch in batches_of(model, held_out, size)]
            comparison = Comparison(model, counted, fastest_of(speedups), captured)
            stopped = comparison.run(calls, seconds, advance, notify)
            fastest, measured = comparison.figures(len(calls))
            timed = [(tree, counted.tokens_per_step(tree), faster) for tree, faster in sorted(speedups.items())]
            measured["candidates"] = [[*tree, round(tau, 4), round(faster, 4)] for tree, tau, faster in timed]
            measured |= {"stopped": stopped} if stopped else {}
            entries[size] = entry = {
                **keys[size]._asdict(),
                **fastest,
                "measured": {**measured, **how, **(about or {})},
            }
            model.generation_config.calibration = stored = merged(stored, entry)
            keep(entry)
            if stopped == INTERRUPTED:
                raise KeyboardInterrupt
    return [entries[size] for size in batch_sizes]


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


def count_trees(
    model: Any, prompts: Sequence[torch.Tensor], new_tokens: int, max_nodes: int, temperature: float = 0.0
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


def costs_of_trees(model: Any, counted: TreeStatistics, rows: int, captured: bool) -> dict[Size, float]:
    """Seconds of a step with trees that may be the fastest, few nodes first, in those of a step of the root alone."""
    config = GenerationConfig(cache_implementation="static" if captured else None)
    reader, execution = model._base_reader(), Execution.wanted(model, config)
    costs: dict[Size, float] = {}
    best = 1.0
    for sizes in sizes_by_nodes(counted, rows, captured):
        trees = {size: counted.tree(size) for size in (ALONE, *sizes)}
        seconds, _ = seconds_in_turn(model, reader, rows, trees, execution)
        costs |= {size: max(min(seconds[size]) / min(seconds[ALONE]), 0.01) for size in sizes}
        promised = max(counted.fewer_steps(size, rows) / costs[size] for size in sizes)
        if promised < HOPELESS * best:
            break
        best = max(best, promised)
    return costs


def sizes_by_nodes(counted: TreeStatistics, rows: int, captured: bool) -> Iterator[list[Size]]:
    """The sizes to try, few nodes first, without those that promise no more than one of fewer nodes and levels; of
    compiled steps the deepest of a few numbers of nodes."""
    every = sorted(set(counted.steps) - {ALONE})
    worth = {size: counted.fewer_steps(size, rows) for size in every}

    def exceeds(size: Size) -> bool:
        smaller = [other for other in every if other.nodes <= size.nodes and other.depth <= size.depth]
        return all(worth[other] < worth[size] for other in smaller if other != size)

    sizes = every if captured else [*filter(exceeds, every)]
    for nodes, alike in itertools.groupby(sizes, key=lambda size: size.nodes):
        if not captured:
            yield [*alike]
        elif nodes in COMPILED_NODES or nodes == sizes[-1].nodes <= COMPILED_NODES[-1]:
            yield [max(alike)]


def fastest_of(speedups: Mapping[Size, float]) -> Size:
    """The size that promises most, where it pays."""
    best = max(speedups, key=lambda size: speedups[size])
    return best if speedups[best] >= PAYS else ALONE


class Timed(NamedTuple):
    """A call: its texts; seconds of all steps together; and how many there were."""

    text: torch.Tensor
    seconds: float
    steps: int


class Comparison:
    """One tree, with copies from the text and without, and the base in turn on the same short calls."""

    def __init__(self, model: Any, counted: TreeStatistics, best: Size, captured: bool):
        self.model, self.best, self.paths = model, best, [list(path) for path in counted.paths[best]]
        self.tree, self.static = counted.tree(best), {"cache_implementation": "static"} if captured else {}
        self.copies = sorted({copies if best == ALONE else min(copies, best.nodes - 1) for copies in COPIES})
        self.pairs: list[dict[int, Timed]] = []  # of the base, under -1, and by how many tokens steps copy

    def run(
        self,
        calls: Sequence[dict[str, Any]],
        seconds: float,
        advance: Callable[[], object],
        notify: Callable[[str], object],
    ) -> str | None:
        """Time calls without end-of-sequence tokens, so that all texts are of one length; why that ended early, if so.

        Raises:
            KeyboardInterrupt: before the first round has ended.
        """
        begun = time.perf_counter()
        try:
            for number, call in zip(range(PAIRS), itertools.cycle(calls)):
                passed = time.perf_counter() - begun
                if number >= FEW_PAIRS and passed > seconds:
                    return OUT_OF_TIME
                if number == 1:
                    left = min((PAIRS - 1) * passed, max(seconds - passed, 0.0))
                    about = f"{left / 60:.0f} minutes" if left > 90 else f"{left:.0f} s"
                    most, rows = PAIRS * (1 + len(self.copies)), len(call["input_ids"])
                    notify(
                        f"batch size {rows}: at most {most} short calls, about {about}; Ctrl-C stores what is the "
                        "fastest by then."
                    )
                runs = {count: functools.partial(self._timed, call, count) for count in (-1, *self.copies)}
                timed, _ = time_interleaved(runs, 1, self.model.base.device, first=number)
                self.pairs.append(timed)
                advance()
        except KeyboardInterrupt:
            if not self.pairs:
                raise
            return INTERRUPTED
        return None

    def _timed(self, call: dict[str, Any], copies: int) -> Timed:
        clock = StepClock()
        with own_seed(self.model):
            if of_base := copies < 0 or (self.best == ALONE and not copies):
                text = with_room(self.model.base.generate)(**call, streamer=clock)
            else:
                how = {"draft_tree": self.tree, "prompt_lookup_num_tokens": copies or None}
                text = self.model.generate(**call, **self.static, **how, on_step=clock.put)
        return Timed(text, *clock.figures(prompts=int(of_base))[1:])

    def figures(self, texts: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """`tree` and `lookup` of an entry, and the figures of `measured`, of rounds over so many texts in turn."""
        pairs, gains, paths = self.pairs, {0: (1.0, 1.0)}, self.paths
        for count in self.copies[1:]:
            fewer = sum(pair[0].steps for pair in pairs) / sum(pair[count].steps for pair in pairs)
            gains[count] = statistics.median(pair[0].seconds / pair[count].seconds for pair in pairs), fewer
        *_, copies = max((*gain, count) for count, gain in gains.items() if gain[0] >= PAYS or not count)
        logs = [math.log(pair[-1].seconds / pair[copies].seconds) for pair in pairs]
        tau = sum(pair[-1].steps for pair in pairs) / sum(pair[copies].steps for pair in pairs)
        speedup, interval = math.exp(statistics.mean(logs)), interval_of(logs, texts)
        if speedup < PAYS or not (paths or copies):
            paths, copies, speedup, tau, interval = [], 0, 1.0, 1.0, None
        rate = statistics.median(len(pair[-1].text) * pair[-1].steps / pair[-1].seconds for pair in pairs)
        figures = {"tokens_per_step": tau, "step_cost": tau / speedup, "speedup": speedup}
        figures |= {"tokens_per_second": speedup * rate, "base_tokens_per_second": rate}
        measured: dict[str, Any] = {name: round(value, 4) for name, value in figures.items()}
        measured["interval"] = interval and [round(end, 4) for end in interval]
        measured["copies"] = [[count, *(round(value, 4) for value in gain)] for count, gain in gains.items()]
        measured["identical"] = all(torch.equal(one.text, pair[-1].text) for pair in pairs for one in pair.values())
        return {"tree": paths, "lookup": copies}, measured


def batches_of(model: Any, prompts: Sequence[torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """The prompts in batches of `size`; for the last one the first are taken again."""
    rows = [*prompts, *itertools.islice(itertools.cycle(prompts), -len(prompts) % size)]
    return [left_padded(model, rows[first : first + size]) for first in range(0, len(rows), size)]


def interval_of(logs: Sequence[float], texts: int) -> list[float] | None:
    """Of 95 %, for the mean over all texts such as these, of logarithms of pairs on so many in turn; None of one text.

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
