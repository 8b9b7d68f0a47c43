"""Prompt files are read, or refused naming the line."""

import pytest

from hf_drafthead.evaluation.prompts import Prompt, read_prompts


def test_prompts_keep_their_order_and_category(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "b", "category": "x", "id": 3}\n\n{"prompt": "a"}\n')
    assert read_prompts(file) == [Prompt("b", "x"), Prompt("a", "all")]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompt: write one"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON (Expecting value): write one object per line."),
        ('{"prompt": ""}', 'line 1 is \'{"prompt": ""}\': expected an object with a text such as'),
        ('{"text": "a"}', 'line 1 is \'{"text": "a"}\': expected an object with a text such as'),
        ('["a"]', "line 1 is '[\"a\"]': expected an object with a text such as"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_prompts(file)
    assert message in str(refused.value)
