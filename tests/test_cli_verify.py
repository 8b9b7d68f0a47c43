"""`hf-drafthead verify`: what it prints and writes, and the code that it ends with."""

import functools
import json
from pathlib import Path

import pytest
import torch
import typer
from datasets import Dataset, DatasetDict
from transformers import pipeline

from hf_drafthead import cli
from hf_drafthead.exactness import is_exact
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.modeling import DraftHeadPreTrainedModel, MedusaForCausalLM
from tests.checkpoints import save_base, save_heads


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base, heads for it and prompts."""
    folder = tmp_path_factory.mktemp("models")
    save_heads(folder, save_base(folder), "medusa")
    rows = [{"prompt": "def f"}, {"prompt": "a class and more"}, {"prompt": "xy"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(folder, command):
    words = ("verify", folder / "medusa", "--prompts", folder / "prompts.jsonl", "--max-new-tokens", 8)
    return functools.partial(command, *words)


def test_heads_that_write_what_the_base_writes_pass(run, tmp_path):
    file = tmp_path / "verdict.json"
    code, out, err = run("--set", "repetition_penalty=1.3", "--batch-size", 2, "--json", file)
    assert (code, err) == (0, "")
    assert out.endswith(" texts are the same.\n") and "float32" not in out
    assert "sampled, batches of 2 with" in out and out.count("repetition_penalty=1.3") == 6
    verdict = json.loads(file.read_text())
    assert verdict["identical"] is True and verdict["shortest"] is None
    assert verdict["prompts"] == 3 and verdict["settings"] == {"repetition_penalty": 1.3}
    assert len(verdict["checks"]) == 12 and all(check["same"] == check["texts"] >= 3 for check in verdict["checks"])


def test_a_difference_ends_with_1_and_the_shortest_prompt_that_shows_it(run, tmp_path, monkeypatch):
    right = DraftHeadGenerationMixin.generate

    def wrong(self, *arguments, **kwargs):
        out = right(self, *arguments, **kwargs)
        if kwargs["input_ids"].shape[1] > 2:
            out.sequences[:, -1] += 1
        return out

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", wrong)
    file = tmp_path / "verdict.json"
    code, out, err = run("--batch-size", 1, "--json", file)
    assert code == 1
    assert err.startswith("hf-drafthead: greedy: the shortest prompt with a difference is 'def f'; after 7 new ")
    assert err.count("\n") == 1
    verdict = json.loads(file.read_text())
    assert verdict["identical"] is False
    assert verdict["shortest"]["text"] == "def f" and verdict["shortest"]["heads"] == verdict["shortest"]["base"] + 1
    assert [check["different"] for check in verdict["checks"]] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["generate", "verify"])
@pytest.mark.parametrize("moment", ["load", "generate"])
@pytest.mark.parametrize(
    "error, text",
    [
        (torch.OutOfMemoryError("CUDA out of memory.\n\nMore."), "there is not enough memory: use a smaller model, "),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: x"), "there is not enough memory: use a smaller "),
        (MemoryError(), "there is not enough memory: use a smaller model, fewer new tokens, or half precision."),
        (ImportError("4 bits require\nbitsandbytes."), "a package is missing or broken (4 bits require bitsandbytes):"),
    ],
)
def test_what_the_machine_lacks_is_told_in_one_line(folder, command, monkeypatch, kind, moment, error, text):
    def failing(*arguments, **kwargs):
        raise error

    if moment == "load":
        monkeypatch.setattr(DraftHeadPreTrainedModel, "from_pretrained", failing)
    else:
        monkeypatch.setattr(DraftHeadGenerationMixin, "generate", failing)
    given = ["--prompt", "x"] if kind == "generate" else ["--prompts", folder / "prompts.jsonl"]
    code, _, err = command(kind, folder / "medusa", *given)
    assert code == 2
    assert err.startswith(f"hf-drafthead: {text}") and err.count("\n") == 1


def test_other_errors_are_not_hidden(folder, monkeypatch):
    for error in (RuntimeError("a shape is wrong"), ModuleNotFoundError("x", name="hf_drafthead.x")):

        def failing(*arguments, error=error, **kwargs):
            raise error

        monkeypatch.setattr(DraftHeadGenerationMixin, "generate", failing)
        with pytest.raises(type(error)):
            cli.main(["generate", str(folder / "medusa"), "--prompt", "x"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, typer.Abort])
def test_an_interruption_has_its_own_code(folder, monkeypatch, command, error):
    def interrupted(*arguments, **kwargs):
        raise error

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", interrupted)
    code, _, err = command("generate", folder / "medusa", "--prompt", "x")
    assert code == 130 and err.endswith("hf-drafthead: interrupted.\n")


def test_calls_that_the_base_decoded_are_told(run):
    code, _, err = run("--set", "num_beams=2", "--limit", 1, "--batch-size", 1)
    assert code == 1
    assert "in 3 calls nothing was guessed, so they verified nothing" in err
    assert "nothing was verified of: greedy with num_beams=2, sampled with num_beams=2, end of text with" in err


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--set", "penalty"], "--set 'penalty' is no NAME=VALUE: give for example"),
        (["--set", "no_such_setting=1"], "no_such_setting"),
        (["--prompts", "nowhere.jsonl"], "there is no data at 'nowhere.jsonl': give a .json, .jsonl or .txt file"),
        (["--max-new-tokens", "120"], "prompts.jsonl line 2: a prompt of 16 tokens and 120 new ones exceed the base's"),
    ],
)
def test_bad_input_is_refused_in_one_line(run, arguments, text):
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert text in err


def test_a_split_of_a_data_set_is_verified(run, tmp_path):
    prompts = Dataset.from_list([{"prompt": "ab"}, {"prompt": "xy"}])
    DatasetDict({"train": prompts, "mine": prompts.select([0])}).save_to_disk(tmp_path / "set")
    words = ("--prompts", tmp_path / "set")
    assert run(*words, "--split", "mine", "--json", tmp_path / "verdict.json")[0] == 0
    assert json.loads((tmp_path / "verdict.json").read_text())["prompts"] == 1
    code, _, err = run(*words)
    assert code == 2 and "has several splits: choose one of train, mine with --split." in err


def test_an_exact_base_is_compared_to_the_bit_and_with_itself_as_it_was(run, tmp_path, monkeypatch):
    file = tmp_path / "verdict.json"
    options = ("--exact", "--dtype", "bfloat16", "--batch-size", 2, "--json", file)
    code, out, err = run(*options)
    assert (code, err) == (0, "") and "Without --exact: " in out
    assert out.rstrip().endswith("texts are the same. The scores of 0 texts have other bits.")
    verdict = json.loads(file.read_text())
    assert verdict["exact"] and verdict["passed"] and not verdict["without_exact"]["exact"]
    assert len(verdict["checks"]) == len(verdict["without_exact"]["checks"]) == 6
    right = DraftHeadGenerationMixin.generate

    def nearly(self, *arguments, **kwargs):
        out = right(self, *arguments, **kwargs)
        if out.logits is not None:
            out.logits[0][0, 7] += 2.0**-6
        return out

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", nearly)
    code, out, err = run(*options)
    assert code == 1 and "texts are the same. The scores of " in out and " 0 texts have" not in out
    assert json.loads(file.read_text())["identical"] is True


def test_a_checkpoint_is_loaded_exact(folder, command):
    words = ("generate", folder / "medusa", "--prompt", "ab", "--max-new-tokens", 4, "--exact", "--dtype")
    code, out, _ = command(*words, "bfloat16")
    assert code == 0 and "cdef" in out
    model = MedusaForCausalLM.from_pretrained(folder / "medusa", dtype=torch.float16, exact=True)
    write = pipeline("text-generation", str(folder / "medusa"), model_kwargs={"exact": True, "dtype": torch.bfloat16})
    assert is_exact(model) and is_exact(write.model) and write.model.base.dtype == torch.bfloat16
    code, _, err = command(*words, "float64")
    assert code == 2 and "torch.float64 is not made exact: load it in one of" in err
