"""The right tree for these heads, on this machine, at this batch size.

    text       the base continues some prompts
    worth      one pass of the heads over it counts which rank paths were right (`calibration`): tokens per step of the
               best tree of every size
    cost       the seconds of a step are measured for a few sizes; in between they are interpolated
    check      the sizes with most tokens per second are run against the base, and the fastest is kept

Shapes: P prompt tokens, B rows, N nodes (root included).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.generation.calibration import (
    check_temperature,
    foretold_steps,
    grow_tree,
    grow_tree_by_product,
    own_seed,
    own_texts,
    rank_paths,
    tilt_of_seed,
)
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.entries import Situation, matching, merged
from hf_drafthead.generation.ladder import CostCurve
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import MAX_NODES, DraftTree, RankPath

METHODS = {"paths": grow_tree, "product": grow_tree_by_product}
SIZES = (
    2,
    3,
    4,
    5,
    6,
    8,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    100,
    128,
    192,
    256,
)  # nodes that are tried
COSTED = (2, 8, 16, 32, 64, 128, 256)  # nodes whose step is timed
MOST_RANK = 64  # ranks from here on are never grown: finding them costs more than they are worth
PRECISION = 0.05  # standard error of the tokens per step, as a share
TEXTS_AT_ONCE = 16
CHECKED, APART = 3, 1.3  # sizes that are run against the base, and how far apart they are at least, as a factor
CHECKED_PROMPTS = 8
COST_TOKENS, COST_ROUNDS = 48, 3


@dataclass(frozen=True)
class Worth:
    """What the base's own text says of trees.

    paths: rank paths, the most valuable first, so that every beginning is a tree; tokens_per_step: of the tree of so
    many nodes, foretold on texts that it was not grown on; positions: that were counted.
    """

    paths: list[RankPath]
    tokens_per_step: dict[int, float]
    positions: int

    def tree(self, nodes: int) -> DraftTree:
        """The best tree of so many nodes, root included."""
        return DraftTree(self.paths[: nodes - 1])


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
        progress: is given the name of each stage before it begins, `stages` of them.
        keep: is given every new entry at once; it is in the generation config then.

    Returns:
        the entries of `batch_sizes` in order, see `entries`. `measured` holds tokens_per_step, tokens_per_second,
        base_tokens_per_second, speedup and identical of the check, what was predicted of the first two, `step_seconds`
        as pairs of nodes and seconds, `tokens_per_step_by_nodes` as pairs, and how it was measured.

    Raises:
        ValueError: prompts that are empty, too long or too few for tokens per step to within 5 %; sizes or a
            temperature out of range.
    """
    _check(max_nodes, batch_sizes, method)
    check_temperature(temperature)
    model._base_reader()  # raises where trees cannot go, before any work is done
    stored = DraftSettings.stored_in(model.generation_config).get("calibration", [])
    situations = {size: Situation.of(model.base, model.drafter, size, captured) for size in batch_sizes}
    found = {size: matching(stored, situations[size]) if resume else None for size in batch_sizes}
    if all(found.values()):
        return [entry for entry in found.values() if entry is not None]
    if prompts is None:
        prompts = sampled_prompts(model, new_tokens=new_tokens)
    check_prompts(model, prompts, new_tokens)
    sampling = {"do_sample": True, "temperature": float(temperature)} if temperature else {"do_sample": False}
    progress("text")
    worth = worth_of_trees(model, prompts, new_tokens, max_nodes, temperature, method)
    for size in batch_sizes:
        if found[size] is not None:
            continue
        progress(f"cost, batch size {size}")
        batches = _batches(model, prompts, size)
        how = {**sampling, **({"cache_implementation": "static"} if captured else {})}
        curve, base_seconds = measured_costs(model, worth, batches[0], how)
        progress(f"check, batch size {size}")
        rates = {nodes: size * tau / curve.at(nodes) for nodes, tau in worth.tokens_per_step.items()}
        nodes, checked = _check_end_to_end(model, worth, rates, batches, sampling, how, min(new_tokens, 64))
        entry = {
            **situations[size]._asdict(),
            "tree": [list(path) for path in worth.paths[: nodes - 1]],
            "measured": {
                **checked,
                "predicted_tokens_per_step": worth.tokens_per_step[nodes],
                "predicted_tokens_per_second": rates[nodes],
                "base_step_seconds": base_seconds,
                "step_seconds": [list(point) for point in curve.points],
                "tokens_per_step_by_nodes": [list(pair) for pair in worth.tokens_per_step.items()],
                "temperature": temperature,
                "method": method,
                "prompts": len(prompts),
                "positions": worth.positions,
            },
        }
        found[size] = entry
        stored = merged(stored, entry)
        model.generation_config.calibration = stored
        keep(entry)
    return [entry for entry in found.values() if entry is not None]


def stages(batch_sizes: Sequence[int]) -> int:
    """How often a `calibrate` of these batch sizes calls `progress`, at most."""
    return 1 + 2 * len(batch_sizes)


