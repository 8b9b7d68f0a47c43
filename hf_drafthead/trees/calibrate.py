"""The right tree for these heads, on this machine, at this batch size.

text       the base continues some prompts
grow       one pass of the heads over two thirds of it counts which rank paths were right: a tree of every size, and
           how many steps a generation takes with it (`rank_paths`)
time       what steps with a few trees cost (`costs`), from which follows which tree promises most
compare    short calls of it, with copies from the text and without, and of the base take turns on the other third
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import MAX_NODES, ROOT_ALONE
from hf_drafthead.trees.costs import ALONE, NodeCosts, Size, StepCosts, trees_of
from hf_drafthead.trees.entries import key_of_calls, merged
from hf_drafthead.trees.rank_paths import (
    MOST_RANK,
    TO_THE_END,
    TOKENS_ALONE,
    TreeStatistics,
    check_temperature,
    left_padded,
    own_seed,
    ranks_by_text,
    sampled_prompts,
)
from hf_drafthead.trees.timing import time_interleaved

LEAST_POSITIONS = 60  # on which guesses are counted
HELD_OUT = 3  # of the prompts, one in so many is not counted on
COMPILED_NODES = (4, 8, 16, 32)  # compiling a step takes longer than everything else
TIMED_TOKENS = 48  # short calls: the speed of a machine changes meanwhile
PAIRS, FEW_PAIRS = 12, 3  # of calls of the base and of the fastest tree on held-out prompts; where these take long
LONG = 300.0  # seconds of such calls
COPIES = (0, 4, 8)  # tokens of a step that are copied from the text
PAYS = 1.02  # times as fast as the base, or as without copies

# given the number of steps, begins a part of the work by its name, and returns what is called for each step
Bar = Callable[[int], AbstractContextManager[Callable[[str], Callable[[], object]]]]
no_bar: Bar = lambda steps: contextlib.nullcontext(lambda part: lambda: None)  # noqa: E731


def calibrate(
    model: Any,
    prompts: Sequence[torch.Tensor] | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    captured: bool = False,
    max_nodes: int = 100,
    new_tokens: int = 128,
    temperature: float = 0.0,
    bar: Bar = no_bar,
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
        bar, keep: show how much is done; are given every new entry, which is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `trees.entries`. `measured` holds what short calls in turn with the
        base gave on prompts that the tree was not grown on, speedup with its 95 % `interval` (None of a single text);
        step_cost in steps of the base; `copies` as (tokens copied, times as fast as without, times as many tokens per
        step); `costs` as (nodes, depth, steps of the base); `candidates` as (nodes, depth, tokens per step, speedup).

    Raises:
        ValueError: prompts that are empty, too long or too few; sizes or a temperature out of range.
    """
    _check(model, prompts, batch_sizes, max_nodes)
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    entries = []
    call: dict[str, Any] = {**TOKENS_ALONE, **TO_THE_END, "do_sample": bool(temperature), "min_new_tokens": None}
    call |= {"temperature": float(temperature)} if temperature else {}
    call["max_new_tokens"] = min(new_tokens, TIMED_TOKENS)
    with bar(1 + (1 + PAIRS) * len(batch_sizes)) as begin:
        prompts = [*(sampled_prompts(model, new_tokens=new_tokens) if prompts is None else prompts)]
        advance = begin("text")
        held_out = prompts[HELD_OUT - 1 :: HELD_OUT] or prompts
        rest = [prompt for number, prompt in enumerate(prompts, start=1) if number % HELD_OUT] or prompts
        counted = count_trees(model, rest, new_tokens, max_nodes, temperature)
        advance()
        how = {"temperature": temperature, "prompts": len(prompts), "positions": counted.positions}
        how["held_out"] = len(held_out)
        for size in batch_sizes:
            advance = begin(f"batch size {size}")
            costs = costs_of_trees(model, counted, size, captured)
            advance()
            timed = {tree for tree in counted.steps if tree.nodes <= max(costs.measured).nodes}
            speedups = {tree: counted.fewer_steps(tree, size) / costs(*tree) for tree in timed - {ALONE}}
            rows = [*held_out, *itertools.islice(itertools.cycle(held_out), -len(held_out) % size)]
            calls = [{**left_padded(model, rows[at : at + size]), **call} for at in range(0, len(rows), size)]
            paths = counted.paths[fastest_of(speedups)]
            pairs = timed_in_turn(model, paths, calls, captured, advance)
            fastest, measured = figures_of(pairs, paths, len(calls))
            promised = [(*tree, counted.tokens_per_step(tree), faster) for tree, faster in sorted(speedups.items())]
            measured["candidates"] = [[*row[:2], *(round(value, 4) for value in row[2:])] for row in promised]
            measured["costs"] = [[*tree, round(cost, 4)] for tree, cost in sorted(costs.measured.items())]
            key = key_of_calls(model, size, captured)
            entry = {**key._asdict(), **fastest, "measured": {**measured, **how}}
            entries.append(entry)
            model.generation_config.calibration = stored = merged(stored, entry)
            keep(entry)
    return entries


