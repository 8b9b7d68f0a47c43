"""Chats from nothing: the base writes the questions as well, and they are questions that can be asked."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead.data.sources import read_rows
from hf_drafthead.data.texts import same_words, why_no_question
from hf_drafthead.modeling import MedusaForCausalLM, loading
from hf_drafthead.training import answers, endpoint
from hf_drafthead.training import distill as room
from hf_drafthead.training.answers import Answerer, Sampling
from hf_drafthead.training.data import tokenize_rows
from hf_drafthead.training.distill import distill
from hf_drafthead.training.run import train_heads
from hf_drafthead.training.templates import ChatEncoder
from tests.bases import tiny_base
from tests.checkpoints import save_base
from tests.training.chat_templates import CHATML, STYLES, VICUNA, tokenizer_with
from tests.training.test_distill import Killed, by_hand, killer, read
from tests.training.test_endpoint import Server

SETTINGS = {"max_new_tokens": 8, "question_tokens": 60, "batch_size": 5}


def writing_base(tokenizer, **overrides):
    """A random base that writes letters, spaces and ends of turns, and nothing else."""
    base = tiny_base("llama", vocab_size=len(tokenizer), **overrides)
    allowed = set(tokenizer("abcdefghijklmnop   ", add_special_tokens=False)["input_ids"])
    allowed |= {tokenizer.eos_token_id}
    base.generation_config.eos_token_id = tokenizer.eos_token_id
    base.generation_config.suppress_tokens = sorted(set(range(len(tokenizer))) - allowed)
    return base


def of_folder(folder):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = tokenizer_with(CHATML)
    tokenizer.eos_token = "<|im_end|>"
    return tokenizer


@pytest.fixture(scope="module")
def base(tokenizer):
    return writing_base(tokenizer)


def said(row, role):
    return [turn["content"] for turn in row["messages"] if turn["role"] == role]


def is_greedy(base, tokenizer, row, new_tokens):
    """Whether a row's answer is what `generate` says."""
    by_generate = by_hand(base, tokenizer, said(row, "user"), new_tokens)
    return [turn.get("ids") for turn in by_generate] == [turn.get("ids") for turn in row["messages"]]


def test_chats_are_questions_of_the_base_and_its_answers(base, tokenizer, tmp_path):
    report = distill(base, tokenizer, 12, tmp_path / "own.jsonl", **SETTINGS)
    rows = read(tmp_path / "own.jsonl")
    questions = [said(row, "user") for row in rows]
    assert len(rows) == report.written == 12 and {len(each) for each in questions} == {1}
    assert all(why_no_question(words) is None and words == words.strip() for (words,) in questions)
    assert len({same_words(words) for (words,) in questions}) == 12
    assert report.questions > 12 and set(report.dropped) <= {"too short", "cut", "duplicate", "repeats itself"}
    assert report.questions - sum(report.dropped.values()) >= 12 and report.missing == 0
    greedy = [is_greedy(base, tokenizer, row, 8) for row in rows]
    assert all(same for row, same in zip(rows, greedy) if row["row"] % 2 == 0)
    assert not all(same for row, same in zip(rows, greedy) if row["row"] % 2)


def test_a_question_is_what_follows_the_beginning_of_a_users_turn(base, tokenizer, tmp_path, monkeypatch):
    seen = []
    generate = Answerer._generate

    def spy(self, tasks, prompts, new_tokens):
        seen.extend(tokenizer.decode(prompt) for task, prompt in zip(tasks, prompts) if task.asks)
        return generate(self, tasks, prompts, new_tokens)

    monkeypatch.setattr(Answerer, "_generate", spy)
    distill(base, tokenizer, 6, tmp_path / "own.jsonl", turns=2, **SETTINGS | {"max_new_tokens": 40})
    first = [prompt for prompt in seen if prompt.count("<|im_start|>") == 1]
    later = [prompt for prompt in seen if prompt.count("<|im_start|>") == 3]
    assert set(first) == {"<|im_start|>user\n"} and later and len(first) + len(later) == len(seen)
    rows = read(tmp_path / "own.jsonl")
    asked = [row for row in rows if len(said(row, "user")) == 2]
    assert asked and all(prompt.endswith("<|im_end|>\n<|im_start|>user\n") for prompt in later)
    assert any(said(asked[0], "user")[0] in prompt and said(asked[0], "assistant")[0] in prompt for prompt in later)


