"""The time of each stage of a step, as `generate(on_step=...)` reports it.

The clock waits for the device at both ends of every stage, which slows a GPU down: take these figures and the
speed from separate runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hf_drafthead.generation import StepRecord

STAGES = ("draft", "verify", "walk", "commit")


@dataclass
class TimeSplit:
    """The seconds of some steps: of each stage that was timed, and of the whole loop; and how many nodes they verified.

    The stages of a captured step are one program, of which only the whole is timed.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    loop_seconds: float = 0.0
    steps: int = 0
    nodes: int = 0  # of the largest tree

    def __add__(self, other: "TimeSplit") -> "TimeSplit":
        return TimeSplit(
            {stage: self.seconds.get(stage, 0.0) + other.seconds.get(stage, 0.0) for stage in self._timed(other)},
            self.loop_seconds + other.loop_seconds,
            self.steps + other.steps,
            max(self.nodes, other.nodes),
        )

    def note(self, record: StepRecord) -> None:
        """Add a step; the prefill, which is none, is left out."""
        if not record.step:
            return
        for stage in STAGES:
            if stage in record.seconds:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + record.seconds[stage]
        self.loop_seconds += record.seconds["step"]
        self.steps += 1
        self.nodes = max(self.nodes, record.drafted)

    def to_json(self) -> dict[str, float] | None:
        """Milliseconds per step: of each timed stage, the `rest` of the loop and the whole `step`; None if no step."""
        if not self.steps:
            return None
        figures = {stage: 1e3 * seconds / self.steps for stage, seconds in self.seconds.items()}
        step = 1e3 * self.loop_seconds / self.steps
        return {**figures, **({"rest": step - sum(figures.values())} if figures else {}), "step": step}

    def _timed(self, other: "TimeSplit") -> list[str]:
        return [stage for stage in STAGES if stage in self.seconds or stage in other.seconds]


def time_split(call: Callable[[Callable[[StepRecord], None]], Any]) -> TimeSplit:
    """Generate once with draft heads, with the stages timed.

    Args:
        call: generates; it passes what it is given on as `on_step`.
    """
    split = TimeSplit()
    call(split.note)
    return split
