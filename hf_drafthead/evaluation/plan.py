"""One call of `hf-drafthead bench`: several models on the same questions, with everything that was asked for."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hf_drafthead.evaluation.bench import INTERRUPTED, bench
from hf_drafthead.evaluation.load_options import LoadOptions, load_here
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.speed import batched
from hf_drafthead.generation.tree import DraftTree


@dataclass(frozen=True)
class Plan:
    """What to measure.

    models: folders or ids; questions: for all of them; settings: of `generate`; temperatures: 0 is greedy; of several
    each is measured with every kind of acceptance; trees: each is measured; None is the model's own; chat_template:
    text of a template that takes the place of the tokenizers'; thresholds: of typical acceptance, each measured besides
    exact acceptance, with its root for alpha as in the Medusa paper; captured, compare, batch_sizes, repeats, seed: see
    `bench`; load: how to load every model.
    """

    models: Sequence[str]
    questions: Sequence[Question]
    settings: dict[str, Any]
    temperatures: Sequence[float] = ()
    trees: Sequence[str | DraftTree | None] = (None,)
    chat_template: str | None = None
    thresholds: Sequence[float] = ()
    captured: bool = False
    compare: Sequence[str] = ()
    batch_sizes: Sequence[int] = (1,)
    repeats: int = 3
    seed: int = 0
    load: LoadOptions = LoadOptions()

    def __post_init__(self):
        if not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError(f"--epsilon is {list(self.thresholds)}: expected probabilities, from 0 to 1.")

    @property
    def batches(self) -> int:
        """How often `progress` is called at most: less where memory runs out, or where processes share the work."""
        each = sum(len(batched(self.questions, size)) for size in self.batch_sizes)
        return len(self.models) * len(self.trees) * len(list(self.runs())) * each

    def runs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The settings of `generate` and those of the heads alone, for every measurement of a model."""
        curve = len(self.temperatures) > 1
        for heat in self.temperatures or (None,):
            choice = {} if heat is None else {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
            settings = {**choice, **self.settings}
            yield settings, {"acceptance": "exact"} if curve or self.thresholds else {}
            if curve and heat:
                yield settings, {"acceptance": "rejection"}
            if curve and heat and not self.thresholds:
                yield settings, {"acceptance": "typical"}
            for threshold in self.thresholds:
                typical = {"posterior_threshold": threshold, "posterior_alpha": threshold**0.5}
                yield settings, {"acceptance": "typical", **typical}


@dataclass
class Outcome:
    """What was measured, and why it is not all, if it is not."""

    measurements: list[Measurement] = field(default_factory=list)
    stopped: str | None = None


def carry_out(
    plan: Plan,
    *,
    begin: Callable[[str], Callable[[], object]],
    tell: Callable[[str], object],
    keep: Callable[[list[Measurement]], object],
) -> Outcome:
    """Measure one model after the other.

    Args:
        plan: what to measure.
        begin: is given each model's name, and gives what to call after each batch of questions.
        tell: called with every notice.
        keep: is given all measurements so far, whenever there are new ones, so that none is lost.

    Raises:
        KeyboardInterrupt: before anything was measured.
        OSError, TypeError, ValueError: what `load` or `bench` refuse.
    """
    outcome = Outcome()
    try:
        for name in plan.models:
            model, tokenizer = load_here(name, plan.load)
            if plan.chat_template is not None:
                tokenizer.chat_template = plan.chat_template
            progress = begin(name.rstrip("/").rsplit("/")[-1])
            for tree, (settings, acceptance) in itertools.product(plan.trees, plan.runs()):
                found = bench(
                    model,
                    tokenizer,
                    plan.questions,
                    settings,
                    tree=tree,
                    acceptance=acceptance,
                    captured=plan.captured,
                    compare=plan.compare if acceptance.get("acceptance", "exact") == "exact" else (),
                    batch_sizes=plan.batch_sizes,
                    repeats=plan.repeats,
                    seed=plan.seed,
                    progress=progress,
                    tell=tell,
                )
                outcome.measurements += found
                keep(outcome.measurements)
                faults = sum(one.differences["faults"] for one in found)
                if faults:
                    tell(
                        f"{name}: {faults} texts differ from the base's by more than rounding explains: "
                        "`hf-drafthead verify` finds the shortest prompt that shows it."
                    )
                if found[-1].stopped == INTERRUPTED:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not outcome.measurements:
            raise
        outcome.stopped = INTERRUPTED
        if outcome.measurements[-1].stopped != INTERRUPTED:  # it came between two measurements
            outcome.measurements[-1] = replace(outcome.measurements[-1], stopped=INTERRUPTED)
            keep(outcome.measurements)
    return outcome
