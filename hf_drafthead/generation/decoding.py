"""The decoding loop: prefill once, then draft, verify, accept and commit until every row has ended.

One step costs one forward of the base over N nodes and emits between 1 and D tokens per row:

    draft    the drafter guesses the tokens of a tree below the root, the token the base chose last
    verify   the base runs once over all nodes; each sees its row's past and its ancestors
    accept   walk down from the root as long as a child carries what the base chooses
    commit   keep keys, values and hidden states of the nodes walked; the last choice is the next root

Shapes: B rows, P prompt tokens, T prompt positions that are new to the cache, N nodes, D nodes on the longest path,
F*H features, V vocabulary, m tokens that the longest row keeps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.generation.acceptance import Accepted, greedy_walk, typical_choices, walk
from hf_drafthead.generation.cache import TreeCache
from hf_drafthead.generation.forward import BaseReader, prefill_inputs
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import DraftTree, Topology

FIRST_ROOM = 512  # new positions for which memory is taken at first; it doubles when they are used up


@dataclass
class DraftHeadGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate(return_dict_in_generate=True)` returns: the base's own fields and one more.

    accepted_lengths: (B, steps) tokens emitted in each step, 0 after a row's own end; a row's sum + 1 is the number of
    its new tokens up to its own end. None where the base decoded by itself.
    """

    accepted_lengths: torch.Tensor | None = None


@dataclass
class Candidates:
    """The nodes of a step: tokens (B, N), node 0 the root, and how they hang together."""

    tokens: torch.Tensor
    topology: Topology


@dataclass
class Verified:
    """The base's answer at every node: logits (B, N, V) and features (B, N, F*H)."""

    logits: torch.Tensor
    features: torch.Tensor


