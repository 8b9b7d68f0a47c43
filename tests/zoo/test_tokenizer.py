"""The zoo's tokenizer keeps every byte, and rows look as prompts do."""

import pytest
from transformers import AutoTokenizer

from benchmarks.zoo_recipe.corpus import SourceFile
from benchmarks.zoo_recipe.tokenizer import pack, train_tokenizer

FILES = [SourceFile(f"{i}.py", f"def f{i}(x):\n    return x + {i}\n" * 20) for i in range(6)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(FILES, 270, 64).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("text", ["def f():\n\treturn 'ä€😀'\n", "  two  spaces \r\n", "", "\x00\x7f", "def  a  ( ) :"])
def test_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_prompts_start_with_bos_and_pad_left(tokenizer):
    batch = tokenizer(["def f", "def f0(x):\n    return"], padding=True)
    assert batch["attention_mask"][0][0] == 0 and batch["input_ids"][0][0] == tokenizer.pad_token_id
    first = [ids[mask.index(1)] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    assert first == [tokenizer.bos_token_id] * 2
    assert len({tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}) == 3
    assert len(tokenizer) == 270 and tokenizer.model_max_length == 64


def test_rows_are_the_files_in_order_each_closed_by_eos(tokenizer):
    rows = pack(tokenizer, FILES, length=32)
    assert rows.shape[1] == 32 and (rows[:, 0] == tokenizer.bos_token_id).all()
    stream = rows[:, 1:].flatten().tolist()
    wanted = []
    for file in FILES:
        wanted += tokenizer(file.text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    assert len(wanted) - len(stream) < 31
    assert stream == wanted[: len(stream)]
