"""What is expected in training is what generate then does; and what the data looks like to the base."""

import pytest
import torch

from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.training.answers import ONE_TEXT
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from tests.bases import VOCABULARY, tiny_base
from tests.callers.table import SETTINGS as OF_GENERATE
from tests.families import FAMILIES

TREE = DraftTree([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 0, 1)])
LENGTHS = (3, 9, 5, 1, 7)


def prompts():
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_tokens_per_step_are_those_of_generate(family):
    model = family.build(tiny_base("llama-gqa"))
    text = model.base.generate(prompts()[1][None], max_new_tokens=40, do_sample=False, eos_token_id=None)
    model.generation_config.eos_token_id = int(text[0, 9 + 20])  # so that an answer ends early
    settings = {"max_new_tokens": 40, "do_sample": False, "draft_tree": TREE, "return_dict_in_generate": True}
    measured = [model.generate(prompt[None], **settings) for prompt in prompts()]
    assert min(output.sequences.shape[1] - length for output, length in zip(measured, LENGTHS)) < 40
    needed = tokens_per_step(output.accepted_lengths for output in measured)
    expected = ExpectedTokensPerStep(prompts(), 40, TREE, batch_size=2)
    assert expected(model) == pytest.approx(needed)
    assert expected(model) == pytest.approx(needed)  # from answers that it remembers


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES[::2], ids=lambda family: family.name)
def test_at_a_temperature_they_are_those_of_the_same_seeds(family):
    model = family.build(tiny_base("llama-gqa"))
    expected = ExpectedTokensPerStep(prompts(), 40, TREE, batch_size=1, temperature=0.8)(model)
    sampling = {"do_sample": True, "temperature": 0.8, "draft_tree": TREE, "return_dict_in_generate": True}
    measured = []
    for seed, prompt in enumerate(prompts()):
        torch.manual_seed(seed)
        measured.append(model.generate(prompt[None], max_new_tokens=40, **sampling).accepted_lengths)
    assert expected == pytest.approx(tokens_per_step(measured)) and expected > 1.05


def test_what_is_no_temperature_and_no_prompts_are_refused():
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"temperature is {temperature}: expected a number above 0, or 0 for gre"):
            ExpectedTokensPerStep(prompts(), temperature=temperature)
    with pytest.raises(ValueError, match="there is no held-out prompt to compute the expected speed on"):
        ExpectedTokensPerStep([])


def test_answers_are_asked_for_again_where_the_base_changes():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    expected = [ExpectedTokensPerStep(prompts(), 30, TREE, base_changes=changes) for changes in (True, False)]
    before = [each(model) for each in expected]
    with torch.no_grad():
        model.base.model.layers[0].mlp.down_proj.weight.add_(0.5)
    after = [each(model) for each in expected]
    fresh = ExpectedTokensPerStep(prompts(), 30, TREE)(model)
    assert before[0] == before[1]
    assert after[0] == fresh


@pytest.mark.parametrize("name", sorted(ONE_TEXT))
def test_what_changes_no_text_in_the_base_s_generation_config_changes_no_figure(name):
    tried = OF_GENERATE[name].call
    model = MedusaForCausalLM.from_base(tiny_base(), num_draft_heads=2).eval()
    prompts = [torch.tensor([5, 9, 33]), torch.tensor([7, 12])]
    right = ExpectedTokensPerStep(prompts, new_tokens=8)(model)
    fields = tried if isinstance(tried, dict) else tried(model.base)
    for field in fields.keys() & vars(model.generation_config).keys():
        setattr(model.generation_config, field, fields[field])
        setattr(model.base.generation_config, field, fields[field])
    assert ExpectedTokensPerStep(prompts, new_tokens=8)(model) == right
