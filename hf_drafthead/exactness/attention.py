"""Attention whose result depends neither on where the keys lie nor on what else is in the call.

The keys that a node sees are cut, in the order of their positions, into blocks of 128. A block that all nodes of a
piece see whole is one product. Of others all keys that some node sees are taken at once, with those of others between
its own, whose shares are zero: where a product adds one term after another, which is tried, zeros change nothing.
Elsewhere, and where each head has a mask, all is float64 and rounded once: 2^-53 of a sum shows in half precision where
a value lies within that of the middle of two others, one of a million million; in float32 each node is one piece.

Shapes: B rows, H heads of queries, G of keys, r = H / G, N nodes, L keys, d and e sizes of a key and a value; b, g
and n of a piece of rows, heads and nodes, K blocks of k keys; M = r * n, or a multiple of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hf_drafthead.exactness.products import Inexact, agreeing, elementwise, same

NAME = "order_free"  # in transformers' configs
BLOCK = ContextVar("keys of a block", default=128)  # few for `trial`
ATTENDED: ContextVar[list[nn.Module] | None] = ContextVar("the modules that attended, for `trial`", default=None)
OTHERS = 64  # more keys, of other nodes, in a block that not all see
MOST = 1 << 18  # scores at a time, 1 MiB
HIDDEN = -1e30  # added to the score of a key that is not seen
LOG2 = math.log2(math.e)  # powers of 2 take a third of the time
# Runs of keys (a row or all, places, slots) in K blocks of k, and a bias (b or 1, g or 1, K, M, k) where nodes differ.
Part = tuple[list[tuple[Any, slice, slice]], tuple[int, int], Tensor | None]
# Which rows, groups of heads, heads and nodes; how often each query is repeated; in which type; the keys that they see.
Piece = tuple[tuple[slice, ...], int, torch.dtype, list[Part]]


def order_free(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any = None, dropout: float = 0.0,
    softcap: float | None = None, s_aux: Any = None, is_causal: Any = None, position_bias: Any = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """As transformers calls it: query (B, H, N, d), key (B, G, L, d), value (B, G, L, e); returns (B, N, H, e).

    Caps, sinks and biases are those of transformers' eager attention.
    """
    if (attended := ATTENDED.get()) is not None:
        attended.append(module)
    if dropout:
        raise Inexact(f"{type(module).__name__} drops {dropout:.0%} of its shares: set its config's dropout to 0")
    (rows, _, nodes, size), (groups, length, wide), mask = query.shape, value.shape[1:], attention_mask
    if mask is None:
        causal = nodes > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
        mask = _without_mask(nodes, length, causal, key.device)
    if position_bias is not None:
        mask = position_bias[..., :length].masked_fill(~_seen(mask[..., :length]), -math.inf)
    if value.dtype == torch.float32 and mask.shape[1] > 1:
        raise Inexact(f"{type(module).__name__} has a mask of each head, for which it has to be in bfloat16 or float16")
    pieces, query = _plan(mask, query.shape, value), query.view(rows, groups, -1, nodes, size)
    how = size**-0.5 if scaling is None else scaling, softcap, s_aux
    with torch._C.DisableTorchFunction(), _plainly(key.device.type):  # not as in `RowByRow`
        if len(pieces) == 1:
            out = _attend(query, key, value, pieces[0], *how)
        else:
            out = query.new_empty(*query.shape[:4], wide, dtype=pieces[0][2])
            for piece in pieces:
                at = piece[0]
                out[at] = _attend(query[at], key[at[:2]], value[at[:2]], piece, *how)
        return out.to(value.dtype).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), None


def _plainly(device: str) -> Any:
    """Products in the types that they are given."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _batched(rows: Tensor, weight: Tensor, _: Any = None) -> Tensor:
    """One of two products that are taken at once."""
    turned = torch.stack([weight.T] * 2) if weight.T.is_contiguous() else torch.stack([weight] * 2).mT
    return torch.bmm(torch.stack([rows] * 2), turned)[1]


