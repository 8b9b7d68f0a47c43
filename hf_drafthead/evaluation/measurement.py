"""What was measured: one `Round` per batch of prompts, and the figures that a list of rounds adds up to.

Shapes: B rows, S steps, M positions, K heads.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import __version__ as transformers_version

from hf_drafthead.evaluation.calls import BASE, COMPILED, HEADS
from hf_drafthead.evaluation.rounding import FirstDifference, counted
from hf_drafthead.generation import StepRecord
from hf_drafthead.trees.entries import device_name, drafter_hash

STAGES = ("draft", "verify", "walk", "commit")
COPIED = -1  # in the place of a guess's depth: it was copied from the text


@dataclass
class Run:
    """The result of one method in a round."""

    seconds: list[float]  # of each repeat
    tokens: int  # generated, each row up to its own end
    identical: bool = True  # to the base's tokens
    differences: list[FirstDifference] = field(default_factory=list)  # of the heads where there should be none


@dataclass
class Round:
    """One batch of prompts, decoded by every method in turn."""

    category: str
    rows: int
    runs: dict[str, Run]  # by method
    accepted: torch.Tensor  # (B, S) of the heads
    steps: list[StepRecord] = field(default_factory=list)  # of a further run of the heads
    undrafted: int = 0  # calls of the heads that the base decoded by itself

    def note(self, record: StepRecord) -> None:
        """Keep a step, as `generate(on_step=...)` reports it; the prefill, which is none, is left out."""
        if record.step:
            self.steps.append(record)


@dataclass(frozen=True)
class Measurement:
    """One model on one list of prompts; `to_json` is its JSON form.

    Speeds and speedups are medians over the repeats, each summed over all rounds, and a spread is the lowest and the
    highest of them.
    """

    model: str
    base: str
    family: str
    device: str
    dtype: str
    batch_size: int
    prompts: int
    new_tokens: int  # over all prompts, each row up to its own end
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
    steps: int  # of all rows, without the prompts' forwards
    drafting_share: float | None  # of the steps; in the others a switch left the root alone
    tokens_per_drafting_step: float | None
    transformers: str
    torch: str
    repeats: int
    speedup_spread: list[float]
    time_split: dict[str, float] | None  # milliseconds per step
    compared: dict[str, dict[str, Any] | None]  # others than the base, None where one could not run
    settings: dict[str, Any] = field(default_factory=dict)  # of `generate`
    acceptance: dict[str, Any] = field(default_factory=dict)  # settings that only the heads were given
    captured: bool = False  # whether the heads' steps were compiled
    undrafted: int = 0  # calls that the base decoded by itself, which say nothing of the heads
    heads_hash: str | None = None  # of the weights that were measured
    base_revision: str | None = None
    complete: bool = True
    stopped: str | None = None  # why the call ended early; if this one is complete, it ended after it
    calibrated: bool = False  # for calls of so many rows on this machine
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
        """All fields by name."""
        return asdict(self)


def summed_up(model: Any, rounds: Sequence[Round], *, compared: Iterable[str] = (), **how: Any) -> Measurement:
    """The figures of some rounds, at least one, with those of `compared` methods, also such that could not run; `how`
    are fields of `Measurement` on how it was measured, and how it ended."""
    steps = [step for batch in rounds for step in batch.steps]
    names = dict.fromkeys(name for batch in rounds for name in batch.runs)
    speedups = ratios(rounds, HEADS, BASE)
    whole, categories = figures(rounds), dict.fromkeys(batch.category for batch in rounds)
    tau = whole["tokens_per_step"]
    others: dict[str, dict[str, Any] | None] = {
        name: other_figures(rounds, name) if name in names else None for name in compared
    }
    compiled = others.get(COMPILED)
    return Measurement(
        new_tokens=sum(batch.runs[HEADS].tokens for batch in rounds),
        speedup_over_compiled=None if compiled is None else compiled["speedup_of_heads"],
        efficiency=None if tau is None else whole["speedup"] / tau,
        per_category={name: figures([batch for batch in rounds if batch.category == name]) for name in categories},
        steps=sum(int((batch.accepted > 0).sum()) for batch in rounds),
        tree_nodes=max((step.drafted for step in steps), default=0),
        **drafting_steps(steps),
        speedup_spread=[min(speedups), max(speedups)],
        time_split=time_split(steps),
        compared=others,
        **whole,
        **identity(model),
        **how,
    )


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """What is reported of all rounds, and of those of each category."""
    prompts = sum(batch.rows for batch in rounds)
    return {
        "prompts": prompts,
        "tokens_per_step": tokens_per_step(batch.accepted for batch in rounds),
        "base_tokens_per_second": statistics.median(paces(rounds, BASE)),
        "tokens_per_second": statistics.median(paces(rounds, HEADS)),
        "speedup": statistics.median(ratios(rounds, HEADS, BASE)),
        "identical": all(batch.runs[HEADS].identical for batch in rounds),
        "differences": counted(prompts, [first for batch in rounds for first in batch.runs[HEADS].differences]),
        "undrafted": sum(batch.undrafted for batch in rounds),
    }


def drafting_steps(steps: Sequence[StepRecord]) -> dict[str, Any]:
    """In which share of the steps anything was guessed, and how many tokens such a step emitted in each row."""
    counts = [count for step in steps if step.drafted > 1 for count in step.counts if count]
    drafting = sum(step.drafted > 1 for step in steps)
    return {
        "drafting_share": drafting / len(steps) if steps else None,
        "tokens_per_drafting_step": statistics.fmean(counts) if counts else None,
    }


def identity(model: Any) -> dict[str, Any]:
    """What was measured, and with what. There is no hash of weights that lie elsewhere."""
    commit = getattr(model.base.config, "_commit_hash", None)
    return {
        "model": model.name_or_path,
        "base": model.base.name_or_path,
        "family": model.config.family,
        "heads_hash": drafter_hash(model.drafter),
        "base_revision": commit or model.config.base_model_revision,
        "device": device_name(model.base.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "transformers": transformers_version,
        "torch": torch.__version__,
    }


def time_split(steps: Sequence[StepRecord]) -> dict[str, float] | None:
    """Milliseconds per step: of each timed stage, the `rest` of the loop and the whole `step`; None if no step. The
    clock waits for the device around each stage, so the speed comes from separate runs."""
    if not steps:
        return None
    stages = [stage for stage in STAGES if any(stage in step.seconds for step in steps)]
    parts = {name: 1e3 * statistics.fmean(step.seconds.get(name, 0.0) for step in steps) for name in (*stages, "step")}
    whole = parts.pop("step")
    return {**parts, **({"rest": whole - sum(parts.values())} if parts else {}), "step": whole}


def other_figures(rounds: Sequence[Round], name: str) -> dict[str, Any]:
    """Another method against the base and against the heads, over the rounds that it ran in."""
    ran = [batch for batch in rounds if name in batch.runs]
    return {
        "tokens_per_second": statistics.median(paces(ran, name)),
        "speedup": statistics.median(ratios(ran, name, BASE)),
        "speedup_of_heads": statistics.median(ratios(ran, HEADS, name)),
        "identical": all(batch.runs[name].identical for batch in ran),
    }


def paces(rounds: Sequence[Round], name: str) -> list[float]:
    """Tokens per second of a method, repeat by repeat, over the rounds that it ran in."""
    runs = [batch.runs[name] for batch in rounds if name in batch.runs]
    repeats = zip(*(run.seconds for run in runs))  # as many as the shortest round has
    return [sum(run.tokens for run in runs) / sum(seconds) for seconds in repeats]


def ratios(rounds: Sequence[Round], name: str, other: str) -> list[float]:
    """How many times as fast a method was as another one, repeat by repeat; both ran in all of these rounds."""
    return [ours / theirs for ours, theirs in zip(paces(rounds, name), paces(rounds, other))]


def tokens_per_step(accepted_lengths: Iterable[torch.Tensor]) -> float | None:
    """Tokens emitted per step (tau), over all rows of all calls; None where there was no step.

    Args:
        accepted_lengths: one (B, S) tensor per call, 0 after a row ended, as `generate` returns it.

    >>> tokens_per_step([torch.tensor([[3, 1], [2, 0]])])
    2.0
    """
    emitted = steps = 0
    for lengths in accepted_lengths:
        emitted += int(lengths.sum())
        steps += int((lengths > 0).sum())
    return emitted / steps if steps else None
