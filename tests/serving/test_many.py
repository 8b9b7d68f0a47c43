"""Many clients at once, some of which go away; and the end of the server."""

import copy
import http.client
import json
import random
import socket
import struct
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import byte_tokenizer
from tests.serving.conftest import events, parts
from tests.serving.running import in_process, needed, running_server

COMPLETIONS = "/v1/completions"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def client(folder) -> Iterator[httpx.Client]:
    """One of a running server of the base that writes the alphabet."""
    needed()
    options = ["--lookup-answers", "--context", "120000", "--continuous-batching"]
    with running_server(folder, folder.parent / "log", *options) as url:
        yield client_of(url)


def client_of(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=100)


def ask(client: httpx.Client, stream: bool = False, **body: Any) -> str:
    """The text of an answer."""
    return "".join(part["text"] for part in parts(client, stream, **body))


def counts(client: httpx.Client) -> dict[str, float]:
    """What the manager counts."""
    lines = [line.split() for line in client.get("/metrics").text.splitlines() if line[0] != "#"]
    return {name.removeprefix("hf_drafthead_").removesuffix("_total"): float(value) for name, value in lines}


def asked(number: int) -> dict[str, Any]:
    """A request, streamed or whole, greedy or sampled with a seed."""
    sampled = {"temperature": 0.5 + number % 6 / 4, "seed": number} if number % 2 else {"temperature": 0.0}
    return {"prompt": LETTERS[number % 16 : 16], "max_tokens": 6 + number % 16, "stream": number % 3 == 0, **sampled}


def expected(model: Any, call: dict[str, Any]) -> str:
    """The text of the base alone."""
    torch.manual_seed(call.get("seed", 0))
    config, tokenizer = copy.deepcopy(model.generation_config), byte_tokenizer()
    config.max_new_tokens, config.do_sample = call["max_tokens"], call["temperature"] > 0
    config.temperature = call["temperature"] or None
    tokens = tokenizer(call["prompt"], return_tensors="pt").input_ids
    return tokenizer.decode(
        model.base.generate(tokens, generation_config=config)[0, tokens.shape[1] :], skip_special_tokens=True
    )


def reset(client: httpx.Client, body: dict[str, Any], dice: random.Random) -> None:
    """Ask, and break the connection while it is answered."""
    data = json.dumps(body).encode()
    with socket.create_connection((client.base_url.host, client.base_url.port)) as place:
        place.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
        time.sleep(dice.random() / 5)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_sixty_four_clients_at_once_get_the_answers_of_one_while_others_break_off(client, folder):
    model, dice = AutoModelForCausalLM.from_pretrained(folder), random.Random(0)
    calls = [asked(number) for number in range(64)]
    right = [expected(model, call) for call in calls]
    before = counts(client)
    with ThreadPoolExecutor(80) as pool:
        broken = [pool.submit(reset, client, asked(number) | {"max_tokens": 5000}, dice) for number in range(16)]
        answers = list(pool.map(lambda call: ask(client, **call), calls))
        for one in broken:
            one.result()
    assert answers == right
    for _ in range(600):
        now = counts(client)
        if not now["running"] and not now["waiting"]:
            break
        time.sleep(0.05)
    assert now["failed"] == before["failed"] and now["running"] == now["waiting"] == 0
    assert now["finished"] == before["finished"] + 64


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_client_that_goes_away_frees_its_slot_and_is_no_failure(stream, client):
    before = counts(client)
    place = http.client.HTTPConnection(client.base_url.host, client.base_url.port)
    place.request("POST", "/v1/completions", json.dumps({"prompt": "abc", "max_tokens": 100_000, "stream": stream}))
    while not counts(client)["running"]:
        time.sleep(0.01)
    place.sock.shutdown(socket.SHUT_RDWR)
    place.close()
    for _ in range(600):
        if (now := counts(client))["cancelled"] > before["cancelled"] and not now["running"]:
            break
        time.sleep(0.05)
    assert (now["cancelled"], now["failed"], now["running"]) == (before["cancelled"] + 1, before["failed"], 0)
    assert ask(client, prompt="abc", max_tokens=4) == "defg"


def test_a_request_that_fails_alone_says_so_whole_and_streamed(folder, monkeypatch):
    """In a stream that has begun by its last event; others go on."""
    with in_process(folder, slots=2, context=1000) as client:
        manager, add = client.served.manager, client.served.manager.add_request

        def broken(*args: Any, **settings: Any) -> str:
            def fail(input_ids, scores):
                if input_ids.shape[1] > 6:
                    raise RuntimeError('a "processor" is broken')
                return scores

            return add(*args, **{**settings, "logits_processor": [fail]})

        monkeypatch.setattr(manager, "add_request", broken)
        body = {"prompt": "abc", "max_tokens": 12}
        whole, streamed = (client.post(COMPLETIONS, json=body | {"stream": on}) for on in (False, True))
        assert whole.status_code == 500 and 'a "processor" is broken' in whole.json()["error"]["message"]
        assert 'a "processor" is broken' in events(streamed)[-1]["error"]["message"] and '"text": "d' in streamed.text
        response = client.post("/v1/responses", json={"input": "abc", "max_output_tokens": 12, "stream": True}).text
        assert response.split("event: ")[-1].startswith("response.failed\n")
        monkeypatch.undo()
        assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == "defghijklmno"


def test_clients_that_find_the_queue_full_are_told_at_once_and_others_are_answered(folder):
    with in_process(folder, slots=1, max_queue_size=1, context=1000) as client:

        def answer(number: int) -> Any:
            body = {"prompt": LETTERS[:number], "stream": number % 2 == 0, "max_tokens": 300}
            return client.post(COMPLETIONS, json=body)

        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(answer, range(1, 9)))
        full = [got for got in answers if got.status_code == 503]
        assert {got.status_code for got in answers} == {200, 503}
        assert all("max_queue_size is 1: ask again later." in got.json()["error"]["message"] for got in full)
        assert full[0].headers["Retry-After"] == "1"
        for field, more in (("n", {"prompt": "abc", "n": 2}), ("prompt", {"prompt": ["abc", "b"]})):
            never = client.post(COMPLETIONS, json=more)
            assert never.status_code == 400 and never.json()["error"]["param"] == field


def test_the_end_of_the_server_is_said_last_and_comes_in_time(folder):
    """Answers that are not whole within the time are ended, in the middle of a stream too."""
    log, body = folder.parent / "stopped", {"prompt": "abc", "max_tokens": 100_000}
    with ThreadPoolExecutor(2) as pool:
        with running_server(folder, log, "--context", "120000", "--stop-within", "1") as url:
            client = client_of(url)
            asked = [pool.submit(client.post, COMPLETIONS, json=body | {"stream": on}) for on in (False, True)]
            while counts(client)["running"] < 2:
                time.sleep(0.05)
        whole, streamed = (answer.result() for answer in asked)
    assert whole.status_code == 503 and "this answer is not complete" in whole.text
    assert streamed.status_code == 200
    assert "this answer is not complete" in events(streamed)[-1]["error"]["message"]
    assert "Traceback" not in log.read_text()
