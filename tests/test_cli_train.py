"""`hf-drafthead train` answers bad input with one line and exit code 2, before it trains anything."""

import json
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from accelerate import PartialState

from hf_drafthead import door, zoo
from hf_drafthead.cli.common import parse_tree, read_template
from hf_drafthead.cli.train import outcome
from hf_drafthead.data.chats import Chat
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.base_model import load_tokenizer
from hf_drafthead.training.templates import ChatEncoder
from tests.training.chat_templates import tokenizer_with


@pytest.mark.parametrize(
    "changed, line",
    [
        (["--family", "meduza"], "the family 'meduza' is not known: expected one of amphista, amphista-alpha, dflash,"),
        (["--data", "nowhere.jsonl"], "there is no data at 'nowhere.jsonl': give a .json, .jsonl or .txt file"),
        (["--base", "/no/base"], "the base '/no/base' was not found (there is no such folder)"),
        (["--set", "lr"], "--set 'lr' is no NAME=VALUE: give for example --set learning_rate=1e-3."),
        (["--set", "num_heads=3"], "'num_heads' is neither a config field of medusa ("),
        (["--set", "num_heads=3"], " nor a training argument: did you mean num_draft_heads?"),
        (["--set", "learning_rate=fast"], "learning_rate is 'fast': expected a number."),
        (["--set", "max_steps=2.5"], "max_steps is 2.5: expected a whole number."),
        (["--set", "use_cpu=maybe"], "use_cpu is 'maybe': expected true or false."),
        (["--set", "head_decay=0"], "head_decay is 0: expected a number above 0."),
        (["--set", "per_device_train_batch_size=0"], "per_device_train_batch_size is 0: expected a number above 0."),
        (["--set", "num_train_epochs=0"], "num_train_epochs is 0: expected a number above 0."),
        (["--set", "max_steps=0"], "max_steps is 0: expected a number above 0."),
        (["--set", "learning_rate=0"], "learning_rate is 0: expected a number above 0."),
        (["--data", ""], "there is no data at '': give a .json, .jsonl or .txt file"),
        (["--dtype", "float99"], "--dtype 'float99' is no floating point type: expected auto, float32, bfloat16 or"),
        ([], "the data holds 1 rows, of which 1 are to be held out: give more data, or hold out fewer with"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(changed, line, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": "def f(a):\n    return a"}))
    given = {"--base": zoo.path("base"), "--family": "medusa", "--data": "one.jsonl", "--output": "out"}
    given |= dict(zip(*[iter(changed)] * 2, strict=True))
    code, _, err = command("train", *(word for pair in given.items() for word in pair))
    said = err.strip().splitlines()[-1]
    assert code == 2 and said.startswith("hf-drafthead: ") and line in said
    assert not (tmp_path / "out").exists()


def test_heads_of_others_are_made_ready_once_and_for_one_start_alone(monkeypatch, command):
    """By the first process of several; another id, into the same output, does not begin with what was made of one."""
    first, folders = MagicMock(), []

    def start_from(heads, folder, *others):
        folders.append((folder, first.__enter__.call_count - first.__exit__.call_count))
        raise ValueError("enough")

    monkeypatch.setattr(PartialState, "main_process_first", lambda self: first)
    monkeypatch.setattr(door, "start_from", start_from)
    first.__exit__.return_value = False
    for heads in ("org/one", "org/other", "org/one"):
        assert command("train", "--from", heads, "--output", "out")[0] == 2
    one, other, again = folders
    assert one == again != other and one[1] == 1


def test_the_outcome_says_at_which_temperature_the_tokens_per_step_are_expected():
    summary = {"held_out": {"head0_top1": 0.5, "head0_top5": 0.75}, "tokens_per_step": 1.5, "answer_temperature": 0.7}
    accuracy = "head 1: first guess right 50.0 %, among the first five 75.0 %"
    expected = "expected tokens per step of a 64-node tree"
    assert outcome(summary) == [accuracy, f"{expected} at temperature 0.7: 1.50"]
    assert outcome({**summary, "answer_temperature": 0.0}) == [accuracy, f"{expected}: 1.50"]
    assert outcome({**summary, "tokens_per_step": None}) == [accuracy]


def test_the_template_of_vicuna_comes_with_the_package(tmp_path):
    """Its tokenizer brings none; the words of the answers are marked."""
    template = read_template(Path("vicuna"))
    encoder = ChatEncoder(tokenizer_with(template))
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Arr!"}]
    text, ((begin, end),) = encoder.spans(Chat(messages))
    assert text.startswith("<s>A chat between a curious user and an artificial") and text[begin:end] == " Arr!</s>"
    with pytest.raises(OSError, match="there is no chat template 'vicunya': give a Jinja file, or 'vicuna'"):
        read_template(Path("vicunya"))


def test_a_byte_order_mark_is_no_part_of_a_template_or_a_tree(tmp_path):
    template, tree = tmp_path / "chat.jinja", tmp_path / "tree.json"
    template.write_text("{{ messages }}", encoding="utf-8-sig")
    tree.write_text("[[0], [1]]", encoding="utf-8-sig")
    assert read_template(template) == "{{ messages }}"
    assert parse_tree(str(tree)) == DraftTree([[0], [1]])


def test_the_vocabulary_is_a_ranking_of_the_tokens_of_a_text(tmp_path, command):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "import os\nimport os\nimport sys\n"}) + "\n")
    words = ("vocabulary", zoo.path("base"), "--data", tmp_path / "texts.jsonl", "--size", 3)
    assert command(*words, "--output", tmp_path / "ranking.json")[0] == 0
    tokenizer = load_tokenizer(zoo.path("base"))
    counts = Counter(tokenizer("import os\nimport os\nimport sys\n")["input_ids"])
    ranking = json.loads((tmp_path / "ranking.json").read_text())
    assert [counts[token] for token in ranking] == sorted(counts.values(), reverse=True)[:3]
