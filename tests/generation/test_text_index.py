"""Guesses copied from other texts than the row's own: those that the user names, and what was answered before."""

import threading

import pytest
import torch

from hf_drafthead.generation import lookup
from hf_drafthead.generation.lookup import TextIndex, places_in
from tests.bases import VOCABULARY
from tests.checkpoints import byte_tokenizer
from tests.families import FAMILIES
from tests.generation import test_recorded
from tests.generation.agreement import prompt, shared_base

CPU = torch.device("cpu")
RUNNERS = {"eager": {}, "recorded": {}, "captured": {"cache_implementation": "static"}}
recordings = test_recorded.recordings  # where there are graphs


def random_texts(count, longest=40, seed=0, tokens=VOCABULARY):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, tokens, (length,), generator=generator).tolist() for length in lengths]


def all_found(index, row, count=5, vocabulary=VOCABULARY):
    """What an index suggests behind a text, with how many of its last tokens agree, of each place."""
    padded = torch.tensor([[*row, 0, 0], [*row, 7, 7]])
    tokens, agreed = places_in(index.on(CPU), padded, torch.tensor([len(row)] * 2), count, vocabulary)
    places = [sorted(zip(*part)) for part in zip(agreed.tolist(), tokens.tolist())]
    assert places[0] == places[1], "what lies behind a row's end counts"
    return [(agreed, tokens) for agreed, tokens in places[0] if agreed]


def found(index, row, count=5, vocabulary=VOCABULARY):
    """What follows where the most tokens agree, and how many do."""
    agreed, tokens = max(all_found(index, row, count, vocabulary), default=(0, [-1] * count))
    return tokens, agreed


def searched(texts, row, count=5):
    """The same by search: the latest eight places of the last four tokens, and of the last two."""
    ends = {}
    for size in (4, 2):
        ending = [
            (number, end)
            for number, text in enumerate(texts if len(row) >= size else [])
            for end in range(size, len(text))
            if text[end - size : end] == row[-size:]
        ]
        ends |= dict.fromkeys(ending[-8:])
    places = []
    for number, end in ends:
        text, agreed = texts[number], 0
        while agreed < min(8, end, len(row)) and text[end - 1 - agreed] == row[-1 - agreed]:
            agreed += 1
        places.append((agreed, text[end : end + count]))
    return sorted(places)


def test_what_is_found_is_what_a_search_finds():
    texts = random_texts(60, tokens=12)
    index, sizes = TextIndex(texts, capacity=1 << 17), []
    for row in random_texts(300, longest=12, seed=1, tokens=12):
        expected = searched(texts, row)
        places = [(agreed, [*tokens, -1][: [*tokens, -1].index(-1)]) for agreed, tokens in all_found(index, row)]
        assert sorted(places) == expected
        sizes.append(len(expected))
    assert min(sizes) == 0 and sizes.count(8) > 9 and max(sizes) > 8


def test_texts_whose_hashes_are_equal_are_not_taken_for_each_other(monkeypatch):
    monkeypatch.setattr(lookup, "hash_of", lambda grams, size: torch.zeros_like(grams[:, 0]))
    index = TextIndex([[3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]])
    assert found(index, [3, 4, 5])[0][:3] == [6, 7, -1] and found(index, [3, 5]) == ([-1] * 5, 0)
    assert found(index, [1, 9, 10, 11, 12])[0][0] == 13


def test_tokens_that_the_base_does_not_have_are_not_guessed():
    index = TextIndex([[3, 4, 5, 1 << 30, 6]])
    assert found(index, [3, 4], vocabulary=10) == ([5, -1, 6, -1, -1], 2)
    assert found(index, [4, 1 << 40], vocabulary=10) == ([-1] * 5, 0)


def test_memory_is_bounded_and_named_texts_stay():
    named = [text for text in random_texts(9, seed=5) if len(text) > 12]
    others = random_texts(2000, seed=6)
    index = TextIndex(named, capacity=600)
    parts = index.on(CPU)
    for text in others:
        index.put(text)
    index.put(list(range(1000)))  # of which the end fits
    assert [part.data_ptr() for part in parts] == [part.data_ptr() for part in index.on(CPU)]
    assert [tuple(part.shape) for part in parts] == [(600,), (2, 1201), (2, 600)]
    assert found(index, [997, 998], vocabulary=1000)[0][0] == 999 and found(index, [1, 2], vocabulary=1000)[1] == 0
    for text in named:
        assert found(index, text[:6])[0] == text[6:11]
    newest = [3 + number * 7 % 60 for number in range(37)]
    index.put(newest)
    assert found(index, newest[:6])[0] == newest[6:11]


