"""Exact: generate returns what the base's generate returns, greedy or sampled, whatever was guessed."""

import pytest
import torch

from tests.bases import tiny_base
from tests.drafters import at_rank, half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import EOS, TREE, agree, count_forwards, own_lengths, prompt, shared_base

GUESSES = {
    "right": right,
    "wrong": wrong,
    "half-right": half_right,
    "second-rank": at_rank(1),
    "third-rank": at_rank(2),
}
SHAPES = {"alone": 1, "batch": 4}
CHOICES = {"greedy": {}, "sampled": {"do_sample": True}}

guesses = pytest.mark.parametrize("guess", GUESSES.values(), ids=GUESSES)
shapes = pytest.mark.parametrize("rows", SHAPES.values(), ids=SHAPES)
choices = pytest.mark.parametrize("choice", CHOICES.values(), ids=CHOICES)
all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@choices
@shapes
@guesses
def test_whatever_is_guessed(guess, rows, choice):
    found = agree(inputs=prompt(rows), guess=guess, call={"max_new_tokens": 24, **choice})
    if guess is wrong:
        assert found.got.accepted_lengths.max() == 1
    else:
        assert found.steps < max(found.new_tokens) - 1


@choices
@shapes
@all_families
def test_with_the_heads_of_every_family(family, rows, choice):
    base = shared_base("llama")
    model = family.build(base)
    call = {**prompt(rows), "max_new_tokens": 20, **choice}
    torch.manual_seed(1)
    expected = base.generate(**call)
    left_at = torch.get_rng_state()
    model._base_reader()
    torch.manual_seed(1)
    with count_forwards(base) as forwards:
        got = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    assert torch.equal(torch.get_rng_state(), left_at)
    own = own_lengths(expected, 9, [EOS])
    assert (got.accepted_lengths.sum(1) + 1).tolist() == own
    steps = [9, *[len(TREE) + 1] * got.accepted_lengths.shape[1]]
    # the padding behind the row that ended first is read for the cache
    assert forwards == [*steps, *[max(own) - min(own)] * (max(own) > min(own))]


ODD = [[[0]], [[2], [0], [1]], [[5], [5, 3]], [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", ["mc_sim_7b_63", "hydra_single", "medusa_vicuna_7b_stage2", *ODD], ids=str)
def test_with_published_and_odd_trees(tree, rows):
    agree(inputs=prompt(rows), tree=tree, call={"max_new_tokens": 16})


@pytest.mark.parametrize("per_node", [False, True], ids=["one guess per level", "guesses per node"])
@pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])
@shapes
def test_with_every_kind_of_drafter(rows, keeps_history, per_node):
    draft = {"keeps_history": keeps_history, "per_node": per_node}
    agree(inputs=prompt(rows), call={"max_new_tokens": 30}, draft=draft)


def test_after_a_change_of_attention_implementation():
    base = tiny_base("llama-gqa")
    agree(base, prompt(), call={"max_new_tokens": 8}, tolerance=1e-5)
    base.set_attn_implementation("eager")
    agree(base, prompt(), call={"max_new_tokens": 8}, tolerance=1e-5)


def test_num_return_sequences():
    inputs = prompt(2)
    starts = (9 - inputs["attention_mask"].sum(1)).repeat_interleave(3).tolist()

    def texts(sequences):
        own = own_lengths(sequences, 9, [EOS])
        return [row[start : 9 + n].tolist() for row, start, n in zip(sequences, starts, own)]

    call = {"max_new_tokens": 12, "do_sample": True, "num_return_sequences": 3}
    assert len(agree(inputs=inputs, call=call, texts=texts).new_tokens) == 6
