"""A base's modules as they are where it is exact: of classes made of their own, which have the same names.

A class is exchanged and nothing else: parameters, hooks, configs and what is saved stay as they are, and `restore`
gives the classes of before. Steps run operation by operation: a compiler rounds elsewhere.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from hf_drafthead.bases.mixers import names_in_forward
from hf_drafthead.bases.releases import COMPUTES_WITHOUT_KEYS, WRITES_STATE
from hf_drafthead.exactness import attention
from hf_drafthead.exactness.products import Inexact, RowByRow, elementwise, product
from hf_drafthead.exactness.states import FUSED, InDouble, exact_form

PLAIN = "plain_class"  # the attribute of such a class with that of before
BEFORE = "implementations_before_exact"  # the attribute of a base with its config's attention and experts of before
BY_ITSELF = (nn.Linear, *{kind[0] if isinstance(kind, tuple) else kind for kind in ACT2CLS.values()})  # is exact
FOLDING = {*COMPUTES_WITHOUT_KEYS, FUSED}  # functions that are others where a base is exact
CHANGING = {*FOLDING, *(function.__name__ for function in RowByRow.ELEMENTWISE)}
Make = Callable[[type[nn.Module]], Callable[..., Any]]


@functools.cache
def changed(plain: Any, make: Make) -> Any:
    """A class with another forward. Its modules are pickled and copied as those of the plain one, and changed again."""
    named = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, PLAIN: plain}
    named["forward"] = functools.wraps(plain.forward)(make(plain))
    named["__reduce_ex__"] = lambda self, _: (_blank, (plain, make), self.__dict__)
    return type(plain.__name__, (plain,), named)


def _blank(plain: Any, make: Make) -> Any:
    return object.__new__(changed(plain, make))


def _linear(plain: type[nn.Module]) -> Callable[..., Any]:
    return lambda self, inputs: product(inputs, self.weight, self.bias)


def _activation(plain: type[nn.Module]) -> Callable[..., Any]:
    return lambda self, inputs: elementwise(functools.partial(plain.forward, self), inputs)


def _decoder(plain: type[nn.Module]) -> Callable[..., Any]:
    return torch.compiler.disable(plain.forward, reason="an exact base runs operation by operation.")


def row_by_row(plain: type[nn.Module]) -> Callable[..., Any]:
    """A forward in which all products and functions are exact, and those that fold tokens into a state are others."""
    run: Any = plain.forward
    code: Any = inspect.unwrap(run)
    called = set(code.__code__.co_names) if inspect.isfunction(code) else set()
    if called & FOLDING:  # the same code, which finds them by their names
        names = code.__globals__ | {name: exact_form(name, code.__globals__[name]) for name in called & FOLDING}
        run = types.FunctionType(code.__code__, names, code.__name__, code.__defaults__, code.__closure__)
        run.__kwdefaults__ = code.__kwdefaults__
    mode = InDouble if WRITES_STATE in called else RowByRow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with mode():
            return run(self, *args, **kwargs)

    return forward


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
        weights = (weight for weight in module._parameters.values() if weight is not None)
        if module is decoder:
            make: Make = _decoder
        elif type(module).forward is nn.Linear.forward:
            make = _linear
        elif isinstance(module, BY_ITSELF[1:]):
            make = _activation
        elif calls & CHANGING or any(weight.dim() > 1 for weight in weights) and not isinstance(module, nn.Embedding):
            make = row_by_row  # also experts, routers, convolutions
        else:
            continue
        if "forward" in vars(module):
            raise Inexact(f"{named(base, name)} has a forward of its own, as modules that are offloaded have")
        if base.dtype == torch.float32 and WRITES_STATE in calls:
            raise Inexact(f"{named(base, name)} keeps a state, for which it has to be in bfloat16 or float16")
        plain: Any = type(module)
        module.__class__ = changed(plain, make)


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
