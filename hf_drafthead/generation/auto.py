"""How the steps of a call are made: with one tree, or each with one of several.

With `draft_tree="auto"` a step takes the tree that pays most on this text. A calibration entry says what a step of n
nodes costs, and how many tokens it gives on usual text. Then

    tokens per second of n nodes = (1 + gain * (tokens_per_step_n - 1)) / seconds_n

where `gain` says how much of the usual gain this text gives: a moving mean over the steps of the call, in a batch of
the row that is the furthest behind, with which the call will end. On foreign text it falls, the trees become smaller,
and at last the root alone is left, which drafts nothing: at the start of a call after a few steps, since the
calibration counts as two right guesses of the mean there, and a step as those that its tree gives on usual text. A
small tree is tried now and then all the same, ever more rarely as long as it gives nothing. The text is the base's own
whatever is drafted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hf_drafthead.generation.capture import Capture, CapturedStep
from hf_drafthead.generation.ladder import Ladder, Trees, TreesInTurn
from hf_drafthead.generation.memory import FittingStep
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.slots import fixed_slots
from hf_drafthead.generation.state import DecodingState, Walk
from hf_drafthead.generation.step import Step
from hf_drafthead.generation.tree import DraftTree

SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
USUAL = 2  # right guesses as usual: at the beginning of a call the mean is that of these and its own steps
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials


def steps_of(
    settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None, state: DecodingState
) -> FittingStep:
    """What takes the steps of a call.

    Args:
        settings: with the tree, or with the trees to choose from.
        make: a step with the tree of some settings.
        capture: how to capture steps, where they are to be captured.
        state: of the call.
    """
    step: Step | CapturedStep | StepWithTrees
    if isinstance(settings.tree, Ladder):
        step = AutoStep(settings, make, capture)
    elif isinstance(settings.tree, TreesInTurn):
        step = StepInTurn(settings, make, capture)
    else:
        step = make(settings)
        step = capture.prepared(step, state) if capture else step
    return FittingStep(step, lambda tree: make(replace(settings, draft_tree=tree)))


class StepWithTrees(ABC):
    """A step with one of several trees. Arguments as in `steps_of`."""

    ahead = 0

    def __init__(self, settings: DraftSettings, make: Callable[[DraftSettings], Step], capture: Capture | None):
        assert isinstance(settings.tree, Trees)
        self.trees: Any = settings.tree  # of the kind that a subclass chooses from
        self.settings, self.make, self.capture = settings, make, capture
        self.steps: dict[int, Step | CapturedStep] = {}
        self.used = 0

    @property
    def tree(self) -> DraftTree:
        """Of the last step."""
        return self.trees.trees[self.used]

    def __call__(self, state: DecodingState) -> tuple[Walk, dict[str, float]]:
        """Take one step; returns what it kept, and the seconds of its stages."""
        self.used = self.chosen(state)
        return self._step(state)(state)

    @abstractmethod
    def chosen(self, state: DecodingState) -> int:
        """Which tree the next step takes."""

    def _step(self, state: DecodingState) -> Step | CapturedStep:
        found = self.steps.get(self.used)
        if found is None:
            step = self.make(replace(self.settings, draft_tree=self.tree))
            step.slots = fixed_slots(self.trees.slots)  # caches of one shape serve all trees
            found = self.capture.prepared(step, state) if self.capture else step
            if self.capture and not isinstance(found, CapturedStep):
                # captured and other steps do not share caches: from now on none is captured
                self.capture = None
                self.steps.clear()
                for cache in state.caches:
                    if cache.fixed:
                        cache.free()
            self.steps[self.used] = found
        return found


class StepInTurn(StepWithTrees):
    """A step with the tree whose turn it is."""

    def chosen(self, state: DecodingState) -> int:
        return self.trees.order[len(state.counted) % len(self.trees.order)]


class AutoStep(StepWithTrees):
    """A step with the tree that pays most on the text so far."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gain, self.learned = 1.0, 0.0
        self.pause, self.waited, self.tried = FIRST_PAUSE, 0, False

    def chosen(self, state: DecodingState) -> int:
        if state.counted:
            self._learn(state)
        return self._chosen()

    def _chosen(self) -> int:
        best, self.tried = self.trees.best(self.gain), False
        if best or len(self.trees.trees) == 1:
            self.pause, self.waited = FIRST_PAUSE, 0
            return best
        self.waited += 1
        if self.waited <= self.pause:
            return 0
        self.pause, self.waited, self.tried = min(2 * self.pause, LONGEST_PAUSE), 0, True
        return 1

    def _learn(self, state: DecodingState) -> None:
        """Take in what the last step gave to the row that was the furthest behind: the call ends with that row."""
        counts = state.counted[-1]
        running = [row for row, count in enumerate(counts) if count]  # 0 in those that had ended
        if not self.used or not running:
            return
        gave = counts[min(running, key=lambda row: state.lengths[row] - counts[row])] - 1
        usual = max(self.trees.tokens_per_step[self.used] - 1, 0.01)
        share = TRIAL_SHARE if self.tried else max(SHARE, usual / (USUAL + self.learned + usual))
        self.learned += 0.0 if self.tried else usual
        self.gain += share * (gave / usual - self.gain)