@dataclass
class DecodingState:
    """All that one call knows. It belongs to the call: nothing of it lives on a module.

    sequences: (B, width) token ids where the caller's are, with padding behind each row's length; lengths: tokens of
    each row so far; ends: length at which a criterion fired, or None; cache: keys and values of all tokens but each
    row's last; past_shift: past positions minus tokens (not 0 where the call began with a cache or embeddings);
    position_shift: (B, 1) position id minus past position, where the base computes; visible: (B, prompt positions)
    where padding is hidden, or None; draft_state: the drafter's own; unseen: features (B, A, F*H), tokens (B, A) and
    counts (B,) that the drafter has yet to observe.
    """

    sequences: torch.Tensor
    padding: int
    prompt_length: int
    lengths: list[int]
    ends: list[int | None]
    cache: TreeCache
    past_shift: int
    position_shift: torch.Tensor
    visible: torch.Tensor | None
    draft_state: Any
    unseen: tuple[torch.Tensor, ...] = ()
    accepted_lengths: list[list[int]] = field(default_factory=list)
    streamed: int = 0

    def __post_init__(self):
        self.device = self.position_shift.device

    @property
    def past(self) -> list[int]:
        """Past positions in the cache, per row."""
        return [length - 1 + self.past_shift for length in self.lengths]

    @property
    def root(self) -> torch.Tensor:
        """(B, 1) each row's newest token, where the base computes."""
        if len(self.lengths) == 1:
            return self.sequences[:, self.lengths[0] - 1 : self.lengths[0]].to(self.device)
        newest = torch.tensor(self.lengths, device=self.sequences.device)[:, None] - 1
        return self.sequences.gather(1, newest).to(self.device)

    def running(self, pads: bool) -> list[int]:
        """Rows that still emit. Without padding a row that has ended goes on until the last one ends."""
        if pads:
            return [row for row, end in enumerate(self.ends) if end is None]
        horizon = max(length + 1 if end is None else end for length, end in zip(self.lengths, self.ends))
        return [row for row, end in enumerate(self.ends) if end is None or self.lengths[row] < horizon]

    def emit(self, tokens: list[list[int]]) -> None:
        """Append each row's new tokens."""
        for row, new in enumerate(tokens):
            if new:
                length = self.lengths[row]
                self.sequences[row, length : length + len(new)] = torch.tensor(new)
                self.lengths[row] = length + len(new)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more per row."""
        width = max(self.lengths) + tokens
        if width > self.sequences.shape[1]:
            more = self.sequences.new_full((len(self.lengths), max(width, self.sequences.shape[1])), self.padding)
            self.sequences = torch.cat([self.sequences, more], dim=1)
        self.cache.reserve(width + self.past_shift)


@torch.no_grad()
def decode(
    base,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    reader: BaseReader,
    drafter,
    settings: DraftSettings,
    streamer: BaseStreamer | None = None,
    **inputs,
) -> DraftHeadGenerateOutput | torch.Tensor:
    """Generate with draft heads, as `custom_generate` of the base's own `generate`, which has prepared every argument.

    Args:
        base: the causal LM.
        input_ids: (B, P); (B, 0) where the prompt is `inputs_embeds`.
        logits_processor, stopping_criteria, generation_config: prepared by the base.
        reader: how to run the base.
        drafter: the heads, see `modeling.base.Drafter`.
        settings: tree and acceptance.
        streamer: is given the prompt and every token once it is sure.
        inputs: the base's model inputs: attention_mask, position_ids, past_key_values, inputs_embeds.

    Returns:
        (B, length) token ids, or the output class where `return_dict_in_generate` asks for it.
    """
    rules = Rules(
        logits_processor,
        stopping_criteria,
        generation_config,
        batch_size=input_ids.shape[0],
        prompt_length=input_ids.shape[1],
        samples=generation_config.do_sample and settings.acceptance == "exact",
    )
    if streamer is not None:
        streamer.put(input_ids.cpu())
    ordinary_cache = inputs.pop("past_key_values")
    known = ordinary_cache.get_seq_length()
    state = prefill(reader, drafter, settings.tree, input_ids, rules, inputs, ordinary_cache)
    stream(state, streamer, rules)
    while state.running(rules.pads):
        candidates = draft(drafter, state, settings.tree)
        verified = verify(reader, state, candidates, rules)
        accepted = accept(verified, candidates, state, rules, settings)
        commit(drafter, state, verified, accepted)
        stream(state, streamer, rules)
    return finish(state, rules, ordinary_cache, known, streamer)


def prefill(
    reader: BaseReader, drafter, tree: DraftTree, input_ids: torch.Tensor, rules: Rules, inputs: dict, past
) -> DecodingState:
    """Run the base over the prompt and let it choose the first root."""
    rows, prompt_length = input_ids.shape
    longest = rules.max_length if rules.max_length is not None else prompt_length + FIRST_ROOM
    embeddings = inputs.get("inputs_embeds")
    known = past.get_seq_length()
    positions = known + max(prompt_length, 0 if embeddings is None else embeddings.shape[1])
    most = max(longest - prompt_length, 1)  # the first token comes even where a criterion fires on the prompt
    room = min(most, FIRST_ROOM) + tree.max_depth + 1
    config = reader.base.config.get_text_config(decoder=True)
    cache = TreeCache(config.num_hidden_layers, tree.num_nodes, positions + room)
    if known:
        cache.load(past)
    arguments = prefill_inputs(reader.base, input_ids, rules.config, inputs, cache)
    logits, features = _run_prompt(reader, arguments, rules.config.prefill_chunk_size)
    cache.append(features.shape[1])

    device = next(arguments[name].device for name in ("input_ids", "inputs_embeds") if arguments.get(name) is not None)
    mask = inputs.get("attention_mask")
    visible = None if mask is None or bool(mask.all()) else mask.bool().to(device)
    position_ids = arguments.get("position_ids")
    if position_ids is None:
        next_position = torch.full((rows, 1), cache.extent, device=device)
    else:
        next_position = position_ids[:, -1:].expand(rows, 1).to(device) + 1
    padding = torch.full((rows, room), rules.pad_token, dtype=torch.long, device=input_ids.device)
    state = DecodingState(
        sequences=torch.cat([input_ids, padding], dim=1),
        padding=rules.pad_token,
        prompt_length=prompt_length,
        lengths=[prompt_length] * rows,
        ends=[None] * rows,
        cache=cache,
        past_shift=cache.extent - prompt_length,
        position_shift=next_position - cache.extent,
        visible=visible,
        draft_state=drafter.start(rows, positions + most),
        streamed=prompt_length,
    )
    everyone = list(range(rows))
    roots = rules.choose(everyone, logits[:, -1], state.sequences, state.lengths)
    state.emit([[token] for token in roots.tolist()])
    for row, fired in zip(everyone, rules.stops(everyone, state.sequences, state.lengths)):
        state.ends[row] = state.lengths[row] if fired else None
    state.unseen = _prompt_for_drafter(drafter, state.root, features, arguments, mask)
    return state


def draft(drafter, state: DecodingState, tree: DraftTree) -> Candidates:
    """Let the drafter observe what is new, then fill the tree below the root level by level."""
    state.draft_state = drafter.observe(state.draft_state, *state.unseen)
    tokens = state.root  # (B, 1)
    rows = tokens.shape[0]
    for level in tree.levels(tokens.device):
        expanded = tokens[:, level.expanded]  # (B, n)
        state.draft_state, logits = drafter.expand(state.draft_state, expanded, level.hang_on.expand(rows, -1))
        guesses = logits.topk(level.width).indices  # (B, n or 1, width)
        slots = level.slots if guesses.shape[1] > 1 else 0
        tokens = torch.cat([tokens, guesses[:, slots, level.ranks]], dim=1)
    return Candidates(tokens, tree.topology(tokens.device))


def verify(reader: BaseReader, state: DecodingState, candidates: Candidates, rules: Rules) -> Verified:
    """One forward of the base over all nodes."""
    depth = candidates.topology.paths.shape[-1]
    state.reserve(depth + 1)
    past = torch.tensor(state.past, device=candidates.tokens.device)
    reach = past[:, None] + candidates.topology.depths  # (B, N)
    if rules.max_length is not None and max(state.lengths) + depth > rules.max_length:
        # nodes past the last position that the base would run: their answer is never used, their position may not exist
        reach = reach.clamp_max(rules.max_length - 2 + state.past_shift)
    logits, features = reader.nodes(
        candidates.tokens, candidates.topology, state.cache, past, reach + state.position_shift, state.visible
    )
    return Verified(logits, features)


def accept(
    verified: Verified, candidates: Candidates, state: DecodingState, rules: Rules, settings: DraftSettings
) -> Accepted:
    """Walk down the tree and emit what the base chooses on the way."""
    before, had_ended = list(state.lengths), list(state.ends)
    tokens, topology = candidates.tokens, candidates.topology
    typical = settings.acceptance == "typical" and rules.config.do_sample
    if rules.vectorized and not typical:
        accepted = greedy_walk(verified.logits, tokens, topology, state, rules)
    else:
        preferred = None
        if typical:
            chances = rules.probabilities(verified.logits, tokens, topology, state.sequences, state.lengths)
            preferred = typical_choices(
                chances, tokens, topology, settings.posterior_threshold, settings.posterior_alpha
            )
        accepted = walk(verified.logits, tokens, topology, state, rules, preferred)
    counted = []
    for row, (then, now) in enumerate(zip(before, state.lengths)):
        end = state.ends[row]
        counted.append(0 if had_ended[row] is not None else (now if end is None else end) - then)
    state.accepted_lengths.append(counted)
    return accepted


def commit(drafter, state: DecodingState, verified: Verified, accepted: Accepted) -> None:
    """Keep the accepted nodes' keys and values, and their hidden states for the drafter; drop the rest."""
    starts = [past - len(kept) for past, kept in zip(state.past, accepted.nodes)]
    state.cache.commit(accepted.nodes, starts, verified.logits.shape[1])
    state.cache.extent = max(state.past)
    counts = [len(kept) for kept in accepted.nodes]
    if not drafter.keeps_history:
        # a wrong node here costs speed and never correctness: the tests look at it by itself
        kept = _picked(verified.features, [kept[-1:] or [0] for kept in accepted.nodes])  # (B, 1, F*H)
        state.unseen = (kept, state.root, torch.tensor([min(count, 1) for count in counts], device=kept.device))
        return
    kept = _picked(verified.features, _filled(accepted.nodes))  # (B, m, F*H)
    tokens = torch.tensor(_filled(accepted.tokens), device=kept.device)
    state.unseen = (kept, tokens, torch.tensor(counts, device=kept.device))


