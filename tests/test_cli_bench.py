"""`hf-drafthead bench`: what it prints and writes, and how it answers bad input."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from hf_drafthead import zoo
from hf_drafthead.cli import common
from hf_drafthead.cli.common import parse_settings
from hf_drafthead.evaluation import bench as benching
from hf_drafthead.evaluation import questions
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.questions import read_questions
from tests.checkpoints import save_all

FIELDS = {field.name for field in dataclasses.fields(Measurement)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base, heads of two families, prompts and conversations."""
    folder = save_all(tmp_path_factory.mktemp("models"))
    rows = {
        "prompts": [{"prompt": "def f", "category": "a", "reference": "ghijklmn"}, {"prompt": "xy", "category": "b"}],
        "chats": [{"turns": ["ab", "cd"], "category": "a"}, {"turns": ["ef"], "category": "b"}],
        "long": [{"prompt": "x" * 125}],
        "odd": [{"prompt": "x"}, {"question": "x"}],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "chat.jinja").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    return folder


@pytest.fixture
def run(folder, command, monkeypatch):
    def call(*arguments) -> tuple[int, str, str]:
        words = [str(argument).format(folder=folder) for argument in ("bench", *arguments)]
        monkeypatch.setattr("sys.argv", ["hf-drafthead", *words])
        return command(*words)

    return call


QUICK = ("--max-new-tokens", 8, "--repeats", 1)


def test_one_model_gives_one_object_with_every_field(run, tmp_path, monkeypatch):
    monkeypatch.setattr(common, "LOG_SECONDS", 0.0)
    file = tmp_path / "evaluation.json"
    code, out, err = run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, "--json", file)
    figures = json.loads(file.read_text())
    assert code == 0 and FIELDS <= set(figures)
    assert figures["questions"] == "prompts.jsonl" and "bench" in figures["command"]
    assert (figures["dtype"], figures["device"]) == ("float32", "cpu")
    assert figures["identical"] is True and list(figures["per_category"]) == ["a", "b"]
    assert "\n  a " in out and "\n  b " in out  # by category
    progress = [re.fullmatch(r"medusa: (\d) of 2 done after \d+ s", line) for line in err.splitlines()]
    assert [match[1] for match in progress] == ["0", "1", "2"]  # plain lines where there is no terminal
    assert figures["efficiency"] == pytest.approx(figures["speedup"] / figures["tokens_per_step"])
    assert "medusa" in out and "yes" in out
    assert "  prompt-lookup" in out and figures["compared"]["prompt-lookup"]["identical"]
    assert out.splitlines()[-1].startswith("medusa: ") and "x: " in out.splitlines()[-1]


def test_several_trees_are_measured_one_by_one(run, tmp_path):
    file = tmp_path / "figures.json"
    trees = ("--tree", "[[0]]", "--draft-tree", "[[0], [1], [0, 0]]", "--compare", "none")
    code, out, err = run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, *trees, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert (code, err) == (0, "")
    assert [(row["tree_nodes"], row["compared"]) for row in rows] == [(2, {}), (4, {})]
    assert "medusa 2 nodes: " in out and "medusa 4 nodes: " in out


def test_copies_from_the_text_are_rows_side_by_side(run, tmp_path):
    file = tmp_path / "figures.json"
    options = ("--tree", "[[0], [1]]", "--lookup", "0,2", "--limit", 1, "--json", file)
    code, out, err = run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, *options)
    rows = json.loads(file.read_text())["rows"]
    assert (code, err) == (0, "")
    expected = [{"acceptance": "exact", "prompt_lookup_num_tokens": copied} for copied in (0, 2)]
    assert [row["acceptance"] for row in rows] == expected
    assert all(row["identical"] and row["compared"]["prompt-lookup"]["identical"] for row in rows)
    assert "medusa lookup 0: " in out and "medusa lookup 2: " in out


def test_several_models_stand_side_by_side(run, tmp_path):
    file = tmp_path / "figures.json"
    chats = ("--questions", "{folder}/chats.jsonl", "--chat-template", "{folder}/chat.jinja")
    assert run("{folder}/medusa", "nowhere/at/all", *chats, *QUICK, "--json", file)[0] == 2 and not file.exists()
    code, out, _ = run("{folder}/medusa", "{folder}/hydra", *chats, *QUICK, "--json", file)
    assert code == 0
    rows = json.loads(file.read_text())["rows"]
    expected = [("medusa", 3, True), ("hydra", 3, True)]
    assert [(row["family"], row["prompts"], row["identical"]) for row in rows] == expected
    assert out.count("medusa") == out.count("hydra") == 2  # the table, and the sentence at the end


def test_several_temperatures_are_a_curve_with_every_kind_of_acceptance_and_batch_size(run, tmp_path):
    file = tmp_path / "figures.json"
    options = ("--temperature", "0,0.5,1", "--batch-size", "1,2", "--seed", 5, "--set", "top_k=20", "--limit", 1)
    words = ("--questions", "{folder}/prompts.jsonl", *QUICK, *options, "--json", file)
    code, out, _ = run("{folder}/medusa", *words)
    assert code == 0
    rows = json.loads(file.read_text())["rows"]
    ways = [(0, "exact"), *((heat, kind) for heat in (0.5, 1.0) for kind in ("exact", "typical"))]
    found = [
        (row["settings"].get("temperature", 0), row["acceptance"]["acceptance"], row["batch_size"]) for row in rows
    ]
    assert found == [(*way, size) for way in ways for size in (1, 2)]
    assert rows[-1]["settings"] == {"max_new_tokens": 8, "do_sample": True, "temperature": 1.0, "top_k": 20}
    assert all(row["identical"] for row in rows if row["acceptance"]["acceptance"] == "exact")
    assert "medusa batch 2 T=0.5" in out and "typical" in out


