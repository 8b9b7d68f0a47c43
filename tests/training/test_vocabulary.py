"""A reduced vocabulary holds the tokens that there is most to learn about."""

import pytest
import torch
from datasets import Dataset

from hf_drafthead.training.examples import frequent_tokens, label_frequencies

ROWS = [{"labels": [-100, 7, 7, 2, 5]}, {"labels": [-100, -100, 7, 5, 9]}, {"labels": [3, -100]}]


@pytest.mark.parametrize("rows", [ROWS, Dataset.from_list(ROWS)])
@pytest.mark.parametrize(
    "size, chosen, covered",
    [(2, [5, 7], 5 / 8), (4, [2, 3, 5, 7], 7 / 8), (8, [0, 1, 2, 3, 4, 5, 7, 9], 1.0)],
    ids=["the most frequent", "of equally frequent ones the lowest", "filled up with unused ones"],
)
def test_the_tokens_that_are_labels_most_often(rows, size, chosen, covered):
    tokens, share = frequent_tokens(label_frequencies(rows, 12), size)
    assert (sorted(tokens.tolist()), tokens.dtype, share) == (chosen, torch.long, covered)
