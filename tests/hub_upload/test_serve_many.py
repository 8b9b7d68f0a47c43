"""`serve --continuous-batching`: many clients at once, each with its own settings, and drafts for all of them."""

import copy
import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import byte_tokenizer
from tests.families import FAMILIES
from tests.hub_upload.serving import running_server, served

MEDUSA = next(family for family in FAMILIES if family.name == "medusa")


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory) -> Path:
    """Heads of a base that writes the alphabet."""
    folder = tmp_path_factory.mktemp("served")
    base = AutoModelForCausalLM.from_pretrained(models / "base")
    MEDUSA.build(base).save_pretrained(folder / "heads", include_base=True)
    byte_tokenizer().save_pretrained(folder / "heads")
    return folder / "heads"


@pytest.fixture(scope="module")
def client(folder) -> Iterator:
    """An OpenAI client of a running server."""
    served()
    from openai import OpenAI

    texts = folder.parent / "texts"
    texts.mkdir()
    (texts / "alphabet.txt").write_text("abcdefghijklmnopqrstuvwxyz" * 3)
    (texts / "picture.png").write_bytes(bytes(range(256)))
    options = ["--continuous-batching", "--lookup-texts", str(texts)]
    with running_server(folder, folder.parent / "log", *options) as url:
        yield OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(client, folder, prompt, stream=False, **settings) -> str:
    done = client.completions.create(model=str(folder), prompt=prompt, stream=stream, **settings)
    return "".join(piece.choices[0].text for piece in done) if stream else done.choices[0].text


def test_sixteen_clients_at_once_get_the_answers_of_one(client, folder):
    """Streamed or whole, greedy or sampled with a seed: temperatures differ from one to the next."""
    asked = [
        {"prompt": "abcdefghijklmnop"[number:], "max_tokens": 6 + number, "stream": number % 3 == 0}
        | ({"temperature": 0.5 + number / 4, "seed": number} if number % 2 else {"temperature": 0.0})
        for number in range(16)
    ]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer, expected = byte_tokenizer(), []
    for call in asked:
        torch.manual_seed(call.get("seed", 0))
        config = copy.deepcopy(model.generation_config)
        config.max_new_tokens, config.temperature = call["max_tokens"], call["temperature"]
        config.do_sample = config.do_sample and call["temperature"] > 0
        tokens = tokenizer(call["prompt"], return_tensors="pt").input_ids
        new = model.base.generate(tokens, generation_config=config)
        expected.append(tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda call: ask(client, folder, **call), asked))
    assert answers == expected


def test_a_client_that_goes_away_frees_its_slot(client, folder):
    stream = client.completions.create(model=str(folder), prompt="abc", stream=True, max_tokens=400)
    next(iter(stream))
    stream.close()
    assert ask(client, folder, "abc", max_tokens=4) == "defg"
    metrics = counts(client)
    assert metrics["running"] <= 1 and metrics["tokens"] > 4 and metrics["tokens_per_step"] > 0


def counts(client) -> dict[str, float]:
    """What the manager counts."""
    with urllib.request.urlopen(f"{client.base_url}".replace("/v1/", "/metrics")) as said:
        return json.load(said)


