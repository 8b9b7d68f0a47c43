"""The algorithm in sixty lines writes what `generate` writes."""

import inspect

import pytest
import torch

from hf_drafthead.generation import DraftTree, generate_plainly
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

SETTINGS = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}


def fitting(model) -> DraftTree:
    return DraftTree(TREE).cut(model.drafter.max_depth or 9)


@pytest.mark.few(20)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_it_writes_what_generate_writes_whatever_guesses(family):
    model = family.build(shared_base("llama-gqa"))
    tree, ids = fitting(model), prompt()["input_ids"]
    plainly = generate_plainly(model.base, model.drafter, ids, tree, 24)
    assert torch.equal(plainly, model.generate(ids, draft_tree=tree, **SETTINGS))
    assert torch.equal(plainly, model.base.generate(ids, **SETTINGS))


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", ["gpt2", "mistral-sliding", "gemma2", "lfm2", "gpt-neox"])
def test_it_writes_what_generate_writes_on_any_base(kind):
    model = FAMILIES[0].build(tiny_base(kind))
    tree, ids = fitting(model), prompt()["input_ids"]
    plainly = generate_plainly(model.base, model.drafter, ids, tree, 24)
    assert torch.equal(plainly, model.generate(ids, draft_tree=tree, **SETTINGS))


def test_it_is_short_and_names_the_four_verbs():
    lines = inspect.getsource(generate_plainly).splitlines()
    assert len(lines) <= 60
    assert all(f"    def {verb}(" in "\n".join(lines) for verb in ("draft", "verify", "walk", "commit"))