def _check(model: Any, prompts: Sequence[torch.Tensor] | None, batch_sizes: Sequence[int], max_nodes: int) -> None:
    if prompts is not None and not len(prompts):
        raise ValueError("there is no prompt to calibrate on: give some, or none at all for the base's own.")
    for number, prompt in enumerate(() if prompts is None else prompts, start=1):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty: give at least one token.")
    if model.drafter.copies is not None:
        raise ValueError("this model has no heads and guesses copies of the text alone: there is no tree to choose.")
    if (reason := model.why_no_drafts()) is not None:
        raise ValueError(f"there is no tree to choose, for these heads never draft on this base: {reason}.")
    if not 2 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}: expected 2 (the root and one guess) to {MAX_NODES:,}.")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {list(batch_sizes)}: expected whole numbers above 0.")


def count_trees(
    model: Any, prompts: Sequence[torch.Tensor], new_tokens: int, max_nodes: int, temperature: float = 0.0
) -> TreeStatistics:
    """Let the base continue the prompts, and count what trees are worth on that text; arguments as of `calibrate`."""
    check_temperature(temperature)
    ranks = ranks_by_text(model, prompts, new_tokens, temperature)
    positions = sum(int((text[:, -1] >= 0).sum()) for text in ranks)
    if len(ranks) < 2 or positions < LEAST_POSITIONS:
        raise ValueError(
            f"the answers to {len(prompts)} prompts are too few: they have {positions} positions to count guesses on, "
            f"expected {LEAST_POSITIONS} in two answers or more; give more prompts, or let the answers be longer."
        )
    counted = TreeStatistics.of(ranks, max_nodes, min(MOST_RANK, guessed_among(model)[1]))
    if counted.steps.keys() == {ALONE}:
        raise ValueError(f"no guess of these heads is right at any of {positions} positions: train them first.")
    return counted


def costs_of_trees(model: Any, counted: TreeStatistics, rows: int, captured: bool) -> NodeCosts:
    """What steps cost in those of the root alone: of a few trees, from which the costs of others follow."""
    paths = counted.paths[max(counted.steps, key=lambda size: counted.fewer_steps(size, rows))]
    trees = trees_of(paths, guessed_among(model)[1], COMPILED_NODES * captured)
    execution = Execution.wanted(model, GenerationConfig(cache_implementation="static" if captured else None))
    costs = StepCosts(model, model._base_reader(), rows, execution)
    costs.doubt(0)  # an entry is kept for long
    return costs(trees) or NodeCosts({max(trees): 1.0})  # what trees cost is seen in the calls that follow


def fastest_of(speedups: Mapping[Size, float]) -> Size:
    """The size that promises most, where it pays."""
    best = max(speedups, key=lambda size: speedups[size])
    return best if speedups[best] >= PAYS else ALONE


class Timed(NamedTuple):
    """A call: its texts; seconds of all steps together; and how many there were."""

    text: torch.Tensor
    seconds: float
    steps: int


Pairs = list[dict[int, Timed]]  # calls of the base, under -1, and of a tree by how many tokens its steps copy


def timed_in_turn(
    model: Any,
    paths: Sequence[Sequence[int]],
    calls: Sequence[dict[str, Any]],
    captured: bool,
    advance: Callable[[], object],
) -> Pairs:
    """Calls with a tree and without, in turn, none of which ends early, so that all texts are of one length."""
    begun, pairs, none_pays = time.perf_counter(), [], not paths
    tree = [*map(list, paths)] or ROOT_ALONE
    counts = sorted({copies if none_pays else min(copies, len(paths)) for copies in COPIES})
    for number, call in zip(range(PAIRS), itertools.cycle(calls)):
        if number >= FEW_PAIRS and time.perf_counter() - begun > LONG:
            break
        runs = {}
        for count in (-1, *counts):
            how = {"draft_tree": tree, "prompt_lookup_num_tokens": count or None}
            of_base = count < 0 or (none_pays and not count)
            runs[count] = functools.partial(timed, model, call, captured, None if of_base else how)
        pairs.append(time_interleaved(runs, 1, model.base.device, first=number)[0])
        advance()
    return pairs


def timed(model: Any, call: dict[str, Any], captured: bool, how: dict[str, Any] | None) -> Timed:
    """One call, with a tree, or of the base."""
    times: list[float] = []
    noting: Any = SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)
    with own_seed(model):
        if how is None:
            text = with_room(model.base.generate)(**call, streamer=noting)
            del times[0]  # a streamer is shown the prompt first
        else:
            static = {"cache_implementation": "static"} if captured else {}
            text = model.generate(**call, **static, **how, on_step=noting.put)
    return Timed(text, times[-1] - times[0], len(times) - 1)


def figures_of(pairs: Pairs, paths: Sequence[Sequence[int]], texts: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """`tree` and `lookup` of an entry, and the figures of `measured`, of rounds over so many texts in turn."""
    gains = {0: (1.0, 1.0)}
    for count in sorted(pairs[0].keys() - {-1, 0}):
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
    return {"tree": [*map(list, paths)], "lookup": copies}, measured


def interval_of(logs: Sequence[float], texts: int) -> list[float] | None:
    """Of 95 %, for the mean over texts such as these, of logarithms of pairs on so many in turn; None of one text."""
    by_text = [statistics.mean(logs[text::texts]) for text in range(min(texts, len(logs)))]
    if len(by_text) < 2:
        return None
    normal, freedom = 1.96, len(by_text) - 1
    quantile = normal + (normal**3 + normal) / (4 * freedom)  # of Student's distribution, nearly
    mean, wide = statistics.mean(by_text), quantile * statistics.stdev(by_text) / math.sqrt(len(by_text))
    return [math.exp(mean - wide), math.exp(mean + wide)]