@pytest.mark.slow
def test_heads_batches_and_a_cache_of_fixed_size_change_nothing(base, tokenizer, tmp_path, monkeypatch):
    heads = MedusaForCausalLM.from_base(writing_base(tokenizer), num_draft_heads=3).eval()
    for name, model, size in (("one", base, 3), ("two", base, 8), ("heads", heads, 3)):
        report = distill(model, tokenizer, 9, tmp_path / name, **SETTINGS | {"batch_size": size})
    monkeypatch.setattr(answers, "writes_in_place", lambda model: True)
    distill(base, tokenizer, 9, tmp_path / "fixed", **SETTINGS)
    assert len({file.read_text() for file in tmp_path.iterdir() if file.suffix != ".json"}) == 1
    assert report.tokens_per_step >= 1 and "_cache" not in vars(base)


def test_a_run_that_was_killed_goes_on_and_so_does_one_that_asks_for_more(base, tokenizer, tmp_path):
    output = tmp_path / "own.jsonl"
    with pytest.raises(Killed):
        distill(base, tokenizer, 9, output, **SETTINGS, bar=killer(4))
    found = len(output.read_bytes().splitlines())
    report = distill(base, tokenizer, 9, output, **SETTINGS)
    before = read(output)
    assert (report.found, report.written, len(before)) == (found, 9 - found, 9) and found
    again = distill(base, tokenizer, 20, output, **SETTINGS)
    rows = read(output)
    assert "duplicate" not in again.dropped  # no chat is begun twice
    assert (again.found, again.written) == (9, 11) and rows[:9] == before and len(rows) == 20
    assert len({same_words(words) for row in rows for words in said(row, "user")}) == 20
    with pytest.raises(ValueError, match="was started with seed=0, but now seed=1"):
        distill(base, tokenizer, 20, output, **SETTINGS, seed=1)


def test_a_base_that_repeats_itself_says_how_many_questions_came_out(base, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "UNFIT_IN_A_ROW", 10)
    few = iter(["where do birds go", "Where do birds go?", "hm", *["who are you then"] * 500])
    words = Answerer._words

    def say(self, prompt, tokens):
        asked = tokenizer.decode(prompt).endswith("user\n")
        return next(few) if asked else words(self, prompt, tokens)

    monkeypatch.setattr(Answerer, "_words", say)
    report = distill(base, tokenizer, 9, tmp_path / "own.jsonl", **SETTINGS)
    assert report.written == 2 and report.missing == 7
    assert "7 chats are missing" in str(report) and " duplicate, " in str(report) and ", 1 too short" in str(report)
    again = distill(base, tokenizer, 9, tmp_path / "own.jsonl", **SETTINGS)
    assert (again.found, again.written, set(again.dropped) - {"cut"}) == (2, 0, {"duplicate"})


def test_a_base_without_one_question_is_refused(tmp_path):
    model, tokenizer = of_folder(save_base(tmp_path))  # which recites the alphabet and never ends
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match=r"not one of \d+ questions that the base wrote can be asked .*: give quest"):
        distill(model, tokenizer, 3, tmp_path / "own.jsonl", max_new_tokens=4, question_tokens=5, batch_size=64)


LONELY = "{% if messages|length < 2 %}{{ raise_exception('two turns at least') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "settings", "said"),
    [
        (None, {"turns": 2}, "has no chat template, so that the base writes plain texts, which have no turns: give"),
        (LONELY, {}, r"cannot write questions \(the chat template .*: .* refuses it \(two turns at least\)\): give"),
        (CHATML, {"turns": 0}, "turns is 0: expected at least 1"),
        (CHATML, {"count": 0}, "count is 0: expected at least 1"),
        (CHATML, {"max_length": 5}, r"max_length is 5, but the chat template has \d+ tokens before a question: give m"),
    ],
)
def test_bad_input_is_refused_before_a_file_is_written(base, tmp_path, template, settings, said):
    given = {"count": 3, **SETTINGS, **settings}
    with pytest.raises(ValueError, match=said):
        distill(base, tokenizer_with(template), given.pop("count"), tmp_path / "own.jsonl", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("template", "end"), [(CHATML, ("<|im_end|>", True)), (VICUNA, ("ASSISTANT:", False))], ids=["token", "words"]
)
def test_the_end_of_a_users_turn(template, end):
    assert ChatEncoder(tokenizer_with(template)).end_of_question() == end


