"""Chats from users' files: repaired where the meaning is clear, refused where it is not."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "claude", "model", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "function_response", "observation", "ipython"), "tool"),
}
UNANSWERED = "unanswered last turn dropped"


class Refused(ValueError):
    """A row that cannot be used; the text is the reason."""


@dataclass
class Chat:
    """Turns that alternate between user and assistant, behind one system turn or none; tools answer the assistant.

    `cut`: the last answer reached a limit: no end of turn follows it; `mapped`: what was changed, each kind once;
    `ids`: for each answer its tokens as the base wrote them, None where only the text is known.
    """

    messages: list[dict[str, Any]]
    cut: bool = False
    mapped: dict[str, None] = field(default_factory=dict)
    ids: list[list[int] | None] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None

    def answered(self) -> "Chat":
        """The chat without a last question that has no answer; Refused where there is no answer at all."""
        if not any(turn["role"] == "assistant" for turn in self.messages):
            raise Refused("it has no assistant turn")
        messages = list(self.messages)
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return self if len(messages) == len(self.messages) else self.noting(UNANSWERED, messages=messages, cut=False)

    def without_system(self) -> "Chat":
        """The chat with its system turn put in front of the first question, for templates without system turns."""
        if self.messages[0]["role"] != "system":
            return self
        system, question, *rest = self.messages
        first = {"role": "user", "content": f"{system['content']}\n\n{question['content']}"}
        return self.noting("system turn put into the first question", messages=[first, *rest])

    def noting(self, change: str, **fields: Any) -> "Chat":
        return replace(self, **{"mapped": {**self.mapped, change: None}, **fields})


def asked_in(row: Mapping[str, Any]) -> Chat:
    """The system turn and the questions of a row with `messages` or `turns`, without answers; else Refused."""
    if row["messages"] is not None:
        chat = repaired(row["messages"], row["tools"])
        return Chat([turn for turn in chat.messages if turn["role"] in ("system", "user")], tools=chat.tools)
    if not all(turn.strip() for turn in row["turns"]):
        raise Refused("one of its turns is empty")
    return Chat([{"role": "user", "content": turn} for turn in row["turns"]])


def repaired(messages: Sequence[Mapping[str, Any]] | None, tools: str | None = None) -> Chat:
    """A chat of known roles in an order that templates understand, of turns and tools as in `data.rows`; else Refused.
    Drops empty system turns, and answers before the first question; joins questions that follow one another."""
    if not messages:
        raise Refused("it has no turns")
    chat = Chat([], tools=json.loads(tools) if tools else None)
    for number, turn in enumerate(messages):
        role_name, content = turn.get("role"), turn.get("content")
        if not role_name:
            raise Refused(f"turn {number} has no role")
        role = ROLES.get(role_name.lower())
        if role is None:
            raise Refused(f"turn {number} has the unknown role {role_name!r}")
        if content is None:
            raise Refused(f"turn {number} has no text")
        if role != role_name:
            chat.mapped[f"{role_name} -> {role}"] = None
        extra = json.loads(turn.get("extra") or "{}")
        _add(chat, number, {"role": role, "content": content, **extra}, turn.get("ids"))
        chat.cut = bool(turn.get("cut"))
    if not any(turn["role"] == "user" for turn in chat.messages):
        raise Refused("it has no user turn")
    return chat


def _add(chat: Chat, number: int, turn: dict[str, Any], ids: list[int] | None) -> None:
    before, role, content = chat.messages[-1]["role"] if chat.messages else None, turn["role"], turn["content"]
    if role == "tool":  # one call may have several answers, and an answer may be empty
        if before not in ("assistant", "tool"):
            raise Refused(f"turn {number} is a tool's, but no turn of the assistant comes before it")
        chat.messages.append(turn)
    elif not content.strip() and not turn.get("tool_calls"):
        if role != "system":
            raise Refused(f"turn {number} ({role}) is empty")
        chat.mapped["empty system turn dropped"] = None
    elif role == "system" and before not in (None, "system"):
        raise Refused(f"turn {number} is a system turn in the middle")
    elif role == "assistant" and before in (None, "system"):
        chat.mapped["leading assistant turn dropped"] = None
    elif role == "assistant" and before == "assistant":
        raise Refused(f"turns {number - 1} and {number} are both the assistant's")
    elif role == before:
        chat.mapped[f"{role} turns joined"] = None
        chat.messages[-1] = {"role": role, "content": f"{chat.messages[-1]['content']}\n\n{content}"}
    else:
        chat.messages.append(turn)
        if role == "assistant":
            chat.ids.append(ids)
