"""The one way in: what a call asks for is checked, the base prepares it, reads the prompt and chooses the first root.

A call of `generate` and a request of a manager come this way alike, and become members of a batch.

Shapes: B rows, P prompt tokens, T prompt positions that are new to the cache, E end-of-sequence tokens, F*H features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import GenerationConfig, StoppingCriteriaList

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import (
    CACHE,
    STREAMERS,
    BaseStreamer,
    GenerationMode,
    PromptInputs,
    StopStringCriteria,
    can_load,
    check_length,
    is_deepspeed_zero3_enabled,
    is_fsdp_managed_module,
    mask_length,
    past_length,
    position_table,
    prompt_inputs,
    rows_of,
    with_cache,
)
from hf_drafthead.bases.slots import BUCKET, SlotCache
from hf_drafthead.bases.unusual_inputs import read_and_try
from hf_drafthead.generation.noise import NOTHING_DRAWN, RandomNumbers
from hf_drafthead.generation.rules import UNKNOWN_TOKEN, Rules
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import FAR, DecodingState, Limits, Member, Rows, Stream
from hf_drafthead.generation.step import now

FIRST_ROOM = 32  # new positions for which memory is taken at first
MOST_ENDS = 8  # end-of-sequence tokens: E is a multiple, so that most calls have equally many


@dataclass
class Asked:
    """What a call asks for beside the arguments of the base's `generate`.

    plan, choose: how it drafts, or what chooses that by its number of rows.

    Of one that is going to join a batch: joins: that one's reader; begun: caches that hold the beginning of this
    prompt, and a drafter's state behind it, which are taken over; piece: how many tokens are read at once; between:
    what is called in between.
    """

    plan: DraftPlan | None
    choose: Callable[[BaseReader, int], DraftPlan] | None = None
    streamer: BaseStreamer | None = None
    random: RandomNumbers = NOTHING_DRAWN
    timed: bool = False
    joins: BaseReader | None = None
    begun: DecodingState | None = None
    piece: int | None = None
    between: Callable[[], None] | None = None


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
    """Let the base prepare a call and read its prompt (B, P), or None: what `then` makes of it. Unsupported where it
    cannot draft, or join others: nothing of the user's was given a token."""
    check_call(model.base, config, assistant_model, synced_gpus)
    reader = model._base_reader()
    arguments |= {"generation_config": config, "synced_gpus": synced_gpus, "stopping_criteria": stopping_criteria}
    if config.stop_strings is not None and arguments.get("tokenizer") is not None:
        arguments |= _stop_strings_as_criterion(config, arguments)
    # with no names of ours, which a call could set
    loop = lambda *args, **call: then(_prefilled(model, reader, asked, *args, **call))  # noqa: E731
    return model.base.generate(inputs, custom_generate=loop, **arguments)


def _prefilled(model: Any, reader: BaseReader, asked: Asked, base: Any, input_ids: torch.Tensor, **call: Any) -> Member:
    """Behind a look at what the base has prepared: the call with its rules, behind its prompt."""
    processors, criteria = call.pop("logits_processor"), call.pop("stopping_criteria")
    config, drafter, text_config = call.pop("generation_config"), model.drafter, base.config.get_text_config(True)
    inputs = with_cache(CACHE, {name: value for name, value in call.items() if value is not None})
    joins = asked.joins is not None
    if text_config is not base.config:
        _keep_text(inputs)
    if joins and asked.joins is not reader:
        raise Unsupported("the base has changed since the batch began")
    past = inputs.get(CACHE)
    given = getattr(past, "_is_user_defined", False)  # else the probe has looked at one as the base prepares it
    if past is None or given:
        _check_cache(past, reader, len(input_ids))
    plan = asked.plan or asked.choose(reader, len(input_ids))  # type: ignore[misc]
    typical = config.do_sample and plan.settings.acceptance == "typical"  # greedy decoding is exact with it
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
        samples=config.do_sample and not typical,
        streams=asked.streamer is not None and type(asked.streamer) not in STREAMERS,
        random=asked.random,
    )
    if typical and (joins or not rules.on_device):
        raise Unsupported("typical acceptance looks at the scores of one call alone, and this one asks for more")
    if reader.mixers and rules.overruns and (given or config.return_dict_in_generate):
        raise Unsupported("rows go on behind their ends without padding, and a state cannot go back", lasting=False)
    start = now(base.device) if asked.timed else 0.0
    member = prefill(reader, drafter, plan, input_ids, rules, inputs, asked)
    if asked.timed:
        member.prefilled_in = now(base.device) - start
    return member


def _check_cache(past: Any, reader: BaseReader, rows: int) -> None:
    """Refuse a cache of the user's own that cannot be taken over (Unsupported)."""
    if past is None or not can_load(past):
        raise Unsupported(f"a cache of type {type(past).__name__} cannot be compacted")
    if not all(number < len(past.layers) for number in reader.mixers):  # the base says what is wrong with it
        raise Unsupported("the cache has no layers for the base's states", lasting=False)
    if (held := rows_of(past)) not in (None, rows):
        raise Unsupported(f"the cache holds {held} row(s), and the call has {rows}", lasting=False)


