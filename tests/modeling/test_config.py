"""A config with draft heads answers for its base what code asks of any model's config."""

import copy

import pytest
from transformers import AutoConfig, GPT2Config, LlamaConfig

from hf_drafthead import MedusaConfig, MedusaForCausalLM
from hf_drafthead.modeling.config import OF_THE_BASE
from tests.bases import VOCABULARY, tiny_base


def test_a_field_of_the_base_is_answered(tmp_path):
    model = MedusaForCausalLM.from_base(tiny_base("llama-gqa"))
    model.save_pretrained(tmp_path)
    for name in OF_THE_BASE:
        for config in (model.config, AutoConfig.from_pretrained(tmp_path), copy.deepcopy(model.config)):
            assert getattr(config, name) == getattr(model.base.config, name)
        assert name not in model.config.to_diff_dict() and name not in model.config.to_dict()


def test_a_field_that_is_set_is_set_for_the_base():
    config = MedusaConfig(base_config=LlamaConfig(vocab_size=VOCABULARY))
    config.use_cache = False
    config.num_hidden_layers = 3
    assert config.base_config.use_cache is False and config.base_config.num_hidden_layers == 3


def test_fields_go_by_the_base_s_own_names():
    config = MedusaConfig(base_config=GPT2Config(n_embd=24, n_positions=99))
    assert config.hidden_size == 24 and config.max_position_embeddings == 99
    assert not hasattr(config, "num_key_value_heads")


def test_without_a_base_there_is_no_such_field():
    assert not hasattr(MedusaConfig(), "vocab_size")
    with pytest.raises(AttributeError, match=r"^vocab_size is the base's, and MedusaConfig has no base_config\.$"):
        _ = MedusaConfig().vocab_size
