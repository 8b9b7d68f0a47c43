"""`hf-drafthead` itself, and `generate`, `chat` and `info` on chats, standard input, another base, another type."""

import io
import json
import shutil
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

import hf_drafthead
from hf_drafthead.evaluation.conversation import sample
from hf_drafthead.evaluation.loading import load, load_arguments
from tests.checkpoints import byte_tokenizer, save_base, save_heads

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}Q{{ m.content }}"
    "{% else %}A{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}ab{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base that recites the alphabet, heads for it with and without a chat template, a copy of the base."""
    folder = tmp_path_factory.mktemp("models")
    base = save_base(folder)
    save_heads(folder, base, "medusa")
    heads = save_heads(folder, base, "hydra")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(heads)
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def run(command, monkeypatch):
    def call(*arguments, given: str | io.StringIO = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(given) if isinstance(given, str) else given)
        return command(*arguments)

    return call


def test_the_version_is_told(run):
    assert run("--version") == (0, f"hf-drafthead {metadata.version('hf-drafthead')}\n", "")


@pytest.mark.parametrize("words", [["-h"], ["--help"], [], ["generate", "-h"], ["serve", "-h"]], ids=" ".join)
def test_help_is_shown(run, words):
    code, out, err = run(*words)
    assert (code, err) == (0, "") and "Usage: hf-drafthead" in out


def prompt_of(run, tmp_path, *arguments, **given) -> tuple[str, str]:
    """What the model was given, and what it wrote."""
    file = tmp_path / "figures.json"
    code, _, err = run("generate", *arguments, "--max-new-tokens", 5, "--json", file, **given)
    assert code == 0, err
    figures = json.loads(file.read_text())
    return figures["prompt"], figures["text"]


def test_a_chat_template_is_applied_unless_the_text_is_raw(folder, run, tmp_path):
    heads = folder / "hydra"
    assert prompt_of(run, tmp_path, heads, "--prompt", "x") == ("Qxab", "cdefg")
    assert prompt_of(run, tmp_path, heads, "--prompt", "x", "--system", "S") == ("SQxab", "cdefg")
    assert prompt_of(run, tmp_path, heads, "--prompt", "m", "--raw") == ("m", "nopqr")
    plain = folder / "medusa"
    assert prompt_of(run, tmp_path, plain, "--prompt", "m") == ("m", "nopqr")
    template = ("--chat-template", folder / "template.jinja")
    assert prompt_of(run, tmp_path, plain, "--prompt", "x", *template) == ("Qxab", "cdefg")


def test_special_tokens_are_those_of_the_template(folder, run, tmp_path, monkeypatch):
    seen = []
    right = AutoModelForCausalLM.from_pretrained(folder / "hydra").__class__.generate

    def looking(self, *arguments, **settings):
        seen.append(settings["input_ids"][0].tolist())
        return right(self, *arguments, **settings)

    monkeypatch.setattr("hf_drafthead.generation.mixin.DraftHeadGenerationMixin.generate", looking)
    heads = tmp_path / "heads"
    shutil.copytree(folder / "hydra", heads)
    tokenizer = byte_tokenizer()
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begins  # as Llama's does
    tokenizer.chat_template = "{{ bos_token }}" + TEMPLATE
    tokenizer.save_pretrained(heads)
    prompt_of(run, tmp_path, heads, "--base-model", folder / "base", "--prompt", "x")
    prompt_of(run, tmp_path, heads, "--base-model", folder / "base", "--prompt", "x", "--raw")
    assert seen == [tokenizer("Qxab")["input_ids"], tokenizer("x")["input_ids"]]
    assert [ids.count(tokenizer.bos_token_id) for ids in seen] == [1, 1]


def test_standard_input_is_the_prompt(folder, run, tmp_path):
    assert prompt_of(run, tmp_path, folder / "medusa", given="lm") == ("lm", "nopqr")
    assert prompt_of(run, tmp_path, folder / "hydra", given="x\n") == ("Qxab", "cdefg")
    latin = io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8")
    assert "hf-drafthead: what was given is not UTF-8 text (" in run("generate", folder / "medusa", given=latin)[2]
    code, _, err = run("generate", folder / "medusa", given=Terminal())
    assert code == 2 and "there is no prompt: give one with --prompt 'def main(', or pipe a text in." in err


@pytest.mark.parametrize(
    "words, line",
    [
        (["--system", "S"], "has no chat template: give one with --chat-template FILE, or"),
        (["--system", "S", "--raw"], "--raw leaves the chat template out: drop it, or drop --system and"),
        (["--device", "nonsense"], "--device 'nonsense' cannot be used (Expected one of cpu, cuda, "),
        (["--device", "xpu:77"], "--device 'xpu:77' cannot be used ("),
        (["--dtype", "int8"], "--dtype 'int8' is no floating point type: expected auto, float32, bfloat16 or float16."),
        (["--dtype", "float8_e4m3fn"], "--dtype 'float8_e4m3fn' is no floating point type: expected auto, float32, "),
        (["--device", "meta"], "--device 'meta' cannot be used ("),
        (["--base-model", "./nowhere"], "the base './nowhere' of "),
        (["--prompt", "caf\udce9"], "the prompt is not UTF-8 text ("),
    ],
)
def test_bad_choices_are_refused_in_one_line(folder, run, words, line):
    code, _, err = run("generate", folder / "medusa", "--prompt", "x", *words)
    assert code == 2 and err.startswith("hf-drafthead: ") and err.count("\n") == 1
    assert line in err


