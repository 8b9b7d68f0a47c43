"""Bad input: one line that says what was given, what was expected and what to do."""

import pytest
import torch

from tests.families import FAMILIES
from tests.generation.agreement import prompt, shared_base

EMPTY = torch.zeros(1, 0, dtype=torch.long)
SETTINGS = {
    "unknown acceptance": (
        {"acceptance": "lossy"},
        ValueError,
        r"^acceptance is 'lossy': expected one of 'exact', 'typical'\.$",
    ),
    "acceptance by truth": ({"acceptance": False}, ValueError, r"^acceptance is False: expected one of"),
    "acceptance in a list": (
        {"acceptance": ["exact"]},
        ValueError,
        r"^acceptance is \['exact'\]: expected one of 'exact', 'typical'\.$",
    ),
    "threshold above 1": (
        {"posterior_threshold": 1.5},
        ValueError,
        r"^posterior_threshold is 1.5: expected a number from 0 to 1\.$",
    ),
    "no number": ({"posterior_alpha": float("nan")}, ValueError, r"^posterior_alpha is nan: expected a number from 0"),
    "alpha as text": (
        {"posterior_alpha": "0.3"},
        ValueError,
        r"^posterior_alpha is '0.3': expected a number from 0 to 1\.$",
    ),
    "alpha by truth": ({"posterior_alpha": True}, ValueError, r"^posterior_alpha is True: expected a number"),
    "unknown tree": (
        {"draft_tree": "mc_sim_63"},
        ValueError,
        r"^draft_tree 'mc_sim_63' is no published tree: expected one of .*mc_sim_7b_63.*, or rank paths such as",
    ),
    "an empty name": ({"draft_tree": ""}, ValueError, r"^draft_tree '' is no published tree: expected one of"),
    "tree as tensor": ({"draft_tree": torch.tensor([[0]])}, TypeError, r"^a tree has the path tensor\(\[0\]\)"),
    "orphan": ({"draft_tree": [[0], [1, 0]]}, ValueError, r"^node \(1, 0\) has no parent: add \(1,\) to the tree, or"),
    "rank beyond the vocabulary": (
        {"draft_tree": [[67]]},
        ValueError,
        r"^draft_tree has the node \(67,\) with rank 67, but a vocabulary of 67 tokens has ranks 0 to 66: drop",
    ),
    "too deep": (
        {"draft_tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]},
        ValueError,
        r"^draft_tree has the node \(0, 0, 0, 0, 0\) at depth 5, but the model has 4 draft heads: drop every path",
    ),
    "stop strings without tokenizer": (
        {"stop_strings": ["ab"]},
        ValueError,
        "^There are one or more stop strings.*must pass the model's tokenizer",
    ),
}


@pytest.fixture(scope="module")
def model():
    return FAMILIES[0].build(shared_base("llama"))


@pytest.mark.parametrize("settings, error, text", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("where", ["call", "generation config"])
def test_a_setting_that_cannot_be_is_refused(where, settings, error, text, model, monkeypatch):
    if where == "generation config":
        for name, value in settings.items():
            monkeypatch.setattr(model.generation_config, name, value, raising=False)
        settings = {}
    with pytest.raises(error, match=text):
        model.generate(**prompt(), max_new_tokens=3, **settings)


@pytest.mark.parametrize(
    "tree, line",
    [
        (
            [[0], [0, 20]],
            r"^draft_tree has the node \(0, 20\) with rank 20, but a vocabulary of 20 tokens has ranks 0 to",
        ),
        ({"dynamic": {"nodes": 9, "width": 21}}, "these heads fill 9 nodes, depth 6, width 20: ask for that"),
    ],
    ids=["static", "dynamic"],
)
def test_a_tree_wider_than_the_tokens_that_the_heads_choose_among_is_refused(tree, line, monkeypatch):
    family = next(family for family in FAMILIES if family.name == "eagle3")
    model = family.build(shared_base("llama"), draft_vocab_size=20)
    calls = []
    monkeypatch.setattr(type(model.base), "generate", lambda *args, **kwargs: calls.append(1))
    with pytest.raises(ValueError, match=line) as refused:
        model.generate(**prompt(), max_new_tokens=3, draft_tree=tree)
    assert "\n" not in str(refused.value) and not calls
    monkeypatch.undo()
    for fitting in ([[0], [19], [0, 19]], {"dynamic": {"nodes": 9, "width": 20}}):
        text = model.generate(**prompt(), max_new_tokens=9, draft_tree=fitting)
        assert torch.equal(text, model.base.generate(**prompt(), max_new_tokens=9))


@pytest.mark.parametrize("name", ["posterior_threshold", "posterior_alpha"])
def test_a_threshold_that_nothing_reads_is_refused(name, model):
    text = rf"^{name} is 0.2, but acceptance is 'exact': pass acceptance='typical', or leave {name} out\.$"
    with pytest.raises(ValueError, match=text):
        model.generate(**prompt(), max_new_tokens=3, acceptance="exact", **{name: 0.2})


@pytest.mark.parametrize("call", [{"inputs": EMPTY}, {"input_ids": EMPTY}, {"input_ids": EMPTY.expand(3, 0)}], ids=str)
def test_an_empty_prompt_is_refused(call, model):
    text = r"^the prompt is empty \(0 tokens\): give at least one token, such as the beginning of text\.$"
    with pytest.raises(ValueError, match=text):
        model.generate(**call, max_new_tokens=3)


def test_embeddings_beside_an_empty_prompt_are_no_empty_prompt(model):
    with torch.no_grad():
        embeddings = model.get_input_embeddings()(prompt()["input_ids"])
    call = {"inputs_embeds": embeddings, "max_new_tokens": 3}
    assert torch.equal(model.generate(input_ids=EMPTY, **call), model.base.generate(**call))


COPIED = {
    "no copies": ({"prompt_lookup_num_tokens": 0}, "prompt_lookup_num_tokens is 0: expected a whole number"),
    "half a copy": ({"prompt_lookup_num_tokens": 2.5}, "prompt_lookup_num_tokens is 2.5: expected a whole number"),
    "no match": ({"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": -1}, "max_matching_ngram_size is -1"),
    "copies alone": ({"draft_tree": "lookup"}, "give prompt_lookup_num_tokens, or lookup_texts, too"),
    "nothing": ({"draft_tree": []}, "give prompt_lookup_num_tokens, or lookup_texts, too"),
    "nothing in a tuple": ({"draft_tree": ()}, "give prompt_lookup_num_tokens, or lookup_texts, too"),
    "one text": (
        {"lookup_texts": "a text"},
        "lookup_texts is of type str: expected a list of texts, or of their token",
    ),
    "a number": ({"lookup_texts": 3}, "lookup_texts is of type int: expected a list of texts"),
    "strings": (
        {"lookup_texts": ["a text"]},
        "lookup_texts holds strings, but no tokenizer was given: pass tokenizer=",
    ),
    "text of text": ({"lookup_texts": [[3, "4"]]}, r"a text of lookup_texts is \[3, '4'\]: expected a list of"),
    "no token": (
        {"lookup_texts": [[3, -4]]},
        r"a text of lookup_texts is \[3, -4\]: expected a list of token ids.",
    ),
    "a flat list": (
        {"lookup_texts": torch.tensor([3, 4])},
        r"a text of lookup_texts is tensor\(3\): expected a list of",
    ),
}


@pytest.mark.parametrize("settings, text", COPIED.values(), ids=COPIED)
def test_copies_that_cannot_be_are_refused_in_one_line(settings, text, model):
    with pytest.raises((TypeError, ValueError), match=text) as refused:
        model.generate(**prompt(), max_new_tokens=4, **settings)
    assert "\n" not in str(refused.value)


def test_settings_are_checked_before_a_fallback_too(model):
    with pytest.raises(ValueError, match="acceptance is 'lossy'"):
        model.generate(**prompt(), max_new_tokens=3, num_beams=2, acceptance="lossy")


@pytest.mark.parametrize("name", ["copies", "chooses", "reader", "settled", "generator"])
def test_what_is_no_argument_of_generate_is_refused_as_by_the_base(name):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    for one in (model.base, model):
        with pytest.raises(ValueError, match=f"not used by the model.*'{name}'"):
            one.generate(**prompt(), max_new_tokens=4, **{name: 2})
