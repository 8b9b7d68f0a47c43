"""Attention whose result depends neither on the order of the keys nor on what else is in the call.

Products, exponentials and sums are taken in float64 and rounded once. What an order changes there is 2^-53 of a sum: in
bfloat16 and float16 it shows where a value lies within that of the middle of two others, one of a million million. In
float32 one of ten million does; values that are nearly as near are computed again, of terms that are sorted.

Shapes: B rows, H heads of queries, G of keys, r = H / G, N nodes, L keys, d and e sizes of a key and a value; b, g, n
of a piece of rows, heads and nodes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "order_free"  # in transformers' configs
MOST = 1 << 21  # numbers in float64 at a time, 16 MiB: of keys and values, and of scores
NEAR = 2.0**-50  # of the largest value, times the largest score: more than an order changes a sum
UNSEEN = -1e30  # a score below this is of a key that is masked
attended: list[nn.Module] = []  # the modules that attended last, for `trial`


def order_free(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: query (B, H, N, d), key (B, G, L, d), value (B, G, L, e); returns (B, N, H, e).

    Caps, sinks and biases are those of transformers' eager attention; what sees nothing is zero.
    """
    attended.append(module)
    del attended[: -1 << 10]
    (rows, heads, nodes, size), (groups, length, wide) = query.shape, value.shape[1:]
    grouped = query.reshape(rows, groups, heads // groups, nodes, size)
    biases = [bias[..., :length] for bias in (attention_mask, position_bias) if bias is not None]
    biases = [bias.unflatten(1, (groups, -1) if bias.shape[1] > 1 else (1, 1)) for bias in biases]
    causal = attention_mask is None and nodes > 1
    causal = causal and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    sinks = None if s_aux is None else s_aux.double().view(1, groups, -1, 1, 1)
    out = query.new_empty(*grouped.shape[:-1], wide)
    per_group = length * max(size + wide, heads // groups)
    for row in pieces(rows, MOST // (per_group * groups)):
        for group in pieces(groups, MOST // per_group):
            keys, values = key[row, group].double(), value[row, group].double()
            for node in pieces(nodes, MOST // (keys[..., 0].numel() * (heads // groups))):
                scaled = grouped[row, group, :, node].double() * (size**-0.5 if scaling is None else scaling)
                bias = [_added(bias, row, group, node) for bias in biases]
                seen = length
                if causal:
                    limits = torch.arange(nodes, device=query.device)[node, None] + length - nodes
                    seen = min(length, node.stop + length - nodes)
                    unseen = torch.arange(seen, device=query.device) > limits
                    bias.append(scaled.new_zeros(unseen.shape).masked_fill_(unseen, float("-inf")))
                out[row, group, :, node] = _attended(
                    scaled,
                    keys[:, :, :seen],
                    values[:, :, :seen],
                    sum(bias[1:], bias[0]) if bias else None,
                    softcap,
                    None if sinks is None else sinks[:, group],
                    dropout if module.training else 0.0,
                    query.dtype,
                )
    return out.view(rows, heads, nodes, wide).transpose(1, 2).contiguous(), None


def pieces(count: int, most: int) -> list[slice]:
    """A range cut into pieces of at most so many, and of one at least."""
    most = max(most, 1)
    return [slice(start, min(start + most, count)) for start in range(0, count, most)]


def _added(bias: torch.Tensor, row: slice, group: slice, node: slice) -> torch.Tensor:
    """What is added to the scores (b, g, r, n, L), of a mask (B or 1, G or 1, r or 1, N or 1, L) or a bias like it."""
    at = [part if size > 1 else slice(None) for part, size in zip((row, group, slice(None), node), bias.shape)]
    bias = bias[tuple(at)]
    if bias.dtype == torch.bool:
        return torch.zeros(bias.shape, dtype=torch.float64, device=bias.device).masked_fill_(~bias, float("-inf"))
    return bias.double()


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    dropout: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(b, g, r, n, e) of a scaled query (b, g, r, n, d), keys (b, g, L, d) and values (b, g, L, e) in float64."""
    scores = (query.flatten(2, 3) @ keys.mT).unflatten(2, query.shape[2:4])
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    scores = scores if bias is None else scores + bias
    top = scores.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).min)
    top = top if sinks is None else top.maximum(sinks)
    shares = scores.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    total = total if sinks is None else total + (sinks - top).exp()
    shares = nn.functional.dropout(shares, dropout) if dropout else shares
    sums = (shares.flatten(2, 3) @ values).unflatten(2, query.shape[2:4])
    result = sums / total.clamp(min=torch.finfo(torch.float64).tiny)
    if dtype != torch.float32 or dropout:
        return result.to(dtype)
    largest = query.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).amax(-1)[..., None, None, None]
    margin = NEAR * (8 + largest) * values.abs().amax((-1, -2))[..., None, None, None]
    for place in near(result, margin).any(-1).nonzero().tolist():
        b, g, r, n = place
        part = None if bias is None else bias.expand_as(scores)[b, g, r, n]
        sink = None if sinks is None else sinks[0, g, r, 0]
        result[b, g, r, n] = sorted_sums(query[b, g, r, n], keys[b, g], values[b, g], part, softcap, sink)
    return result.to(dtype)


def near(result: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    """Which values in float64 lie so near to the middle of two in float32 that the order of a sum may decide."""
    with torch.no_grad():
        rounded = result.float()
        beyond = torch.where(result > rounded, float("inf"), float("-inf")).float()
        middle = (rounded.double() + torch.nextafter(rounded, beyond).double()) / 2
        return ((result - middle).abs() < margin) & (result != 0)


def sorted_sums(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float | None,
    sink: torch.Tensor | None,
) -> torch.Tensor:
    """(e,) of one node, a query (d,), whose sums have an order of their own: that of the terms' sizes."""
    if bias is not None:
        keys, values, bias = keys[bias > UNSEEN], values[bias > UNSEEN], bias[bias > UNSEEN]
    scores = (query * keys).sum(-1)
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    scores = scores if bias is None else scores + bias
    top = scores.amax() if sink is None else scores.amax().maximum(sink[0])
    shares = (scores - top).exp()
    total = shares.sort().values.sum() + (0 if sink is None else (sink[0] - top).exp())
    return (shares[:, None] * values).sort(dim=0).values.sum(0) / total


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
