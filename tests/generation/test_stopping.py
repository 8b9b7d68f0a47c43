"""Exact with every stopping criterion: a row ends at the first token on which one fires, wherever that is in a step."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from tests.drafters import half_right, right
from tests.generation.agreement import DEPTH, PAD, agree, prompt, shared_base

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"
guesses = pytest.mark.parametrize("guess", [right, half_right], ids=["right", "half-right"])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter, as many as the tiny bases know."""
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<s>", "</s>", *LETTERS])}
    letters = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=letters, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def free_text(rows: int = 1, new_tokens: int = 24) -> torch.Tensor:
    """What the base would say if nothing ended its text: new tokens only."""
    return shared_base("llama-gqa").generate(**prompt(rows), max_new_tokens=new_tokens, eos_token_id=None)[:, 9:]


def first_place(tokens: list[int], wanted: set[int]) -> int:
    return next((place + 1 for place, token in enumerate(tokens) if token in wanted), len(tokens))


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("rows", [1, 3])
def test_max_new_tokens(rows, new_tokens):
    found = agree(inputs=prompt(rows), guess=right, call={"max_new_tokens": new_tokens})
    assert max(found.new_tokens) == new_tokens
    assert found.got.accepted_lengths.shape == (rows, -(-(new_tokens - 1) // (DEPTH + 1)))


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")
@pytest.mark.parametrize(
    "length, most",
    [
        *(({"max_length": length}, length - 9) for length in (10, 11, 13, 20)),
        ({}, 20),
        ({"max_new_tokens": 40, "eos_token_id": None}, 40),
        ({"max_new_tokens": 20, "max_time": 1e-9}, 1),  # which is up at once
        ({"max_new_tokens": 20, "max_time": 1e6}, 20),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 2])
def test_other_lengths(rows, length, most):
    assert agree(inputs=prompt(rows), guess=right, call=length).new_tokens[0] == most


@guesses
@pytest.mark.parametrize("place", range(1, 11))
def test_an_end_of_text_at_every_place_of_a_step(place, guess):
    text = free_text()[0].tolist()
    end = first_place(text, {text[place - 1]})
    found = agree(guess=guess, call={"max_new_tokens": 24, "eos_token_id": text[place - 1]})
    assert found.new_tokens == [end]


@guesses
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}, {"repetition_penalty": 1.1}], ids=str)
def test_several_ends_of_text_in_a_batch(choice, guess):
    ends = free_text(4)[[0, 1, 2], [11, 4, 7]].tolist()
    found = agree(inputs=prompt(4), guess=guess, call={"max_new_tokens": 24, "eos_token_id": ends, **choice})
    assert len(set(found.new_tokens)) > 1
    for row, own in zip(found.got.sequences, found.new_tokens):
        assert (row[9 + own :] == PAD).all()


def test_padding_is_the_end_of_text_where_there_is_none():
    base = shared_base("llama-gqa", pad_token_id=None)
    end = int(free_text(3)[0, 5])
    found = agree(base, prompt(3), call={"max_new_tokens": 16, "eos_token_id": end})
    assert (found.got.sequences[0, 9 + found.new_tokens[0] :] == end).all()


@guesses
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_stop_strings(tokenizer, rows, choice, guess):
    base, inputs = shared_base("llama-gqa"), prompt(rows)
    torch.manual_seed(5)
    call = {"max_new_tokens": 24, "suppress_tokens": [0, 1, 2], **choice}  # letters alone
    text = [tokenizer.decode(row) for row in base.generate(**inputs, **call)[:, 9:]]
    stops = [text[0][6:9], text[-1][3:5]]

    def new_tokens(sequences):
        new = [tokenizer.decode(row[9:][row[9:] != PAD]) for row in sequences]
        return [len(row) for row in new]

    def texts(sequences):
        starts = (9 - inputs["attention_mask"].sum(1)).tolist()
        rows = zip(sequences, starts, new_tokens(sequences))
        return [row[start : 9 + own].tolist() for row, start, own in rows]

    call |= {"stop_strings": stops, "tokenizer": tokenizer}
    found = agree(base, inputs, guess, call=call, new_tokens=new_tokens, texts=texts)
    assert found.new_tokens[-1] == 5
    for row, own in zip(found.got.sequences, found.new_tokens):
        ended = tokenizer.decode(row[9 : 9 + own])
        assert own == 24 or any(stop in ended for stop in stops)
        assert not any(stop in ended[:-1] for stop in stops)


