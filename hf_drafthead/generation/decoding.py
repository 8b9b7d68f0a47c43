"""The decoding loop: prefill once, then step after step until every row has ended (`step` says what a step is).

One step costs one forward of the base over N nodes and emits between 1 and D tokens per row.

Shapes: B rows, P prompt tokens, T prompt positions that are new to the cache, N nodes, D nodes on the longest path,
F*H features, V vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    TextIteratorStreamer,
    TextStreamer,
)

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.limits import position_table
from hf_drafthead.bases.ordinary_caches import past_length
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, prompt_inputs
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.bases.unusual_inputs import PromptInputs, read_and_try
from hf_drafthead.generation.lookup import accepted_copies, matches
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.runner import Execution, Runner
from hf_drafthead.generation.settings import DraftPlan
from hf_drafthead.generation.state import (
    DecodingState,
    DraftHeadGenerateOutput,
    Limits,
    Outcome,
    Rows,
    StepRecord,
    running,
)
from hf_drafthead.generation.step import Step, now
from hf_drafthead.generation.tree import DraftTree, LookupTree, Tree, copies_alone

FIRST_ROOM = 512  # new positions for which memory is taken at first
STREAMERS = (TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer)
FAR = 1 << 40  # where nothing limits a length


@torch.no_grad()
def decode(
    model,
    input_ids: torch.Tensor,
    rules: Rules,
    reader: BaseReader,
    settings: DraftPlan,
    execution: Execution,
    *,
    streamer: BaseStreamer | None = None,
    on_step: Callable[[StepRecord], None] | None = None,
    **inputs,
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate with draft heads, as `custom_generate` of the base's own `generate`, which has prepared every argument.

    Args:
        model: with `base` and `drafter`; programs are kept with it.
        input_ids: (B, P); (B, 0) where the prompt is `inputs_embeds`.
        rules, settings, execution: of the call.
        reader: how to run the base.
        streamer: is given the prompt and every committed token.
        on_step: is given a record of the prefill and of every step.
        inputs: the base's model inputs: attention_mask, position_ids, the cache, inputs_embeds.

    Returns:
        (B, length) token ids, or the output class where `return_dict_in_generate` asks for it.
    """
    stream, drafter = Stream(streamer, rules), model.drafter
    ordinary_cache = inputs.pop(CACHE)
    cached_length = past_length(ordinary_cache)
    device = reader.base.device
    last = now(device) if on_step is not None else 0.0
    state, reader = prefill(reader, drafter, settings.tree, input_ids, rules, inputs, ordinary_cache, stream)
    if on_step is not None:
        last, start = now(device), last
        roots = state.rows.sequences[:, state.prompt_length, None].tolist()
        on_step(StepRecord(0, roots, [], [1] * rules.batch_size, 0, {"prefill": last - start}, plan=settings))
    make = functools.partial(
        Step,
        reader,
        drafter,
        device=state.rows.lengths.device,
        plan=settings,
        rules=rules,
        show=None if streamer is None else stream.show,
        timed=on_step is not None and execution.name == "eager",
    )
    if reader.more:  # of this call alone, and a program is for all
        execution = Execution("eager")
    choose = chooser(settings, state.rows.lengths.device.type == "cpu")
    tree = settings.tree
    texts = settings.texts_on(state.rows.lengths.device)
    launched: deque[Outcome] = deque()
    with contextlib.closing(Runner(model, reader, execution, make, tree, state, choose)) as runner:
        while running(state.lengths, state.ends, rules.pads):
            launched.append(runner.step(state))
            while len(launched) > runner.ahead:
                record = state.note(launched.popleft())
                if streamer is not None:
                    stream.committed(state, rules)
                if on_step is not None:
                    last, start = now(device), last
                    record.seconds["step"] = last - start
                    if isinstance(tree, LookupTree):
                        text = tree, texts, state.rows.sequences, [*state.lengths], record.tokens
                        record = replace(record, copied=functools.partial(accepted_copies, *text))
                    on_step(record)
        return finish(reader, state, rules, ordinary_cache, cached_length, stream)


