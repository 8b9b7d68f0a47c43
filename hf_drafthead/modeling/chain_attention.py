"""Attention of the chains that EAGLE-3 is trained with (Li et al. 2025, section 3.2: the training-time test).

A query of step k sees the text's positions up to its own, and k keys of its own chain. One dense product has (k + 1) T
keys for it; here the text's part is plain causal attention, and the few keys of the chain join its softmax.

Shapes: B rows, N heads, G key-value heads, T positions, k chain steps, D of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

CHAINS = "drafthead_chains"  # in transformers' registry of attention functions


def chain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: query (B, N, T, D); key, value (B, G, (1 + k) T, D), the text's first.

    Returns:
        (B, T, N, D), and no weights.
    """
    count, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    parts = [tensor.unflatten(2, (-1, count)) for tensor in (key, value)]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = Joined.apply(query, *(part[:, :, 0] for part in parts), *(part[:, :, 1:] for part in parts), scale)
    return out.transpose(1, 2), None


class Joined(torch.autograd.Function):
    """Causal attention to a text (B, N, T, D) and to a chain (B, N, k, T, D) of every position, in one softmax.

    Flash attention's backward needs the output and the logarithm of the softmax's divisor alone: given those of the
    joined softmax, it computes the text's part of the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chain_keys: Tensor, chain_values: Tensor, scale: float
    ) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        of_text, divisor = attend(query, key, value, 0.0, True, scale=scale)
        scores = scale * (query.unsqueeze(2) * chain_keys).sum(-1, dtype=divisor.dtype)
        joined = torch.cat([divisor.unsqueeze(2), scores], dim=2).logsumexp(2)
        shares = (scores - joined.unsqueeze(2)).exp().to(query.dtype).unsqueeze(-1)
        out = of_text * (divisor - joined).exp().to(query.dtype).unsqueeze(-1) + (shares * chain_values).sum(2)
        ctx.save_for_backward(query, key, value, chain_keys, chain_values, out, joined, shares)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, key, value, chain_keys, chain_values, out, joined, shares = ctx.saved_tensors
        gradient = gradients[0]
        to_text = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        to_query, to_key, to_value = to_text(gradient, query, key, value, out, joined, 0.0, True, scale=ctx.scale)
        gained = (gradient.unsqueeze(2) * chain_values).sum(-1, dtype=joined.dtype)
        gained = gained - (gradient * out).sum(-1, dtype=joined.dtype).unsqueeze(2)
        to_scores = shares * (ctx.scale * gained).to(query.dtype).unsqueeze(-1)
        to_query = to_query + (to_scores * chain_keys).sum(2)
        return to_query, to_key, to_value, to_scores * query.unsqueeze(2), shares * gradient.unsqueeze(2), None


AttentionInterface.register(CHAINS, chain_attention)
