"""A captured program is never taken for a call that torch or PEFT computes otherwise than the call it was made for."""

import pytest
import torch
from peft import LoraConfig
from transformers import CompileConfig

from hf_drafthead.modeling.adapters import add_adapter
from hf_drafthead.training.trainer import adapters_off
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt

# traced down to the operations of which autocast has changed the types
CAPTURED = {"compile_config": CompileConfig(backend="aot_eager", mode="default"), "draft_tree": TREE}
CALL = {"max_new_tokens": 16, "eos_token_id": None}


def check(model):
    """A captured call equals the base, and says what it is; returns the text."""
    expected = model.base.generate(**prompt(), **CALL)
    assert torch.equal(model.generate(**prompt(), **CALL, **CAPTURED), expected)
    return expected


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.slow
def test_autocast_entered_and_left_between_two_calls():
    model = FAMILIES[0].build(tiny_base("llama", dtype=torch.float32))

    def in_half_precision():
        output = model.generate(
            **prompt(), **CALL | {"max_new_tokens": 4}, **CAPTURED, return_dict_in_generate=True, output_logits=True
        )
        return all(torch.equal(logits, logits.bfloat16().float()) for logits in output.logits)

    found = [in_half_precision()]
    with autocast():
        found.append(in_half_precision())
        check(model)
    assert [*found, in_half_precision()] == [False, True, False]
    check(model)


@pytest.mark.slow
def test_adapters_that_are_switched_between_two_calls():
    base = tiny_base("llama")
    add_adapter(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    base.eval()
    model = FAMILIES[0].build(base)
    adapted = check(model)
    with adapters_off(base):
        assert not torch.equal(check(model), adapted)
    assert torch.equal(check(model), adapted)
    for module in base.modules():
        if hasattr(module, "merged_adapters"):
            module.merge()
    check(model)


@pytest.mark.slow
def test_a_number_of_a_deep_layer_that_changes_between_two_calls():
    model = FAMILIES[0].build(tiny_base("llama", num_hidden_layers=3))
    before = check(model)
    attention = model.base.model.layers[2].self_attn
    attention.scaling *= 5
    assert not torch.equal(check(model), before)
    attention.scaling /= 5
    assert torch.equal(check(model), before)


def test_a_number_that_changes_between_two_calls_and_that_the_hook_of_a_deep_layer_reads():
    model, now = FAMILIES[0].build(tiny_base("llama", num_hidden_layers=3)), {"strength": 0.0}
    steer = torch.arange(model.config.get_text_config().hidden_size, dtype=torch.float64) / 4
    model.base.model.layers[2].mlp.register_forward_hook(lambda module, args, out: out + now["strength"] * steer)
    before = check(model)
    now["strength"] = 3.0
    assert not torch.equal(check(model), before)


@pytest.mark.slow
def test_a_layer_with_a_module_of_another_kind_is_not_taken_for_the_first():
    model = FAMILIES[0].build(tiny_base("llama", num_hidden_layers=3))
    for layer in model.base.model.layers:
        torch.nn.init.normal_(layer.mlp.down_proj.weight)  # so that it matters
    before = model.base.generate(**prompt(), **CALL)
    model.base.model.layers[1].mlp.act_fn = torch.nn.Tanh()
    assert not torch.equal(check(model), before)
