"""The one way in: what a call asks for is checked, the base prepares it, and its prompt is read.

A call of `generate` and a request of a manager come this way alike, and become members of a batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteriaList

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import (
    CACHE,
    ROW_BY_ROW,
    BaseStreamer,
    GenerationMode,
    StopStringCriteria,
    can_load,
    check_length,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
    mask_length,
    rows_of,
    with_cache,
)
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.noise import NOTHING_DRAWN, RandomNumbers
from hf_drafthead.generation.prompt import BesideOthers, prefill
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.settings import DraftPlan, DraftSettings
from hf_drafthead.generation.state import Member, Stream, may_draw
from hf_drafthead.generation.step import now


@dataclass
class Asked:
    """What a call asks for beside the arguments of the base's `generate`.

    plan: of a call that names its tree; None where what was measured, and `settings`, choose one; copies: how many
    tokens of the text each step copies, where the call asks for that; texts: others to copy from; random: its numbers;
    timed: whether seconds are noted; others: of a call that is going to join them.
    """

    plan: DraftPlan | None = None
    settings: DraftSettings = field(default_factory=DraftSettings)
    copies: int | None = None
    texts: TextIndex | None = None
    execution: Execution = Execution("eager")
    streamer: BaseStreamer | None = None
    random: RandomNumbers = NOTHING_DRAWN
    timed: bool = False
    others: BesideOthers | None = None


class NothingPays(Unsupported):
    """No tree pays in a call, and the base is to decode by itself."""


class CallConfig(GenerationConfig):
    """The settings of one call, in which None is an answer: the base's own defaults do not fill it."""

    _settled: tuple[str, ...] = ()  # a public attribute would be an argument of `generate`

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **kwargs: Any) -> dict[str, Any]:
        if defaults_only:
            kwargs = {name: value for name, value in kwargs.items() if name not in self._settled}
        return super().update(defaults_only=defaults_only, allow_custom_entries=allow_custom_entries, **kwargs)

    def without(self, name: str) -> CallConfig:
        """A copy in which a setting is None for good."""
        config = copy.deepcopy(self)
        setattr(config, name, None)
        config._settled += (name,)
        return config


def begin(
    model: Any,
    inputs: torch.Tensor | None,
    config: CallConfig,
    asked: Asked,
    then: Callable[[Member], Any] = lambda member: member,
    *,
    stopping_criteria: Any = None,
    assistant_model: Any = None,
    synced_gpus: bool | None = None,
    **arguments: Any,
) -> Any:
    """Let the base prepare a call, and read its prompt.

    Args:
        model: with `base` and `drafter`.
        inputs: (B, P) prompt, or None.
        config: of the call, see `merged_config`.
        asked: what it asks for besides.
        then: what is done with the call behind its prompt, within the base's `generate`, which may add to the outcome.
        stopping_criteria, assistant_model, synced_gpus, arguments: of the base's `generate`.

    Returns:
        what `then` gives, by default the call behind its prompt.

    Raises:
        Unsupported: the call cannot draft, or cannot join others; nothing of the user's was given a token.
    """
    check_call(model.base, config, assistant_model, synced_gpus)
    reader = model._base_reader()
    arguments |= {"generation_config": config, "synced_gpus": synced_gpus}
    if config.stop_strings is None:
        arguments["stopping_criteria"] = stopping_criteria
    else:
        arguments |= _stop_strings_as_criterion(config, stopping_criteria, arguments)

    def handed_on(*args: Any, **model_kwargs: Any) -> Any:  # with no names of ours, which a call could set
        return then(_prefilled(model, reader, asked, *args, **model_kwargs))

    return model.base.generate(inputs, custom_generate=handed_on, **arguments)