def check(model, texts, how, tree=None, **more):
    """A call's text with texts to copy from is the base's; returns its steps."""
    generator = torch.Generator().manual_seed(2)
    call = {"input_ids": torch.randint(3, VOCABULARY, (3, 6), generator=generator), "max_new_tokens": 24}
    call |= {"eos_token_id": None, "pad_token_id": 0, **more}
    torch.manual_seed(3)
    expected = model.base.generate(**call)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    named = texts(expected) if callable(texts) else texts
    tree = tree or [[0], [1], [2], [0, 0], [1, 0], [2, 0], [3]]
    output = model.generate(**call, **how, draft_tree=tree, lookup_texts=named, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected) and torch.equal(torch.get_rng_state(), state)
    return output.accepted_lengths.shape[1]


TEXTS = {
    "nothing": lambda expected: [],
    "others": lambda expected: random_texts(50),
    "numbers of no token": lambda expected: [[1 << 30, 3, 1 << 30] * 9],
    "the answers": lambda expected: expected,
    "the answers with errors": lambda expected: (expected + (torch.arange(expected.shape[1]) % 5 == 0)).tolist(),
}


@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("texts", TEXTS)
@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[-1]], ids=lambda family: family.name)
def test_the_text_is_the_base_s_with_any_texts(family, texts, sampling):
    check(family.build(shared_base("llama-gqa")), TEXTS[texts], {}, **sampling)


@pytest.mark.parametrize("how", RUNNERS)
@pytest.mark.parametrize("tree", [None, "lookup", {"dynamic": {"nodes": 8, "depth": 2, "width": 3}}], ids=str)
def test_an_answer_that_is_named_takes_few_steps(tree, how, request, monkeypatch):
    """Also where the steps were recorded with other texts."""
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    recorded = request.getfixturevalue("recordings") if how == "recorded" else []
    if how == "captured":
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    plain = [check(model, random_texts(9, seed=seed), RUNNERS[how], tree) for seed in (8, 9)]
    made = len(recorded)
    steps = check(model, lambda expected: expected, RUNNERS[how], tree)
    assert steps <= 8 < 16 < min(plain)
    assert len(recorded) <= made + 1 and (how != "recorded" or made)  # a call that compares may record a stage anew


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad], ids=["inference mode", "no grad"])
def test_an_index_of_a_call_that_needs_no_gradients_is_one_of_every_call(inside):
    model, base = FAMILIES[0].build(shared_base("llama-gqa")), shared_base("llama-gqa")
    expected = base.generate(**prompt(2), max_new_tokens=9)
    with inside():
        index = TextIndex(expected.tolist())
        texts = [
            model.generate(**prompt(2), max_new_tokens=9, lookup_texts=each) for each in (index, expected.tolist())
        ]
    index.put([5, 6, 7, 8])
    texts.append(model.generate(**prompt(2), max_new_tokens=9, lookup_texts=index))
    assert all(torch.equal(text, expected) for text in texts)


def test_strings_are_read_with_the_tokenizer():
    tokenizer = byte_tokenizer()
    index = TextIndex.of(["abcdefgh"], tokenizer)
    ids = tokenizer("abcdefgh", add_special_tokens=False)["input_ids"]
    assert found(index, ids[:3], vocabulary=1 << 20)[0] == ids[3:8]
    assert TextIndex.of(index) is index and TextIndex.of(None) is None and TextIndex.of(torch.tensor([[3, 4, 5]]))


def test_other_threads_put_texts_while_steps_read_them():
    model, index = FAMILIES[0].build(shared_base("llama-gqa")), TextIndex(capacity=300)
    ended, failures = threading.Event(), []

    def put(seed):
        texts = random_texts(50, seed=seed)
        while not ended.is_set():
            for text in texts:
                index.put(text)

    def ask():
        try:
            for _ in range(4):
                call = {"input_ids": torch.tensor([[3, 4, 5, 3, 4]]), "max_new_tokens": 24, "eos_token_id": None}
                assert torch.equal(model.generate(**call, lookup_texts=index), expected)
        except BaseException as error:
            failures.append(error)

    expected = model.base.generate(torch.tensor([[3, 4, 5, 3, 4]]), max_new_tokens=24, eos_token_id=None)
    threads = [threading.Thread(target=put, args=(seed,)) for seed in range(2)]
    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads + asking:
        thread.start()
    for thread in asking:
        thread.join()
    ended.set()
    for thread in threads:
        thread.join()
    assert failures == []


def test_texts_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="the texts have 11 tokens with one behind each, and the index holds 10: give"):
        TextIndex([[3, 4, 5, 6], [3, 4, 5, 6, 7]], capacity=10)