def _keep_text(inputs: dict[str, Any]) -> None:
    """Drop from the model inputs of a call what tells a base for images and text that there are no images."""
    if inputs.get("mm_encoder_outputs") == {}:
        del inputs["mm_encoder_outputs"]
    for name in ("token_type_ids", "mm_token_type_ids"):
        if name in inputs and not bool(inputs[name].any()):
            del inputs[name]
    positions = inputs.get("position_ids")
    if positions is not None and positions.dim() == 3 and bool((positions == positions[:1]).all()):
        inputs["position_ids"] = positions[0]  # a position of the text is the same on every axis


def check_call(base, config: GenerationConfig, assistant_model, synced_gpus: bool | None) -> None:
    """Refuse, before anything runs, what the loop cannot do (Unsupported)."""
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


def _stop_strings_as_criterion(config: CallConfig, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments with which `stop_strings` work: with a custom loop transformers loses the tokenizer on the way."""
    criteria = StoppingCriteriaList(arguments["stopping_criteria"] or [])
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # else the caller's replaces it
        criteria.insert(0, StopStringCriteria(arguments["tokenizer"], config.stop_strings))
    return {"generation_config": config.without("stop_strings"), "stopping_criteria": criteria}


def prefill(
    reader: BaseReader,
    drafter: Any,
    plan: DraftPlan,
    input_ids: torch.Tensor,
    rules: Rules,
    inputs: dict[str, Any],
    asked: Asked,
) -> Member:
    """Run the base over the prompt (B, P), or `inputs_embeds`, let it choose the first root, and show the prompt to the
    drafter. Unsupported where no tree can be verified with these inputs, or where they cannot stand among others."""
    past, tree, joins, (batch, prompt_length) = inputs.pop(CACHE), plan.tree, asked.joins is not None, input_ids.shape
    stream = None if asked.streamer is None else Stream(asked.streamer, rules)
    own_cache = bool(getattr(past, "_is_user_defined", False))
    cached_length = past_length(past) if own_cache else 0
    embeddings = inputs.get("inputs_embeds")
    positions = cached_length + max(prompt_length, 0 if embeddings is None else embeddings.shape[1])
    # the first token comes even where a criterion fires on the prompt
    most = FIRST_ROOM if rules.max_length is None else max(rules.max_length - prompt_length, 1)
    room = min(most, FIRST_ROOM) + 2 * (tree.max_depth + 2)
    if reader.base.device.type == "cuda":
        room += -(positions + room) % BUCKET
    if asked.begun is None:
        cache, draft_state = reader.cache(batch, positions + room, tree.slots), drafter.start(batch, positions + most)
    else:
        cache, draft_state = asked.begun.rows.cache, asked.begun.rows.draft_state
        cache.placed = None  # what is read is appended
        cache.reserve(positions + room, tree.slots)
    if cached_length:
        cache.load(past)
    prompt, logits, features, steps = _read(reader, input_ids, rules.config, inputs, cache, asked)
    plain = steps is reader and prompt.visible is None and not own_cache and prompt_length == cache.extent
    if joins and not plain:
        raise Unsupported("the prompt has inputs of its own, padding, or a cache")
    shift, past_shift = prompt.position_shift, cache.extent - prompt_length
    limits = _limits(rules, reader, shift, past_shift, joins)
    sequences = torch.full((batch, prompt_length + room), rules.pad_token, dtype=torch.long, device=input_ids.device)
    sequences[:, :prompt_length] = input_ids
    if stream is not None:
        stream.show(input_ids)
    everyone, lengths = list(range(batch)), [prompt_length] * batch
    roots = rules.choose(everyone, logits[:, -1], sequences, lengths)
    sequences[:, prompt_length] = roots
    lengths = [prompt_length + 1] * batch
    fired = rules.stops(everyone, roots.tolist(), sequences, lengths)
    ends = [length if stop else None for length, stop in zip(lengths, fired)]
    if any(end is None and root >= logits.shape[-1] for root, end in zip(roots.tolist(), ends)):
        raise IndexError(UNKNOWN_TOKEN)
    if stream is not None:
        stream.show(roots)
    tokens = prompt.arguments.get("input_ids")
    if reader.keys:
        features, tokens = _with_known(reader, tokens, features, cache, cached_length)
    seen = prompt_for_drafter(drafter, roots[:, None].to(shift.device), features, tokens, inputs.get("attention_mask"))
    if not all(ends):
        draft_state = drafter.observe(draft_state, *seen)
    places, ended = (torch.tensor(values, device=shift.device) for values in (lengths, [end or 0 for end in ends]))
    rows = Rows(sequences.to(shift.device), places, ended, shift, prompt.visible, draft_state, cache)
    state = DecodingState(rows, limits, limits.last_position[:, 0].tolist(), past_shift, lengths, ends)
    return Member(rules, stream, state, range(batch), steps, (past, cached_length), plan)


def _read(
    reader: BaseReader,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    inputs: dict[str, Any],
    cache: SlotCache,
    asked: Asked,
) -> tuple[PromptInputs, torch.Tensor, torch.Tensor, BaseReader]:
    """Run the base over a prompt, whose beginning a cache may hold, in chunks where the call, or others that wait, ask
    for them: how it was prepared, logits at the last position, features (B, T, F*H), and how steps run the base."""
    arguments = prompt_inputs(reader.base, input_ids, config, inputs, cache)
    read = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    mask, position_ids = inputs.get("attention_mask"), arguments.get("position_ids")
    past = cache.extent + read.shape[1]
    if mask is not None and not bool((mask.bool() == mask).all()):
        raise Unsupported("the attention mask has other values than 0 and 1", lasting=False)
    if position_ids is None:
        next_position = torch.full((len(input_ids), 1), past, device=read.device)
    else:
        if position_ids.dim() > 2:  # (axes, B, T), of images; behind them a token of the text is on one place of all
            position_ids = position_ids[-1]
        next_position = position_ids[:, -1:].expand(len(input_ids), 1).to(read.device) + 1
    visible = None if mask is None or bool(mask.all()) else mask.bool().to(read.device)
    prompt = PromptInputs(input_ids, arguments, inputs, next_position - past, visible)
    piece = asked.piece or config.prefill_chunk_size
    if unusual := prompt.unusual:
        if config.prefill_chunk_size is not None:
            raise Unsupported(f"prefill_chunk_size cannot divide the model input {', '.join(unusual)}")
        return prompt, *read_and_try(reader, prompt, cache)
    if piece is not None and arguments.get("input_ids") is not None:
        return prompt, *_read_in_pieces(reader, prompt, cache, piece, asked.between), reader
    logits, features = reader(True, **arguments)
    cache.count(features.shape[1])
    return prompt, logits, features, reader


def _read_in_pieces(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache, piece: int, between: Callable[[], None] | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and features as of `_read`."""
    arguments, cached_length = prompt.arguments, cache.extent
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    parts: list[torch.Tensor] = []
    for part in arguments["input_ids"].split(piece, dim=1):
        if parts and between is not None:
            between()
        start = cache.extent - cached_length
        end = start + part.shape[1]
        of_part = {
            "input_ids": part,
            "attention_mask": None if mask is None else mask[:, : cached_length + end],
            "position_ids": None if positions is None else positions[:, start:end],
        }
        logits, features = reader(True, **{**arguments, **of_part})
        cache.count(features.shape[1])
        parts.append(features)
    return logits, torch.cat(parts, dim=1)


def _limits(rules: Rules, reader: BaseReader, shift: torch.Tensor, past_shift: int, joins: bool) -> Limits:
    """Where a call must stop, whose position ids are `shift` (B, 1) behind its past positions."""
    max_length = FAR if rules.max_length is None else rules.max_length
    table = position_table(reader.base.config.get_text_config(decoder=True)) or FAR
    ends = torch.tensor(rules.eos_tokens or [-1], device=shift.device)
    ends = F.pad(ends, (0, -len(ends) % MOST_ENDS), value=-1)
    return Limits(
        max_length=torch.full_like(shift[:, 0], max_length),
        eos=ends.repeat(len(shift), 1, 1),
        last_position=(table - 1 - shift).clamp(max=max_length - 2 + past_shift),
        padding=torch.full_like(shift, 0 if joins else rules.pad_token),  # 0: a token that every base embeds
        pads=torch.full_like(shift, joins or rules.pads, dtype=torch.bool),
    )


def _with_known(
    reader: BaseReader, tokens: torch.Tensor | None, features: torch.Tensor, cache: SlotCache, cached_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a prompt and its tokens (B, T), of an earlier call too, for a drafter that reads keys and looks at
    the last token alone: the others may be any.
    """
    features = reader.known(features, cache, cached_length) if cached_length else features
    every = torch.zeros(features.shape[:2], dtype=torch.long, device=features.device)
    if tokens is not None:
        every[:, -tokens.shape[1] :] = tokens
    return features, every


def prompt_for_drafter(drafter, root, features, tokens, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the drafter may observe of the prompt: valid positions first, each with the token that follows it; the last
    alone without a memory, or of embeddings. One that reads nothing of the base observes every token."""
    rows, length = features.shape[:2]
    if not drafter.keeps_history or tokens is None:
        return features[:, -1:], root, torch.ones(rows, dtype=torch.long, device=features.device)
    follow = torch.cat([tokens[:, 1:] if drafter.reads else tokens, root], dim=1).to(features.device)  # (B, T)
    if not drafter.reads:
        features = features.new_zeros(*follow.shape, 0)
    valid = torch.ones_like(follow)
    if mask is not None:
        valid[:, :length] = mask[:, -length:].to(valid)
        order = valid.argsort(dim=1, descending=True, stable=True)
        features, follow = features.take_along_dim(order[..., None], dim=1), follow.gather(1, order)
    return features, follow, valid.sum(1)
