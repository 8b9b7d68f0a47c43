"""What a figure belongs to: the heads, by a short hash of their weights, and the device."""

import functools
import hashlib
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

# by drafter: what its weights were when they were hashed, and the hash
_KNOWN: WeakKeyDictionary[Any, tuple[Any, str | None]] = WeakKeyDictionary()


def heads_hash(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> str:
    """The first 16 hex digits of a sha256 over names, shapes and values, these as float32.

    The same values therefore give the same hash in any dtype.

    Args:
        tensors: name and tensor, in any order.
        dtype: the type that fractions are rounded to before; None leaves them as they are.

    >>> weight = torch.tensor([1.0, 2.5])
    >>> heads_hash([("a", weight)]) == heads_hash([("a", weight.bfloat16())])
    True
    >>> heads_hash([("a", weight)]) == heads_hash([("b", weight)])
    False
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        rounded = tensor.detach().to(dtype if dtype and tensor.is_floating_point() else tensor.dtype)
        values = rounded.to("cpu", torch.float32).contiguous()
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:16]


def drafter_hash(drafter: torch.nn.Module) -> str | None:
    """`heads_hash` of what a checkpoint holds of a drafter; None where weights lie elsewhere.

    It is computed again only after a parameter was replaced or written to.
    """
    stored = drafter.state_dict(keep_vars=True).keys()
    tensors = [*drafter.named_parameters(), *drafter.named_buffers()]
    weights = [(f"drafter.{name}", weight) for name, weight in tensors if name in stored]
    state = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for _, weight in weights]
    known = _KNOWN.get(drafter)
    if known is None or known[0] != state:
        elsewhere = any(weight.is_meta for _, weight in weights)
        known = _KNOWN[drafter] = state, None if elsewhere else heads_hash(weights)
    return known[1]


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def cpu_name() -> str:
    """The model of the CPU, as the operating system names it.

    >>> len(cpu_name()) > 0 and cpu_name() != "cpu"
    True
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine() or "unknown CPU"
