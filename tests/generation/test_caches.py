"""Caches in and out: a call goes on from any ordinary cache, and leaves one from which anything can go on."""

import copy

import pytest
import torch
from transformers import CompileConfig, DynamicCache

from hf_drafthead.bases.releases import CACHE
from hf_drafthead.bases.slots import SlotCache
from tests.drafters import half_right, right
from tests.families import FAMILIES
from tests.generation.agreement import TREE, Agreement, agree, prompt, shared_base

KINDS = ["llama-gqa", "mistral-sliding", "gemma2", "gemma4-sharing", "gemma3n-sharing"]


def base_of(kind: str):
    """gemma2 caps its attention under eager alone; some versions of transformers would choose another for it."""
    return shared_base(kind, attn_implementation="eager" if kind == "gemma2" else "sdpa")


every_kind = pytest.mark.parametrize("kind", KINDS)
histories = pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])


def same_cache(one, other, visible: torch.Tensor | None = None, tolerance: float = 1e-5) -> None:
    """Keys and values agree at all positions, or at those that `visible` (B, T) says hold no padding of the prompt."""
    assert type(one) is type(other) and len(one.layers) == len(other.layers)
    assert one.get_seq_length() == other.get_seq_length()
    for mine, theirs in zip(one.layers, other.layers):
        assert type(mine) is type(theirs)
        if theirs.keys is None:  # of a layer that reads another one's
            assert mine.keys is None
            continue
        assert mine.keys.shape == theirs.keys.shape
        seen = slice(None) if visible is None else visible[:, -mine.keys.shape[-2] :]
        for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            torch.testing.assert_close(a.transpose(1, 2)[seen], b.transpose(1, 2)[seen], rtol=0, atol=tolerance)


def behind_the_padding(found: Agreement, inputs) -> torch.Tensor:
    """(B, T) the positions from each row's first token on: what the base reads behind the end of a row as well."""
    visible = torch.ones_like(found.got.sequences, dtype=torch.bool)
    visible[:, :9] = inputs["attention_mask"].bool()
    return visible[:, :-1]


@every_kind
@pytest.mark.parametrize("guess", [right, half_right], ids=["right", "half-right"])
@pytest.mark.parametrize("new_tokens", [1, 2, 12, 25])
def test_the_cache_that_is_returned_is_the_base_s(new_tokens, guess, kind):
    found = agree(base_of(kind), guess=guess, call={"max_new_tokens": new_tokens, "eos_token_id": None})
    same_cache(found.got[CACHE], found.expected[CACHE])
    assert found.got[CACHE].get_seq_length() == 9 + new_tokens - 1


@pytest.mark.parametrize("eos", [None, [2, 51]], ids=["all to the end", "some end before"])
def test_the_cache_of_a_batch_is_the_base_s(eos):
    inputs = prompt(4)
    found = agree(inputs=inputs, call={"max_new_tokens": 20, "eos_token_id": eos})
    assert (len(set(found.new_tokens)) > 1) == (eos is not None)
    mine, theirs = found.got[CACHE], found.expected[CACHE]
    same_cache(mine, theirs, behind_the_padding(found, inputs))


@pytest.mark.parametrize("fixed", [{}, {"compile_config": CompileConfig()}], ids=["growing", "of fixed shapes"])
def test_what_stands_behind_a_row_s_end_is_read_where_others_go_on(fixed, untraced):
    base, inputs = shared_base("llama-gqa"), prompt(2)
    text = base.generate(**inputs, max_new_tokens=12, eos_token_id=None)[:, 9:]
    # the second row has three tokens more than the first, which are its own in the last step
    first, second = text.tolist()
    end = next(at for at in range(3, 9) if first[at] not in first[:at] and first[at] not in second)
    eos = first[end]

    def guess(row, position):
        return 0 if row and position - int(inputs["attention_mask"][row].sum()) >= end else None

    call = {"max_new_tokens": end + 4, "eos_token_id": eos}
    found = agree(base, inputs, guess, call=call, settings=fixed)
    assert found.new_tokens == [end + 1, end + 4] and found.got.accepted_lengths[0, -1] > 0
    mine, theirs = found.got[CACHE], found.expected[CACHE]
    same_cache(mine, theirs, behind_the_padding(found, inputs))


def first_part(base, seed: int = 0, rows: int = 1):
    """A text of the base and the cache of all but its last token."""
    out = base.generate(**prompt(rows, seed=seed), max_new_tokens=8, eos_token_id=None, return_dict_in_generate=True)
    return out.sequences, out[CACHE]


def from_a_forward(base):
    tokens = prompt(longest=16)["input_ids"]
    cache = DynamicCache(config=base.config)
    with torch.no_grad():
        base(tokens[:, :-3], **{CACHE: cache}, use_cache=True)
    return tokens, cache


def from_a_call_of_the_base(base):
    text, cache = first_part(base)
    return torch.cat([text, torch.tensor([[7, 30]])], dim=1), cache


def from_a_call_of_the_model(base):
    found = agree(base, call={"max_new_tokens": 8, "eos_token_id": None})
    return torch.cat([found.got.sequences, torch.tensor([[7, 30]])], dim=1), found.got[CACHE]