def post(client, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and text of an answer to a body."""
    headers["Content-Type"] = "application/json"
    request = urllib.request.Request(f"{client.base_url}completions", data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_client_that_goes_away_before_its_whole_answer_frees_its_slot(client, folder):
    assert ask(client, folder, "abc", max_tokens=4) == "defg"
    before = counts(client)
    place = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
    body = json.dumps({"model": str(folder), "prompt": "abc", "max_tokens": 100_000})
    place.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    while not counts(client)["running"]:
        time.sleep(0.01)
    place.sock.shutdown(socket.SHUT_RDWR)
    place.close()
    for _ in range(600):
        if (now := counts(client))["cancelled"] > before["cancelled"]:
            break
        time.sleep(0.05)
    assert now["cancelled"] == before["cancelled"] + 1 and now["running"] == 0


def test_requests_of_the_same_id_are_all_answered(client, folder):
    body = json.dumps({"model": str(folder), "prompt": "abc", "max_tokens": 300, "temperature": 0.0}).encode()
    with ThreadPoolExecutor(3) as pool:
        answers = [*pool.map(lambda _: post(client, body, **{"X-Request-ID": "one"}), range(3))]
    assert [status for status, _ in answers] == [200] * 3
    assert len({json.loads(text)["choices"][0]["text"] for _, text in answers}) == 1
    assert {json.loads(text)["id"] for _, text in answers} == {"one"}


@pytest.mark.parametrize(
    "wrong, line",
    [
        ({"max_tokens": "x"}, "ValueError: invalid literal for int"),
        ({"max_tokens": 0}, "ValueError: `max_new_tokens` must be greater than 0, but is 0."),
        ({"seed": "x"}, "ValueError: seed is 'x': expected a whole number, of 64 bits."),
        ({"seed": 1 << 64}, "ValueError: seed is 18446744073709551616: expected a whole number"),
        ({"stop": 3}, "TypeError: 'int' object is not iterable"),
        ({"generation_config": "{"}, "JSONDecodeError: Expecting property name"),
        ({"frequency_penalty": -1.0}, "ValueError: `penalty` has to be a strictly positive float, but is 0.0"),
    ],
    ids=str,
)
def test_bad_input_is_refused_in_one_line(wrong, line, client, folder):
    status, text = post(client, json.dumps({"model": str(folder), "prompt": "abc", **wrong}).encode())
    assert status == 400 and line in json.loads(text)["error"]
    assert ask(client, folder, "abc", max_tokens=4) == "defg"


def test_an_error_in_a_stream_is_json(client, folder):
    wrong = {
        "model": str(folder),
        "prompt": "abc",
        "stream": True,
        "generation_config": json.dumps({"bad_words_ids": ['"']}),
    }
    status, text = post(client, json.dumps(wrong).encode())
    (event,) = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert status == 200 and '"' in json.loads(event)["error"].partition(":")[2]


def test_settings_as_a_config_of_generation_hold_with_their_seed(client, folder):
    """Beams that sample draw from the process; no other client's seed may move it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), byte_tokenizer()
    tokens = tokenizer("abc", return_tensors="pt").input_ids
    settings = {"max_new_tokens": 30, "do_sample": True, "temperature": 8.0}
    asked = [{**settings, **more, "seed": seed} for seed, more in enumerate([{"num_beams": 3}, {}] * 4)]
    expected = []
    for config in asked:
        torch.manual_seed(config["seed"])
        new = model.base.generate(tokens, **{name: value for name, value in config.items() if name != "seed"})
        expected.append(tokenizer.decode(new[0, tokens.shape[1] :], skip_special_tokens=True))

    def answer(config: dict) -> str:
        if config["seed"] % 2:  # the seed of the body goes before
            config, body = {**config, "seed": 99}, {"seed": config["seed"]}
        else:
            body = {}
        return ask(client, folder, "abc", extra_body={"generation_config": json.dumps(config), **body})

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(answer, asked)] == expected


def test_a_stop_string_ends_the_answer_of_its_request(client, folder):
    assert ask(client, folder, "abc", max_tokens=12, stop="gh") == "defgh"
    assert ask(client, folder, "abc", max_tokens=12) == "defghijklmno"
    assert ask(client, folder, "abc", max_tokens=12, stop=[]) == "defghijklmno"


@pytest.mark.slow
def test_clients_that_find_the_queue_full_are_told_at_once_and_others_are_answered(folder):
    served()
    from openai import InternalServerError, OpenAI

    options = ["--continuous-batching", "--slots", "1", "--max-queue-size", "1", "--no-lookup-answers"]
    with running_server(folder, folder.parent / "full", *options) as url:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ask(client, folder, "abc", max_tokens=2)

        said: list[str] = []

        def answer(number: int) -> str:
            try:
                return ask(client, folder, "abcdefgh"[:number], stream=number % 2 == 0, max_tokens=300)
            except InternalServerError as error:
                assert error.status_code == 503
                said.append(str(error.body))
                return ""

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(answer, range(1, 9)))
        assert 2 <= sum(map(bool, answers)) < 8
        assert {len(text) for text in answers} == {0, 300}
        assert any("max_queue_size is 1: ask again later." in text for text in said)
        assert ask(client, folder, "abc", max_tokens=4) == "defg"


PLAIN = (
    "from hf_drafthead.hub_upload.serve import introduce; introduce(); "
    "from transformers.cli.transformers import app; app()"
)


@pytest.mark.slow
def test_transformers_own_server_drives_the_manager(folder):
    """Which changes nothing of it: the settings of the first request are those of all, but for lengths and ends."""
    served()
    from openai import OpenAI

    with running_server(folder, folder.parent / "plain", "--continuous-batching", program=("-c", PLAIN)) as url:
        client, letters = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), "abcdefghijklmnopqrstuvwxyz"

        def answer(number: int) -> str:
            settings = {"max_tokens": 5 + number, "stream": number % 2 == 0, "temperature": 0.0}
            return ask(client, folder, letters[: 1 + number], **settings)

        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(answer, range(6))] == [letters[1 + number :][: 5 + number] for number in range(6)]
        stream = client.completions.create(model=str(folder), prompt="abc", stream=True, max_tokens=400)
        next(iter(stream))
        stream.close()
        assert ask(client, folder, "abc", max_tokens=4) == "defg"
    log = (folder.parent / "plain").read_text()
    assert "Traceback" not in log and "does not support continuous batching" not in log
