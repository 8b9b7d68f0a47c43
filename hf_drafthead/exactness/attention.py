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
import itertools
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
AS_GIVEN = contextlib.nullcontext()
LOG2 = math.log2(math.e)  # powers of 2 take a third of the time
attended: list[nn.Module] = []  # the modules that attended last, for `trial`


class Part(NamedTuple):
    """K blocks of k keys, and a bias (b, G or 1, K, r or 1, n, k) where not all nodes see all of them."""

    slots: Any  # (K * k,), or a slice
    blocks: tuple[int, int]  # K, k
    bias: torch.Tensor | None


class Piece(NamedTuple):
    """Nodes of some rows, and the keys that they see."""

    rows: slice
    nodes: slice
    parts: list[Part]


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
    plan = _plan(mask, (length, block, together, sliding_window or length + 1, shared))
    precise = torch.float32 if single or in_order and mask.shape[1] == 1 else torch.float64
    sinks = None if s_aux is None else s_aux.float().view(groups, shared, 1) * LOG2
    query = query.view(rows, groups, shared, nodes, size).float()
    query = query * ((size**-0.5 if scaling is None else scaling) * (LOG2 if softcap is None else 1 / softcap))
    out = value.new_empty(rows, nodes, groups, shared, wide)
    places = out.permute(0, 2, 3, 1, 4)
    with torch._C.DisableTorchFunction(), _plainly(key.device.type):  # not as in `RowByRow`
        for piece in plan:
            step = max(MOST // ((length + block) * shared * (piece.nodes.stop - piece.nodes.start)), 1)
            for start in range(0, groups, step):
                at = (piece.rows, slice(start, start + step), slice(None), piece.nodes)
                held = key[at[:2]], value[at[:2]]
                places[at] = _over_blocks(query[at], *held, piece.parts, at[1], least, softcap, sinks, precise)
    return out.flatten(2, 3), None


def _plainly(device: str) -> Any:
    """Products in the types that they are given."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else AS_GIVEN


@functools.cache
def _products(size: int, wide: int, block: int, device: torch.device, _: int) -> tuple[int, int, bool]:
    """From how many rows on, and up to how many, products agree, and whether those of last keys add in order."""
    keys, values = (torch.empty(2 * block, each, device=device) for each in (size, wide + 1))
    shares = keys.new_empty(1, 2 * block)
    with torch._C.DisableTorchFunction(), _plainly(device.type):
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


def _planned(mask: torch.Tensor, block: int, most: int, window: int, shared: int) -> Iterator[Piece]:
    """The pieces of a mask (B or 1, H or 1, N, L), of at most so many nodes."""
    # nodes of a tree, whose mask is additive, lie in front of the past
    first = mask.shape[2] if mask.is_floating_point() else 0
    mask = mask.roll(-first, -1) if first else mask
    seen = _seen(mask).any(1).sum(-1)  # (B or 1, N)
    early = ((seen - block // 3) // block).clamp(min=0)
    kinds = early.where((seen < window) & (mask.shape[1] == 1), -1 - early)  # where a window is full none is shared

    def pieces(rows: slice, nodes: slice) -> Iterator[Piece]:
        kind = kinds[rows, nodes]
        edges = (nodes.start + 1 + (kind.diff(dim=1) != 0).any(0).nonzero()[:, 0]).tolist()
        if not edges and (kind == kind[:1]).all() and kind.shape[1] <= most and (most > 1 or len(kind) == 1):
            parts = _parts(mask[rows, :, nodes], first, int(kind[0, 0]), block, shared)
            if parts:
                yield Piece(slice(None) if len(kinds) == 1 else rows, nodes, parts)
                return
        if len(kind) > 1:
            middle = (rows.start + rows.stop) // 2
            yield from pieces(slice(rows.start, middle), nodes)
            yield from pieces(slice(middle, rows.stop), nodes)
            return
        edges = edges or [(nodes.start + nodes.stop) // 2]
        for start, stop in itertools.pairwise((nodes.start, *edges, nodes.stop)):
            yield from pieces(rows, slice(start, stop))

    return pieces(slice(0, len(kinds)), slice(0, mask.shape[2]))


def _parts(mask: torch.Tensor, first: int, kind: int, block: int, shared: int) -> list[Part]:
    """The keys of nodes with a mask (b, H or 1, n, L), whose last places are the first slots; none if too many."""
    whole, early = max(kind, 0), kind if kind >= 0 else -1 - kind
    visible = _seen(mask).any(1)  # (b, n, L)
    blocks = ((visible.cumsum(-1) - 1) // block).clamp(max=early)
    least, last = blocks.masked_fill(~visible, early + 1).amin((0, 1)), blocks.masked_fill(~visible, -1).amax((0, 1))
    of_all = (least < whole).nonzero()[:, 0]
    held = [((least <= at) & (at <= last)).nonzero()[:, 0] for at in range(whole, early + 1)]
    if len(of_all) > whole * block or max(map(len, held)) > 2 * block:
        return []
    places = torch.stack([functional.pad(at, (0, 2 * block - len(at)), value=-1) for at in held])  # (K, k)
    filled = places.where(places >= 0, least.argmin())  # with a key that is seen: values of others may be no numbers
    numbers = torch.arange(whole, early + 1, device=places.device)[:, None]
    inside = (blocks[..., filled] == numbers) & (places >= 0)  # (b, n, K, k)
    bias = _additive(mask[..., filled]).masked_fill(~inside[:, None], -math.inf) * LOG2
    bias = bias.unflatten(1, (-1, shared if bias.shape[1] > 1 else 1)).movedim(4, 2)
    of_all, late = ((at + first) % mask.shape[3] for at in (of_all, filled.flatten()))
    parts = [Part(late, (len(places), 2 * block), bias)]
    if whole:
        follow = bool((of_all.diff() == 1).all())
        slots = slice(int(of_all[0]), int(of_all[-1]) + 1) if follow else of_all
        parts.insert(0, Part(slots, (whole, block), None))
    return parts


def _over_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: list[Part], group: slice, least: int,
    softcap: float | None, sinks: Any, precise: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """(b, g, r, n, e) of scaled queries (b, g, r, n, d) over slots of keys and values (b, g, L, d or e)."""
    shape, scores = query.shape[:4], []
    pairs, count = shape[0] * shape[1], shape[2] * shape[3]
    filled = -(-max(least, count) // 4) * 4  # small products of odd M are less alike
    rows = functional.pad(query.reshape(pairs, 1, count, -1), (0, 0, 0, filled - count))
    for slots, (blocks, size), bias in parts:
        keys = _held(key, slots, 0).view(-1, size, key.shape[-1])  # (b * g * K, k, d)
        part = torch.bmm(rows.expand(-1, blocks, -1, -1).flatten(0, 1), keys.mT).view(pairs, blocks, filled, size)
        if softcap is not None:
            part = elementwise(torch.tanh, part) * (softcap * LOG2)
        if bias is not None:
            of_nodes = part[:, :, :count].view(*shape[:2], blocks, *shape[2:], size)
            of_nodes.add_(bias if bias.shape[1] == 1 else bias[:, group])
        scores.append(part)
    top = functools.reduce(torch.maximum, [part.detach().amax((1, 3), keepdim=True) for part in scores])
    top = top.clamp(min=LEAST)  # (b * g, 1, M, 1)
    if sinks is not None:
        sinks = functional.pad(sinks[group].expand(shape).reshape(-1, 1, count, 1), (0, 0, 0, filled - count))
        top = top.maximum(sinks)
    sums: Any = None
    for part, (slots, (blocks, size), bias) in zip(scores, parts):
        shares = elementwise(torch.exp2_, part.sub_(top)).view(-1, filled, size)
        values = _held(value, slots, 1).view(-1, size, value.shape[-1] + 1)
        kind = torch.float32 if bias is None else precise
        products = torch.bmm(shares.to(kind), values.to(kind))  # (b * g * K, M, e + 1)
        for of_block in products.view(pairs, blocks, filled, -1).unbind(1):
            sums = of_block if sums is None else sums + of_block
    if sinks is not None:
        sums = sums + functional.pad(elementwise(torch.exp2, sinks - top)[:, 0], (sums.shape[-1] - 1, 0))
    out = sums[:, :count, :-1] / sums[:, :count, -1:].clamp(min=torch.finfo(torch.float32).tiny)
    return out.view(*shape, -1)


def _held(stored: torch.Tensor, slots: Any, ones: int) -> torch.Tensor:
    """What lies in slots of keys or values (b, g, L, d), and so many ones behind each: (b, g, K * k, d + ones)."""
    some = stored[:, :, slots] if isinstance(slots, slice) else stored.index_select(2, slots)
    return (functional.pad(some, (0, ones), value=1.0) if ones else some).float().contiguous()


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
