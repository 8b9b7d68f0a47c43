"""Calibration: what one pass over a text says of a tree is what generating that text with it does."""

import pytest
import torch

from hf_drafthead.generation.calibration import foretold_steps, grow_tree, rank_paths, recounted, tilt_of_seed
from hf_drafthead.generation.tree import DraftTree
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

TREE = DraftTree([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 0, 1)])
PROMPT = 9


def greedy_text(model, new_tokens=60):
    prompt = torch.randint(3, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": new_tokens, "eos_token_id": None, "do_sample": False}
    return prompt, model.base.generate(prompt, **settings), settings


@pytest.mark.few(4)
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


def test_a_tree_grows_by_what_its_nodes_are_worth():
    ranks = torch.tensor([[0, 0], [0, 0], [0, 2], [1, 0], [0, 0], [3, 1]])
    assert grow_tree(ranks, 4) == [(0,), (0, 0), (1,)]


def test_a_step_goes_as_deep_as_the_tree_and_no_further_than_the_text():
    tree = DraftTree([(0,), (0, 0), (1,)])
    rows = [
        [[0, 0], [3, 3], [0, 2], [1, 0], [0, 1], [0, -1]],
        [[0, 0], [0, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
    ]
    assert foretold_steps(tree, torch.tensor(rows)) == [[3, 2, 1], [2]]


def test_a_tree_is_counted_anew_where_its_steps_begin_as_long_as_that_saves_steps():
    # of nine positions five have rank 0, but steps with that guess begin mostly where rank 1 is right
    row = [[rank] for rank in (0, 0, 1, 0, 0, 1, 1, 1, 0)]
    ranks = torch.tensor([row])
    counted = grow_tree(ranks, 2)
    taken = [foretold_steps(DraftTree(paths), ranks)[0] for paths in (counted, [(1,)])]
    assert counted == [(0,)] and [len(steps) for steps in taken] == [7, 6]
    assert recounted(counted, [row], 2, 1, 9) == [(1,)]
    assert recounted([(1,)], [row], 2, 1, 9) == [(1,)]
    assert recounted(counted, [row], 2, 1, 1) == [(0,)]  # no rank but 0

    generator = torch.Generator().manual_seed(0)
    rows = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), 3 * 40 * 20, True, generator=generator).view(20, 40, 3)
    for nodes, depth in ((4, 2), (8, 3), (16, 3)):
        before = [path for path in grow_tree(rows, 100) if len(path) <= depth][: nodes - 1]
        after = recounted(before, rows.tolist(), nodes, depth, 9)
        fewer, more = (sum(map(len, foretold_steps(DraftTree(paths), rows))) for paths in (after, before))
        assert fewer <= more and len(after) == nodes - 1 and max(map(len, after)) <= depth
        for size in range(1, nodes):
            assert DraftTree(after[:size]).num_nodes == size + 1


def test_every_beginning_of_a_grown_tree_is_a_tree():
    ranks = torch.randint(0, 4, (300, 4), generator=torch.Generator().manual_seed(0))
    paths = grow_tree(ranks, 40)
    for size in range(1, len(paths) + 1):
        assert DraftTree(paths[:size]).num_nodes == size + 1


def test_too_short_a_text_and_too_small_a_tree_are_refused():
    model = FAMILIES[0].build(tiny_base())
    with pytest.raises(ValueError, match="texts of up to 10 tokens after prompts of 9 or more leave no position"):
        rank_paths(model, torch.ones(1, 10, dtype=torch.long), 9)
    with pytest.raises(ValueError, match="a tree of 1 nodes drafts nothing: ask for at least 2"):
        grow_tree(torch.zeros(3, 4, dtype=torch.long), 1)
