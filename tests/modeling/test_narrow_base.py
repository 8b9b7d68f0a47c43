"""Bases whose embeddings and lm_head are narrower than their layers, such as facebook/opt-350m."""

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.training.trainer import heads_output
from tests.base_table import generic, tiny
from tests.families import FAMILIES

IDS = torch.tensor([[5, 6, 7, 8, 9], [7, 8, 9, 10, 11]])
WIDTHS = {"layer_config": None, "own_embeddings": False}  # not those of a variant for wider bases


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_reads_what_the_lm_head_reads(family, tmp_path):
    base = tiny("opt")
    assert base.lm_head.in_features == 16 and base.config.hidden_size == 32
    model = family.build(base, **{name: value for name, value in WIDTHS.items() if name in family.fields})
    assert model.config.last_hidden_size == 16 and model.why_no_drafts() is None
    call = {"max_new_tokens": 8, "do_sample": False}
    output = model.generate(IDS, **call, return_dict_in_generate=True, draft_tree="dynamic")
    assert torch.equal(output.sequences, base.generate(IDS, **call)) and output.accepted_lengths is not None
    heads_output(model, IDS, IDS, None, None).loss.backward()
    base.save_pretrained(tmp_path / "base")
    for included in (False, True):
        named = {} if included else {"base_model": tmp_path / "base"}
        model.save_pretrained(tmp_path / f"{included}", include_base=included, **named)
        loaded = AutoModel.from_pretrained(tmp_path / f"{included}", dtype=torch.float64)
        for name, tensor in model.drafter.state_dict().items():
            assert torch.equal(loaded.drafter.state_dict()[name], tensor), name


def test_heads_that_are_built_from_a_config_alone_have_that_width():
    base = tiny("opt")
    config = MedusaForCausalLM.config_class(base_config=base.config)
    assert MedusaForCausalLM(config).drafter.blocks[0].weight.shape[-1] == 16


def test_more_than_a_width_between_decoder_and_lm_head_is_refused():
    base = generic("rembert")
    with pytest.raises(ValueError, match="reads states of 1664 values, but its decoder gives 32: draft heads need"):
        MedusaForCausalLM.from_base(base)


def test_a_call_that_would_raise_is_told_of_before_training():
    base = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", vocab_size=67, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
        )
    )
    model = MedusaForCausalLM.from_base(base.eval())
    model.drafter.blocks[0].weight.data = torch.zeros(4, 8, 8)
    assert model.why_no_drafts().startswith("a call raises RuntimeError: ")
