"""A conversation with a model, one answer after the other."""

from collections.abc import Callable, Mapping
from typing import Any

from hf_drafthead.evaluation.sample import Sample, sample
from hf_drafthead.evaluation.speed import encode, positions_of
from hf_drafthead.evaluation.templates import chat_text, need_template
from hf_drafthead.generation.tree import DraftTree


class Conversation:
    """Questions and the model's answers so far.

    Args:
        model: a model with draft heads.
        tokenizer: its base's, with a chat template.
        system: the system message.
        tree: draft tree, or a published one's name; None for the model's own.
        settings: for `generate`, `max_new_tokens` among them.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        system: str | None = None,
        tree: str | DraftTree | None = None,
        settings: Mapping[str, Any],
    ) -> None:
        need_template(tokenizer)
        self.model, self.tokenizer, self.tree, self.settings = model, tokenizer, tree, dict(settings)
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._system)

    def ask(self, question: str, on_piece: Callable[[str, int], object] | None = None) -> Sample:
        """The model's answer to a question; both become part of the conversation.

        Args:
            question: the user's turn.
            on_piece: called with every piece of the answer as soon as its step is committed.

        Raises:
            ValueError: the template refuses the conversation, or it leaves the base no room for an answer.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        text = chat_text(self.tokenizer, asked)
        length = encode(self.model, self.tokenizer, [text], special_tokens=False)["input_ids"].shape[1]
        positions = positions_of(self.model)
        room = self.settings["max_new_tokens"] if positions is None else positions - length
        if room < 1:
            raise ValueError(
                f"the conversation has {length} tokens, which leaves no room for an answer in the base's {positions} "
                "positions: begin a new one."
            )
        settings = {**self.settings, "max_new_tokens": min(self.settings["max_new_tokens"], room)}
        written = sample(
            self.model, self.tokenizer, text, tree=self.tree, on_piece=on_piece, special_tokens=False, **settings
        )
        self.messages = [*asked, {"role": "assistant", "content": written.text.strip()}]
        return written

    def clear(self) -> None:
        """Start a new conversation with the same system message."""
        self.messages = list(self._system)
