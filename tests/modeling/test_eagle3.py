"""EAGLE-3's variants are what their flags say, and what cannot be is refused in one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModel, Qwen2Config, Qwen3Config

from hf_drafthead.modeling import Eagle3Config, Eagle3ForCausalLM, families
from hf_drafthead.modeling.decoder_layer import ChainKeys
from tests.bases import VOCABULARY, tiny_base
from tests.families import Family

LAYERS = {"feature_layers": [0, 1]}


def build(**fields):
    return Family("eagle3", Eagle3ForCausalLM, {**LAYERS, **fields}).build(tiny_base())


def normed(x: Tensor, norm: nn.Module) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


FLAGS = {
    "published": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "fc_bias": {"fc_bias": True},
    "norm_output": {"norm_output": True},
    "own_embeddings": {"own_embeddings": True},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "other layers": {"feature_layers": [1]},
}


@pytest.mark.parametrize("fields", FLAGS.values(), ids=FLAGS)
@torch.no_grad()
def test_the_first_pair_goes_through_what_the_flags_say(fields):
    """At a text's first position attention is the value projection, so the rest can be written down."""
    drafter = build(**fields).drafter
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 1, 32 * len(drafter.reads), generator=generator, dtype=torch.float64)
    token = torch.tensor([[11]])
    state = drafter.observe(drafter.start(1, 8), features, token, torch.tensor([1]))
    layer = drafter.body.layer

    x = features
    if fields.get("norm_before_fc"):
        x = normed(x, drafter.input_norm)
    if fields.get("fc_norm"):
        x = torch.cat([normed(part, norm) for part, norm in zip(x.split(32, -1), drafter.fc_norm, strict=True)], -1)
    x = x @ drafter.fc.weight.T
    if fields.get("fc_bias"):
        x = x + drafter.fc.bias
    table = drafter.embed_tokens if fields.get("own_embeddings") else drafter.base.get_input_embeddings()
    embedding = table.weight[token]
    norm = layer.input_layernorm
    norm.eps = norm.variance_epsilon
    pair = torch.cat([normed(embedding, norm), normed(x, layer.hidden_norm)], -1)
    residual = normed(x, layer.hidden_norm) if fields.get("norm_before_residual") else x
    x = residual + layer.self_attn.o_proj(layer.self_attn.v_proj(pair))
    after = layer.post_attention_layernorm
    after.eps = after.variance_epsilon
    x = x + layer.mlp(normed(x, after))
    torch.testing.assert_close(state.last, x[:, 0], atol=1e-6, rtol=1e-6)  # LLaMA's norms compute in float32

    _, guesses = drafter.expand(state, token, torch.zeros_like(token))
    logits = guesses.over_base(VOCABULARY)
    expected = normed(x, drafter.norm) @ drafter.lm_head.weight.T
    chosen = drafter.draft_tokens if "draft_vocab_size" in fields else torch.arange(VOCABULARY)
    torch.testing.assert_close(logits[..., chosen], expected, atol=1e-6, rtol=1e-6)
    others = [token for token in range(VOCABULARY) if token not in chosen.tolist()]
    assert (logits[..., others] == -torch.inf).all()


@pytest.mark.parametrize("norm_output", [False, True])
@torch.no_grad()
def test_a_node_reads_the_output_above_it(norm_output):
    drafter, read = build(norm_output=norm_output).drafter, []
    drafter.body.layer.register_forward_pre_hook(lambda module, given: read.append(given[0][..., 32:]))
    features, token = torch.ones(1, 1, 64, dtype=torch.float64), torch.tensor([[11]])
    state = drafter.observe(drafter.start(1, 8), features, token, torch.tensor([1]))
    state, _ = drafter.expand(state, token, torch.zeros_like(token))
    above = state.level
    drafter.expand(state, token, torch.zeros_like(token))
    torch.testing.assert_close(read[-1], normed(above, drafter.norm) if norm_output else above)


def test_a_layer_more_adds_an_ordinary_one():
    one, two = build().drafter, build(num_layers=2).drafter
    more = {name: tensor.shape for name, tensor in two.state_dict().items() if name not in one.state_dict()}
    assert {name.partition("body.more.0.")[2].split(".")[0] for name in more} == {
        "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"
    }  # fmt: skip
    assert more["body.more.0.self_attn.q_proj.weight"] == (32, 32)
    assert two.state_dict()["body.layer.self_attn.q_proj.weight"].shape == (32, 64)


def test_fresh_heads_start_from_the_base():
    base = tiny_base()
    model = Eagle3ForCausalLM.from_base(base, draft_vocab_size=20, own_embeddings=True, **LAYERS)
    drafter = model.drafter
    assert torch.equal(drafter.embed_tokens.weight, base.get_input_embeddings().weight)
    assert torch.equal(drafter.lm_head.weight, base.lm_head.weight[:20])
    chosen = torch.arange(60, 20, -2)
    drafter.choose_vocabulary(chosen)
    assert torch.equal(drafter.draft_tokens, chosen)
    assert torch.equal(drafter.lm_head.weight, base.lm_head.weight[chosen])


def test_the_published_choices_are_the_defaults():
    base = tiny_base("llama-gqa", num_hidden_layers=8, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    config = Eagle3ForCausalLM.from_base(base).config
    assert config.feature_layers == [2, 4, 5] and config.draft_vocab_size == VOCABULARY
    layer = config.layer_config
    assert (layer.model_type, layer.hidden_size, layer.intermediate_size) == ("llama", 32, 48)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 8)
    assert layer.rope_parameters["rope_theta"] == 500.0


