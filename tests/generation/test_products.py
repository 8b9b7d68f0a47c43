"""Products of few rows are transposed in compiled steps, and no others are."""

import pickle

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import CompileConfig

from hf_drafthead.generation.capture import compiled
from hf_drafthead.generation.products import TransposedProducts

aten = torch.ops.aten


def graph_of(inputs, weights):
    graph = make_fx(nn.functional.linear, tracing_mode="fake")(inputs, *weights)
    TransposedProducts()(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def transposed(graph) -> bool:
    """Whether the weight stands on the left, with its features out in rows."""
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.mm.default)
    return product.meta["val"].shape[0] == 24


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 12, 16), (4, 3, 16), (8, 16), (48, 16)], ids=str)
def test_few_rows_are_transposed_and_the_result_is_the_same(shape, bias):
    inputs, weights = torch.randn(shape), [torch.randn(24, 16), *([torch.randn(24)] if bias else [])]
    graph = graph_of(inputs, weights)
    assert transposed(graph)
    assert not graph.graph.find_nodes(op="call_function", target=aten.addmm.default)
    torch.testing.assert_close(graph(inputs, *weights), nn.functional.linear(inputs, *weights))


@pytest.mark.parametrize("rows, dtype", [(7, torch.float32), (49, torch.float32), (12, torch.float64)])
def test_other_products_stay(rows, dtype):
    assert not transposed(graph_of(torch.randn(rows, 16, dtype=dtype), [torch.randn(24, 16, dtype=dtype)]))


def test_compiled_programs_can_be_kept_on_disk():
    known = TransposedProducts().uuid()
    assert known  # without one inductor keeps nothing
    assert pickle.loads(pickle.dumps(known)) == TransposedProducts().uuid()


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_a_step_is_compiled_with_them_by_inductor_alone(backend, monkeypatch):
    options = {}
    monkeypatch.setattr(torch, "compile", lambda function, **given: options.update(given["options"]))
    compiled(lambda: None, CompileConfig(mode="default", backend=backend))
    found = options.get("post_grad_custom_pre_pass")
    assert isinstance(found, TransposedProducts) == (backend == "inductor")
