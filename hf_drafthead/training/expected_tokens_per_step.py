"""The expected tokens per step of `generate`, computed from the base's own answers to held-out prompts.

Shapes: B rows, P tokens of the longest prompt, T tokens of the longest text.
"""

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import DraftTree, resolve
from hf_drafthead.training.answers import one_text
from hf_drafthead.trees import rank_paths


class ExpectedTokensPerStep:
    """Computes the tokens per step of `generate` on some prompts (P,) from one forward pass over the base's answers to
    them, which are generated anew each time where `base_changes`. The seed of each batch is its number, from 0."""

    def __init__(
        self,
        prompts: Sequence[Tensor],
        new_tokens: int = 128,
        tree: DraftTree | None = None,
        batch_size: int = 8,
        base_changes: bool = False,
        temperature: float = 0.0,
    ) -> None:
        if not prompts:
            raise ValueError("there is no held-out prompt to compute the expected speed on: give at least one.")
        rank_paths.check_temperature(temperature)
        self.new_tokens, self.tree, self.base_changes = new_tokens, tree, base_changes
        self.temperature = temperature
        self._batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        self._answers: dict[int, rank_paths.Texts] = {}

    def __call__(self, model: Any) -> float | None:
        """Tokens per step of a model in eval mode; None where every answer is one token long."""
        tokens = steps = 0
        for number in range(len(self)):
            emitted = self._emitted(model, number)
            tokens, steps = tokens + sum(emitted), steps + len(emitted)
        return tokens / steps if steps else None

    def __len__(self) -> int:
        return len(self._batches)

    def tried(self, model: Any) -> tuple[float, float, float]:
        """Seconds that the base takes to answer all prompts, the heads to guess, and a token of an answer takes."""
        start = time.perf_counter()
        texts, prompts, lengths = self._answered(model, 0)
        answered = time.perf_counter()
        self._emitted(model, 0)
        answer, guess = answered - start, time.perf_counter() - answered
        return answer * len(self), guess * len(self), answer / max(int((lengths - prompts).max()), 1)

    def _emitted(self, model: Any, number: int) -> list[int]:
        tree: Any = self.tree or resolve(DEFAULT_TREE, *guessed_among(model))
        texts, prompts, lengths = self._answered(model, number)
        if int((lengths - prompts).max()) < 2:
            return []
        tilt = rank_paths.tilt_of_seed(model, len(texts), self.new_tokens, self.temperature, number)
        ranks = rank_paths.rank_paths(model, texts, prompts, lengths, depth=tree.max_depth, tilt=tilt)
        return [emitted for text in ranks for emitted in rank_paths.foretold_steps(tree, text)]

    def _answered(self, model: Any, number: int) -> rank_paths.Texts:
        """Texts (B, T) of a batch padded on the right, lengths of their prompts (B,) and of all of them (B,)."""
        if self.base_changes or number not in self._answers:
            batch = self._batches[number]
            plain = one_text(model)
            self._answers[number] = rank_paths.own_texts(
                model, batch, self.new_tokens, self.temperature, number, **plain
            )
        return self._answers[number]
