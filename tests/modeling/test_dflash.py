"""Block drafters beyond the laws of all families: what a config may be, confidence, float16, dynamic trees, memory."""

import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, Qwen3Config

from hf_drafthead.generation.step import Stages
from hf_drafthead.generation.tree import DynamicTree
from hf_drafthead.modeling import DFlashConfig, DFlashForCausalLM
from hf_drafthead.modeling.block_layers import BlockLayers
from hf_drafthead.modeling.dflash import published_features
from tests.bases import tiny_base
from tests.families import Family

SMALL = {"num_layers": 1, "num_draft_heads": 3}
DSPARK = SMALL | {"markov_rank": 6, "confidence_head": True, "sample_from_anchor": True}
PROMPT = torch.tensor([[5, 9, 33, 12, 40]])
CALL = {"max_new_tokens": 16, "eos_token_id": None}


def build(base=None, **fields):
    return Family("dflash", DFlashForCausalLM, fields).build(tiny_base("llama-gqa") if base is None else base)


def test_the_published_layers_are_read_by_default():
    assert published_features(36) == [2, 10, 18, 26, 34]  # the outputs of 1, 9, 17, 25, 33, as for Qwen3-4B
    assert published_features(32) == [2, 9, 16, 23, 30]
    assert published_features(2) == [1] and published_features(1) == [0]


def test_a_block_has_a_slot_for_the_anchor_only_where_that_is_not_read():
    assert DFlashConfig(num_draft_heads=15).block_size == 16
    assert DFlashConfig(num_draft_heads=7, sample_from_anchor=True).block_size == 7


WIDE = Qwen3Config(hidden_size=48, num_attention_heads=4, head_dim=12, num_key_value_heads=2, num_hidden_layers=1)


def test_layers_whose_keys_cannot_be_made_of_a_context_are_refused():
    with pytest.raises(ValueError, match="^layer_config asks for a Gemma2DecoderLayer|^no decoder layer"):
        DFlashForCausalLM.from_base(tiny_base(), layer_config=GPT2Config(n_embd=32, n_head=4))


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen2", "qwen3"])
@torch.no_grad()
def test_keys_and_values_of_a_context_are_those_that_attention_makes(kind):
    layers = BlockLayers(tiny_base(kind, dtype=torch.float32).config, [None], [False])
    x, positions, written = torch.randn(2, 5, 32), torch.arange(3, 8)[None], []

    class Cache:
        def update(self, keys, values, *_, **__):
            written.append((keys, values))
            return keys, values

    layers.layers[0].self_attn(x, layers.rotary(x, positions), None, Cache())
    for found, expected in zip(layers.context(x, positions)[0], written[0], strict=True):
        torch.testing.assert_close(found, expected)


def fresh(kind: str, **fields):
    """Untrained heads on a base all of whose weights are random, and the heads' weights."""
    base = tiny_base(kind, dtype=torch.float32)
    with torch.no_grad():
        for weight in base.parameters():
            weight.add_(torch.rand(weight.shape, dtype=weight.dtype) / 8)
    model = DFlashForCausalLM.from_base(base, **fields)
    return model, dict(model.drafter.named_parameters())


@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3"])
def test_fresh_layers_are_the_last_of_the_base_and_read_its_last_feature(kind):
    model, weights = fresh(kind, num_layers=1, feature_layers=[0, 1])
    own, last = model.drafter.body.layers[0], dict(model.base.model.layers[-1].named_parameters())
    for name, weight in own.named_parameters():
        assert torch.equal(weight, last[name] if name in last else torch.ones_like(weight)), name
    assert torch.equal(weights["hidden_norm.weight"], last["input_layernorm.weight"])
    assert torch.equal(weights["norm.weight"], model.base.model.norm.weight)
    assert torch.equal(weights["fc.weight"], torch.cat([torch.zeros(32, 32), torch.eye(32)], dim=1))


@pytest.mark.parametrize("kind", ["gemma2", "gpt-neox", "gpt2", "narrower"])
def test_nothing_is_copied_of_other_layers(kind):
    """Norms that multiply by 1 + weight, other parts, other sizes."""
    narrow = {"layer_config": WIDE, "share_lm_head": False, "own_embeddings": True} if kind == "narrower" else {}
    _, weights = fresh("llama-gqa" if narrow else kind, num_layers=1, **narrow)
    assert weights["fc.weight"].count_nonzero() == weights["fc.weight"].numel()
    norms = [weight for name, weight in weights.items() if "norm" in name]
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in norms)


