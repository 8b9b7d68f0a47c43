"""`draft_tree="auto"`: a call drafts as long as that pays on its text, else not for a while, ever longer.

A step with the tree costs as much as `cost` steps of the root alone, which drafts nothing: it pays where it emits more
tokens than that. What it emits is a moving mean over the steps of the call, in a batch of the row that is the furthest
behind, with which the call will end. The text is the base's own whatever is drafted.
"""

from __future__ import annotations

SHARE = 0.05  # of the last step in the moving mean: with more, a few steps without a right guess end drafting too often
TRIAL_SHARE = 0.3  # of a step that was tried after a pause
PRIOR = 3  # steps as usual that the mean begins with
FIRST_PAUSE, LONGEST_PAUSE = 2, 128  # steps without drafting between two trials


class DraftSwitch:
    """Whether the next step of a call drafts.

    Args:
        cost: seconds of a step with the tree, in steps of the root alone.
        usual: tokens that a step emits on usual text.

    >>> switch = DraftSwitch(cost=1.5, usual=2.0)
    >>> [switch.drafts() and not switch.note(1) for step in range(9)]
    [True, True, True, True, False, False, True, False, False]
    """

    def __init__(self, cost: float, usual: float):
        self.cost, self.mean, self.steps = cost, max(usual, cost), PRIOR
        self.pause, self.left = 0, 0  # steps without drafting, of which so many are left

    def drafts(self) -> bool:
        """Whether to draft now; called once for each step."""
        self.left -= 1
        return self.left < 0

    def note(self, emitted: int) -> None:
        """Take in how many tokens a step that drafted has emitted."""
        self.steps += 1
        self.mean += (TRIAL_SHARE if self.pause else max(SHARE, 1 / self.steps)) * (emitted - self.mean)
        self.pause = 0 if self.mean >= self.cost else min(max(2 * self.pause, FIRST_PAUSE), LONGEST_PAUSE)
        self.left = self.pause