def chooser(plan: DraftPlan, on_cpu: bool) -> Callable[[DecodingState], Tree] | None:
    """What says which tree the next step takes, the call's or the root alone; None where that is always the call's.

    The root alone is taken while a switch pauses, and on a CPU, where each node costs, where copies from the text are
    all that is guessed and no row has a match. Only tokens decide.
    """
    tree, alone, drafts = plan.tree, DraftTree.root_alone(), False
    switch = None if plan.switch is None else plan.switch.begin()
    lookup = tree if isinstance(tree, LookupTree) and copies_alone(tree) and on_cpu else None
    if switch is None and lookup is None:
        return None
    texts = None if lookup is None else plan.texts_on(torch.device("cpu"))

    def choose(state: DecodingState) -> Tree:
        nonlocal drafts
        counts = state.counted[-1] if drafts and state.counted else []
        moved = [row for row, count in enumerate(counts) if count]  # 0 in those that had ended
        if moved and switch is not None:  # the call ends with the row that is the furthest behind
            switch.note(counts[min(moved, key=lambda row: state.lengths[row] - counts[row])])
        drafts = lookup is None or matches(lookup, state.rows.sequences, state.rows.lengths, texts)
        if switch is not None:
            drafts = switch.drafts() and drafts
        return tree if drafts else alone

    return choose


def prefill(
    reader: BaseReader,
    drafter,
    tree: Tree,
    input_ids: torch.Tensor,
    rules: Rules,
    inputs: dict,
    past,
    stream: Stream,
    begun: DecodingState | None = None,
    pieces: tuple[int, Callable[[], None]] | None = None,
) -> tuple[DecodingState, BaseReader]:
    """Run the base over the prompt, let it choose the first root, and show the prompt to the drafter.

    Args:
        begun: caches that hold the beginning of this prompt, and a drafter's state behind it; they are taken over.
        pieces: how many tokens are read at once, and what is called between two pieces.

    Returns:
        the state, and how the steps run the base.

    Raises:
        Unsupported: the prompt has inputs with which the base cannot verify a tree; nothing was shown or chosen yet.
    """
    batch, prompt_length = input_ids.shape
    longest = rules.max_length if rules.max_length is not None else prompt_length + FIRST_ROOM
    embeddings = inputs.get("inputs_embeds")
    cached_length = past_length(past)
    positions = cached_length + max(prompt_length, 0 if embeddings is None else embeddings.shape[1])
    most = max(longest - prompt_length, 1)  # the first token comes even where a criterion fires on the prompt
    room = min(most, FIRST_ROOM) + 2 * (tree.max_depth + 2)  # as much as `Step` asks for ahead
    config = reader.base.config.get_text_config(decoder=True)
    if begun is None:
        cache = reader.cache(batch, positions + room, tree.num_nodes)
    else:
        cache = begun.rows.cache
        cache.append()
        cache.reserve(positions + room, tree.num_nodes)
    if cached_length:
        cache.load(past)
    prompt, chunk = _prepared(reader.base, input_ids, rules.config, inputs, cache), rules.config.prefill_chunk_size
    arguments, position_shift = prompt.arguments, prompt.position_shift
    device = position_shift.device
    if not prompt.unusual:
        logits, features = _run_prompt(reader, arguments, *(pieces or (chunk, None)))
    elif chunk is not None:
        raise Unsupported(f"prefill_chunk_size cannot divide the model input {', '.join(prompt.unusual)}")
    else:
        logits, features, reader = read_and_try(reader, prompt, cache)
    past_shift = cache.extent - prompt_length
    limits = _limits(rules, (position_table(config) or FAR) - 1 - position_shift, past_shift)
    sequences = torch.full((batch, prompt_length + room), rules.pad_token, dtype=torch.long, device=input_ids.device)
    sequences[:, :prompt_length] = input_ids
    stream.begin(input_ids)
    everyone, lengths = list(range(batch)), [prompt_length] * batch
    roots = rules.choose(everyone, logits[:, -1], sequences, lengths)
    sequences[:, prompt_length] = roots
    lengths = [length + 1 for length in lengths]
    fired = rules.stops(everyone, roots.tolist(), sequences, lengths)
    stream.show(roots)
    root = roots[:, None].to(device)
    features, tokens = _with_known(reader, arguments.get("input_ids"), features, cache, cached_length)
    seen = _prompt_for_drafter(drafter, root, features, tokens, inputs.get("attention_mask"))
    draft_state = drafter.start(batch, positions + most) if begun is None else begun.rows.draft_state
    if not all(fired):
        draft_state = drafter.observe(draft_state, *seen)
    state = DecodingState(
        rows=Rows(
            sequences=sequences.to(device),
            lengths=torch.tensor(lengths, device=device),
            ends=torch.tensor([length if stop else 0 for length, stop in zip(lengths, fired)], device=device),
            position_shift=position_shift,
            visible=prompt.visible,
            draft_state=draft_state,
            cache=cache,
        ),
        limits=limits,
        last_position=limits.last_position[:, 0].tolist(),
        prompt_length=prompt_length,
        past_shift=past_shift,
        lengths=lengths,
        ends=[length if stop else None for length, stop in zip(lengths, fired)],
    )
    return state, reader


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


