"""What one pass over a text says of a tree is what generating that text with it does."""

import pytest
import torch

from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees import rank_paths as module
from hf_drafthead.trees.rank_paths import foretold_steps, rank_paths, ranks_by_text, sampled_prompts, tilt_of_seed
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

TREE = DraftTree([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 0, 1)])
PROMPT = 9


def greedy_text(model, new_tokens=60):
    prompt = torch.randint(3, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": new_tokens, "eos_token_id": None, "do_sample": False}
    return prompt, model.base.generate(prompt, **settings), settings


@pytest.mark.few(1)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_ranks_foretell_every_step_of_generate(family):
    model = family.build(tiny_base("llama-gqa"))
    prompt, text, settings = greedy_text(model)
    output = model.generate(prompt, draft_tree=TREE, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, text)
    foretold = foretold_steps(TREE, rank_paths(model, text, PROMPT))
    for row in range(2):
        accepted = output.accepted_lengths[row]
        assert foretold[row] == accepted[accepted > 0].tolist()
        assert len(foretold[row]) > 10


@pytest.mark.few(3)
@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize("family", FAMILIES[::3], ids=lambda family: family.name)
def test_the_ranks_foretell_every_step_at_a_temperature(family, temperature):
    model = family.build(tiny_base("llama-gqa"))
    prompt, _, settings = greedy_text(model, new_tokens=1)
    settings |= {"max_new_tokens": 40, "do_sample": True, "temperature": temperature, "top_k": 0}
    torch.manual_seed(4)
    output = model.generate(prompt, draft_tree=TREE, return_dict_in_generate=True, **settings)
    tilt = tilt_of_seed(model, 2, 40, temperature, seed=4)
    foretold = foretold_steps(TREE, rank_paths(model, output.sequences, PROMPT, tilt=tilt))
    for row in range(2):
        accepted = output.accepted_lengths[row]
        assert foretold[row] == accepted[accepted > 0].tolist()
    assert (output.accepted_lengths > 1).any()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_of_different_lengths_have_the_ranks_they_have_alone(family):
    model = family.build(tiny_base("llama-gqa"))
    _, text, _ = greedy_text(model, new_tokens=12)
    prompts, lengths = torch.tensor([4, 9]), torch.tensor([21, 14])
    together = rank_paths(model, text, prompts, lengths)
    for row in range(2):
        alone = rank_paths(model, text[row : row + 1, : lengths[row]], int(prompts[row]))
        known = alone.shape[1]
        assert torch.equal(together[row, :known], alone[0])
        assert (together[row, known:] == -1).all()


def test_some_steps_of_these_models_do_accept_guesses():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    prompt, _, settings = greedy_text(model)
    lengths = model.generate(prompt, draft_tree=TREE, return_dict_in_generate=True, **settings).accepted_lengths
    assert (lengths > 1).any()


def test_a_step_goes_as_deep_as_the_tree_and_no_further_than_the_text():
    tree = DraftTree([(0,), (0, 0), (1,)])
    rows = [
        [[0, 0], [3, 3], [0, 2], [1, 0], [0, 1], [0, -1]],
        [[0, 0], [0, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ]
    assert foretold_steps(tree, torch.tensor(rows)) == [[3, 2, 1], [2]]


def test_too_short_a_text_is_refused():
    model = FAMILIES[0].build(tiny_base())
    with pytest.raises(ValueError, match="texts of up to 10 tokens after prompts of 9 or more leave no position"):
        rank_paths(model, torch.ones(1, 10, dtype=torch.long), 9)


def test_prompts_that_the_base_samples_by_itself():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    prompts = sampled_prompts(model, 5, 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(prompt) for prompt in prompts] == [9] * 5 and len({tuple(p.tolist()) for p in prompts}) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_of_sampled_texts_are_those_of_guesses_that_know_the_noise(temperature, monkeypatch):
    monkeypatch.setattr(module, "TEXTS_AT_ONCE", 4)
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    prompts = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
    tilts = []
    monkeypatch.setattr(module, "rank_paths", lambda *args, tilt: tilts.append(tilt) or rank_paths(*args, tilt=tilt))
    model.generation_config.eos_token_id = None
    ranks = ranks_by_text(model, prompts, 8, temperature)
    assert [text.shape for text in ranks] == [(7, model.drafter.max_depth)] * 6 and len(tilts) == 2
    for seed, rows, tilt in zip((0, 4), (4, 2), tilts):
        expected = tilt_of_seed(model, rows, 8, temperature, seed)
        assert tilt is expected is None or torch.equal(tilt, expected)
