"""Calibration: what one pass over a text says of a tree is what generating that text with it does."""

import pytest
import torch

from hf_drafthead.generation.calibration import expected_tokens_per_step, grow_tree, rank_paths
from hf_drafthead.generation.tree import DraftTree
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

TREE = DraftTree([(0,), (1,), (2,), (3,), (0, 0), (0, 1), (1, 0), (2, 2), (0, 0, 0), (0, 0, 1)])
PROMPT = 9


def greedy_text(model, new_tokens=60):
    prompt = torch.randint(3, VOCABULARY, (2, PROMPT), generator=torch.Generator().manual_seed(3))
    settings = {"max_new_tokens": new_tokens, "eos_token_id": None, "do_sample": False}
    return prompt, model.base.generate(prompt, **settings), settings


def steps_on(ranks, tree):
    """Lengths of the steps that the ranks foretell, from the first new token on."""
    position, lengths = 0, []
    while position < len(ranks):
        depth = max(
            (d for d in range(1, ranks.shape[1] + 1) if tuple(ranks[position, :d].tolist()) in tree.paths), default=0
        )
        lengths.append(depth + 1)
        position += depth + 1
    return lengths


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_ranks_foretell_every_step_of_generate(family):
    model = family.build(tiny_base("llama-gqa"))
    prompt, text, settings = greedy_text(model)
    output = model.generate(prompt, draft_tree=TREE, return_dict_in_generate=True, **settings)
    assert torch.equal(output.sequences, text)
    for row in range(2):
        ranks = rank_paths(model, text[row : row + 1], PROMPT)
        foretold = steps_on(ranks, TREE)[:-2]  # the last ones are cut by the end of the text
        assert foretold == output.accepted_lengths[row, : len(foretold)].tolist()
        assert len(foretold) > 10


def test_some_steps_of_these_models_do_accept_guesses():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    prompt, _, settings = greedy_text(model)
    lengths = model.generate(prompt, draft_tree=TREE, return_dict_in_generate=True, **settings).accepted_lengths
    assert (lengths > 1).any()


def test_a_tree_grows_by_what_its_nodes_are_worth():
    ranks = torch.tensor([[0, 0], [0, 0], [0, 2], [1, 0], [0, 0], [3, 1]])
    assert grow_tree(ranks, 4) == [(0,), (0, 0), (1,)]
    assert expected_tokens_per_step(DraftTree([(0,), (0, 0), (1,)]), ranks) == pytest.approx(1 + (4 + 3 + 1) / 6)


def test_every_beginning_of_a_grown_tree_is_a_tree():
    ranks = torch.randint(0, 4, (300, 4), generator=torch.Generator().manual_seed(0))
    paths = grow_tree(ranks, 40)
    for size in range(1, len(paths) + 1):
        assert DraftTree(paths[:size]).num_nodes == size + 1


def test_too_short_a_text_and_too_small_a_tree_are_refused():
    model = FAMILIES[0].build(tiny_base())
    with pytest.raises(ValueError, match="a text of 10 tokens after a prompt of 9 leaves no position that 4 heads can"):
        rank_paths(model, torch.ones(1, 10, dtype=torch.long), 9)
    with pytest.raises(ValueError, match="a tree of 1 nodes drafts nothing: ask for at least 2"):
        grow_tree(torch.zeros(3, 4, dtype=torch.long), 1)
