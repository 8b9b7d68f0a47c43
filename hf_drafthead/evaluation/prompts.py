"""Prompt files: one JSON object per line with a `prompt` and, if there is one, its `category`."""

from pathlib import Path

from hf_drafthead.evaluation.questions import Question, read_questions


def read_prompts(path: str | Path) -> list[Question]:
    """The texts to continue of a JSON lines file, in order.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no prompt, or a line that is none; the message names the line.
    """
    questions = read_questions(path)
    for question in questions:
        if question.chat:
            raise ValueError(f"{question.where} is a conversation: expected {{'prompt': a text to continue}}.")
    return questions
