"""The right tree for these heads, on this machine, at this batch size.

    text       the base continues some prompts
    worth      one pass of the heads over it counts which rank paths were right, and so the steps that a generation
               takes with the best tree of every size: so many nodes, no deeper than so many levels (`worth`)
    cost       the seconds of a step are measured for a few sizes, and what a level of a tree costs (`costs`)
    check      the sizes with most tokens per second are compared step by step, and the fastest is run against the base

Shapes: P prompt tokens, B rows, N nodes (root included).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from hf_drafthead.generation.calibration import check_temperature, own_seed
from hf_drafthead.generation.capture import execution_of
from hf_drafthead.generation.costs import (
    WARM_TOKENS,
    Costs,
    Timed,
    gain,
    in_rounds,
    in_turn,
    measured_costs,
    pace,
    timed,
)
from hf_drafthead.generation.entries import CalibrationKey, matching, merged
from hf_drafthead.generation.ladder import ALONE, Size
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import MAX_NODES
from hf_drafthead.generation.worth import METHODS, Worth, check_prompts, sampled_prompts, worth_of_trees

CHECKED, DEPTHS = 4, 3  # numbers of nodes that are compared, and depths of each
APART = 1.3  # factor by which these numbers of nodes differ at least
COMPILED_CHECKED, COMPILED_APART = 2, 2.0  # instead of CHECKED and APART where every tree is compiled
FEW_TURNS, CHECK_TURNS, LEFT = 16, 100, 3  # all are compared in few turns, the fastest that are left in more
COMPILED_TURNS = 300  # instead of CHECK_TURNS: of short steps, which scatter more
COMPILED_TIE = 0.98  # of the fastest: which of such trees is faster changes with the state of the machine
BLOCK = 8  # nodes of all rows: products of so many take less time for each node than of a few more or less
CLOSE = 0.8  # share of the best size's tokens per second that each of them is predicted to reach
PAYS = 1.01  # times as fast as the base, to within which a check tells it
CHECKED_PROMPTS, CHECKED_BATCHES, CHECKED_TOKENS = 6, 6, 48  # at least so many prompts and batches


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
    progress: Callable[[str], object] = lambda stage: None,
    keep: Callable[[dict[str, Any]], object] = lambda entry: None,
) -> list[dict[str, Any]]:
    """Find the tree that gives most tokens per second here, for each batch size, and store it in the generation config.

    Where no tree pays, that is the root alone: `generate` then leaves the call to the base.

    Args:
        model: with draft heads, in eval mode.
        prompts: (P,) token ids each; by default the base writes some itself, from its beginning of text.
        batch_sizes: rows of a call.
        captured: measure compiled steps (`cache_implementation="static"`).
        max_nodes: of a tree, the root included.
        new_tokens: of each of the base's answers, at most.
        temperature: the base samples its answers; 0 is greedy.
        method: "paths" counts rank paths where steps begin; "product" multiplies accuracies per head, as Medusa does.
        resume: keep the entries that are there for these heads, and measure only what is missing.
        progress: is given the name of each stage before it begins, `stages` of them.
        keep: is given every new entry at once; it is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `entries`. `measured` holds tokens_per_step, tokens_per_second,
        base_tokens_per_second, speedup and identical of the check, and predicted_check_speedup of its calls;
        predicted_tokens_per_step, predicted_tokens_per_second and predicted_speedup of answers of `new_tokens`;
        `tree_seconds` of a step with the tree in the check, where one pays; before the check `start_seconds` of a call
        before its first step, `base_start_seconds` and `base_step_seconds`; `step_seconds` of trees with one level, as
        pairs of nodes and figure, and `level_seconds` of each further level; as such pairs `tokens_per_step_by_nodes`
        (of the row that takes most steps) and `tokens_per_second_by_nodes` of trees that are no deeper than the one
        kept; and how it was measured.

    Raises:
        ValueError: prompts that are empty, too long or too few for tokens per step to within 5 %; sizes or a
            temperature out of range.
    """
    _check(max_nodes, batch_sizes, method)
    check_temperature(temperature)
    model._base_reader()  # raises where trees cannot go, before any work is done
    execution = execution_of(model, GenerationConfig(cache_implementation="static" if captured else None))
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    keys = {size: CalibrationKey.of(model.base, model.drafter, size, execution) for size in batch_sizes}
    found = {size: matching(stored, keys[size]) if resume else None for size in batch_sizes}
    if all(found.values()):
        return [entry for entry in found.values() if entry is not None]
    if prompts is None:
        prompts = sampled_prompts(model, new_tokens=new_tokens)
    check_prompts(model, prompts, new_tokens)
    sampling = {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    progress("text")
    worth = worth_of_trees(model, prompts, new_tokens, max_nodes, temperature, method)
    how = {"temperature": temperature, "method": method, "prompts": len(prompts), "positions": worth.positions}
    for size in batch_sizes:
        if found[size] is not None:
            continue
        progress(f"cost, batch size {size}")
        calls = [
            {**given, **sampling, "max_new_tokens": new_tokens, "min_new_tokens": None, "eos_token_id": None}
            for given in _batches(model, prompts, size)
        ]
        with own_seed(model):
            costs = measured_costs(model, worth, calls[0], captured)
        progress(f"check, batch size {size}")
        with own_seed(model):
            best, measured = _checked(model, worth, costs, calls, captured)
        tree = [list(path) for path in worth.paths[best]]
        found[size] = entry = {**keys[size]._asdict(), "tree": tree, "measured": {**measured, **how}}
        stored = merged(stored, entry)
        model.generation_config.calibration = stored
        keep(entry)
    return [entry for entry in found.values() if entry is not None]


def stages(batch_sizes: Sequence[int]) -> int:
    """How often a `calibrate` of these batch sizes calls `progress`, at most."""
    return 1 + 2 * len(batch_sizes)


def _checked(
    model: Any, worth: Worth, costs: Costs, calls: list[dict[str, Any]], captured: bool
) -> tuple[Size, dict[str, Any]]:
    """Compare the sizes that promise most tokens per second, and run the fastest against the base; and all figures.

    Args:
        model: with draft heads.
        worth: of trees.
        costs: of a call.
        calls: arguments of `generate`, of a batch each; without end-of-sequence tokens, so that all are of one length.
        captured: compiled steps.
    """
    rows, new_tokens = len(calls[0]["input_ids"]), calls[0]["max_new_tokens"]
    sizes = sorted(size for size in worth.steps if size.nodes <= costs.curve.points[-1][0])
    rates = {size: costs.predicted(worth, size, rows, new_tokens).tokens_per_second for size in sizes}
    small = 2 if captured else BLOCK  # compiled products of 3 to 8 nodes take about as long
    fitting = {size: rates[size] for size in sizes if size.nodes <= small or rows * size.nodes % BLOCK == 0}
    candidates = _candidates(fitting, *((COMPILED_CHECKED, COMPILED_APART) if captured else (CHECKED, APART)))
    fastest = _fastest(model, worth, costs, candidates, calls, captured)
    best, figures = _check_end_to_end(model, worth, costs, fastest, calls, captured)
    depth = best.depth or max(sizes).depth
    as_deep = {size.nodes: size for size in sizes if size.depth <= depth}  # the deepest of them
    return best, {
        **figures,
        "predicted_tokens_per_step": worth.tokens_per_step(best),
        "start_seconds": costs.start,
        "base_start_seconds": costs.base_start,
        "base_step_seconds": costs.base_step,
        "step_seconds": [list(point) for point in costs.curve.points],
        "level_seconds": costs.curve.level,
        "tokens_per_step_by_nodes": [[nodes, gain(worth, size, rows)] for nodes, size in as_deep.items()],
        "tokens_per_second_by_nodes": [[nodes, rates[size]] for nodes, size in as_deep.items()],
    }


def _candidates(rates: dict[Size, float], numbers: int, factor: float) -> list[Size]:
    """The trees to be compared, the fastest first, all CLOSE to it.

    They are of the fastest numbers of nodes that differ by the factor, each with the fastest DEPTHS, since what a level
    costs is known less well.
    """
    ranked = sorted(rates.keys() - {ALONE}, key=rates.__getitem__, reverse=True)
    close = [size for size in ranked if rates[size] >= CLOSE * rates[ranked[0]]]
    chosen: dict[int, list[Size]] = {}  # by nodes
    for size in close:
        apart = all(max(size.nodes, one) / min(size.nodes, one) >= factor for one in chosen)
        if apart and len(chosen) < numbers:
            chosen[size.nodes] = []
        if len(chosen.get(size.nodes, [None] * DEPTHS)) < DEPTHS:
            chosen[size.nodes].append(size)
    return [size for size in close if size in chosen.get(size.nodes, [])]


def _fastest(
    model: Any, worth: Worth, costs: Costs, candidates: list[Size], calls: list[dict[str, Any]], captured: bool
) -> Size:
    """The size with most tokens per second, compared step by step: all in a few turns, those that are LEFT in more.

    Of captured sizes within COMPILED_TIE the smallest is taken.
    """
    rows, new_tokens = len(calls[0]["input_ids"]), calls[0]["max_new_tokens"]
    steps = {size: costs.curve.at(*size) for size in candidates}
    for turns in (FEW_TURNS, COMPILED_TURNS if captured else CHECK_TURNS):
        mean = statistics.geometric_mean(steps[size] for size in candidates)
        shares = in_turn(model, {size: worth.tree(size) for size in candidates}, calls, turns, captured)
        steps = {size: mean * share for size, share in shares.items()}
        rates = {
            size: costs.predicted(worth, size, rows, new_tokens, step).tokens_per_second for size, step in steps.items()
        }
        candidates = sorted(rates, key=rates.__getitem__, reverse=True)[:LEFT]
    tie = COMPILED_TIE if captured else 1.0
    return min(size for size in candidates if rates[size] >= tie * rates[candidates[0]])


def _check_end_to_end(
    model: Any, worth: Worth, costs: Costs, best: Size, calls: list[dict[str, Any]], captured: bool
) -> tuple[Size, dict[str, Any]]:
    """Run a size against the base: it, or the root alone where it does not pay; and the figures.

    These few texts tell what a step costs in steps of the base, and all texts how many steps are needed: together they
    decide. If these calls were slower than predicted of them, so is the tree, and it is not taken where it would be
    slower than the base. The speed of a machine changes from one batch to the next, so medians over the batches count,
    each of the same batch.
    """
    rows, new_tokens = len(calls[0]["input_ids"]), calls[0]["max_new_tokens"]
    ends = model.generation_config.eos_token_id
    runs: list[tuple[Timed, Timed]] = []  # of the base, and with the tree
    for turn, call in enumerate([calls[0], *calls]):  # a short first one warms up
        call = {
            **call,
            "max_new_tokens": min(new_tokens, CHECKED_TOKENS if turn else WARM_TOKENS),
            "eos_token_id": ends,
        }
        both = {}
        for size in (best, ALONE) if turn % 2 else (ALONE, best):
            with own_seed(model):
                both[size] = timed(model, None if size == ALONE else worth.tree(size), call, captured)
        runs += [(both[ALONE], both[best])] if turn else []
    taken = [count for _, run in runs for count in run.emitted]
    written = rows * len(calls) + sum(taken)  # the first token of a row needs no step
    base_rate = written / sum(base.seconds for base, _ in runs)
    paid = statistics.median(base.seconds / run.seconds for base, run in runs)
    steps, base_steps = in_rounds(model, [worth.tree(best), None], calls, captured)
    over_base = pace([*steps, *(run for _, run in runs)], [*base_steps, *(base for base, _ in runs)])
    step = costs.curve.at(*best) if math.isnan(over_base) else costs.base_step * over_base
    predicted = costs.predicted(worth, best, rows, new_tokens, step)
    short = worth.calls(best, rows, min(new_tokens, CHECKED_TOKENS))  # of one text each, and its neighbours
    same = [short[batch * rows % len(short)] for batch in range(len(calls))]
    expected = statistics.median(costs.of_base(call) / costs.of_tree(call, step) for call in same)
    if predicted.speedup < PAYS or predicted.speedup * paid / expected < 1:
        return ALONE, {
            **costs.predicted(worth, ALONE, rows, new_tokens).figures(),
            "tokens_per_step": 1.0,
            "tokens_per_second": base_rate,
            "base_tokens_per_second": base_rate,
            "speedup": 1.0,
            "predicted_check_speedup": 1.0,
            "identical": True,
        }
    return best, {
        **predicted.figures(),
        "tree_seconds": step,
        "tokens_per_step": statistics.mean(taken) if taken else 1.0,  # every answer may be one token long
        "tokens_per_second": written / sum(run.seconds for _, run in runs),
        "base_tokens_per_second": base_rate,
        "speedup": paid,
        "predicted_check_speedup": expected,
        "identical": all(torch.equal(run.sequences, base.sequences) for base, run in runs),
    }


def _batches(model: Any, prompts: Sequence[torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """Some prompts in batches of `size`, padded on the left; few prompts are taken again."""
    device = model.base.get_input_embeddings().weight.device
    count = max(-(-min(CHECKED_PROMPTS, len(prompts)) // size), CHECKED_BATCHES)
    pad = model.generation_config.pad_token_id
    batches = []
    for batch in range(count):
        rows = [prompts[(batch * size + row) % len(prompts)].to(device) for row in range(size)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, 0 if pad is None else pad, padding_side="left")
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
    return batches


def _check(max_nodes: int, batch_sizes: Sequence[int], method: str) -> None:
    if not 2 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}: expected 2 (the root and one guess) to {MAX_NODES:,}.")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {list(batch_sizes)}: expected whole numbers above 0.")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected one of {', '.join(METHODS)}.")
