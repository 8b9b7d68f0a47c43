"""A call drafts as long as that pays on its text; the tokens of its steps decide, and never the clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

LOSS_SHARE = 0.01  # of a call's steps that drafting may lose where only its cost is known
SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
PRIOR = 3  # steps as usual that the mean begins with
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials, the first for each step of cost
TIMED = 4  # steps of each kind in a call before their times say something


class SwitchRule(NamedTuple):
    """What a `DraftSwitch` starts from, which changes with every step and belongs to one call.

    cost: of a step with the tree, in steps of the root alone; usual: tokens that it emits on usual text; allowance:
    steps of the base that drafting may cost the call, beside `LOSS_SHARE` of its steps, None: whatever the mean takes
    to fall, where `usual` was measured here; watch: is told what steps of the call have cost, for calls after it.
    """

    cost: float
    usual: float
    allowance: float | None = None
    watch: Callable[[float], object] | None = None

    def begin(self) -> DraftSwitch:
        """The switch of a call."""
        return DraftSwitch(self)


class DraftSwitch:
    """A call drafts as long as that pays on its text, else not for a while, ever longer.

    A step with the tree costs as much as `cost` steps of the root alone, which drafts nothing: it pays where it emits
    more tokens than that, in a moving mean over the steps of the call.

    >>> switch = SwitchRule(cost=1.5, usual=2.0).begin()
    >>> [switch.drafts() and not switch.note(1) for step in range(9)]
    [True, True, True, True, False, False, False, True, False]
    """

    def __init__(self, rule: SwitchRule):
        self.cost, self.mean, self.steps = rule.cost, max(rule.usual, rule.cost), PRIOR
        self.allowance = math.inf if rule.allowance is None else rule.allowance
        self.pause, self.left = 0, 0  # steps without drafting, of which so many are left
        self.watch, self.begun, self.drafted = rule.watch, 0.0, False
        self.seconds: tuple[list[float], list[float]] = [], []  # of steps of the root alone, and with the tree

    def drafts(self) -> bool:
        """Whether to draft now; called once for each step."""
        if self.watch is not None:
            self._time(self.watch)
        self.left -= 1
        self.allowance += LOSS_SHARE
        self.drafted = self.left < 0 and self.allowance >= self.cost - 1  # what a step without a right guess loses
        return self.drafted

    def note(self, emitted: float) -> None:
        """Take in how many tokens a step that drafted has emitted."""
        self.steps += 1
        self.allowance += emitted - self.cost
        self.mean += (TRIAL_SHARE if self.pause else max(SHARE, 1 / self.steps)) * (emitted - self.mean)
        longer = int(max(4 * self.pause, FIRST_PAUSE * self.cost))  # a trial that costs more comes later
        self.pause = 0 if self.mean >= self.cost else min(longer, LONGEST_PAUSE)
        self.left = self.pause

    def _time(self, watch: Callable[[float], object]) -> None:
        now = perf_counter()
        if self.begun:
            self.seconds[self.drafted].append(now - self.begun)
        self.begun = now
        if min(map(len, self.seconds)) == TIMED:
            self.watch = None  # a call is judged once
            watch(min(self.seconds[True]) / max(min(self.seconds[False]), 1e-9))
