"""What the base's own text says of trees: tokens per step, to within which error, and which trees are grown."""

import pytest
import torch

from hf_drafthead.generation import calibration, worth
from hf_drafthead.generation.calibration import grow_tree_by_product
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.generation.worth import sampled_prompts, worth_of_trees
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))


def family(name):
    return next(one for one in FAMILIES if one.name == name)


@pytest.fixture(autouse=True)
def few_texts(monkeypatch):
    monkeypatch.setattr(worth, "PRECISION", 0.2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_predicted_tokens_per_step_are_those_of_generate(temperature):
    model = family("eagle").build(tiny_base("llama-gqa"))
    prompts = list(torch.randint(3, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(4)))
    found = worth_of_trees(model, prompts, 40, 16, temperature, eos_token_id=None)
    largest = max(found.steps)
    assert largest.nodes == 16
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    others = torch.randint(3, VOCABULARY, (24, 5), generator=torch.Generator().manual_seed(5))
    lengths = model.generate(
        others, max_new_tokens=40, eos_token_id=None, draft_tree=found.tree(largest), return_dict_in_generate=True,
        **sampling,
    ).accepted_lengths  # fmt: skip
    measured = float(lengths[lengths > 0].double().mean())
    assert found.tokens_per_step(largest) == pytest.approx(measured, rel=0.05) and measured > 1.1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_ranks_of_sampled_texts_are_those_of_guesses_that_know_the_noise(temperature, monkeypatch):
    monkeypatch.setattr(worth, "PRECISION", 9.0)
    monkeypatch.setattr(worth, "TEXTS_AT_ONCE", 4)
    model = family("medusa").build(tiny_base("llama-gqa"))
    tilts, ranks_of = [], worth.rank_paths

    def noted(*args, tilt):
        tilts.append(tilt)
        return ranks_of(*args, tilt=tilt)

    monkeypatch.setattr(worth, "rank_paths", noted)
    worth_of_trees(model, PROMPTS, 8, 6, temperature, eos_token_id=None)
    assert len(tilts) == 2
    for seed, rows, tilt in zip((0, 4), (4, 2), tilts):
        expected = calibration.tilt_of_seed(model, rows, 8, temperature, seed)
        assert tilt is expected is None or torch.equal(tilt, expected)


def test_no_tree_is_grown_beyond_the_tokens_that_the_heads_choose_among(monkeypatch):
    monkeypatch.setattr(worth, "PRECISION", 1.0)
    model = family("eagle3").build(tiny_base("llama-gqa"), draft_vocab_size=20)
    found = worth_of_trees(model, PROMPTS, 24, 60, eos_token_id=None)
    assert len(found.paths) > 5 and max(rank for paths in found.paths.values() for path in paths for rank in path) < 20


def test_medusa_s_product_takes_the_heads_as_independent():
    # head 1: rank 0 in 3 of 4, rank 1 in 1; head 2: rank 0 in half, ranks 1 and 2 in a quarter each
    ranks = torch.tensor([[0, 1], [0, 2], [0, 0], [1, 0]])
    # (0,) 3/4, (0, 0) 3/8, (1,) 1/4, (0, 1) 3/16, (0, 2) 3/16, (1, 0) 1/8, (1, 1) 1/16, (1, 2) 1/16
    expected = [(0,), (0, 0), (1,), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert grow_tree_by_product(ranks, 9) == grow_tree_by_product(ranks, 50) == expected
    for nodes in range(2, 10):
        assert DraftTree(grow_tree_by_product(ranks, nodes)).num_nodes == nodes


def test_prompts_that_the_base_samples_by_itself():
    model = family("medusa").build(tiny_base("llama-gqa"))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    prompts = sampled_prompts(model, 5, 9)
    assert torch.equal(torch.get_rng_state(), state)
    assert [len(prompt) for prompt in prompts] == [9] * 5 and len({tuple(p.tolist()) for p in prompts}) == 5


def test_the_error_of_tokens_per_step_is_over_texts_and_not_over_steps(monkeypatch):
    monkeypatch.setattr(worth, "PRECISION", 0.05)
    # the steps of a text resemble each other: 100 steps of each of these are no better known than the texts differ
    texts = [[1] * 100, [2] * 100, [1] * 100, [2] * 100]
    with pytest.raises(
        ValueError, match="their 400 steps tell the tokens per step to within 19%, and 5% needs about 60"
    ):
        worth._check_precision(texts, 4)
    worth._check_precision(16 * texts, 64)
    with pytest.raises(ValueError, match="1 prompts are too few: their 3 steps tell"):
        worth._check_precision([[2, 2, 2]], 1)
    worth._check_precision([[2, 1] * 3, [2, 1] * 50], 2)  # of one kind, however long
    with pytest.raises(ValueError, match="their 4 steps tell the tokens per step to within 29%"):
        worth._check_precision([[1, 3], [3, 1]], 2)  # alike by chance

    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(1 + n % 2, 3 + n % 2, (5 + n,), generator=generator).tolist() for n in range(40)]
    without = [sum(map(sum, rest)) / sum(map(len, rest)) for n in range(40) for rest in [texts[:n] + texts[n + 1 :]]]
    mean = sum(without) / 40
    jackknife = (39 / 40 * sum((one - mean) ** 2 for one in without)) ** 0.5 / mean
    for share, enough in ((1.1, True), (0.9, False)):
        monkeypatch.setattr(worth, "PRECISION", share * jackknife)
        if enough:
            worth._check_precision(texts, 40)
        else:
            with pytest.raises(ValueError, match="needs about (4[5-9]|5[0-4]) prompts"):
                worth._check_precision(texts, 40)
