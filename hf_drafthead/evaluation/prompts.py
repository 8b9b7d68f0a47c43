"""Prompt files: one JSON object per line with a `prompt` and, if there is one, its `category`."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """One text to continue, and the group that its figures are reported under."""

    text: str
    category: str = "all"


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a JSON lines file, in order.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no prompt, or a line that is none; the message names the line.
    """
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON ({error.msg}): write one object per line.") from None
        text = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(text, str) or not text:
            raise ValueError(
                f'{path} line {number} is {line[:40]!r}: expected an object with a text such as {{"prompt": "def f("}}.'
            )
        prompts.append(Prompt(text, str(row.get("category", "all"))))
    if not prompts:
        raise ValueError(f'{path} holds no prompt: write one {{"prompt": "..."}} per line.')
    return prompts