def stream(state: DecodingState, streamer: BaseStreamer | None, rules: Rules) -> None:
    """Give the streamer every position that all rows have reached, one put per position as in transformers."""
    if streamer is None:
        return
    still = [length for length, end in zip(state.lengths, state.ends) if end is None or not rules.pads]
    ready = min(still) if still else max(state.lengths)
    if all(end is not None for end in state.ends):
        ready = min(ready, max(end for end in state.ends if end is not None))
    for position in range(state.streamed, ready):
        streamer.put(state.sequences[:, position].cpu())
    state.streamed = max(state.streamed, ready)


def finish(
    state: DecodingState, rules: Rules, ordinary_cache, known: int, streamer: BaseStreamer | None
) -> DraftHeadGenerateOutput | torch.Tensor:
    """What the base's generate would return, in its form."""
    length = max(end for end in state.ends if end is not None)
    if rules.tape is not None:
        rules.tape.rewind(length - state.prompt_length)
    if streamer is not None:
        streamer.end()
    sequences = state.sequences[:, :length].clone()
    in_dict = rules.config.return_dict_in_generate
    if in_dict or getattr(ordinary_cache, "_is_user_defined", False):
        state.cache.unload(ordinary_cache, known, length - 1 + state.past_shift)
    if not in_dict:
        return sequences
    steps = torch.tensor(state.accepted_lengths, dtype=torch.long, device=sequences.device)
    new = length - state.prompt_length
    return DraftHeadGenerateOutput(
        sequences=sequences,
        scores=tuple(rules.scores[:new]) if rules.keeps_scores else None,
        logits=tuple(rules.logits[:new]) if rules.keeps_logits else None,
        past_key_values=ordinary_cache,
        accepted_lengths=steps.reshape(-1, len(state.lengths)).T,
    )


