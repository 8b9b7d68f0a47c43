"""Attention whose result depends neither on where the keys lie nor on what else is in the call.

The last 128 to 255 keys that a node sees are taken in float64, whose sums are rounded once: what an order changes is
2^-53 of a sum. In bfloat16 and float16 it shows where a value lies within that of the middle of two others, one of a
million million. In float32 one of ten million does; values that are nearly as near are computed again, of terms that
are sorted. Keys before those are taken in float32, in blocks of 128, which are the same whatever else is in the call;
of texts that are shorter than 2,048 all are taken in float64, which costs less there.

Shapes: B rows, H heads of queries, G of keys, r = H / G, N nodes, L keys, d and e sizes of a key and a value, F blocks
of k keys; b, g, n, l of a piece of rows, heads, nodes and keys; m = r * n, and more rows where a product needs them.
"""

from __future__ import annotations

import functools
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hf_drafthead.exactness.products import Rows, agreeing, batched, elementwise

NAME = "order_free"  # in transformers' configs
BLOCK = ContextVar("keys of a block, and of texts that have some", default=(128, 2048))  # few for `trial`
MOST = 1 << 21  # numbers in float64 at a time, 16 MiB: of keys and values, and of scores
NEAR = 2.0**-50  # of the largest value, times the largest score: more than an order changes a sum
LEAST = -1e30  # of a largest score
attended: list[nn.Module] = []  # the modules that attended last, for `trial`


class How(NamedTuple):
    """What a call says of its scores and shares."""

    softcap: float | None
    sinks: torch.Tensor | None  # (1, G, r, 1, 1)
    dropout: float

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.softcap is None else elementwise(torch.tanh, scores / self.softcap) * self.softcap


class Past(NamedTuple):
    """Keys (g, F, k, d), values (g, F, k, e) in float32, and the blocks (F, n) that a node does not see yet."""

    keys: torch.Tensor
    values: torch.Tensor
    hidden: torch.Tensor

    def scores(self, query: torch.Tensor, how: How) -> torch.Tensor:
        """Of a query (1, g, r, n, d): (g, F, m, k)."""
        rows, (groups, blocks) = query.float().flatten(2, 3)[0], self.keys.shape[:2]
        more, wanted = 0, rows.shape[1]
        while any(one.of(wanted + more) > wanted + more for one in rows_of(self.keys, self.values, self.keys.shape[2])):
            more += 1
        filled = functional.pad(rows, (0, 0, 0, more))[:, None].expand(-1, blocks, -1, -1)
        scores = torch.bmm(filled.flatten(0, 1).contiguous(), self.keys.flatten(0, 1).mT).unflatten(0, (groups, blocks))
        if self.hidden.any():
            hidden = functional.pad(self.hidden.repeat(1, query.shape[2]), (0, more))
            return how.capped(scores).masked_fill_(hidden[..., None], float("-inf"))
        return how.capped(scores)


def rows_of(keys: torch.Tensor, values: torch.Tensor, block: int) -> list[Rows]:
    """Which numbers of rows agree in the products with a block of keys (..., d) and of values (..., e)."""
    keys, values, share = (
        keys.new_empty(block, size, dtype=torch.float32) for size in (keys.shape[-1], values.shape[-1], block)
    )
    return [agreeing(keys, keys.mT, None, batched), agreeing(share, values, None, batched)]


