"""A base's modules as they are where it is exact: of classes made of their own, which have the same names.

A class is exchanged and nothing else: parameters, hooks, configs and what is saved stay as they are, and `restore`
gives the classes of before. Steps run operation by operation: a compiler rounds elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from hf_drafthead.bases.mixers import TREE_FORMS, extended, names_in_forward
from hf_drafthead.bases.releases import COMPUTES_WITHOUT_KEYS, SCANS, SCANS_ONE, WRITES_STATE
from hf_drafthead.exactness import attention
from hf_drafthead.exactness.products import ELEMENTWISE, InDouble, Inexact, RowByRow, elementwise, product

PLAIN = "plain_class"  # the attribute of such a class with that of before
BEFORE = "implementations_before_exact"  # the attribute of a base with its config's attention and experts of before
ACTIVATIONS = (*{kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()},)
FUSED = "mamba2_split_conv1d_scan_combined"  # a kernel of all, for training; without it the others are called
FOLDING = {*COMPUTES_WITHOUT_KEYS, FUSED}  # functions that are others where a base is exact
CHANGING = {*FOLDING, *(function.__name__ for function in ELEMENTWISE)}
CHUNK = 64  # tokens of a scan at a time


@functools.cache
def changed(plain: Any, decodes: bool) -> Any:
    """A class with another forward. Its modules are pickled and copied as those of the plain one, and changed again."""
    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, PLAIN: plain}
    named["forward"] = functools.wraps(plain.forward)(_forward_of(plain, decodes))
    named["__reduce_ex__"] = lambda self, _: (_blank, (plain, decodes), self.__dict__)
    return type(plain.__name__, (plain,), named)


def _blank(plain: Any, decodes: bool) -> Any:
    return object.__new__(changed(plain, decodes))


def _forward_of(plain: Any, decodes: bool) -> Callable[..., Any]:
    """A forward in which all products and functions are exact, and those that fold tokens into a state are others."""
    run = plain.forward
    if decodes:
        return torch.compiler.disable(run, reason="an exact base runs operation by operation.")
    if run is nn.Linear.forward:
        return lambda self, inputs: product(inputs, self.weight, self.bias)
    if issubclass(plain, ACTIVATIONS):
        return lambda self, inputs: elementwise(functools.partial(run, self), inputs)
    code: Any = inspect.unwrap(run)
    called = set(code.__code__.co_names) if inspect.isfunction(code) else set()
    if called & FOLDING:  # the same code, which finds them by their names
        names = code.__globals__ | {name: _folding(name, code.__globals__[name]) for name in called & FOLDING}
        run = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        run.__kwdefaults__ = code.__kwdefaults__
    mode = InDouble if WRITES_STATE in called else RowByRow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return run(self, *args, **kwargs)

    return forward


def _folding(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a mixer's module: over nodes its tree form, else what transformers has without kernels.

    A prompt is folded in by chunks, single tokens one by one, and nodes in their tree form: three orders of one sum.
    In float64, in which the states are kept too, what an order changes does not show in bfloat16 and float16.
    """
    plain: Callable[..., Any] = inspect.unwrap(function)
    if name in (SCANS, SCANS_ONE):
        plain = functools.partial(_scan if name == SCANS else _scan_one, plain)
    return extended(plain, TREE_FORMS[name]) if name in TREE_FORMS else plain


def _scan(plain: Callable[..., Any], inputs: torch.Tensor, *args: Any, **how: Any) -> Any:
    """Of a text, whose step sizes are not held within limits, as those of single tokens are not."""
    found = plain(inputs, *args, **how | {"chunk_size": CHUNK, "dt_limit": (0.0, math.inf)})
    return (found[0].to(inputs.dtype), *found[1:]) if isinstance(found, tuple) else found.to(inputs.dtype)


def _scan_one(
    plain: Any, state: Any, inputs: Any, dt: Any, A: Any, B: Any, C: Any, *args: Any, z: Any = None, **how: Any
) -> Any:
    """Of a single token, which is folded into its state; z is a mixer's gate."""
    outputs = plain(state, inputs.double(), dt, A, B.double(), C.double(), *args, **how).to(inputs.dtype)
    return outputs if z is None else outputs * nn.functional.silu(z)


def make_exact(base: PreTrainedModel) -> None:
    """Exchange the classes of a base's modules, its attention and its experts' implementation.

    Raises:
        Inexact: a module cannot be exact.
    """
    config, decoder = base.config, base.get_decoder()
    parts = {"": config, **{name: getattr(config, name, None) for name in config.sub_configs}}
    attends = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    base.__dict__[BEFORE] = (attends, config._experts_implementation)
    base.set_attn_implementation(attention.NAME)
    base.set_experts_implementation("eager")
    for name, module in base.named_modules():
        calls = names_in_forward(module)[1]
        weights = [weight for weight in module._parameters.values() if weight is not None and weight.dim() > 1]
        multiplies = bool(weights) and not isinstance(module, nn.Embedding)  # also experts, routers, convolutions
        if not (module is decoder or multiplies or isinstance(module, ACTIVATIONS) or calls & CHANGING):
            continue
        if "forward" in vars(module):
            raise Inexact(f"{named(base, name)} has a forward of its own, as modules that are offloaded have")
        if base.dtype == torch.float32 and WRITES_STATE in calls:
            raise Inexact(f"{named(base, name)} keeps a state, for which it has to be in bfloat16 or float16")
        plain: Any = type(module)
        module.__class__ = changed(plain, module is decoder)


def named(base: PreTrainedModel, name: str) -> str:
    """A module in words."""
    return f"{name or 'the base'} ({type(base.get_submodule(name)).__name__})"


def restore(base: PreTrainedModel) -> None:
    """Give modules the classes of before, and the config its implementations."""
    attends, experts = base.__dict__.pop(BEFORE, (None, None))
    for module in base.modules():
        module.__class__ = getattr(type(module), PLAIN, type(module))
    if attends is not None:
        base.set_attn_implementation({name: kind for name, kind in attends.items() if kind is not None})
        base.set_experts_implementation(experts)