@pytest.mark.parametrize("name", sorted(STYLES))
def test_every_template_shows_where_a_user_begins(name):
    chats = ChatEncoder(tokenizer_with(STYLES[name].template))
    text = chats.render([{"role": "user", "content": "how are you"}], prompt=True)
    assert text.startswith(chats.before_question([]) + "how are you") and chats.end_of_question()[0] in text


def test_words_end_a_question_where_no_token_does(tmp_path):
    tokenizer = tokenizer_with(VICUNA)
    base = writing_base(tokenizer)
    answerer = Answerer(base, tokenizer, Sampling(max_new_tokens=4, temperature=0.0, turns=1))
    task = answerer.begin_own(0)
    answerer.take_ids(task, [], tokenizer(" where do birds go ASSISTANT: no", add_special_tokens=False).input_ids)
    assert task.messages == [{"role": "user", "content": "where do birds go"}] and not task.done


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("where do <|im_start|> birds go<|im_end|>", "control tokens"),
        ("where do birds go", "cut"),
        ("hm<|im_end|>", "too short"),
        ("where do birds go<|im_end|>", None),
    ],
)
def test_questions_that_cannot_be_asked_are_dropped(base, tokenizer, written, reason):
    answerer = Answerer(base, tokenizer, Sampling(max_new_tokens=4, temperature=0.0, turns=1))
    task = answerer.begin_own(0)
    answerer.take_ids(task, [], tokenizer(written, add_special_tokens=False).input_ids)
    assert answerer.report.dropped == ({} if reason is None else {reason: 1})
    assert (task.refused, task.done) == (reason, reason is not None)


def test_a_server_writes_questions_too(tokenizer, tmp_path):
    with Server() as server:
        server.questions = (f"where do {chr(97 + number % 26)}{chr(97 + number // 26)} go a" for number in range(200))
        asked = endpoint.Server(server.url, "letters")
        report = distill(asked, tokenizer, 6, tmp_path / "own.jsonl", turns=2, max_new_tokens=3)
    rows = read(tmp_path / "own.jsonl")
    assert report.written == len(rows) == 6
    assert {tuple(turn["role"] for turn in row["messages"]) for row in rows} == {("user", "assistant") * 2}
    asked = [body for path, body, _ in server.asked if path == "/v1/completions"]
    assert {body["prompt"] for body in asked if body["prompt"].count("user") == 1} == {"<|im_start|>user\n"}
    assert {(*body["stop"], body["temperature"]) for body in asked} == {("<|im_end|>", 1)}
    temperatures = {body["temperature"] for path, body, _ in server.asked if path == "/v1/chat/completions"}
    assert temperatures == {0.0, 1.0}


def test_a_server_without_raw_prompts_is_named(tokenizer, tmp_path):
    with Server(lambda number: 404) as server, pytest.raises(OSError, match="answers 404 .*completes raw prompts"):
        distill(endpoint.Server(server.url, "letters"), tokenizer, 2, tmp_path / "own.jsonl")


def test_the_command(base, tokenizer, tmp_path, command):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    output, figures = tmp_path / "own.jsonl", tmp_path / "figures.json"
    settings = ["--max-new-tokens", 8, "--question-tokens", 60, "--batch-size", 4, "--turns", 2, "--json", figures]
    code, out, _ = command("distill", tmp_path / "base", "--synthesize", 5, "--output", output, *settings)
    assert code == 0 and out.startswith("5 rows written: ") and "questions of the base's own, dropped: " in out
    assert len(read(output)) == 5 and json.loads(figures.read_text())["questions"] > 5


