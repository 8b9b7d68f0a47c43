"""Chats in the form that the base was trained on: the tokenizer's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from hf_drafthead.data.chats import Chat
from hf_drafthead.evaluation.loading import one_line


def need_template(tokenizer: Any) -> None:
    """Refuse a tokenizer without a chat template.

    Raises:
        ValueError: it has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer at {tokenizer.name_or_path!r} has no chat template: give one with --chat-template FILE, or "
            "continue plain text, with `hf-drafthead generate` and without --system."
        )


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], where: str = "the conversation") -> str:
    """A conversation in the tokenizer's chat template, up to where the next answer begins.

    The text holds the special tokens that the template writes: tokenize it without adding others. For a template
    without system turns the system message is put in front of the first question.

    Args:
        tokenizer: with a chat template.
        messages: turns of `system`, `user` and `assistant`; the last one is the user's.
        where: the name of the conversation in error messages.

    Raises:
        ValueError: the template refuses the conversation.
    """
    given = [dict(message) for message in messages]
    if given[0]["role"] == "system":
        try:
            text = _rendered(tokenizer, given, where)
            if given[0]["content"].strip() in text:
                return text
        except ValueError:
            pass  # the template refuses system turns
        given = Chat(given).without_system().messages
    return _rendered(tokenizer, given, where)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], where: str) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template may raise anything; the template is at fault
        raise ValueError(f"the chat template cannot take {where} ({one_line(error)}): correct the template.") from error
