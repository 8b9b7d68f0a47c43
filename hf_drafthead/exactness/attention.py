"""Attention whose result depends neither on where the keys lie nor on what else is in the call.

The keys that a node sees are taken in the order of their positions: the early ones in blocks of 96, which are the same
whatever else is in the call, and the last 32 to 127, which in a tree may lie anywhere, in one product with all keys
between them, whose shares are zero. Where a product adds one term after another, which is tried, zeros change nothing.
Elsewhere, and where a window is full, late sums are taken in float64 and rounded once: what an order changes is 2^-53
of a sum, which in bfloat16 and float16 shows where a value lies within that of the middle of two others, one of a
million million. In float32 one of ten million does; values that are nearly as near are added without any rounding.

Shapes: B rows, H heads of queries, G of keys, r = H / G, N nodes, L keys, d and e sizes of a key and a value; b, g
and n of a piece of rows, heads and nodes, K blocks of k keys, l late keys; M = r * n, and more where a product needs.
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

from hf_drafthead.exactness.products import adds_in_order, agreeing, batched, elementwise

NAME = "order_free"  # in transformers' configs
BLOCK = ContextVar("keys of a block", default=96)  # few for `trial`; a third of it, and more, are late
MOST = 1 << 18  # scores at a time, 1 MiB
NEAR = 2.0**-44  # of the largest value: more than an order changes a sum
LEAST = -1e30  # of a largest score
LOG2 = math.log2(math.e)  # powers of 2 take a third of the time
attended: list[nn.Module] = []  # the modules that attended last, for `trial`


class Piece(NamedTuple):
    """Nodes (n,) of some rows that see the same early blocks, and slots: of these, and of late keys that one sees."""

    rows: slice
    nodes: torch.Tensor
    early: Any
    late: torch.Tensor  # (l,), full blocks
    bias: torch.Tensor  # (b or 1, G or 1, K, r or 1, n, k)
    few: bool  # late keys


class How(NamedTuple):
    """What a call says of its scores and shares, and what products need."""

    softcap: float | None
    sinks: torch.Tensor | None  # (G, r, 1)
    dropout: float
    rows: int
    in_order: bool


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
    shared, block, window = heads // groups, BLOCK.get(), sliding_window or length + 1
    causal = nodes > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    least, most, in_order = _products(size, wide, block, key.device, torch.get_num_threads())
    limits = max(most // shared, 1), block, 0 if position_bias is not None else window, shared
    plan = _plan(attention_mask, position_bias, (nodes, length, causal), limits, key.device)
    sinks = None if s_aux is None else s_aux.float().view(groups, shared, 1) * LOG2
    how = How(softcap, sinks, dropout * module.training, least, in_order)
    query = query.unflatten(1, (groups, shared)).float()
    query = query * ((size**-0.5 if scaling is None else scaling) * (LOG2 if softcap is None else 1 / softcap))
    out = value.new_zeros(rows, nodes, groups, shared, wide)
    places = out.permute(0, 2, 3, 1, 4)
    for piece in plan:
        asked = query[piece.rows] if len(piece.nodes) == nodes else query[piece.rows][:, :, :, piece.nodes]
        step = max(MOST // ((length + block) * shared * len(piece.nodes)), 1)
        for group in (slice(start, start + step) for start in range(0, groups, step)):
            keys, values = (part[piece.rows, group] for part in (key, value))
            bias = piece.bias if piece.bias.shape[1] == 1 else piece.bias[:, group]
            few = how if sinks is None else how._replace(sinks=sinks[group])
            with _plainly(key.device.type):
                found = _over_blocks(asked[:, group], keys, values, bias, piece, few)
            if len(piece.nodes) == nodes:
                places[piece.rows, group] = found.to(value.dtype)
            else:
                places[piece.rows, group, :, piece.nodes] = found.to(value.dtype)
    return out.flatten(2, 3), None


def _plainly(device: str) -> Any:
    """Products in the types that they are given."""
    cast = torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if cast else contextlib.nullcontext()


@functools.cache
def _products(size: int, wide: int, block: int, device: torch.device, _: int) -> tuple[int, int, bool]:
    """From how many rows on, and up to how many, products agree, and whether those of late keys add in order."""
    keys, values = (torch.empty(2 * block, each, device=device) for each in (size, wide + 1))
    shares = keys.new_empty(1, 2 * block)
    with _plainly(device.type):
        tried = [agreeing(keys, keys[:block].mT, None, batched)]
        tried += [agreeing(shares[:, :count], values[:count], None, batched) for count in (block, 2 * block)]
        least = -(-max(few for few, _ in tried) // 4) * 4
        return least, min(many for _, many in tried), adds_in_order(values, least)


def _plan(mask: Any, bias: Any, shape: tuple[int, int, bool], limits: tuple[int, ...], device: Any) -> list[Piece]:
    """The pieces of a call, which layers that are given the same mask share."""
    if mask is None and bias is None:
        return _plan_without_mask(shape, limits, device)
    mask = _without_mask(*shape, device) if mask is None else mask
    if bias is not None:
        return _planned(_additive(mask[..., : shape[1]]) + bias[..., : shape[1]], *limits)
    plans = vars(mask).setdefault("plans", {})
    version = None if mask.is_inference() else mask._version
    if version is None or (shape, limits, version) not in plans:
        plans[shape, limits, version] = _planned(mask[..., : shape[1]], *limits)
    return plans[shape, limits, version]


@functools.lru_cache(maxsize=4)
def _plan_without_mask(shape: tuple[int, int, bool], limits: tuple[int, ...], device: Any) -> list[Piece]:
    return _planned(_without_mask(*shape, device), *limits)


def _without_mask(nodes: int, length: int, causal: bool, device: Any) -> torch.Tensor:
    mask = torch.ones(1, 1, nodes, length, dtype=torch.bool, device=device)
    return mask.tril(length - nodes) if causal else mask


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _additive(mask: torch.Tensor) -> torch.Tensor:
    bias = mask.float() if mask.is_floating_point() else torch.zeros(mask.shape, device=mask.device)
    return bias.masked_fill(~_seen(mask), -math.inf)


def _planned(mask: torch.Tensor, most: int, block: int, window: int, shared: int) -> list[Piece]:
    """Of a mask (B or 1, H or 1, N, L): pieces of at most so many nodes."""
    nodes, length = mask.shape[2:]
    # nodes of a tree, whose mask is additive, lie in front of the past
    places = torch.arange(length, device=mask.device).roll(-nodes if mask.is_floating_point() else 0)
    visible = _seen(mask).any(1)[..., places]  # (B or 1, N, L)
    seen = visible.sum(-1)
    early = ((seen - block // 3) // block).clamp(min=0) * (seen < (0 if mask.shape[1] > 1 else window))
    kinds = early.where(seen - early * block < block + block // 3, -1)  # where a window is full nodes see other keys
    alike = not early.any() and (kinds == kinds[0]).all() and int(visible.any(1).any(0).sum()) <= 2 * block
    pieces = []
    for row in [slice(None)] if len(visible) == 1 or alike else [slice(at, at + 1) for at in range(len(visible))]:
        for kind in kinds[row].unique().tolist():
            some, limit = (kinds[row][0] == kind).nonzero()[:, 0], 2 * block if kind >= 0 else length
            for part, slots in _split(visible[row].any(0), some, max(kind, 0) * block, limit, most):
                first, late = places[slots].tensor_split([max(kind, 0) * block])
                ends = first[:1].tolist() + first[-1:].tolist()
                whole = slice(ends[0], ends[1] + 1) if ends and ends[1] - ends[0] == len(first) - 1 else first
                more = (0, -len(late) % block)
                bias = functional.pad(_additive(mask[row][:, :, part][..., late]) * LOG2, more, value=-math.inf)
                bias = bias.unflatten(-1, (-1, block)).unflatten(1, (-1, shared if mask.shape[1] > 1 else 1))
                late = functional.pad(late, more, value=int(late[0]))
                pieces.append(Piece(row, part, whole, late, bias.movedim(-2, 2), kind >= 0))
    return pieces


def _split(
    visible: torch.Tensor, nodes: torch.Tensor, early: int, limit: int, most: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Nodes that share so many early keys and have few others, and the places of all keys that one of them sees."""
    seen, of_first = visible[nodes].any(0).nonzero()[:, 0], visible[nodes[0]]
    behind = int(of_first.nonzero()[early - 1, 0]) + 1 if early else 0
    alike = (visible[nodes, :behind] == of_first[:behind]).all()
    if len(nodes) > 1 and not (alike and len(nodes) <= most and len(seen) - early <= limit):
        for half in nodes.chunk(2):
            yield from _split(visible, half, early, limit, most)
    elif len(seen):
        yield nodes, seen


