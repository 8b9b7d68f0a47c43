"""Every command runs on a base whose generation config sets any field, as published ones do, or says why not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import cli, zoo
from hf_drafthead.generation import programs
from hf_drafthead.trees import calibrate
from tests.callers import table

PROMPTS = ["import os\nimport", "def read(self"]
TOKENS = 8
ROWS = {"verify": 2}  # of the largest call of a command, one in all others


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Nothing is compiled, and a calibration is short: what is tried here is the calls."""
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
    for name, value in (("TIMED_TOKENS", 4), ("PAIRS", 2)):
        monkeypatch.setattr(calibrate, name, value)
    monkeypatch.setattr(calibrate, "LEAST_POSITIONS", 2)


def written(name: str) -> dict[str, Any]:
    """What a generation config holds that sets the field as the table of `generate` tries it."""
    tried = table.SETTINGS[name].call
    if isinstance(tried, str):
        pytest.skip(tried)
    call = tried if isinstance(tried, dict) else tried(table.tools()[0].base)
    fields = {key: value for key, value in call.items() if key in table.SETTINGS and value is not None}
    return json.loads(json.dumps(fields, default=lambda value: value.to_dict()))


@pytest.fixture
def folder(tmp_path) -> Path:
    """The bundled base and Medusa heads, with files to read."""
    for name in ("base", "medusa"):
        (tmp_path / name).mkdir()
        for file in Path(zoo.path(name)).iterdir():
            (tmp_path / name / file.name).symlink_to(file)
    questions = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (tmp_path / "questions.jsonl").write_text(questions)
    (tmp_path / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"{prompt} x = 1\n" * 4}) + "\n" for prompt in PROMPTS)
    )
    return tmp_path


def say(folder: Path, **settings: Any) -> None:
    """Put settings into the generation configs of the base and of the heads, whose own come before the base's."""
    for name in ("base", "medusa"):
        config = folder / name / "generation_config.json"
        before = json.loads(config.read_text())
        config.unlink()
        config.write_text(json.dumps({**before, **settings}))


def words_of(command: str, folder: Path) -> list[str]:
    """The command line."""
    heads, base, asked, limit = (
        folder / "medusa",
        folder / "base",
        folder / "questions.jsonl",
        ["--max-new-tokens", TOKENS],
    )
    words: dict[str, list[Any]] = {
        "generate": [heads, "--prompt", PROMPTS[0], *limit],
        "generate --stream": [heads, "--prompt", PROMPTS[0], "--stream", *limit],
        "bench": [heads, "--questions", asked, "--repeats", 1, "--compare", "none", *limit],
        "verify": [heads, "--prompts", asked, "--batch-size", 2, *limit],
        "calibrate": [heads, "--prompts", asked, "--max-nodes", 3, "--dry-run", *limit],
        "info": [heads, "--probe"],
        "distill": [base, "--data", asked, "--output", folder / "own.jsonl", *limit],
        "train": ["--base", base, "--family", "medusa", "--data", folder / "texts.jsonl", "--output", folder / "heads"],
    }
    more = ["--held-out-rows", 1, "--set", "max_steps=1", "--set", "num_draft_heads=1"] if command == "train" else []
    return [*map(str, [command.partition(" ")[0], *words[command], *more])]


def of_the_base(folder: Path, rows: int) -> str | Exception:
    """What the base alone writes after the first prompt, or what it raises."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    inputs = tokenizer(PROMPTS[:rows], return_tensors="pt", padding=rows > 1, padding_side="left")
    torch.manual_seed(0)
    plain = {"return_dict_in_generate": False, "num_return_sequences": 1}
    try:
        base = AutoModelForCausalLM.from_pretrained(folder / "base")
        tokens = base.generate(**inputs, **plain, max_new_tokens=TOKENS, tokenizer=tokenizer)[0]
    except Exception as error:
        return error
    return tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def run(words: list[str], capsys) -> tuple[int, str, str]:
    """Exit code, output and messages."""
    torch.manual_seed(0)
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    return end.value.code, *capsys.readouterr()


COMMANDS = ["generate", "generate --stream", "bench", "verify", "calibrate", "info", "distill", "train"]
FIELDS = [name for name in table.fields_there_are() if name in table.SETTINGS and not name.startswith("_")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers' own, of settings that it is about to drop
@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_whatever_the_generation_config_of_the_base_says(command, name, folder, capsys, caplog):
    if name == "assistant_early_exit":  # transformers uses in it what it deprecates
        caplog.set_level("ERROR", "transformers.generation.utils")
    say(folder, **written(name))
    right = of_the_base(folder, ROWS.get(command, 1))
    code, out, said = run(words_of(command, folder), capsys)
    if code == 2:  # the base refuses it too, or has no drafts of which a tree could be chosen
        lines = [line for line in said.splitlines() if line.startswith("hf-drafthead: ")]
        refusals = ("never draft on this base", "`streamer` cannot be used with beam")
        known = any(reason in lines[0] for reason in refusals)
        assert len(lines) == 1 and (isinstance(right, Exception) or known), said
        return
    if command == "verify" and code == 1:  # what the base asks for leaves nothing to guess, and so nothing was verified
        assert "nothing was guessed, so they verified nothing" in said, said
        return
    assert code == 0, said
    if command.startswith("generate") and isinstance(right, str) and not written(name).get("token_healing"):
        assert out.rstrip("\n") == right.rstrip("\n")
    if command == "distill":
        text = json.loads((folder / "own.jsonl").read_text().splitlines()[0])["text"]
        assert text.startswith(PROMPTS[0])


def test_texts_end_at_the_strings_of_the_base_s_config_in_every_command(folder, capsys):
    say(folder, stop_strings=["os", "sys"])
    right = of_the_base(folder, 1)
    code, out, _ = run(words_of("generate", folder), capsys)
    assert code == 0 and out.rstrip("\n") == right
    code, *_ = run(words_of("distill", folder), capsys)
    assert code == 0
    assert json.loads((folder / "own.jsonl").read_text().splitlines()[0])["text"] == PROMPTS[0] + right


def test_calibrate_keeps_what_the_generation_config_says(folder, capsys):
    say(folder, return_dict_in_generate=True, stop_strings=["os"])
    words = [word for word in words_of("calibrate", folder) if word != "--dry-run"]
    code, _, said = run(words, capsys)
    assert code == 0, said
    after = json.loads((folder / "medusa" / "generation_config.json").read_text())
    assert after["return_dict_in_generate"] and after["stop_strings"] == ["os"] and after["calibration"]
