"""The tree form of Mamba-2's state space (Nemotron-H, Granite 4 hybrid, Bamba, Falcon-H1, Mamba-2, Zamba2).

From token to token S <- e^(dt A) S + dt x B^T; y = S C + D x. Over a tree, with G_i the sum of dt A over node i and its
ancestors, all nodes at once:

    y_i = e^(G_i) S C_i + sum over i and its ancestors of e^(G_i - G_j) (C_i . B_j) dt_j x_j + D x_i
    at node a, S <- e^(G_a) S + sum over a and its ancestors of e^(G_a - G_j) dt_j x_j B_j^T

(Mamba-2, arXiv 2405.21060, section 6, with the ancestors in the place of a chunk's causal mask.) Step sizes are not
held within limits, as they are not where a base decodes token by token.

Shapes: B rows, N nodes, D nodes on a path, H heads, P their size, K groups of B and C, n size of the state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu, softplus

from hf_drafthead.bases.mixers.layer import AcceptedPath, Nodes


class StateSpace:
    """A state (B, H, P, n). Of each node are recorded dt x, B and G."""

    def record(self, inputs: torch.Tensor, state: torch.Tensor) -> dict[str, tuple[int, ...]]:
        heads, size, width = state.shape[1:]
        groups = (inputs.shape[1] - heads * size) // (2 * width)  # x, B and C go through the convolution side by side
        return {"steps": (heads, size), "directions": (groups, width), "decays": (heads,)}

    def fold(self, state: torch.Tensor, accepted: dict[str, torch.Tensor], path: AcceptedPath) -> None:
        rest, left = path.decays(accepted["decays"])
        steps = (accepted["steps"] * left[..., None]).permute(0, 2, 3, 1)  # (B, H, P, D)
        directions = accepted["directions"].transpose(1, 2)  # (B, K, D, n)
        grouped = steps.unflatten(1, (directions.shape[1], -1)) @ directions[:, :, None]
        state.mul_(rest[..., None, None]).add_(grouped.flatten(1, 2))


def scan_nodes(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    initial_states: Nodes,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, Nodes]:
    """As `mamba_chunk_scan_combined`, over nodes: (B, N, H, P), and no new state.

    Of x (B, N, H, P), dt (B, N, H) before its bias (H,), A and D (H,), B and C (B, N, K, n).
    """
    dtype, layer, tree, state = hidden_states.dtype, initial_states.layer, initial_states.tree, initial_states.state
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).to(state.dtype)
    x, B, C = (part.to(state.dtype) for part in (hidden_states, B, C))
    groups = B.shape[2]
    sums = torch.matmul(tree.sums(dt), dt * A.to(dt))  # (B, N, H)
    steps = x * dt[..., None]
    for name, values in (("steps", steps), ("directions", B), ("decays", sums)):
        layer.write(name, values)
    sums = sums.transpose(1, 2)  # (B, H, N)
    between = (sums[..., :, None] - sums[..., None, :]).masked_fill(~tree.above(dt.device)[:, None], float("-inf"))
    between = between.exp_().unflatten(1, (groups, -1))  # (B, K, H / K, N, N)
    B, C = (part.transpose(1, 2)[:, :, None] for part in (B, C))  # (B, K, 1, N, n)
    of_nodes = ((C @ B.mT) * between) @ steps.transpose(1, 2).unflatten(1, (groups, -1))  # (B, K, H / K, N, P)
    of_past = C @ state.unflatten(1, (groups, -1)).mT
    outputs = (of_nodes + of_past * sums.exp().unflatten(1, (groups, -1))[..., None]).flatten(1, 2).transpose(1, 2)
    outputs = outputs if D is None else outputs + x * D.to(x)[:, None]
    return outputs.to(dtype).contiguous(), initial_states


def scan_root(
    state: Nodes,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    """As `selective_state_update`, which mixers call for a single token, here the root alone: (B, H, P).

    Arguments have no axis of tokens, those of a head are repeated for each of its channels; z is a mixer's gate.
    """
    outputs, _nodes = scan_nodes(
        hidden_states[:, None],
        dt[:, None, :, 0],
        A[:, 0, 0],
        B[:, None],
        C[:, None],
        initial_states=state,
        D=None if D is None else D[:, 0],
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
    )
    return outputs[:, 0] if z is None else outputs[:, 0] * silu(z)