def may_draw(streamer: BaseStreamer | None) -> bool:
    """Whether a streamer may draw random numbers: none of transformers' own does."""
    return streamer is not None and type(streamer) not in STREAMERS


class Stream:
    """Gives a streamer the prompt and every committed token, one put per position as in transformers."""

    def __init__(self, streamer: BaseStreamer | None, rules: Rules):
        self.streamer, self.position, self.rules = streamer, 0, rules
        self.random = rules.random if may_draw(streamer) else RandomNumbers()

    def begin(self, input_ids: torch.Tensor) -> None:
        """Put the prompt (B, P)."""
        self.position = input_ids.shape[1]
        if self.streamer is not None:
            with self.random.lent():
                self.streamer.put(input_ids.cpu())

    def show(self, tokens: torch.Tensor) -> None:
        """Put the next position (B,)."""
        if self.streamer is not None:
            with self.random.lent():
                self.streamer.put(tokens.cpu())
            self.position += 1

    def end(self) -> None:
        """Say that there is no more."""
        if self.streamer is not None:
            with self.random.lent():
                self.streamer.end()

    def committed(self, state: DecodingState, rules: Rules) -> None:
        """Put every position that all rows have reached and that was not shown yet."""
        still = [length for length, end in zip(state.lengths, state.ends) if end is None or not rules.pads]
        ready = min(still) if still else max(state.lengths)
        if all(end is not None for end in state.ends):
            ready = min(ready, max(end for end in state.ends if end is not None))
        while self.position < ready:
            self.show(state.rows.sequences[:, self.position])


def finish(
    reader: BaseReader, state: DecodingState, rules: Rules, ordinary_cache, cached_length: int, stream: Stream
) -> DraftHeadGenerateOutput | torch.Tensor:
    """What the base's generate would return, in its form."""
    length = max(end for end in state.ends if end is not None)
    rules.random.chosen(length - state.prompt_length)
    stream.end()
    sequences = state.rows.sequences[:, :length].to(rules.device, copy=True)
    in_dict = rules.config.return_dict_in_generate
    if in_dict or getattr(ordinary_cache, "_is_user_defined", False):
        cache = state.rows.cache
        if (first := min(state.lengths) - 1) < length - 1:  # the base has read the padding behind a row's end, too
            if cache.recurrent:  # what grows must not be a program's
                cache = cache.twin()
                cache.fixed, cache.extent = False, int(cache.lengths.max())
            rows, start = state.rows, first + state.past_shift
            reader.rewrite(rows.sequences[:, first : length - 1], cache, start, rows.position_shift, rows.visible)
        cache.unload(ordinary_cache, cached_length, length - 1 + state.past_shift)
    if not in_dict:
        return sequences
    steps = torch.tensor(state.counted, dtype=torch.long, device=sequences.device)
    new = length - state.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        accepted_lengths=steps.reshape(-1, len(state.lengths)).T,
        **{CACHE: ordinary_cache},
    )


def _limits(rules: Rules, last_position: torch.Tensor, past_shift: int) -> Limits:
    """Where a call must stop, on the device of `last_position` (B, 1), the last that the base can embed."""
    device, max_length = last_position.device, FAR if rules.max_length is None else rules.max_length
    return Limits(
        max_length=torch.tensor(max_length, device=device),
        eos=torch.tensor(rules.eos_tokens or [-1], device=device),
        last_position=last_position.clamp(max=max_length - 2 + past_shift),
        padding=torch.tensor(rules.pad_token, device=device),
        pads=torch.tensor(rules.pads, device=device),
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


def _prompt_for_drafter(drafter, root, features, tokens, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
