"""A model is copied, pickled and sent to other processes, before and after it has been used."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

from hf_drafthead.generation import programs
from tests.bases import tiny_base
from tests.families import FAMILIES

IDS = torch.tensor([[5, 9, 33, 21]])
SETTINGS = {"max_new_tokens": 12, "draft_tree": [[0], [1], [0, 0]], "return_dict_in_generate": True}


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Callable] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}
USES: dict[str, Callable] = {
    "nothing": lambda model: None,
    "generate": lambda model: model.generate(IDS, **SETTINGS),
    "a compiled call": lambda model: model.generate(IDS, cache_implementation="static", **SETTINGS),
    "why_no_drafts": lambda model: model.why_no_drafts(),
    "a training step": lambda model: model.train()(IDS, labels=IDS).loss.backward() or model.eval(),
}


def detached(model):
    """Gradients are no part of a comparison, and tensors of a graph are not pickled."""
    model.zero_grad(set_to_none=True)
    return model


@pytest.mark.few(8)
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_copy_of_a_model_and_of_its_base_is_as_good_as_the_model(family, use, way, monkeypatch):
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
    model = family.build(tiny_base("llama-gqa"))
    USES[use](model)
    detached(model)
    again, base = COPIES[way](model), COPIES[way](model.base)
    right = model.generate(IDS, **SETTINGS)
    found = again.generate(IDS, **SETTINGS)
    assert torch.equal(found.sequences, right.sequences)
    assert torch.equal(found.accepted_lengths, right.accepted_lengths)
    assert again.base is not model.base and again.drafter.base is again.base
    for one in (model.base, again.base, base):
        assert torch.equal(one.generate(IDS, max_new_tokens=12), right.sequences)
        assert pickle.dumps(one)
        hidden = one(IDS, output_hidden_states=True, use_cache=False).hidden_states
        assert len(hidden) == 3
    assert pickle.dumps(again)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_model_that_is_quantized_by_torch_after_a_call_writes_what_its_base_writes(family):
    model = family.build(tiny_base("llama-gqa", dtype=torch.float32))
    model.generate(IDS, **SETTINGS)
    quantized = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    right = quantized.base.generate(IDS, max_new_tokens=12)
    assert torch.equal(quantized.generate(IDS, max_new_tokens=12), right)
    # its lm_head has no weight that can be read, and its activations are rounded otherwise in forwards of other nodes
    assert any(reason in str(quantized.why_no_drafts()) for reason in ("whose weight cannot be", "honour tree masks"))