def train(command, base, output, *more):
    settings = ["--max-length", 100, "--answer-tokens", 4, "--no-calibrate", "--set", "use_cpu=true"]
    words = ["train", "--base", base, "--family", "medusa", "--output", output, *settings, *more]
    return command(*words)


def test_a_training_without_data_loads_the_base_once(base, tokenizer, tmp_path, command, monkeypatch):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    loads, load = [], loading.load_base
    monkeypatch.setattr(loading, "load_base", lambda *given, **how: (loads.append(given), load(*given, **how))[1])
    code, out, err = train(command, tmp_path / "base", tmp_path / "runs" / "heads", "--dry-run", "--synthesize", 40)
    assert code == 0, err  # and writes nothing
    assert "the base would write chats first: 40 rows of 256 tokens are assumed" in out and "36 rows" in out
    assert not (tmp_path / "runs").exists() and loads.pop()
    code, _, err = train(command, tmp_path / "base", tmp_path / "heads", "--synthesize", 24, "--data", "x")
    assert code == 2 and "a number of chats (--synthesize) is for a training without data" in err
    code, out, err = train(command, tmp_path / "base", tmp_path / "heads", "--synthesize", 24, "--set", "max_steps=2")
    assert code == 0, err
    assert "24 rows written: " in out and "the heads are in" in out and len(loads) == 1
    summary = json.loads((tmp_path / "heads" / "training_summary.json").read_text())
    assert len(read(tmp_path / "heads" / "own.jsonl")) == 24 and summary["data"].endswith("own.jsonl")


