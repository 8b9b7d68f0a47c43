"""Settings come from the call, else from the model's generation config, which replaces the base's own."""

import copy
import inspect
from dataclasses import FrozenInstanceError

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria, TemperatureLogitsWarper

from hf_drafthead.generation.settings import DraftPlan, DraftSettings
from hf_drafthead.generation.tree import DraftTree, DynamicTree
from hf_drafthead.trees.sizes import NodeCosts, SizeRule
from tests.bases import tiny_base
from tests.drafters import Drafted, Oracle, at_rank, right
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

EOS = 51  # a token that the first prompt's text holds


def expected_of(config: GenerationConfig, **call) -> torch.Tensor:
    """The text of a base that has this generation config."""
    base = copy.copy(shared_base("llama-gqa"))
    base.generation_config = config
    torch.manual_seed(3)
    return base.generate(**prompt(), **call)


def check(config: GenerationConfig, **call) -> torch.Tensor:
    """The model with this generation config says what a base with it says."""
    expected = expected_of(config, **call)
    base = shared_base("llama-gqa")
    model = Drafted(base, Oracle(base, [expected[0].tolist()]))
    model.generation_config = copy.deepcopy(config)
    torch.manual_seed(3)
    got = model.generate(**prompt(), **call, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    assert got.accepted_lengths is not None
    assert model.generation_config.to_dict() == config.to_dict()
    return expected


def changed(**values) -> GenerationConfig:
    config = copy.deepcopy(shared_base("llama-gqa").generation_config)
    for name, value in values.items():
        setattr(config, name, value)
    return config


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 13},
        {"max_length": 17},
        {"eos_token_id": EOS},
        {"eos_token_id": [EOS, 60]},
        {"repetition_penalty": 1.9},
        {"do_sample": True, "temperature": 0.4, "top_k": 7},
        {"do_sample": True, "top_k": None},
        {"forced_eos_token_id": 4},
        {"pad_token_id": 9},
        {},
    ],
    ids=str,
)
def test_the_model_s_generation_config_is_in_force(values):
    check(changed(**values))


def test_an_argument_is_stronger_than_the_model_s_generation_config():
    config = changed(max_new_tokens=13, eos_token_id=EOS, do_sample=True, temperature=3.0)
    assert check(config, eos_token_id=5, max_new_tokens=16, do_sample=False).shape[1] == 25
    assert check(config, temperature=0.1).shape[1] <= 22


def test_none_switches_a_default_off():
    assert check(changed(eos_token_id=EOS, max_new_tokens=15)).shape[1] < 24
    assert check(changed(eos_token_id=EOS, max_new_tokens=15), eos_token_id=None).shape[1] == 24
    check(changed(do_sample=True, top_k=2, max_new_tokens=15), top_k=None)
    check(changed(repetition_penalty=3.0, max_new_tokens=15), repetition_penalty=None)


def test_what_the_model_s_generation_config_switches_off_the_base_s_does_not_switch_on():
    base = tiny_base("llama-gqa")
    base.generation_config.eos_token_id = EOS
    base.generation_config.repetition_penalty = 2.5
    model = FAMILIES[0].build(base)
    short = model.generate(**prompt(), max_new_tokens=15, draft_tree=TREE)
    assert torch.equal(short, base.generate(**prompt(), max_new_tokens=15))
    model.generation_config.eos_token_id = None
    model.generation_config.repetition_penalty = None
    plain = model.generate(**prompt(), max_new_tokens=15, draft_tree=TREE)
    assert torch.equal(plain, expected_of(changed(eos_token_id=None), max_new_tokens=15))


