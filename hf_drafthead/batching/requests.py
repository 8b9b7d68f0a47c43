"""Requests: what was asked, how far it is, and how it is begun, or decoded alone where it cannot share a batch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.batching.step import Member
from hf_drafthead.generation.decoding import Stream, prefill
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import DecodingState

# Objects of the user's, which may draw from the process's generators when they are asked.
OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "streamer")


@dataclass
class Request:
    """One request, which belongs to the thread that decodes once it was added.

    Args:
        request_id: as its results name it.
        prompt: P token ids.
        settings: arguments of the model's `generate`, `generation_config` among them.
        random: its numbers; None where it draws none.
        number: counts requests in the order in which they came.
        streaming: give a result after every step.
        record_timestamps: note when each token came.
        keeps_logprobs: note the log probability of each token, after the processors.
    """

    request_id: str
    prompt: list[int]
    settings: dict[str, Any]
    random: RandomNumbers | None
    number: int = 0
    streaming: bool = False
    record_timestamps: bool = False
    keeps_logprobs: bool = False
    status: RequestStatus = RequestStatus.PENDING
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
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

    @property
    def finished(self) -> bool:
        """Whether its last result was given."""
        return self.status >= RequestStatus.FINISHED

    def take(self, tokens: Sequence[int], rules: Any = None, nodes: int = 1) -> None:
        """Note new tokens, of a step with so many nodes, and what `rules` have kept of their scores."""
        if nodes > 1:
            self.drafted, self.accepted = self.drafted + nodes - 1, self.accepted + max(len(tokens) - 1, 0)
        if self.keeps_logprobs and rules is not None and rules.keeps_scores:
            for place, token in enumerate(tokens, len(self.tokens)):
                self.logprobs.append(float(rules.scores[place][0].log_softmax(-1)[token]))
        self.tokens += tokens
        if self.record_timestamps:
            self.times += [time.perf_counter()] * len(tokens)

    @property
    def objects(self) -> bool:
        """Whether objects of the user's take part."""
        return any(self.settings.get(name) for name in OBJECTS)


def begin(
    model: Any,
    request: Request,
    plan: DraftPlan,
    reader: BaseReader,
    device: torch.device,
    begun: DecodingState | None = None,
    pieces: tuple[int, Callable[[], None]] | None = None,
) -> Member:
    """Prefill a request, which chooses its first token.

    Args:
        begun, pieces: see `prefill`.

    Raises:
        Unsupported: it cannot share a batch.
        Exception: whatever is wrong with it.
    """
    settings = dict(request.settings)
    if settings.get("custom_generate") is not None:
        raise Unsupported("custom_generate is given")
    streamer = settings.pop("streamer", None)
    if request.keeps_logprobs:
        settings |= {"output_scores": True, "return_dict_in_generate": True}

    def prefilled(model, input_ids, rules, call_reader, plan, execution, *, streamer, on_step, **inputs) -> Member:
        past, mask = inputs.pop(CACHE), inputs.get("attention_mask")
        if mask is not None and not bool(mask.all()):
            raise Unsupported("the prompt holds padding")
        if call_reader is not reader:
            raise Unsupported("the base has changed since the batch began")
        if getattr(past, "_is_user_defined", False):
            raise Unsupported("a cache of the user's own is given")
        silent = Stream(None, rules)
        state, steps = prefill(reader, model.drafter, plan.tree, input_ids, rules, inputs, past, silent, begun, pieces)
        if steps is not reader:
            raise Unsupported("the base wants inputs of one prompt alone")
        stream = Stream(streamer, rules)
        stream.begin(input_ids)
        stream.show(state.rows.sequences[:, input_ids.shape[1]])
        return Member(request, rules, stream, state, input_ids.shape[1])

    tokens, settings = prompt_of(request, settings, device)
    random = {"random": request.random, "streamer": streamer}
    member: Member = model.begin_shared(tokens, plan, prefilled, **random, **settings)
    if member.state is not None:
        new = member.state.rows.sequences[0, member.prompt_length : member.state.lengths[0]]
        request.take(new.tolist(), member.rules)
    return member


def prompt_of(request: Request, settings: dict[str, Any], device: torch.device) -> tuple[torch.Tensor, dict[str, Any]]:
    """The prompt (1, P) of a request, and its settings with a mask of ones, for it holds no padding.

    Without a mask transformers takes pad tokens for padding, and some chat templates end every turn with one.
    """
    tokens = torch.tensor([request.prompt], device=device)
    return tokens, {"attention_mask": torch.ones_like(tokens), **settings}


class Cancelled(StoppingCriteria):
    """Ends a call whose request was cancelled."""

    def __init__(self, request: Request):
        self.request = request

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.request.cancelled, device=input_ids.device)


def decode_alone(model: Any, request: Request, device: torch.device) -> None:
    """Decode a request by a call of its own."""
    settings = dict(request.settings)
    settings["stopping_criteria"] = StoppingCriteriaList(
        [*(settings.get("stopping_criteria") or []), Cancelled(request)]
    )
    with contextlib.nullcontext() if request.random is None else request.random.lent(at_once=True):
        tokens, settings = prompt_of(request, settings, device)
        output = model.generate(tokens, **settings)
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    request.take(sequences[0, len(request.prompt) :].tolist())


def config_value(name: str, *places: Any) -> Any:
    """A setting where it is first named: arguments or generation configs; None where it is nowhere."""
    for place in places:
        value = place.get(name) if isinstance(place, dict) else getattr(place, name, None)
        if value is not None:
            return value
    return None


def with_config(config: GenerationConfig | None) -> dict[str, Any]:
    """The arguments that a generation config stands for; that of transformers' server turns the cache off."""
    if config is None:
        return {}
    return {"generation_config": config, "use_cache": True}
