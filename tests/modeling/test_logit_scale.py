"""Heads know what a base does behind its lm_head: scales, caps, or anything else."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_drafthead.bases.output_layer import OutputLayer
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.training.heads_loss import HeadsLoss
from hf_drafthead.training.trainer import heads_output
from tests.base_table import IMAGES, TEXT, tiny
from tests.bases import SIZES, SPECIAL, tiny_base
from tests.families import FAMILIES

IDS = torch.randint(3, 67, (1, 40), generator=torch.Generator().manual_seed(0))
SCALED = {
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.0625},
    "gemma2": {"final_logit_softcapping": 3.0, "head_dim": 8},
    "falcon_h1": {"lm_head_multiplier": 0.1, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8},
}


def scaled(kind: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **SPECIAL, "num_key_value_heads": 2, **SCALED[kind]})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()


def as_granite(llama):
    """The same function with a lm_head of 8 times the size, whose products are divided by 8."""
    fields = {name: value for name, value in llama.config.to_dict().items() if name in SIZES or name in SPECIAL}
    more = {"num_key_value_heads": 2, "attention_multiplier": 8**-0.5, "logits_scaling": 8.0}
    config = AutoConfig.for_model("granite", **fields, **more)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    state = dict(llama.state_dict())
    base.load_state_dict({**state, "lm_head.weight": 8 * state["lm_head.weight"]})
    return base


@pytest.fixture(scope="module")
def pair():
    llama = tiny_base("llama-gqa")
    granite = as_granite(llama)
    assert torch.allclose(granite(IDS).logits, llama(IDS).logits)
    return llama, granite


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", ["medusa-shared", "eagle"])
def test_a_head_that_guesses_the_base_s_state_gives_its_logits(kind, name):
    base = scaled(kind)
    family = next(family for family in FAMILIES if family.name == name)
    model = family.build(base)
    with torch.no_grad():
        out = base(IDS, output_hidden_states=True)
        hidden = out.hidden_states[-1]
        logits = out.logits if model.drafter.draft_tokens is None else out.logits[..., model.drafter.draft_tokens]
        assert torch.allclose(model.drafter.head_logits(0, hidden).to(logits), logits)
        assert torch.allclose(model.drafter.head_logits(0, hidden[0, 3]).to(logits), logits[0, 3])
        assert not torch.allclose(base.lm_head(hidden).to(out.logits), out.logits)


@pytest.mark.parametrize("kind", [*TEXT, *IMAGES])
def test_the_function_behind_the_decoder_is_found_for_every_base(kind):
    base = tiny(kind)
    reader = BaseReader.of_texts(base)
    with torch.no_grad():
        logits = base(IDS, use_cache=False).logits
        assert torch.allclose(reader(False, input_ids=IDS, use_cache=False)[0], logits, atol=1e-6)
    alone = not kind.startswith("llama4")  # these name no decoder
    assert reader.split == alone


# Whose projection is of another rank or width than the base's, or an assistant's own.
OF_ANOTHER_WIDTH = ("amphista-alpha", "eagle3-variants", "dspark-variants", "dflash2-variants", "gemma4-assistant")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_heads_on_the_same_function_guess_learn_and_gain_the_same(family, pair):
    """A LLaMA, and the same LLaMA as a Granite: fresh heads, their loss, and what they gain."""
    torch.manual_seed(0)
    if family.name == "draft-model":
        models = [family.model_class.from_base(base, draft=as_granite(tiny_base("llama-gqa", seed=1))) for base in pair]
    else:
        models = [family.model_class.from_base(base, **family.fields) for base in pair]
    state = models[0].drafter.state_dict()
    fresh = models[1].drafter.state_dict()
    copied = {"projections.up.0.weight", "lm_head.weight"} & set(state)
    for name in copied if family.name not in OF_ANOTHER_WIDTH else ():
        assert torch.allclose(fresh[name], state[name])
    models[1].drafter.load_state_dict(state)
    inputs = {"input_ids": IDS, "labels": IDS}
    for objective in ({"next_token": 1.0}, {"teacher": 1.0}):
        losses = [HeadsLoss(**objective)(model, inputs)[0] for model in models]
        assert torch.allclose(*losses)
    losses = []
    for model in models:
        torch.manual_seed(0)  # of the noise in features
        losses.append(heads_output(model, IDS, IDS, None, None).loss)
    assert torch.allclose(*losses)
    gains = []
    for model in models:
        torch.manual_seed(0)
        call = {"do_sample": True, "max_new_tokens": 16, "return_dict_in_generate": True}
        gains.append(model.generate(IDS[:, :9], draft_tree="mc_sim_7b_63", **call))
        gains.append(model.generate(IDS[:, :9], draft_tree="dynamic", **call))
    for llama, granite in zip(gains[:2], gains[2:]):
        assert torch.equal(llama.sequences, granite.sequences)
        assert torch.equal(llama.accepted_lengths, granite.accepted_lengths)


def test_a_capped_base_starts_own_projections_near_its_logits():
    base = scaled("gemma2")
    with torch.no_grad():
        base.lm_head.weight.mul_(10)
    model = next(family for family in FAMILIES if family.name == "medusa").model_class.from_base(base)
    with torch.no_grad():
        hidden = base(IDS, output_hidden_states=True).hidden_states[-1]
        logits, alone = base(IDS).logits, base.lm_head(hidden)
        start = model.drafter.head_logits(0, hidden)
    assert (start - logits).abs().mean() < 0.5 * (alone - logits).abs().mean()


def test_a_copy_of_the_model_reads_its_own_lm_head():
    model = next(family for family in FAMILIES if family.name == "eagle").build(scaled("granite"))
    model.drafter.prepare()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.base.lm_head.weight.mul_(2)
    states = torch.randn(3, 32, dtype=torch.float64)
    assert torch.allclose(twin.drafter.head_logits(0, states), 2 * model.drafter.head_logits(0, states))
    model.base.lm_head = twin.base.lm_head
    assert torch.allclose(twin.drafter.head_logits(0, states), model.drafter.head_logits(0, states))


def test_a_base_that_is_nothing_but_an_lm_head_behind_its_decoder_runs_no_forward(monkeypatch):
    base = tiny_base()
    output = OutputLayer(base)
    monkeypatch.setattr(type(base), "forward", None)
    assert torch.equal(
        output.logits(torch.ones(2, 32, dtype=torch.float64)), base.lm_head(torch.ones(2, 32, dtype=torch.float64))
    )


def test_looking_leaves_the_modes_of_all_modules_as_they_are():
    base = tiny_base().train()
    base.model.layers[0].eval()
    modes = [module.training for module in base.modules()]
    OutputLayer(base)
    assert [module.training for module in base.modules()] == modes and not all(modes)
