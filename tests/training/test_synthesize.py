"""Chats from nothing: the base writes the questions as well, and they are questions that can be asked."""

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_drafthead import cli
from hf_drafthead.data.texts import same_words, why_no_question
from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.training import answers, endpoint
from hf_drafthead.training import distill as room
from hf_drafthead.training.answers import Answerer, Sampling
from hf_drafthead.training.distill import distill, load_model
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


def test_heads_and_batches_change_nothing(base, tokenizer, tmp_path):
    heads = MedusaForCausalLM.from_base(writing_base(tokenizer), num_draft_heads=3).eval()
    texts = []
    for name, model, size in (("one", base, 3), ("two", base, 8), ("heads", heads, 3)):
        report = distill(model, tokenizer, 9, tmp_path / name, **SETTINGS | {"batch_size": size})
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1] == texts[2] and report.tokens_per_step >= 1


def test_a_cache_of_fixed_size_changes_nothing(base, tokenizer, tmp_path, monkeypatch):
    distill(base, tokenizer, 9, tmp_path / "grows", **SETTINGS)
    monkeypatch.setattr(answers, "writes_in_place", lambda model: True)
    distill(base, tokenizer, 9, tmp_path / "fixed", **SETTINGS)
    assert (tmp_path / "fixed").read_text() == (tmp_path / "grows").read_text() and "_cache" not in vars(base)


def test_a_run_that_was_killed_goes_on_and_so_does_one_that_asks_for_more(base, tokenizer, tmp_path):
    output = tmp_path / "own.jsonl"
    with pytest.raises(Killed):
        distill(base, tokenizer, 9, output, **SETTINGS, progress=killer(4))
    found = len((tmp_path / "own.jsonl.part0").read_bytes().splitlines())
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


@pytest.mark.parametrize(("greedy", "same"), [(1.0, {True}), (0.0, {False}), (0.5, {True, False})])
def test_a_share_of_the_answers_is_greedy(base, tokenizer, tmp_path, greedy, same):
    # every answer is cut at its limit, so that two that are drawn apart differ
    settings = SETTINGS | {"max_new_tokens": 3}
    distill(base, tokenizer, 10, tmp_path / "own.jsonl", greedy=greedy, temperature=9.0, **settings)
    rows = read(tmp_path / "own.jsonl")
    assert {is_greedy(base, tokenizer, row, 3) for row in rows} == same


def test_a_base_that_repeats_itself_says_how_many_questions_came_out(base, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "UNFIT_IN_A_ROW", 10)
    few = iter(["where do birds go", "Where do birds go?", "hm", *["who are you then"] * 500])
    words = Answerer._words

    def say(self, prompt, tokens):
        asked = tokenizer.decode(prompt).endswith("user\n")
        return next(few) if asked else words(self, prompt, tokens)

    monkeypatch.setattr(Answerer, "_words", say)
    monkeypatch.setattr(base.generation_config, "forced_eos_token_id", tokenizer.eos_token_id)
    report = distill(base, tokenizer, 9, tmp_path / "own.jsonl", **SETTINGS)
    assert report.written == 2 and report.missing == 7
    assert "7 chats are missing" in str(report) and "duplicate, 1 too short" in str(report)
    again = distill(base, tokenizer, 9, tmp_path / "own.jsonl", **SETTINGS)
    assert (again.found, again.written, set(again.dropped)) == (2, 0, {"duplicate"})


def test_a_base_without_one_question_is_refused(tmp_path):
    model, tokenizer = load_model(str(save_base(tmp_path)))  # which recites the alphabet and never ends
    tokenizer.chat_template = CHATML
    with pytest.raises(
        ValueError, match=r"not one of \d+ questions that the base wrote can be asked .*: give questions"
    ):
        distill(model, tokenizer, 3, tmp_path / "own.jsonl", max_new_tokens=4, question_tokens=5, batch_size=64)


LONELY = "{% if messages|length < 2 %}{{ raise_exception('two turns at least') }}{% endif %}" + CHATML


