"""The tree form of a short, depthwise, causal convolution, which all mixers have; LFM2's layers have nothing else.

A node's window is its nearest ancestors and, before the root, the last inputs that were committed.

Shapes: B rows, N nodes, C channels, W width, R = 1 or B.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.activations import ACT2FN

from hf_drafthead.bases.mixers.layer import AcceptedPath, Nodes


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
    """As `causal_conv1d_fn`, over nodes: (B, C, N).

    Args:
        hidden_states: the nodes, with their inputs.
        weight: (C, W).
        bias: (C,).
        activation: by transformers' name.
    """
    layer, inputs = hidden_states.layer, hidden_states.inputs
    layer.write(f"inputs {hidden_states.number}", inputs.transpose(1, 2))
    width, device = weight.shape[-1], inputs.device
    windows = hidden_states.tree.windows(width, device)  # (R, N, W)
    committed = layer.held_inputs[hidden_states.number][..., -width:]
    line = torch.cat([committed, inputs], dim=2).to(weight.dtype)
    rows, channels, nodes = inputs.shape
    if len(windows) == 1:
        seen = line.index_select(2, windows.flatten())
    else:
        seen = line.gather(2, windows.flatten(1)[:, None].expand(-1, channels, -1))
    seen = seen.view(rows, channels, nodes, width)
    outputs = torch.matmul(seen, weight[..., None])[..., 0]
    outputs = outputs if bias is None else outputs + bias[:, None]
    return (outputs if activation is None else ACT2FN[activation](outputs)).to(inputs.dtype)


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
