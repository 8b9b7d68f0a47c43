"""One form for the rows of every source of data.

A row has these columns; of `messages`, `turns` and `text` at least two are None:

- `messages`: turns of a chat, each with `role`, `content`, `cut` (True: the answer reached a limit, and no end of turn
  follows it), `ids` (the tokens of an answer as the base wrote them, its end of turn included; None where only the
  text is known) and `extra` (JSON: what chat templates read besides, see EXTRA; None where there is nothing).
- `tools`: JSON, the functions that a chat's assistant may call; None without any.
- `turns`: questions to ask one after the other, each after the model's own answer to the one before.
- `text`: plain text.
- `given`: how many characters of the text are only context, without labels.
- `ids`: the tokens behind the given part of the text, as the base wrote them; None where only the text is known.
- `source`, `row`: the file's name (empty for a data set), and the row's number in it, counted from 0.
- `unused`: names of the record's fields that hold something and are not read.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

CHATS = ("messages", "conversations")
EXTRA = ("reasoning_content", "tool_calls", "tool_call_id", "name")  # of a turn, as chat templates read it
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of one thing
OF_A_TURN = {"role", "from", "content", "value", "cut", "ids", *EXTRA, *THOUGHTS}
KNOWN = (*CHATS, "turns", "text", "prompt")  # fields of which a record has at least one
MAX_NESTING = 100  # levels of JSON; the parameters of a tool have some 10
EXPECTED = (
    'expected a chat as {"messages": [{"role": "user", "content": "..."}]} or '
    '{"conversations": [{"from": "human", "value": "..."}]}, a text as {"text": "..."}, a text to continue as '
    '{"prompt": "..."}, or questions as {"turns": ["..."]}'
)


def features() -> Any:
    """The columns of a row as `datasets` describes them, which is not imported before."""
    from datasets import Features, List, Value

    turn = {"role": Value("string"), "content": Value("string"), "cut": Value("bool"), "ids": List(Value("int32"))}
    turn["extra"] = Value("string")
    return Features(
        {
            "messages": List(turn),
            "tools": Value("string"),
            "turns": List(Value("string")),
            "text": Value("string"),
            "given": Value("int64"),
            "ids": List(Value("int32")),
            "source": Value("string"),
            "row": Value("int64"),
            "unused": List(Value("string")),
        }
    )


def without_format(rows: Any) -> Any:
    """A data set whose rows are Python's own values; anything else as is. A ValueError for one with a transform."""
    if not hasattr(rows, "with_format"):
        return rows
    if rows.format["type"] == "custom":
        raise ValueError("the data has a transform, which is not applied here: apply it before, with Dataset.map.")
    return rows.with_format(None)


def as_row(record: Any, source: str = "", number: int = 0) -> dict[str, Any]:
    """One record in the form of a row; what cannot be read is None, and refused where it is used.

    A record has `messages` or `conversations` (ShareGPT), and beside them perhaps `system`, `tools` and
    `reasoning_content` (of the last answer); or `turns`, texts; or `text`, and `given` if its beginning is only
    context; or `prompt`, a text, texts to ask one after the other, or messages, and `completion` of the same kind if
    the answer is there.
    """
    fields = record if isinstance(record, Mapping) else {}
    holder = next((name for name in CHATS if fields.get(name) is not None), None)
    chat, turns, text = (fields.get(name) for name in (holder or "", "turns", "text"))
    context_length, prompt, completion = (fields.get(name) for name in ("given", "prompt", "completion"))
    read = {"ids", "given", "row", *(("turns", "text") if holder is None else (holder,))}
    if chat is None and turns is None and text is None and prompt is not None:
        read |= {"prompt", "completion"}
        if isinstance(prompt, str):
            text, context_length = prompt + (completion if isinstance(completion, str) else ""), len(prompt)
        elif _are(prompt, str):
            turns = prompt
        else:
            chat = [*_listed(prompt), *_listed(completion)]
    messages = tools = None
    if chat is not None:
        messages = [_turn(turn) for turn in _with_what_is_beside(_listed(chat), fields)]
        tools = _tools(fields.get("tools"))
        read |= {"system", *THOUGHTS, *(["tools"] if tools else [])}
    asked = list(turns) if messages is None and turns is not None and _are(turns, str) else None
    unused = [name for name, value in fields.items() if name not in read and not _is_nothing(value)]
    for turn in _listed(chat):
        fields_of_turn = turn if isinstance(turn, Mapping) else {}
        left = [name for name, value in fields_of_turn.items() if name not in OF_A_TURN and not _is_nothing(value)]
        unused += [f"{holder or 'prompt'}.{name}" for name in sorted(map(str, left))]
    return {
        "messages": messages,
        "tools": tools,
        "turns": asked,
        "text": text if messages is None and asked is None and isinstance(text, str) else None,
        "given": context_length if isinstance(context_length, int) and 0 <= context_length <= len(text or "") else 0,
        "ids": _ids(fields.get("ids")),
        "source": source,
        "row": number,
        "unused": list(dict.fromkeys(map(str, unused))),
    }


