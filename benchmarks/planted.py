"""A drafter that is right as often as it is told, at the cost of a real one.

The heads below it run as they do; then the score of the base's own next token is raised where the guess shall be right,
and lowered where it shall be wrong. So a step costs what the family costs, and emits as many tokens as are wanted.

Shapes: B rows, A newly verified positions, T positions of the text, n nodes of a level.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.drafter import Drafter

FAR = 1e4  # larger than any score


class PlantedState(NamedTuple):
    """inner: of the real heads; position: (B,) of each row's root in the text; depth: levels that were guessed."""

    inner: Any
    position: Tensor
    depth: int = 0


class PlantedDrafter(Drafter):
    """Real heads, made right `right` times per step.

    Args:
        inner: the real heads, which score every token of the base.
        text: (B, T) prompt and continuation of every row, as the base writes them; the prompts are not padded.
        right: guesses of every step that are right.
    """

    keeps_history = True

    def __init__(self, inner: Drafter, text: Tensor, right: int):
        super().__init__(inner.config)
        if not inner.reads or inner.draft_tokens is not None:
            raise ValueError(f"{type(inner).__name__} cannot be made right: expected heads over the base's vocabulary.")
        self.inner, self.text, self.right = inner, text, right
        self.reads = inner.reads
        self.attach(inner.base)
        self.train(inner.training)

    def start(self, batch_size: int, capacity: int) -> PlantedState:
        position = torch.zeros(batch_size, dtype=torch.long, device=self.text.device)
        return PlantedState(self.inner.start(batch_size, capacity), position)

    def observe(self, state: PlantedState, features: Tensor, tokens: Tensor, lengths: Tensor) -> PlantedState:
        position = state.position + lengths
        return PlantedState(self.inner.observe(state.inner, features, tokens, lengths), position)

    def expand(self, state: PlantedState, tokens: Tensor, parents: Tensor) -> tuple[PlantedState, Guesses]:
        inner, guesses = self.inner.expand(state.inner, tokens, parents)
        where = (state.position + state.depth + 1).clamp(max=self.text.shape[1] - 1)
        truth = self.text.gather(1, where[:, None])[:, :, None].expand(-1, guesses.logits.shape[1], 1)
        change = torch.full_like(truth, 1, dtype=guesses.logits.dtype) * (FAR if state.depth < self.right else -FAR)
        scores = guesses.logits.scatter_add(2, truth, change)
        return PlantedState(inner, state.position, state.depth + 1), Guesses(scores)
