"""Products of rows and a weight that give a row the same bits, however many rows there are and wherever it stands.

Which kernel a library takes, and so the order of a sum, depends on the number of rows: in bfloat16 one row and several
may differ, in float32 one, two, four and twelve (MKL and oneDNN on a CPU). For the shape of a weight it is tried once
which numbers agree; rows of another number are filled up to one that does. It is tried with weights [u, -u] and rows
[y, y], of which every product is 0: what is left is the rounding, all bits of which are seen.

Shapes: M rows, K features in, N out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

SIZES = (*range(1, 10), 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 256)  # rows that are tried
FEW = (1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 32, 64)  # with a weight that is LARGE
LARGE, LARGEST = 1 << 23, 1 << 28  # numbers in a weight; of one that is LARGEST no other is made
WHOLE = (256, 64, 16, 4, 1)  # rows at a time, with which others are compared
ELEMENTS = 1 << 15  # up to which an elementwise function runs in one thread
EVEN = 64  # numbers that it takes at a time; of the rest some are computed in another way


class Rows(NamedTuple):
    """Numbers of rows that agree, all from `any_from` up to `most`, which are run at a time."""

    agree: frozenset[int]
    any_from: int
    most: int

    def of(self, count: int) -> int:
        """The least number that agrees and is not less."""
        if count >= self.any_from or count in self.agree:
            return count
        return min((size for size in self.agree if size > count), default=self.any_from)


TRIED: dict[Any, Rows] = {}
Product = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


def times(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    return rows @ weight if bias is None else torch.addmm(bias, rows, weight)


def batched(rows: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
    """One of two products that are taken at once; a weight may be the transpose of another."""
    both = torch.stack([weight] * 2) if weight.is_contiguous() else torch.stack([weight.T] * 2).mT
    return torch.bmm(torch.stack([rows] * 2), both)[1]


def agreeing(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product) -> Rows:
    """Which numbers of rows (..., K) give a row the same bits, with a weight of this shape; tried once."""
    device = weight.device
    cast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    key = (weight.shape, weight.dtype, inputs.dtype, bias is None, run, torch.get_num_threads(), device, cast)
    return TRIED.get(key) or TRIED.setdefault(key, _try(inputs, weight, bias, run))


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product = functional.linear) -> torch.Tensor:
    """`run` of inputs (..., K), a weight (N, K) or (K, N) and a bias (N,): (..., N)."""
    count, rows = inputs.numel() // max(inputs.shape[-1], 1), agreeing(inputs, weight, bias, run)
    if (
        count <= rows.most
        and (inputs.dim() == 2 or run is functional.linear)
        and rows.of(count) == count
        and inputs.is_contiguous()
    ):
        return run(inputs, weight, bias)
    flat = inputs.reshape(-1, inputs.shape[-1]).contiguous()
    if count > rows.most:
        out = torch.cat([product(part, weight, bias, run) for part in flat.split(rows.most)])
    else:
        out = run(functional.pad(flat, (0, 0, 0, rows.of(count) - count)), weight, bias)[:count]
    return out.view(*inputs.shape[:-1], out.shape[-1])


@torch.no_grad()
def _try(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product) -> Rows:
    """Which numbers of rows agree."""
    sizes, generator = FEW if weight.numel() >= LARGE else SIZES, torch.Generator().manual_seed(0)
    half = torch.randn(max(sizes), (inputs.shape[-1] + 1) // 2, generator=generator).to(inputs)
    rows = torch.cat([half, half], dim=1)[:, : inputs.shape[-1]].contiguous()
    if weight.numel() < LARGEST:
        bias = None if bias is None else torch.zeros_like(bias)
        weight = _cancelling(weight, run in (times, batched), generator)
    for whole in (size for size in WHOLE if size <= max(sizes)):
        of_all, turned = run(rows[:whole], weight, bias), rows[:whole].roll(whole // 3 + 1, 0)
        parts = {size: slice((whole - size) // 3, (whole - size) // 3 + size) for size in sizes if size <= whole}
        agree = {size for size, at in parts.items() if same(run(rows[at], weight, bias), of_all[at])}
        if whole in agree and same(run(turned, weight, bias), of_all.roll(whole // 3 + 1, 0)):
            break
    any_from = min(size for size in agree if size > max(parts.keys() - agree, default=0))
    return Rows(frozenset(agree), any_from, whole)


def _cancelling(weight: torch.Tensor, turned: bool, generator: torch.Generator) -> torch.Tensor:
    """A weight [u, -u] of the shape, type and layout of another, (N, K) or, `turned`, (K, N)."""
    out, features = weight.shape[::-1] if turned else weight.shape
    few = torch.randn(min(out, 61), (features + 1) // 2, generator=generator).to(weight)
    both = torch.cat([few, -few], dim=1)[:, :features].repeat(-(-out // len(few)), 1)[:out]
    return torch.empty_like(weight).copy_(both.T if turned else both)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def elementwise(function: Callable[..., torch.Tensor], inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A function of each number, which is computed in the same way wherever it stands."""
    count = inputs.numel()
    one_thread = count <= ELEMENTS or torch.get_num_threads() == 1
    if count % EVEN == 0 and one_thread and inputs.is_contiguous():
        return function(inputs, *args, **kwargs)
    filled = functional.pad(inputs.reshape(-1), (0, -count % EVEN))
    return torch.cat([function(part, *args, **kwargs) for part in filled.split(ELEMENTS)])[:count].view(inputs.shape)


class RowByRow(TorchFunctionMode):
    """Within it products are `product`, and functions of which a vector's rest differs are `elementwise`."""

    ELEMENTWISE = {functional.silu, functional.gelu, functional.softplus, torch.sigmoid, torch.Tensor.sigmoid}
    MATMULS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.mm}
    KNOWN = {functional.linear, torch.addmm, *ELEMENTWISE, *MATMULS}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in self.KNOWN or not args or args[0].dtype == torch.float64:
            return function(*args, **kwargs)
        if function is functional.linear:
            return product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
        if function is torch.addmm:
            return product(args[1], args[2], args[0], times)
        if function in self.ELEMENTWISE:
            return elementwise(function, *args, **kwargs)
        one, other = args[:2]
        if other.dim() == 2:
            return product(one, other, None, times)
        if one.dim() == other.dim() == 3 and len(one) == len(other):
            return torch.stack([product(*pair, bias=None, run=times) for pair in zip(one, other)])
        return function(*args, **kwargs)
