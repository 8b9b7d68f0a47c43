"""Each field of a request has its effect, or the request is refused with the field's name."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from tests.serving.conftest import events, parts, post
from tests.serving.table import DOCS, OF_OPENAI, table

PROMPT = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "def main("}], "max_tokens": 8, "temperature": 0}


def text(client, **settings) -> str:
    return post(client, "completions", **{**PROMPT, **settings})["choices"][0]["text"]


def of_base(model, tokenizer, settings) -> str:
    """What the base writes behind the prompt."""
    tokens = tokenizer(PROMPT["prompt"], return_tensors="pt").input_ids
    new = model.base.generate(tokens, max_new_tokens=8, **settings)[0, tokens.shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


def test_the_table_in_docs_is_what_the_server_does(writer):
    """In which every field of OpenAI's works, or is refused by its name."""
    assert all(names > {"model", "temperature"} and len(names) > 15 for names in OF_OPENAI.values())
    assert table(writer) in DOCS.read_text(), "write it anew: python -m tests.serving.table"


@pytest.mark.parametrize(
    "settings",
    [{"temperature": 1.5}, {"top_p": 0.9}, {"top_k": 3, "repetition_penalty": 1.2}, {"min_p": 0.1, "temperature": 2}],
    ids=str,
)
def test_a_temperature_samples_as_the_base_does_with_this_seed(settings, writer, model):
    tokenizer, told = writer.served.tokenizer, []
    for seed in range(3):
        torch.manual_seed(seed)
        told.append(of_base(model, tokenizer, {"do_sample": True, **settings}))
        asked = {**PROMPT, "temperature": None, **settings, "seed": seed}
        assert post(writer, "completions", **asked)["choices"][0]["text"] == told[-1]
    assert len(set(told)) > 1


def test_without_a_word_the_base_decodes_as_it_says(writer, model):
    greedy = of_base(model, writer.served.tokenizer, {"do_sample": False})
    assert text(writer, temperature=None) == text(writer) == text(writer, seed=4) == greedy
    assert text(writer, temperature=1e-300, seed=4) == greedy, "scores that are divided by it are infinite"
    assert len({text(writer, temperature=None, seed=seed) for seed in range(4)}) > 1, "a seed is of sampling"


