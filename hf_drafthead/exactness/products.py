"""Products of rows and a weight that give a row the same bits, however many rows there are and wherever it stands.

Which kernel a library takes, and so the order of a sum, depends on the number of rows: in bfloat16 one row and several
may differ, in float32 one, two, four and twelve (MKL and oneDNN on a CPU). For the shape of a weight it is tried once
which numbers agree; rows of another number are filled up to one that does. It is tried with weights [u, -u] and rows
[y, y], of which every product is 0: what is left is the rounding, all bits of which are seen.

Shapes: M rows, K features in, N out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
Product = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]


class Inexact(ValueError):
    """A base cannot be made exact; the text names the module."""


def batched(rows: torch.Tensor, weight: torch.Tensor, _: Any = None) -> torch.Tensor:
    """One of two products that are taken at once."""
    turned = torch.stack([weight.T] * 2) if weight.T.is_contiguous() else torch.stack([weight] * 2).mT
    return torch.bmm(torch.stack([rows] * 2), turned)[1]


def agreeing(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product) -> tuple[int, int]:
    """From how many rows (..., K) on, and up to how many, all give a row the same bits; tried once for a shape."""
    device = weight.device
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else inputs.dtype
    key = weight.shape, weight.is_contiguous(), dtype, bias is None, run, device, torch.get_num_threads()
    return TRIED.get(key) or TRIED.setdefault(key, _try(inputs, weight, bias, run))


@torch.no_grad()
def _try(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product) -> tuple[int, int]:
    sizes, generator = FEW if weight.numel() >= LARGE else SIZES, torch.Generator().manual_seed(0)
    half = torch.randn(max(sizes), (inputs.shape[-1] + 1) // 2, generator=generator).to(inputs)
    rows = torch.cat([half, half], dim=1)[:, : inputs.shape[-1]].contiguous()
    if weight.numel() < LARGEST:
        bias = None if bias is None else torch.zeros_like(bias)
        weight = _cancelling(weight, generator)
    for most in (size for size in WHOLE if size <= max(sizes)):
        of_all, turned = run(rows[:most], weight, bias), rows[:most].roll(most // 3 + 1, 0)
        if most == 1 or same(run(turned, weight, bias), of_all.roll(most // 3 + 1, 0)):
            break
    parts = {size: slice((most - size) // 3, (most - size) // 3 + size) for size in sizes if size < most}
    differing = [size for size, at in parts.items() if not same(run(rows[at], weight, bias), of_all[at])]
    return min(size for size in sizes if size > max(differing, default=0)), most


def _cancelling(weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A weight [u, -u] (N, K) of the shape, type and layout of another."""
    few = torch.randn(min(len(weight), 61), (weight.shape[1] + 1) // 2, generator=generator).to(weight)
    both, made = torch.cat([few, -few], dim=1)[:, : weight.shape[1]], torch.empty_like(weight)
    for part in made.split(len(both)):
        part.copy_(both[: len(part)])
    return made


@torch.no_grad()
def adds_in_order(keys: torch.Tensor, values: torch.Tensor, least: int, few: int) -> bool:
    """Whether attention over `few` of keys (L, d) and values (L, e) has the bits of that among them all."""
    generator = torch.Generator().manual_seed(0)
    shapes = (least, keys.shape[1]), keys.shape, (least, len(values)), values.shape
    queries, keys, shares, values = (torch.rand(shape, generator=generator).to(keys) for shape in shapes)
    for count in (few, few - few // 3, few // 3 + 1):
        order = torch.randperm(len(keys), generator=generator).to(keys.device)
        among, order = shares.clone(), torch.cat([order[:count].sort().values, order[count:]])
        among[:, order[count:]], some = 0, order[:few]
        scored = same(batched(queries, keys)[:, some], batched(queries, keys[some]))
        if not (scored and same(batched(among, values.T), batched(among[:, some], values[some].T))):
            return False
    return True


def product(inputs: torch.Tensor, weight: torch.Tensor, bias: Any, run: Product = functional.linear) -> torch.Tensor:
    """`run` of inputs (..., K), a weight (N, K) and a bias (N,): (..., N)."""
    least, most = agreeing(inputs, weight, bias, run)
    count = inputs.numel() // inputs.shape[-1]
    if least <= count <= most:
        return run(inputs.contiguous(), weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if count > most:
        out = torch.cat([product(part, weight, bias, run) for part in rows.split(most)])
    else:
        out = run(torch.cat([rows] * -(-least // max(count, 1))), weight, bias)[:count]
    return out.view(*inputs.shape[:-1], out.shape[-1])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def elementwise(function: Callable[..., torch.Tensor], inputs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A function of each number, which is computed in the same way wherever it stands."""
    one_thread = inputs.numel() <= ELEMENTS or torch.get_num_threads() == 1
    if inputs.numel() % EVEN == 0 and one_thread and inputs.is_contiguous():
        return function(inputs, *args, **kwargs)
    filled = functional.pad(inputs.reshape(-1), (0, -inputs.numel() % EVEN))
    parts = (filled[start : start + ELEMENTS] for start in range(0, len(filled), ELEMENTS))
    return torch.cat([function(part, *args, **kwargs) for part in parts])[: inputs.numel()].view(inputs.shape)


def convolution(inputs: torch.Tensor, weight: Any, bias: Any = None, padding: int = 0, **_: Any) -> torch.Tensor:
    """As `torch.conv1d` of each channel by itself, one tap after the other."""
    windows = functional.pad(inputs, (padding, padding)).unfold(2, weight.shape[-1], 1)
    return convolved(windows, weight[:, 0], bias, None)


class RowByRow(TorchFunctionMode):
    """Within it products are `product`, and functions of which a vector's rest differs are `elementwise`."""

    ELEMENTWISE = {functional.silu, functional.gelu, functional.softplus, torch.sigmoid, torch.Tensor.sigmoid}
    MATMULS = {torch.matmul, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.mm}
    KNOWN = {functional.linear, torch.addmm, *ELEMENTWISE, *MATMULS}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is functional.conv1d and kwargs.get("groups") == args[0].shape[1]:
            with self:  # in which nodes are convolved as well
                return convolution(*args, **kwargs)
        if function not in self.KNOWN or not args or args[0].dtype == torch.float64:
            return function(*args, **kwargs)
        if function is functional.linear:
            return product(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias"))
        if function is torch.addmm:
            return product(args[1], args[2].mT, args[0])
        if function in self.ELEMENTWISE:
            return elementwise(function, *args, **kwargs)
        one, other = args[:2]
        if other.dim() == 2:
            return product(one, other.mT, None)
        if one.dim() == other.dim() == 3 and len(one) == len(other):
            return torch.stack([product(*pair, bias=None) for pair in zip(one, other.mT)])
        return function(*args, **kwargs)
