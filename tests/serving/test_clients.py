"""Programs of others that speak OpenAI's protocol are answered; those that are not installed are passed over."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.running import needed, running_server

MESSAGES = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c"}]
ANSWER = "defghijklmno"


@pytest.fixture(scope="module")
def server(folder) -> Iterator[dict[str, Any]]:
    """Where a server is, as clients are told it."""
    needed()
    with running_server(folder, folder.parent / "clients") as url:
        yield {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}


def test_openai(server, folder):
    from openai import NotFoundError, OpenAI

    client, about = OpenAI(**server), {"model": str(folder), "max_tokens": 12}
    done = client.completions.create(prompt="abc", **about)
    assert (done.choices[0].text, done.choices[0].finish_reason, done.usage.completion_tokens) == (ANSWER, "length", 12)
    pieces = [*client.completions.create(prompt="abc", stream=True, **about)]
    assert "".join(piece.choices[0].text for piece in pieces) == ANSWER
    assert client.chat.completions.create(messages=MESSAGES, **about).choices[0].message.content == ANSWER
    pieces = [*client.chat.completions.create(messages=MESSAGES, stream=True, **about)]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == ANSWER
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason] == ["length"]
    assert [model.id for model in client.models.list()] == [client.models.retrieve(str(folder)).id] == [str(folder)]
    for ask in (lambda: client.models.retrieve("none"), lambda: client.embeddings.create(input="x", model="x")):
        with pytest.raises(NotFoundError) as refused:
            ask()
        assert refused.value.body["type"] == "invalid_request_error"


def test_responses_of_openai(server, folder):
    from openai import OpenAI

    client, about = OpenAI(**server), {"model": str(folder), "input": "abc", "max_output_tokens": 12}
    done = client.responses.create(**about, instructions="")
    assert done.output_text == ANSWER and done.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**about) as stream:
        events = [*stream]
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:3] == ["created", "output_item.added", "content_part.added"] and "output_text.delta" in kinds
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert events[-1].response.output_text == events[-4].text == ANSWER


def test_openai_at_once(server, folder):
    from openai import AsyncOpenAI, BadRequestError

    async def ask() -> None:
        client = AsyncOpenAI(**server)
        asked: Any = {"model": str(folder), "messages": MESSAGES, "max_tokens": 12}
        whole, stream = await asyncio.gather(
            client.chat.completions.create(**asked), client.chat.completions.create(**asked, stream=True)
        )
        pieces = [piece.choices[0].delta.content or "" async for piece in stream]
        assert whole.choices[0].message.content == "".join(pieces) == ANSWER
        with pytest.raises(BadRequestError, match="verbosity: this server does not know") as refused:
            await client.chat.completions.create(**asked, verbosity="low")
        assert refused.value.param == "verbosity"

    asyncio.run(ask())


def test_litellm(server, folder):
    litellm = pytest.importorskip("litellm")
    asked: Any = {"model": f"openai/{folder}", "messages": MESSAGES, "max_tokens": 12, "seed": 1, "temperature": 0.1}
    asked |= {"api_base": server["base_url"], "api_key": "none"}
    assert litellm.completion(**asked).choices[0].message.content == ANSWER
    assert "".join(piece.choices[0].delta.content or "" for piece in litellm.completion(**asked, stream=True)) == ANSWER


def test_langchain(server, folder):
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(model=str(folder), max_tokens=12, logprobs=True, **server)
    answer = chat.invoke("abc")
    assert answer.content == ANSWER and len(answer.response_metadata["logprobs"]["content"]) == 12
    assert "".join(piece.content for piece in chat.stream("abc")) == ANSWER
    assert langchain.OpenAI(model=str(folder), max_tokens=12, **server).invoke("abc") == ANSWER
    responses = langchain.ChatOpenAI(model=str(folder), max_tokens=12, use_responses_api=True, **server)
    assert responses.invoke("abc").text in (ANSWER, ANSWER)


def test_llama_index(server, folder):
    module = pytest.importorskip("llama_index.llms.openai_like")
    place = {"api_base": server["base_url"], "api_key": "none", "max_retries": 0}
    model = module.OpenAILike(model=str(folder), is_chat_model=False, max_tokens=12, **place)
    assert model.complete("abc").text == ANSWER
    assert [piece.text for piece in model.stream_complete("abc")][-1] == ANSWER
    chat = module.OpenAILike(model=str(folder), is_chat_model=True, max_tokens=12, **place)
    assert chat.complete("abc").text == ANSWER
