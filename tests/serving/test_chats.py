"""Chats: what the base's template, tokenizer and processor know is used; what they do not know is refused."""

import base64
import io
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from hf_drafthead import MedusaForCausalLM
from tests.serving.conftest import events, post
from tests.serving.running import in_process

CALL = '\n{"name": "add", "arguments": {"a": 1}}\n'
SAID = ["<think>", "so", "</think>", "well", "<tool_call>", CALL, "</tool_call>", "<|im_end|>"]
NAMES = ["<unk>", "<|im_start|>", "assistant\n", "user\n", "system\n", "tool\n", "hi", "1", "add", "{no", "x", *SAID]
TURNS = (
    "{% if tools %}{{ tools[0].function.name }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.a }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}{{ '<think>' }}{% endif %}"
)
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}
ASKED = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> Iterator[Any]:
    """A client of a Qwen base that thinks, says a word and calls a tool, whatever it is asked."""
    folder = tmp_path_factory.mktemp("qwen")
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(NAMES)}, unk_token="<unk>"))
    words.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    words.add_tokens([name for name in NAMES if not name.startswith("<|")])
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|im_end|>", unk_token="<unk>", pad_token="<unk>"
    )
    tokenizer.chat_template = TURNS
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 16}
    ends = {"eos_token_id": NAMES.index("<|im_end|>"), "pad_token_id": 0, "bos_token_id": None}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes, **ends, **heads)).eval()
    with torch.no_grad():  # each token is followed by the next one
        for name, parameter in base.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.mul_(1e-3)
        base.get_input_embeddings().weight.copy_(torch.eye(32))
        base.lm_head.weight.zero_()
        for before, after in zip(["assistant\n", *SAID], SAID):
            base.lm_head.weight[NAMES.index(after), NAMES.index(before)] = 1
    base.save_pretrained(folder / "base")
    MedusaForCausalLM.from_base(str(folder / "base"), num_draft_heads=2).save_pretrained(folder / "heads")
    tokenizer.save_pretrained(folder / "heads")
    with in_process(folder / "heads", slots=2) as client:
        yield client


def test_thoughts_and_calls_are_taken_out_of_a_chat(caller):
    choice = post(caller, "chat/completions", **ASKED, tools=[TOOL])["choices"][0]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == ("well", "so", "tool_calls")
    assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
        ("function", {"name": "add", "arguments": '{"a": 1}'})
    ]
    deltas = [
        event["choices"][0]["delta"]
        for event in events(caller.post("/v1/chat/completions", json={**ASKED, "stream": True}))
    ]
    for name, said in (("content", "well"), ("reasoning_content", "so")):
        assert "".join(delta.get(name) or "" for delta in deltas) == said
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert call["index"] == 0 and call["function"] == message["tool_calls"][0]["function"]


def test_a_stream_begins_with_all_choices_in_their_order(caller):
    """Whichever has its first token first: the client of `openai` expects that."""
    sent = events(caller.post("/v1/chat/completions", json={**ASKED, "stream": True, "n": 3}))
    firsts = [event["choices"][0] for event in sent[:3]]
    assert [choice["index"] for choice in firsts] == [0, 1, 2]
    assert all(choice["delta"] == {"role": "assistant", "content": ""} for choice in firsts)
    assert not any("role" in event["choices"][0]["delta"] for event in sent[3:])


def test_a_response_has_them_as_items(caller):
    asked = {"input": "hi", "temperature": 0, "max_output_tokens": 20, "tools": [{"type": "function", **FUNCTION}]}
    response = post(caller, "responses", **asked)
    assert response["status"] == "completed" and response["usage"]["output_tokens_details"]["reasoning_tokens"] == 1
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert [item["content"][0]["text"] for item in response["output"][:2]] == ["so", "well"]
    sent = events(caller.post("/v1/responses", json={**asked, "stream": True}))
    assert [event["sequence_number"] for event in sent] == [*range(len(sent))]
    assert sent[0]["type"] == "response.created" and sent[-1]["type"] == "response.completed"
    streamed, whole = (
        [{name: value for name, value in item.items() if "id" not in name} for item in one["output"]]
        for one in (sent[-1]["response"], response)
    )
    assert streamed == whole
    thoughts, *others = response["output"]
    for first in (thoughts, thoughts | {"summary": thoughts["content"], "content": None}):
        again = post(caller, "responses", **asked | {"input": [first, *others, {"role": "user", "content": "hi"}]})
        assert again["usage"]["input_tokens"] == 15


