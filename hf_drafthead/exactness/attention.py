"""Attention whose result depends neither on where the keys lie nor on what else is in the call.

The keys that a node sees are cut, in the order of their positions, into blocks of 96, and the last 32 to 127. Early
blocks are the same for all nodes behind them. Last ones, which in a tree may lie anywhere, and all blocks where a
window is full, are taken for many nodes in one product, with all keys of the others between them, whose shares are
zero. Where a product adds one term after another, which is tried, zeros change nothing. Elsewhere, and where each head
has a mask, such sums are float64 and rounded once: what an order changes is 2^-53 of a sum, which shows in bfloat16 and
float16 where a value lies within that of the middle of two others, one of a million million; in float32 each node is
computed by itself.

Shapes: B rows, H heads of queries, G of keys, r = H / G, N nodes, L keys, d and e sizes of a key and a value; b, g
and n of a piece of rows, heads and nodes, K blocks of k keys; M = r * n.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hf_drafthead.exactness.products import Inexact, adds_in_order, agreeing, batched, elementwise

NAME = "order_free"  # in transformers' configs
BLOCK = ContextVar("keys of a block", default=96)  # few for `trial`; a third of it, and more, are the last
MOST = 1 << 18  # scores at a time, 1 MiB
LEAST = -1e30  # of a largest score
LOG2 = math.log2(math.e)  # powers of 2 take a third of the time
attended: list[nn.Module] = []  # the modules that attended last, for `trial`


Parts = list[tuple[Any, tuple[int, int], Any]]


class Piece(NamedTuple):
    """Nodes of some rows, and the keys that they see: slots, (K, k), and a bias (b, G or 1, K, r or 1, n, k) where not
    all nodes see all of them.
    """

    rows: slice
    nodes: torch.Tensor  # (n,), filled up with the first ones
    given: int  # without these
    parts: Parts


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
    if dropout:
        raise Inexact(f"{type(module).__name__} drops {dropout:.0%} of its shares: set its config's dropout to 0")
    (rows, heads, nodes, size), (groups, length, wide) = query.shape, value.shape[1:]
    shared, block, single = heads // groups, BLOCK.get(), value.dtype == torch.float32
    least, most, in_order = _products(size, wide, block, key.device, torch.get_num_threads())
    mask = attention_mask
    if mask is None:
        causal = nodes > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = _without_mask(nodes, length, causal, key.device)
    if position_bias is not None:
        mask = _additive(mask[..., :length]) + position_bias[..., :length]
    if single and mask.shape[1] > 1:
        raise Inexact(f"{type(module).__name__} has a mask of each head, for which it has to be in bfloat16 or float16")
    together = max(most // shared // 4 * 4, 1) if in_order or not single else 1
    plan = _plan(mask, (length, block, least, together, sliding_window or length + 1, shared))
    precise = torch.float32 if single or in_order and mask.shape[1] == 1 else torch.float64
    sinks = None if s_aux is None else s_aux.float().view(groups, shared, 1) * LOG2
    query = query.unflatten(1, (groups, shared)).float()
    query = query * ((size**-0.5 if scaling is None else scaling) * (LOG2 if softcap is None else 1 / softcap))
    out = value.new_zeros(rows, nodes, groups, shared, wide)
    with _plainly(key.device.type):
        for piece in plan:
            asked, places = query[piece.rows].index_select(3, piece.nodes), out[piece.rows].permute(0, 2, 3, 1, 4)
            step = max(MOST // ((length + block) * shared * len(piece.nodes)), 1)
            for group in (slice(start, start + step) for start in range(0, groups, step)):
                keys, values = (part[piece.rows, group] for part in (key, value))
                of_group = None if sinks is None else sinks[group]
                found = _over_blocks(asked[:, group], keys, values, piece.parts, group, softcap, of_group, precise)
                places[:, group].index_copy_(3, piece.nodes[: piece.given], found[:, :, :, : piece.given].to(out.dtype))
    return out.flatten(2, 3), None


def _plainly(device: str) -> Any:
    """Products in the types that they are given."""
    cast = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else contextlib.nullcontext()


@functools.cache
def _products(size: int, wide: int, block: int, device: torch.device, _: int) -> tuple[int, int, bool]:
    """From how many rows on, and up to how many, products agree, and whether those of last keys add in order."""
    keys, values = (torch.empty(2 * block, each, device=device) for each in (size, wide + 1))
    shares = keys.new_empty(1, 2 * block)
    with _plainly(device.type):
        tried = [agreeing(keys, keys[:count], None, batched) for count in (block, 2 * block)]
        tried += [agreeing(shares[:, :count], values[:count].T, None, batched) for count in (block, 2 * block)]
        least = max(few for few, _ in tried)
        return least, min(many for _, many in tried), adds_in_order(values.T, least)


@functools.lru_cache(maxsize=4)
def _without_mask(nodes: int, length: int, causal: bool, device: Any) -> torch.Tensor:
    with torch.inference_mode(False):  # so that it can be kept, and its plan with it
        mask = torch.ones(1, 1, nodes, length, dtype=torch.bool, device=device)
        return mask.tril(length - nodes) if causal else mask


def _plan(mask: torch.Tensor, limits: tuple[int, ...]) -> list[Piece]:
    """The pieces of a call, which layers that are given the same mask share."""
    plans = vars(mask).setdefault("plans", {})
    version = None if mask.is_inference() else mask._version
    if version is None or (limits, version) not in plans:
        with torch.inference_mode(False):
            plans[limits, version] = list(_planned(mask[..., : limits[0]], *limits[1:]))
    return plans[limits, version]


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _additive(mask: torch.Tensor) -> torch.Tensor:
    bias = mask.float() if mask.is_floating_point() else torch.zeros(mask.shape, device=mask.device)
    return bias.masked_fill(~_seen(mask), -math.inf)


def _planned(mask: torch.Tensor, block: int, least: int, most: int, window: int, shared: int) -> Iterator[Piece]:
    """Of a mask (B or 1, H or 1, N, L): pieces of at least so many M, and at most so many nodes."""
    (nodes, length), fours = mask.shape[2:], 4 // math.gcd(shared, 4)  # as many nodes have 4 M
    # nodes of a tree, whose mask is additive, lie in front of the past
    order = torch.arange(length, device=mask.device).roll(-nodes if mask.is_floating_point() else 0)
    visible = _seen(mask).any(1)[..., order]  # (B or 1, N, L)
    seen = visible.sum(-1)
    early = ((seen - block // 3) // block).clamp(min=0)
    kinds = early.where((seen < window) & (mask.shape[1] == 1), -1 - early)  # where a window is full none is shared

    def pieces(rows: slice, some: torch.Tensor) -> Iterator[Piece]:
        kind = kinds[rows][:, some]
        if (kind == kind[0, 0]).all() and len(some) <= most and (most > 1 or len(kind) == 1):
            filled = -(-max(len(some), least / shared) // fours) * fours  # small products of odd M are less alike
            padded = some[torch.arange(int(filled), device=some.device) % len(some)]
            bias = _additive(mask[rows][:, :, padded])[..., order]
            parts = _parts(visible[rows][:, padded], bias, order, int(kind[0, 0]), block, shared)
            if parts:
                yield Piece(slice(None) if len(visible) == 1 else rows, padded, len(some), parts)
                return
        if len(kind) > 1:
            middle = (rows.start + rows.stop) // 2
            yield from pieces(slice(rows.start, middle), some)
            yield from pieces(slice(middle, rows.stop), some)
            return
        alike = [some[kind[0] == each] for each in kind.unique()]
        for part in alike if len(alike) > 1 else some.chunk(2):
            yield from pieces(rows, part)

    return pieces(slice(0, len(visible)), torch.arange(nodes, device=mask.device))


def _parts(visible: torch.Tensor, bias: torch.Tensor, order: torch.Tensor, kind: int, block: int, shared: int) -> Parts:
    """A piece's slots, of nodes that see some places (b, n, L) with a bias (b, H or 1, n, L); none if too many."""
    early = kind if kind >= 0 else -1 - kind
    blocks = ((visible.cumsum(-1) - 1) // block).clamp(max=early).masked_fill(~visible, -1)
    first, last = blocks.masked_fill(~visible, early + 1).amin((0, 1)), blocks.amax((0, 1))
    held = [((first <= at) & (at <= last)).nonzero()[:, 0] for at in range(early + 1)]
    whole = held[: max(kind, 0)]
    if max(map(len, held)) > 2 * block or any(len(places) > block for places in whole):
        return []
    rest = torch.stack([functional.pad(at, (0, 2 * block - len(at)), value=-1) for at in held[len(whole) :]])  # (K, k)
    numbers = torch.arange(len(whole), early + 1, device=rest.device)[:, None]
    inside = (blocks[..., rest] == numbers) & (rest >= 0)  # (b, n, K, k)
    bias = bias[..., rest].masked_fill(~inside[:, None], -math.inf) * LOG2
    bias = bias.unflatten(1, (-1, shared if bias.shape[1] > 1 else 1)).movedim(4, 2)
    filled = rest.flatten()[: rest.numel() - 2 * block + len(held[-1])]
    filled = filled.where(filled >= 0, held[-1][:1])  # a key that is seen: of others values may be no numbers
    parts = [(_slots(order[filled]), (len(rest), 2 * block), bias)]
    return [(_slots(order[torch.cat(whole)]), (len(whole), block), None), *parts] if whole else parts


def _slots(slots: torch.Tensor) -> Any:
    """A slice, if that is what they are."""
    follow = len(slots) > 0 and bool((slots.diff() == 1).all())
    return slice(int(slots[0]), int(slots[-1]) + 1) if follow else slots


def _over_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: Parts, group: slice,
    softcap: float | None, sinks: Any, precise: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """(b, g, r, n, e) of scaled queries (b, g, r, n, d) over slots of keys and values (b, g, L, d or e)."""
    shape, pairs = query.shape[:4], len(query) * query.shape[1]
    rows, scores = query.reshape(pairs, 1, -1, query.shape[-1]), []
    for slots, blocks, bias in parts:
        repeated = rows.expand(-1, blocks[0], -1, -1)  # (b * g, K, M, d)
        part = torch.bmm(repeated.flatten(0, 1), _held(key, slots, blocks).mT).view(*repeated.shape[:3], blocks[1])
        if softcap is not None:
            part = elementwise(torch.tanh, part) * (softcap * LOG2)
        if bias is not None:
            part.view(*shape[:2], -1, *shape[2:], blocks[1]).add_(bias if bias.shape[1] == 1 else bias[:, group])
        scores.append(part)
    top = functools.reduce(torch.maximum, [part.detach().amax((1, 3), keepdim=True) for part in scores])
    top = top.clamp(min=LEAST)  # (b * g, 1, M, 1)
    if sinks is not None:
        sinks = sinks.expand(*shape).reshape(top.shape)
        top = top.maximum(sinks)
    sums: Any = None
    for part, (slots, blocks, bias) in zip(scores, parts):
        shares = elementwise(torch.exp2_, part.sub_(top)).flatten(0, 1)
        kind = torch.float32 if bias is None else precise
        products = torch.bmm(shares.to(kind), _held(value, slots, blocks, ones=1).to(kind))  # (b * g * K, M, e + 1)
        for of_block in products.unflatten(0, (pairs, -1)).unbind(1):
            sums = of_block if sums is None else sums + of_block
    total = sums[..., -1:] if sinks is None else sums[..., -1:] + elementwise(torch.exp2, sinks - top)[:, 0]
    return (sums[..., :-1] / total.clamp(min=torch.finfo(torch.float32).tiny)).view(*shape, -1)


def _held(stored: torch.Tensor, slots: Any, blocks: tuple[int, int], ones: int = 0) -> torch.Tensor:
    """What lies in slots of keys or values (b, g, L, d), with ones that add shares: (b * g * K, k, d + ones)."""
    some = stored[:, :, slots] if isinstance(slots, slice) else stored.index_select(2, slots)
    (rows, groups, count, size), length = some.shape, blocks[0] * blocks[1]
    held = torch.empty(rows, groups, length, size + ones, device=stored.device)
    held[:, :, :count, :size] = some
    if count < length:
        held[:, :, count:] = 1
    if ones:
        held[..., size:] = 1
    return held.view(-1, blocks[1], size + ones)


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
