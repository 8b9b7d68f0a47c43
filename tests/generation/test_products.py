"""Products of few rows are transposed in compiled steps, and no others are."""

import pickle

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from hf_drafthead.bases.compiling import TransposedProducts
from hf_drafthead.generation.programs import compiled

aten = torch.ops.aten


LARGE, LARGEST = (240, 160), (1100, 1000)  # features out and in, of a weight that suits 12 rows, and of one for 8


def graph_of(inputs, weights):
    graph = make_fx(nn.functional.linear, tracing_mode="fake")(inputs, *weights)
    TransposedProducts()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def transposed(graph, shape) -> bool:
    """Whether the weight stands on the left, with its features out in rows."""
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    return product.meta["val"].shape[0] == shape[0]


def weights_of(shape, bias=False, dtype=torch.float32):
    return [torch.randn(shape, dtype=dtype), *([torch.randn(shape[0], dtype=dtype)] if bias else [])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "rows, shape", [((1, 12), LARGE), ((4, 3), LARGE), ((48,), LARGE), ((8,), LARGEST), ((11,), LARGEST)], ids=str
)
def test_few_rows_are_transposed_and_the_result_is_the_same(rows, shape, bias):
    inputs, weights = torch.randn(*rows, shape[1]), weights_of(shape, bias)
    graph = graph_of(inputs, weights)
    assert transposed(graph, shape)
    assert not graph.graph.find_nodes(op="call_function", target=aten.addmm.default)
    torch.testing.assert_close(graph(inputs, *weights), nn.functional.linear(inputs, *weights), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rows, shape, dtype",
    [
        (7, LARGEST, torch.float32),
        (11, LARGE, torch.float32),
        (12, (180, 180), torch.float32),
        (49, LARGE, torch.float32),
        (12, LARGE, torch.float64),
    ],
)
def test_other_products_stay(rows, shape, dtype):
    graph = graph_of(torch.randn(rows, shape[1], dtype=dtype), weights_of(shape, dtype=dtype))
    assert not transposed(graph, shape)


def test_compiled_programs_can_be_kept_on_disk():
    known = TransposedProducts().uuid()
    assert known  # without one inductor keeps nothing
    assert pickle.loads(pickle.dumps(known)) == TransposedProducts().uuid()


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_step_is_compiled_with_them_by_inductor_alone(backend, monkeypatch):
    options = {}
    monkeypatch.setattr(torch, "compile", lambda function, **given: (options.update(given["options"]), function)[1])
    compiled(lambda: None, CompileConfig(mode="default", backend=backend))
    found = options.get("post_grad_custom_pre_pass")
    assert isinstance(found, TransposedProducts) == (backend == "inductor")
