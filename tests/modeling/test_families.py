"""What makes a family this family: each config field does what it says, and nothing else."""

import pytest
import torch
from transformers import AutoConfig

from hf_drafthead.modeling import (
    AmphistaConfig,
    AmphistaForCausalLM,
    EagleForCausalLM,
    HydraConfig,
    HydraForCausalLM,
    MedusaForCausalLM,
)
from tests.bases import KINDS, VOCABULARY, tiny_base
from tests.families import FAMILIES, Family

CANNOT_BUILD = {"gpt2", "mpt", "mamba"}


def build(model_class, kind: str = "llama-gqa", **fields):
    return Family("", model_class, fields).build(tiny_base(kind)).drafter


def states(drafter, features, ids):
    with torch.no_grad():
        return torch.stack(drafter.head_states(features, ids))  # (K, B, T, H)


@pytest.fixture
def text():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (1, 9), generator=generator)
    return torch.randn(1, 9, 32, generator=generator, dtype=torch.float64), ids


PREFIX = {"num_draft_heads": 2, "prefix_layer": True}
# A class and its fields; of each change at a position, which heads see it at position 3.
READS = {
    "medusa": (
        MedusaForCausalLM,
        {"num_draft_heads": 2, "num_layers": 2},
        {"feature 3": "11", "feature 2": "00", "feature 4": "00", "token 3": "00", "token 4": "00"},
    ),
    "hydra: a token more for each head": (
        HydraForCausalLM,
        {"num_draft_heads": 3, "num_layers": 2},
        {"feature 2": "000", "token 4": "111", "token 5": "011", "token 6": "001", "token 7": "000"},
    ),
    "hydra++: the text so far": (HydraForCausalLM, PREFIX, {"feature 0": "11", "feature 4": "00", "token 3": "00"}),
    "amphista: the text so far and the root": (
        AmphistaForCausalLM,
        {},
        {"feature 0": "1111", "token 4": "1111", "feature 4": "0000", "token 5": "0000"},
    ),
    "amphista without the sampled token": (
        AmphistaForCausalLM,
        {"use_sampled_token": False},
        {"feature 0": "1111", "token 4": "0000"},
    ),
    "amphista without stages": (
        AmphistaForCausalLM,
        {"num_stages": 0},
        {"feature 3": "1111", "feature 2": "0000", "token 4": "0000"},
    ),
    "eagle: pairs of the text so far": (
        EagleForCausalLM,
        {},
        {"feature 0": "1", "token 4": "1", "feature 4": "0", "token 5": "0"},
    ),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("model_class, fields, expected", READS.values(), ids=READS)
def test_what_heads_read_of_a_text(model_class, fields, expected, text):
    drafter = build(model_class, **fields)
    before = states(drafter, *text)[:, 0, 3]
    assert drafter.keeps_history == ("feature 0" in expected)
    for change, heads in expected.items():
        (kind, place), (features, ids) = change.split(), (part.clone() for part in text)
        if kind == "feature":
            features[0, int(place)] += 1.0
        else:
            ids[0, int(place)] = (ids[0, int(place)] + 7) % VOCABULARY
        after = states(drafter, features, ids)[:, 0, 3]
        assert "".join(str(int(not torch.equal(a, b))) for a, b in zip(before, after)) == heads, change


def test_hydra_plus_plus_is_four_layers_a_prefix_layer_and_dropout():
    config = HydraConfig.plus_plus(num_draft_heads=3)
    assert (config.num_layers, config.prefix_layer, config.dropout, config.tie_blocks) == (4, True, 0.2, False)
    model = HydraForCausalLM.from_base(tiny_base(), config=config, dropout=0.1)
    assert (model.config.num_layers, model.config.num_draft_heads, model.config.dropout) == (4, 3, 0.1)
    assert [len(head.blocks) for head in model.drafter.heads] == [3, 3, 3]


def test_tied_blocks_are_one_block_applied_again_and_again(text):
    tied = build(HydraForCausalLM, num_draft_heads=2, num_layers=4, tie_blocks=True)
    untied = build(HydraForCausalLM, num_draft_heads=2, num_layers=4)
    assert [len(head.blocks) for head in tied.heads] == [1, 1]
    copies = {}
    for name in untied.state_dict():
        parts = name.split(".")
        if "blocks" in parts:
            parts[parts.index("blocks") + 1] = "0"
        copies[name] = tied.state_dict()[".".join(parts)]
    untied.load_state_dict(copies)
    assert torch.equal(states(tied, *text), states(untied, *text))


def test_dropout_is_for_training_only(text):
    drafter = build(HydraForCausalLM, num_draft_heads=2, num_layers=2, dropout=0.5)
    assert torch.equal(states(drafter, *text), states(drafter, *text))
    hidden = text[0][0]
    assert torch.equal(drafter.head_logits(0, hidden), drafter.head_logits(0, hidden))
    drafter.train()
    assert not torch.equal(states(drafter, *text), states(drafter, *text))
    assert not torch.equal(drafter.head_logits(0, hidden), drafter.head_logits(0, hidden))


@pytest.mark.parametrize("stages, heads", [(1, [0, 0, 0, 0]), (2, [0, 0, 1, 1]), (3, [0, 0, 1, 2]), (4, [0, 1, 2, 3])])
def test_heads_are_dealt_out_to_the_stages_evenly(text, stages, heads):
    drafter = build(AmphistaForCausalLM, num_stages=stages, num_auto_embedding_layers=0)
    before = states(drafter, *text)
    for stage in range(stages):
        drafter.stages[stage].fc.bias.data += 1.0
        changed = [not torch.equal(a, b) for a, b in zip(before, states(drafter, *text), strict=True)]
        assert changed == [own >= stage for own in heads]  # a later stage reads the earlier ones
        drafter.stages[stage].fc.bias.data -= 1.0
        before = states(drafter, *text)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_auto_embedding_block_lets_every_head_see_every_other(text, layers):
    drafter = build(AmphistaForCausalLM, num_auto_embedding_layers=layers)
    before = states(drafter, *text)
    for head in (0, 3):
        drafter.blocks[0].bias.data[head] += 1.0
        changed = [not torch.equal(a, b) for a, b in zip(before, states(drafter, *text), strict=True)]
        assert changed == [layers > 0 or other == head for other in range(4)]
        before = states(drafter, *text)


def test_the_auto_embedding_block_knows_heads_by_their_vectors_only(text):
    """With equal heads, equal inputs and no vectors, the block cannot tell the heads apart: it has no order."""
    fields = {"num_stages": 1, "num_auto_embedding_layers": 2}
    for with_positions in (False, True):
        drafter = build(AmphistaForCausalLM, use_head_positions=with_positions, **fields)
        for parameter in drafter.blocks.parameters():
            parameter.data[:] = parameter.data[:1].clone()
        found = states(drafter, *text)
        assert torch.allclose(found[0], found[3]) == (not with_positions)
        assert (drafter.head_positions is not None) == with_positions


def test_amphista_alpha_has_two_layers_in_its_block():
    assert AmphistaConfig.alpha(num_draft_heads=3).num_auto_embedding_layers == 2
    model = AmphistaForCausalLM.from_base(tiny_base(), config=AmphistaConfig.alpha())
    assert len(model.drafter.auto_embedding) == 2


def test_the_first_guess_of_fresh_amphista_heads_is_a_sensible_one(text):
    """fc starts as the identity on the hidden state, so that heads start near it."""
    drafter = AmphistaForCausalLM.from_base(tiny_base(), num_auto_embedding_layers=0).drafter
    joined = drafter.stages[0].joined(text[0], torch.zeros_like(text[0]))
    torch.testing.assert_close(joined, text[0] + drafter.stages[0].fc.bias)


def test_eagle_is_a_layer_without_its_input_norm_behind_one_that_joins():
    drafter = build(EagleForCausalLM)
    assert drafter.max_depth is None
    assert not hasattr(drafter.body.layer.input_layernorm, "weight")
    assert {name for name in drafter.state_dict() if not name.startswith("body.layer.")} == {"fc.weight"}


LAYERED = [
    pytest.param(HydraForCausalLM, {"prefix_layer": True}, id="hydra++"),
    pytest.param(AmphistaForCausalLM, {}, id="amphista"),
    pytest.param(EagleForCausalLM, {}, id="eagle"),
]


@pytest.mark.parametrize("model_class, fields", LAYERED)
@pytest.mark.parametrize("kind", sorted(set(KINDS) - CANNOT_BUILD))
@torch.inference_mode()
def test_layers_of_every_base_remember_right(kind, model_class, fields, text):
    drafter, (features, ids) = build(model_class, kind, **fields), text
    state = drafter.start(1, 16)
    for step in (slice(0, 4), slice(4, 5), slice(5, 8)):
        follow = ids[:, step.start + 1 : step.stop + 1]
        state = drafter.observe(state, features[:, step], follow, torch.tensor([follow.shape[1]]))
    _, guesses = drafter.expand(state, ids[:, 8:9], torch.zeros(1, 1, dtype=torch.long))
    expected = drafter.head_logits(0, drafter.head_states(features, ids)[0][:, 7])
    torch.testing.assert_close(
        guesses.logits[:, 0], expected, atol=1e-5, rtol=1e-5
    )  # eager takes its softmax in float32


@pytest.mark.parametrize("model_class, fields", LAYERED)
@pytest.mark.parametrize("kind", ["gpt2", "mpt"])
def test_a_base_without_such_layers_gets_those_of_a_llama_of_its_sizes(kind, model_class, fields):
    base = tiny_base(kind)
    model = model_class.from_base(base, **fields)
    layer = model.config.layer_config
    assert (layer.model_type, layer.hidden_size, layer.num_attention_heads) == ("llama", 32, 4)
    assert AutoConfig.for_model(**model.config.to_dict()).layer_config.to_dict() == layer.to_dict()
    prompt = torch.tensor([[5, 9, 33]])
    assert torch.equal(model.generate(prompt, max_new_tokens=5), base.generate(prompt, max_new_tokens=5))


@pytest.mark.parametrize("model_class, fields", LAYERED)
def test_a_layer_config_without_such_layers_is_refused(model_class, fields):
    with pytest.raises(
        ValueError, match="^no decoder layer with rotary positions can be built from a 'gpt2' config: give"
    ):
        model_class.from_base(tiny_base(), layer_config=tiny_base("gpt2").config, **fields)


@pytest.mark.parametrize("model_class, fields", LAYERED)
def test_rotary_frequencies_stay_exact_in_half_precision(model_class, fields, tmp_path):
    base = tiny_base(dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = model_class.from_base(tmp_path / "base", **fields)
    model.save_pretrained(tmp_path / "heads")
    exact = tiny_base().model.rotary_emb.inv_freq
    for one in (model, model_class.from_pretrained(tmp_path / "heads"), model.half(), model.double()):
        buffers = [buffer for name, buffer in one.drafter.named_buffers() if name.endswith("inv_freq")]
        assert buffers and all(torch.equal(buffer, exact) for buffer in buffers)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_of_an_odd_size_get_layers_whose_rotary_positions_turn_pairs(family):
    model = family.build(tiny_base("gpt2", n_embd=21, n_head=3))  # 7 numbers each
    call = {"input_ids": torch.tensor([[5, 6, 7, 8]]), "max_new_tokens": 8, "eos_token_id": None}
    drafted = model.generate(**call, draft_tree=[[0], [0, 0]], return_dict_in_generate=True)
    assert drafted.accepted_lengths is not None
    assert torch.equal(drafted.sequences, model.base.generate(**call))
