"""Programs that people run on any model of transformers run on ours, and return what they return on the base."""

import copy
import io
import json
import pickle
import re
import threading
from functools import cache

import pytest
import torch
from datasets import IterableDataset
from lmformatenforcer import JsonSchemaParser, RegexParser, StringParser, TokenEnforcer, TokenEnforcerTokenizerData
from transformers import AutoModel, WatermarkDetector, WatermarkingConfig, pipeline

from hf_drafthead import zoo
from tests.callers.table import encoded, fallback_reasons, tools

CALL = {"max_new_tokens": 32, "return_dict_in_generate": True, "do_sample": False}


def both(make, rows: int = 2, **call):
    """The base's and the model's output of one call, whose arguments are made afresh for each; with drafted steps."""
    model, _ = tools()
    outputs = []
    for one in (model.base, model):
        torch.manual_seed(0)
        outputs.append(one.generate(**encoded(rows), **{**CALL, **call, **make()}))
    expected, got = outputs
    assert torch.equal(expected.sequences, got.sequences)
    assert got.accepted_lengths is not None
    return expected, got


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"type": "integer"}},
    "required": ["name", "size"],
}


def parser(kind: str):
    if kind == "regex":
        return RegexParser(r"def [a-z]{3,8}\(self\):\n    return self\.[a-z]{2,6}")
    return JsonSchemaParser(SCHEMA) if kind == "json" else StringParser("import collections, functools, itertools")


@cache
def vocabulary() -> TokenEnforcerTokenizerData:
    """The tokenizer as the library wants it; its own adapter for transformers is for version 4."""
    _, tokenizer = tools()
    first = tokenizer.encode("0")[-1]
    tokens = []
    for token in set(range(len(tokenizer))) - set(tokenizer.all_special_ids):
        behind, alone = tokenizer.decode([first, token])[1:], tokenizer.decode([token])
        tokens.append((token, behind, len(behind) > len(alone)))
    return TokenEnforcerTokenizerData(tokens, tokenizer.decode, tokenizer.eos_token_id, False, len(tokenizer))


@pytest.mark.few(1)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["json", "regex", "choice"])
def test_guided_decoding_gives_the_bases_own_text_and_keeps_the_form(kind, sampled):
    """The library keeps a state per prefix: every prefix must be shown to it, one token after the other."""
    _, tokenizer = tools()

    def guided():
        enforcer = TokenEnforcer(vocabulary(), parser(kind))
        return {"prefix_allowed_tokens_fn": lambda row, ids: enforcer.get_allowed_tokens(ids.tolist()).allowed_tokens}

    _, got = both(guided, do_sample=sampled, max_new_tokens=40)
    new = got.sequences[:, encoded(2)["input_ids"].shape[1] :]
    for text in tokenizer.batch_decode(new, skip_special_tokens=True):
        if kind == "json":
            assert text.lstrip().startswith("{")
            if text.rstrip().endswith("}"):
                assert {"name", "size"} <= set(json.loads(text))
        if kind == "regex":
            assert re.match(r"def [a-z]{3,8}\(self\):", text)
        if kind == "choice":
            assert text == "import collections, functools, itertools"


def test_a_watermark_is_the_bases_own_and_is_detected():
    model, tokenizer = tools()
    marks = WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=1)
    expected, got = both(lambda: {"watermarking_config": marks}, do_sample=True, max_new_tokens=48)
    detector = WatermarkDetector(model_config=model.base.config, device="cpu", watermarking_config=marks)
    new = got.sequences[:, encoded(2)["input_ids"].shape[1] :]
    theirs, ours = (detector(tokens, return_dict=True) for tokens in (expected.sequences[:, -new.shape[1] :], new))
    assert (theirs.z_score == ours.z_score).all()


@pytest.mark.parametrize("stop", [["return"], [" self", "("], ["\n\n"]], ids=repr)
def test_stop_strings(stop):
    both(lambda: {"stop_strings": stop, "tokenizer": tools()[1]})


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("normalize", [False, True])
def test_transition_scores(sampled, normalize):
    model, _ = tools()
    expected, got = both(dict, do_sample=sampled, output_scores=True)
    theirs = model.base.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=normalize)
    for one in (model, model.base):
        ours = one.compute_transition_scores(got.sequences, got.scores, normalize_logits=normalize)
        torch.testing.assert_close(ours, theirs)


def generated(model, **call) -> torch.Tensor:
    output = model.generate(**encoded(2), **{**CALL, **call})
    assert output.accepted_lengths is not None
    return output.sequences


@pytest.fixture
def own_model():
    """A model that a test may change, which has drafted, and has fallen back with hidden states."""
    model = copy.deepcopy(tools()[0])
    generated(model)
    model.generate(**encoded(2), **CALL, output_hidden_states=True)
    return model


@pytest.mark.slow
def test_a_copy_drafts_and_is_independent(own_model):
    expected = generated(own_model)
    copied = copy.deepcopy(own_model)
    assert torch.equal(generated(copied), expected)
    with torch.no_grad():
        copied.base.get_output_embeddings().weight.neg_()
    other = generated(copied)
    assert torch.equal(other, copied.base.generate(**encoded(2), **CALL).sequences) and not torch.equal(other, expected)
    assert torch.equal(generated(own_model), expected)


def test_a_model_is_pickled_after_generations():
    # not after hidden states were asked for: transformers then puts hooks on a base that cannot be pickled
    model = AutoModel.from_pretrained(zoo.path("medusa"), dtype=torch.float64).eval()
    expected = generated(model)
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(generated(again), expected)
    assert torch.equal(again.base.generate(**encoded(2), **CALL).sequences, expected)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(generated(torch.load(file, weights_only=False)), expected)


def test_an_output_is_pickled(own_model):
    output = own_model.generate(**encoded(2), **CALL, output_scores=True)
    again = pickle.loads(pickle.dumps(output))
    assert type(again) is type(output) and torch.equal(again.sequences, output.sequences)
    assert torch.equal(again.accepted_lengths, output.accepted_lengths)


@pytest.mark.few(1)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_pipeline_in_batches_over_a_streamed_data_set(batch_size):
    texts = ["def read(self):", "import os", "class Stack:\n    def", "return None\n\n", "for line in"]

    def stream():
        yield from ({"text": text} for text in texts)

    model, tokenizer = tools()
    written = []
    for one in (model.base, model):
        task = pipeline("text-generation", model=one, tokenizer=tokenizer, batch_size=batch_size)
        tokenizer.padding_side = "left"
        rows = (row["text"] for row in IterableDataset.from_generator(stream))
        with fallback_reasons() as reasons:
            written.append([text[0]["generated_text"] for text in task(rows, max_new_tokens=16, do_sample=False)])
        assert not reasons
    assert written[0] == written[1] and len(written[0]) == len(texts)


def test_two_threads_generate_at_once_on_one_model():
    model, _ = tools()
    calls = [{"max_new_tokens": length, "do_sample": False} for length in (8, 24, 40, 16)]
    expected = [model.base.generate(**encoded(2), **call) for call in calls]
    begin = threading.Barrier(len(calls))
    got: dict[int, torch.Tensor] = {}

    def run(number: int) -> None:
        begin.wait()
        for _ in range(3):
            got[number] = model.generate(**encoded(2), **calls[number])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(got[number], tokens) for number, tokens in enumerate(expected))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad], ids=lambda mode: mode.__name__
)
def test_in_any_gradient_mode(mode):
    with mode():
        both(dict)
    both(dict)  # and what was made in that mode does not stay behind
