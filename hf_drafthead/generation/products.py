"""Matrix products of few rows in a compiled step on a CPU.

A linear layer computes x W^T. With few rows of x, the nodes of a tree, MKL computes the same product faster as
(W x^T)^T: in float32 on two cores in 0.44 to 0.98 of the time with 12 to 48 rows and weights of 36,000 numbers or more,
and in 0.46 to 0.92 with 8 to 11 rows and weights of a million or more. With other rows, and with a small W, both take
about the same time, or the second way takes more (`python benchmarks/products.py`).

Shapes: M rows, K features in, N out.
"""

from __future__ import annotations

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

MOST = 48  # rows
WEIGHTS = ((12, 1 << 15), (8, 1 << 20))  # with so many rows or more, weights of so many numbers or more
aten = torch.ops.aten


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
        and any(rows >= fewest and weight.numel() >= smallest for fewest, smallest in WEIGHTS)
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
        found = call(aten.permute.default, turned, [1, 0])
        if bias is not None:
            found = call(aten.add.Tensor, found, bias)
    product.replace_all_uses_with(found)
    graph.erase_node(product)
