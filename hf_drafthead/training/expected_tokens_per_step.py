"""The expected tokens per step of `generate`, computed from the base's own answers to held-out prompts.

Shapes: B rows, P tokens of the longest prompt, T tokens of the longest text.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.generation.calibration import foretold_steps, rank_paths
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.tree import DraftTree


class ExpectedTokensPerStep:
    """Computes the tokens per step of `generate` on some prompts from one forward pass over the base's answers to them.

    Args:
        prompts: (P,) token ids each.
        new_tokens: of an answer, at most.
        tree: the published 64-node tree by default.
        batch_size: prompts at a time.
        base_changes: whether the answers must be generated again each time, because the base is being trained.

    Raises:
        ValueError: no prompt.
    """

    def __init__(
        self,
        prompts: Sequence[Tensor],
        new_tokens: int = 128,
        tree: DraftTree | None = None,
        batch_size: int = 8,
        base_changes: bool = False,
    ) -> None:
        if not prompts:
            raise ValueError("there is no held-out prompt to compute the expected speed on: give at least one.")
        self.new_tokens, self.tree, self.base_changes = new_tokens, tree, base_changes
        self._batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
        self._answers: list[tuple[Tensor, Tensor, Tensor]] = []

    def __call__(self, model: Any) -> float | None:
        """Tokens per step of a model with draft heads, in eval mode; None where every answer is one token long."""
        vocabulary = model.config.get_text_config().vocab_size
        tree = self.tree or DraftTree.resolve(DEFAULT_TREE, model.drafter.max_depth, vocabulary)
        tokens = steps = 0
        for texts, prompts, lengths in self._texts(model):
            if int((lengths - prompts).max()) < 2:
                continue
            ranks = rank_paths(model, texts, prompts, lengths, depth=tree.max_depth)
            for row in foretold_steps(tree, ranks):
                tokens, steps = tokens + sum(row), steps + len(row)
        return tokens / steps if steps else None

    def _texts(self, model: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Texts (B, T) padded on the right, lengths of their prompts (B,) and of all of them (B,)."""
        if self.base_changes or not self._answers:
            self._answers = [self._answered(model, batch) for batch in self._batches]
        return self._answers

    def _answered(self, model: Any, prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        device = model.base.get_input_embeddings().weight.device
        starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
        width = int(starts.max())
        rows = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
        for row, prompt in zip(rows, prompts, strict=True):
            row[width - len(prompt) :] = prompt.to(device)
        mask = (torch.arange(width, device=device) >= width - starts[:, None]).long()
        config = model.generation_config
        end = config.eos_token_id
        ends = torch.as_tensor([] if end is None else end, device=device).view(-1)
        pad = config.pad_token_id if config.pad_token_id is not None else 0
        texts = model.generate(
            rows, attention_mask=mask, do_sample=False, max_new_tokens=self.new_tokens, pad_token_id=pad
        )
        ended = torch.isin(texts[:, width:], ends)
        written = texts.shape[1] - width
        first_end = torch.where(ended.any(1), ended.int().argmax(1) + 1, written)
        texts = torch.stack(
            [text.roll(-int(width - start)) for text, start in zip(texts, starts, strict=True)]
        )  # prompts begin in the first column
        return texts, starts, starts + first_end
