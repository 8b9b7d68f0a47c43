"""What the root alone verified, kept for the drafter: it observes many positions at once, when it is to guess again.

A step of the root alone drafts nothing. A drafter that keeps a history would run a layer, or a model, in each such step
all the same, to remember one position.

Shapes: B rows, F*H features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.dynamic import Tree
from hf_drafthead.generation.memory import nodes_in_memory
from hf_drafthead.generation.state import DecodingState

MOST_WAITING = 128  # positions that wait: as many as the longest pause of "auto", so that few such passes are made


class Waiting(NamedTuple):
    """A drafter's state, and what it must still observe: of a step features (B, 1, F*H), tokens (B, 1), counts (B,)."""

    draft_state: Any
    verified: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], ...] = ()


class Later:
    """Takes the place of a drafter in `commit` after steps of the root alone, and lets verified positions wait."""

    keeps_history = True

    def __init__(self, drafter: Any):
        self.drafter = drafter

    def observe(self, state: Any, features: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor) -> Any:
        """As a drafter's; the state is its own, or `Waiting`."""
        waiting = state if isinstance(state, Waiting) else Waiting(state)
        waiting = waiting._replace(verified=(*waiting.verified, (features, tokens, counts)))
        return waiting if len(waiting.verified) < MOST_WAITING else _observed(self.drafter, waiting)


def observer_of(drafter: Any, tree: Tree) -> Any:
    """What observes in the steps with a tree: the drafter itself, or `Later`."""
    return Later(drafter) if drafter.keeps_history and tree.num_nodes == 1 else drafter


def catch_up(observer: Any, state: DecodingState) -> None:
    """Let a drafter that is to guess observe what waits.

    Raises:
        DoesNotFit: memory is short; the state is as it was.
    """
    waiting = state.rows.draft_state
    if isinstance(waiting, Waiting) and not isinstance(observer, Later):
        with nodes_in_memory(state.caches):
            state.rows = state.rows._replace(draft_state=_observed(observer, waiting))


def _observed(drafter: Any, waiting: Waiting) -> Any:
    """The drafter's own state, once it has observed what waited.

    A row that has ended has counts of 0 from there on, so its valid positions come first, as `observe` wants them.
    """
    features, tokens, counts = zip(*waiting.verified)
    return drafter.observe(
        waiting.draft_state, torch.cat(features, 1), torch.cat(tokens, 1), torch.stack(counts).sum(0)
    )