@pytest.mark.parametrize(
    "values",
    [
        {"max_new_tokens": 14},
        {"max_new_tokens": 14, "eos_token_id": EOS},
        {"max_new_tokens": 14, "do_sample": True, "top_p": 0.5},
        {"max_length": 16, "no_repeat_ngram_size": 1},
    ],
    ids=str,
)
def test_a_generation_config_for_one_call(values):
    base, config = shared_base("llama-gqa"), GenerationConfig(**values)
    torch.manual_seed(3)
    expected = base.generate(**prompt(), generation_config=config)
    model = Drafted(base, Oracle(base, [expected[0].tolist()]))
    torch.manual_seed(3)
    got = model.generate(**prompt(), generation_config=config, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and got.accepted_lengths is not None
    assert config.to_dict() == GenerationConfig(**values).to_dict()
    torch.manual_seed(3)
    assert torch.equal(model.generate(prompt()["input_ids"], config, draft_tree=TREE), expected)


def test_the_base_s_generation_config_fills_what_one_for_a_call_leaves_open():
    base = tiny_base("llama-gqa")
    base.generation_config.eos_token_id = EOS
    base.generation_config.repetition_penalty = 1.7
    model = FAMILIES[0].build(base)
    config = GenerationConfig(max_new_tokens=15)
    got = model.generate(**prompt(), generation_config=config, draft_tree=TREE)
    assert torch.equal(got, base.generate(**prompt(), generation_config=config))


def test_arguments_may_be_given_in_transformers_order():
    ours, theirs = (list(inspect.signature(kind.generate).parameters) for kind in (Drafted, GenerationMixin))
    assert ours[: len(theirs) - 1] == theirs[:-1]  # what is ours comes after, by name only
    base = shared_base("llama-gqa")
    given = GenerationConfig(max_new_tokens=13), LogitsProcessorList([TemperatureLogitsWarper(2.0)])
    length = prompt()["input_ids"].shape[1] + 3
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    expected = base.generate(prompt()["input_ids"], *given, criteria)
    model = Drafted(base, Oracle(base, [expected[0].tolist()]))
    got = model.generate(prompt()["input_ids"], *given, criteria, draft_tree=TREE)
    assert torch.equal(got, expected) and got.shape[1] == length


def steps_of(model, **call) -> int:
    call = {"max_new_tokens": 13, "eos_token_id": None, "return_dict_in_generate": True, **call}
    return model.generate(**prompt(), **call).accepted_lengths.shape[1]


def knowing(guess=right):
    base = shared_base("llama-gqa")
    text = base.generate(**prompt(), max_new_tokens=13, eos_token_id=None)[0].tolist()
    return Drafted(base, Oracle(base, [text], guess))


def test_where_the_tree_comes_from():
    model = knowing()
    assert steps_of(model) == 3  # a CPU, and no calibration: 8 nodes on three levels
    assert steps_of(model, draft_tree="mc_sim_7b_63") == 3  # four levels
    model.generation_config.draft_tree = [[0]]
    assert steps_of(model) == 6
    assert steps_of(model, draft_tree=[[0], [0, 0]]) == 4
    assert steps_of(model, generation_config=GenerationConfig(draft_tree=[[0], [0, 0], [0, 0, 0]])) == 3
    assert steps_of(model, draft_tree="hydra_single") == 6


def test_a_published_tree_is_cut_to_the_heads_there_are():
    model = knowing()
    model.drafter.max_depth = 2
    assert steps_of(model, draft_tree="mc_sim_7b_63") == 4


def test_saved_settings_come_back(tmp_path):
    model = knowing(at_rank(1))
    model.generation_config.draft_tree = [[0], [1], [1, 1]]
    model.generation_config.acceptance = "exact"
    model.generation_config.posterior_threshold = 0.2
    model.generation_config.save_pretrained(tmp_path)
    again = knowing(at_rank(1))
    again.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert again.generation_config.draft_tree == [[0], [1], [1, 1]]
    assert steps_of(again) == steps_of(model) == 4


@pytest.mark.parametrize("tree, steps", [(DraftTree([(0,), (0, 0)]), 4), (DynamicTree(4, 2, 2), 4)], ids=str)
def test_a_tree_in_the_generation_config_is_saved_and_comes_back(tree, steps, tmp_path):
    model = knowing()
    model.generation_config.draft_tree = tree
    assert steps_of(model) == steps
    model.generation_config.save_pretrained(tmp_path)
    again = knowing()
    again.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert steps_of(again) == steps
    assert DraftSettings.from_config(again.generation_config).plan(None, 64).tree == tree


def test_a_plan_holds_nothing_that_a_call_changes():
    tree, rules = DraftTree([(0,)]), [SizeRule(DraftTree([(0,)]), NodeCosts({}), True) for _ in range(2)]
    plan = DraftPlan(tree, sizes=rules[0])
    assert hash(plan) == hash(DraftPlan(tree, sizes=rules[1]))
    with pytest.raises(FrozenInstanceError):
        plan.copies = 3
