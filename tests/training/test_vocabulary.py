"""A reduced vocabulary holds the tokens that there is most to learn about."""

import pytest
import torch
from datasets import Dataset

from hf_drafthead.training.examples import frequent_tokens

ROWS = [{"labels": [-100, 7, 7, 2, 5]}, {"labels": [-100, -100, 7, 5, 9]}, {"labels": [3, -100]}]


@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS)])
def test_the_tokens_that_are_labels_most_often_in_ascending_order(rows):
    tokens, share = frequent_tokens(rows, 2, 12)
    assert tokens.tolist() == [5, 7] and share == 5 / 8


def test_of_equally_frequent_ones_the_lowest():
    tokens, share = frequent_tokens(ROWS, 4, 12)
    assert tokens.tolist() == [2, 3, 5, 7] and share == 7 / 8


def test_unused_tokens_fill_it_up():
    tokens, share = frequent_tokens(ROWS, 8, 12)
    assert tokens.tolist() == [0, 1, 2, 3, 4, 5, 7, 9] and share == 1.0
    assert tokens.dtype == torch.long
