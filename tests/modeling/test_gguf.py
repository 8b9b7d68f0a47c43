"""Bases in a GGUF file: the heads' config records it, and every way to load them finds it again."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.cards import write_card
from hf_drafthead.evaluation.loading import load
from hf_drafthead.modeling.base_model import load_tokenizer
from hf_drafthead.training import train_heads
from tests.gguf_base import write_gguf

pytest.importorskip("gguf", reason="the package gguf is not installed")
FILE = "tiny.gguf"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    write_gguf(folder / FILE)
    return folder


def same_text(one, other):
    ids = torch.tensor([[1, 3, 4, 5]])
    return torch.equal(
        one.generate(ids, max_new_tokens=12, do_sample=False), other.generate(ids, max_new_tokens=12, do_sample=False)
    )


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [{"gguf_file": FILE}, {}], ids=["argument", "in the path"])
def test_heads_find_the_file_again(place, tmp_path, name, monkeypatch):
    model = MedusaForCausalLM.from_base(place if name else place / FILE, num_draft_heads=2, **name).eval()
    assert (model.config.base_model_name_or_path, model.config.base_gguf_file) == (str(place), FILE)
    assert model.base.name_or_path == str(place) and not model.why_no_drafts()
    model.save_pretrained(tmp_path)
    again, tokenizer = load(str(tmp_path))
    assert same_text(model, again) and same_text(again, again.base)
    assert again.config.base_gguf_file == FILE and tokenizer("ab")["input_ids"] == [9]
    assert f"(its GGUF file `{FILE}`)" in write_card(tmp_path).read_text()
    again.base.lm_head.weight.data.neg_()  # there is no file of safetensors to compare it with
    again.save_pretrained(tmp_path / "changed")
    assert same_text(again, AutoModel.from_pretrained(tmp_path / "changed"))
    monkeypatch.chdir(place.parents[1])  # a name of three parts, as of a file on the Hub
    model.save_pretrained(tmp_path, base_model=(place / FILE).relative_to(place.parents[1]))
    assert same_text(model, MedusaForCausalLM.from_pretrained(tmp_path))


def test_a_loaded_base_is_told_where_it_lies(place, tmp_path):
    base = load(str(place / FILE))[0].base
    where = {"base_model_name_or_path": str(place), "base_gguf_file": FILE}
    MedusaForCausalLM.from_base(base, num_draft_heads=2, **where).save_pretrained(tmp_path)
    assert same_text(MedusaForCausalLM.from_pretrained(tmp_path), base)


def test_heads_are_trained_on_it(place, tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "ab cd a b c d ab"}\n' * 12)
    settings = {"max_steps": 1, "use_cpu": True, "held_out_rows": 2, "answer_tokens": 4, "report_to": "none"}
    trained = train_heads(str(place / FILE), "medusa", tmp_path / "texts.jsonl", tmp_path / "heads", **settings)
    again, tokenizer = load(str(tmp_path / "heads"))
    assert trained.summary["steps"] == 1 and again.config.base_gguf_file == FILE and tokenizer.eos_token == "<end>"


def test_a_base_that_is_included_needs_no_file(place, tmp_path):
    model = MedusaForCausalLM.from_base(place / FILE, num_draft_heads=2).eval()
    model.save_pretrained(tmp_path, include_base=True)
    again = AutoModel.from_pretrained(tmp_path)
    assert again.config.base_gguf_file is None and same_text(model, again)


def test_the_tokenizer_has_the_special_tokens_that_the_file_says(place):
    tokenizer = load_tokenizer(place / FILE)
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id)
    assert special == (1, 2, 0, 2) and tokenizer.eos_token == "<end>"
    assert tokenizer.decode([3, 2, 4, 1], skip_special_tokens=True) == "ab"


def test_heads_move_to_the_same_base_as_safetensors(place, tmp_path):
    MedusaForCausalLM.from_base(place / FILE, num_draft_heads=2).save_pretrained(tmp_path / "heads")
    drafting, tokenizer = load(str(place / FILE))
    base = drafting.base
    base.save_pretrained(tmp_path / "base")
    moved = MedusaForCausalLM.from_pretrained(tmp_path / "heads", base_model=tmp_path / "base")
    assert moved.config.base_gguf_file is None and same_text(moved, base)
    moved.save_pretrained(tmp_path / "moved")
    assert same_text(MedusaForCausalLM.from_pretrained(tmp_path / "moved"), base)
    back = MedusaForCausalLM.from_pretrained(tmp_path / "moved", base_model=place / FILE)
    assert back.config.base_gguf_file == FILE and same_text(back, base)
    assert "assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )


def test_a_damaged_file_is_refused_in_one_line(place, tmp_path):
    content = (place / FILE).read_bytes()
    for damaged in (content[: len(content) // 2], content[:40], b"PK\3\4" + content[4:]):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(OSError, match="cannot be read") as error:
            MedusaForCausalLM.from_base(tmp_path / FILE)
        assert FILE in str(error.value) and "\n" not in str(error.value)


def test_an_unknown_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / FILE, architecture="nosuch")
    with pytest.raises(OSError, match="cannot be read .*nosuch"):
        MedusaForCausalLM.from_base(tmp_path / FILE)


def test_a_file_that_is_not_there_is_named(place, tmp_path):
    with pytest.raises(OSError, match=r"other.gguf'.* cannot be read"):
        MedusaForCausalLM.from_base(place / "other.gguf")
    MedusaForCausalLM.from_base(place / FILE, num_draft_heads=2).save_pretrained(tmp_path / "heads")
    moved = shutil.copytree(tmp_path / "heads", tmp_path / "moved")
    config = json.loads((moved / "config.json").read_text()) | {"base_gguf_file": "gone.gguf"}
    (moved / "config.json").write_text(json.dumps(config))
    with pytest.raises(OSError, match=r"gone.gguf'\) cannot be read"):
        MedusaForCausalLM.from_pretrained(moved)