@functools.cache
@torch.no_grad()
def _products(size: int, wide: int, block: int, device: torch.device, _: int) -> tuple[int, int, bool]:
    """From how many rows on, and up to how many, products agree; and whether they add in order: whether attention over
    few of the keys and values has the bits of that among them all."""
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.rand, generator=generator)
    keys, values = (draw(block + OTHERS, each).to(device) for each in (size, wide + 1))
    with torch._C.DisableTorchFunction(), _plainly(device.type):
        weights = keys, keys[:block], values.T, values[:block].T
        fewest, largest = zip(*(agreeing(weight, weight, None, _batched) for weight in weights))
        least, most, in_order = max(fewest), min(largest), True
        queries, shares = (draw(least, each).to(device) for each in (size, len(keys)))
        for count in (block, block - block // 3, block // 3 + 1):
            order, among = torch.randperm(len(keys), generator=generator).to(device), shares.clone()
            seen, among[:, order[count:]] = order[:count].sort().values, 0
            some = torch.cat([seen, order[count:]])[:block]
            scored = same(_batched(queries, keys)[:, some], _batched(queries, keys[some]))
            added = same(_batched(among, values.T), _batched(among[:, some], values[some].T))
            in_order = in_order and scored and added
    return least, most, in_order


@functools.lru_cache(maxsize=4)
@torch.inference_mode(False)  # so that it can be kept, and its plan with it
def _without_mask(nodes: int, length: int, causal: bool, device: Any) -> Tensor:
    mask = torch.ones(1, 1, nodes, length, dtype=torch.bool, device=device)
    return mask.tril(length - nodes) if causal else mask


def _plan(mask: Tensor, of_query: torch.Size, value: Tensor) -> list[Piece]:
    """The pieces of a call, which layers that are given the same mask share: they are kept with it."""
    plans = vars(mask).setdefault("plans", {})
    version = None if mask.is_inference() else mask._version
    key = of_query, value.shape, value.dtype, BLOCK.get(), torch.get_num_threads(), version
    if version is None or key not in plans:
        plans[key] = _pieces(mask[..., : value.shape[2]], of_query, value)
    return plans[key]


@torch.inference_mode(False)
def _pieces(mask: Tensor, of_query: torch.Size, value: Tensor) -> list[Piece]:
    """Pieces of few enough rows and nodes that no block has too many keys, for a mask (B or 1, H or 1, N, L)."""
    (count, heads, nodes, size), (groups, length, wide), block = of_query, value.shape[1:], BLOCK.get()
    least, most, in_order = _products(size, wide, block, value.device, torch.get_num_threads())
    single, shared = value.dtype == torch.float32, heads // groups
    precise = torch.float32 if single or in_order and mask.shape[1] == 1 else torch.float64
    most = max(most // shared, 1) if in_order or not single else 1
    first = nodes if mask.is_floating_point() else 0  # nodes of a tree, whose mask is additive, lie before the past
    mask = mask.roll(-first, -1) if first else mask
    together = max(MOST // ((length + block) * shared * min(nodes, most)), 1)  # pairs of a row and a group
    pending = [(row, 0, nodes) for row in range(0, count, together)]
    pieces: list[Piece] = []
    while pending:
        row, start, stop = pending.pop()
        rows, repeats, parts = slice(row, min(row + together, count)), -(-least // (shared * (stop - start))), None
        if stop - start <= most:
            of_rows = mask[rows if len(mask) > 1 else slice(None), :, start:stop]
            parts = _parts(of_rows, first, block, (repeats, shared))
        if parts is None:
            middle = (start + stop) // 2
            pending += [(row, start, middle), (row, middle, stop)]
            continue
        step = max(together // (rows.stop - row), 1) if mask.shape[1] == 1 else groups
        for group in range(0, groups, step):
            at = rows, slice(group, group + step), slice(None), slice(start, stop)
            pieces.append((at, repeats, precise, parts))
    return pieces


def _seen(mask: Tensor) -> Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _parts(mask: Tensor, first: int, block: int, heads: tuple[int, int]) -> list[Part] | None:
    """The keys of nodes with a mask (b, H or 1, n, L), whose last places are the first slots; None if too many."""
    visible = _seen(mask).any(1).cpu().numpy()  # (b, n, L); in arrays, whose operations are short
    alike, number = visible.all(1), (visible.cumsum(-1) - 1) // block
    alike &= (alike == visible.any(1)).cumprod(-1) > 0  # keys before the first that not all see
    whole = int(alike.sum(-1).min()) // block if mask.shape[1] == 1 else 0
    number[~visible] = visible.shape[2]
    since, number[~visible] = number.min(1), -1  # (b, L): the first block of a key
    until = number.max(1)
    blocks = max(int(until.max()), 0) + 1
    parts: list[Part] = []
    if whole:
        parts.append((_runs((alike & (until < whole))[:, None], block, first)[0], (whole, block), None))
    if whole < blocks:
        numbers = torch.arange(whole, blocks)[:, None].numpy()
        held = (since[:, None] <= numbers) & (numbers <= until[:, None])  # (b, K, L)
        size = held.sum(-1).max()
        if size > block + OTHERS:
            return None
        size = block if size <= block else block + OTHERS
        runs, (row, part, key, place) = _runs(held, size, first)
        inside = number[row, :, key] == part[:, None] + whole  # (S, n)
        inside, row, key, place = (torch.from_numpy(each).to(mask.device) for each in (inside, row, key, place))
        added = mask[row, :, :, key].float()  # (S, H or 1, n)
        added = added * LOG2 if mask.is_floating_point() else (1 - added) * HIDDEN
        bias = torch.full((*mask.shape[:3], len(numbers) * size), HIDDEN, device=mask.device)
        bias[row, :, :, place] = added.clamp(min=HIDDEN).where(inside[:, None], HIDDEN)
        bias = bias.view(len(mask), -1, heads[1] if mask.shape[1] > 1 else 1, mask.shape[2], len(numbers), size)
        bias = bias.movedim(4, 2)[:, :, :, None].expand(-1, -1, -1, *heads, -1, -1).flatten(3, 5)
        parts.append((runs, (len(numbers), size), bias))
    return parts


def _runs(held: Any, size: int, first: int) -> tuple[list[Any], tuple[Any, ...]]:
    """Of keys (b, K, L) that are held in K blocks: the runs; and the row, block, number and place of each key (S,)."""
    row, part, key = held.nonzero()
    place, slot = part * size + held.cumsum(-1)[held] - 1, (key + first) % held.shape[2]
    breaks = (place[1:] != place[:-1] + 1) | (slot[1:] != slot[:-1] + 1)
    edges, runs = sorted({0, *(breaks.nonzero()[0] + 1).tolist(), len(key)}), []
    for start, stop in itertools.pairwise(edges):
        places, slots = (slice(int(at[start]), int(at[start]) + stop - start) for at in (place, slot))
        runs.append((int(row[start]) if len(held) > 1 else slice(None), places, slots))
    return runs, (row, part, key, place)


def _attend(query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float, softcap: Any, s_aux: Any) -> Tensor:
    """(b, g, r, n, e) of queries (b, g, r, n, d) over runs of keys and values (b, g, L, d or e)."""
    at, repeats, precise, parts = piece
    (rows, groups, shared, nodes, size), wide = query.shape, value.shape[3] + 1
    factor = _factor(scale * (LOG2 if softcap is None else 1 / softcap), repeats, precise, query.device)
    query, scores = (query[:, :, None] * factor).reshape(rows * groups, 1, -1, size), []
    count = query.shape[2]
    for runs, (blocks, each), bias in parts:
        keys = _held(key, runs, blocks * each, precise, 0).view(-1, each, size)  # (b * g * K, k, d)
        part = torch.bmm(query.expand(-1, blocks, -1, -1).reshape(-1, count, size), keys.mT)
        part = part.view(rows, groups, blocks, count, each)
        if softcap is not None:
            part = elementwise(torch.tanh, part) * (softcap * LOG2)
        scores.append(part if bias is None else part.add_(bias))
    largest = (part.detach().amax((2, 4), keepdim=True) for part in scores)
    top: Any = functools.reduce(torch.maximum, largest)  # (b, g, 1, M, 1)
    if s_aux is not None:
        sinks = s_aux.to(precise).view(-1, 1, shared, 1)[at[1]] * LOG2
        sinks = sinks.expand(rows, -1, repeats, -1, nodes).reshape(rows, groups, 1, count, 1)
        top = top.maximum(sinks)
    sums: Any = None if s_aux is None else functional.pad(elementwise(torch.exp2, sinks - top)[:, :, 0], (wide - 1, 0))
    for part, (runs, (blocks, each), _) in zip(scores, parts):
        shares = elementwise(torch.exp2_, part.sub_(top)).view(-1, count, each)
        of_blocks = torch.bmm(shares, _held(value, runs, blocks * each, precise, 1).view(-1, each, wide))
        for of_block in of_blocks.view(rows, groups, blocks, count, wide).unbind(2):
            sums = of_block if sums is None else sums + of_block  # (b, g, M, e + 1)
    used = slice(0, shared * nodes)
    return (sums[:, :, used, :-1] / sums[:, :, used, -1:]).view(rows, groups, shared, nodes, -1)


@functools.cache
@torch.inference_mode(False)
def _factor(scale: float, repeats: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(repeats, 1, 1, 1), with which a product of queries is of this type."""
    return torch.full((repeats, 1, 1, 1), scale, dtype=dtype, device=device)


def _held(stored: Tensor, runs: Any, count: int, dtype: torch.dtype, ones: int) -> Tensor:
    """What runs of keys or values (b, g, L, d) hold, and so many ones behind each: (b, g, K * k, d + ones)."""
    rows, groups, _, size = stored.shape
    held = stored.new_ones(rows, groups, count, size + ones, dtype=dtype)
    for row, places, slots in runs:
        held[row, :, places, :size] = stored[row, :, slots]
    return held


AttentionInterface.register(NAME, order_free)
AttentionMaskInterface.register(NAME, sdpa_mask)
