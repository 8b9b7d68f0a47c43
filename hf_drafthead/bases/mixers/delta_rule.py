"""The tree form of the gated delta rule, with a decay of every head (Qwen3-Next, Qwen3.5, OLMo hybrid) or of every
channel of its keys (Kimi delta attention).

From token to token S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q. Over a tree, with G_i the sum of g over
node i and its ancestors, M_ij = beta_i (k_i . k_j) e^(G_i - G_j) for j above i, and the same product for q with j = i
too, all nodes at once:

    (I + M) Delta = beta (V - e^G K S)              one triangular solve of each head, for parents come first
    O             = e^G Q S + ((Q K^T) e^(G_i - G_j)) Delta
    at node a, S <- e^(G_a) S + sum over a and its ancestors of e^(G_a - G_j) k_j Delta_j^T

(Gated DeltaNet, arXiv 2412.06464, equations 8 to 10, in which a chunk's causal mask is the ancestors here; Kimi Linear,
arXiv 2510.26692.) All of it is float32, as in transformers, or float64 where the state is.

Shapes: B rows, N nodes, D nodes on a path, H heads of values, K heads of keys, k and v their sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_drafthead.bases.mixers.layer import AcceptedPath, Nodes


class DeltaRule:
    """A state (B, H, k, v). Of each node are recorded its key, Delta and G; `by_channel`: a decay is of a channel of
    keys.
    """

    def __init__(self, by_channel: bool):
        self.by_channel = by_channel

    def record(self, inputs: torch.Tensor, state: torch.Tensor) -> dict[str, tuple[int, ...]]:
        heads, key_size, value_size = state.shape[1:]
        decays = (heads, key_size) if self.by_channel else (heads,)
        return {"keys": (key_heads(inputs, state), key_size), "deltas": (heads, value_size), "decays": decays}

    def fold(self, state: torch.Tensor, accepted: dict[str, torch.Tensor], path: AcceptedPath) -> None:
        rest, left = path.decays(accepted["decays"])  # (B, H[, k]), (B, D, H[, k])
        keys, deltas = of_heads(accepted["keys"], state.shape[1]), accepted["deltas"]
        if self.by_channel:
            rest, keys = rest[..., None], keys * left
        else:
            rest, deltas = rest[..., None, None], deltas * left[..., None]
        state.mul_(rest).add_(keys.permute(0, 2, 3, 1) @ deltas.transpose(1, 2))


def delta_rule_of_nodes(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: Nodes,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, Nodes]:
    """As the functions of transformers and flash-linear-attention, over nodes: (B, N, H, v), and no new state.

    Of queries and keys (B, N, K, k), values (B, N, H, v), log decays g (B, N, H), or (B, N, H, k) of every channel, and
    beta (B, N, H).
    """
    dtype, layer, tree, state = value.dtype, initial_state.layer, initial_state.tree, initial_state.state
    query, key, value, g, beta = (part.to(state.dtype) for part in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    if (shared := key.shape[2] // key_heads(layer.held_inputs[0], state)) > 1:  # earlier releases repeat them
        query, key = query[:, :, ::shared], key[:, :, ::shared]
    query = query * query.shape[-1] ** -0.5
    above, heads = tree.above(g.device)[:, None], state.shape[1]  # (R, 1, N, N)
    sums = torch.matmul(tree.sums(g), g.flatten(2)).view(g.shape)  # (B, N, H[, k])
    layer.write("keys", key)
    layer.write("decays", sums)
    keys, queries = (of_heads(part, heads).transpose(1, 2) for part in (key, query))  # (B, H, N, k)
    values, betas, sums = value.transpose(1, 2), beta.transpose(1, 2)[..., None], sums.transpose(1, 2)
    between = (sums[:, :, :, None] - sums[:, :, None, :]).masked_fill(
        ~above if g.dim() == 3 else ~above[..., None], float("-inf")
    )
    between = between.exp_()  # the difference before the exponential: e^-G alone overflows
    left = sums.exp() if g.dim() == 4 else sums.exp()[..., None]  # (B, H, N, k or 1)
    nodes, both = keys.shape[2], torch.cat([keys, queries], dim=2)  # the state is read once
    if g.dim() == 4:
        of_past = (both * left.repeat(1, 1, 2, 1)) @ state
        similar = torch.cat([torch.einsum("bhic,bhjc,bhijc->bhij", part, keys, between) for part in (keys, queries)], 2)
    else:
        of_past = (both @ state) * left.repeat(1, 1, 2, 1)
        similar = (both @ keys.mT) * between.repeat(1, 1, 2, 1)
    deltas = torch.linalg.solve_triangular(  # which takes the diagonal for 1
        betas * similar[:, :, :nodes], betas * (values - of_past[:, :, :nodes]), upper=False, unitriangular=True
    )
    layer.write("deltas", deltas.transpose(1, 2))
    outputs = of_past[:, :, nodes:] + similar[:, :, nodes:] @ deltas
    return outputs.transpose(1, 2).to(dtype), initial_state


def key_heads(inputs: torch.Tensor, state: torch.Tensor) -> int:
    """K, of a convolution's inputs (B, C, W), which are queries, keys and values side by side, and a state."""
    heads, key_size, value_size = state.shape[1:]
    return int((inputs.shape[1] - heads * value_size) // (2 * key_size))


def of_heads(keys: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, N, K, k) for each of the heads of values that share it: (B, N, H, k)."""
    shared = heads // keys.shape[2]
    return keys if shared == 1 else keys.repeat_interleave(shared, dim=2)
