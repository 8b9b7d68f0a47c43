"""Fields of a config that cannot be, alone or together, are refused in one line that names what was given."""

import pytest
from transformers import GPTNeoXConfig, LlamaConfig, Qwen3Config

from hf_drafthead.modeling import HydraConfig, MedusaConfig
from hf_drafthead.modeling.families import fresh_heads
from tests.bases import tiny_base

WIDE = Qwen3Config(hidden_size=48, num_attention_heads=4, head_dim=12, num_key_value_heads=2, num_hidden_layers=1)
WIDE_LLAMA = LlamaConfig(hidden_size=48, num_attention_heads=4)
LLAMA = LlamaConfig(hidden_size=32, num_attention_heads=4)
UNEVEN = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=3)
NEOX = GPTNeoXConfig(hidden_size=32, num_attention_heads=4)
NO_LAYERS = {"num_stages": 0, "num_auto_embedding_layers": 0, "layer_config": LLAMA}
# family: fields, and how the message begins; "..." stands for anything
FIELDS = {
    "medusa": [
        ({"num_draft_heads": 0}, "num_draft_heads is 0: expected a whole number from 1 to 64."),
        ({"num_draft_heads": 2.5}, "num_draft_heads is 2.5: expected a whole number from 1 to 64."),
        ({"num_layers": 0}, "num_layers is 0: expected a whole number from 1 to 32."),
        ({"draft_vocab_size": 68}, "draft_vocab_size is 68, but the base has 67 tokens: give as many at most, or "),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0: expected a whole number of at least 1."),
    ],
    "hydra": [
        ({"num_layers": "4"}, "num_layers is '4': expected a whole number from 1 to 32."),
        ({"dropout": 1.0}, "dropout is 1.0: expected a number from 0 up to, but not including, 1."),
        ({"dropout": -0.1}, "dropout is -0.1: expected a number from 0 up to, but not including, 1."),
        ({"prefix_layer": "no"}, "prefix_layer is 'no': expected True or False."),
        ({"tie_blocks": 1, "num_layers": 2}, "tie_blocks is 1: expected True or False."),
        ({"tie_blocks": True}, "tie_blocks is True, but num_layers is 1: there is no block behind the first one to "),
        ({"layer_config": "llama"}, "layer_config is str: expected the config of a model, or its dict."),
        ({"layer_config": LLAMA}, "layer_config is of a 'llama' model, but prefix_layer is False: there is no layer "),
        ({"prefix_layer": True, "layer_config": WIDE_LLAMA}, "layer_config has hidden size 48, but the base has 32: "),
    ],
    "amphista": [
        ({"use_sampled_token": 1}, "use_sampled_token is 1: expected True or False."),
        ({"use_head_positions": 0}, "use_head_positions is 0: expected True or False."),
        ({"num_stages": -1}, "num_stages is -1: expected a whole number of at least 0."),
        ({"num_stages": 3, "num_draft_heads": 2}, "num_stages is 3, but num_draft_heads is 2: a stage that no head "),
        ({"num_auto_embedding_layers": -1}, "num_auto_embedding_layers is -1: expected a whole number from 0 to 32."),
        (NO_LAYERS, "layer_config is of a 'llama' model, but num_stages is 0 and num_auto_embedding_layers is 0: "),
        ({"layer_config": {"hidden_size": 32}}, "layer_config has no model_type: give the config of a model, such as"),
    ],
    "eagle": [
        ({"fc_bias": "yes"}, "fc_bias is 'yes': expected True or False."),
        ({"num_draft_heads": 4}, "num_draft_heads is 4, but EAGLE has 1 head that guesses at every depth: leave"),
        ({"layer_config": UNEVEN}, "layer_config has num_attention_heads 4, but num_key_value_heads 3: the first must"),
    ],
    "eagle3": [
        ({"feature_layers": None}, "the base has 2 layers, too few for the published feature_layers [2, L // 2, "),
        ({"feature_layers": [0, 2]}, "feature_layers is [0, 2], but the base has 2 layers: EAGLE-3 reads their inputs"),
        ({"feature_layers": [-1]}, "feature_layers is [-1], but the base has 2 layers: EAGLE-3 reads their inputs, "),
        ({"feature_layers": [1, 1]}, "feature_layers is [1, 1]: name every layer once."),
        ({"feature_layers": "low"}, "feature_layers is 'low': expected a list of layer numbers, such as [2, 16, 29]."),
        ({"norm_output": 1}, "norm_output is 1: expected True or False."),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both True: the features are norm"),
        ({"layer_config": WIDE_LLAMA}, "layer_config has hidden size 48, but the base's embeddings have 32: set own_"),
        ({"layer_config": NEOX}, "layer_config asks for a GPTNeoXLayer, which EAGLE-3 cannot give pairs to read: give"),
    ],
    "dflash": [
        ({"mask_token_id": 67}, "mask_token_id is 67, but the base embeds 67 tokens, numbered from 0: give one "),
        ({"feature_layers": [1, 2]}, "feature_layers is [1, 2], but the base has 2 layers: a block drafter reads "),
        ({"layer_config": WIDE}, "layer_config has hidden size 48, but the base's lm_head reads 32: set share_lm_head"),
        ({"num_draft_heads": 64}, "num_draft_heads is 64, a block of 65: expected at most 64."),
        ({"markov_head_type": "gru"}, "markov_head_type is 'gru': expected one of 'vanilla', 'gated', 'rnn'."),
        ({"confidence_threshold": 0.5}, "confidence_threshold is 0.5: expected a float from 0 to 1, and confidence_"),
        ({"causal_layers": [[1]]}, "causal_layers is [[1]]: expected a list of layers from 0 to 4."),
        ({"causal_layers": [5]}, "causal_layers is [5]: expected a list of layers from 0 to 4."),
    ],
    "gemma4-assistant": [
        ({"num_centroids": 3}, "num_centroids is 3, which must divide the base's 67 tokens"),
        ({"num_centroids": 67, "draft_vocab_size": 5}, "num_centroids is 67, which must divide"),
        ({"num_centroids": 67, "centroid_top_k": 68}, "centroid_top_k is 68: expected a whole number from 1 to 67"),
        ({"num_centroids": -1}, "num_centroids is -1: expected a whole number of at least 0"),
        ({"layer_config": LLAMA}, "layer_config is of a 'llama' model: expected a Gemma 4 text model's"),
    ],
    "draft-model": [
        ({"num_draft_heads": 3}, "num_draft_heads is 3, but a draft model guesses at every depth: leave it out, the "),
        ({"draft_vocab_size": 68}, "draft_vocab_size is 68, but the base has 67 tokens: give as many at most, or "),
    ],
}
DEFAULTS = {"eagle3": {"feature_layers": [0, 1]}}
CASES = [(family, *case) for family, cases in FIELDS.items() for case in cases]