def data_hash(rows: Iterable[Mapping[str, Any]]) -> str:
    """SHA-256 of the content of the rows, in their order; files of another form with the same rows give the same."""
    digest = hashlib.sha256()
    for row in rows:
        messages = row.get("messages")
        if messages is not None:  # turns without the columns that hold nothing
            optional = ("ids", "extra")
            messages = [{n: v for n, v in turn.items() if n not in optional or v is not None} for turn in messages]
        content = {
            "messages": messages,
            "text": row.get("text"),
            "given": row.get("given"),
            **{name: row[name] for name in ("turns", "ids", "tools") if row.get(name) is not None},
        }
        digest.update(json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
    return digest.hexdigest()


def _turn(turn: Any) -> dict[str, Any]:
    fields = turn if isinstance(turn, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if isinstance(content, list):  # parts: text is put together, anything else is not for a language model
        parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
    extra = _extra(fields)
    if isinstance(role, str) and role.lower() == "function_call" and (calls := calls_of(content)):  # of ShareGPT
        role, content, extra = "assistant", "", json.dumps({"tool_calls": calls}, ensure_ascii=False)
    if content is None and extra is not None and "tool_calls" in json.loads(extra):
        content = ""
    return {
        "role": role if isinstance(role, str) else None,
        "content": content if isinstance(content, str) else None,
        "cut": fields.get("cut") is True,
        "ids": _ids(fields.get("ids")),
        "extra": extra,
    }


def _extra(fields: Mapping[str, Any]) -> str | None:
    """What a chat template reads of a turn besides its text, as JSON."""
    extra = {**fields, "reasoning_content": _thought(fields), "tool_calls": calls_of(fields.get("tool_calls"))}
    extra = {name: extra[name] for name in EXTRA if not _is_nothing(extra.get(name))}
    return json.dumps(extra, ensure_ascii=False) if extra else None


def _thought(fields: Mapping[str, Any]) -> str | None:
    thought = next((fields[name] for name in THOUGHTS if isinstance(fields.get(name), str)), None)
    return thought if thought and thought.strip() else None


def calls_of(value: Any) -> list[dict[str, Any]]:
    """Calls of functions in the form that chat templates take; none if these are no calls."""
    calls = _parsed(value)
    result = []
    for call in [calls] if isinstance(calls, Mapping) else calls if _are(calls, Mapping) else ():
        function = _full(call.get("function", call))
        if not isinstance(function.get("name"), str):
            return []
        arguments = _parsed(function.get("arguments") or {})
        around = {"id": call["id"]} if call.get("id") else {}
        result.append({"type": "function", **around, "function": {"name": function["name"], "arguments": arguments}})
    return result


def _tools(value: Any) -> str | None:
    """Functions that may be called, as JSON, in the form that chat templates take; None if these are none."""
    tools = _parsed(value)
    tools = [_parsed(tool) for tool in tools] if isinstance(tools, (list, tuple)) else []
    if not _are(tools, Mapping):
        return None
    full = [_full(tool) for tool in tools]
    bare = [
        {"type": "function", "function": tool} if "function" not in tool and "name" in tool else tool for tool in full
    ]
    return json.dumps(bare, ensure_ascii=False)


def _full(value: Any) -> Any:
    """Without the fields that hold nothing: data sets give every object of a column the fields of all of them."""
    if isinstance(value, Mapping):
        return {name: _full(inner) for name, inner in value.items() if inner is not None}
    return [_full(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _parsed(value: Any) -> Any:
    """What a text of JSON holds; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else _full(value)
    except (ValueError, RecursionError):
        return value


def _with_what_is_beside(turns: list[Any], fields: Mapping[str, Any]) -> list[Any]:
    """The turns of a chat with the system's words and the last thought, which some data sets keep in own columns."""
    system = fields.get("system")
    if isinstance(system, str) and system.strip():
        first = _turn(turns[0]) if turns else {"role": None, "content": None}
        if (first["role"], first["content"]) != ("system", system):
            turns = [{"role": "system", "content": system}, *turns]
    thought = _thought(fields)
    if thought and turns and isinstance(turns[-1], Mapping) and _extra(turns[-1]) is None:
        turns = [*turns[:-1], {**turns[-1], "reasoning_content": thought}]
    return turns


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (str, list, tuple, dict)) and not value)


def _listed(turns: Any) -> list[Any]:
    """Turns as a list; data sets may store a list of objects as an object of lists."""
    if isinstance(turns, Mapping) and all(isinstance(values, (list, tuple)) for values in turns.values()):
        return [dict(zip(turns, values)) for values in zip(*turns.values())]
    return list(turns) if isinstance(turns, (list, tuple)) else []


def _are(values: Any, kind: type) -> bool:
    return isinstance(values, (list, tuple)) and bool(values) and all(isinstance(value, kind) for value in values)


def _ids(value: Any) -> list[int] | None:
    return list(value) if _are(value, int) and 0 <= min(value) and max(value) < 1 << 31 else None