@pytest.mark.parametrize(
    ("template", "settings", "said"),
    [
        (None, {}, "has no chat template, which tells where a base would write a question: give the one it was"),
        (
            LONELY,
            {},
            r"cannot write questions \(the chat template .*: .* refuses it \(two turns at least\)\): give questions",
        ),
        (CHATML, {"turns": 0}, "turns is 0: expected at least 1"),
        (CHATML, {"greedy": 1.5}, "greedy is 1.5: expected a share from 0 to 1"),
        (CHATML, {"temperature": 0.0}, "temperature is 0, but greedy is 0.5: give greedy=1"),
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
    assert {tuple(body["stop"]) for body in asked} == {("<|im_end|>",)} and {body["temperature"] for body in asked} == {
        1
    }
    temperatures = {body["temperature"] for path, body, _ in server.asked if path == "/v1/chat/completions"}
    assert temperatures == {0.0, 1.0}


def test_a_server_without_raw_prompts_is_named(tokenizer, tmp_path):
    with Server(lambda number: 404) as server, pytest.raises(OSError, match="answers 404 .*completes raw prompts"):
        distill(endpoint.Server(server.url, "letters"), tokenizer, 2, tmp_path / "own.jsonl")


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        cli.main(["distill", *map(str, arguments)])
    return end.value.code, *capsys.readouterr()


def test_the_command(base, tokenizer, tmp_path, capsys):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    output, figures = tmp_path / "own.jsonl", tmp_path / "figures.json"
    settings = ["--max-new-tokens", 8, "--question-tokens", 60, "--batch-size", 4, "--turns", 2, "--json", figures]
    code, out, _ = run(capsys, tmp_path / "base", "--synthesize", 5, "--output", output, *settings)
    assert code == 0 and out.startswith("5 rows written: ") and "questions of the base's own, dropped: " in out
    assert len(read(output)) == 5 and json.loads(figures.read_text())["questions"] > 5
    for words, text in (
        ([tmp_path / "base"], "give --data, or --synthesize N"),
        ([tmp_path / "base", "--data", "x", "--synthesize", 2], "give --data, or --synthesize N"),
        (["--endpoint", "http://127.0.0.1:1", "--model", "x", "--synthesize", 2], "needs the base's chat template"),
    ):
        code, _, err = run(capsys, *words, "--output", tmp_path / "other.jsonl")
        assert code == 2 and text in err and err.count("\n") == 1


def test_a_training_without_data(base, tokenizer, tmp_path, capsys):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    words = ["train", "--base", tmp_path / "base", "--family", "medusa", "--output", tmp_path / "heads"]
    for extra, code in ((["--dry-run"], 2), (["--synthesize", 24, "--data", "x"], 2), (["--synthesize", 24], 0)):
        settings = ["--max-length", 100, "--answer-tokens", 4, "--no-calibrate", "--set", "max_steps=2"]
        with pytest.raises(SystemExit) as end:
            cli.main([*map(str, [*words, *extra, *settings, "--set", "use_cpu=true"])])
        said = capsys.readouterr()
        assert end.value.code == code, said.err
    assert "24 rows written: " in said.out and "the heads are in" in said.out
    summary = json.loads((tmp_path / "heads" / "training_summary.json").read_text())
    assert len(read(tmp_path / "heads" / "own.jsonl")) == 24 and summary["data"].endswith("own.jsonl")


def test_what_writing_takes_of_the_hours_is_not_trained(base, tokenizer, tmp_path, capsys, monkeypatch):
    base.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    heads, given, now = tmp_path / "heads", [], [0.0]
    heads.mkdir()

    def written(base, file, *others):
        file.write_text("text")
        now[0] += 3600

    monkeypatch.setattr("hf_drafthead.cli.train.time", SimpleNamespace(monotonic=lambda: now[0]))

    monkeypatch.setattr("hf_drafthead.cli.train.own_text", written)
    monkeypatch.setattr("hf_drafthead.training.run.train_heads", lambda *paths, **how: given.append(how["hours"]))

    def train(*more):
        with pytest.raises((SystemExit, AttributeError)) as end:  # AttributeError: nothing was trained
            cli.main(["train", "--base", str(tmp_path / "base"), "--family", "medusa", "--output", str(heads), *more])
        return end.value.code if isinstance(end.value, SystemExit) else None, capsys.readouterr().err

    assert train("--hours", "3") == (None, "") and given == [2.0]
    code, said = train("--hours", "1")
    assert code == 2 and "writing took all of the hours: give more of them, or the chats as --data" in said
    assert train("--hours", "3", "--resume")[0] == 2  # there is no checkpoint
    (heads / "checkpoint-4").mkdir()
    save_file({"w": torch.zeros(1)}, heads / "checkpoint-4" / "model.safetensors")
    (heads / "checkpoint-4" / "trainer_state.json").write_text("{}")
    assert train("--hours", "3", "--resume")[0] is None and given == [2.0, 2.0]
    (heads / "own.jsonl").write_text("as it was")
    code, said = train("--hours", "3")
    assert code == 2 and "holds checkpoints of an earlier training (checkpoint-4): continue it with --resume" in said
    assert (heads / "own.jsonl").read_text() == "as it was"


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
    for words in (
        [*make, "--answer-tokens", 1],
        [*make, "--answer-tokens", 200],
        ["look", tmp_path / "shards", "--tokenizer", tmp_path / "base"],
    ):
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