def test_stop_strings_that_the_caller_s_own_criterion_replaces_as_on_the_base(tokenizer):
    base, text = shared_base("llama-gqa"), tokenizer.decode(free_text()[0])
    own = StoppingCriteriaList([StopStringCriteria(tokenizer, [text[11:13]])])
    call = {"max_new_tokens": 20, "tokenizer": tokenizer, "stop_strings": [text[3:5]], "stopping_criteria": own}
    found = agree(base, call=call, new_tokens=lambda sequences: [sequences.shape[1] - 9])
    assert found.new_tokens[0] > 5


class OnToken(StoppingCriteria):
    """Fires for a row whose newest token is one of some; notes what it is shown."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(sorted(tokens))
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.isin(input_ids[:, -1], self.tokens)


@guesses
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("eos", [None, 2], ids=["rows go on", "rows are padded"])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}, {"output_scores": True}], ids=str)
def test_a_criterion_of_the_user_s_own(choice, eos, rows, guess):
    stops = set(free_text(4)[[0, 1, 2, 3], [9, 3, 6, 14]].tolist())
    made = []

    def call():
        made.append(OnToken(stops))
        criteria = StoppingCriteriaList([made[-1]])
        return {"stopping_criteria": criteria, "max_new_tokens": 24, "eos_token_id": eos, **choice}

    def new_tokens(sequences):
        return [first_place(row, stops | {eos}) for row in sequences[:, 9:].tolist()]

    found = agree(inputs=prompt(rows), guess=guess, call=call, new_tokens=new_tokens)
    assert made[1].calls == made[0].calls
    assert len(made[1].calls) == max(found.new_tokens)


class AfterCalls(StoppingCriteria):
    """Fires for all rows at its n-th call."""

    def __init__(self, calls):
        self.left = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        return torch.full((input_ids.shape[0],), self.left == 0)


@guesses
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("calls", [1, 2, 7])
def test_a_criterion_that_counts_its_calls(calls, rows, guess):
    def call():
        return {
            "stopping_criteria": StoppingCriteriaList([AfterCalls(calls)]),
            "max_new_tokens": 20,
            "eos_token_id": None,
        }

    assert agree(inputs=prompt(rows), guess=guess, call=call).new_tokens == [calls] * rows


@pytest.mark.parametrize("max_length", [4, 10, 15])
def test_a_length_criterion_of_the_user_s_own(max_length):
    def call():
        return {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length)]), "max_new_tokens": 20}

    found = agree(inputs=prompt(2), call=call)
    assert found.new_tokens == [max(max_length - 9, 1)] * 2


@pytest.mark.parametrize("length", [{"max_new_tokens": 6.5}, {"max_new_tokens": 6.0}, {"max_length": 20.0}], ids=str)
def test_lengths_that_are_no_whole_numbers(length):
    agree(inputs=prompt(2), call={**length, "eos_token_id": None})


@pytest.mark.parametrize("padding", [-1, 10**6])
def test_padding_that_no_row_needs_may_be_no_token(padding):
    never = next(token for token in range(3, 60) if not free_text(3).eq(token).any())
    call = {"max_new_tokens": 20, "eos_token_id": never, "pad_token_id": padding}
    agree(inputs=prompt(3), guess=lambda row, position: 0 if row else None, call=call)  # some are done before the first
