"""Where two texts first differ, and whether rounding explains it: by how little the base's logits would have to change.

Matrix products of different shapes round differently, so in half precision two tokens with nearly equal logits may be
exchanged. This depends on the hardware; an error in the decoding causes differences at any margin.

Shapes: B rows, P prompt positions, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

ROUNDING_STEPS = 4  # by which two ways to compute a logit may differ, of the largest logit's size
HALVINGS = 24


@dataclass(frozen=True)
class FirstDifference:
    """Where a text leaves the base's."""

    position: int  # new tokens on which both agree
    base: int | None  # the token that follows, None where the text has ended
    heads: int | None
    margin: float | None = None  # in the raw logits, see `BaseCall.margin`, None where no token was chosen differently
    near_tie: bool = False  # whether rounding explains the difference


@dataclass(frozen=True)
class BaseCall:
    """A call of the base's `generate`, with which the heads' text is compared."""

    base: Any  # the causal LM
    prompts: Mapping[str, torch.Tensor]  # `input_ids` and `attention_mask` (B, P)
    settings: Mapping[str, Any]
    seed: int

    def differences(
        self, base_rows: Sequence[Sequence[int]], heads_rows: Sequence[Sequence[int]]
    ) -> list[tuple[int, FirstDifference]]:
        """The rows whose new tokens differ, and where; if only what follows their ends does, the first row."""
        texts = [(row, *pair) for row, pair in enumerate(zip(base_rows, heads_rows)) if pair[0] != pair[1]]
        if not texts:
            return [(0, FirstDifference(max(map(len, base_rows)), None, None))]
        return [(text[0], self.first_difference(*text)) for text in texts]

    def first_difference(self, row: int, base_tokens: Sequence[int], heads_tokens: Sequence[int]) -> FirstDifference:
        """Where two texts of different new tokens first differ, and by how much the base preferred its own."""
        shorter = min(len(base_tokens), len(heads_tokens))
        position = next((at for at in range(shorter) if base_tokens[at] != heads_tokens[at]), shorter)
        theirs, ours = ((text[position] if position < len(text) else None) for text in (base_tokens, heads_tokens))
        if theirs is None or ours is None:
            return FirstDifference(position, theirs, ours)
        margin, allowed = self.margin(row, list(base_tokens[:position]), ours)
        return FirstDifference(position, theirs, ours, margin, margin <= allowed)

    @torch.no_grad()
    def margin(self, row: int, text: list[int], token: int) -> tuple[float, float]:
        """The least margin with which the base chooses a token after `text` in the place of its own, infinite where
        none does; and the margin that rounding explains. The raw logits are changed, so that the change passes every
        processor and the noise that the base drew here: the other token's up, all others down, each by half of it."""
        single = {name: tensor[row : row + 1] for name, tensor in self.prompts.items()}
        prefix = torch.cat([single["input_ids"], single["input_ids"].new_tensor([text])], dim=1)
        mask = torch.cat([single["attention_mask"], torch.ones_like(prefix[:, : len(text)])], dim=1)
        padded = {} if bool(mask.all()) else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
        output = self.base(input_ids=prefix, attention_mask=mask, use_cache=False, **padded)
        logits = output.logits[:, -1].float()  # (1, V)
        processors = self._processors(single)
        noise = None
        if self.settings.get("do_sample"):
            torch.manual_seed(self.seed)
            for _ in range(len(text) + 1):  # `torch.multinomial(p, 1)` is `argmax(p / noise)`, drawn at each position
                every = logits.new_empty(len(self.prompts["input_ids"]), logits.shape[-1]).exponential_(1)
            noise = every[row : row + 1]

        def chosen_at(margin: float) -> bool:
            disturbed = logits - margin / 2
            disturbed[0, token] += margin
            scores = processors(prefix, disturbed)
            best = scores.argmax(-1) if noise is None else (scores.softmax(-1) / noise).argmax(-1)
            return int(best) == token

        epsilon = max(torch.finfo(self.base.dtype).eps, torch.finfo(torch.float32).eps)  # tokens are chosen in float32
        allowed = ROUNDING_STEPS * epsilon * float(logits.abs().max())
        low, high = 0.0, 4 * float(logits.max() - logits.min()) + 100.0
        if chosen_at(low):
            return 0.0, allowed
        if not chosen_at(high):
            return float("inf"), allowed
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if chosen_at(middle) else (middle, high)
        return high, allowed

    def _processors(self, prompts: Mapping[str, torch.Tensor]) -> Any:
        """The logits processors that the base prepares for this call."""
        prepared = []

        def keep_processors(model, input_ids, logits_processor, **_):
            prepared.append(logits_processor)
            return input_ids

        settings = {**self.settings, "stop_strings": None, "token_healing": False}  # for which there is no loop here
        settings.pop("tokenizer", None)
        self.base.generate(**prompts, **settings, custom_generate=keep_processors)
        return prepared[0]


def counted(texts: int, differences: Sequence[FirstDifference]) -> dict[str, Any]:
    """How many texts rounding and faults changed, and the largest margin that rounding explains; as JSON has it."""
    ties = [difference for difference in differences if difference.near_tie]
    return {
        "texts": texts,
        "rounding": len(ties),
        "faults": len(differences) - len(ties),
        "largest_margin": max((tie.margin or 0.0 for tie in ties), default=None),
    }
