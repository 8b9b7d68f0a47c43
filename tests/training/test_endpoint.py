"""Any OpenAI-compatible server can answer: the rows are those of `distill`, whatever happens to the server."""

import contextlib
import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hf_drafthead.data import read_rows
from hf_drafthead.evaluation.loading import load
from hf_drafthead.training import endpoint
from hf_drafthead.training.data import tokenize_rows
from hf_drafthead.training.distill import distill
from tests.checkpoints import byte_tokenizer, save_base, save_heads
from tests.serving.running import needed, running_server
from tests.training.chat_templates import CHATML, TOOL_TEMPLATE, tokenizer_with
from tests.training.test_data import cache  # noqa: F401

CHATS = [{"messages": [{"role": "user", "content": words}]} for words in "abcdefghij"]
TURNS = [{"turns": ["a", "x"]}, {"turns": ["m", "n", "o"]}]
TEXTS = [{"prompt": "klm"}, {"text": "u" * 80}]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def recited(text: str, count: int) -> str:
    """What the base of the tests says behind a text."""
    at = LETTERS.index(text[-1])
    return "".join(LETTERS[min(at + 1 + step, 25)] for step in range(count))


class Http(ThreadingHTTPServer):
    """Says nothing of clients that are gone before they are answered."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        pass


class Server:
    """Recites the alphabet as an OpenAI server does, and misbehaves as it is told.

    Attributes:
        asked: what was asked, in order.
        fails: given the number of a request, the status to answer with, "drop" to say nothing at all, a message to
            answer with, the bytes of an answer, None to recite.
        questions: what it says to raw prompts, if it is not to recite.
    """

    def __init__(self, fails=lambda number: None, port: int = 0):
        outer, self.asked, self.at_once, self.most_at_once = self, [], 0, 0
        self.questions = None
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(outer.asked)
                    outer.asked.append((self.path, body, self.headers.get("Authorization")))
                    outer.at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer.at_once)
                try:
                    self._answer(body, fails(number))
                finally:
                    with lock:
                        outer.at_once -= 1

            def _answer(self, body, trouble):
                threading.Event().wait(0.02)
                if trouble == "drop":
                    self.connection.close()
                    return
                if isinstance(trouble, bytes):
                    return self._send(200, trouble)
                if isinstance(trouble, int):
                    return self._send(trouble, {"error": {"message": f"trouble {trouble}"}})
                said = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
                asks = outer.questions is not None and "prompt" in body
                words = next(outer.questions) if asks else recited(said, body["max_tokens"])
                inner = {"text": words} if "prompt" in body else {"message": {"role": "assistant", "content": words}}
                if isinstance(trouble, dict):
                    inner = {"message": {"role": "assistant", "content": None, **trouble}}
                    ended = "tool_calls" if "tool_calls" in trouble else "stop" if trouble.get("content") else "length"
                    inner["finish_reason"] = ended
                choice = {"index": 0, "finish_reason": "stop", **inner}
                usage = {"prompt_tokens": 1, "completion_tokens": len(words), "total_tokens": 1 + len(words)}
                self._send(200, {"id": "x", "object": "x", "created": 0, "choices": [choice], "usage": usage})

            def _send(self, status, content):
                sent = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(sent)))
                self.send_header("retry-after-ms", "1")  # so that the tests need not wait
                self.end_headers()
                self.wfile.write(sent)

            def log_message(self, *arguments):
                pass

        self._http = Http(("127.0.0.1", port), Handler)
        self.port = self._http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        self._http.shutdown()
        self._http.server_close()


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def said(row: dict) -> list[str]:
    return [turn["content"] for turn in row["messages"]]


def ask(server, rows, output, tokenizer=None, concurrency=32, retries=8, **settings):
    asked = endpoint.Server(server.url, "letters", retries)
    return distill(asked, tokenizer, rows, output, batch_size=concurrency, **{"max_new_tokens": 3, **settings})


def test_a_server_is_given_what_its_chat_template_reads(tmp_path):
    with Server() as server:
        asked = endpoint.Server(server.url, "letters", 0, {"enable_thinking": False})
        distill(asked, None, CHATS[:2], tmp_path / "out.jsonl", max_new_tokens=3)
        assert [body["chat_template_kwargs"] for _, body, _ in server.asked] == [{"enable_thinking": False}] * 2
        with pytest.raises(ValueError, match="was started with chat_template_kwargs="):  # the answers depend on it
            ask(server, CHATS[:2], tmp_path / "out.jsonl")


def test_every_row_is_asked_with_many_requests_at_once(tmp_path):
    ticks, bar = [], lambda count: contextlib.nullcontext(lambda part: lambda: ticks.append((part, count)))
    with Server() as server:
        report = ask(server, CHATS + TURNS, tmp_path / "out.jsonl", concurrency=4, bar=bar)
    rows = read(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == list(range(12))
    assert said(rows[0]) == ["a", "bcd"] and said(rows[10]) == ["a", "bcd", "x", "yzz"]
    assert said(rows[11]) == ["m", "nop", "n", "opq", "o", "pqr"]
    assert (report.rows, report.written, report.answers, report.tokens) == (12, 12, 15, 45)
    assert ticks == [("answering", 12)] * 12 and len(server.asked) == 15
    assert 1 < server.most_at_once <= 4
    last = next(body for _, body, _ in server.asked if len(body["messages"]) == 5)
    assert [turn["content"] for turn in last["messages"]] == ["m", "nop", "n", "opq", "o"]
    how = {(body["model"], body["temperature"], "seed" in body) for _, body, _ in server.asked}
    assert how == {("letters", 0, False)}


def test_texts_are_continued_where_a_tokenizer_cuts_them(tmp_path):
    with Server() as server:
        ask(server, TEXTS, tmp_path / "out.jsonl", tokenizer=byte_tokenizer(), prompt_tokens=5)
        prompt, text = read(tmp_path / "out.jsonl")
        assert prompt == {"row": 0, "text": "klmnop", "given": 3}
        assert text == {"row": 1, "text": "uuuuuvwx", "given": 5}
        assert {path for path, _, _ in server.asked} == {"/v1/completions"}
        ask(server, TEXTS[:1], tmp_path / "without.jsonl")
        with pytest.raises(ValueError, match="row 0 is a plain text, of which the first 64 tokens are given: name the"):
            ask(server, TEXTS[1:], tmp_path / "none.jsonl")


def test_sampling_asks_with_a_seed_of_the_row(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = {"temperature": 0.7, "top_p": 0.9}
    with Server() as server:
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            ask(server, CHATS, tmp_path / f"{name}.jsonl", seed=seed, **settings)
    seeds = [body["seed"] for _, body, _ in server.asked]
    assert sorted(seeds[:10]) == sorted(seeds[10:20]) != sorted(seeds[20:])
    assert len(set(seeds[:10])) == 10
    assert {(body["temperature"], body["top_p"]) for _, body, _ in server.asked} == {(0.7, 0.9)}
    assert {key for _, _, key in server.asked} == {"Bearer secret"}


@pytest.mark.few(1)
@pytest.mark.parametrize("trouble", [500, 429, "drop"])
def test_a_server_that_fails_half_of_the_time_gives_the_same_rows(tmp_path, trouble):
    with Server() as server:
        ask(server, CHATS + TURNS, tmp_path / "whole.jsonl")
    with Server(lambda number: trouble if random.Random(number).random() < 0.5 else None) as server:
        report = ask(server, CHATS + TURNS, tmp_path / "out.jsonl", concurrency=3, retries=20)
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "whole.jsonl").read_text()
    assert report.answers == 15 and len(server.asked) > 20


def test_a_server_that_is_killed_costs_nothing_that_was_answered(tmp_path):
    output = tmp_path / "out.jsonl"
    with Server() as server:
        ask(server, CHATS + TURNS, tmp_path / "whole.jsonl")
    server = Server(lambda number: "drop" if number >= 6 else None)  # all that is heard of a server that is killed
    with pytest.raises(OSError, match=r"does not answer \(Connection error.*start it, then give the same command"):
        ask(server, CHATS + TURNS, output, concurrency=2, retries=0)
    server.kill()
    with pytest.raises(OSError, match="does not answer"):  # nobody listens there any more
        ask(server, CHATS + TURNS, output, retries=0)
    found = len(output.read_bytes().splitlines())
    assert 0 < found <= 6
    with Server() as another:
        report = ask(another, CHATS + TURNS, output)
    assert (report.found, report.written) == (found, 12 - found)
    assert output.read_text() == (tmp_path / "whole.jsonl").read_text()


def test_rows_that_the_server_refuses_are_counted_and_left_out(tmp_path):
    with Server(lambda number: 400 if number in (0, 1) else None) as server:
        report = ask(server, CHATS, tmp_path / "out.jsonl", concurrency=1)
        assert (report.written, report.refused) == (8, 2)
        assert report.refusals[0].startswith("row 0: the server refuses it (") and "trouble 400" in report.refusals[0]
    with Server(lambda number: 400 if number == 1 else None) as server:  # no room for the second question
        ask(server, TURNS[1:], tmp_path / "long.jsonl")
        assert said(read(tmp_path / "long.jsonl")[0]) == ["m", "nop"]
    with Server(lambda number: 400) as server:
        with pytest.raises(ValueError, match="nothing can be asked: the first 20 rows were refused"):
            ask(server, CHATS * 9, tmp_path / "none.jsonl", concurrency=4)
        assert len(server.asked) < 30


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_server_that_cannot_be_used_is_named_in_one_line(tmp_path, command, status):
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS))
    words = ["--data", tmp_path / "chats.jsonl", "--output", tmp_path / "out.jsonl", "--model", "letters"]
    with Server(lambda number: status) as server:
        code, _, said = command("distill", "--endpoint", server.url, *words, "--retries", 0)
    assert code == 2 and said.count("\n") == 1
    assert f"answers {status} (" in said and "--model 'letters' and OPENAI_API_KEY; the same command resumes." in said


DEEP = b'{"choices": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
OTHER_ANSWERS = [b"<html>", b'{"choices": []}', b'{"error": "no"}', b"{broken", DEEP, b'{"id": "caf\xe9"}']
OTHER_ANSWERS += [b'{"choices": [null]}', b'{"choices": [{"finish_reason": "stop"}]}', b'{"choices": "none"}']
OTHER_ANSWERS += [b'{"choices": [{"message": {"content": "a"}}]}']


@pytest.mark.parametrize("answer", OTHER_ANSWERS, ids=lambda answer: answer[:20].decode("latin-1"))
def test_a_server_that_answers_something_else_is_named_in_one_line(tmp_path, answer):
    with Server(lambda number: answer) as server, pytest.raises(OSError) as error:
        ask(server, CHATS, tmp_path / "out.jsonl")
    said = str(error.value)
    assert said.startswith(f"the server at '{server.url}") and "resumes." in said and "\n" not in said


def completion(choice, usage):
    """An answer with what a server says of it, and nothing else."""
    return json.dumps({"choices": [choice], **({} if usage is None else {"usage": usage})}).encode()


FOUR = {"role": "assistant", "content": "Four."}
USAGE = {"completion_tokens": 2, "prompt_tokens": 1, "total_tokens": 3}
REASONS = [("stop", True), ("tool_calls", True), ("eos_token", True), ("length", False), ("content_filter", False)]


@pytest.mark.parametrize("usage", [USAGE, None, {"completion_tokens": None}], ids=["usage", "none", "null"])
@pytest.mark.parametrize("reason, ended", REASONS)
def test_an_answer_is_cut_only_where_a_limit_or_a_filter_ended_it(tmp_path, reason, ended, usage):
    with Server(lambda number: completion({"message": FOUR, "finish_reason": reason}, usage)) as server:
        report = ask(server, TURNS[:1], tmp_path / "own.jsonl", retries=0, max_new_tokens=8)
    (row,) = read(tmp_path / "own.jsonl")
    answers = [turn for turn in row["messages"] if turn["role"] == "assistant"]
    assert [turn["content"] for turn in answers] == ["Four."] * (2 if ended else 1)
    assert [turn.get("cut", False) for turn in answers] == ([False, False] if ended else [True])
    assert report.cut == (not ended)


@pytest.mark.parametrize(
    "words, line",
    [
        ([], "no model is named: give MODEL, or --endpoint URL --model NAME."),
        (["--endpoint", "http://x"], "--endpoint URL and --model NAME go together: give both, or a MODEL alone."),
        (["base", "--model", "x"], "--endpoint URL and --model NAME go together: give both, or a MODEL alone."),
        (["--endpoint", "http://x", "--model", "x", "--batch-size", "2"], "--batch-size does not go with --endpoint"),
        (["base", "--synthesize", "2"], "give --data, or --synthesize N"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, command, words, line):
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHATS[0]))
    output = ("--output", tmp_path / "out.jsonl")
    code, _, err = command("distill", *words, "--data", tmp_path / "chats.jsonl", *output)
    assert code == 2 and line in err and err.count("\n") == 1
    own = ("--endpoint", "http://x", "--model", "x", "--synthesize", 2)
    assert "needs the base's chat template" in command("distill", *own, *output)[2]


@pytest.mark.slow
def test_a_served_model_answers_as_it_does_in_this_process(tmp_path, command):
    needed()
    base = save_base(tmp_path)
    heads = save_heads(tmp_path, base, "medusa")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(heads)
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHATS + TURNS + TEXTS))
    rows = read_rows(tmp_path / "data.jsonl")
    loaded, tokenizer = load(str(heads))
    distill(loaded, tokenizer, rows, tmp_path / "here.jsonl", max_new_tokens=8, prompt_tokens=5)
    with running_server(heads, tmp_path / "log") as url:
        words = ["--data", tmp_path / "data.jsonl", "--output", tmp_path / "there.jsonl", "--max-new-tokens", 8]
        words += ["--prompt-tokens", 5, "--concurrency", 4]
        assert command("distill", heads, "--endpoint", f"{url}/v1", "--model", heads, *words)[0] == 0
    here, there = read(tmp_path / "here.jsonl"), read(tmp_path / "there.jsonl")
    for row in here:
        row.pop("ids", None)
        for turn in row.get("messages", ()):
            turn.pop("ids", None)
    assert there == here
    _, report = tokenize_rows(read_rows(tmp_path / "there.jsonl"), AutoTokenizer.from_pretrained(heads))
    assert report.kept == len(here) == 14


THINKING_WITH_TOOLS = TOOL_TEMPLATE.replace(" and loop.last", "")  # which shows earlier thoughts too
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
SAID = [
    {"content": "Four.", "reasoning_content": "Two and two."},
    {"content": "Six.", "reasoning": "Three and three."},  # as vLLM calls it now
    {"reasoning_content": "cut while think"},
    {"tool_calls": [CALL]},
    {"content": " "},
]


TOOLS = [{"type": "function", "function": {"name": "add"}}]
QUESTIONS = [{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "add"}]} for _ in SAID]
CUT, NOTHING = "the answer was cut while the base was thinking: raise max_new_tokens", "the answer is empty"


@pytest.mark.parametrize("template", [None, THINKING_WITH_TOOLS], ids=["no tokenizer", "a template that shows all"])
def test_thoughts_and_calls_are_kept_and_what_is_no_answer_is_refused(tmp_path, template):
    tokenizer = tokenizer_with(THINKING_WITH_TOOLS)
    with Server(lambda number: SAID[number]) as server:
        given = None if template is None else tokenizer
        report = ask(server, QUESTIONS, tmp_path / "own.jsonl", tokenizer=given, concurrency=1)
        assert [body["tools"] for _, body, _ in server.asked] == [TOOLS] * len(SAID)
    assert (report.written, report.refused, report.unusable) == (3, 2, {CUT: 1, NOTHING: 1})
    assert report.refusals == [f"row 2: {CUT}", f"row 4: {NOTHING}"] and f"1 answers not used: {CUT}" in str(report)
    answers = [row["messages"][1] for row in read(tmp_path / "own.jsonl")]
    assert [answer.get("reasoning_content") for answer in answers] == ["Two and two.", "Three and three.", None]
    rows, trained = tokenize_rows(read_rows(tmp_path / "own.jsonl"), tokenizer)
    learnt = [tokenizer.decode([token for token in row["labels"] if token >= 0]) for row in rows]
    assert learnt == [
        "<think>Two and two.</think>Four.<|im_end|>",
        "<think>Three and three.</think>Six.<|im_end|>",
        '<call>{"name": "add", "arguments": {"a": 2}}<|im_end|>',
    ]
    assert all(tokenizer.decode(row["input_ids"]).startswith('[{"type": "function"') for row in rows)
    assert not trained.mapped and not trained.refused


def test_a_template_without_thoughts_refuses_them_and_says_what_to_do(tmp_path):
    said = [*SAID[:1], {"content": "Four."}, {"tool_calls": [CALL]}]
    with Server(lambda number: said[number]) as server:
        report = ask(server, QUESTIONS[:3], tmp_path / "own.jsonl", tokenizer=tokenizer_with(CHATML), concurrency=1)
        assert all("tools" not in body for _, body, _ in server.asked)  # the base was not taught to read them
    assert report.written == 1
    thoughts, calls = report.refusals
    assert "start the server without a reasoning parser, or give the template" in thoughts
    assert calls == "row 2: the chat template does not show calls of tools and their answers: set another"


def test_a_later_answer_that_cannot_be_used_ends_the_chat(tmp_path):
    said = [SAID[0], SAID[2]]
    with Server(lambda number: said[number]) as server:
        report = ask(server, TURNS[:1], tmp_path / "own.jsonl", concurrency=1)
    (row,) = read(tmp_path / "own.jsonl")
    assert [turn["role"] for turn in row["messages"]] == ["user", "assistant"]
    assert (report.written, report.refused, report.unusable) == (1, 0, {CUT: 1})
