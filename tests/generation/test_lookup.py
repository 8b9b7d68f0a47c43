"""Copies from the text itself: against a search written as a loop, and joined with trees node by node."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_drafthead import DraftTree
from hf_drafthead.generation.lookup import Copies, copies, joined


def searched(text, count, longest):
    """The same by a loop: the longest match first, of equal ones the last; a copy goes on with its own beginning."""
    for size in range(longest, min(2, longest) - 1, -1):
        suffix = text[-size:]
        for end in range(len(text) - 2, size - 2, -1):
            if len(suffix) == size and text[end - size + 1 : end + 1] == suffix:
                rest = text[end + 1 :]
                return [rest[i % len(rest)] for i in range(count)]
    return None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_a_copy_is_what_followed_the_longest_and_latest_match(texts, count, longest):
    width = max(map(len, texts)) + 3
    sequences = torch.tensor([text + [2] * (width - len(text)) for text in texts])  # what lies behind is not looked at
    found = copies(sequences, torch.tensor(list(map(len, texts))), count, longest, 100)
    for text, tokens, matched in zip(texts, found.tokens.tolist(), found.matched.tolist()):
        expected = searched(text, count, longest)
        assert matched == (expected is not None)
        assert tokens == (expected or [0] * count)


def test_ids_beyond_the_vocabulary_are_not_guessed():
    found = copies(torch.tensor([[1, 2, 900, 4, 1, 2]]), torch.tensor([6]), 3, 2, vocabulary=100)
    assert found.tokens.tolist() == [[0, 4, 1]]


def test_a_prompt_shorter_than_the_match_and_one_repeated_token():
    found = copies(torch.tensor([[7, 0, 0, 0], [7, 7, 7, 7]]), torch.tensor([1, 4]), 2, 3, 100)
    assert found.matched.tolist() == [False, True] and found.tokens.tolist() == [[0, 0], [7, 7]]


PATHS = [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]


def in_one_tree(tree, tokens, copied, nodes):
    """Tokens of the path to every node, from the root down, of every row."""
    value = -torch.tensor([[len(path) + sum(path) for path in ((), *tree.paths)]]).float().expand(len(tokens), -1)
    topology = tree.topology()
    shape = tokens.shape
    tokens, topology = joined(
        tokens, topology.parents.expand(shape), topology.depths.expand(shape), value, copied, nodes, tree.max_depth
    )
    assert tokens.shape == topology.parents.shape == (shape[0], nodes)
    assert (topology.parents[:, 1:] < torch.arange(1, nodes)).all()  # parents come before their children
    return [
        [tuple(row[path[1 : depth + 1]].tolist()) for path, depth in zip(paths, depths)]
        for row, paths, depths in zip(tokens, topology.paths.expand(shape[0], -1, -1), topology.depths)
    ]


@pytest.mark.parametrize("copy", [[20, 21, 22], [1, 3, 40], [1, 3, 6], [2, 5, 50], [1, 30, 31]])
def test_the_copy_takes_the_place_of_the_least_valuable_nodes(copy):
    tree = DraftTree(PATHS)
    guessed = [1, 2, 3, 4, 5, 6]
    tokens = torch.tensor([[9, *guessed], [9, *guessed]])
    copied = Copies(torch.tensor([copy, copy]), torch.tensor([True, False]))
    with_copy, without = in_one_tree(tree, tokens, copied, 7)
    assert set(without) == {(), (1,), (2,), (1, 3), (1, 4), (2, 5), (1, 3, 6)}
    line = {tuple(copy[:depth]) for depth in range(4)}
    assert line <= set(with_copy) and len(set(with_copy)) == 7  # nothing stands there twice
    # in the order of their value: by depth and ranks, of equal ones the first
    by_value = [(), (1,), (2,), (1, 3), (1, 4), (2, 5), (1, 3, 6)]
    rest = [path for path in by_value if path not in line]
    assert set(with_copy) == line | set(rest[: 7 - len(line)])


def test_the_root_alone_and_a_copy():
    tokens = torch.tensor([[9], [9]])
    copied = Copies(torch.tensor([[4, 5], [0, 0]]), torch.tensor([True, False]))
    with_copy, without = in_one_tree(DraftTree.root_alone(), tokens, copied, 3)
    assert with_copy == [(), (4,), (4, 5)] and without == [(), (0,), (0, 0)]