def order_free(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, dropout: float = 0.0,
    softcap: float | None = None, s_aux: Any = None, is_causal: Any = None, position_bias: Any = None,
    sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: query (B, H, N, d), key (B, G, L, d), value (B, G, L, e); returns (B, N, H, e).

    Caps, sinks and biases are those of transformers' eager attention; what sees nothing is zero.
    """
    attended.append(module)
    del attended[: -1 << 10]
    (rows, heads, nodes, size), (groups, length, wide) = query.shape, value.shape[1:]
    causal = nodes > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is None and causal:
        attention_mask = torch.ones(1, 1, nodes, length, dtype=torch.bool, device=key.device).tril(length - nodes)
    front, (block, least) = 0, BLOCK.get()  # slots of a tree's nodes, which are in front of the past
    if length >= least and attention_mask is not None and attention_mask.is_floating_point():
        hidden = attention_mask <= torch.finfo(attention_mask.dtype).min / 2
        if (hidden | (attention_mask == 0)).all():  # else it is a bias
            attention_mask, front = ~hidden, nodes
    biases = [bias[..., :length] for bias in (attention_mask, position_bias) if bias is not None]
    plain = sliding_window is None and all(bias.dtype == torch.bool and bias.shape[1] == 1 for bias in biases)
    places, start, blocks, most = torch.arange(length, device=key.device), 0, None, nodes
    if plain and length >= least:
        seen = (biases[0][:, 0] if biases else (places >= 0)[None, None]).expand(rows, nodes, length)
        own = seen.sum(-1)
        own = (own // block - 1) * (own >= least)
        if count := int(own.max()):
            start, blocks = front + int(seen[0, :, front:].any(0).int().argmax()), own[0]
            early = slice(start, start + block * count)
            holes = not (seen[0, :, early] | (places[early] >= start + block * blocks[:, None])).all()
            if rows > 1 or holes:
                key, value, seen = key.roll(-front, 2), value.roll(-front, 2), seen.roll(-front, 2)
                more: Any = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux}
                again: Any = functools.partial(order_free, module, **more)
                if rows > 1:
                    every = (part.split(1) for part in (query, key, value, seen[:, None]))
                    return torch.cat([again(*row)[0] for row in zip(*every)]), None
                if nodes > 1:  # see other keys, from other ones on
                    every = (part.split(1, dim=2) for part in (query, seen[:, None]))
                    return torch.cat([again(one, key, value, mask)[0] for one, mask in zip(*every)], dim=1), None
                return again(query, key[:, :, seen[0, 0]], value[:, :, seen[0, 0]], None)
            most = min(one.most for one in rows_of(key, value, block)) * groups // heads
    grouped = query.reshape(rows, groups, heads // groups, nodes, size)
    biases = [bias.unflatten(1, (groups, -1) if bias.shape[1] > 1 else (1, 1)) for bias in biases]
    sinks = None if s_aux is None else s_aux.double().view(1, groups, -1, 1, 1)
    out, per_group = query.new_empty(*grouped.shape[:-1], wide), length * max(size + wide, heads // groups)
    for row in pieces(rows, MOST // (per_group * groups)):
        for group in pieces(groups, MOST // per_group):
            for node in pieces(nodes, min(most, MOST // (length * heads // groups))):
                added, past = [_piece(bias, row, group, node) for bias in biases], None
                near: Any = slice(0, length)
                if plain and node.stop - node.start < nodes:  # others see other keys
                    near = slice(0, max(1, int((added[0].flatten(0, -2).any(0) * (places + 1)).max())))
                if blocks is not None:
                    ends = start + block * blocks[node]
                    first, last = (int(end) for end in ends.aminmax())
                    old = [part[0, group, start:last].float().contiguous() for part in (key, value)]
                    hidden = places[start:last:block, None] >= ends
                    past = Past(*(part.unflatten(1, (-1, block)) for part in old), hidden) if last > start else None  # type: ignore
                    later = (places >= ends[:, None]) | (places < start)
                    added, near = (
                        [*added, later[None, None, None]],
                        torch.cat([places[:front], places[first : near.stop]]),
                    )
                scaled = grouped[row, group, :, node].double() * (size**-0.5 if scaling is None else scaling)
                how = How(softcap, None if sinks is None else sinks[:, group], dropout * module.training)
                keys, values = (part[row, group][:, :, near].double() for part in (key, value))
                added = [bias[..., near] for bias in added]
                out[row, group, :, node] = _attended(scaled, keys, values, added, how, past, query.dtype)
    return out.view(rows, heads, nodes, wide).transpose(1, 2).contiguous(), None


def pieces(count: int, most: int) -> list[slice]:
    """A range cut into pieces of at most so many, and of one at least."""
    most = max(most, 1)
    return [slice(start, min(start + most, count)) for start in range(0, count, most)]


def _piece(bias: torch.Tensor, row: slice, group: slice, node: slice) -> torch.Tensor:
    """Of a mask (B or 1, G or 1, r or 1, N or 1, L), or of a bias like it."""
    at = [part if size > 1 else slice(None) for part, size in zip((row, group, slice(None), node), bias.shape)]
    return bias[tuple(at)]


def _attended(query: Any, keys: Any, values: Any, biases: list[Any], how: How, past: Past | None, dtype: Any) -> Any:
    """(b, g, r, n, e) of a scaled query (b, g, r, n, d), keys (b, g, l, d) and values (b, g, l, e) in float64."""
    shape = query.shape[2:4]
    scores = how.capped((query.flatten(2, 3) @ keys.mT).unflatten(2, shape))
    for bias in biases:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias.double()
    top = scores.detach().amax(-1, keepdim=True)
    if past is not None:
        blocks = past.scores(query, how)
        best = blocks.detach().amax((1, 3))[:, : shape.numel()].double()
        top = top.maximum(best.view(1, -1, *shape, 1))
    top = (top if how.sinks is None else top.maximum(how.sinks)).clamp(min=LEAST).ceil()  # which no order changes
    shares = scores.sub_(top).exp_()
    total = shares.sum(-1, keepdim=True)
    total = total if how.sinks is None else total + (how.sinks - top).exp()
    shares = functional.dropout(shares, how.dropout) if how.dropout else shares
    sums, more = (shares.flatten(2, 3) @ values).unflatten(2, shape), None
    if past is not None:
        less = functional.pad(top.flatten(2, 3)[0].float(), (0, 0, 0, blocks.shape[2] - shape.numel()))
        blocks = elementwise(torch.exp_, blocks.sub_(less[:, None]))
        totals = blocks.sum(-1, keepdim=True)
        blocks = functional.dropout(blocks, how.dropout) if how.dropout else blocks
        added = torch.bmm(blocks.flatten(0, 1), past.values.flatten(0, 1)).unflatten(0, past.keys.shape[:2])
        in_order = (functools.reduce(torch.add, part.unbind(1)) for part in (added, totals))
        more = [part[:, : shape.numel()].unflatten(1, shape)[None] for part in in_order]
        sums, total = sums + more[0], total + more[1]
    result = sums / total.clamp(min=torch.finfo(torch.float64).tiny)
    if dtype != torch.float32 or how.dropout:
        return result.to(dtype)
    largest = query.norm(dim=-1, keepdim=True) * keys.norm(dim=-1).amax(-1)[..., None, None, None]
    margin = NEAR * (8 + largest) * values.abs().amax((-1, -2))[..., None, None, None]
    for b, g, r, n in near_middle(result, margin).any(-1).nonzero().tolist():
        visible = shares[b, g, r, n] > 0
        part = [bias.expand_as(shares)[b, g, r, n, visible] for bias in biases if bias.dtype != torch.bool]
        of_keys = query[b, g, r, n], keys[b, g, visible], values[b, g, visible], part
        of_past = [] if more is None else [part[b, g, r, n, None] for part in more]
        sink = None if how.sinks is None else how.sinks[0, g, r, 0, 0]
        result[b, g, r, n] = sorted_sums(*of_keys, how, top[b, g, r, n], sink, of_past)
    return result.to(dtype)


def near_middle(result: torch.Tensor, margin: torch.Tensor) -> torch.Tensor:
    """Which values in float64 lie so near to the middle of two in float32 that the order of a sum may decide."""
    with torch.no_grad():
        rounded = result.float()
        beyond = torch.where(result > rounded, float("inf"), float("-inf")).float()
        middle = (rounded.double() + torch.nextafter(rounded, beyond).double()) / 2
        return ((result - middle).abs() < margin) & (result != 0)


def sorted_sums(query: Any, keys: Any, values: Any, biases: Any, how: How, top: Any, sink: Any, past: Any) -> Any:
    """(e,) of one node, a query (d,), whose sums have an order of their own: that of the terms' sizes."""
    shares = (sum(biases, how.capped((query * keys).sum(-1))) - top).exp()[:, None]
    sums, totals = ([terms, *past[at : at + 1]] for at, terms in enumerate((shares * values, shares)))
    totals = totals if sink is None else [*totals, (sink - top).exp()[None]]
    return torch.cat(sums).sort(dim=0).values.sum(0) / torch.cat(totals).sort(dim=0).values.sum(0)


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
