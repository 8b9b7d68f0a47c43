"""Layers that keep a state: transformers' own functions, of which what is float32 is float64.

They fold a prompt in by chunks and single tokens one by one, and nodes take their tree form (`bases.mixers`): three
orders of one sum. In float64, in which the states are kept too, what an order changes does not show in bfloat16 and
float16.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_drafthead.bases.mixers import TREE_FORMS, extended
from hf_drafthead.bases.releases import SCANS, SCANS_ONE
from hf_drafthead.exactness.products import RowByRow

FUSED = "mamba2_split_conv1d_scan_combined"  # a kernel of all, for training; without it the others are called
CHUNK = 64  # tokens of a scan at a time


class InDouble(RowByRow):
    """Within it what is to be float32 is float64, too."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = torch.Tensor.double if function is torch.Tensor.float else function
        args = [torch.float64 if value is torch.float32 else value for value in args]
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return super().__torch_function__(function, types, args, kwargs)


def scan(plain: Callable[..., Any], inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Of a text, whose step sizes are not held within limits, as those of single tokens are not."""
    how = {"chunk_size": CHUNK, "dt_limit": (0.0, math.inf), "return_final_states": True}
    outputs, states = plain(inputs, *args, **kwargs | how)
    outputs = outputs.to(inputs.dtype)
    return (outputs, states) if kwargs.get("return_final_states") else outputs


def scan_one(
    plain: Callable[..., Any], state: Any, inputs: torch.Tensor, dt: Any, A: Any, B: Any, C: Any, *args: Any,
    z: Any = None, **how: Any,
) -> torch.Tensor:  # fmt: skip
    """Of a single token, which is folded into its state; z is a mixer's gate."""
    outputs = plain(state, inputs.double(), dt, A, B.double(), C.double(), *args, **how).to(inputs.dtype)
    return outputs if z is None else outputs * nn.functional.silu(z)


def exact_form(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a mixer's module: over nodes its tree form, else what transformers has without kernels."""
    plain: Callable[..., Any] = inspect.unwrap(function)
    if name in (SCANS, SCANS_ONE):
        plain = functools.partial(scan if name == SCANS else scan_one, plain)
    return extended(plain, TREE_FORMS[name]) if name in TREE_FORMS else plain
