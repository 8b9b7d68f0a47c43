"""What is changed in a base while it is compiled: layers are traced once, and products of few rows are transposed.

**Layers.** `torch.compiler.nested_compile_region` reuses what it has traced for a function whose inputs look the same:
modules of the same kind, tensors of the same shapes, and plain numbers. A decoder layer is given a cache, which is none
of these; while a program is traced it gets the tensors of its own `SlotLayer` instead. What a region returns has to be
used: a region that only writes to its inputs is dropped by inductor (torch 2.13).

**Products.** A linear layer computes x W^T. With few rows of x, the nodes of a tree, MKL on a CPU computes the same
product faster as (W x^T)^T: in float32 on two cores in 0.44 to 0.98 of the time with 12 to 48 rows and weights of
36,000 numbers or more, and in 0.55 to 0.92 with 8 rows and weights of a million or more. With other rows, and with a
small W, both take about the same time, or the second way takes more.

Shapes: B rows, n nodes of one forward, S slots, H key/value heads, E head size; M rows, K features in, N out.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from hf_drafthead.bases.generators import new_lock
from hf_drafthead.bases.hooks import parts
from hf_drafthead.bases.mixers.layer import RecurrentLayer
from hf_drafthead.bases.releases import cache_argument

# before this argument came (torch 2.13) every layer is traced anew, and nothing is saved
REUSED = "reuse_hash_fn" in inspect.signature(torch.compiler.nested_compile_region).parameters
MOST = 48  # rows
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
PLAIN = {bool, int, float, str, tuple, type(None), *FUNCTIONS}  # types
LARGE_WEIGHTS = ((12, 1 << 15), (8, 1 << 20))  # with so many rows or more, weights of so many numbers or more
aten = torch.ops.aten
_COMPILES = new_lock()  # of all models: dynamo lets one thread compile at a time


class OneLayer:
    """The cache as a single decoder layer sees it: keys and values (B, H, S, E) of a `SlotCache` with fixed shapes."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, first: int):
        self.keys, self.values, self.first = keys, values, first

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the nodes' (B, H, n, E), as `SlotLayer.update` does; returns what is attended to."""
        nodes = slice(self.first, self.first + key_states.shape[-2])
        self.keys[..., nodes, :] = key_states
        self.values[..., nodes, :] = value_states
        return self.keys[..., self.first :, :], self.values[..., self.first :, :]


@torch.compiler.nested_compile_region
def _one_layer(
    layer: nn.Module, name: str, keys: torch.Tensor, values: torch.Tensor, first: int, form: str, *leaves: Any
) -> Any:
    return type(layer).forward(layer, **_nested(form, leaves), **{name: OneLayer(keys, values, first)})


def _flat(arguments: dict[str, Any]) -> tuple[str, list[Any]]:
    """Arguments as a list of leaves, and their form: the compiler is slow to compare the nested arguments of two calls.

    A tuple is written with its length behind its name, "hidden_states position_embeddings:2".
    """
    form: list[str] = []
    leaves: list[Any] = []
    for name, value in arguments.items():
        nested = isinstance(value, (tuple, list))
        form.append(f"{name}:{len(value)}" if nested else name)
        leaves.extend(value if nested else [value])
    return " ".join(form), leaves


def _nested(form: str, leaves: Sequence[Any]) -> dict[str, Any]:
    """The arguments that `_flat` took apart."""
    arguments: dict[str, Any] = {}
    start = 0
    for part in form.split():
        name, _, length = part.partition(":")
        stop = start + int(length or 1)
        arguments[name] = tuple(leaves[start:stop]) if length else leaves[start]
        start = stop
    return arguments


@contextlib.contextmanager
def layers_once(base: nn.Module) -> Iterator[None]:
    """Let every kind of decoder layer of a base be traced once, by a compiler that traces meanwhile."""
    changed = list(repeated(base)) if REUSED else []
    for layer in changed:
        layer.forward = _forward_of(layer)
    try:
        yield
    finally:
        for layer in changed:
            del layer.forward


@contextlib.contextmanager
def in_this_thread_alone(base: nn.Module) -> Iterator[None]:
    """Trace a base meanwhile, each kind of layer once, and let `torch.compiler.is_compiling` tell no other thread so.

    From torch 2.13 on it says so to all of them, for what is compiled and not traced, of which we have nothing; and
    transformers, where it believes that, collects the hidden states of all threads in one place.
    """
    told = mock.patch.object(torch.compiler, "_compile_session_context", contextlib.nullcontext, create=True)
    with _COMPILES, layers_once(base), told:
        yield


