"""A text continued piece by piece, with the depth of the guess that each piece was; a conversation of such texts."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.evaluation.calls import BASE, HEADS, decoding_methods, encode, positions_of, steps_of
from hf_drafthead.evaluation.measurement import COPIED, tokens_per_step
from hf_drafthead.evaluation.questions import chat_text, need_template
from hf_drafthead.generation import StepRecord
from hf_drafthead.generation.step import now
from hf_drafthead.generation.tree import DraftTree

Piece = tuple[str, int]  # text, and the depth of the guess: 0 is the base's own token, COPIED one of the text before


@dataclass(frozen=True)
class Sample:
    """What a model wrote, and in how many steps."""

    model: str
    prompt: str
    text: str
    pieces: list[Piece]
    tokens: list[int]
    new_tokens: int
    steps: int
    tokens_per_step: float | None
    seconds: float


def sample(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    tree: str | DraftTree | None = None,
    alone: bool = False,
    on_piece: Callable[[str, int], object] | None = None,
    special_tokens: bool = True,
    **settings: Any,
) -> Sample:
    """Continue one prompt, with `settings` of `generate`; a tree of None is the model's own, and `alone` is the base
    without heads. `on_piece` is called with every piece as soon as its step is committed; only then are copies told
    from guesses."""
    inputs = encode(model, tokenizer, [prompt], special_tokens=special_tokens)
    pieces = Pieces(tokenizer, on_piece)
    if on_piece is not None:
        settings |= {"streamer": pieces, **({} if alone else {"on_step": pieces.note})}
    start = now(model.base.device)
    out: Any = decoding_methods(model, tokenizer, tree=tree)[BASE if alone else HEADS](inputs, settings)
    seconds = now(model.base.device) - start
    accepted = steps_of(out)
    tokens = getattr(out, "sequences", out)[0, inputs["input_ids"].shape[1] :].tolist()
    if on_piece is None:
        rest = iter(tokens)
        for length in [1, *accepted[0].tolist(), *[1] * len(tokens)]:
            pieces.add([*itertools.islice(rest, length)])
        pieces.end()
    text = "".join(piece for piece, _ in pieces.all)
    figures = (tokens, len(tokens), int((accepted > 0).sum()), tokens_per_step([accepted]), seconds)
    return Sample(model.name_or_path, prompt, text, pieces.all, *figures)


class Pieces(BaseStreamer):
    """The pieces of a new text with their depths, none of which ends inside a character. A streamer has each as soon as
    its step is committed, which `generate` says through `on_step`; where the base decodes by itself, every token when
    the next one comes."""

    def __init__(self, tokenizer: Any, on_piece: Callable[[str, int], object] | None = None):
        self.all: list[Piece] = []
        self._tokenizer, self._on_piece = tokenizer, on_piece
        self._tokens: list[int] = []
        self._length = 0  # of the text that is in pieces
        self._prompt_seen = self._drafting = False
        self._waiting: list[int] = []  # of the step that is not committed yet

    def add(self, tokens: Sequence[int], copies: int = 0) -> None:
        """The tokens of a step, of which the last is the base's own, and so many copied."""
        for place, token in enumerate(tokens, start=1):
            self._tokens.append(token)
            if not (text := self._text()).endswith("\N{REPLACEMENT CHARACTER}"):
                self._take(text, COPIED if place <= copies else place % len(tokens))

    def put(self, value: torch.Tensor) -> None:
        """The prompt on the first call, then one token per call."""
        if self._prompt_seen:
            if not self._drafting:
                self._commit()
            self._waiting.append(int(value))
        self._prompt_seen = True

    def note(self, record: StepRecord) -> None:
        """A step is committed."""
        self._drafting = True
        self._commit(record.copied()[0] if record.step and record.copied else 0)

    def end(self) -> None:
        """The last tokens, and what was held back."""
        self._commit()
        self._take(self._text(), 0)

    def _commit(self, copies: int = 0) -> None:
        self.add(self._waiting, copies)
        self._waiting = []

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _take(self, text: str, depth: int) -> None:
        new, self._length = text[self._length :], len(text)
        if new:
            self.all.append((new, depth))
            if self._on_piece is not None:
                self._on_piece(new, depth)


class Conversation:
    """Questions and the model's answers so far; arguments as for `sample`, `max_new_tokens` among the settings.

    A ValueError where the tokenizer has no chat template.
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
        """The model's answer to a question; both become part of the conversation. ValueError where there is no room."""
        asked = [*self.messages, {"role": "user", "content": question}]
        text = chat_text(self.tokenizer, asked)
        length = encode(self.model, self.tokenizer, [text], special_tokens=False)["input_ids"].shape[1]
        positions = positions_of(self.model)
        room = self.settings["max_new_tokens"] if positions is None else positions - length
        if room < 1:
            what = f"the conversation has {length} tokens, which leaves no room in the base's {positions} positions"
            raise ValueError(f"{what}: begin a new one.")
        settings = {**self.settings, "max_new_tokens": min(self.settings["max_new_tokens"], room)}
        written = sample(
            self.model, self.tokenizer, text, tree=self.tree, on_piece=on_piece, special_tokens=False, **settings
        )
        self.messages = [*asked, {"role": "assistant", "content": written.text.strip()}]
        return written

    def clear(self) -> None:
        """Start a new conversation with the same system message."""
        self.messages = list(self._system)