def test_heads_are_loaded_as_asked(folder):
    another = load_arguments("bfloat16", "cpu", str(folder / "copy"))
    if not (folder / "copy").exists():
        AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(folder / "copy")
    model, _ = load(str(folder / "medusa"), **another)
    assert model.base.name_or_path == str(folder / "copy")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


@pytest.fixture(scope="module")
def with_own_code(folder) -> Path:
    """Heads on a base whose model code lies beside its weights."""
    code = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
    base, heads = folder / "own-base", folder / "own-heads"
    AutoModelForCausalLM.from_pretrained(folder / "base").save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    (base / "modeling_own.py").write_text(code)
    config = json.loads((base / "config.json").read_text())
    classes = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config |= {"model_type": "own_llama", "architectures": ["OwnForCausalLM"], "auto_map": classes}
    (base / "config.json").write_text(json.dumps(config))
    model = hf_drafthead.MedusaForCausalLM.from_base(str(base), num_draft_heads=3, trust_remote_code=True)
    model.save_pretrained(heads)
    byte_tokenizer().save_pretrained(heads)
    return heads


def test_the_base_s_own_code_runs_only_if_it_is_trusted(with_own_code, run, tmp_path):
    code, _, err = run("generate", with_own_code, "--prompt", "m")
    assert code == 2 and "has its own model code, which runs only if you trust it: read it, then give" in err
    assert prompt_of(run, tmp_path, with_own_code, "--prompt", "m", "--trust-remote-code") == ("m", "nopqr")


def test_a_conversation_goes_on_with_the_model_s_own_answers(folder, run, monkeypatch):
    from hf_drafthead.evaluation import conversation

    asked = []
    right = conversation.sample

    def looking(model, tokenizer, prompt, **settings):
        asked.append(prompt)
        return right(model, tokenizer, prompt, **settings)

    monkeypatch.setattr(conversation, "sample", looking)
    words = "x\n\ny\n/clear\nz\n/exit\nnever\n"
    code, out, err = run("chat", folder / "hydra", "--system", "S", "--max-new-tokens", 3, given=words)
    assert code == 0
    assert asked == ["SQxab", "SQxAcdeQyab", "SQzab"]
    assert out == "> x\ncde\n> y\ncde\n> /clear\n> z\ncde\n"  # a transcript, for the questions come from a pipe
    assert err.count("3 tokens in ") == 3


def test_pieces_are_streamed_as_they_are_told_at_the_end_also_where_the_base_decodes(folder):
    model, tokenizer = load(str(folder / "medusa"))
    for settings in ({}, {"use_cache": False}):  # without a cache nothing is drafted
        pieces: list[tuple[str, int]] = []

        def keep(text: str, depth: int, pieces=pieces) -> None:
            pieces.append((text, depth))

        written = sample(model, tokenizer, "yz", max_new_tokens=9, on_piece=keep, **settings)
        at_the_end = sample(model, tokenizer, "yz", max_new_tokens=9, **settings)
        assert pieces == written.pieces == at_the_end.pieces and written.new_tokens == 9
        assert any(depth for _, depth in pieces) == (written.steps > 0) == (not settings)


@pytest.mark.parametrize("how", [["--stream"], []], ids=["streamed", "at the end"])
def test_copies_have_a_colour_of_their_own(folder, run, how):
    prompt = ("--prompt", "abcdefghijklmnopqrst yz abcde")
    words = ("generate", folder / "medusa", *prompt, "--max-new-tokens", 9, "--color")
    _, without, _ = run(*words, *how)
    _, out, _ = run(*words, *how, "--tree", "lookup", "--lookup", 4)
    copy = "\x1b[4;93m"
    assert copy in out and "copied: " in out
    assert copy not in without and "copied" not in without
    code, _, err = run(*words, "--lookup", 0)
    assert code == 2 and "'--lookup': Input should be greater than or equal to 1" in err


def test_a_conversation_that_is_full_says_so_and_goes_on(folder, run):
    code, out, err = run("chat", folder / "hydra", "--max-new-tokens", 3, given="x" * 130 + "\ny")
    assert code == 0 and out.endswith("> y\ncde\n")
    assert "tokens, which leaves no room in the base's 128 positions: begin a new one." in err


def test_info_tries_on_the_base_whether_the_heads_draft(folder, run, tmp_path):
    file = tmp_path / "info.json"
    assert "drafts         not tried: --probe loads the base and tries" in run("info", folder / "medusa")[1]
    code, out, err = run("info", folder / "medusa", "--probe", "--json", file)
    assert code == 0, err
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    found = json.loads(file.read_text())["probe"]
    assert found["drafts"] is True and found["base_parameters"] == sum(one.numel() for one in base.parameters())
    assert (found["device"], found["dtype"]) == ("cpu", "float32")
    assert "calls draft    10 nodes, as many as pay on the text: these heads were not calibrated" in out
    assert "drafts         yes" in out and f"{found['base_parameters']:,} parameters" in out
    words = ["--dtype", "bfloat16", "--device", "cpu", "--base-model", folder / "base"]
    _, out, _ = run("info", folder / "medusa", *words, "--json", file)
    half = json.loads(file.read_text())["probe"]
    assert (half["dtype"], half["memory"]) == ("bfloat16", found["memory"] // 2)
