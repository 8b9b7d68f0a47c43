"""The expected tokens per step of `generate`, computed from the base's own answers to held-out prompts.

Shapes: B rows, P tokens of the longest prompt, T tokens of the longest text.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.rank_paths import (
    Texts,
    check_temperature,
    foretold_steps,
    own_texts,
    rank_paths,
    tilt_of_seed,
)


class ExpectedTokensPerStep:
    """Computes the tokens per step of `generate` on some prompts from one forward pass over the base's answers to them.

    Args:
        prompts: (P,) token ids each.
        new_tokens: of an answer, at most.
        tree: the published 64-node tree by default.
        batch_size: prompts at a time.
        base_changes: whether the answers must be generated again each time, because the base is being trained.
        temperature: at which the base samples its answers, and the guesses know the noise; 0 is greedy. The seed of
            each batch is its number, from 0.

    Raises:
        ValueError: no prompt, or a temperature below 0.
    """

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
        check_temperature(temperature)
        self.new_tokens, self.tree, self.base_changes = new_tokens, tree, base_changes
        self.temperature = temperature
        self._batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        self._answers: list[Texts] = []

    def __call__(self, model: Any) -> float | None:
        """Tokens per step of a model with draft heads, in eval mode; None where every answer is one token long."""
        vocabulary = draft_vocabulary(model.base, model.drafter)
        tree = self.tree or DraftTree.resolve(DEFAULT_TREE, model.drafter.max_depth, vocabulary)
        tokens = steps = 0
        for seed, (texts, prompts, lengths) in enumerate(self._texts(model)):
            if int((lengths - prompts).max()) < 2:
                continue
            tilt = tilt_of_seed(model, len(texts), self.new_tokens, self.temperature, seed)
            ranks = rank_paths(model, texts, prompts, lengths, depth=tree.max_depth, tilt=tilt)
            for row in foretold_steps(tree, ranks):
                tokens, steps = tokens + sum(row), steps + len(row)
        return tokens / steps if steps else None

    def _texts(self, model: Any) -> list[Texts]:
        """Texts (B, T) padded on the right, lengths of their prompts (B,) and of all of them (B,)."""
        if self.base_changes or not self._answers:
            self._answers = [
                own_texts(model, batch, self.new_tokens, self.temperature, seed)
                for seed, batch in enumerate(self._batches)
            ]
        return self._answers
