"""Products and functions that give a row the same bits, however many rows there are and wherever it stands.

Which kernel a library takes, and so the order of a sum, depends on the number of rows: in bfloat16 one row and several
may differ, in float32 one, two, four and twelve (MKL and oneDNN on a CPU). For the shape of a weight it is tried once
which numbers agree; rows of another number are filled up to one that does. It is tried with weights [u, -u] and rows
[y, y], of which every product is 0: what is left is the rounding, all bits of which are seen.

Shapes: M rows, K features in, N out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from hf_drafthead.bases.mixers.short_convolution import convolved

SIZES = (*range(1, 10), 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 100, 256)  # rows that are tried
FEW = (1, 2, 3, 4, 7, 8, 16, 32, 64)  # with a weight that is LARGE
LARGE, LARGEST = 1 << 23, 1 << 28  # numbers in a weight; of one that is LARGEST no other is made
WHOLE = (256, 64, 16, 4, 1)  # rows at a time, with which others are compared
ELEMENTS = 1 << 15  # up to which an elementwise function runs in one thread
EVEN = 64  # numbers that it takes at a time; of the rest some are computed in another way
TRIED: dict[Any, tuple[int, int]] = {}
Product = Callable[[Tensor, Tensor, Any], Tensor]


class Inexact(ValueError):
    """A base cannot be made exact; the text names the module."""


def product(inputs: Tensor, weight: Tensor, bias: Any = None, run: Product = functional.linear) -> Tensor:
    """`run` of inputs (..., K), a weight (N, K) and a bias (N,): (..., N)."""
    least, most = agreeing(inputs, weight, bias, run)
    count = inputs.numel() // inputs.shape[-1]
    if least <= count <= most:
        return run(inputs.contiguous(), weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if count > most:
        out = torch.cat([product(part, weight, bias, run) for part in rows.split(most)])
    else:
        out = run(rows.repeat(-(-least // max(count, 1)), 1), weight, bias)[:count]
    return out.view(*inputs.shape[:-1], out.shape[-1])


def agreeing(inputs: Tensor, weight: Tensor, bias: Any, run: Product) -> tuple[int, int]:
    """From how many rows (..., K) on, and up to how many, all give a row the same bits; tried once for a shape."""
    device = weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else inputs.dtype
    key = weight.shape, weight.is_contiguous(), dtype, bias is None, run, device, torch.get_num_threads()
    return TRIED.get(key) or TRIED.setdefault(key, _try(inputs, weight, bias, run))


@torch.no_grad()
def _try(inputs: Tensor, weight: Tensor, bias: Any, run: Product) -> tuple[int, int]:
    sizes, generator = FEW if weight.numel() >= LARGE else SIZES, torch.Generator().manual_seed(0)
    half, few = (torch.randn(count, (weight.shape[1] + 1) // 2, generator=generator) for count in (max(sizes), 61))
    rows = torch.cat([half, half], dim=1)[:, : weight.shape[1]].contiguous().to(inputs)
    if weight.numel() < LARGEST:
        few, numbers = torch.cat([few, -few], dim=1)[:, : weight.shape[1]], torch.arange(len(weight)) % len(few)
        weight = torch.index_select(few.to(weight), 0, numbers.to(weight.device), out=torch.empty_like(weight))
        bias = None if bias is None else torch.zeros_like(bias)
    for most in (size for size in WHOLE if size <= max(sizes)):
        of_all, turned = run(rows[:most], weight, bias), rows[:most].roll(most // 3 + 1, 0)
        if most == 1 or same(run(turned, weight, bias), of_all.roll(most // 3 + 1, 0)):
            break
    parts = {size: slice((most - size) // 3, (most - size) // 3 + size) for size in sizes if size < most}
    differing = [size for size, at in parts.items() if not same(run(rows[at], weight, bias), of_all[at])]
    return min(size for size in sizes if size > max(differing, default=0)), most


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def elementwise(function: Callable[..., Tensor], inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function of each number, which is computed in the same way wherever it stands."""
    one_thread = inputs.numel() <= ELEMENTS or torch.get_num_threads() == 1
    if inputs.numel() % EVEN == 0 and one_thread and inputs.is_contiguous():
        return function(inputs, *args, **kwargs)
    filled = functional.pad(inputs.reshape(-1), (0, -inputs.numel() % EVEN))
    parts = [function(part, *args, **kwargs) for part in filled.split(ELEMENTS)]
    return torch.cat(parts)[: inputs.numel()].view(inputs.shape)


def _matmul(one: Tensor, other: Tensor) -> Tensor:
    if other.dim() == 2:
        return product(one, other.mT)
    if one.dim() == other.dim() == 3 and len(one) == len(other):
        return torch.stack([product(*pair) for pair in zip(one, other.mT)])
    return torch.matmul(one, other)


def _addmm(bias: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return product(rows, weight.mT, bias)


def _convolution(inputs: Tensor, weight: Any, bias: Any = None, *, padding: int = 0, groups: int) -> Tensor:
    """Of each channel by itself, one tap after the other, as that of nodes."""
    windows = functional.pad(inputs, (padding, padding)).unfold(2, weight.shape[-1], 1)
    return convolved(windows, weight[:, 0], bias, None)


ELEMENTWISE = (functional.silu, functional.gelu, functional.softplus, torch.sigmoid, Tensor.sigmoid)
MATMULS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
EXACT: dict[Any, Callable[..., Tensor]] = {
    functional.linear: product,
    torch.addmm: _addmm,
    **dict.fromkeys(MATMULS, _matmul),
    **{function: functools.partial(elementwise, function) for function in ELEMENTWISE},
}


class RowByRow(TorchFunctionMode):
    """Within it products, short convolutions and functions of which a vector's rest differs are those above."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.conv1d and kwargs.get("groups") == args[0].shape[1]:
            with self:  # in which nodes are convolved as well
                return _convolution(*args, **kwargs)
        if function in EXACT and args and args[0].dtype != torch.float64:
            function = EXACT[function]
        return function(*args, **kwargs)


class InDouble(RowByRow):
    """Within it what is to be float32 is float64, too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = Tensor.double if function is Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return super().__torch_function__(function, types, args, kwargs)
