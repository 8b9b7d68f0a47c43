"""Requests: what was asked, how far it is, how it is begun, or decoded alone where it cannot share a batch; counts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.hooks import input_device
from hf_drafthead.bases.releases import CACHE, GenerationOutput, RequestStatus, with_cache
from hf_drafthead.generation.entry import Asked, begin
from hf_drafthead.generation.noise import NOTHING_DRAWN, RandomNumbers
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import Member

SHARE = 0.05  # of the newest request in the mean time to the first token
COUNTED = ("finished", "failed", "cancelled", "steps", "tokens", "drafted", "accepted")
# Objects of the user's, which may draw from the process's generators when they are asked.
OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


@dataclass
class Request:
    """One request, which belongs to the thread that decodes once it was added.

    settings: arguments of the model's `generate`, `generation_config` among them; number: in the order in which they
    came; samples: whether its tokens are drawn; random: its numbers, where it or objects of the user's draw; streaming:
    give a result after every step; record_timestamps, keeps_logprobs: note when each token came, and its log
    probability after the processors; learn: whether heads may learn from its text, None where it was not said; member:
    of a batch, from its first token to its end.
    """

    request_id: str
    prompt: list[int]
    settings: dict[str, Any]
    number: int = 0
    streaming: bool = False
    record_timestamps: bool = False
    learn: bool | None = None
    keeps_logprobs: bool = False
    samples: bool = False
    random: RandomNumbers | None = None
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    member: Member | None = None
    error: str | None = None
    cancelled: bool = False
    created: float = field(default_factory=time.perf_counter)
    began: float = -1
    ended: float = -1

    def output(self) -> GenerationOutput:
        """As transformers gives it, with how many tokens were `drafted`, and how many of these were `accepted`."""
        output = GenerationOutput(
            request_id=self.request_id,
            prompt_ids=[*self.prompt],
            generated_tokens=[*self.tokens],
            logprobs=[*self.logprobs],
            error=self.error,
            status=self.status,
            created_time=self.created,
            lifespan=(self.began, self.ended),
            timestamps=[*self.times] if self.record_timestamps else None,
        )
        output.drafted, output.accepted = self.drafted, self.accepted
        return output

    def take(self, tokens: Sequence[int], scores: Sequence[torch.Tensor] = (), nodes: int = 1) -> None:
        """Note new tokens, of a step with so many nodes, and what the processed scores (1, V) of all say of these."""
        if nodes > 1:
            self.drafted, self.accepted = self.drafted + nodes - 1, self.accepted + max(len(tokens) - 1, 0)
        for place, token in enumerate(tokens, len(self.tokens)):
            if self.keeps_logprobs and place < len(scores):
                self.logprobs.append(float(scores[place][0].log_softmax(-1)[token]))
        self.tokens += tokens
        if self.record_timestamps:
            self.times += [time.perf_counter()] * len(tokens)


def arguments_of(model: Any, request: Request) -> tuple[torch.Tensor, dict[str, Any], Any]:
    """What `generate` is given for a request: the prompt (1, P); its settings; the streamer. A mask of ones says that
    nothing is padding, for which transformers takes pad tokens without one: some chat templates end turns with them."""
    tokens = torch.tensor([request.prompt], device=input_device(model.base))
    settings = {"attention_mask": torch.ones_like(tokens), **request.settings}
    if request.keeps_logprobs:
        settings |= {"output_scores": True, "return_dict_in_generate": True}
    return tokens, settings, settings.pop("streamer", None)


def begin_request(model: Any, request: Request, plan: DraftPlan, **how: Any) -> Member:
    """Prefill a request, which chooses its first token; Unsupported where it cannot share a batch. how: see `Asked`."""
    tokens, settings, streamer = arguments_of(model, request)
    if settings.pop("custom_generate", None) is not None:
        raise Unsupported("custom_generate is given")
    config, drafting, settings = model._merged_config(
        settings.pop("generation_config", None), with_cache(CACHE, settings)
    )
    random = request.random or NOTHING_DRAWN
    asked = Asked(replace(plan, settings=drafting), streamer=streamer, random=random, **how)
    member: Member = begin(model, tokens, config.without("prompt_lookup_num_tokens"), asked, **settings)
    assert member.state is not None
    member.request = request
    new = member.state.rows.sequences[0, len(request.prompt) : member.state.lengths[0]]
    request.take(new.tolist(), member.rules.scores)
    return member


class Follows(StoppingCriteria):
    """Takes the tokens of a call of its own as they come, and ends it where the request was cancelled."""

    def __init__(self, request: Request, deliver: Callable[[Request], None]):
        self.request, self.deliver = request, deliver

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        request = self.request
        if len(input_ids) == 1:  # else of beams, of which none is chosen yet
            request.take(input_ids[0, len(request.prompt) + len(request.tokens) :].tolist(), scores or ())
            if request.streaming:
                self.deliver(request)
        return torch.full((len(input_ids),), request.cancelled, device=input_ids.device)


def decode_by_itself(model: Any, request: Request, deliver: Callable[[Request], None]) -> None:
    """Decode a request that cannot share a batch, as those with beams or an assistant, by a call of its own."""
    tokens, settings, streamer = arguments_of(model, request)
    follows = Follows(request, deliver)
    settings["stopping_criteria"] = StoppingCriteriaList([*(settings.get("stopping_criteria") or []), follows])
    with request.random.lent(at_once=request.samples) if request.random else contextlib.nullcontext():
        output = model.generate(tokens, streamer=streamer, **settings)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    rest = sequences[0, len(request.prompt) + len(request.tokens) :].tolist()
    request.take(rest)
    if request.keeps_logprobs and getattr(output, "beam_indices", None) is not None:
        of_beams = model.base.compute_transition_scores(sequences, output.scores, output.beam_indices)
        request.logprobs = of_beams[0, : len(request.tokens)].tolist()


def config_value(name: str, *places: Any) -> Any:
    """A setting where it is first named: arguments or generation configs; None where it is nowhere."""
    for place in places:
        value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
        if value is not None:
            return value
    return None


class Metrics:
    """Counts since the manager was made, and means; drafted and accepted tokens are of requests that have ended."""

    def __init__(self) -> None:
        self.finished = self.failed = self.cancelled = self.steps = self.rows = self.tokens = 0
        self.drafted = self.accepted = self.began = 0
        self.first_token = self.started = 0.0  # seconds

    def first(self, request: Request) -> None:
        """A request has its first token."""
        now = time.perf_counter()
        self.started = self.started or now
        self.tokens += len(request.tokens)
        self.first_token += (now - request.created - self.first_token) * (SHARE if self.began else 1.0)
        self.began += 1

    def end(self, request: Request) -> None:
        """A request has its last result."""
        self.finished += request.error is None
        self.cancelled += request.cancelled
        self.failed += request.error is not None and not request.cancelled
        self.drafted, self.accepted = self.drafted + request.drafted, self.accepted + request.accepted

    def values(self) -> dict[str, float]:
        """As JSON takes it."""
        counted = {name: getattr(self, name) for name in COUNTED}
        seconds = time.perf_counter() - self.started if self.started else 0.0
        behind_first = self.tokens - self.began
        return counted | {
            "tokens_per_step": round(behind_first / self.steps, 3) if self.steps else 0.0,
            "tokens_per_step_and_request": round(behind_first / self.rows, 3) if self.rows else 0.0,
            "tokens_per_second": round(self.tokens / seconds, 3) if seconds else 0.0,
            "seconds_to_first_token": round(self.first_token, 4),
        }
