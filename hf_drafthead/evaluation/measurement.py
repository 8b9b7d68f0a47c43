"""What was measured: one `Round` per batch of prompts, and the figures that a list of rounds adds up to."""

import operator
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from hf_drafthead.evaluation.acceptance import histogram, tokens_per_step, top_k_accuracy
from hf_drafthead.evaluation.quality import METRIC
from hf_drafthead.evaluation.rounding import FirstDifference, counted
from hf_drafthead.evaluation.stages import TimeSplit
from hf_drafthead.generation.identity import device_name, drafter_hash

BASE, HEADS, COMPILED = "base", "heads", "compiled"


@dataclass
class Run:
    """The result of one method in a round.

    seconds: of each repeat; tokens: generated, each row up to its own end; forwards: of the base, prefill included;
    identical: whether its tokens are the base's; differences: of the heads where they should be, row by row;
    peak_memory: the most bytes in use on a GPU, else None.
    """

    seconds: list[float]
    tokens: int
    forwards: int = 0
    identical: bool = True
    differences: list[FirstDifference] = field(default_factory=list)
    peak_memory: int | None = None


@dataclass
class Round:
    """One batch of prompts, decoded by every method in turn.

    runs: by method; accepted: (B, S) of the heads; time_split: of a further run of the heads; ranks: (M, K) at
    which each head had the next tokens; quality: of the base's and the heads' answer, where there is a reference;
    undrafted: calls of the heads that the base decoded by itself.
    """

    category: str
    rows: int
    runs: dict[str, Run]
    accepted: torch.Tensor
    time_split: TimeSplit = field(default_factory=TimeSplit)
    ranks: torch.Tensor | None = None
    quality: list[tuple[float, float]] = field(default_factory=list)
    undrafted: int = 0


@dataclass(frozen=True)
class Measurement:
    """One model on one list of prompts; `to_json` is its JSON form.

    Speeds are sums of tokens over sums of each round's median seconds; a spread is the lowest and the highest of the
    repeats, each summed over all rounds; `speedup_by_round` is the median and the quartiles over the rounds.
    """

    model: str
    base: str
    family: str
    device: str
    dtype: str
    batch_size: int
    prompts: int
    new_tokens: int  # over all prompts, each row up to its own end
    base_forwards: int  # what the heads needed for them, prefills included
    tokens_per_step: float | None
    base_tokens_per_second: float
    tokens_per_second: float
    speedup: float
    speedup_over_compiled: float | None
    efficiency: float | None  # speedup / tokens_per_step: 1.0 if drafting, tree and bookkeeping cost nothing
    identical: bool
    differences: dict[str, Any]  # of exact runs: how many texts rounding and faults changed, see `rounding.counted`
    per_category: dict[str, dict[str, Any]]
    tree_nodes: int
    accepted_lengths: dict[int, int]  # how many steps emitted 1, 2, 3 ... tokens
    transformers: str
    torch: str
    repeats: int
    settings: dict[str, Any]  # of `generate`
    acceptance: dict[str, Any]  # settings that only the heads were given
    captured: bool  # whether the heads' steps were compiled
    speedup_spread: list[float]
    base_tokens_per_second_spread: list[float]
    tokens_per_second_spread: list[float]
    speedup_by_round: dict[str, float]
    head_accuracy: list[list[float]] | None  # by head: how often the next token is among its best 1, 2, 3 ...
    time_split: dict[str, float] | None  # milliseconds per step
    peak_memory: dict[str, int] | None  # bytes on a GPU, by method
    compared: dict[str, dict[str, Any] | None]  # others than the base, None where one could not run
    quality: dict[str, Any] | None
    undrafted: int = 0  # calls that the base decoded by itself, which say nothing of the heads
    heads_hash: str | None = None  # of the weights that were measured
    base_revision: str | None = None
    complete: bool = True
    stopped: str | None = None  # why the call ended early; if this one is complete, it ended after it
    processes: int = 1
    notices: list[str] = field(default_factory=list)

    @property
    def lossless(self) -> bool:
        """Whether the text was meant to be the base's own."""
        return self.acceptance.get("acceptance", "exact") == "exact"

    @property
    def temperature(self) -> float:
        """Of the sampling; 0 where the calls were greedy."""
        return self.settings["temperature"] if self.settings.get("do_sample") else 0.0

    def to_json(self) -> dict[str, Any]:
        """All fields by name; the heads' accuracies as `head0_top1`, `head0_top2` ..., as a training reports them."""
        plain = asdict(self)
        by_head = plain.pop("head_accuracy") or []
        named = {f"head{i}_top{k}": share for i, shares in enumerate(by_head) for k, share in enumerate(shares, 1)}
        return {**plain, **named}


