"""Programs of others that speak OpenAI's protocol are answered; those that are not installed are passed over."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.running import needed, running_server

MESSAGES = [{"role": "user", "content": "abc"}]
ANSWER = "defghijklmno"


@pytest.fixture(scope="module")
def server(folder) -> Iterator[dict[str, Any]]:
    """Where a server is, as clients are told it."""
    needed()
    with running_server(folder, folder.parent / "clients") as url:
        yield {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}


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
