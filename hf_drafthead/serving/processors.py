"""What OpenAI's API asks of single tokens and transformers has no setting for, as a processor and a criterion.

Shapes: B rows of one request (several where it has beams), T tokens of the answer, V vocabulary.
"""

import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria

from hf_drafthead.serving.fields import Refused

LEAST = -9999.0  # what OpenAI's API says of tokens that are hardly possible
MARGIN = 8  # tokens that are read again before those in which a stop string may begin
SPACES: Any = {"whitespace_flexible": True, "whitespace_pattern": " ?"}  # of JSON: a model may write them for ever


class TokenScores(LogitsProcessor):
    """Adds biases, takes penalties, notes log probabilities, and leaves the tokens that a grammar allows.

    Args:
        prompt_length: tokens that are no part of the answer.
        bias: by token id.
        penalties: what is taken from a token that the answer has, and for each time that it has it.
        alternatives: how many tokens' log probabilities are noted beside the chosen one's; None where none are.
        matcher: of a grammar, or None.
    """

    def __init__(self, prompt_length: int, bias: Any, penalties: Any, alternatives: int | None, matcher: Any):
        self.prompt_length, self.bias, (self.presence, self.frequency) = prompt_length, bias, penalties
        self.alternatives, self.matcher = alternatives, matcher
        self.read: list[int] = []  # by the matcher
        self.pending: dict[int, Tensor] = {}  # (V,) log probabilities of places whose token is not chosen yet
        self.noted: dict[int, tuple[float, list[tuple[int, float]]]] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt_length :]  # (B, T)
        if self.presence or self.frequency:
            times = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
            scores = scores - self.frequency * times - self.presence * (times > 0)
        if self.bias:
            added = torch.tensor([[*self.bias.values()]] * len(scores), device=scores.device, dtype=scores.dtype)
            scores = scores.index_add(1, torch.tensor([*self.bias], device=scores.device), added)
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
        best = [(other, max(value, LEAST)) for other, value in zip(tokens.tolist(), values.tolist())]
        return max(float(pending[token]), LEAST), best

    def _allowed(self, answer: list[int], vocabulary: int) -> Tensor:
        """Which tokens (V,) the grammar allows behind an answer."""
        same = 0
        while same < min(len(answer), len(self.read)) and answer[same] == self.read[same]:
            same += 1
        self.matcher.rollback(len(self.read) - same)
        self.matcher.try_consume_tokens(answer[same:])
        self.read = answer
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


class Grammars:
    """Makes matchers of JSON that fits a schema; `Refused` where the package for that is missing.

    Args:
        tokenizer: of the `tokenizers` library.
        vocabulary, ends: how many scores the base gives, and the tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, ends: list[int]):
        if find_spec("llguidance") is None:
            raise Refused("response_format", "llguidance is not installed: pip install 'hf-drafthead[structured]'.")
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        self.kind, size = LLMatcher, max(vocabulary, len(tokenizer))
        self.tokenizer = from_tokenizer(tokenizer, n_vocab=size, eos_token=ends)

    def matcher(self, schema: dict[str, Any]) -> Any:
        """A matcher; `Refused` for what is no schema, or has what is not supported."""
        matcher = self.kind(self.tokenizer, self.kind.grammar_from_json_schema(json.dumps(schema), overrides=SPACES))
        if problem := matcher.get_error():
            raise Refused("response_format", f"this schema cannot be used: {' '.join(problem.split())}")
        return matcher
