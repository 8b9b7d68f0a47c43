"""The way in: the base reads the prompt of a call, and chooses the first root; the drafter is shown the prompt.

Shapes: B rows, P prompt tokens, T prompt positions that are new to the cache, E end-of-sequence tokens, F*H features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from transformers import GenerationConfig

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, PromptInputs, past_length, position_table, prompt_inputs
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.unusual_inputs import read_and_try
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import DecodingState, Limits, Member, Rows, Stream

FIRST_ROOM = 512  # new positions for which memory is taken at first
FAR = 1 << 40  # where nothing limits a length
MOST_ENDS = 8  # end-of-sequence tokens: E is a multiple, so that most calls have equally many


class BesideOthers(NamedTuple):
    """Of a call that is going to join a batch.

    reader: of the batch; begun: caches that hold the beginning of this prompt, and a drafter's state behind it, which
    are taken over; piece: how many tokens are read at once; between: what is called between two pieces.
    """

    reader: BaseReader
    begun: DecodingState | None = None
    piece: int | None = None
    between: Callable[[], None] | None = None


def prefill(
    reader: BaseReader,
    drafter: Any,
    plan: DraftPlan,
    input_ids: torch.Tensor,
    rules: Rules,
    inputs: dict[str, Any],
    stream: Stream | None,
    others: BesideOthers | None = None,
) -> Member:
    """Run the base over the prompt, let it choose the first root, and show the prompt to the drafter.

    Args:
        reader: how to run the base.
        drafter, plan: what guesses in the steps that follow, and how.
        input_ids: (B, P); (B, 0) where the prompt is `inputs_embeds`.
        rules, stream: of the call.
        inputs: the base's model inputs: attention_mask, position_ids, the cache, inputs_embeds.
        others: of a call that is going to join them.

    Returns:
        the call, with its state behind the prompt.

    Raises:
        Unsupported: the prompt has inputs with which the base cannot verify a tree, or that cannot stand in a batch of
            others; nothing was shown or chosen yet.
    """
    (batch, prompt_length), tree = input_ids.shape, plan.tree
    if others is not None and others.reader is not reader:
        raise Unsupported("the base has changed since the batch began")
    past = inputs.pop(CACHE)
    cached_length = past_length(past)
    embeddings = inputs.get("inputs_embeds")
    positions = cached_length + max(prompt_length, 0 if embeddings is None else embeddings.shape[1])
    longest = rules.max_length if rules.max_length is not None else prompt_length + FIRST_ROOM
    most = max(longest - prompt_length, 1)  # the first token comes even where a criterion fires on the prompt
    room = min(most, FIRST_ROOM) + 2 * (tree.max_depth + 2)  # as much as a step asks for ahead
    begun = None if others is None else others.begun
    if begun is None:
        cache, draft_state = reader.cache(batch, positions + room, tree.num_nodes), None
    else:
        cache, draft_state = begun.rows.cache, begun.rows.draft_state
        cache.append()
        cache.reserve(positions + room, tree.num_nodes)
    if cached_length:
        cache.load(past)
    prompt = _prepared(reader.base, input_ids, rules.config, inputs, cache)
    logits, features, steps = _read(reader, prompt, cache, rules.config.prefill_chunk_size, others)
    if others is not None:
        _check_joins(prompt, past, steps, others)
    shift, past_shift = prompt.position_shift, cache.extent - prompt_length
    table = position_table(reader.base.config.get_text_config(decoder=True)) or FAR
    limits = _limits(rules, table - 1 - shift, past_shift, others is not None)
    sequences = torch.full((batch, prompt_length + room), rules.pad_token, dtype=torch.long, device=input_ids.device)
    sequences[:, :prompt_length] = input_ids
    if stream is not None:
        stream.begin(input_ids)
    roots, lengths, ends = _first_roots(rules, logits[:, -1], sequences, prompt_length)
    if stream is not None:
        stream.show(roots)
    root = roots[:, None].to(shift.device)
    features, tokens = _with_known(reader, prompt.arguments.get("input_ids"), features, cache, cached_length)
    seen = prompt_for_drafter(drafter, root, features, tokens, inputs.get("attention_mask"))
    draft_state = drafter.start(batch, positions + most) if begun is None else draft_state
    if not all(ends):
        draft_state = drafter.observe(draft_state, *seen)
    places, ended = (torch.tensor(values, device=shift.device) for values in (lengths, [end or 0 for end in ends]))
    rows = Rows(sequences.to(shift.device), places, ended, shift, prompt.visible, draft_state, cache)
    last = limits.last_position[:, 0].tolist()
    state = DecodingState(rows, limits, last, past_shift, lengths, ends)
    return Member(rules, stream, state, range(batch), steps, (past, cached_length), plan)


def _first_roots(
    rules: Rules, logits: torch.Tensor, sequences: torch.Tensor, prompt_length: int
) -> tuple[torch.Tensor, list[int], list[int | None]]:
    """What the base chooses behind the prompt (B,), which is written behind it; lengths and ends of the rows then."""
    batch = len(logits)
    everyone, lengths = list(range(batch)), [prompt_length] * batch
    roots = rules.choose(everyone, logits, sequences, lengths)
    sequences[:, prompt_length] = roots
    lengths = [length + 1 for length in lengths]
    fired = rules.stops(everyone, roots.tolist(), sequences, lengths)
    return roots, lengths, [length if stop else None for length, stop in zip(lengths, fired)]


def _read(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache, chunk: int | None, others: BesideOthers | None
) -> tuple[torch.Tensor, torch.Tensor, BaseReader]:
    """Logits at the last position of a prompt, features (B, T, F*H), and how the steps behind it run the base."""
    if not prompt.unusual:
        piece, between = (chunk, None) if others is None else (others.piece or chunk, others.between)
        return *_run_prompt(reader, prompt.arguments, piece, between), reader
    if chunk is not None:
        raise Unsupported(f"prefill_chunk_size cannot divide the model input {', '.join(prompt.unusual)}")
    return read_and_try(reader, prompt, cache)


def _check_joins(prompt: PromptInputs, past: Any, steps: BaseReader, others: BesideOthers) -> None:
    """Refuse what cannot stand in a batch of others."""
    if steps is not others.reader:
        raise Unsupported("the base wants inputs of one prompt alone")
    if prompt.visible is not None:
        raise Unsupported("the prompt holds padding")
    if getattr(past, "_is_user_defined", False):
        raise Unsupported("a cache of the user's own is given")
    if prompt.input_ids.shape[1] != prompt.arguments[CACHE].extent:
        raise Unsupported("the prompt is given as embeddings")


def _prepared(
    base: Any, input_ids: torch.Tensor, config: GenerationConfig, inputs: dict, cache: SlotCache
) -> PromptInputs:
    """What the base prepares for a prompt, whose beginning a cache may hold, and how its rows lie there."""
    arguments = prompt_inputs(base, input_ids, config, inputs, cache)
    read = next(arguments[name] for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    mask, position_ids = inputs.get("attention_mask"), arguments.get("position_ids")
    past = cache.extent + read.shape[1]
    if position_ids is None:
        next_position = torch.full((len(input_ids), 1), past, device=read.device)
    else:
        if position_ids.dim() > 2:  # (axes, B, T), of images; behind them a token of the text is on one place of all
            position_ids = position_ids[-1]
        next_position = position_ids[:, -1:].expand(len(input_ids), 1).to(read.device) + 1
    visible = None if mask is None or bool(mask.all()) else mask.bool().to(read.device)
    return PromptInputs(input_ids, arguments, inputs, next_position - past, visible)


def _limits(rules: Rules, last_position: torch.Tensor, past_shift: int, joins: bool) -> Limits:
    """Where a call must stop, on the device of `last_position` (B, 1), the last that the base can embed.

    Behind the end of a row of a batch that others join there is a token that every base embeds.
    """
    device, max_length = last_position.device, FAR if rules.max_length is None else rules.max_length
    ends = torch.tensor(rules.eos_tokens or [-1], device=device)
    ends = F.pad(ends, (0, -len(ends) % MOST_ENDS), value=-1)
    return Limits(
        max_length=torch.full((len(last_position),), max_length, device=device),
        eos=ends.expand(len(last_position), 1, -1).contiguous(),
        last_position=last_position.clamp(max=max_length - 2 + past_shift),
        padding=torch.tensor(0 if joins else rules.pad_token, device=device),
        pads=torch.tensor(joins or rules.pads, device=device),
    )


def _run_prompt(
    reader: BaseReader, arguments: dict, chunk: int | None, between: Callable[[], None] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the base over the prompt, which becomes past, in chunks where the call asks for them; `between` two of these
    something else may be run.

    Returns:
        logits at the last position, and features at all of them (B, T, F*H).
    """
    tokens, cache = arguments.get("input_ids"), arguments[CACHE]
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    chunks = [tokens] if chunk is None or tokens is None else tokens.split(chunk, dim=1)
    parts: list[torch.Tensor] = []
    cached_length = cache.extent
    for part in chunks:
        if between is not None and parts:
            between()
        now, start = dict(arguments), cache.extent - cached_length
        if part is not tokens and part is not None:
            end = start + part.shape[1]
            now["input_ids"] = part
            now["attention_mask"] = None if mask is None else mask[:, : cached_length + end]
            now["position_ids"] = None if positions is None else positions[:, start:end]
        logits, features = reader(True, **now)
        cache.count(features.shape[1])
        parts.append(features)
    return logits, torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _with_known(
    reader: BaseReader, tokens: torch.Tensor | None, features: torch.Tensor, cache: SlotCache, cached_length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Features of a prompt and its tokens (B, T); a drafter that reads keys needs every one, of an earlier call too.

    Where a token is not known, another one stands: such a drafter looks at the last alone.
    """
    if not reader.keys:
        return features, tokens
    features = reader.known(features, cache, cached_length) if cached_length else features
    every = torch.zeros(features.shape[:2], dtype=torch.long, device=features.device)
    if tokens is not None:
        every[:, -tokens.shape[1] :] = tokens
    return features, every


def prompt_for_drafter(drafter, root, features, tokens, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the drafter may observe of the prompt: valid positions first, each with the token that follows it.

    A drafter without a memory needs the last position only; so does one whose prompt came as embeddings, since the
    tokens are not known. One that reads nothing of the base observes every token, the first one too.
    """
    rows, length = features.shape[:2]
    if not drafter.keeps_history or tokens is None:
        return features[:, -1:], root, torch.ones(rows, dtype=torch.long, device=features.device)
    follow = torch.cat([tokens[:, 1:] if drafter.reads else tokens, root], dim=1).to(features.device)  # (B, T)
    valid = torch.ones_like(follow)
    if mask is not None:
        valid[:, :length] = mask[:, -length:].to(valid)
    if not drafter.reads:
        features = features.new_zeros(*follow.shape, 0)
    if mask is not None:
        order = valid.argsort(dim=1, descending=True, stable=True)
        features, follow = features.take_along_dim(order[..., None], dim=1), follow.gather(1, order)
    return features, follow, valid.sum(1)
