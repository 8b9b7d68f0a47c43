"""The time of each stage of a step, as `generate(on_step=...)` reports it.

The clock waits for the device at both ends of every stage, which slows a GPU down: take these figures and the
speed from separate runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_drafthead.generation import StepRecord

STAGES = ("draft", "verify", "accept", "commit")


@dataclass
class TimeSplit:
    """The seconds of some steps: of each stage, and of the whole loop; and how many nodes they verified."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    loop_seconds: float = 0.0
    steps: int = 0
    nodes: int = 0  # of the largest tree

    def __add__(self, other: "TimeSplit") -> "TimeSplit":
        return TimeSplit(
            {stage: self.seconds[stage] + other.seconds[stage] for stage in STAGES},
            self.loop_seconds + other.loop_seconds,
            self.steps + other.steps,
            max(self.nodes, other.nodes),
        )

    def note(self, record: StepRecord) -> None:
        """Add a step; the prefill, which is none, is left out."""
        if not record.step:
            return
        for stage in STAGES:
            self.seconds[stage] += record.seconds.get(stage, 0.0)
        self.loop_seconds += record.seconds["step"]
        self.steps += 1
        self.nodes = max(self.nodes, record.drafted)

    def to_json(self) -> dict[str, float] | None:
        """Milliseconds per step: of each stage, of the `rest` of the loop, and of the whole `step`; None if no step."""
        if not self.steps:
            return None
        figures = {stage: 1e3 * seconds / self.steps for stage, seconds in self.seconds.items()}
        step = 1e3 * self.loop_seconds / self.steps
        return {**figures, "rest": step - sum(figures.values()), "step": step}


def time_split(call: Callable[[Callable[[StepRecord], None]], Any]) -> TimeSplit:
    """Generate once with draft heads, with the stages timed.

    Args:
        call: generates; it passes what it is given on as `on_step`.
    """
    split = TimeSplit()
    call(split.note)
    return split
