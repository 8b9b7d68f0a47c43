"""What `save_pretrained` writes is all that others need: tokenizer, heads."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.modeling.gguf_files import load_tokenizer
from hf_drafthead.training.templates import need_offsets
from tests.bases import VOCABULARY, tiny_base


@pytest.fixture
def base(tmp_path) -> Path:
    """A base with a tokenizer."""
    tiny_base("llama-gqa").save_pretrained(tmp_path / "base")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("form", ["heads only", "with base"])
def test_the_base_s_tokenizer_is_copied(base, tmp_path, form):
    model = MedusaForCausalLM.from_base(base)
    model.save_pretrained(tmp_path / "heads", include_base=form == "with base")
    assert AutoTokenizer.from_pretrained(tmp_path / "heads")("w5 w9")["input_ids"] == [5, 9]
    again = AutoModel.from_pretrained(tmp_path / "heads")
    again.save_pretrained(tmp_path / "plain", include_tokenizer=False)
    assert not (tmp_path / "plain" / "tokenizer.json").exists()


def test_a_tokenizer_that_is_there_stays(base, tmp_path):
    (tmp_path / "heads").mkdir()
    (tmp_path / "heads" / "tokenizer.json").write_text("mine")
    MedusaForCausalLM.from_base(base).save_pretrained(tmp_path / "heads")
    assert (tmp_path / "heads" / "tokenizer.json").read_text() == "mine"
    assert not (tmp_path / "heads" / "tokenizer_config.json").exists()


def test_a_base_without_a_tokenizer_is_no_error(tmp_path):
    MedusaForCausalLM.from_base(tiny_base()).save_pretrained(tmp_path / "heads")
    assert not (tmp_path / "heads" / "tokenizer.json").exists()


class MistralCommonBackend:
    """As AutoTokenizer gives it where mistral-common is installed and the base has a tekken.json."""

    is_fast = False
    name_or_path = ""

    def save_pretrained(self, folder):
        (folder / "tekken.json").write_text("{}")


@pytest.mark.parametrize("has_json", [True, False], ids=["tokenizer.json beside it", "tekken.json alone"])
def test_a_tokenizer_of_mistral_common_is_saved_and_a_fast_one_comes_first(base, tmp_path, monkeypatch, has_json):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: MistralCommonBackend())
    (base / "tekken.json").write_text("{}")
    if not has_json:
        (base / "tokenizer.json").unlink()
        (base / "tokenizer_config.json").unlink()
    MedusaForCausalLM.from_base(base).save_pretrained(tmp_path / "heads")
    assert (tmp_path / "heads" / "tekken.json").is_file() == (not has_json)
    assert (tmp_path / "heads" / "tokenizer.json").is_file() == has_json
    found = load_tokenizer(base)
    if has_json:
        need_offsets(found)
    else:
        with pytest.raises(ValueError, match="no character offsets, .* save_format='hf'. writes the tokenizer.json"):
            need_offsets(found)


FORMS = {"whole": {}, "shards": {"max_shard_size": "2KB"}, "smaller shards": {"max_shard_size": "1KB"}}
FORMS |= {"with its base": {"include_base": True}}
FORMS["with its base, in shards"] = {**FORMS["shards"], **FORMS["with its base"]}


@pytest.mark.few(12)
@pytest.mark.parametrize("last", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_what_was_saved_last_into_a_folder_is_what_loads(base, tmp_path, first, last):
    model = MedusaForCausalLM.from_base(base)
    for value, form in ((1.0, first), (2.0, last)):
        with torch.no_grad():
            next(model.drafter.parameters()).fill_(value)
        model.save_pretrained(tmp_path / "heads", **FORMS[form])
    model.save_pretrained(tmp_path / "fresh", **FORMS[last])
    again = AutoModel.from_pretrained(tmp_path / "heads")
    assert (next(again.drafter.parameters()) == 2.0).all()
    names = [{file.name for file in (tmp_path / name).iterdir()} for name in ("heads", "fresh")]
    assert names[0] - {"base"} == names[1] - {"base"}  # a base is not removed: it may be the only copy