def worth_of_trees(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    max_nodes: int,
    temperature: float = 0.0,
    method: str = "paths",
    **settings: Any,
) -> Worth:
    """Let the base continue the prompts, and count what trees are worth on that text.

    At a temperature the guesses know the noise of the text, as those of `generate` do.

    The tokens per step of each size are foretold on every second text by the tree of the others, and the other way
    round: a large tree knows the text that it was grown on better than any other.

    Raises:
        ValueError: the text is too short to say it to within 5 %.
    """
    ranks = []
    for first in range(0, len(prompts), TEXTS_AT_ONCE):
        ranks += _ranks_by_text(model, prompts[first : first + TEXTS_AT_ONCE], new_tokens, temperature, first, settings)
    grow = METHODS[method]
    ranks_below = min(MOST_RANK, draft_vocabulary(model.base, model.drafter))

    def grown(parts: list[torch.Tensor]) -> list[RankPath]:
        paths = grow(torch.cat(parts), MAX_NODES) if parts else []
        return [path for path in paths if max(path) < ranks_below][: max_nodes - 1]

    halves = [(ranks[0::2], grown(ranks[1::2])), (ranks[1::2], grown(ranks[0::2]))]
    paths = grown(ranks)
    if not all(grown_on for _, grown_on in halves):
        raise ValueError(_too_few(len(prompts), 0, 1.0, 2 * len(prompts)))
    tokens_per_step = {}
    steps: list[int] = []
    for nodes in sorted({*(size for size in SIZES if size <= len(paths)), len(paths) + 1}):
        trees = [(held_out, DraftTree(grown_on[: nodes - 1])) for held_out, grown_on in halves]
        steps = [n for held_out, tree in trees for one in held_out for n in foretold_steps(tree, one[None])[0]]
        tokens_per_step[nodes] = statistics.mean(steps) if steps else 1.0
    _check_precision(steps, len(prompts))
    return Worth(paths, tokens_per_step, sum(len(one) for one in ranks))


def measured_costs(
    model: Any, worth: Worth, given: dict[str, torch.Tensor], settings: dict[str, Any]
) -> tuple[CostCurve, float]:
    """Seconds of a step by its nodes, and of a step of the base: medians of several interleaved runs.

    Args:
        model: with draft heads.
        worth: which trees.
        given: one batch of prompts.
        settings: of `generate`.
    """
    most = len(worth.paths) + 1
    sizes = sorted({*(nodes for nodes in COSTED if nodes < most), most})
    trees = {1: DraftTree.root_alone(), **{nodes: worth.tree(nodes) for nodes in sizes}}
    plain = {name: value for name, value in settings.items() if name != "cache_implementation"}
    lengths = {"max_new_tokens": COST_TOKENS, "min_new_tokens": None, "eos_token_id": None}
    seconds: dict[int, list[float]] = {nodes: [] for nodes in (0, *trees)}
    for turn in range(COST_ROUNDS + 1):  # the first one warms up
        for nodes, tree in trees.items():
            taken: list[float] = []
            model.generate(
                **given,
                **settings,
                **lengths,
                draft_tree=tree,
                on_step=lambda record, taken=taken: taken.append(record.seconds["step"]) if record.step else None,
            )
            seconds[nodes] += taken if turn else []
        clock = _TokenClock()
        model.base.generate(**given, **plain, **lengths, streamer=clock)
        seconds[0] += clock.intervals() if turn else []
    curve = CostCurve.through([(nodes, statistics.median(seconds[nodes])) for nodes in trees])
    return curve, statistics.median(seconds[0])


def check_prompts(model: Any, prompts: Sequence[torch.Tensor], new_tokens: int) -> None:
    """Refuse prompts that nothing can be measured on.

    Raises:
        ValueError: there is none; one is empty, or leaves the base no room for the new tokens.
    """
    if not prompts:
        raise ValueError("there is no prompt to calibrate on: give some, or none at all for the base's own.")
    positions = getattr(model.base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    for number, prompt in enumerate(prompts, start=1):
        if not len(prompt):
            raise ValueError(f"prompt {number} is empty: give at least one token.")
        if positions is not None and len(prompt) + new_tokens > positions:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, which with {new_tokens} new ones exceed the base's "
                f"{positions} positions: shorten it, or ask for fewer tokens."
            )


