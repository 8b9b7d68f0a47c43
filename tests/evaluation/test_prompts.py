"""Prompt files hold texts to continue, nothing else."""

import pytest

from hf_drafthead.evaluation.prompts import read_prompts
from hf_drafthead.evaluation.questions import UNCATEGORISED, Question


def test_prompts_keep_their_order_and_category(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "b", "category": "x", "id": 3}\n\n{"prompt": "a"}\n')
    assert read_prompts(file) == [Question(("b",), "x"), Question(("a",), UNCATEGORISED)]


def test_a_conversation_is_no_prompt(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}\n{"turns": ["b"]}')
    with pytest.raises(ValueError, match="prompts.jsonl line 2 is a conversation: expected {'prompt': a text to cont"):
        read_prompts(file)
