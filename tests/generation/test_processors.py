"""Exact with every logits processor: each sees exactly the row's own prefix, as it would in the base's generate."""

import pytest
import torch
from transformers import (
    CompileConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from tests.bases import VOCABULARY
from tests.drafters import right
from tests.generation.agreement import TREE, agree, prompt, shared_base

ENDS = [2, 40, 51, 7]  # more tokens that end a text, so that the rows of a batch end at different places
SAMPLED = {
    "temperature": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "top_h": {"top_h": 0.4},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.3},
    "epsilon_cutoff": {"epsilon_cutoff": 0.05},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "all at once": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}
ANY = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[6], [15, 61], [34], [42, 12], [56], [57]]},
    "sequence_bias": {"sequence_bias": {(6,): -8.0, (22,): 3.0, (17, 57): -6.0, (61, 10): 4.0}},
    "min_new_tokens": {"min_new_tokens": 12},
    "min_length": {"min_length": 20},
    "forced_eos_token_id": {"forced_eos_token_id": 2},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.6)},
    "suppress_tokens": {"suppress_tokens": [6, 10, 17, 34]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [56, 17, 11, 35]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 0.3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "guidance_scale": {"guidance_scale": 2.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
}
CHANGE_NOTHING = {"remove_invalid_values", "renormalize_logits"}
CASES = [(name, {"do_sample": True, **call}) for name, call in SAMPLED.items()]
CASES += list(ANY.items())
CASES += [(f"{name} sampled", {"do_sample": True, **call}) for name, call in ANY.items()]
SYNTH_ID = {"do_sample": True, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7], ngram_len=3)}
CASES.append(("SynthID", SYNTH_ID))


def one(new_tokens: list[int]) -> int:
    return 1


def guided(new_tokens: list[int]) -> int:
    """Guidance runs the base on a second text, once for every token."""
    return 1 + max(new_tokens)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name, call", CASES, ids=[name for name, _ in CASES])
def test_every_processor_of_transformers(name, call, rows):
    base, inputs = shared_base("llama-gqa"), prompt(rows)
    lengths = {"max_new_tokens": 18, "eos_token_id": ENDS if name.startswith("min_") else ENDS[:2]}
    asked = {**lengths, **call, "output_scores": True, "output_logits": True}
    found = agree(base, inputs, call=asked, other_forwards=guided if "guidance_scale" in call else one)
    assert found.steps < max(found.new_tokens) - 1 or max(found.new_tokens) < 5
    torch.manual_seed(5)
    plain = base.generate(**inputs, **lengths, do_sample=bool(call.get("do_sample")))
    if name.removesuffix(" sampled") not in CHANGE_NOTHING:
        assert plain.shape != found.got.sequences.shape or not torch.equal(plain, found.got.sequences)


def test_guidance_with_a_negative_prompt():
    call = {"guidance_scale": 2.0, "negative_prompt_ids": prompt(seed=3)["input_ids"], "max_new_tokens": 15}
    agree(call=call, other_forwards=guided)


def test_forced_bos_token_id_after_a_single_token():
    found = agree(inputs={"input_ids": torch.tensor([[5]])}, call={"max_new_tokens": 9, "forced_bos_token_id": 33})
    assert found.got.sequences[0, 1] == 33


def test_a_repetition_penalty_leaves_the_padding_out():
    base, inputs = shared_base("llama-gqa"), prompt(4)
    call = {"max_new_tokens": 14, "repetition_penalty": 3.0, "output_scores": True, "eos_token_id": None}
    for seed in range(3):
        inputs = prompt(4, seed=seed)
        inputs["input_ids"] = inputs["input_ids"].where(inputs["attention_mask"].bool(), 17)  # padding is a real token
        agree(base, inputs, call=call)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_prefix_allowed_tokens_fn(rows, choice):
    def allowed(row, tokens):
        return [token for token in range(3, 60) if (token + row + len(tokens)) % 3]

    call = {"prefix_allowed_tokens_fn": allowed, "max_new_tokens": 15, **choice}
    found = agree(inputs=prompt(rows), call=call, guess=right)
    for row, tokens in enumerate(found.got.sequences):
        assert all((int(tokens[at]) + row + at) % 3 for at in range(9, len(tokens)))


class Recorder(LogitsProcessor):
    """Notes every call, and changes scores by how many there were."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        biased = scores.clone()
        biased[:, len(self.calls) % scores.shape[1]] += 6.0
        return biased


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_a_processor_with_a_memory_sees_the_calls_of_the_base(rows, choice):
    recorders = []

    def call():
        recorders.append(Recorder())
        processors = LogitsProcessorList([recorders[-1]])
        return {"logits_processor": processors, "max_new_tokens": 18, "eos_token_id": ENDS, **choice}

    found = agree(inputs=prompt(rows), call=call)
    by_base, by_model = recorders
    assert by_model.calls == by_base.calls
    assert len(by_model.calls) == max(found.new_tokens)


class Mixes(LogitsProcessor):
    """Adds to every row what the base says of the others."""

    def __call__(self, input_ids, scores):
        return scores + 0.5 * scores.flip(0)


@pytest.mark.parametrize("tree", [TREE, [[0], [1], [1, 0], [1, 0, 0]]], ids=["bushy", "deep at the second rank"])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}, {"output_scores": True}], ids=str)
@pytest.mark.parametrize("fixed", [{}, {"compile_config": CompileConfig()}], ids=["growing", "of fixed shapes"])
def test_a_processor_that_mixes_rows_sees_what_the_base_says_behind_the_end_of_one(fixed, choice, tree, untraced):
    def call():
        processors = LogitsProcessorList([Mixes()])
        return {"logits_processor": processors, "max_new_tokens": 24, "eos_token_id": ENDS, **choice}

    found = agree(inputs=prompt(4), call=call, tree=tree, settings=fixed)
    assert len(set(found.new_tokens)) > 1 and min(found.new_tokens) + 2 < max(found.new_tokens)


class InPlace(LogitsProcessor):
    """Writes into the scores it is given."""

    def __call__(self, input_ids, scores):
        scores[:, 6:30] -= 2.0
        scores[:, input_ids[:, -1] % 7 + 40] += 5.0
        return scores


@pytest.mark.parametrize("rows", [1, 3])
def test_a_processor_that_works_in_place(rows):
    def call():
        processors = LogitsProcessorList([InPlace()])
        return {"logits_processor": processors, "max_new_tokens": 15, "output_scores": True, "output_logits": True}

    agree(inputs=prompt(rows), call=call)


class RowBias(LogitsProcessor):
    """Every row its own bias (B, V); with views, rows may be at different positions."""

    def __init__(self, bias):
        self.bias = bias

    def __call__(self, input_ids, scores):
        assert len(scores) == len(self.bias)
        return scores + self.bias.roll(input_ids.shape[1], dims=1).to(scores)


class ViewedRowBias(RowBias):
    def for_rows(self, rows):
        return ViewedRowBias(self.bias[rows])


@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_a_processor_that_makes_views_of_rows_does_not_hold_them_in_step(choice):
    bias = 4 * torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    steps = {}
    for kind in (RowBias, ViewedRowBias):
        call = {"max_new_tokens": 18, **choice}
        processors = LogitsProcessorList([kind(bias)])
        steps[kind] = agree(inputs=prompt(3), call=lambda p=processors, c=call: {"logits_processor": p, **c}).steps
    assert steps[ViewedRowBias] < steps[RowBias]
