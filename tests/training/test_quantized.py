"""A frozen base may be quantized: heads learn from the hidden states that it then has, and load with it again."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, BitsAndBytesConfig

from hf_drafthead.training.run import train_heads
from tests.training.test_run import QUICK, written_place

BITS = {
    "4 bits": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32},
    "8 bits": {"load_in_8bit": True},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A base wide enough to be quantized."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    sizes = {"hidden_size": 128, "intermediate_size": 256, **heads}
    return written_place(tmp_path_factory.mktemp("quantized"), **sizes)


@pytest.mark.few(1)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["medusa", "hydra++", "eagle"])
def test_heads_learn_on_a_quantized_base_and_load_with_it(family, bits, place, tmp_path):
    load = {"quantization_config": BitsAndBytesConfig(**BITS[bits])}
    data = str(place / "texts.jsonl")
    trained = train_heads(str(place / "base"), family, data, tmp_path / "heads", load=load, **QUICK)
    assert trained.model.base.hf_quantizer is not None and trained.summary["steps"] == 4
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    kinds = {type(module).__name__ for module in loaded.base.modules()}
    assert kinds & {"Linear4bit", "Linear8bitLt"}
    assert all(parameter.is_floating_point() for parameter in loaded.drafter.parameters())
    for name, tensor in loaded.drafter.state_dict().items():
        assert torch.equal(tensor, trained.model.drafter.state_dict()[name])
    prompt = torch.tensor([[5, 6, 7, 8]])
    named = AutoModelForCausalLM.from_pretrained(place / "base", **load)
    with torch.no_grad():
        assert torch.equal(loaded(prompt).logits, named(prompt).logits)
    plain = AutoModel.from_pretrained(tmp_path / "heads", quantization_config=None)
    assert not kinds & {"Linear4bit", "Linear8bitLt"} & {type(module).__name__ for module in plain.base.modules()}
    expected = loaded.base.generate(prompt, max_new_tokens=12, do_sample=False)
    assert torch.equal(loaded.generate(prompt, max_new_tokens=12, do_sample=False), expected)
