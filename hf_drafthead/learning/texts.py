"""The texts that heads learn from, and those by which it is judged whether they did; in bounded memory."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.training.heads_loss import IGNORED

LONGEST = 512  # tokens of a text, of which the prompt's end takes what its answer leaves
LEAST_ANSWER = 4  # tokens; heads learn little of fewer
EVERY = 6  # one of so many texts is held out
OF_A_KIND, KINDS = 6, 16  # texts that are held out for long, of those that had equally many tokens per step
KINDS_PER_TOKEN = 3  # of a step
LEAST_OF_A_KIND = 3
AFTER_A_MOVE, HELD_OUT_AFTER_A_MOVE = 64, 8  # texts that stay where the base has changed


@dataclass(frozen=True, eq=False)
class Text:
    """A verified text: ids (T,) int32, and where its answer begins."""

    ids: torch.Tensor
    start: int

    def row(self) -> dict[str, torch.Tensor]:
        """As training wants it: heads learn from the answer alone."""
        ids = self.ids.long()
        return {"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) >= self.start, IGNORED)}


class RecentTexts:
    """The newest texts, of so many tokens to learn from (4 bytes each) and so many held out.

    Every sixth is held out: the newest of these tell how heads guess on what is asked now (`recent`). Few of each kind
    stay for longer, a kind being texts on which the heads guessed equally well when they came (`kept`; in `arrived`,
    until a round measures that, texts of which as many guesses were accepted), the first ones and the newest: a client
    with very many texts does not push out those of all others, however seldom there is a round.
    """

    def __init__(self, tokens: int, held_out: int):
        self.tokens, self.size, self.seen, self.fresh = tokens, 0, 0, 0
        self.texts: deque[Text] = deque()
        self.recent: deque[Text] = deque(maxlen=held_out)
        self.arrived: dict[int, list[Text]] = {}
        self.kept: dict[int, list[tuple[Text, float]]] = {}
        self.dice = random.Random(0)

    def add(self, prompt: Sequence[int], answer: Sequence[int], accepted: int = 0) -> None:
        """Take a text, so many guesses of which were accepted; of a long one the beginning of the answer, behind the
        end of the prompt."""
        if len(answer) < LEAST_ANSWER or not prompt:
            return
        kind = min(KINDS * accepted // len(answer), KINDS - 1)
        answer = answer[: LONGEST - 1]
        prompt = prompt[-(LONGEST - len(answer)) :]
        text = Text(torch.tensor([*prompt, *answer], dtype=torch.int32), len(prompt))
        self.seen, self.fresh = self.seen + 1, self.fresh + 1
        if self.seen % EVERY == 0:
            self.recent.append(text)
            put(self.arrived.setdefault(kind, []), text, LEAST_OF_A_KIND)
            return
        self.texts.append(text)
        self.size += len(text.ids)
        while self.size > self.tokens and len(self.texts) > 1:
            self.size -= len(self.texts.popleft().ids)

    def some(self, count: int) -> list[Text]:
        """Texts to learn from, any of those there are."""
        return self.dice.sample(list(self.texts), min(count, len(self.texts)))

    def new(self) -> list[Text]:
        """The texts that have arrived, which are to be kept."""
        arrived = [text for texts in self.arrived.values() for text in texts]
        self.arrived.clear()
        return arrived

    def keep(self, text: Text, tokens_per_step: float) -> None:
        """Hold a text out for long, with the tokens per step that the heads had on it when it came."""
        kind = min(int(KINDS_PER_TOKEN * tokens_per_step), KINDS - 1)
        put(self.kept.setdefault(kind, []), (text, tokens_per_step), OF_A_KIND)

    def base_has_moved(self) -> None:
        """The base is another one now: it would not answer so any more, and heads cannot be held to what they had."""
        self.kept.clear()
        self.arrived.clear()
        for texts, most in ((self.texts, AFTER_A_MOVE), (self.recent, HELD_OUT_AFTER_A_MOVE)):
            while len(texts) > most:
                texts.popleft()
        self.size = sum(len(text.ids) for text in self.texts)

    def kinds(self) -> Iterator[tuple[list[Text], float]]:
        """The texts of each kind that stay, and the mean of the tokens per step when they came; few tell nothing."""
        for texts in (texts for texts in self.kept.values() if len(texts) >= LEAST_OF_A_KIND):
            yield [text for text, _ in texts], sum(value for _, value in texts) / len(texts)


def put(texts: list[Any], new: Any, most: int) -> None:
    """Append a text to `most` others, of which half stay from the first on: a flood of others moves the rest alone."""
    texts.append(new)
    if len(texts) > most:
        del texts[most // 2]


def batch_of(texts: Sequence[Text], device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Texts (B, T) padded on the right, lengths of their prompts (B,) and of all of them (B,)."""
    ids = torch.nn.utils.rnn.pad_sequence([text.ids.long() for text in texts], batch_first=True)
    sizes = torch.tensor([[text.start, len(text.ids)] for text in texts], device=device)
    return ids.to(device), sizes[:, 0], sizes[:, 1]
