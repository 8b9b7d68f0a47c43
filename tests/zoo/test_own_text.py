"""The text that heads learn from: beginnings of the corpus, continued by the base."""

import torch

from benchmarks.zoo_recipe import own_text
from tests.bases import VOCABULARY, tiny_base


def corpus():
    return torch.randint(3, VOCABULARY, (5, 40), generator=torch.Generator().manual_seed(0))


def test_beginnings_are_pieces_of_the_corpus_behind_a_rows_first_token():
    rows = corpus()
    for start in own_text.starts(rows, 20, 8, seed=1):
        pieces = [row[at : at + 7] for row in rows if row[0] == start[0] for at in range(1, 34)]
        assert any(torch.equal(start[1:], piece) for piece in pieces)


def test_texts_are_what_the_base_says_and_are_written_once(tmp_path):
    base, file = tiny_base("llama"), tmp_path / "work" / "texts.safetensors"
    made = own_text.own_text(base, corpus(), 6, file, seed=1)
    texts = made.rows
    assert texts.shape == (6, 40) and made.given == 10
    settings = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
    assert torch.equal(texts, base.generate(texts[:, :10], **settings))
    again = own_text.own_text(None, corpus(), 6, file, seed=1)
    assert torch.equal(again.rows, texts)


def test_only_what_the_base_wrote_is_learnt():
    item = own_text.OwnRows(corpus(), 8)[2]
    assert item["labels"][:8].eq(-100).all()
    assert torch.equal(item["labels"][8:], item["input_ids"][8:])
