"""Which heads a figure belongs to: a short hash of their weights."""

import hashlib
from collections.abc import Iterable

import torch


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32.

    The same values therefore give the same hash in any dtype.

    Args:
        tensors: name and tensor, in any order.
        dtype: the type that the values are rounded to before; None leaves them as they are.

    >>> weight = torch.tensor([1.0, 2.5])
    >>> heads_hash([("a", weight)]) == heads_hash([("a", weight.bfloat16())])
    True
    >>> heads_hash([("a", weight)]) == heads_hash([("b", weight)])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        values = tensor.detach().to(dtype or tensor.dtype).to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]