def test_tool_choice_none_calls_nothing(caller):
    message = post(caller, "chat/completions", **ASKED, tools=[TOOL], tool_choice="none")["choices"][0]["message"]
    assert "tool_calls" not in message and "<tool_call>" in message["content"] and message["reasoning_content"] == "so"
    assert post(caller, "chat/completions", 400, **ASKED, tool_choice="required")["error"]["param"] == "tool_choice"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "said, parallel, expected",
    [
        (SAID[3:] * 2, True, ("wellwell", "", 2)),
        (SAID[3:] * 2, False, ("wellwell", "", 1)),
        (["<think>", "so", "</think>", "well", "<tool_call>", "{no", "</tool_call>", "x"], True, ("well{nox", "so", 0)),
        (["well", "<tool_call>", "{no"], True, ("well{no", "", 0)),
        (["<think>", "so"], True, ("", "so", 0)),
    ],
    ids=["two calls", "the first alone", "a call that is no JSON", "a call that is cut", "thoughts that are cut"],
)  # fmt: skip
def test_whatever_a_model_says_is_the_same_streamed_and_whole(said, parallel, expected, size, caller):
    from hf_drafthead.serving.answers import Chat

    tokens = [NAMES.index(word) for word in said if word != "<|im_end|>"]
    (choice,) = Chat(caller.served, ASKED | {"parallel_tool_calls": parallel}).choices
    content, thoughts, calls = "", "", []
    for end in range(size, len(tokens) + size, size):
        result = SimpleNamespace(generated_tokens=tokens[:end], is_finished=lambda end=end: end >= len(tokens))
        choice.take(result)
        content, thoughts = content + choice.added("message"), thoughts + choice.added("reasoning")
        calls += [call for kind, call in choice.grown if kind == "function_call"]
    assert (content, thoughts, len(calls)) == expected


@pytest.mark.parametrize("effort, thinks", [("none", False), ("high", True)])
def test_an_effort_turns_thoughts_on_and_off(effort, thinks, caller):
    counts = [
        post(caller, "chat/completions", **ASKED, **more)["usage"]["prompt_tokens"]
        for more in ({}, {"reasoning_effort": effort}, {"chat_template_kwargs": {"enable_thinking": thinks}})
    ]
    assert counts[1] == counts[2] == counts[0] + thinks
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "response_format": {"type": "json_object"}}
    assert "think first" in post(caller, "chat/completions", 400, **ASKED, **thinking)["error"]["message"]


@pytest.mark.parametrize(
    "field, more",
    [
        ("tools", {"tools": [TOOL]}), ("chat_template_kwargs.no_such", {"chat_template_kwargs": {"no_such": 1}}),
        ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}), ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": ""}]}),
        ("messages[0].role", {"messages": [{"role": "function", "content": "x"}]}),
        ("messages.content.image_url", {"messages": [{"role": "user", "content": [IMAGE]}]}),
        ("tools[0].function.strict", {"tools": [{"type": "function", "function": {"name": "x", "strict": True}}]}),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_chat_template_does_not_read_is_refused(field, more, writer):
    assert post(writer, "chat/completions", 400, **ASKED | more)["error"]["param"] == field


def test_variables_of_all_chats_are_given_by_the_operator(caller, monkeypatch):
    plain = post(caller, "chat/completions", **ASKED)["usage"]["prompt_tokens"]
    monkeypatch.setattr(caller.served.options, "chat_template_kwargs", {"enable_thinking": True})
    assert post(caller, "chat/completions", **ASKED)["usage"]["prompt_tokens"] == plain + 1
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert post(caller, "chat/completions", **ASKED, **off)["usage"]["prompt_tokens"] == plain


def test_a_model_without_a_chat_template_is_asked_for_completions(letters):
    template, letters.served.tokenizer.chat_template = letters.served.tokenizer.chat_template, None
    try:
        assert "ask /v1/completions" in post(letters, "chat/completions", 400, **ASKED)["error"]["message"]
    finally:
        letters.served.tokenizer.chat_template = template


PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}, "kind": {"enum": ["x", "y"]}},
}
PERSON |= {"required": ["age", "kind"], "additionalProperties": False}


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept(seed, writer):
    asked = ASKED | {"max_tokens": 60, "temperature": 1, "seed": seed, "logprobs": True}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    of_response = {"input": "hi", "seed": seed, "temperature": 1}
    of_response["text"] = {"format": {"type": "json_schema", "name": "person", "schema": PERSON}}
    chat = post(writer, "chat/completions", **asked | {"response_format": form})["choices"][0]["message"]
    (item,) = post(writer, "responses", **of_response)["output"]
    for text in (chat["content"], item["content"][0]["text"]):
        person = json.loads(text)
        assert person.keys() == {"age", "kind"} and type(person["age"]) is int and person["kind"] in ("x", "y")
    asked |= {"response_format": {"type": "json_object"}, "max_tokens": 400}
    something = post(writer, "chat/completions", **asked)
    if something["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(something["choices"][0]["message"]["content"]), dict)


def test_a_schema_that_cannot_be_used_or_read_is_refused(writer, monkeypatch):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    assert "cannot be used" in post(writer, "chat/completions", 400, **ASKED, response_format=form)["error"]["message"]
    monkeypatch.setitem(sys.modules, "llguidance", None)
    error = post(writer, "chat/completions", 400, **ASKED, response_format={"type": "json_object"})["error"]
    assert error["param"] == "response_format" and "pip install 'hf-drafthead[structured]'" in error["message"]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Iterator[Any]:
    """A client of a base that reads images; the processor lies with the heads, and its class follows from the base."""
    pytest.importorskip("PIL")
    from transformers import CLIPImageProcessor, LlavaProcessor

    folder, size = tmp_path_factory.mktemp("llava"), {"height": 16, "width": 16}
    names = ["<unk>", "<image>", "hi", "</s>", *(f"w{number}" for number in range(28))]
    words = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["<unk>", "<image>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>", eos_token="</s>")
    part = "{{ '<image> ' if c['type'] == 'image' else c['text'] + ' ' }}"
    template = "{% for m in messages %}{% for c in m['content'] %}" + part + "{% endfor %}{% endfor %}"
    more = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = LlavaProcessor(CLIPImageProcessor(size=size, crop_size=size), tokenizer, chat_template=template, **more)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    of_text = {"model_type": "llama", "vocab_size": 32, "pad_token_id": 0, "eos_token_id": 3, "bos_token_id": None}
    of_images = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "projection_dim": 32, **sizes}
    both = {"text_config": of_text | sizes, "vision_config": of_images, "image_token_id": 1, "image_token_index": 1}
    base = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model("llava", vision_feature_layer=-1, **both)
    ).eval()
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.mul_(3)
    base.save_pretrained(folder / "base")
    MedusaForCausalLM.from_base(str(folder / "base"), num_draft_heads=2).save_pretrained(folder / "heads")
    processor.save_pretrained(folder / "heads")
    for path in (folder / "heads").glob("*config.json"):
        about = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in about.items() if name != "processor_class"}))
    with in_process(folder / "heads", slots=4) as client:
        yield client


def test_images_are_read_as_the_base_does(seeing):
    from PIL import Image

    def ask(colour: str) -> str:
        file = io.BytesIO()
        Image.new("RGB", (20, 20), colour).save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hi w4 w5"}]
        asked = ASKED | {"messages": [{"role": "user", "content": parts}], "max_tokens": 8, "logprobs": True}
        choice = post(seeing, "chat/completions", **asked)["choices"][0]
        assert len(choice["logprobs"]["content"]) == len(choice["message"]["content"].split())
        return choice["message"]["content"]

    served, colours = seeing.served, ["red", "blue", "green", "red"]
    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(ask, colours)]
    for colour, answer in zip(colours, answers):
        inputs = served.processor(
            text="<image> hi w4 w5 ", images=Image.new("RGB", (20, 20), colour), return_tensors="pt"
        )
        new = served.base.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert answer == served.decode(new.tolist())
    assert len(set(answers)) == 3
    assert post(seeing, "chat/completions", **ASKED)["choices"][0]["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize(
    "image", [{"url": "http://host/x.png"}, {"url": "/etc/passwd"}, {"url": "data:image/png;base64,x"}]
)
def test_images_are_not_fetched(image, seeing):
    parts = [{"type": "image_url", "image_url": image}]
    error = post(seeing, "chat/completions", 400, **ASKED | {"messages": [{"role": "user", "content": parts}]})["error"]
    assert "\n" not in error["message"]
