"""Before a training what it will take, while it runs what to expect, at its end one report from all processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_drafthead.training import run
from hf_drafthead.training.forecast import Times, _row_length
from hf_drafthead.training.run import train_heads
from tests.training.test_run import written_place
from tests.training.test_trainer import weights

ROOT = Path(__file__).parents[2]
QUICK = {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", "num_train_epochs": 1}
QUICK["recipe"] = "paper"  # projections of their own, though the base is smaller than these
ROWS = 24


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return written_place(tmp_path_factory.mktemp("forecast"))


def train(place, output, **arguments):
    options = {"held_out_rows": 3, "answer_tokens": 8, **QUICK, **arguments}
    return train_heads(str(place / "base"), "medusa", str(place / "texts.jsonl"), output, **options)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "batches",
    [{}, {"gradient_accumulation_steps": 4}, {"max_steps": 3}, {"num_train_epochs": 2, "eval_steps": 5},
     {"max_steps": 3, "eval_strategy": "no"}],
    ids=["an epoch", "accumulated", "steps", "epochs", "one evaluation"],
)  # fmt: skip
def test_what_was_foretold_is_what_happens(place, tmp_path, batches):
    told = []
    dry = train(place, tmp_path / "out", dry_run=True, tell=told.append, **batches)
    expected = dry.summary["forecast"]
    assert not (tmp_path / "out").exists()
    done = train(place, tmp_path / "out", **batches)
    assert expected["steps"] == done.summary["steps"]
    assert expected["batch"] == done.summary["batch_size"]
    assert expected["rows"] == ROWS - 3
    assert expected["parameters"] == expected["trained"] == sum(one.numel() for one in done.model.drafter.parameters())
    evaluations = sum("eval_loss" in one for one in done.history)
    asked = {"eval_steps", "eval_strategy"} & set(batches)  # else at most a tenth of the time
    assert evaluations == expected["evaluations"] if asked else 0 < evaluations <= expected["evaluations"]
    assert 0 < expected["seconds"]
    assert "rows read" in told[0]
    assert f"heads: {expected['parameters']:,} parameters\n" in told[1]
    assert f"data: 21 rows; {expected['steps']:,} steps of " in told[1]


def test_rows_that_were_not_counted_are_as_long_as_some_of_them():
    rows = [{"input_ids": [0] * number} for number in range(1000)]
    assert _row_length(rows) == pytest.approx(499.5, abs=2)
    assert _row_length(rows[:3]) == 1


def test_evaluations_take_at_most_a_tenth_of_the_steps_unless_it_is_said_how_often(place, tmp_path, monkeypatch):
    took = Times(step=1.0, evaluation=0.5, once=7.0)
    monkeypatch.setattr("hf_drafthead.training.forecast._tried", lambda *given: took)
    for given, evaluations in (({}, 3), ({"eval_steps": 2}, 6)):
        dry = train(place, tmp_path / "out", dry_run=True, **given)
        assert (dry.summary["forecast"]["steps"], dry.summary["forecast"]["evaluations"]) == (11, evaluations)
        assert dry.summary["forecast"]["seconds"] == 11 * 1.0 + evaluations * 0.5 + 7.0


def history(folder):
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return json.loads((last / "trainer_state.json").read_text())["log_history"]


def test_trying_a_step_changes_nothing(place, tmp_path, monkeypatch):
    noisy = {"feature_noise": 0.2, "max_steps": 3}  # draws random numbers in every step
    tried = train(place, tmp_path / "tried", **noisy)
    monkeypatch.setattr(run._Run, "_expected", lambda run: None)
    untried = train(place, tmp_path / "untried", **noisy)
    for name, tensor in weights(untried.model.drafter).items():
        assert torch.equal(weights(tried.model.drafter)[name], tensor)
    assert tried.summary["held_out"]["loss"] == untried.summary["held_out"]["loss"]


@pytest.mark.parametrize("asked", [None, 300])
def test_a_quick_training_is_for_fewer_tokens_unless_asked(place, tmp_path, monkeypatch, asked):
    monkeypatch.setattr(run, "LEAST_CHOICES", 100)
    monkeypatch.setattr(run, "MOST_CHOICES", 200)
    told, fields = [], {} if asked is None else {"draft_vocab_size": asked}
    dry = train(place, tmp_path / "out", recipe="quick", dry_run=True, tell=told.append, fields=fields)
    assert dry.model.config.draft_vocab_size == (asked or 100)
    assert sum("the heads choose among" in line for line in told) == (asked is None)


def test_a_base_that_learns_along_is_counted(place, tmp_path):
    told = []
    dry = train(place, tmp_path / "out", joint=True, lora_rank=0, dry_run=True, tell=told.append)
    expected = dry.summary["forecast"]
    assert expected["trained"] > expected["parameters"]
    assert f", {expected['trained']:,} trained with those of the base\n" in told[1]


def words(place, output, *more):
    pairs = [f"{name}={json.dumps(value).strip(chr(34))}" for name, value in QUICK.items()]
    settings = [word for pair in pairs for word in ("--set", pair)]
    base = ["--base", str(place / "base"), "--family", "medusa", "--data", str(place / "texts.jsonl")]
    return ["train", *base, "--output", str(output), "--held-out-rows", "3", "--answer-tokens", "8", *settings, *more]


def test_a_training_shows_what_to_expect_and_no_dictionaries(place, tmp_path, command):
    code, out, err = command(*words(place, tmp_path / "out"))
    assert code == 0
    assert "{" not in err + out
    assert "\r" not in err and "step 9 of 11, loss" not in out  # lines in a log, and these on the error stream
    assert "step 9 of 11" in err
    assert "step 11 of 11: held-out loss " in err + out
    assert ", expected tokens per step " in err + out and "; first guess right: head 1 " in err + out
    assert "head 1: first guess right " in out and "head 0" not in out


@pytest.mark.slow
def test_several_processes_report_once(place, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    given = words(place, tmp_path / "out", "--json", str(tmp_path / "summary.json"))
    ended = subprocess.run([*command, "hf_drafthead", *given], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    for line in (
        "rows read",
        "steps of 4 rows",
        "head 1: first guess right",
        "expected tokens per step of",
        "the heads are in",
    ):
        assert ended.stdout.count(line) == 1, line
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 6