def sampled_prompts(model: Any, count: int = 32, length: int = 32, new_tokens: int = 128) -> list[torch.Tensor]:
    """Beginnings of texts (P,) that the base writes by itself, where nobody gives any: sampled at temperature 1."""
    base = model.base
    positions = getattr(base.config.get_text_config(decoder=True), "max_position_embeddings", None)
    length = length if positions is None else max(min(length, positions - new_tokens), 2)
    config = base.generation_config
    first = next((one for one in (config.bos_token_id, config.eos_token_id) if one is not None), 0)
    start = torch.as_tensor(first, device=base.get_input_embeddings().weight.device).view(-1)[:1]
    with own_seed(model):
        texts = base.generate(
            start.expand(count, 1),
            attention_mask=torch.ones(count, 1, dtype=torch.long, device=start.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=length - 1,
            eos_token_id=None,
        )
    return list(texts)


class _TokenClock:
    """A streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...

    def intervals(self) -> list[float]:
        """Seconds from token to token; the prompt and the first token are no step."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:])]


def _ranks_by_text(
    model: Any,
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    temperature: float,
    seed: int,
    settings: dict[str, Any],
) -> list[torch.Tensor]:
    """(S, K) of the answer to each prompt, on the host; none where every answer is one token long."""
    texts = own_texts(model, prompts, new_tokens, temperature, seed, draft_tree=[[0]], **settings)
    if int((texts.lengths - texts.prompt_lengths).max()) < 2:
        return []
    tilt = tilt_of_seed(model, len(prompts), new_tokens, temperature, seed)
    return list(rank_paths(model, *texts, tilt=tilt).cpu())


def _batches(model: Any, prompts: Sequence[torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """Some prompts in batches of `size`, padded on the left; few prompts are taken again."""
    device = model.base.get_input_embeddings().weight.device
    count = -(-min(CHECKED_PROMPTS, len(prompts)) // size)
    pad = model.generation_config.pad_token_id
    batches = []
    for batch in range(count):
        rows = [prompts[(batch * size + row) % len(prompts)].to(device) for row in range(size)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, True, 0 if pad is None else pad, padding_side="left")
        lengths = torch.tensor([len(row) for row in rows], device=device)
        mask = torch.arange(ids.shape[1], device=device) >= ids.shape[1] - lengths[:, None]
        batches.append({"input_ids": ids, "attention_mask": mask.long()})
    return batches


def _check_end_to_end(
    model: Any,
    worth: Worth,
    rates: dict[int, float],
    batches: list[dict[str, torch.Tensor]],
    plain: dict[str, Any],
    settings: dict[str, Any],
    new_tokens: int,
) -> tuple[int, dict[str, Any]]:
    """Run the sizes that promise most tokens per second against the base: the nodes of the fastest, and its figures."""
    candidates = _apart(sorted(rates, key=rates.__getitem__, reverse=True))
    seconds = dict.fromkeys((0, *candidates), 0.0)
    taken: dict[int, list[int]] = {nodes: [] for nodes in candidates}
    identical = dict.fromkeys(candidates, True)
    lengths = {"max_new_tokens": new_tokens, "min_new_tokens": None, "eos_token_id": None}
    written = 0
    for turn, given in enumerate([batches[0], *batches]):  # the first one warms up
        texts = {}
        for nodes in seconds:
            call = {"draft_tree": worth.tree(nodes), **settings} if nodes else plain
            with own_seed(model):
                start = time.perf_counter()
                output = (model if nodes else model.base).generate(
                    **given, **lengths, **call, return_dict_in_generate=True
                )
                texts[nodes] = output.sequences.cpu()  # waits for the device
                seconds[nodes] += time.perf_counter() - start if turn else 0.0
            if nodes and turn:
                taken[nodes] += output.accepted_lengths[output.accepted_lengths > 0].tolist()
                identical[nodes] &= torch.equal(texts[nodes], texts[0])
        written += new_tokens * len(given["input_ids"]) if turn else 0
    best = min(candidates, key=seconds.__getitem__)
    return best, {
        "tokens_per_step": statistics.mean(taken[best]),
        "tokens_per_second": written / seconds[best],
        "base_tokens_per_second": written / seconds[0],
        "speedup": seconds[0] / seconds[best],
        "identical": identical[best],
    }


def _apart(sizes: Sequence[int]) -> list[int]:
    """The first CHECKED sizes that differ from each other by the factor APART."""
    chosen: list[int] = []
    for size in sizes:
        if len(chosen) < CHECKED and all(max(size, one) >= APART * min(size, one) for one in chosen):
            chosen.append(size)
    return chosen


def _check(max_nodes: int, batch_sizes: Sequence[int], method: str) -> None:
    if not 2 <= max_nodes <= MAX_NODES:
        raise ValueError(f"max_nodes is {max_nodes}: expected 2 (the root and one guess) to {MAX_NODES:,}.")
    if not batch_sizes or min(batch_sizes) < 1:
        raise ValueError(f"batch_sizes is {list(batch_sizes)}: expected whole numbers above 0.")
    if method not in METHODS:
        raise ValueError(f"method is {method!r}: expected one of {', '.join(METHODS)}.")


def _check_precision(steps: Sequence[int], prompts: int) -> None:
    """Refuse steps whose mean is not known to within PRECISION."""
    if len(steps) < 2:
        raise ValueError(_too_few(prompts, len(steps), 1.0, 2 * prompts))
    spread = statistics.stdev(steps) / statistics.mean(steps)
    error = spread / len(steps) ** 0.5
    if error > PRECISION:
        raise ValueError(_too_few(prompts, len(steps), error, -(-prompts * error**2 // PRECISION**2)))


def _too_few(prompts: int, steps: int, error: float, needed: float) -> str:
    return (
        f"{prompts} prompts are too few: their {steps} steps tell the tokens per step to within {error:.0%}, and "
        f"{PRECISION:.0%} needs about {needed:.0f} prompts; give so many, or let the answers be longer."
    )
