"""The command line: what it prints, what it writes, and how it answers bad input."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_drafthead import zoo
from hf_drafthead.evaluation import bench as benching
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from tests.checkpoints import FAMILIES, TREE, save_all

PROMPT = "def f(self):\n\treturn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A zoo of tiny models: base/, one folder per family, prompts.jsonl."""
    folder = save_all(tmp_path_factory.mktemp("zoo"))
    rows = [{"prompt": text, "category": kind} for text, kind in [("def f", "a"), ("class A", "b"), ("import os", "a")]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def tiny_zoo(folder, monkeypatch) -> Path:
    monkeypatch.setattr(zoo, "ASSETS", folder)
    monkeypatch.setattr("hf_drafthead.zoo.chat.is_installed", lambda: False)
    return folder


def text_of_base(folder: Path, **settings) -> str:
    model, tokenizer = load(str(folder / "medusa"))
    given = tokenizer([PROMPT], return_tensors="pt")
    out = model.base.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **settings)
    return tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_text_of_the_base(folder, command):
    file = folder / "out.json"
    code, out, err = command("generate", folder / "medusa", "--prompt", PROMPT, "--max-new-tokens", 20, "--json", file)
    assert code == 0
    assert out == text_of_base(folder, max_new_tokens=20) + "\n" == "opqrstuvwxyzzzzzzzzz\n"
    assert "20 tokens" in err and "per step" in err
    figures = json.loads(file.read_text())
    assert figures["text"] + "\n" == out and figures["new_tokens"] == 20
    assert figures["tokens_per_step"] == pytest.approx(19 / figures["steps"])


def test_generate_samples_what_the_base_samples_under_the_same_seed(folder, command):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 20, "--temperature", 0.9, "--seed", 7)
    _, out, _ = command("generate", folder / "hydra", *arguments)
    torch.manual_seed(7)
    assert out == text_of_base(folder, max_new_tokens=20, do_sample=True, temperature=0.9) + "\n"


