"""Exact with every form of prompt that the base takes, and up to the last position that it has."""

import pytest
import torch

from tests.bases import VOCABULARY, tiny_base
from tests.drafters import half_right, right
from tests.families import FAMILIES
from tests.generation.agreement import DEPTH, EOS, TREE, agree, own_lengths, prompt, shared_base


def embedded(base, inputs):
    """The prompt as embeddings, with its mask."""
    with torch.no_grad():
        embeddings = base.get_input_embeddings()(inputs["input_ids"])
    return {"inputs_embeds": embeddings, "attention_mask": inputs["attention_mask"]}


def texts_behind(inputs, rows_given: int = 0):
    """The rows' texts where `sequences` begins after the prompt (its first `rows_given` tokens apart)."""

    def texts(sequences):
        own = own_lengths(sequences, rows_given, [EOS])
        rows = zip(inputs["input_ids"], inputs["attention_mask"].bool(), sequences, own)
        return [row[mask].tolist() + new[rows_given : rows_given + n].tolist() for row, mask, new, n in rows]

    return texts


ODD_MASKS = {
    "holes": [[1, 1, 0, 1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 1, 1, 1, 1, 0, 1]],
    "padding on the right": [[1] * 9, [1] * 5 + [0] * 4, [1] * 7 + [0] * 2],
    "nothing but padding": [[1] * 9, [0] * 9, [0] * 4 + [1] * 5],
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("kind", [torch.long, torch.int, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("mask", ODD_MASKS.values(), ids=ODD_MASKS)
def test_an_odd_attention_mask(mask, kind, family):
    base = shared_base("llama-gqa")
    inputs = {"input_ids": prompt(3)["input_ids"], "attention_mask": torch.tensor(mask).to(kind)}
    expected = base.generate(**inputs, max_new_tokens=10)
    got = family.build(base).generate(**inputs, max_new_tokens=10, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and got.accepted_lengths is not None


@pytest.mark.parametrize("rows", [1, 3])
def test_token_ids_of_a_smaller_type(rows):
    inputs = {**prompt(rows), "input_ids": prompt(rows)["input_ids"].int()}
    found = agree(inputs=inputs, call={"max_new_tokens": 9})
    assert found.got.sequences.dtype == found.expected.sequences.dtype


@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_a_single_token(choice):
    agree(inputs={"input_ids": torch.tensor([[33]])}, call={"max_new_tokens": 20, **choice})
    agree(inputs={"input_ids": torch.tensor([[33], [4], [9]])}, call={"max_new_tokens": 20, **choice})


def test_no_prompt_at_all():
    found = agree(
        inputs={}, call={"max_new_tokens": 12}, new_tokens=lambda s: [12], texts=lambda s: [row.tolist() for row in s]
    )
    assert found.got.sequences[0, 0] == 1


def test_padding_that_is_told_by_its_token_alone():
    inputs = prompt(4, attention_mask=False)
    mask = prompt(4)["attention_mask"]

    def texts(sequences):
        own = own_lengths(sequences, 9, [EOS])
        return [row[9 - seen : 9 + n].tolist() for row, seen, n in zip(sequences, mask.sum(1).tolist(), own)]

    alone = agree(inputs=inputs, call={"max_new_tokens": 16}, texts=texts)
    assert torch.equal(alone.got.sequences, agree(inputs=prompt(4), call={"max_new_tokens": 16}).got.sequences)


def test_position_ids_of_the_user_s_own():
    base, inputs = shared_base("llama-gqa"), prompt(3)
    mask = inputs["attention_mask"]
    inputs["position_ids"] = (mask.cumsum(1) - 1 + 5).masked_fill(mask == 0, 0)
    # rotary attention looks at differences alone: but for rounding, the hidden states are those of a text from 0 on
    agree(base, inputs, call={"max_new_tokens": 14}, tolerance=1e-5)


def test_position_ids_with_gaps():
    base = shared_base("llama-gqa")
    gaps = {"input_ids": prompt()["input_ids"], "position_ids": torch.tensor([[0, 1, 2, 5, 6, 7, 11, 12, 20]])}
    expected = base.generate(**gaps, max_new_tokens=14)
    assert not torch.equal(expected, base.generate(**prompt(), max_new_tokens=14))
    model = FAMILIES[0].build(base)
    got = model.generate(**gaps, max_new_tokens=14, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and got.accepted_lengths is not None


@pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty` with `inputs_embeds`")
def test_embeddings(choice, rows, keeps_history):
    base, inputs = shared_base("llama-gqa"), prompt(rows)
    found = agree(
        base,
        embedded(base, inputs),
        call={"max_new_tokens": 18, **choice},
        texts=texts_behind(inputs),
        draft={"keeps_history": keeps_history},
    )
    # what came before the first position that can be seen is unknown to the drafter
    assert found.oracle.states[0].seen[0][0] == 8
    assert found.got.sequences.shape[1] <= 18


@pytest.mark.parametrize("rows", [1, 3])
def test_embeddings_beside_token_ids(rows):
    base, inputs = shared_base("llama-gqa"), prompt(rows)
    both = {**embedded(base, inputs), "input_ids": inputs["input_ids"]}
    found = agree(base, both, call={"max_new_tokens": 14})
    assert found.got.sequences.shape[1] <= 9 + 14


@pytest.mark.parametrize("chunk", [1, 4, 9, 50])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keeps_history", [False, True], ids=["last position", "all positions"])
def test_a_prompt_in_chunks(keeps_history, rows, chunk):
    chunks = -(-9 // chunk)
    agree(
        inputs=prompt(rows),
        call={"max_new_tokens": 14, "prefill_chunk_size": chunk},
        draft={"keeps_history": keeps_history},
        other_forwards=lambda own: chunks,
    )


@pytest.mark.parametrize("guess", [right, half_right], ids=["right", "half-right"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("new_tokens", [1, 5, 6, 7, 8])
def test_learned_positions_up_to_the_last(new_tokens, rows, guess):
    base = shared_base("gpt2", max_position_embeddings=20 + new_tokens)
    inputs = prompt(rows, longest=20)
    found = agree(base, inputs, guess, call={"max_new_tokens": new_tokens, "eos_token_id": None})
    assert found.got.sequences.shape[1] == base.config.n_positions
    # the last token is never read, so one more than there are positions can be had
    agree(base, inputs, guess, call={"max_new_tokens": new_tokens + 1, "eos_token_id": None})


@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("first_room", [1, 3, 10])
def test_a_text_that_outgrows_the_memory_taken_at_first(first_room, rows, choice, monkeypatch):
    monkeypatch.setattr("hf_drafthead.generation.entry.FIRST_ROOM", first_room)
    found = agree(inputs=prompt(rows), call={"max_new_tokens": 70, "eos_token_id": None, **choice})
    assert max(found.new_tokens) == 70


@pytest.mark.parametrize("kind", ["mistral-sliding", "gemma2"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_prompt_longer_than_the_window(rows, kind):
    base = shared_base(kind)
    inputs = prompt(rows, longest=21, seed=4)
    if kind == "gemma2":  # eager attention and padding in float64 give NaN in transformers itself
        inputs = {"input_ids": torch.randint(3, VOCABULARY, (rows, 21), generator=torch.Generator().manual_seed(0))}
    agree(base, inputs, call={"max_new_tokens": 30, "eos_token_id": None}, tolerance=1e-5)


def test_rotary_frequencies_that_change_with_the_length():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    base = tiny_base("llama", rope_parameters=scaling, max_position_embeddings=40)
    agree(base, call={"max_new_tokens": 40 - 9 - DEPTH})