@pytest.mark.parametrize("kind, copied", [("qwen3_moe", True), ("gemma", False)])
def test_of_layers_that_are_alike_in_part_is_copied_what_means_the_same(kind, copied):
    """Attention beside experts is; Gemma's layers have the same names, but multiply by 1 + weight."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2}
    config = AutoConfig.for_model(kind, vocab_size=67, num_hidden_layers=2, num_experts_per_tok=1, **sizes)
    base = AutoModelForCausalLM.from_config(config)
    own = DFlashForCausalLM.from_base(base, num_layers=1).drafter.body.layers[0]
    assert torch.equal(own.self_attn.v_proj.weight, base.model.layers[-1].self_attn.v_proj.weight) == copied
    assert torch.equal(own.input_layernorm.weight, torch.ones(32))


def test_the_guesses_of_dflash_are_the_same_for_all_nodes_and_those_of_dspark_follow_the_parent():
    tokens, parents = torch.tensor([[4, 8]]), torch.zeros(1, 2, dtype=torch.long)
    for fields, alike in ((SMALL, True), (DSPARK, False)):
        drafter = build(**fields).drafter
        features = torch.randn(1, 5, 32 * len(drafter.reads), dtype=torch.float64)
        state = drafter.observe(drafter.start(1, 16), features, PROMPT, torch.tensor([5]))
        state, _ = drafter.expand(state, PROMPT[:, -1:], parents[:, :1])
        _, guesses = drafter.expand(state, tokens, parents)
        assert (guesses.logits.shape[1] == 1) == alike
        assert alike or not torch.equal(guesses.logits[:, 0], guesses.logits[:, 1])


def test_below_a_cut_a_dynamic_tree_has_no_node_as_long_as_there_are_others():
    """Of the guesses at level 2 those below an unsure node are never kept; the text is the base's all the same."""
    model = build(**DSPARK, confidence_threshold=0.5)
    drafter = model.drafter
    with torch.no_grad():  # sure below even tokens alone
        drafter.confidence.weight.zero_()
        drafter.confidence.bias.zero_()
        drafter.confidence.weight[0, 32] = 100.0
        drafter.markov.w1.weight[:, 0] = torch.where(torch.arange(67) % 2 == 0, 1.0, -1.0)
        features = torch.randn(1, 5, 32 * len(drafter.reads), dtype=torch.float64)
        state = drafter.observe(drafter.start(1, 16), features, PROMPT, torch.tensor([5]))
        root = torch.tensor([[40]])
        _, (tokens, topology) = Stages.of(None, drafter, DynamicTree(12, 3, 8), "cpu").fill_dynamic(state, root)
    parents = tokens[0, topology.parents[0, 1:]]
    assert (topology.depths[0] > 1).any() and (parents % 2 == 0).all()
    expected = model.base.generate(PROMPT, **CALL)
    for tree in ("dynamic", [[0], [1], [0, 0]]):
        assert torch.equal(model.generate(PROMPT, **CALL, draft_tree=tree), expected)


def test_how_likely_the_best_guess_is_is_what_the_heads_foretell():
    drafter = build(**DSPARK).drafter
    with torch.no_grad():
        drafter.confidence.weight.zero_()
        drafter.confidence.bias.fill_(math.log(4.0))  # 0.8 in every slot
        features = torch.randn(1, 5, 32 * len(drafter.reads), dtype=torch.float64)
        state = drafter.observe(drafter.start(1, 16), features, PROMPT, torch.tensor([5]))
        _, guesses = drafter.expand(state, PROMPT[:, -1:], PROMPT[:, :1] * 0)
    own = guesses.logits.softmax(-1).topk(3).values[0, 0]
    found = guesses.likeliest(3)[1].exp()[0, 0]
    expected = [0.8, *(min(0.8 * chance / own[0], 0.2 * chance / (1 - own[0])) for chance in own[1:])]
    torch.testing.assert_close(found, torch.stack([torch.as_tensor(each, dtype=found.dtype) for each in expected]))
    assert torch.equal(guesses.likeliest(3)[0], guesses.top(3)[0])


def test_a_block_that_reaches_beyond_the_last_position_changes_nothing():
    base = tiny_base("gpt2", n_positions=24)
    model = build(base, num_layers=1, num_draft_heads=15)
    call = {"max_new_tokens": 24 - PROMPT.shape[1], "eos_token_id": None}
    assert torch.equal(model.generate(PROMPT, **call, draft_tree="dynamic"), base.generate(PROMPT, **call))