def summed_up(
    model: Any,
    rounds: Sequence[Round],
    *,
    batch_size: int,
    repeats: int,
    tree_nodes: int | None = None,
    settings: dict[str, Any] | None = None,
    acceptance: dict[str, Any] | None = None,
    captured: bool = False,
    compared: Iterable[str] = (),
    **said: Any,
) -> Measurement:
    """The figures of some rounds.

    Args:
        model: what was measured.
        rounds: at least one.
        batch_size, repeats, settings, acceptance, captured: how it was measured.
        tree_nodes: N, where it is known; else as the steps had it.
        compared: methods that were asked for, also those that could not run.
        said: fields on how the measurement ended.
    """
    split = sum((one.time_split for one in rounds), TimeSplit())
    names = list(dict.fromkeys(name for one in rounds for name in one.runs))
    forms = {name: paces(rounds, name) for name in names}
    whole = figures(rounds)
    said = said if "heads_hash" in said else {**identity(model), **said}
    peaks = {name: max(known) for name in names if (known := peaks_of(rounds, name))}
    others: dict[str, dict[str, Any] | None] = {
        name: other_figures(rounds, name) if name in names else None for name in compared
    }
    fast = others.get(COMPILED)
    return Measurement(
        model=model.name_or_path,
        base=model.base.name_or_path,
        family=model.config.family,
        device=device_name(model.base.device),
        dtype=str(model.base.dtype).removeprefix("torch."),
        batch_size=batch_size,
        new_tokens=sum(one.runs[HEADS].tokens for one in rounds),
        base_forwards=sum(one.runs[HEADS].forwards for one in rounds),
        speedup_over_compiled=None if fast is None else fast["speedup_of_heads"],
        efficiency=efficiency(whole["speedup"], whole["tokens_per_step"]),
        per_category=by_category(rounds),
        tree_nodes=split.nodes if tree_nodes is None else tree_nodes,
        accepted_lengths=histogram(one.accepted for one in rounds),
        transformers=transformers.__version__,
        torch=torch.__version__,
        repeats=repeats,
        settings=settings or {},
        acceptance=acceptance or {},
        captured=captured,
        speedup_spread=spread([fast / slow for fast, slow in zip(forms[HEADS], forms[BASE])]),
        base_tokens_per_second_spread=spread(forms[BASE]),
        tokens_per_second_spread=spread(forms[HEADS]),
        speedup_by_round=quartiles([pace([one], HEADS) / pace([one], BASE) for one in rounds]),
        head_accuracy=top_k_accuracy(one.ranks for one in rounds if one.ranks is not None),
        time_split=split.to_json(),
        peak_memory=peaks or None,
        compared=others,
        **whole,
        **said,
    )


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What is reported of all rounds, and of those of each category."""
    tau = tokens_per_step(one.accepted for one in rounds)
    scores = [score for one in rounds for score in one.quality]
    quality = None
    if scores:
        base, heads = (statistics.mean(values) for values in zip(*scores))
        quality = {"metric": METRIC, "answers": len(scores), "base": base, "heads": heads}
    return {
        "prompts": sum(one.rows for one in rounds),
        "tokens_per_step": tau,
        "base_tokens_per_second": pace(rounds, BASE),
        "tokens_per_second": pace(rounds, HEADS),
        "speedup": pace(rounds, HEADS) / pace(rounds, BASE),
        "identical": all(one.runs[HEADS].identical for one in rounds),
        "differences": counted(
            sum(one.rows for one in rounds), [first for one in rounds for first in one.runs[HEADS].differences]
        ),
        "quality": quality,
        "undrafted": sum(one.undrafted for one in rounds),
    }


def identity(model: Any) -> dict[str, str | None]:
    """`heads_hash` and `base_revision`: what was measured. There is no hash of weights that lie elsewhere."""
    commit = getattr(model.base.config, "_commit_hash", None)
    return {
        "heads_hash": drafter_hash(model.drafter),
        "base_revision": commit or model.config.base_model_revision,
    }


def undrafted_notice(rounds: Sequence[Round]) -> list[str]:
    """One line where the base decoded calls by itself; empty where it did not."""
    count = sum(one.undrafted for one in rounds)
    if not count:
        return []
    told = "which counts in the speedup and not in the tokens per step"
    return [f"{count} of {len(rounds)} calls were decoded by the base itself, {told}."]


def by_category(rounds: Sequence[Round]) -> dict[str, dict[str, Any]]:
    """`figures` of each category, in the order in which they were met."""
    groups: dict[str, list[Round]] = {}
    for one in rounds:
        groups.setdefault(one.category, []).append(one)
    return {category: figures(group) for category, group in groups.items()}


def other_figures(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """Another method against the base and against the heads, over the rounds that it ran in."""
    ran = [one for one in rounds if name in one.runs]
    theirs = pace(ran, name)
    return {
        "tokens_per_second": theirs,
        "speedup": theirs / pace(ran, BASE),
        "speedup_of_heads": pace(ran, HEADS) / theirs,
        "tokens_per_forward": sum(one.runs[name].tokens for one in ran) / sum(one.runs[name].forwards for one in ran),
        "identical": all(one.runs[name].identical for one in ran),
        "tokens_per_second_spread": spread(paces(ran, name)),
    }


def pace(rounds: Sequence[Round], name: str) -> float:
    """Tokens per second of a method, every round counting with its median time."""
    return _pace(rounds, name, statistics.median)


def paces(rounds: Sequence[Round], name: str) -> list[float]:
    """Tokens per second of a method, repeat by repeat, over the rounds that it ran in."""
    ran = [one for one in rounds if name in one.runs]
    repeats = min(len(one.runs[name].seconds) for one in ran)
    return [_pace(ran, name, operator.itemgetter(repeat)) for repeat in range(repeats)]


def _pace(rounds: Sequence[Round], name: str, chosen: Callable[[list[float]], float]) -> float:
    runs = [one.runs[name] for one in rounds]
    return sum(run.tokens for run in runs) / sum(chosen(run.seconds) for run in runs)


def efficiency(speedup: float, tau: float | None) -> float | None:
    """How much of tau became speed."""
    return None if tau is None else speedup / tau


def spread(values: Sequence[float]) -> list[float]:
    """The lowest and the highest."""
    return [min(values), max(values)]


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The median, and the values that a quarter lies below and above.

    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    {'lower': 2.0, 'median': 3.0, 'upper': 4.0}
    """
    if len(values) == 1:
        return dict.fromkeys(("lower", "median", "upper"), values[0])
    return dict(zip(("lower", "median", "upper"), statistics.quantiles(values, n=4, method="inclusive")))


def peaks_of(rounds: Sequence[Round], name: str) -> list[int]:
    """The known memory peaks of a method."""
    runs = [one.runs[name] for one in rounds if name in one.runs]
    return [run.peak_memory for run in runs if run.peak_memory is not None]
