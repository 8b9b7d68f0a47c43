"""A text continued piece by piece, with the depth of the guess that each piece was; a conversation of such texts."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.evaluation.calls import BASE, HEADS, decoding_methods, encode, positions_of, steps_of
from hf_drafthead.evaluation.measurement import COPIED, guess_depths, tokens_per_step
from hf_drafthead.evaluation.questions import chat_text, need_template
from hf_drafthead.generation import StepRecord
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.timing import wait

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
    copied: list[int] = []
    if on_piece is not None:
        streamer = PieceStreamer(tokenizer, on_piece)
        copied = streamer.copied
        settings |= {"streamer": streamer, **({} if alone else {"on_step": streamer.note})}
    wait(model.base.device)
    start = time.perf_counter()
    out: Any = decoding_methods(model, tokenizer, tree=tree)[BASE if alone else HEADS](inputs, settings)
    wait(model.base.device)
    seconds = time.perf_counter() - start
    accepted = steps_of(out)
    tokens = getattr(out, "sequences", out)[0, inputs["input_ids"].shape[1] :].tolist()
    depths = guess_depths(accepted[0], copied)
    depths += [0] * (len(tokens) - len(depths))
    spelling = Spelling(tokenizer)
    pieces = [(spelling.add(token), depth) for token, depth in zip(tokens, depths, strict=False)]
    pieces = [(text, depth) for text, depth in [*pieces, (spelling.rest(), 0)] if text]
    figures = (tokens, len(tokens), int((accepted > 0).sum()), tokens_per_step([accepted]), seconds)
    return Sample(model.name_or_path, prompt, "".join(text for text, _ in pieces), pieces, *figures)


class Spelling:
    """Converts tokens to text one at a time, holding back those that end inside a character."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._length = 0

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        self._tokens.append(token)
        text = self._text()
        return "" if text.endswith("\N{REPLACEMENT CHARACTER}") else self._new_text(text)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._new_text(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _new_text(self, text: str) -> str:
        new, self._length = text[self._length :], len(text)
        return new


class PieceStreamer(BaseStreamer):
    """Passes on every piece of the new text with its depth, as soon as its step is committed, which `generate` says
    through `on_step`. Where the base decodes by itself, every token is passed on when the next one comes."""

    def __init__(self, tokenizer: Any, on_piece: Callable[[str, int], object]):
        self._spelling = Spelling(tokenizer)
        self._on_piece = on_piece
        self.copied: list[int] = []  # accepted copies of each step
        self._prompt_seen = self._drafting = False
        self._tokens: list[int] = []  # of the step that is not committed yet

    def put(self, value: torch.Tensor) -> None:
        """The prompt on the first call, then one token per call."""
        if self._prompt_seen and not self._drafting:
            self._pass_on()
        if self._prompt_seen:
            self._tokens.append(int(value))
        self._prompt_seen = True

    def note(self, record: StepRecord) -> None:
        """A step is committed: its guesses, and last the base's own token."""
        self._drafting = True
        if record.step:
            self.copied.append(record.copied()[0] if record.copied else 0)
        self._pass_on()

    def end(self) -> None:
        """The last tokens, and the held-back rest of the text."""
        self._pass_on()
        if text := self._spelling.rest():
            self._on_piece(text, 0)

    def _pass_on(self) -> None:
        copies = self.copied[-1] if self.copied else 0
        for place, token in enumerate(self._tokens, start=1):
            if text := self._spelling.add(token):
                # the last one is the base's own, of depth 0
                self._on_piece(text, COPIED if place <= copies else place % len(self._tokens))
        self._tokens = []


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
        """The model's answer to a question; both become part of the conversation. A ValueError where there is
        no room."""
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
