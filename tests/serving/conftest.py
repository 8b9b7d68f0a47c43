"""Models that are served, and clients of them in this process."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import zoo
from tests.checkpoints import byte_tokenizer, save_base, save_heads
from tests.serving.running import in_process

SWITCH = "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="package")
def folder(tmp_path_factory) -> Path:
    """Heads on a base that writes the alphabet, whose chat template says the turns one behind the other."""
    folder = tmp_path_factory.mktemp("alphabet")
    heads = save_heads(folder, save_base(folder), "medusa")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(heads)
    return heads


@pytest.fixture(scope="package")
def letters(folder) -> Iterator[Any]:
    """A client of that model."""
    with in_process(folder, slots=4, context=1000) as client:
        yield client


def with_template(folder: Path) -> Path:
    """The bundled heads, in a folder, with a chat template which has a switch for thoughts."""
    for name in ("base", "eagle3"):
        shutil.copytree(zoo.path(name), folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder / "eagle3")
    tokenizer.chat_template = SWITCH + TEMPLATE
    tokenizer.save_pretrained(folder / "eagle3")
    return folder / "eagle3"


@pytest.fixture(scope="package")
def code(tmp_path_factory) -> Path:
    return with_template(tmp_path_factory.mktemp("code"))


@pytest.fixture(scope="package")
def writer(code) -> Iterator[Any]:
    """A client of that model, which writes Python."""
    with in_process(code, slots=4) as client:
        yield client


@pytest.fixture(scope="package")
def model(code) -> Any:
    """That model itself."""
    return AutoModelForCausalLM.from_pretrained(code)


def post(client: Any, path: str, status: int = 200, **body: Any) -> Any:
    """The answer to a request, which has this status and, where it is an answer, the form that OpenAI's API says."""
    answer = client.post(f"/v1/{path}", json=body)
    assert answer.status_code == status, answer.text
    if status == 200:
        {"completions": Completion, "chat/completions": ChatCompletion, "responses": Response}[path](**answer.json())
    return answer.json()


def events(answer: Any) -> list[Any]:
    """What a stream has said as JSON."""
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def parts(client: Any, stream: bool, **body: Any) -> list[Any]:
    """The choice that answers a request for a completion, whole or in the pieces of a stream."""
    answer = client.post("/v1/completions", json=body | {"stream": stream})
    return [piece["choices"][0] for piece in (events(answer) if stream else [answer.json()])]