def test_its_layer_is_its_own_whatever_the_base_says_later(tmp_path):
    base = tiny_base()
    base.save_pretrained(tmp_path / "base")
    Eagle3ForCausalLM.from_base(str(tmp_path / "base"), **LAYERS).save_pretrained(tmp_path / "heads")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 77.0}
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    loaded = AutoModel.from_pretrained(tmp_path / "heads")
    assert loaded.base.config.rope_parameters["rope_theta"] == 77.0
    assert loaded.config.layer_config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("layer", [Qwen3Config, Qwen2Config], ids=lambda kind: kind.__name__)
def test_layers_of_other_models_with_the_same_parts(layer):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = build(layer_config=layer(**sizes, head_dim=8))
    prompt = torch.tensor([[5, 9, 33]])
    tree = [[0], [1], [0, 0], [0, 0, 0]]
    found = model.generate(prompt, max_new_tokens=9, draft_tree=tree)
    assert torch.equal(found, model.base.generate(prompt, max_new_tokens=9))


@pytest.fixture
def heads(tmp_path):
    base = tiny_base()
    base.save_pretrained(tmp_path / "base")
    model = Eagle3ForCausalLM.from_base(str(tmp_path / "base"), draft_vocab_size=20, **LAYERS)
    model.save_pretrained(tmp_path / "heads")
    return tmp_path / "heads"


@pytest.mark.parametrize("form", ["heads only", "with base"])
@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda tokens: tokens.index_fill(0, torch.tensor([4]), 9),
            "'drafter.draft_tokens' in {path!r} has the token 9 more than once: give every token one place.",
        ),
        (
            lambda tokens: tokens.index_fill(0, torch.tensor([4]), 67),
            "'drafter.draft_tokens' in {path!r} has the token 67, but the base has 67 tokens, numbered from 0: give "
            "ids of the base.",
        ),
        (
            lambda tokens: tokens[:19].clone(),
            "{path!r} has 'drafter.draft_tokens' as int64 [19], but its config asks for int64 [20]: save the "
            "checkpoint again, or correct config.json.",
        ),
        (
            lambda tokens: tokens.to(torch.int32),
            "{path!r} has 'drafter.draft_tokens' as int32 [20], but its config asks for int64 [20]: save the "
            "checkpoint again, or correct config.json.",
        ),
    ],
    ids=["not injective", "out of range", "of another length", "of another type"],
)
def test_a_vocabulary_map_that_cannot_be(heads, form, change, message):
    if form == "with base":
        AutoModel.from_pretrained(heads).save_pretrained(heads, include_base=True)
    tensors = load_file(heads / "model.safetensors")
    tensors["drafter.draft_tokens"] = change(tensors["drafter.draft_tokens"])
    save_file(tensors, heads / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError) as refusal:
        AutoModel.from_pretrained(heads)
    assert str(refusal.value) == message.format(path=str(heads))


def test_a_vocabulary_of_another_size_is_refused():
    drafter = build(draft_vocab_size=20).drafter
    with pytest.raises(ValueError) as refusal:
        drafter.choose_vocabulary(torch.arange(19))
    assert str(refusal.value) == "the draft vocabulary has 19 tokens, but draft_vocab_size is 20: give as many."
    with pytest.raises(ValueError, match="the heads draft among all 67 tokens of the base: set draft_vocab_size"):
        build().drafter.choose_vocabulary(torch.arange(67))


def test_a_config_can_be_made_before_there_is_a_base():
    config = Eagle3Config(num_draft_heads=3, norm_output=True)
    model = Eagle3ForCausalLM.from_base(tiny_base(), config=config, **LAYERS)
    assert model.config.norm_output and model.config.num_draft_heads == 3
    assert config.feature_layers is None and config.layer_config is None


def test_eagle_3_1_norms_every_feature_and_feeds_the_normed_output_back():
    """As its paper draws it, computed by hand."""
    family = families.find_family("eagle3.1")
    config = family.config(num_draft_heads=2, feature_layers=[0, 1])
    assert config.family == "eagle3.1" and config.fc_norm and config.norm_output and not config.norm_before_fc
    base = tiny_base("llama-gqa")
    model = Eagle3ForCausalLM.from_base(base, config=config)
    drafter = model.drafter
    ids = torch.randint(3, 67, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for norm in (*drafter.fc_norm, drafter.norm):
            norm.weight.uniform_(0.5, 2.0)
        hidden = base(ids, output_hidden_states=True).hidden_states
        first, second = drafter.head_states(torch.cat([hidden[0], hidden[1]], dim=-1), ids)
        joined = drafter.fc(torch.cat([drafter.fc_norm[0](hidden[0]), drafter.fc_norm[1](hidden[1])], dim=-1))
        chains = ChainKeys({})
        pair = torch.cat([base.model.embed_tokens(ids.roll(-1, 1)), joined], dim=-1)
        expected = drafter.body.over_chains(chains, pair, 0, None)
        assert torch.allclose(first, expected)
        pair = torch.cat([base.model.embed_tokens(ids.roll(-2, 1)), drafter.norm(expected)], dim=-1)
        assert torch.allclose(second, drafter.body.over_chains(chains, pair, 1, None))