@pytest.mark.few(12)
@pytest.mark.parametrize("family, fields, message", CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_fields_that_cannot_be_are_refused_in_one_line(family, fields, message):
    with pytest.raises(ValueError) as refusal:
        fresh_heads(family, tiny_base(), **{**DEFAULTS.get(family, {}), **fields})
    said = str(refusal.value)
    assert said.startswith(message) and said.endswith(".") and "\n" not in said and len(said) < 300


def test_fields_that_cannot_be_are_refused_without_a_base():
    with pytest.raises(ValueError, match="^share_lm_head is None: expected True or False.$"):
        MedusaConfig(share_lm_head=None)
    with pytest.raises(ValueError, match="^base_config is int: expected the config of a model, or its dict.$"):
        HydraConfig(base_config=7)


@pytest.mark.parametrize(
    "family, fields, asking",
    [
        ("hydra", {"prefix_layer": True}, "prefix_layer is True"),
        ("amphista", {"num_stages": 1}, "num_stages is 1 and num_auto_embedding_layers is 1"),
        ("eagle", {}, "an EAGLE head is a decoder layer"),
    ],
)
def test_decoder_layers_for_a_base_without_attention_heads(family, fields, asking):
    message = f"^{asking}, but a 'mamba' model has no attention heads to build a decoder layer of: give layer_"
    with pytest.raises(ValueError, match=message):
        fresh_heads(family, tiny_base("mamba", num_attention_heads=None), **fields)
