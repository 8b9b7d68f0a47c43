"""Questions to measure on, from the same sources as the rows that heads learn from.

A record is one of these: `turns`, texts that are asked one after the other through the chat template, each after the
model's own answer to the one before; `messages` or `conversations`, of which the system turn and the user's turns are
asked in the same way; `prompt`, a text that is continued as it is; `text`, of which the first 64 tokens are continued.
`category` names the group that a record is reported under.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_drafthead.cards.card import UNCATEGORISED
from hf_drafthead.data.chats import Chat, Refused, asked_in
from hf_drafthead.data.rows import EXPECTED, as_row
from hf_drafthead.data.sources import read_records
from hf_drafthead.data.texts import beginning_of, one_line

BEGINNING = 64  # tokens of a plain text that are continued, as `hf-drafthead distill` does


@dataclass(frozen=True)
class Question:
    """One conversation, or one text to continue."""

    turns: tuple[str, ...]  # what the user says, in order
    category: str = UNCATEGORISED  # the group it is reported under
    chat: bool = False  # whether the chat template applies
    system: str | None = None  # what the model is told before
    beginning: int | None = None  # of a text, how many of its tokens are continued, None for all
    where: str = field(default="the prompt", compare=False)  # its place in the file, for messages

    @property
    def text(self) -> str:
        """The first turn."""
        return self.turns[0]


def read_questions(source: str | Path, split: str | None = None, limit: int | None = None) -> list[Question]:
    """The questions of a file, a folder of files, or a data set that `datasets.load_dataset` finds, in their order.

    Args:
        source: the file or folder, or the data set's name.
        split: of the data set; by default its only one, or the one called `test`.
        limit: only so many, the first of every category, then the second ones, and so on.

    Raises:
        OSError: there is no such source.
        ValueError: it holds no question, or a record that is none; the message names it.
    """
    questions = [question_of(record, where) for where, record in read_records(source, split)]
    if not questions:
        raise ValueError(f'{source} holds no prompt: write one {{"prompt": "..."}} or {{"turns": [...]}} per line.')
    before: Counter[str] = Counter()  # questions of each category
    places = []
    for number, question in enumerate(questions):
        places.append((before[question.category], number))
        before[question.category] += 1
    return [questions[number] for number in sorted(number for _, number in sorted(places)[:limit])]


def question_of(row: Any, where: str) -> Question:
    """One row as a question; a ValueError, which names it by `where`, if its form is not known or a text is empty."""
    shown = json.dumps(row, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 60 else shown[:60] + "..."
    fields = as_row(row)
    more: dict[str, Any] = {}
    turns: tuple[str, ...] = ()
    if fields["messages"] is not None or fields["turns"] is not None:
        try:
            messages = asked_in(fields).messages
        except Refused as reason:
            raise ValueError(f"{where} is {shown}, a chat that cannot be asked: {reason}.") from None
        turns = tuple(turn["content"] for turn in messages if turn["role"] == "user")
        more = {"chat": True, "system": messages[0]["content"] if messages[0]["role"] == "system" else None}
    elif fields["text"] is not None:
        turns = (fields["text"][: fields["given"]] if fields["given"] else fields["text"],)
        more = {} if fields["given"] or "prompt" in row else {"beginning": BEGINNING}
    if not turns:
        raise ValueError(f"{where} is {shown}: {EXPECTED}.")
    if not all(turns):
        raise ValueError(f"{where} is {shown}, a prompt that is empty: give the text that the model shall answer.")
    category = row.get("category")
    category = UNCATEGORISED if category in (None, "") else str(category)
    return Question(turns, category, where=where, **more)


def text_of(tokenizer: Any, question: Question, answers: Sequence[str]) -> str:
    """What the model is to continue: the prompt itself, or the conversation up to the next answer."""
    if not question.chat:
        whole = question.turns[0]
        return whole if question.beginning is None else beginning_of(tokenizer, whole, question.beginning)
    messages = [{"role": "system", "content": question.system}] if question.system else []
    for turn, answer in zip(question.turns, answers):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    messages.append({"role": "user", "content": question.turns[len(answers)]})
    return chat_text(tokenizer, messages, question.where)


def need_template(tokenizer: Any, where: str = "this") -> None:
    """Raise a ValueError where a tokenizer has no chat template, which the conversation at `where` needs."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"{where} is a conversation, but the tokenizer at {tokenizer.name_or_path!r} has no chat template: give "
            "one with --chat-template FILE, or texts to continue."
        )


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str = "the conversation") -> str:
    """A conversation in the tokenizer's chat template, up to where the next answer begins; for a template without
    system turns the system message is put in front of the first question."""
    turns = [dict(message) for message in messages]
    if turns[0]["role"] == "system":
        with suppress(ValueError):  # the template refuses system turns
            text = _rendered(tokenizer, turns, where)
            if turns[0]["content"].strip() in text:
                return text
        turns = Chat(turns).without_system().messages
    return _rendered(tokenizer, turns, where)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], where: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything; the template is at fault
        raise ValueError(f"the chat template cannot take {where} ({one_line(error)}): correct the template.") from error
