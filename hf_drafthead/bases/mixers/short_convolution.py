"""The tree form of a short, depthwise, causal convolution, which all mixers have; LFM2's layers have nothing else.

A node's window is its nearest ancestors and, before the root, the last inputs that were committed.

Shapes: B rows, N nodes, C channels, W width, R = 1 or B.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_drafthead.bases.mixers.layer import AcceptedPath, Nodes
from hf_drafthead.bases.releases import ACT2FN


class ShortConvolution:
    """A layer that folds nothing into a state."""

    def record(self, inputs: torch.Tensor, state: torch.Tensor) -> dict[str, tuple[int, ...]]:
        return {}

    def fold(self, state: torch.Tensor, accepted: dict[str, torch.Tensor], path: AcceptedPath) -> None:
        pass


def convolve_nodes(
    hidden_states: Nodes,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """As `causal_conv1d_fn`, over nodes, of a weight (C, W) and a bias (C,): (B, C, N)."""
    layer, inputs = hidden_states.layer, hidden_states.inputs
    layer.write(f"inputs {hidden_states.number}", inputs.transpose(1, 2))
    windows = hidden_states.tree.windows(weight.shape[-1], inputs.device)  # (R, N, W)
    line = torch.cat([layer.held_inputs[hidden_states.number][..., -weight.shape[-1] :], inputs], 2).to(weight.dtype)
    places = windows.flatten(1)[:, None].expand(-1, inputs.shape[1], -1)
    seen = line.index_select(2, windows.flatten()) if len(windows) == 1 else line.gather(2, places)
    return convolved(seen.view(*inputs.shape, -1), weight, bias, activation).to(inputs.dtype)


def convolved(windows: torch.Tensor, weight: torch.Tensor, bias: Any, activation: str | None) -> torch.Tensor:
    """(B, C, N) of windows (B, C, N, W), one tap after the other: the same bits whatever else is in the call."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    terms: Any = windows.to(wide) * weight[:, None].to(wide)
    outputs = sum(terms.unbind(-1)).to(weight.dtype) + (0 if bias is None else bias[:, None])
    return (outputs if activation is None else ACT2FN[activation](outputs)).to(windows.dtype)


def convolve_root(
    hidden_states: torch.Tensor,
    conv_state: Nodes,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """As `causal_conv1d_update`, which mixers call for a single token, here the root alone."""
    return convolve_nodes(Nodes(conv_state.layer, conv_state.number, hidden_states), weight, bias, activation)