def _over_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, piece: Piece, how: How
) -> torch.Tensor:
    """(b, g, r, n, e) of scaled queries (b, g, r, n, d) over a piece's slots of keys and values (b, g, L, d or e)."""
    shape, count, block = query.shape[2:4], query.shape[2:4].numel(), bias.shape[-1]
    more = max(-count % 4, how.rows - count)
    rows = functional.pad(query.flatten(2, 3), (0, 0, 0, more))[:, :, None]
    parts = [slots for slots in (piece.early, piece.late) if isinstance(slots, slice) or len(slots)]
    scores = [
        rows @ _at(key, slots).float().contiguous().unflatten(2, (-1, block)).mT for slots in parts
    ]  # (b, g, K, M, k) each
    if how.softcap is not None:
        scores = [elementwise(torch.tanh, part) * (how.softcap * LOG2) for part in scores]
    scores[-1][:, :, :, :count].unflatten(3, shape).add_(bias)
    top = functools.reduce(torch.maximum, [part.detach().amax((2, 4)) for part in scores])  # (b, g, M)
    if how.sinks is not None:
        sinks = functional.pad(how.sinks.expand(-1, *shape).flatten(1), (0, more))
        top = top.maximum(sinks)
    top = top.clamp(min=LEAST)
    shares = [elementwise(torch.exp2_, part.sub_(top[:, :, None, :, None])) for part in scores]
    values = [_with_ones(_at(value, slots)) for slots in parts]
    wide = torch.float32 if how.in_order and piece.few else torch.float64
    before, late, last, sums = _sums(shares, values, wide)
    of_sinks = top.new_zeros(()) if how.sinks is None else elementwise(torch.exp2, sinks - top)
    total = sums[..., -1] + of_sinks
    if how.dropout:
        sums = _sums([functional.dropout(part, how.dropout) for part in shares], values, wide)[-1]
    found = sums[..., :-1] / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    if value.dtype == torch.float32 != wide and not how.dropout:
        margin = NEAR * value.abs().amax()
        near = ((found - margin).float() != (found + margin).float()) & (found != 0)
        for b, g, m, e in near[:, :, :count].nonzero().tolist():
            terms = ([before.expand_as(sums)[b, g, m, at], *(late[b, g, m] * last[b, g, :, at])] for at in (e, -1))
            numerator, denominator = map(math.fsum, terms)
            found.data[b, g, m, e] = numerator / (denominator + of_sinks.expand_as(top)[b, g, m].double())
    return found[:, :, :count].unflatten(2, shape)


def _at(stored: torch.Tensor, slots: Any) -> torch.Tensor:
    """What lies in some slots, of keys or values (b, g, L, d or e)."""
    return stored[:, :, slots] if isinstance(slots, slice) else stored.index_select(2, slots)


def _with_ones(values: torch.Tensor) -> torch.Tensor:
    """(b, g, l, e + 1) in float32, of which the last ones add shares."""
    ones = torch.ones(*values.shape[:-1], values.shape[-1] + 1, device=values.device)
    ones[..., :-1] = values
    return ones


def _sums(shares: list[torch.Tensor], values: list[torch.Tensor], wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Over early blocks (b, g, M, e + 1), late shares (b, g, M, l), late values (b, g, l, e + 1), and over all."""
    late, last = shares[-1].movedim(2, 3).flatten(3).to(wide), values[-1].to(wide)
    sums = late @ last
    if len(shares) == 1:
        return torch.zeros_like(sums), late, last, sums
    blocks = shares[0] @ values[0].unflatten(2, (-1, shares[0].shape[-1]))
    before = functools.reduce(torch.add, blocks.unbind(2))
    return before, late, last, before + sums


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
