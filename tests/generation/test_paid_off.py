"""Paid off: a drafter that knows the answer takes exactly the fewest steps; a step is one forward of the base."""

import math

import pytest
from transformers import LogitsProcessor, LogitsProcessorList

from hf_drafthead.generation import DraftTree
from tests.drafters import at_rank, right, wrong
from tests.generation.agreement import DEPTH, TREE, agree, prompt, shared_base

CHAIN = [[0] * depth for depth in range(1, 6)]


class Unknown(LogitsProcessor):
    """Changes nothing, but the loop cannot know that."""

    def __call__(self, input_ids, scores):
        return scores


KINDS_OF_CALL = {
    "greedy": dict,
    "sampled": lambda: {"do_sample": True},
    "own pace with processors": lambda: {"repetition_penalty": 1.2},
    "lockstep": lambda: {"logits_processor": LogitsProcessorList([Unknown()])},
    "lockstep sampled": lambda: {"logits_processor": LogitsProcessorList([Unknown()]), "do_sample": True},
}
WAITING = [KINDS_OF_CALL["lockstep"], KINDS_OF_CALL["lockstep sampled"]]  # rows for each other
every_kind = pytest.mark.parametrize("kind", KINDS_OF_CALL.values(), ids=KINDS_OF_CALL)


def fewest(new_tokens: int, depth: int) -> list[int]:
    """Tokens of each step when every guess is right; the first token comes from the prompt."""
    whole, rest = divmod(new_tokens - 1, depth + 1)
    return [depth + 1] * whole + [rest] * bool(rest)


@every_kind
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [TREE, CHAIN, [[0]]], ids=["tree", "chain", "one node"])
@pytest.mark.parametrize("new_tokens", [1, 2, 11, 18])
def test_knowing_the_answer_takes_the_fewest_steps(new_tokens, tree, rows, kind):
    inputs, depth = prompt(rows), DraftTree(tree).max_depth
    found = agree(inputs=inputs, guess=right, tree=tree, call=lambda: {"max_new_tokens": new_tokens, **kind()})
    assert found.steps == math.ceil((max(found.new_tokens) - 1) / (depth + 1))
    for row, own in enumerate(found.new_tokens):
        accepted, taken = fewest(own, depth), found.got.accepted_lengths[row].tolist()
        if rows > 1 and kind in WAITING:  # a step ends where one of the rows does
            assert sum(taken) == own - 1 and max(taken, default=0) <= depth + 1
        else:  # in as few steps
            assert sorted(taken) == sorted(accepted + [0] * (found.steps - len(accepted)))


@every_kind
def test_knowing_nothing_takes_a_step_per_token(kind):
    found = agree(inputs=prompt(3), guess=wrong, call=lambda: {"max_new_tokens": 9, **kind()})
    assert set(found.got.accepted_lengths.flatten().tolist()) <= {0, 1}
    assert found.steps == max(found.new_tokens) - 1


def test_a_lower_rank_pays_as_far_as_the_tree_has_it():
    second = agree(guess=at_rank(1), call={"max_new_tokens": 9}, tree=[[0], [1], [1, 0], [1, 1], [1, 1, 1]])
    assert second.got.accepted_lengths.tolist() == [[4, 4]]
    third = agree(guess=at_rank(2), call={"max_new_tokens": 7}, tree=TREE)
    assert third.got.accepted_lengths.tolist() == [[2, 2, 2]]


@pytest.mark.parametrize("per_node", [False, True], ids=["one guess per level", "guesses per node"])
def test_a_tree_is_followed_along_every_branch(per_node):
    def guess(row, position):
        return (position * 5 + position // 3) % 3

    tree = [[a] for a in range(3)] + [[a, b] for a in range(3) for b in range(3)]
    found = agree(inputs=prompt(2), guess=guess, tree=tree, call={"max_new_tokens": 25}, draft={"per_node": per_node})
    assert found.got.accepted_lengths.tolist() == [[3] * 8] * 2


def test_a_row_that_has_ended_costs_no_further_steps():
    base, inputs = shared_base("llama-gqa"), prompt(3)
    text = base.generate(**inputs, max_new_tokens=24)
    eos = [int(text[0, 9 + 4])]  # a step is emitted only in part
    found = agree(base, inputs, right, call={"max_new_tokens": 24, "eos_token_id": eos}, tree=TREE)
    assert min(found.new_tokens) <= 5 < max(found.new_tokens)
    assert found.steps == math.ceil((max(found.new_tokens) - 1) / (DEPTH + 1))