def from_the_text_alone(base):
    return first_part(base)


def from_nothing(base):
    return prompt()["input_ids"], DynamicCache()


SOURCES = [from_a_forward, from_a_call_of_the_base, from_a_call_of_the_model, from_the_text_alone, from_nothing]
every_source = pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)


@every_kind
@every_source
@histories
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_going_on_from_a_cache_with_the_whole_text(choice, keeps_history, source, kind):
    base = base_of(kind)
    tokens, cache = source(base)
    known = cache.get_seq_length()
    found = agree(
        base,
        {"input_ids": tokens},
        call=lambda: {CACHE: copy.deepcopy(cache), "max_new_tokens": 20, "eos_token_id": None, **choice},
        draft={"keeps_history": keeps_history},
    )
    assert found.forwards[0] == tokens.shape[1] - known
    assert found.oracle.states[0].seen[0][0] == (known if keeps_history else tokens.shape[1] - 1)
    same_cache(found.got[CACHE], found.expected[CACHE])


@every_kind
@every_source
def test_going_on_from_a_cache_with_the_new_text_alone(source, kind):
    base = base_of(kind)
    tokens, cache = source(base)
    known = cache.get_seq_length()
    found = agree(
        base,
        {"input_ids": tokens[:, known:], "attention_mask": torch.ones_like(tokens)},
        call=lambda: {CACHE: copy.deepcopy(cache), "max_new_tokens": 20, "eos_token_id": None},
        texts=lambda sequences: [tokens[0, :known].tolist() + sequences[0].tolist()],
        new_tokens=lambda sequences: [20],
    )
    assert found.forwards[0] == tokens.shape[1] - known
    same_cache(found.got[CACHE], found.expected[CACHE])


def test_going_on_from_a_cache_of_a_padded_batch():
    base, inputs = shared_base("llama-gqa"), prompt(3)
    text, cache = first_part(base, rows=3)
    longer = {
        "input_ids": torch.cat([text, torch.tensor([[5], [6], [7]])], dim=1),
        "attention_mask": torch.cat([inputs["attention_mask"], torch.ones(3, 9, dtype=torch.long)], dim=1),
    }
    agree(base, longer, call=lambda: {CACHE: copy.deepcopy(cache), "max_new_tokens": 15})


@every_kind
@pytest.mark.parametrize("fixed", [{}, {"compile_config": CompileConfig()}], ids=["growing", "of fixed shapes"])
def test_going_on_behind_the_padding_of_a_row_that_ended_early(fixed, kind, untraced):
    base, inputs = base_of(kind), {"input_ids": prompt()["input_ids"].repeat(2, 1)}
    inputs["input_ids"][1] = prompt(seed=1)["input_ids"]
    first, second = base.generate(**inputs, max_new_tokens=14, eos_token_id=None)[:, 9:].tolist()
    eos = next(token for token in first[:10] if token not in second)
    found = agree(base, inputs, call={"max_new_tokens": 14, "eos_token_id": eos}, settings=fixed)
    assert found.new_tokens[0] < found.new_tokens[1]
    text = torch.cat([found.got.sequences, torch.tensor([[7], [30]])], dim=1)  # all of it is seen, padding too
    longer = {"input_ids": text, "attention_mask": torch.ones_like(text)}
    expected = base.generate(**longer, **{CACHE: found.expected[CACHE]}, max_new_tokens=12)
    model = FAMILIES[0].build(base)
    got = model.generate(**longer, **{CACHE: found.got[CACHE]}, max_new_tokens=12, draft_tree=TREE)
    assert torch.equal(got, expected)


@every_kind
def test_going_on_from_embeddings_and_a_cache(kind):
    base = base_of(kind)
    tokens, cache = from_a_forward(base)
    with torch.no_grad():
        embeddings = base.get_input_embeddings()(tokens)
    agree(
        base,
        {"inputs_embeds": embeddings},
        call=lambda: {CACHE: copy.deepcopy(cache), "max_new_tokens": 14, "eos_token_id": None},
        texts=lambda sequences: [tokens[0].tolist() + sequences[0].tolist()],
    )


@every_kind
@pytest.mark.parametrize("in_dict", [True, False], ids=["dict", "tokens"])
def test_the_user_s_own_cache_is_brought_up_to_date_in_place(in_dict, kind):
    base = base_of(kind)
    text, cache = first_part(base)
    mine, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
    call = {"input_ids": text, "max_new_tokens": 13, "eos_token_id": None, "return_dict_in_generate": in_dict}
    expected = base.generate(**call, **{CACHE: theirs})
    model = FAMILIES[0].build(base)
    got = model.generate(**call, **{CACHE: mine}, draft_tree=TREE)
    if in_dict:
        assert got[CACHE] is mine
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected)
    same_cache(mine, theirs)


def test_no_cache_is_filled_that_nobody_will_see(monkeypatch):
    base = shared_base("llama-gqa")
    model = FAMILIES[0].build(base)
    monkeypatch.setattr(SlotCache, "unload", lambda *a: pytest.fail("the cache was copied for nothing"))
    model.generate(**prompt(), max_new_tokens=5, draft_tree=TREE)
