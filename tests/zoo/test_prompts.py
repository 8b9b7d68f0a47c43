"""Held-out prompts: cut from files that were not trained on, of the promised length, the same every time."""

import json

import pytest

from benchmarks.zoo_recipe.corpus import SourceFile, read_corpus
from benchmarks.zoo_recipe.prompts import LONGEST, SHORTEST, cut_prompts, write_prompts
from hf_drafthead.zoo import ASSETS

COMMITTED = [json.loads(line) for line in (ASSETS / "prompts.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def corpus():
    return read_corpus()


def test_the_committed_prompts_are_held_out_and_of_the_promised_length():
    assert len(COMMITTED) == 40
    assert len({prompt["id"] for prompt in COMMITTED}) == len({prompt["prompt"] for prompt in COMMITTED}) == 40
    for prompt in COMMITTED:
        assert SourceFile(prompt["file"], "").held_out
        assert SHORTEST <= len(prompt["prompt"]) <= LONGEST
        assert prompt["category"] in {"function", "method", "class", "docstring"}
        assert not prompt["prompt"].endswith("\n")


def test_no_committed_prompt_occurs_in_the_training_text(corpus):
    training = "\n".join(file.text for file in corpus if not file.held_out)
    assert [prompt["id"] for prompt in COMMITTED if prompt["prompt"] in training] == []


def test_prompts_are_the_same_every_time_and_written_as_they_are(tmp_path, corpus):
    prompts = cut_prompts(corpus, 12)
    assert prompts == cut_prompts(list(corpus), 12)
    write_prompts(prompts, tmp_path / "prompts.jsonl")
    assert [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()] == prompts
