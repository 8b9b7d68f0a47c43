"""How the steps of a call are made: with its tree, or with `draft_tree="auto"` also of the root alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_drafthead.generation.capture import Capture, CapturedStep
from hf_drafthead.generation.memory import FittingStep
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.slots import fixed_slots
from hf_drafthead.generation.state import DecodingState, Walk
from hf_drafthead.generation.step import Step
from hf_drafthead.generation.tree import DraftTree


def steps_of(
    settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None, state: DecodingState
) -> FittingStep:
    """What takes the steps of a call.

    Args:
        settings: with the tree, and with the switch where there is one.
        make: a step with the tree of some settings.
        capture: how to capture steps, where they are to be captured.
        state: of the call.
    """
    step: Step | CapturedStep | SwitchedStep
    if settings.switch is not None:
        step = SwitchedStep(settings, make, capture)
    else:
        step = make(settings)
        step = capture.prepared(step, state) if capture else step
    return FittingStep(step, lambda tree: make(replace(settings, draft_tree=tree, switch=None)))


class SwitchedStep:
    """A step with the tree, or of the root alone. Arguments as in `steps_of`."""

    ahead = 0

    def __init__(self, settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None):
        assert settings.switch is not None
        self.settings, self.make, self.capture, self.switch = settings, make, capture, settings.switch
        self.trees = {True: settings.tree, False: DraftTree.root_alone()}
        self.steps: dict[bool, Step | CapturedStep] = {}
        self.tree = settings.tree

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages."""
        if state.counted and self.tree.num_nodes > 1:
            counts = state.counted[-1]
            running = [row for row, count in enumerate(counts) if count]  # 0 in those that had ended
            if running:
                self.switch.note(counts[min(running, key=lambda row: state.lengths[row] - counts[row])])
        drafts = self.switch.drafts()
        self.tree = self.trees[drafts]
        return self._step(drafts, state)(state)

    def _step(self, drafts: bool, state: DecodingState) -> Any:
        found = self.steps.get(drafts)
        if found is None:
            step = self.make(replace(self.settings, draft_tree=self.tree, switch=None))
            step.slots = fixed_slots(self.trees[True].slots)  # caches of one shape serve both
            found = self.capture.prepared(step, state) if self.capture else step
            if self.capture and not isinstance(found, CapturedStep):
                # captured and other steps do not share caches: from now on none is captured
                self.capture = None
                self.steps.clear()
                for cache in state.caches:
                    if cache.fixed:
                        cache.free()
            self.steps[drafts] = found
        return found
