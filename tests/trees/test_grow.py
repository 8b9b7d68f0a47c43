"""Trees grown from ranks: the most valuable paths, and how many steps a text takes with them."""

import pytest
import torch

from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.calibrate import count_trees
from hf_drafthead.trees.costs import ALONE, Size
from hf_drafthead.trees.rank_paths import TreeStatistics, foretold_steps, grow_tree
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

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
        tree = counted.tree(size)
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
    assert foretold_steps(counted.tree(Size(2, 1)), ranks[0][None]) == [[2] * 20]


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
        others, max_new_tokens=40, draft_tree=counted.tree(largest), return_dict_in_generate=True, **sampling
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
