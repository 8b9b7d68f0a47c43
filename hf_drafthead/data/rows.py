"""One form for the rows of every source of data.

A row has these columns; of `messages`, `turns` and `text` at least two are None:

- `messages`: turns of a chat, each with `role`, `content`, `cut` (True: the answer reached a limit, and no end of turn
  follows it) and `ids` (the tokens of an answer as the base wrote them, its end of turn included; None where only the
  text is known).
- `turns`: questions to ask one after the other, each after the model's own answer to the one before.
- `text`: plain text.
- `given`: how many characters of the text are only context, without labels.
- `ids`: the tokens behind the given part of the text, as the base wrote them; None where only the text is known.
- `source`, `row`: the file's name (empty for a data set), and the row's number in it, counted from 0.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

CHATS = ("messages", "conversations")
KNOWN = (*CHATS, "turns", "text", "prompt")  # fields of which a record has at least one
EXPECTED = (
    'expected a chat as {"messages": [{"role": "user", "content": "..."}]} or '
    '{"conversations": [{"from": "human", "value": "..."}]}, a text as {"text": "..."}, a text to continue as '
    '{"prompt": "..."}, or questions as {"turns": ["..."]}'
)


def features() -> Any:
    """The columns of a row as `datasets` describes them, which is not imported before."""
    from datasets import Features, List, Value

    turn = {"role": Value("string"), "content": Value("string"), "cut": Value("bool"), "ids": List(Value("int32"))}
    return Features(
        {
            "messages": List(turn),
            "turns": List(Value("string")),
            "text": Value("string"),
            "given": Value("int64"),
            "ids": List(Value("int32")),
            "source": Value("string"),
            "row": Value("int64"),
        }
    )


def is_record(record: Any) -> bool:
    """Whether it is an object with one of the fields that are read."""
    return isinstance(record, Mapping) and any(name in record for name in KNOWN)


def as_row(record: Any, source: str = "", number: int = 0) -> dict[str, Any]:
    """One record in the form of a row; what cannot be read is None, and refused where it is used.

    Args:
        record: an object with `messages` or `conversations` (ShareGPT); with `turns`, texts; with `text`, and `given`
            if its beginning is only context; or with `prompt`, a text, texts to ask one after the other, or messages,
            and `completion` of the same kind if the answer is there.
        source: the file's name.
        number: of the row in it.
    """
    fields = record if isinstance(record, Mapping) else {}
    chat = next((fields[name] for name in CHATS if fields.get(name) is not None), None)
    turns, text, given = fields.get("turns"), fields.get("text"), fields.get("given")
    prompt, completion = fields.get("prompt"), fields.get("completion")
    if chat is None and turns is None and text is None and prompt is not None:
        if isinstance(prompt, str):
            text, given = prompt + (completion if isinstance(completion, str) else ""), len(prompt)
        elif _are(prompt, str):
            turns = prompt
        else:
            chat = [*_listed(prompt), *_listed(completion)]
    messages = None if chat is None else [_turn(turn) for turn in _listed(chat)]
    asked = list(turns) if messages is None and turns is not None and _are(turns, str) else None
    return {
        "messages": messages,
        "turns": asked,
        "text": text if messages is None and asked is None and isinstance(text, str) else None,
        "given": given if isinstance(given, int) else 0,
        "ids": _ids(fields.get("ids")),
        "source": source,
        "row": number,
    }


def data_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the content of the rows, in their order; files of another form with the same rows give the same."""
    digest = hashlib.sha256()
    for row in rows:
        messages = row.get("messages")
        said = {
            "messages": None if messages is None else [_without_nothing(turn) for turn in messages],
            "text": row.get("text"),
            "given": row.get("given"),
            **{name: row[name] for name in ("turns", "ids") if row.get(name) is not None},
        }
        digest.update(json.dumps(said, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _without_nothing(turn: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in turn.items() if name != "ids" or value is not None}


def _turn(turn: Any) -> dict[str, Any]:
    fields = turn if isinstance(turn, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if isinstance(content, list):  # parts: text is put together, anything else is not for a language model
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        content = "".join(texts) if len(texts) == len(parts) else None
    return {
        "role": role if isinstance(role, str) else None,
        "content": content if isinstance(content, str) else None,
        "cut": fields.get("cut") is True,
        "ids": _ids(fields.get("ids")),
    }


def _listed(turns: Any) -> list[Any]:
    """Turns as a list; data sets may store a list of objects as an object of lists."""
    if isinstance(turns, Mapping) and all(isinstance(values, (list, tuple)) for values in turns.values()):
        return [dict(zip(turns, values)) for values in zip(*turns.values())]
    return list(turns) if isinstance(turns, (list, tuple)) else []


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(value, kind) for value in values)


def _ids(given: Any) -> list[int] | None:
    return list(given) if _are(given, int) else None