def test_an_interruption_writes_and_marks_what_was_measured(run, tmp_path, monkeypatch):
    right, calls = benching.BenchRun._round, []

    def interrupted(self, *arguments):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return right(self, *arguments)

    monkeypatch.setattr(benching.BenchRun, "_round", interrupted)
    file = tmp_path / "figures.json"
    code, out, err = run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, "--json", file)
    assert code == 130
    assert "interrupted: the figures, marked with *, are those of the prompts that were finished, and are kept" in err
    assert "medusa *" in out
    figures = json.loads(file.read_text())
    assert (figures["prompts"], figures["complete"], figures["stopped"]) == (1, False, "interrupted")


def test_questions_are_named_so_that_they_can_be_found(run, folder, tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    source = read_questions(folder / "prompts.jsonl")
    monkeypatch.setattr(questions, "read_questions", lambda name, split, limit: source[:limit])
    options = ("--split", "test", "--limit", 1)
    run("{folder}/medusa", "--questions", "org/mt", *options, *QUICK, "--json", file)
    figures = json.loads(file.read_text())
    assert (figures["questions"], figures["split"], figures["limit"]) == ("org/mt", "test", 1)
    run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, "--json", file)
    figures = json.loads(file.read_text())
    assert figures["questions"] == "prompts.jsonl" and not {"split", "limit"} & set(figures)


def test_texts_to_stop_at_are_looked_for(run, tmp_path):
    file = tmp_path / "figures.json"
    stops = ("--set", 'stop_strings=["hi"]')
    code, _, err = run("{folder}/medusa", "--questions", "{folder}/prompts.jsonl", *QUICK, *stops, "--json", file)
    assert (code, err) == (0, "")
    figures = json.loads(file.read_text())
    assert figures["settings"]["stop_strings"] == ["hi"] and "tokenizer" not in figures["settings"]
    assert figures["identical"] and figures["new_tokens"] < 16


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--questions", "{folder}/odd.jsonl"], 'odd.jsonl line 2 is {{"question": "x"}}: expected a chat as'),
        (["--questions", "{folder}/long.jsonl"], "long.jsonl line 1: a prompt of 125 tokens and 256 new ones exceed"),
        (["--questions", "{folder}/prompts.jsonl", "--batch-size", "1,0"], "--batch-size '1,0': expected whole"),
        (["--questions", "{folder}/prompts.jsonl", "--temperature", "0,-1"], "expected numbers from 0 with commas"),
        (["--questions", "{folder}/prompts.jsonl", "--compare", "x", *map(str, QUICK)], "--compare 'x' is not known: "),
        (["--questions", "{folder}/prompts.jsonl", "--set", "x=1", *map(str, QUICK)], "`model_kwargs` are not used by"),
        (
            ["--questions", "{folder}/prompts.jsonl", "--batch-size", ""],
            "--batch-size '': expected whole numbers above",
        ),
        (["--questions", "{folder}/prompts.jsonl", "--seed", f"{2**32}"], "should be less than or equal to 4294967295"),
        (["--questions", "{folder}/prompts.jsonl", "--set", "streamer=x"], "streamer=x: expected a setting of a Gen"),
        ([], "Missing option '--questions': see `hf-drafthead bench --help`."),
    ],
)
def test_bad_input_is_refused_in_one_line(run, arguments, text):
    code, _, err = run("{folder}/medusa", *arguments)
    assert code == 2
    assert err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert text.replace("{{", "{").replace("}}", "}") in err


@pytest.mark.parametrize(
    "pair, expected",
    [
        ("temperature=hot", "a number."),
        ("top_p=x", "a number."),
        ("min_length=2.5", "a whole number."),
        ("top_k=true", "a whole number."),
        ("do_sample=often", "true or false."),
        ("watermarking_config=3", "a JSON object."),
    ],
)
@pytest.mark.parametrize("words", [("bench", "./nowhere", "--questions"), ("verify", "./nowhere", "--prompts")])
def test_a_setting_of_another_type_is_refused_before_anything_is_loaded(command, words, pair, expected):
    code, _, err = command(*words, zoo.ASSETS / "prompts.jsonl", "--set", pair)
    name, _, value = pair.partition("=")
    assert code == 2 and f"--set {name}={value.replace('true', 'True')}: expected {expected}\n" in err


def test_a_whole_number_will_do_for_a_float():
    expected = {"temperature": 1.0, "top_k": 3, "do_sample": True, "stop_strings": "x"}
    assert parse_settings(["temperature=1", "top_k=3", "do_sample=true", "stop_strings=x"]) == expected
    assert isinstance(parse_settings(["temperature=1"])["temperature"], float)