@pytest.mark.parametrize("seed", [3, None])
def test_n_answers_are_those_of_seeds_that_follow_each_other(seed, writer):
    several = post(writer, "completions", **PROMPT | {"temperature": 1.5, "n": 3, "seed": seed})
    texts = [choice["text"] for choice in several["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2] and len(set(texts)) > 1
    assert several["usage"]["completion_tokens"] == 24 and several["usage"]["prompt_tokens"] == 5
    if seed:
        assert texts == [text(writer, temperature=1.5, seed=seed + at) for at in range(3)]


def test_several_prompts_as_texts_or_token_ids(writer):
    ids = writer.served.tokenizer(["def main(", "class A"])["input_ids"]
    texts = [text(writer, prompt=prompt) for prompt in ("def main(", "class A")]
    for prompts in (["def main(", "class A"], ids):
        answer = post(writer, "completions", **PROMPT | {"prompt": prompts, "n": 2})
        assert [choice["text"] for choice in answer["choices"]] == [texts[0]] * 2 + [texts[1]] * 2
    assert text(writer, prompt=ids[0]) == texts[0]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_log_probabilities_are_those_of_the_base(stream, writer, model):
    served, said = writer.served, parts(writer, stream, **PROMPT | {"temperature": 1.2, "seed": 5, "logprobs": 3})
    names = "tokens", "token_logprobs", "text_offset", "top_logprobs"
    tokens, values, offsets, best = ([one for part in said for one in part["logprobs"][name]] for name in names)
    whole = "".join(part["text"] for part in said)
    assert len(tokens) == 8 and "".join(tokens) == whole
    assert [whole[start:][: len(token)] for start, token in zip(offsets, tokens)] == tokens
    prompt = served.tokenizer(PROMPT["prompt"])["input_ids"]
    ids = served.tokenizer.convert_tokens_to_ids(served.tokenizer.tokenize("".join(tokens)))
    if len(ids) == len(tokens):
        logits = model.base(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(torch.tensor(values), logits[range(8), ids], atol=1e-3, rtol=1e-3)
    assert all(len(top) >= 3 for top in best)


def test_log_probabilities_in_chats(writer):
    chat = post(writer, "chat/completions", **CHAT, logprobs=True, top_logprobs=2)["choices"][0]
    tokens = chat["logprobs"]["content"]
    assert "".join(token["token"] for token in tokens) == chat["message"]["content"]
    assert all(token["logprob"] == max(one["logprob"] for one in token["top_logprobs"]) for token in tokens)
    assert all(bytes(token["bytes"]).decode() == token["token"] for token in tokens)
    assert post(writer, "chat/completions", **CHAT, top_logprobs=2)["choices"][0]["logprobs"] == chat["logprobs"]


def test_penalties_keep_away_what_was_written(letters):
    """This base repeats what is no letter for ever."""

    def said(**settings) -> str:
        asked = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 8, "temperature": 0, **settings}
        return post(letters, "chat/completions", **asked)["choices"][0]["message"]["content"]

    assert said() == said(presence_penalty=0.01) == "11111111"
    for name in ("presence_penalty", "frequency_penalty"):
        assert said(**{name: -2}) == "11111111"
    two = str(letters.served.tokenizer("2")["input_ids"][0])
    enough = next(bias for bias in range(100) if said(logit_bias={two: bias}) == "22222222")
    almost = {two: enough - 1.0}
    assert said(logit_bias=almost) == "11111111"
    assert said(logit_bias=almost, presence_penalty=2)[:2] == said(logit_bias=almost, frequency_penalty=2)[:2] == "12"


@pytest.mark.parametrize(
    "stop, expected", [("gh", "def"), (["kl", "hij"], "defg"), (["xy", "gh "], "defghijklmno"), ("def", "")]
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_stop_string_is_not_in_the_text(stop, expected, stream, letters):
    said = parts(letters, stream, prompt="abc", max_tokens=12, stop=stop, logprobs=0)
    assert "".join(part["text"] for part in said) == expected
    assert "".join(token for part in said for token in part["logprobs"]["tokens"]) == expected
    assert said[-1]["finish_reason"] == ("length" if len(expected) == 12 else "stop")


def test_a_stop_string_is_of_the_answer_and_may_be_a_special_token(letters):
    assert text(letters, prompt="abc", stop=["cd"], max_tokens=4) == "defg", "the prompt is no part of it"
    end = letters.served.tokenizer("</s>", add_special_tokens=False)["input_ids"]
    bias = {str(end[0]): 100}
    assert text(letters, prompt="abc", stop=["</s>"], logit_bias=bias) == ""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_is_cut_within_a_character_is_the_same_streamed_and_whole(stream, letters):
    first, second = letters.served.tokenizer("é", add_special_tokens=False)["input_ids"]
    for length in (1, 3):
        said = parts(letters, stream, prompt="1", logit_bias={str(first): 100}, max_tokens=length)
        assert "".join(part["text"] for part in said) == "\N{REPLACEMENT CHARACTER}" * length


@pytest.mark.parametrize("size", [1, 3, 200])
def test_pieces_of_text_hold_whole_characters(size, letters):
    from hf_drafthead.serving.answers import Completions

    said, pieces = "aé😀 " * 40, []
    ids = letters.served.tokenizer(said, add_special_tokens=False)["input_ids"]
    (choice,) = Completions(letters.served, {"prompt": "abc"}).choices
    for end in range(size, len(ids) + size, size):
        result = SimpleNamespace(generated_tokens=ids[:end], is_finished=lambda end=end: end >= len(ids))
        choice.take(result)
        pieces.append(choice.added("message"))
        assert len(choice.window) <= 8
    assert "".join(pieces) == said and not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


def test_the_context_is_a_limit_that_clients_are_told(writer):
    (listed,) = writer.get("/v1/models").json()["data"]
    assert listed["max_model_len"] == 512 and writer.get(f"/v1/models/{listed['id']}").json() == listed
    for path, field, body in (
        ("completions", "max_tokens", PROMPT | {"max_tokens": 508}),
        ("chat/completions", "max_completion_tokens", CHAT | {"max_tokens": None, "max_completion_tokens": 509}),
        ("responses", "max_output_tokens", {"input": "def main(", "max_output_tokens": 100_000}),
        ("completions", "prompt", {"prompt": "a b" * 600}),
    ):
        error = post(writer, path, 400, **body)["error"]
        assert error["code"] == "context_length_exceeded" and "maximum context length is 512 tokens" in error["message"]
        assert error["param"] == field
    answer = post(writer, "chat/completions", **CHAT | {"max_tokens": None, "logit_bias": {"1": -100}})
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["total_tokens"] == 512
    assert post(writer, "completions", prompt="def main(")["usage"]["completion_tokens"] == 16


UNFIT = [("temperature", value) for value in (-1, 2.1, True, float("nan"))] + [("top_p", 2), ("n", 0), ("seed", "x")]
UNFIT += [("max_tokens", value) for value in (0, "x", 1.5)] + [("stop", value) for value in (3, [""])]
UNFIT += [("logit_bias", value) for value in ({"x": 1}, {"1": 200}, {"9999": 1})] + [("seed", 1 << 64)]
UNFIT += [("prompt", value) for value in ([-1], [5, 99_999], [[]], [True], [], "", ["a", ""])]
UNFIT += [("model", "another"), ("stream_options", {"no_such": 1}), ("no_such", 1), ("top_k", 0), ("min_p", 2)]


@pytest.mark.few(6)
@pytest.mark.parametrize("field, value", UNFIT, ids=str)
def test_a_value_that_does_not_fit_is_refused_by_name(field, value, writer):
    body = json.dumps(PROMPT | {field: value})
    answer = writer.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and "\n" not in error["message"] and error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)


@pytest.mark.parametrize("body", ["", "[]", "{", "3", "[" * 100_000], ids=lambda body: body[:9])
def test_a_body_that_is_no_request_is_refused(body, writer):
    for path in ("completions", "chat/completions", "responses"):
        answer = writer.post(f"/v1/{path}", content=body)
        assert answer.status_code == 400 and "\n" not in answer.json()["error"]["message"]


TURN, PART = '"messages": [{"role": "user", "content": "hi"}]', '{"type": "reasoning_text"}'
CALL = '"type": "function_call", "call_id": "x"'


@pytest.mark.parametrize(
    "path, more, said",
    [
        ("responses", '"input": "hi", "metadata": {"a": NaN}', "metadata.a"),
        ("responses", '"input": "hi", "instructions": "\\ud800"', "instructions"),
        ("completions", '"prompt": ["a", "\\ud800"]', "prompt[1]"),
        ("completions", '"prompt": "a", "stop": "\\udc00"', "stop"),
        ("completions", '"prompt": "a", "\\ud800": 1', "body"),
        ("chat/completions", f'{TURN}, "chat_template_kwargs": {{"x": [1, "\\ud800"]}}', "chat_template_kwargs.x[1]"),
        ("responses", '"input": [{"content": "hi"}]', "input: 'role' is missing"),
        ("responses", '"input": [{"role": "user"}]', "input: 'content' is missing"),
        ("responses", '"input": [{"type": "function_call_output", "output": "x"}]', "input: 'call_id' is missing"),
        ("responses", f'"input": [{{{CALL}, "arguments": "{{}}"}}]', "input: 'name' is missing"),
        ("responses", f'"input": [{{"type": "reasoning", "content": [{PART}]}}]', "input: 'text' is missing"),
        ("responses", '"input": [{"role": "user", "content": ""}]', "input: it says nothing"),
        ("responses", '"input": [{"role": "user", "content": "x", "arguments": "{}"}]', "input[0].arguments: an item"),
        ("responses", '"input": "hi", "text": {"format": {"type": "json_schema"}}', "text.format: it needs"),
    ],
)
def test_what_is_missing_or_cannot_be_in_a_text_is_refused_by_name(path, more, said, writer):
    """A number that is none, half a character, and fields of items by their own names."""
    answer = writer.post(f"/v1/{path}", content=f"{{{more}}}")
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == said.partition(":")[0] and error["message"].startswith(said)


def test_usage_says_what_was_drafted(writer):
    before = writer.served.manager.metrics()
    usage = post(writer, "completions", **PROMPT | {"max_tokens": 100, "n": 2})["usage"]
    after = writer.served.manager.metrics()
    assert usage["completion_tokens"] == 200 and usage["drafted_tokens"] >= usage["accepted_tokens"]
    assert all(usage[f"{name}_tokens"] == after[name] - before[name] for name in ("drafted", "accepted"))
    streamed = writer.post("/v1/completions", json=PROMPT | {"stream": True, "stream_options": {"include_usage": True}})
    last = events(streamed)[-1]
    assert last["usage"]["completion_tokens"] == 8 and last["choices"] == [] and streamed.text.endswith("[DONE]\n\n")
    assert '"usage": {' not in writer.post("/v1/completions", json=PROMPT | {"stream": True}).text


def test_metrics_are_prometheus_text(writer):
    text(writer)
    answer = writer.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert re.search(r"^hf_drafthead_finished_total [1-9]", answer.text, re.M)
    assert "# TYPE hf_drafthead_finished_total counter\n" in answer.text
    assert "# TYPE hf_drafthead_running gauge\n" in answer.text and writer.get("/health").status_code == 200
