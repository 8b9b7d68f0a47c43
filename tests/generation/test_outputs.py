"""What is returned: scores, logits and accepted lengths beside the tokens; and nothing is changed that was given."""

import copy

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation import DraftHeadGenerateOutput
from tests.families import FAMILIES
from tests.generation.agreement import TREE, agree, prompt, shared_base

SETTINGS = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "with processors": {"repetition_penalty": 1.3, "suppress_tokens": [6, 17]},
    "sampled with processors": {"do_sample": True, "top_k": 5, "temperature": 0.7, "no_repeat_ngram_size": 2},
}


@pytest.mark.parametrize("wanted", [["output_scores"], ["output_logits"], ["output_scores", "output_logits"]], ids=str)
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_scores_and_logits_are_those_of_the_base(setting, rows, wanted):
    call = {"max_new_tokens": 16, "eos_token_id": [2, 51], **setting, **dict.fromkeys(wanted, True)}
    found = agree(inputs=prompt(rows), call=call)
    assert (found.got.scores is None) == ("output_scores" not in wanted)
    assert (found.got.logits is None) == ("output_logits" not in wanted)
    for kept in (found.got.scores, found.got.logits):
        assert kept is None or len(kept) == max(found.new_tokens)


def test_the_output_is_the_base_s_own_with_one_field_more():
    out = agree(call={"max_new_tokens": 9}).got
    assert type(out) is DraftHeadGenerateOutput and isinstance(out, GenerateDecoderOnlyOutput)
    assert list(out) == ["sequences", CACHE, "accepted_lengths"]
    assert out.attentions is None and out.hidden_states is None


@pytest.mark.parametrize("rows", [1, 3])
def test_accepted_lengths_have_a_column_per_step(rows):
    none = agree(inputs=prompt(rows), call={"max_new_tokens": 1}).got.accepted_lengths
    assert none.shape == (rows, 0) and none.dtype == torch.long
    found = agree(inputs=prompt(rows), call={"max_new_tokens": 20, "eos_token_id": [2, 51]})
    accepted = found.got.accepted_lengths
    for row in accepted:
        running = int((row > 0).sum())
        assert (row[:running] > 0).all() and (row[running:] == 0).all()
    assert (accepted.sum(0) > 0).all()


def everything(model):
    """Of every module: its attributes and which objects they are."""
    return {name: {key: id(value) for key, value in vars(m).items()} for name, m in model.named_modules()}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nothing_is_left_on_a_module(family):
    model = family.build(shared_base("llama"))
    model.generate(**prompt(), max_new_tokens=2, draft_tree=TREE)  # probes the base
    before, tensors = everything(model), {name: value.clone() for name, value in model.state_dict().items()}
    configs = model.generation_config.to_dict(), model.base.generation_config.to_dict()
    for call in ({}, {"do_sample": True}, {"num_beams": 2}, {"return_dict_in_generate": True}):
        model.generate(**prompt(3), max_new_tokens=9, draft_tree=TREE, **call)
        assert everything(model) == before
    assert configs == (model.generation_config.to_dict(), model.base.generation_config.to_dict())
    assert all(torch.equal(tensors[name], value) for name, value in model.state_dict().items())


def test_nothing_that_was_given_is_changed():
    model = FAMILIES[0].build(shared_base("llama"))
    inputs, config = prompt(3), GenerationConfig(max_new_tokens=9, repetition_penalty=1.1)
    tree = [list(path) for path in TREE]
    before = copy.deepcopy((inputs, config.to_dict(), tree))
    model.generate(**inputs, generation_config=config, draft_tree=tree)
    assert torch.equal(inputs["input_ids"], before[0]["input_ids"])
    assert torch.equal(inputs["attention_mask"], before[0]["attention_mask"])
    assert config.to_dict() == before[1] and tree == before[2]


def test_gradients_are_not_recorded():
    model = FAMILIES[0].build(shared_base("llama"))
    call = {"max_new_tokens": 5, "draft_tree": TREE, "return_dict_in_generate": True, "output_logits": True}
    out = model.generate(**prompt(), **call)
    assert not any(logits.requires_grad for logits in out.logits)
    assert not out[CACHE].layers[0].keys.requires_grad
    assert torch.is_grad_enabled()


def test_inside_inference_mode_and_out_of_it_again():
    model, base = FAMILIES[-1].build(shared_base("llama")), shared_base("llama")
    expected = base.generate(**prompt(2), max_new_tokens=9)
    tree = [[0], [1], [0, 0]]
    with torch.inference_mode():
        inside = model.generate(**prompt(2), max_new_tokens=9, draft_tree=tree)
    outside = model.generate(**prompt(2), max_new_tokens=9, draft_tree=tree)
    assert torch.equal(inside, expected) and torch.equal(outside, expected)
