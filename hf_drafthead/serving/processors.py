"""What OpenAI's API asks of single tokens and transformers has no setting for, as a processor and a criterion.

Shapes: B rows of one request (several where it has beams), T tokens of the answer, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

LEAST = -9999.0  # what OpenAI's API says of tokens that are hardly possible
MARGIN = 8  # tokens that are read again before those in which a stop string may begin


class TokenScores(LogitsProcessor):
    """Takes penalties, notes log probabilities, `alternatives` beside the chosen one's, and keeps to a grammar."""

    def __init__(self, prompt_length: int, penalties: Any, alternatives: int | None, matcher: Any):
        self.prompt_length, (self.presence, self.frequency) = prompt_length, penalties
        self.alternatives, self.matcher = alternatives, matcher
        self.read: list[int] = []  # by the matcher
        self.pending: dict[int, Tensor] = {}  # (V,) log probabilities of places whose token is not chosen yet
        self.noted: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt_length :]  # (B, T)
        if self.presence or self.frequency:
            times = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
            scores = scores - self.frequency * times - self.presence * (times > 0)
        if self.alternatives is not None:
            for place in [place for place in self.pending if place < answer.shape[1]]:
                self.noted[place] = self.logprob(place, int(answer[0, place]))
                del self.pending[place]
            self.pending[answer.shape[1]] = scores[0].float().log_softmax(-1)
        if self.matcher is not None:
            allowed = torch.stack([self._allowed(row, scores.shape[1]) for row in answer.tolist()])
            scores = scores.masked_fill(~allowed.to(scores.device), -torch.inf)
        return scores

    def logprob(self, place: int, token: int) -> tuple[float, list[tuple[int, float]]]:
        """The log probability of a token at a place of the answer, and the best ones there; any thread asks."""
        if (pending := self.pending.get(place)) is None:
            return self.noted[place]
        values, tokens = pending.topk(self.alternatives or 0)
        return max(float(pending[token]), LEAST), [*zip(tokens.tolist(), values.clamp(min=LEAST).tolist())]

    def certain_path(self, prefix: Tensor, most: int) -> list[int]:
        """The tokens that the grammar leaves no choice of behind a prefix (P,), see `generation.grammar`."""
        if self.matcher is None:
            return []
        self._read(prefix[self.prompt_length :].tolist())
        path: list[int] = self.matcher.compute_ff_tokens()
        return path[:most]

    def _read(self, answer: list[int]) -> None:
        """Let the matcher stand behind an answer."""
        same = 0
        while same < min(len(answer), len(self.read)) and answer[same] == self.read[same]:
            same += 1
        self.matcher.rollback(len(self.read) - same)
        self.matcher.try_consume_tokens(answer[same:])
        self.read = answer

    def _allowed(self, answer: list[int], vocabulary: int) -> Tensor:
        """Which tokens (V,) the grammar allows behind an answer."""
        self._read(answer)
        mask = torch.frombuffer(bytearray(self.matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        return torch.nn.functional.pad(mask, (0, vocabulary - len(mask)))


class StopText(StoppingCriteria):
    """Ends an answer, of which the prompt is no part, behind the token that completes a stop string."""

    def __init__(self, decode: Callable[[list[int]], str], stops: list[str], prompt_length: int):
        self.decode, self.stops, self.prompt_length = decode, stops, prompt_length
        self.window = max(len(stop.encode()) for stop in stops) + MARGIN

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        texts = [self.decode(row[self.prompt_length :][-self.window :]) for row in input_ids.tolist()]
        return torch.tensor([any(stop in text for stop in self.stops) for text in texts], device=input_ids.device)