def _prefilled(model: Any, reader: BaseReader, asked: Asked, base: Any, input_ids: torch.Tensor, **call: Any) -> Member:
    """Behind a look at what the base has prepared: the call with its rules, behind its prompt."""
    processors, criteria = call.pop("logits_processor"), call.pop("stopping_criteria")
    config, drafter, text_config = call.pop("generation_config"), model.drafter, base.config.get_text_config(True)
    inputs = with_cache(CACHE, {name: value for name, value in call.items() if value is not None})
    if text_config is not base.config:
        inputs = _of_text(inputs)
    past = inputs.get(CACHE)
    if past is None or not can_load(past):
        raise Unsupported(f"a cache of type {type(past).__name__} cannot be compacted")
    if (rows := rows_of(past)) not in (None, len(input_ids)):
        raise Unsupported(f"the cache holds {rows} row(s), and the call has {len(input_ids)}", lasting=False)
    # greedy decoding is exact with all of them
    plan, settings = asked.plan, asked.settings
    acceptance = (plan or settings).acceptance if config.do_sample else "exact"
    if others := sorted({type(p).__name__ for p in processors if type(p) not in ROW_BY_ROW}):
        if acceptance != "exact":
            raise Unsupported(f"{acceptance} acceptance cannot show {', '.join(others)} all nodes at once")
    lookup = {"copies": asked.copies, "longest_match": config.max_matching_ngram_size, "texts": asked.texts}
    if plan is None or asked.copies is not None:
        plan = _trees().choose(model, reader, settings, len(input_ids), asked.execution, named=plan, **lookup)
    if plan.base_decodes and not asked.timed:
        raise NothingPays(plan.why)
    mask = inputs.get("attention_mask")  # as long as the prompt and the past together, also where it was dropped
    positions = mask_length(config, mask) or input_ids.shape[1]
    longest = positions + config.max_length - input_ids.shape[1] + plan.tree.max_depth
    check_length(text_config, longest, plan.tree.num_nodes)
    inputs.pop("cache_position", None)
    rules = Rules(
        processors,
        criteria,
        config,
        batch_size=len(input_ids),
        prompt_length=input_ids.shape[1],
        device=input_ids.device,
        samples=config.do_sample and acceptance != "typical",
        rejects=acceptance == "rejection",
        streams=may_draw(asked.streamer),
        random=asked.random,
    )
    returned = config.return_dict_in_generate or getattr(past, "_is_user_defined", False)
    if reader.mixers and rules.overruns and returned:
        raise Unsupported("rows go on behind their ends without padding, and a state cannot go back", lasting=False)
    stream = None if asked.streamer is None else Stream(asked.streamer, rules)
    start = now(base.device) if asked.timed else 0.0
    member = prefill(reader, drafter, plan, input_ids, rules, inputs, stream, asked.others)
    if asked.timed:
        member.prefilled_in = now(base.device) - start
    return member


def _trees() -> Any:
    """The room where a tree is chosen, by what was measured with this one's steps; imported when it is asked for."""
    from hf_drafthead import trees

    return trees


def _of_text(inputs: dict[str, Any]) -> dict[str, Any]:
    """The model inputs of a call, without what tells a base for images and text that there are no images."""
    if inputs.get("mm_encoder_outputs") == {}:
        del inputs["mm_encoder_outputs"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs and not bool(inputs[name].any()):
            del inputs[name]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3 and bool((positions == positions[:1]).all()):
        inputs["position_ids"] = positions[0]  # a position of the text is the same on every axis
    return inputs


def check_call(base, config: GenerationConfig, assistant_model, synced_gpus: bool | None) -> None:
    """Refuse, before anything runs, what the loop cannot do.

    Raises:
        Unsupported: with the reason.
    """
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unsupported(f"the generation mode is {mode.value.replace('_', ' ')}")
    if not config.use_cache:
        raise Unsupported(f"use_cache is {config.use_cache}")
    if config.cache_implementation not in (None, "dynamic", "hybrid", "static"):
        raise Unsupported(f"cache_implementation is {config.cache_implementation!r}")
    if config.output_attentions or config.output_hidden_states:
        raise Unsupported("attentions or hidden states are asked for")
    if config.token_healing:
        raise Unsupported("token healing rewrites the prompt")
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(base)
    if synced_gpus or (synced_gpus is None and sharded and dist.is_initialized() and dist.get_world_size() > 1):
        raise Unsupported("several processes must stay in step")


def _stop_strings_as_criterion(config: CallConfig, stopping_criteria, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that make `stop_strings` work: with a custom loop transformers loses the tokenizer on the way."""
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings is {config.stop_strings!r}, but no tokenizer was given: pass tokenizer= to generate()."
        )
    criteria = StoppingCriteriaList(stopping_criteria or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # else the caller's replaces it
        criteria.insert(0, StopStringCriteria(tokenizer, config.stop_strings))
    return {"generation_config": config.without("stop_strings"), "stopping_criteria": criteria}
