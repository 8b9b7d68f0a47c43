"""Which tokenizer of a base is taken."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hf_drafthead.modeling.base_model import load_tokenizer
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


class MistralCommonBackend:
    """As AutoTokenizer gives it where mistral-common is installed and the base has a tekken.json."""

    is_fast = False
    name_or_path = ""


@pytest.mark.parametrize("has_json", [True, False], ids=["tokenizer.json beside it", "tekken.json alone"])
def test_a_fast_tokenizer_comes_before_that_of_mistral_common(base, monkeypatch, has_json):
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *args, **kwargs: MistralCommonBackend())
    if not has_json:
        (base / "tokenizer.json").unlink()
    found = load_tokenizer(base)
    if has_json:
        need_offsets(found)
    else:
        with pytest.raises(ValueError, match="no character offsets, .* save_format='hf'. writes the tokenizer.json"):
            need_offsets(found)
