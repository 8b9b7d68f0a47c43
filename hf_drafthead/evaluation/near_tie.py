"""Whether rounding explains a difference: by how little the logits of the base would have to change at that position.

Matrix products of different shapes round differently, so in half precision two tokens with nearly equal logits may be
exchanged. This depends on the hardware; an error in the decoding causes differences at any margin.

Shapes: B rows, P prompt positions, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any

import torch

ROUNDING_STEPS = 4  # by which two ways to compute a logit may differ, of the largest logit's size
HALVINGS = 24


@torch.no_grad()
def margin_of(
    base: Any,
    given: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    row: int,
    text: list[int],
    token: int,
    seed: int,
) -> tuple[float, float]:
    """The margin between the token that the base chose and another one.

    The raw logits are changed: the other token's up, all others down, each by half the margin. The change thus passes
    through every processor and, in sampling, is combined with the noise that the base drew at this position.

    Args:
        base: the causal LM.
        given: `input_ids` and `attention_mask` (B, P) of the call.
        settings: of the call.
        row: which of the B.
        text: the new tokens of the row on which both agree.
        token: what the base did not choose.
        seed: of the call.

    Returns:
        the smallest margin with which the base chooses `token`, infinite where none does; and the margin that rounding
        explains.
    """
    own = {name: tensor[row : row + 1] for name, tensor in given.items()}
    prefix = torch.cat([own["input_ids"], own["input_ids"].new_tensor([text])], dim=1)
    mask = torch.cat([own["attention_mask"], torch.ones_like(prefix[:, : len(text)])], dim=1)
    padded = {} if bool(mask.all()) else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    logits = base(input_ids=prefix, attention_mask=mask, use_cache=False, **padded).logits[:, -1].float()  # (1, V)
    processors = _processors(base, own, settings)
    noise = None
    if settings.get("do_sample"):
        noise = _noise(logits, len(given["input_ids"]), len(text), seed)[row : row + 1]

    def chosen_at(margin: float) -> bool:
        disturbed = logits - margin / 2
        disturbed[0, token] += margin
        scores = processors(prefix, disturbed)
        best = scores.argmax(-1) if noise is None else (scores.softmax(-1) / noise).argmax(-1)
        return int(best) == token

    epsilon = max(torch.finfo(base.dtype).eps, torch.finfo(torch.float32).eps)  # tokens are chosen in float32
    allowed = ROUNDING_STEPS * epsilon * float(logits.abs().max())
    low, high = 0.0, 4 * float(logits.max() - logits.min()) + 100.0
    if chosen_at(low):
        return low, allowed
    if not chosen_at(high):
        return float("inf"), allowed
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if chosen_at(middle) else (middle, high)
    return high, allowed


def _processors(base: Any, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Any:
    """The logits processors that the base prepares for this call."""
    found = []

    def look(model, input_ids, logits_processor, **_):
        found.append(logits_processor)
        return input_ids

    base.generate(**given, **settings, custom_generate=look)
    return found[0]


def _noise(like: torch.Tensor, rows: int, position: int, seed: int) -> torch.Tensor:
    """(B, V) the noise of one position; `torch.multinomial(p, 1)` is `argmax(p / noise)`, drawn again at each."""
    torch.manual_seed(seed)
    for _ in range(position + 1):
        noise = like.new_empty(rows, like.shape[-1]).exponential_(1)
    return noise