def test_what_a_base_cannot_write_is_said_before_it_is_loaded(tokenizer, tmp_path, command):
    """Of its tokenizer, also in a dry run."""
    for name, template in (("lonely", LONELY), ("plain", None)):
        folder = tmp_path / name
        folder.mkdir()
        tokenizer = tokenizer_with(template)
        if template is None:
            tokenizer.bos_token = tokenizer.eos_token = None
            tokenizer.backend_tokenizer.post_processor = None
        tokenizer.save_pretrained(folder)
        for more in ([], ["--dry-run"]):
            code, _, err = train(command, folder, tmp_path / "heads", *more)
            assert code == 2 and err.count("\n") == 1
            assert ("the base cannot write questions" if template else "no token with which a text begins") in err
    assert not (tmp_path / "heads").exists()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A base without a chat template."""
    folder = tmp_path_factory.mktemp("plain")
    tokenizer = tokenizer_with(None)
    writing_base(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_base_without_a_template_writes_plain_texts(plain, tmp_path):
    """A beginning that it samples, and its own continuation, which is what heads learn."""
    model, tokenizer = of_folder(plain)
    settings = {"max_new_tokens": 8, "question_tokens": 30, "batch_size": 5}
    report = distill(model, tokenizer, 12, tmp_path / "own.jsonl", **settings)
    rows = read(tmp_path / "own.jsonl")
    assert report.written == len(rows) == 12 and len({row["text"][: row["given"]] for row in rows}) == 12
    greedy = 0
    for row in rows:
        given, written = row["text"][: row["given"]], row["text"][row["given"] :]
        inputs = tokenizer(given, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        greedy += written == tokenizer.decode(ids, skip_special_tokens=True)
    assert 6 <= greedy < 12
    more = distill(model, tokenizer, 15, tmp_path / "own.jsonl", **settings)
    assert (more.found, more.written) == (12, 3)
    learnt, _ = tokenize_rows(read_rows(tmp_path / "own.jsonl"), tokenizer)
    context = len(tokenizer(rows[0]["text"][: rows[0]["given"]])["input_ids"])
    assert set(learnt[0]["labels"][:context]) == {-100} and -100 not in learnt[0]["labels"][context:]


@pytest.mark.slow
def test_heads_are_trained_on_the_plain_texts_of_a_base(plain, tmp_path, command):
    more = ["--synthesize", 24, "--set", "max_steps=2"]
    code, out, err = train(command, plain, tmp_path / "heads", *more)
    assert code == 0, err
    assert "the base writes 24 texts into" in out and "for its tokenizer has no chat template" in out
    assert all("text" in row for row in read(tmp_path / "heads" / "own.jsonl"))


@pytest.mark.slow
def test_what_writing_takes_of_the_hours_is_not_trained(base, tokenizer, tmp_path, monkeypatch):
    """Also where the training is resumed; and too few hours for both are said."""
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    left, settings = [], {"use_cpu": True, "report_to": "none", "answer_tokens": 4, "max_length": 100}

    def written(model, tokenizer, file, *others):
        file.parent.mkdir(exist_ok=True)
        distill(model, tokenizer, 24, file, **SETTINGS)
        return 5400.0

    def foretold(trainer, data, share):
        left.append(trainer.clock.limit)
        raise KeyboardInterrupt

    monkeypatch.setattr(room, "write_own_text", written)
    monkeypatch.setattr("hf_drafthead.training.run.forecast", foretold)
    with pytest.raises(ValueError, match="writing took all of the hours: give more of them, or the text as data"):
        train_heads(tmp_path / "base", "medusa", None, tmp_path / "other", **settings, hours=1.0)
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            train_heads(tmp_path / "base", "medusa", None, tmp_path / "heads", **settings, hours=2.0, resume=resume)
        checkpoint = tmp_path / "heads" / "checkpoint-4"
        checkpoint.mkdir(exist_ok=True)
        save_file({"w": torch.zeros(1)}, checkpoint / "model.safetensors")
        for name in ("trainer_state.json", "config.json"):
            (checkpoint / name).write_text("{}")
    assert left == [0.5, 0.5]


def test_a_limit_of_time_ends_a_run_that_goes_on_later(base, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="not one of 0 questions"):
        distill(base, tokenizer, 5, tmp_path / "none.jsonl", seconds=0.0, **SETTINGS)
    some = distill(base, tokenizer, 10_000, tmp_path / "own.jsonl", seconds=0.5, **SETTINGS)
    assert 0 < some.written < 10_000 and some.missing == 0
    more = distill(base, tokenizer, some.written + 3, tmp_path / "own.jsonl", **SETTINGS)
    assert (more.found, more.written) == (some.written, 3)


def test_the_recipe_of_the_chat_model_writes_shards(base, tokenizer, tmp_path, capsys, monkeypatch):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    file = Path(__file__).parents[2] / "benchmarks" / "chat_heads.py"
    monkeypatch.setattr(sys, "path", list(sys.path))
    make = ["questions-and-answers", tmp_path / "base", tmp_path / "shards", "--device", "cpu", "--rows", 6]
    make += ["--question-tokens", 60, "--answer-new-tokens", 12, "--two-turns", 1]
    look = ["look", tmp_path / "shards", "--tokenizer", tmp_path / "base"]
    for words in ([*make, "--answer-tokens", 1], [*make, "--answer-tokens", 200], look):
        monkeypatch.setattr(sys, "argv", ["chat_heads.py", *map(str, words)])
        runpy.run_path(str(file), run_name="__main__")
    index = json.loads((tmp_path / "shards" / "index.json").read_text())
    assert [about["first"] for about in index["rounds"]][:2] == [0, 1_000_000]
    tensors = load_file(tmp_path / "shards" / index["shards"][0]["file"])
    tokens, ends = tensors["tokens"].tolist(), {row: end for row, _, end, _ in tensors["answers"].tolist()}
    assert [ends[row] for row in range(len(ends))] == tensors["rows"].tolist()[1:]  # a chat ends with its last answer
    for _, begin, end, kind in tensors["answers"].tolist():
        assert tokenizer.decode(tokens[:begin]).endswith("<|im_start|>assistant\n")
        assert (tokens[end - 1] == tokenizer.eos_token_id) == (kind < 2) and end - begin <= 12
    shards = [load_file(tmp_path / "shards" / shard["file"])["answers"] for shard in index["shards"]]
    assert {kind % 2 for answers in shards for *_, kind in answers.tolist()} == {0, 1}
    assert "answers of the last shard by kind" in capsys.readouterr().out
