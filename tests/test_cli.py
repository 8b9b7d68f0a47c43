"""The command line: what it prints, what it writes, and how it answers bad input."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_drafthead import cli, zoo
from hf_drafthead.cli import demo
from hf_drafthead.evaluation import compare_with_base, look
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.prompts import read_prompts
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from tests.checkpoints import FAMILIES, TREE, save_base, save_heads

PROMPT = "def f(self):\n\treturn"
DESIGN_FIELDS = {
    "model",
    "base",
    "family",
    "device",
    "dtype",
    "batch_size",
    "prompts",
    "new_tokens",
    "base_forwards",
    "tokens_per_step",
    "base_tokens_per_second",
    "tokens_per_second",
    "speedup",
    "speedup_over_compiled",
    "efficiency",
    "identical",
    "per_category",
    "tree_nodes",
    "transformers",
    "torch",
    "tokens_per_step_published_tree",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A zoo of tiny models: base/, one folder per family, prompts.jsonl."""
    folder = tmp_path_factory.mktemp("zoo")
    base = save_base(folder)
    for family in FAMILIES:
        save_heads(folder, base, family)
    rows = [{"prompt": text, "category": kind} for text, kind in [("def f", "a"), ("class A", "b"), ("import os", "a")]]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def run(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            cli.main([str(argument) for argument in arguments])
        return end.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def tiny_zoo(folder, monkeypatch) -> Path:
    monkeypatch.setattr(zoo, "ASSETS", folder)
    return folder


def text_of_base(folder: Path, **settings) -> str:
    model, tokenizer = load(str(folder / "medusa"))
    given = tokenizer([PROMPT], return_tensors="pt")
    out = model.base.generate(input_ids=given["input_ids"], attention_mask=given["attention_mask"], **settings)
    return tokenizer.decode(out[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_prints_the_text_of_the_base(folder, run):
    code, out, err = run("generate", folder / "medusa", "--prompt", PROMPT, "--max-new-tokens", 20)
    assert code == 0
    assert out == text_of_base(folder, max_new_tokens=20) + "\n" == "opqrstuvwxyzzzzzzzzz\n"
    assert "20 tokens" in err and "per step" in err


def test_generate_samples_what_the_base_samples_under_the_same_seed(folder, run):
    arguments = ("--prompt", PROMPT, "--max-new-tokens", 20, "--temperature", 0.9, "--seed", 7)
    _, out, _ = run("generate", folder / "hydra", *arguments)
    torch.manual_seed(7)
    assert out == text_of_base(folder, max_new_tokens=20, do_sample=True, temperature=0.9) + "\n"


@pytest.mark.parametrize("colour", [[], ["--color"]], ids=["plain", "coloured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_prints_what_generate_prints_at_the_end(folder, run, family, colour):
    arguments = ("generate", folder / family, "--prompt", PROMPT, "--max-new-tokens", 40, *colour)
    _, at_the_end, _ = run(*arguments)
    _, streamed, _ = run(*arguments, "--stream")
    assert streamed == at_the_end
    if family == "medusa":  # its heads have guesses accepted
        assert ("\x1b[32m" in streamed) == bool(colour)


def test_generate_takes_a_tree_by_name_as_paths_and_from_a_file(folder, run, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(TREE))
    steps = []
    for tree in ("hydra_single", json.dumps(TREE), file):
        figures = tmp_path / "figures.json"
        code, _, _ = run("generate", folder / "medusa", "--prompt", PROMPT, "--tree", tree, "--json", figures)
        assert code == 0
        steps.append(json.loads(figures.read_text())["steps"])
    assert steps[1] == steps[2] < steps[0]


def test_generate_writes_its_figures(folder, run, tmp_path):
    file = tmp_path / "out.json"
    _, out, _ = run("generate", folder / "medusa", "--prompt", PROMPT, "--max-new-tokens", 20, "--json", file)
    figures = json.loads(file.read_text())
    assert figures["text"] + "\n" == out
    assert figures["new_tokens"] == 20
    assert figures["tokens_per_step"] == pytest.approx(19 / figures["steps"])


def test_info_tells_what_the_checkpoint_holds(folder, run, tmp_path):
    file = tmp_path / "info.json"
    code, out, _ = run("info", folder / "medusa", "--json", file)
    model = AutoModelForCausalLM.from_pretrained(folder / "medusa")
    parameters = sum(parameter.numel() for parameter in model.drafter.parameters())
    assert code == 0
    for words in ("medusa", "llama", f"{parameters:,}", f"{len(TREE) + 1} nodes", "├── 0", "num_layers="):
        assert words in out
    figures = json.loads(file.read_text())
    assert figures["parameters"] == parameters
    assert figures["memory"] == 4 * parameters
    assert sorted(figures["tree"]) == sorted(TREE)


def test_demo_measures_every_family_and_shows_a_sample(tiny_zoo, run, tmp_path):
    file = tmp_path / "demo.json"
    code, out, _ = run("demo", "--full", "--max-new-tokens", 12, "--repeats", 1, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert code == 0
    assert [row["family"] for row in rows] == sorted(FAMILIES)
    for row in rows:
        assert DESIGN_FIELDS <= set(row)
        assert row["identical"] and row["identical_published_tree"]
        assert row["prompts"] == 3 and row["new_tokens"] == 36
        assert set(row["per_category"]) == {"a", "b"}
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["tokens_per_step"])
    assert out.count("yes") == 2 * len(FAMILIES) and "NO" not in out
    assert out.count(" continues 'import os'") == 1  # by the family that needed the fewest steps


def test_a_short_demo_measures_the_base_beside_every_family_and_grows_line_by_line(
    tiny_zoo, run, tmp_path, monkeypatch
):
    calls, bases, captured = [], [], []
    right = look.decoding_methods

    def counting(model, tokenizer, **options):
        bases.append(model.base)
        if options.get("acceptance"):  # nothing is compiled in a test
            captured.append(options.pop("acceptance"))
        found = right(model, tokenizer, **options)
        base = found["base"]
        found["base"] = lambda given, settings: calls.append("base") or base(given, settings)
        if "compare" in options:
            found["compiled"] = lambda given, settings: calls.append("compiled") or base(given, settings)
        return found

    monkeypatch.setattr(look, "decoding_methods", counting)
    file = tmp_path / "demo.json"
    code, out, _ = run("demo", "--compiled", "--max-new-tokens", 12, "--json", file)
    rows = json.loads(file.read_text())["rows"]
    assert code == 0
    assert len(bases) == 4 and all(base is bases[0] for base in bases)  # loaded once
    # three prompts, and one call that is not timed; then the base beside each of the others
    assert calls == ["base"] * 10 + ["compiled"] + ["base", "compiled"] * 3 + ["base"] * 3
    ways = [("base", "as installed"), ("hydra", "as installed"), ("medusa", "as installed"), ("base", "compiled")]
    assert [(row["name"], row["way"]) for row in rows[:4]] == ways
    longest = max(rows[1:3], key=lambda row: row["tokens_per_step"])
    assert (rows[4]["name"], rows[4]["way"], len(rows)) == (longest["name"], "captured", 5)
    assert captured == [{"cache_implementation": "static"}]
    assert rows[4]["tree_nodes"] == longest["tree_nodes"]
    assert all(row["identical"] and row["new_tokens"] == 36 for row in rows)
    for row in rows[1:3] + rows[4:]:
        assert row["speedup"] > 0
        assert row["tokens_per_step"] >= 1 and row["tree_nodes"] >= 2
    over_compiled = rows[4]["tokens_per_second"] / rows[3]["tokens_per_second"]
    assert [row["speedup_over_compiled"] for row in rows] == [None] * 4 + [pytest.approx(over_compiled)]
    lines = out.splitlines()
    assert lines[1].split()[:3] == ["family", "how", "nodes"]
    assert [line.split()[0] for line in lines[2:7]] == ["base", "hydra", "medusa", "base", "compiling"]
    assert lines[8].split()[0] == "compiling"
    assert out.count(" yes") == 5 and all(len(line) <= 80 for line in lines[1:7])
    assert out.count(" continues 'import os'") == 1
    code, out, _ = run("demo", "--no-compiled", "--max-new-tokens", 4, "--prompts", 1)
    assert code == 0 and len(captured) == 1 and calls.count("compiled") == 4  # nothing more is compiled
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["base", "hydra", "medusa"]
    assert "compil" not in out.partition("\n")[2].partition("\n")[2]


def test_a_short_demo_compiles_as_far_as_its_time_allows(tiny_zoo, run, monkeypatch):
    right = look.decoding_methods

    def slow(given, settings):  # to compile
        clock[0] += 40.0 * (len(compiled) == 0)
        compiled.append(given)
        return right_base(given, settings)

    def stand_ins(*arguments, acceptance=None, **options):
        nonlocal right_base
        found = right(*arguments, **options)
        right_base = found["base"]
        return {**found, "compiled": slow}

    def out_of_demo():
        compiled.clear()
        clock[0] = 0.0
        code, out, _ = run("demo", "--family", "medusa", "--max-new-tokens", 4, "--prompts", 1)
        assert code == 0
        return [line for line in out.splitlines()[2:] if " compiled " in line or " captured " in line]

    compiled, clock, right_base = [], [0.0], None
    monkeypatch.setattr(look, "decoding_methods", stand_ins)
    monkeypatch.setattr(look.time, "perf_counter", lambda: clock.__setitem__(0, clock[0] + 0.001) or clock[0])
    base, step = out_of_demo()
    assert base.endswith(" yes") and len(compiled) == 2
    assert step.split()[:3] == ["medusa", "captured", "left"]
    assert step.endswith("left out: with about 56 s for compiling it would end after 96 s")
    monkeypatch.setattr(demo, "DEMO_SECONDS", 97.0)
    base, step = out_of_demo()
    assert base.endswith(" yes") and step.endswith(" yes")
    monkeypatch.setattr(demo, "DEMO_SECONDS", 29.0)
    (base,) = out_of_demo()
    assert base.endswith("left out: with about 30 s for compiling it would end after 30 s") and not compiled


def test_prompts_of_one_length_keep_their_beginning_and_their_end():
    ids = [torch.tensor([[1, 5, 6, 7]]), torch.tensor([[1, 8, 9]]), torch.tensor([[1, 2, 3, 4, 5]])]
    found = look.of_one_length([{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids])
    assert [one["input_ids"].tolist() for one in found] == [[[1, 6, 7]], [[1, 8, 9]], [[1, 4, 5]]]
    assert all(one["attention_mask"].tolist() == [[1, 1, 1]] for one in found)
    (alone,) = look.of_one_length([{"input_ids": torch.tensor([[7]])}])
    assert alone["input_ids"].tolist() == [[7]]


def test_a_short_demo_goes_on_where_nothing_can_be_compiled(tiny_zoo, run, monkeypatch):
    right = look.decoding_methods

    def failing(given, settings):
        raise RuntimeError("no C++ compiler")

    def without_compiler(*arguments, **options):
        options.pop("acceptance", None)
        return {**right(*arguments, **options), "compiled": failing}

    monkeypatch.setattr(look, "decoding_methods", without_compiler)
    code, out, _ = run("demo", "--compiled", "--max-new-tokens", 4, "--family", "medusa")
    assert code == 0
    assert "compiled      not possible here: no C++ compiler" in out
    assert " captured " not in out


def test_a_short_demo_takes_few_prompts(monkeypatch, run):
    seen, limits = [], []

    def lines(self, families, compile_within):
        limits.append(compile_within)
        seen.append((len(self.prompts), self.max_new_tokens, list(families)))
        raise ValueError("seen")

    monkeypatch.setattr(look.Look, "lines", lines)
    assert run("demo")[0] == 2 and run("demo", "--prompts", 2)[0] == 2
    assert seen == [(4, 48, zoo.families()), (2, 48, zoo.families())]
    assert run("demo", "--compiled")[0] == 2 and run("demo", "--no-compiled")[0] == 2
    assert limits == [demo.DEMO_SECONDS, demo.DEMO_SECONDS, None, 0.0]
    text = "--compiled and --no-compiled are for the short demo: leave --full out."
    refused(run("demo", "--full", "--compiled"), text)
    refused(run("demo", "--full", "--no-compiled"), text)
    refused(run("demo", "--repeats", 2), "--repeats is for --full: a short demo runs every prompt once.")


def test_demo_ends_with_1_if_an_output_differs(tiny_zoo, run, monkeypatch):
    right = DraftHeadGenerationMixin.generate

    def wrong(self, *arguments, **kwargs):
        out = right(self, *arguments, **kwargs)
        out.sequences[:, -1] += 1
        return out

    monkeypatch.setattr(DraftHeadGenerationMixin, "generate", wrong)
    code, out, err = run("demo", "--full", "--family", "medusa", "--max-new-tokens", 6, "--repeats", 1)
    assert code == 1
    assert "NO" in out
    assert err.splitlines()[-1].endswith(
        "the output of medusa differs from the base's own: see the column 'same text'."
    )


def test_the_progress_bar_of_the_demo_knows_its_length(tiny_zoo):
    model, tokenizer = load(str(tiny_zoo / "medusa"))
    prompts = read_prompts(tiny_zoo / "prompts.jsonl")
    calls = []
    compare_with_base.compare_with_base(
        model, tokenizer, prompts, max_new_tokens=4, repeats=1, batch_size=2, progress=lambda: calls.append(0)
    )
    assert len(calls) == compare_with_base.rounds(prompts, 2)


BAD_MODELS = {
    "no folder": ("nowhere/at/all", "there is no folder 'nowhere/at/all': give the folder of a draft-head checkpoint"),
    "not on the Hub": ("org/none", "no model could be read at 'org/none' ("),
    "empty folder": ("{folder}/empty", "holds no config.json: give the folder of a draft-head checkpoint"),
    "plain base": ("{folder}/base", "/base' holds a 'llama' model without draft heads: give the folder"),
    "unknown family": (
        "{folder}/owl",
        "/owl' holds heads of the unknown family 'owl': expected one of ",
    ),
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
@pytest.mark.parametrize("command", [["info"], ["generate", "--prompt", "x"]], ids=["info", "generate"])
def test_a_bad_model_is_refused_in_one_line(bad, run, command, name, text):
    refused(run(*command, name.format(folder=bad)), text)


@pytest.mark.parametrize(
    "tree, text",
    [
        ("no_such_tree", "draft_tree 'no_such_tree' is no published tree: expected one of eagle_mc_sim_7b_63, "),
        ("[[0], [1, 0]]", "node (1, 0) has no parent: add (1,) to the tree, or drop every node that starts with (1,)."),
        ("[[0], [0]]", "node (0,) is in the tree 2 times: keep it once."),
        ("[[0], [0", "is not JSON ("),
        ("no_such_file.json", "there is no tree file 'no_such_file.json': give a file of rank paths such as"),
        ("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]", "but the model has 3 draft heads: drop every path longer than 3."),
        ("[[0], [300]]", "with rank 300, but a vocabulary of 259 tokens has ranks 0 to 258"),
        ('[["a"]]', "holds something other than integers: expected rank paths"),
    ],
)
def test_a_bad_tree_is_refused_in_one_line(folder, run, tree, text):
    refused(run("generate", folder / "medusa", "--prompt", "x", "--tree", tree), text)


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["generate", "{model}", "--prompt", ""], "the prompt is empty: give the text to continue with --prompt"),
        (["generate", "{model}", "--prompted"], "No such option: --prompted"),
        (["train", "--max-steps", "3"], "a setting that has no option is given by --set max_steps=VALUE"),
        (["generate", "{model}", "--prompt", "x", "--max-new-tokens", "0"], "Invalid value for '--max-new-tokens': "),
        (
            ["generate", "{model}", "--prompt", "x", "--max-new-tokens", "many"],
            "Invalid value for '--max-new-tokens': ",
        ),
        (
            ["generate", "{model}", "--prompt", "x", "--json", "no/such/x.json"],
            "lies in 'no/such', which does not exist",
        ),
        (
            ["info", "{model}", "--json", "."],
            "--json '.' is a folder: give the path of a file in a folder that exists.",
        ),
        (["info"], "Missing argument 'MODEL'"),
        (["fly"], "No such command 'fly': see `hf-drafthead --help`."),
        (["demo", "--family", "owl"], "the zoo holds no model 'owl': expected one of base, hydra, medusa"),
        (
            ["demo", "--max-new-tokens", "126"],
            "new ones exceed the base's 128 positions: shorten the prompt,",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(tiny_zoo, run, arguments, text):
    refused(run(*(argument.format(model=tiny_zoo / "medusa") for argument in arguments)), text)


def test_a_zoo_without_heads_is_refused_in_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "ASSETS", tmp_path)
    refused(run("demo"), "the zoo holds no heads: build them with `python -m hf_drafthead.zoo.build`.")


def test_the_installed_command_answers_without_a_traceback():
    command = Path(sys.executable).parent / "hf-drafthead"
    ended = subprocess.run([command, "info", "./nowhere"], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.startswith("hf-drafthead: there is no folder './nowhere'")
    assert "Traceback" not in ended.stderr
