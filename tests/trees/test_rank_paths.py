"""What one pass over a text says of a tree is what generating that text with it does; and the trees that grow of it."""

import pytest
import torch

from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees import rank_paths as module
from hf_drafthead.trees.calibrate import count_trees
from hf_drafthead.trees.costs import ALONE, Size
from hf_drafthead.trees.rank_paths import (
    TreeStatistics,
    foretold_steps,
    grow_tree,
    rank_paths,
    ranks_by_text,
    sampled_prompts,
    tilt_of_seed,
)
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
    foretold = [foretold_steps(TREE, ranks) for ranks in rank_paths(model, text, PROMPT)]
    for row in range(2):
        accepted = output.accepted_lengths[row]
        assert foretold[row] == accepted[accepted > 0].tolist()
        assert 10 < len(foretold[row])
    assert family.name != "medusa" or (output.accepted_lengths > 1).any()


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
    foretold = [foretold_steps(TREE, ranks) for ranks in rank_paths(model, output.sequences, PROMPT, tilt=tilt)]
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


def test_a_step_goes_as_deep_as_the_tree_and_no_further_than_the_text():
    tree = DraftTree([(0,), (0, 0), (1,)])
    rows = [
        [[0, 0], [3, 3], [0, 2], [1, 0], [0, 1], [0, -1]],
        [[0, 0], [0, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ]
    assert [foretold_steps(tree, torch.tensor(row)) for row in rows] == [[3, 2, 1], [2]]


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


SHARES = torch.tensor([0.6, 0.15, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01])


def planted(texts=24, positions=40):
    """Ranks (S, 3) of texts, with these shares whatever level the guess is of."""
    generator = torch.Generator().manual_seed(1)
    return [torch.multinomial(SHARES, positions * 3, True, generator=generator).view(-1, 3) for _ in range(texts)]


def test_a_tree_grows_by_what_its_nodes_are_worth():
    ranks = torch.tensor([[0, 0], [0, 0], [0, 2], [1, 0], [0, 0], [3, 1]])
    assert grow_tree(ranks, 4) == [(0,), (0, 0), (1,)]


def test_every_beginning_of_a_grown_tree_is_a_tree():
    ranks = torch.randint(0, 4, (300, 4), generator=torch.Generator().manual_seed(0))
    paths = grow_tree(ranks, 40)
    for size in range(1, len(paths) + 1):
        assert DraftTree(paths[:size]).num_nodes == size + 1


def test_a_tree_has_two_nodes_at_least_and_no_rank_that_is_too_high():
    ranks = torch.cat(planted())
    with pytest.raises(ValueError, match="a tree of 1 nodes drafts nothing: ask for at least 2"):
        grow_tree(ranks, 1)
    paths = grow_tree(ranks, 40, ranks_below=3)
    assert max(rank for path in paths for rank in path) == 2


def test_trees_of_every_depth_are_counted():
    counted = TreeStatistics.of(planted(), 40, 64)
    assert counted.positions == 24 * 40 and counted.paths.keys() == counted.steps.keys()
    assert {size.depth for size in counted.steps} == {0, 1, 2, 3} and max(counted.steps) == Size(40, 3)
    for size in counted.steps:
        tree = DraftTree(counted.paths[size])
        assert (tree.num_nodes, tree.max_depth) == size
        for nodes in range(2, size.nodes):
            assert DraftTree(counted.paths[size][: nodes - 1]).num_nodes == nodes
    taus = [counted.tokens_per_step(Size(8, depth)) for depth in (1, 2, 3)]
    assert 1 < taus[0] < taus[1] < taus[2] and counted.tokens_per_step(ALONE) == 1


def test_a_text_is_foretold_with_a_tree_that_was_not_grown_on_it():
    # text 0 has rank 0 everywhere, text 1 rank 1: the tree of either is wrong on the other
    ranks = [torch.zeros(40, 1, dtype=torch.long), torch.ones(40, 1, dtype=torch.long)]
    counted = TreeStatistics.of(ranks, 2, 64)
    assert counted.steps[Size(2, 1)] == [[1] * 40] * 2
    assert foretold_steps(DraftTree(counted.paths[Size(2, 1)]), ranks[0]) == [2] * 20


def test_in_a_batch_the_row_that_takes_most_steps_counts():
    steps = {ALONE: [[1] * 6] * 3, Size(2, 1): [[3, 3], [2, 2, 2], [1] * 6]}
    counted = TreeStatistics({ALONE: [], Size(2, 1): [(0,)]}, steps, 18)
    # 2, 3 and 6 steps; in neighbours 3, 6 and 6, for the last text is followed by the first
    assert [counted.fewer_steps(Size(2, 1), rows) for rows in (1, 2, 3)] == [18 / 11, 18 / 15, 1.0]
    assert counted.tokens_per_step(Size(2, 1)) == 18 / 11 and counted.fewer_steps(ALONE, 2) == 1.0


@pytest.mark.few(1)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_counted_tokens_per_step_are_those_of_generate(temperature):
    model = next(one for one in FAMILIES if one.name == "eagle").build(tiny_base("llama-gqa"))
    model.generation_config.eos_token_id = None
    prompts = list(torch.randint(3, VOCABULARY, (16, 5), generator=torch.Generator().manual_seed(4)))
    counted = count_trees(model, prompts, 40, 16, temperature)
    largest = max(counted.steps)
    assert largest.nodes == 16
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    others = torch.randint(3, VOCABULARY, (24, 5), generator=torch.Generator().manual_seed(5))
    torch.manual_seed(6)
    lengths = model.generate(
        others, max_new_tokens=40, draft_tree=counted.paths[largest], return_dict_in_generate=True, **sampling
    ).accepted_lengths
    measured = float(lengths[lengths > 0].double().mean())
    assert counted.tokens_per_step(largest) == pytest.approx(measured, rel=0.1) and measured > 1.1


def test_no_tree_is_grown_beyond_the_tokens_that_the_heads_choose_among():
    model = next(one for one in FAMILIES if one.name == "eagle3").build(tiny_base("llama-gqa"), draft_vocab_size=20)
    model.generation_config.eos_token_id = None
    prompts = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
    counted = count_trees(model, prompts, 24, 60)
    assert len(counted.paths) > 5
    assert max(rank for paths in counted.paths.values() for path in paths for rank in path) < 20
