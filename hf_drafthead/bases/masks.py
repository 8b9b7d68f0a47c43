"""Which slots of a cache each node of a step sees.

Shapes: B rows, n nodes of one forward, M nodes written so far (n included), S slots, R = 1 or B.
"""

from __future__ import annotations

import torch

ALIGNED = 8  # numbers in a row of a GPU's mask: a multiple of this, else attention copies the mask in every layer


def slot_mask(
    ancestors: torch.Tensor,
    past: torch.Tensor,
    extent: int,
    dtype: torch.dtype,
    *,
    visible: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The additive mask (B, 1, n, M + extent) of a step, for the base and for drafters.

    A node sees its ancestors and its row's past. Eager attention would add a boolean mask as 0 and 1.

    Args:
        ancestors: (R, n, M) which nodes each sees, itself included, in the order of the slots.
        past: (B,) past positions of each row.
        extent: past slots.
        dtype: of the attention.
        visible: (B, S') which of the first S' past slots hold no padding; None = all.
        window: positions that a sliding layer sees, by the distance in the text and not in slots; None = all.
        depths: (R, n) of the nodes, where there is a window. Where M is more than n, the nodes are a tree that is no
            deeper than the window.
    """
    rows, nodes = past.shape[0], ancestors.shape[1]
    slots = torch.arange(extent, device=past.device)
    behind = slots < past[:, None]  # (B, S)
    if visible is not None:
        behind = behind & padded(visible, extent)
    behind = behind[:, None].expand(rows, nodes, -1)
    above = ancestors.expand(rows, -1, -1)
    if window is not None and depths is not None:
        if depths.shape[1] == above.shape[2]:
            above = above & (depths[:, :, None] - depths[:, None, :] < window)
        behind = behind & (past[:, None, None] + depths[:, :, None] - slots < window)
    seen = torch.cat([above, behind], dim=-1)[:, None]
    width = seen.shape[-1] if past.device.type == "cpu" else rounded_up(seen.shape[-1], ALIGNED)
    mask = torch.zeros(*seen.shape[:-1], width, dtype=dtype, device=past.device)[..., : seen.shape[-1]]
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def padded(visible: torch.Tensor, extent: int) -> torch.Tensor:
    """(B, extent) which past slots hold no padding, of `visible` (B, S'); there is none behind them."""
    return torch.nn.functional.pad(visible[:, :extent], (0, max(extent - visible.shape[1], 0)), value=True)


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
