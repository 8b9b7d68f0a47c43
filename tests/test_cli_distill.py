"""`hf-drafthead distill`: what it prints and writes, and how it answers bad input."""

import functools
import json

import datasets
import pytest
from transformers import AutoTokenizer

from hf_drafthead.data import read_rows
from hf_drafthead.training.data import tokenize_rows
from tests.checkpoints import byte_tokenizer, save_base, save_heads
from tests.training.chat_templates import WITHOUT_END

CHATS = [{"conversations": [{"from": "human", "value": words}, {"from": "gpt", "value": "x"}]} for words in "amt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base that recites the alphabet, with heads and without; and chats."""
    folder = tmp_path_factory.mktemp("models")
    base = save_base(folder)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = WITHOUT_END
    tokenizer.save_pretrained(base)
    tokenizer.save_pretrained(save_heads(folder, base, "medusa"))
    (folder / "chats.json").write_text(json.dumps(CHATS))
    (folder / "texts.jsonl").write_text('{"text": "uvw"}\n{"text": "a"}\n')
    (folder / "template.jinja").write_text(WITHOUT_END.replace("Assistant:", "abc"))
    return folder


@pytest.fixture
def run(command, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    return functools.partial(command, "distill")


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("model", ["base", "medusa"])
def test_answers_are_written_and_counted(folder, run, tmp_path, model):
    output, figures = tmp_path / "out.jsonl", tmp_path / "figures.json"
    arguments = (folder / model, "--data", folder / "texts.jsonl", "--output", output, "--max-new-tokens", 5)
    code, out, _ = run(*arguments, "--json", figures)
    assert code == 0
    assert read(output) == [
        {"row": 0, "text": "uvwxyzzz", "given": 3, "ids": byte_tokenizer()("xyzzz")["input_ids"]},
        {"row": 1, "text": "abcdef", "given": 1, "ids": byte_tokenizer()("bcdef")["input_ids"]},
    ]
    assert out.startswith("2 rows written: 2 answers of 10 tokens in ")
    told = json.loads(figures.read_text())
    assert (told["rows"], told["written"], told["tokens"], told["cut"]) == (2, 2, 10, 2)
    assert (told["tokens_per_step"] is None) == (model == "base")
    code, out, _ = run(*arguments)
    assert code == 0 and out.startswith("0 rows written, 2 were there already: ")


def test_chats_are_answered_with_the_template_that_was_given(folder, run, tmp_path):
    output = tmp_path / "out.jsonl"
    arguments = ("--data", folder / "chats.json", "--output", output, "--max-new-tokens", 6)
    code, _, _ = run(folder / "medusa", *arguments, "--chat-template", folder / "template.jinja")
    assert code == 0
    answers = [row["messages"] for row in read(output)]
    assert [chat[0]["content"] for chat in answers] == list("amt")
    assert {chat[1]["content"] for chat in answers} == {"defghi"}
    examples, report = tokenize_rows(read_rows(output), AutoTokenizer.from_pretrained(folder / "base"))
    assert report.kept == len(examples) == 3


BAD = {
    "model": (["nowhere/at/all"], {}, "'nowhere/at/all'"),
    "output": (["{folder}/base"], {"--output": "no/such/x"}, "--output 'no/such/x' lies in 'no/such', which"),
    "foreign": (["{folder}/base"], {"--output": "{folder}/texts.jsonl"}, "texts.jsonl' exists and was not written by "),
    "top-p": (["{folder}/base"], {"--top-p": "2"}, "top_p is 2.0: expected a number above 0, at most 1."),
    "length": (["{folder}/base"], {"--max-length": "500"}, "max_length is 500, but the base has 128 positions: give"),
    "template": (["{folder}/base"], {"--chat-template": "x"}, "there is no chat template 'x': give a Jinja"),
    "no model": ([], {}, "no model is named: give MODEL, or --endpoint URL --model NAME."),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line(folder, run, tmp_path, name):
    models, options, text = BAD[name]
    options = {"--data": folder / "texts.jsonl", "--output": tmp_path / "out.jsonl", **options}
    words = [*models, *(str(word) for option in options.items() for word in option)]
    code, _, err = run(*(word.format(folder=folder) for word in words))
    assert code == 2
    assert err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert text in err