def _filled(rows: list[list[int]]) -> list[list[int]]:
    """Rows of one length, filled up with 0."""
    width = max(len(row) for row in rows)
    return [row + [0] * (width - len(row)) for row in rows]


def _picked(features: torch.Tensor, nodes: list[list[int]]) -> torch.Tensor:
    """Features (B, m, F*H) of m nodes per row, of all nodes' (B, N, F*H)."""
    if len(nodes) == 1:  # fewer operations: a few percent of a small model's step
        return features.index_select(1, torch.tensor(nodes[0], device=features.device))
    step_nodes = features.shape[1]
    places = [row * step_nodes + node for row, kept in enumerate(nodes) for node in kept]
    flat = features.flatten(0, 1).index_select(0, torch.tensor(places, device=features.device))
    return flat.unflatten(0, (len(nodes), -1))


def _run_prompt(reader: BaseReader, arguments: dict, chunk: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits at the prompt's last position and features at all (B, T, F*H), in chunks where the call asks for them."""
    tokens = arguments.get("input_ids")
    if chunk is None or tokens is None:
        return reader(True, **arguments)
    features, done, cache = [], 0, arguments["past_key_values"]
    mask, length = arguments.get("attention_mask"), tokens.shape[1]
    known = cache.extent
    for part in tokens.split(chunk, dim=1):
        end = done + part.shape[1]
        now = {**arguments, "input_ids": part}
        if mask is not None:
            now["attention_mask"] = mask[:, : known + end]
        if arguments.get("position_ids") is not None:
            now["position_ids"] = arguments["position_ids"][:, done:end]
        logits, some = reader(True, **now)
        features.append(some)
        if end < length:
            cache.append(part.shape[1])
        done = end
    cache.extent = known
    return logits, torch.cat(features, dim=1)


def _prompt_for_drafter(drafter, root, features, arguments, mask) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the drafter may observe of the prompt: valid positions first, each with the token that follows it.

    A drafter without a memory needs the last position only; so does one whose prompt came as embeddings, since the
    tokens are not known.
    """
    rows, length = features.shape[:2]
    ones = torch.ones(rows, dtype=torch.long, device=features.device)
    tokens = arguments.get("input_ids")
    if not drafter.keeps_history or tokens is None:
        return features[:, -1:], root, ones
    follow = torch.cat([tokens[:, 1:], root], dim=1).to(features.device)  # (B, T)
    if mask is None:
        return features, follow, ones * length
    valid = mask[:, -length:].to(features.device).bool().long()
    order = valid.argsort(dim=1, descending=True, stable=True)
    features = features.gather(1, order[..., None].expand_as(features))
    return features, follow.gather(1, order), valid.sum(1)