def repeated(base: nn.Module) -> Iterator[nn.Module]:
    """The decoder layers: modules of one class in one list, which are given a cache and know their number in it.

    A compiler that reuses what it has traced of the first asks no guards of the others: layers that differ from it in a
    number, a hook or a forward are none of these.
    """
    for modules in parts(base):
        if isinstance(modules, nn.ModuleList) and len(modules) > 1 and len(set(map(type, modules))) == 1:
            if cache_argument(type(modules[0]).forward) is not None:
                first, *others = map(_look, modules)
                if all(len(numbers) == 1 and look == first[1] for numbers, look in (first, *others)):
                    yield from modules


def _look(layer: nn.Module) -> tuple[set[int], list[Any]]:
    """The numbers that a layer's parts have, and what else of them a program may have taken for constant."""
    numbers: set[int] = set()
    look: list[Any] = []
    for part in parts(layer):
        attributes = ((key, value) for key, value in vars(part).items() if type(value) in PLAIN)
        plain = {key: repr(value) if type(value) is tuple else value for key, value in attributes}
        if type(number := plain.pop("layer_idx", None)) is int:
            numbers.add(number)
        forward = part.__dict__.get("forward")
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        look.append((type(part), plain, None if hasattr(forward, "is_traced_once") else forward, hooks))
    return numbers, look


def _forward_of(layer: nn.Module) -> Callable:
    """The forward of a layer, which hands tensors in place of the cache to the region."""
    name, (number,) = str(cache_argument(type(layer).forward)), _look(layer)[0]
    names = list(inspect.signature(layer.forward).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache: Any = kwargs.get(name)
        if not (torch.compiler.is_compiling() and getattr(cache, "fixed", False)):
            return type(layer).forward(layer, *args, **kwargs)
        layer_cache = cache.layers[number]
        if isinstance(layer_cache, RecurrentLayer):
            return type(layer).forward(layer, *args, **kwargs)
        rest = {key: value for key, value in (*zip(names, args), *kwargs.items()) if key != name}
        form, leaves = _flat(rest)
        # The compiler knows the weights of a reused region by where it met the layer first, which for a variable of
        # this closure is here; what a method of the layer returns is the layer that it met in its list.
        itself = layer.get_submodule("")
        first = cache.nodes - cache.placed
        return _one_layer(itself, name, layer_cache.keys, layer_cache.values, first, form, *leaves)

    # no forward of the user's own: calls in other threads meanwhile look for these
    vars(forward)["is_traced_once"] = True
    return forward


class TransposedProducts(CustomGraphPass):
    """A pass of inductor that writes x W^T of few rows as (W x^T)^T."""

    def __call__(self, graph: fx.Graph) -> None:
        for product in graph.find_nodes(op="call_function", target=aten.mm.default):
            if _suits(product):
                _transpose(graph, product, *product.args)
        for product in graph.find_nodes(op="call_function", target=aten.addmm.default):
            if _suits(product) and not product.kwargs:  # no factors
                bias, rows, weight = product.args
                _transpose(graph, product, rows, weight, bias)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))


def _suits(product: fx.Node) -> bool:
    result, weight = product.meta["val"], product.all_input_nodes[-1].meta["val"]  # (M, N), (K, N)
    rows = result.shape[0]
    return (
        isinstance(rows, int)
        and rows <= MOST
        and any(rows >= fewest and weight.numel() >= smallest for fewest, smallest in LARGE_WEIGHTS)
        and result.dtype == torch.float32
        and result.device.type == "cpu"
    )


def _transpose(graph: fx.Graph, product: fx.Node, rows: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> None:
    """Put (weight^T rows^T)^T, and the bias added, in the place of a product (M, K) x (K, N)."""

    def call(function, *args) -> fx.Node:
        node = graph.call_function(function, args)
        node.meta["val"] = function(*(one.meta["val"] if isinstance(one, fx.Node) else one for one in args))
        return node

    with graph.inserting_before(product):
        turned = call(
            aten.mm.default, call(aten.permute.default, weight, [1, 0]), call(aten.permute.default, rows, [1, 0])
        )
        result = call(aten.permute.default, turned, [1, 0])
        if bias is not None:
            result = call(aten.add.Tensor, result, bias)
    product.replace_all_uses_with(result)
    graph.erase_node(product)
