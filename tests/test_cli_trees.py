"""`hf-drafthead calibrate` and `costs`: what they print and store, and the code that they end with."""

import functools
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_drafthead.cli import common
from hf_drafthead.cli.trees import entry_in_words
from hf_drafthead.trees import calibrate, costs
from hf_drafthead.trees.entries import CalibrationKey, cpu_name
from tests.checkpoints import save_base, save_heads


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A base, heads for it and prompts."""
    monkeypatch.setattr(calibrate, "TIMED_TOKENS", 5)
    monkeypatch.setattr(calibrate, "PAIRS", 9)
    monkeypatch.setattr(calibrate, "LEAST_POSITIONS", 20)
    save_heads(tmp_path, save_base(tmp_path), "medusa")
    rows = [{"prompt": "def f"}, {"prompt": "a class and more"}, {"prompt": "xy"}, {"prompt": "hijk"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def run(folder, command):
    return functools.partial(command, "calibrate", folder / "medusa", "--max-new-tokens", 16, "--max-nodes", 5)


def stored(folder: Path) -> list:
    return json.loads((folder / "medusa" / "generation_config.json").read_text()).get("calibration", [])


def test_trees_are_printed_and_stored_for_each_batch_size(run, folder, tmp_path):
    prompts = ("--prompts", folder / "prompts.jsonl")
    code, out, err = run(*prompts, "--batch-size", "1,2", "--json", tmp_path / "found.json")
    assert code == 0, err
    lines = out.splitlines()
    assert [line.split(", ")[2] for line in lines] == ["batch size 1", "batch size 2"]
    assert all(line.startswith(f"{cpu_name()} with ") and ", eager steps: " in line for line in lines)
    found = json.loads((tmp_path / "found.json").read_text())["entries"]
    assert found == stored(folder) and [entry["batch_size"] for entry in found] == [1, 2]
    model = AutoModelForCausalLM.from_pretrained(folder / "medusa")
    nodes = set()
    ids = torch.full((1, 4), 70)
    model.generate(ids, max_new_tokens=6, on_step=lambda record: nodes.add(record.drafted) if record.step else None)
    tree, copies = (found[0][name] for name in ("tree", "lookup"))
    # what paid is the clock's to say; where it is copies alone, a step without a match has the root alone
    assert nodes == {len(tree) + 1} if tree else nodes <= {1, copies + 1}
    code, out, _ = run(*prompts, "--batch-size", "3")
    assert code == 0 and stored(folder)[:2] == found and stored(folder)[2]["batch_size"] == 3


def test_a_line_says_for_what_which_tree_and_how_fast():
    measured = {
        "tokens_per_step": 2.349, "tokens_per_second": 189.4, "base_tokens_per_second": 150.2, "speedup": 1.263,
        "candidates": [[2, 1, 1.5, 0.91], [3, 1, 1.7, 0.95]],
    }  # fmt: skip
    key = CalibrationKey("NVIDIA X", None, "float32", 2, "compiled", None)
    entry = {**key._asdict(), "measured": measured}
    first = "NVIDIA X, float32, batch size 2, compiled steps: "
    assert entry_in_words({**entry, "tree": [[0], [1]]}) == (
        f"{first}a tree of 3 nodes is 1.26x as fast as the base (189 against 150 tokens/s, 2.35 tokens per step)"
    )
    nothing = "no tree pays (the fastest is 0.95x the base), so the base decodes by itself"
    assert (
        entry_in_words({**entry, "tree": []}) == entry_in_words({**entry, "tree": [], "lookup": 0}) == first + nothing
    )
    for tree, words in (([[0]], "a tree of 2 nodes"), ([], "a tree of 1 nodes")):
        copied = f"{first}{words} with 8 copied tokens is 1.26x as fast as the base (189 against 150"
        assert copied in entry_in_words({**entry, "tree": tree, "lookup": 8})


def test_a_dry_run_stores_nothing_and_the_base_can_write_the_prompts(run, folder):
    code, out, _ = run("--dry-run")
    assert code == 0 and "batch size 1, " in out and stored(folder) == []


def test_info_shows_what_was_calibrated(folder, run, command):
    run("--prompts", folder / "prompts.jsonl")
    out = command("info", folder / "medusa")[1]
    assert f"calibrated     {entry_in_words(stored(folder)[0])}" in out
    config = folder / "medusa" / "generation_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps({**settings, "draft_tree": "mc_sim_7b_63", "calibration": [{"tree": []}, "no entry"]}))
    out = command("info", folder / "medusa")[1]
    assert "calibrated" not in out


def test_progress_is_a_line_per_tenth(run, folder, monkeypatch):
    monkeypatch.setattr(common, "LOG_SECONDS", 0.0)
    code, _, err = run("--prompts", folder / "prompts.jsonl")
    assert code == 0 and len([line for line in err.splitlines() if line.startswith("batch size 1: ")]) >= 9


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["--batch-size", "0"], "--batch-size '0': expected whole numbers above 0"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--max-nodes", "1000000"], "--max-nodes"),
        (["--max-new-tokens", "127", "--prompts", "{folder}/prompts.jsonl"], "exceed the base's 128 positions"),
        (["--prompts", "{folder}/prompts.jsonl", "--limit", "1", "--max-new-tokens", "2"], "1 prompts are too few"),
    ],
)
def test_bad_input_is_one_line(run, folder, command, arguments, line):
    assert "'org/heads' is no folder where trees can be stored: save the" in command("calibrate", "org/heads")[2]
    code, _, err = run(*(word.format(folder=folder) for word in arguments))
    said = err.strip().splitlines()[-1]
    assert code == 2 and line in said and said.startswith("hf-drafthead: ")
    assert stored(folder) == []


def test_costs_are_shown_with_their_file_and_cleared(tmp_path, monkeypatch, command):
    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.json")
    costs._keep("a CPU", {"8 nodes in 3 levels": [1.5, 1.2], "9 nodes": []})

    def shown(*options):
        code, out, _ = command("costs", *options)
        assert code == 0
        return out.splitlines()

    lines = shown("--json", tmp_path / "shown.json")
    assert lines[:2] == [str(tmp_path / "costs.json"), "a CPU:"]
    assert "  8 nodes in 3 levels: 1.50 steps of the base (half of the times at most 1.20 as long), 20" in lines[2]
    assert "  9 nodes: not measurable, 20" in lines[3]
    assert json.loads((tmp_path / "shown.json").read_text())["costs"]["a CPU"]["8 nodes in 3 levels"][0] == 1.5
    assert shown("--clear")[-1] == "removed: costs of 1 kind(s) of calls." and not costs.FILE.exists()
    assert shown() == [str(costs.FILE)]
