"""What a visitor asks for: the settings reach `generate`, and what cannot be used is refused in one line."""

import dataclasses

import pytest
import torch

from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page.comparison import BASE, HEADS, OWN_TREE, Asked

HOW = {"temperature": 0.0, "acceptance": "exact", "max_new_tokens": 8, "copies": 0, "seed": 0, "with_base": False}
ASKED = Asked(written="import os\n", chat=False, messages=[], tree=OWN_TREE, **HOW)
TEMPLATE = "{{ bos_token }}{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}"


def asked(**changes) -> Asked:
    return dataclasses.replace(ASKED, **changes)


def written(comparison) -> list[int]:
    for _ in comparison.run():
        pass
    return comparison.sides[HEADS].tokens


@pytest.mark.parametrize(
    "tree, expected",
    [
        ("[[0], [1], [0, 0]]", DraftTree([(0,), (1,), (0, 0)])),
        ("hydra_single", DraftTree.from_name("hydra_single").cut(4)),
        ("mc_sim_7b_63", DraftTree.from_name("mc_sim_7b_63").cut(4)),
    ],
)
def test_the_tree_is_the_one_asked_for(hydra, tree, expected):
    assert asked(tree=tree).comparison(*hydra).tree == expected


def test_without_a_tree_the_model_drafts_its_own(hydra):
    assert BASE not in asked().comparison(*hydra).sides and BASE in asked(with_base=True).comparison(*hydra).sides
    stored = DraftTree([tuple(path) for path in hydra[0].generation_config.draft_tree])
    assert asked().comparison(*hydra).tree == stored == asked(tree=" ").comparison(*hydra).tree


def test_copies_are_asked_of_the_heads(hydra):
    found = asked(copies=4, max_new_tokens=24, with_base=True).comparison(*hydra)
    assert written(found) == written(asked(max_new_tokens=24).comparison(*hydra)) and found.same
    assert any(step.copied for step in found.sides[HEADS].steps)


def test_temperature_seed_and_length_decide_what_is_written(hydra):
    greedy = written(asked().comparison(*hydra))
    assert len(greedy) == 8
    assert written(asked(seed=5).comparison(*hydra)) == greedy
    hot = [asked(temperature=1.5, seed=seed, max_new_tokens=16).comparison(*hydra) for seed in (1, 1, 2)]
    first, again, other = map(written, hot)
    assert first == again != other


@pytest.mark.parametrize("acceptance", ["rejection", "typical"])
def test_the_acceptance_is_the_one_asked_for(hydra, acceptance):
    comparison = asked(acceptance=acceptance, temperature=1.0, seed=3).comparison(*hydra)
    model, tokenizer = hydra
    given = tokenizer(ASKED.written, return_tensors="pt")
    torch.manual_seed(3)
    call = {**given, "do_sample": True, "temperature": 1.0, "max_new_tokens": 8, "acceptance": acceptance}
    text = model.generate(**call, draft_tree=comparison.tree)
    tokens = written(comparison)
    assert tokens == text[0, given["input_ids"].shape[1] :].tolist()
    assert tokens != written(asked(temperature=1.0, seed=3).comparison(*hydra))


def test_every_acceptance_is_offered():
    gradio = pytest.importorskip("gradio", reason="gradio is not installed: pip install 'hf-drafthead[page]'")
    from hf_drafthead.page.app import settings

    with gradio.Blocks():
        choices = settings(8)["acceptance"].choices
    assert [value for _, value in choices] == ["exact", "rejection", "typical"]


def test_a_chat_goes_through_the_template(hydra, monkeypatch):
    model, tokenizer = hydra
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    said = [{"role": "user", "content": "x = 1"}, {"role": "assistant", "content": "y = 2"}]
    chat = asked(chat=True, messages=said, written="z = 3")
    plain = asked(written="# user\nx = 1\n# assistant\ny = 2\n# user\nz = 3\n")
    assert written(chat.comparison(model, tokenizer)) == written(plain.comparison(model, tokenizer))
    assert chat.conversation == [*said, {"role": "user", "content": "z = 3"}]


@pytest.mark.parametrize(
    "changes, line",
    [
        ({"written": " \n"}, "the prompt is empty: write the text that the model shall continue."),
        ({"tree": "[[0], [0,"}, "the tree '[[0], [0,' is not JSON"),
        ({"tree": "[[0, 0]]"}, "node (0, 0) has no parent"),
        ({"tree": "nonesuch"}, "draft_tree 'nonesuch' is no published tree"),
        ({"acceptance": "all"}, "acceptance is 'all': expected one of 'exact', 'rejection', 'typical'."),
        ({"max_new_tokens": 100_000}, "a prompt of 4 tokens and 100000 new ones exceed the base's"),
    ],
)
def test_what_cannot_be_used_is_refused(hydra, changes, line):
    with pytest.raises(ValueError) as refused:
        asked(**changes).comparison(*hydra)
    assert str(refused.value).startswith(line)