@pytest.mark.parametrize("colour", [[], ["--color"]], ids=["plain", "coloured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_prints_what_generate_prints_at_the_end(folder, command, family, colour):
    arguments = ("generate", folder / family, "--prompt", PROMPT, "--max-new-tokens", 40, *colour)
    _, at_the_end, _ = command(*arguments)
    _, streamed, _ = command(*arguments, "--stream")
    assert streamed == at_the_end
    if family == "medusa":  # its heads have guesses accepted
        assert ("\x1b[32m" in streamed) == bool(colour)


def test_generate_takes_a_tree_by_name_as_paths_and_from_a_file(folder, command, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    steps = []
    for tree in ("hydra_single", json.dumps(TREE), file):
        figures = tmp_path / "figures.json"
        code, _, _ = command("generate", folder / "medusa", "--prompt", PROMPT, "--tree", tree, "--json", figures)
        assert code == 0
        steps.append(json.loads(figures.read_text())["steps"])
    assert steps[1] == steps[2] < steps[0]


def test_info_tells_what_the_checkpoint_holds(folder, command, tmp_path):
    file = tmp_path / "info.json"
    code, out, _ = command("info", folder / "medusa", "--json", file)
    model = AutoModelForCausalLM.from_pretrained(folder / "medusa")
    parameters = sum(parameter.numel() for parameter in model.drafter.parameters())
    assert code == 0
    for words in ("medusa", "llama", f"{parameters:,}", f"{len(TREE) + 1} nodes", "num_layers="):
        assert words in out
    assert "├── 0" not in out and "├── 0" in command("info", folder / "medusa", "--draw")[1]
    figures = json.loads(file.read_text())
    assert figures["parameters"] == parameters
    assert figures["memory"] == 4 * parameters
    assert sorted(figures["tree"]) == sorted(TREE)


def test_demo_measures_every_family_as_bench_does_and_shows_a_sample(tiny_zoo, command, tmp_path):
    file = tmp_path / "demo.json"
    code, out, err = command("demo", "--max-new-tokens", 12, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert (code, err) == (0, "")
    assert [row["family"] for row in rows] == sorted(FAMILIES)
    for row in rows:
        assert {field.name for field in dataclasses.fields(Measurement)} <= set(row)
        assert row["identical"] and row["prompts"] == 3 and row["new_tokens"] == 36
        assert set(row["per_category"]) == {"a", "b"}
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["tokens_per_step"])
    assert rows[0]["tree_nodes"] > 1
    assert out.count("yes") == len(FAMILIES) and "NO" not in out
    assert out.count(" continues 'import os'") == 1  # by the family that needed the fewest steps
    code, out, _ = command("demo", "--family", "medusa", "--prompts", 1, "--max-new-tokens", 4)
    assert code == 0 and " continues 'def f'" in out


def test_the_base_is_loaded_once_and_the_short_demo_takes_few_prompts(tiny_zoo, command, monkeypatch):
    seen = []

    def asked(model, tokenizer, questions, settings, **_):
        seen.append((model.base, len(questions), settings["max_new_tokens"]))
        if len(seen) % 2 == 0:
            raise ValueError("seen")
        return []

    monkeypatch.setattr(benching, "bench", asked)
    for words, expected in (([], (3, 40)), (["--prompts", 2], (2, 40))):
        assert command("demo", *words)[0] == 2
        assert seen[-1][1:] == seen[-2][1:] == expected and seen[-1][0] is seen[-2][0]


def test_demo_ends_with_1_if_an_output_differs(tiny_zoo, command, monkeypatch):
    right = DraftHeadGenerationMixin.generate

    def wrong(self, *arguments, **kwargs):
        out = right(self, *arguments, **kwargs)
        out.sequences[:, -1] += 1
        return out

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", wrong)
    code, out, err = command("demo", "--family", "medusa", "--max-new-tokens", 6)
    assert code == 1
    assert "NO" in out
    assert err.endswith("the output of medusa differs from the base's own: see the column 'same text'.\n")


BAD_MODELS = {
    "no folder": ("nowhere/at/all", "'nowhere/at/all' is no folder, id or file of weights: give one."),
    "not on the Hub": ("org/none", "'org/none' holds no config.json and no weights (We couldn't connect to"),
    "empty folder": ("{folder}/empty", "/empty' holds no config.json and no weights ("),
    "unknown family": ("{folder}/owl", "/owl' holds 'drafthead_owl' heads, expected drafthead_amphista or "),
    "broken weights": ("{folder}/broken", "model.safetensors' is not a readable safetensors file ("),
}


@pytest.fixture
def bad(folder) -> Path:
    (folder / "empty").mkdir(exist_ok=True)
    for name in ("owl", "broken"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(folder / "medusa", folder / name)
    config = json.loads((folder / "owl/config.json").read_text())
    (folder / "owl/config.json").write_text(json.dumps({**config, "model_type": "drafthead_owl"}))
    (folder / "broken/model.safetensors").write_bytes(b"not tensors")
    yield folder
    for name in ("empty", "owl", "broken"):
        shutil.rmtree(folder / name)


def refused(result: tuple[int, str, str], text: str) -> None:
    code, _, err = result
    assert code == 2
    assert err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert text in err


@pytest.mark.parametrize("name, text", BAD_MODELS.values(), ids=BAD_MODELS)
@pytest.mark.parametrize("words", [["info"], ["generate", "--prompt", "x"]], ids=["info", "generate"])
def test_a_bad_model_is_refused_in_one_line(bad, command, words, name, text):
    refused(command(*words, name.format(folder=bad)), text)


@pytest.mark.parametrize(
    "tree, text",
    [
        ("no_such_tree", "draft_tree 'no_such_tree' is no published tree: expected one of eagle_mc_sim_7b_63, "),
        ("[[0], [1, 0]]", "node (1, 0) has no parent: add (1,) to the tree, or drop every node that starts with (1,)."),
        ("[[0], [0", "is not JSON ("),
        ('{"dynamic": {"nodes": 32}', "is not JSON ("),
        ("no_such_file.json", "there is no tree file 'no_such_file.json': give a file of rank paths such as"),
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "but the model has 3 draft heads: drop every path longer than 3."),
        ("[[0], [300]]", "with rank 300, but a vocabulary of 259 tokens has ranks 0 to 258"),
    ],
)
def test_a_bad_tree_is_refused_in_one_line(folder, command, tree, text):
    refused(command("generate", folder / "medusa", "--prompt", "x", "--tree", tree), text)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["generate", "{model}", "--prompt", ""], "the prompt is empty: give the text to continue with --prompt"),
        (["generate", "{model}", "--prompted"], "No such option: --prompted"),
        (["train", "--max-steps", "3"], "a setting that has no option is given by --set max_steps=VALUE"),
        (["generate", "{model}", "--prompt", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens': "),
        (["generate", "{model}", "--prompt", "x", "--max-new-tokens", "many"], "Invalid value for '--max-new-toke"),
        (["generate", "{model}", "--prompt", "x", "--json", "no/such/x"], "lies in 'no/such', which does not exist"),
        (["info", "{model}", "--json", "."], "--json '.' is a folder: give the path of a file in a folder that exis"),
        (["info"], "Missing argument 'MODEL'"),
        (["fly"], "No such command 'fly': see `hf-drafthead --help`."),
        (["demo", "--family", "owl"], "the zoo holds no model 'owl': expected one of base, hydra, medusa"),
        (["demo", "--max-new-tokens", "126"], "new ones exceed the base's 128 positions: shorten the prompt,"),
    ],
)
def test_bad_input_is_refused_in_one_line(tiny_zoo, command, arguments, text):
    refused(command(*(argument.format(model=tiny_zoo / "medusa") for argument in arguments)), text)


def test_the_installed_command_answers_without_a_traceback():
    command = Path(sys.executable).parent / "hf-drafthead"
    ended = subprocess.run([command, "info", "./nowhere"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith("hf-drafthead: './nowhere' is no folder, id or file of weights: give one.")
    assert "Traceback" not in ended.stderr
