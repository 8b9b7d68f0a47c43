"""How a base is read: over a prompt, over the nodes of a step, over whole texts.

The tree enters through public arguments alone: `position_ids` (past length + depth), a 4-D additive `attention_mask`
(one per layer type where the base has several) and a `Cache`. Some models ignore one of them, some crash; hence
`probe`.

Shapes: B rows, N nodes, T positions of a text, R = 1 or B, H hidden, F feature layers, V vocabulary, M any number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_drafthead.bases.mixers.layer import Mixer, TreeTables
from hf_drafthead.bases.output_layer import OutputLayer, splits
from hf_drafthead.bases.releases import (
    CACHE,
    CacheLayerMixin,
    DynamicCache,
    PreTrainedConfig,
    cache_argument,
    keep_picklable,
    with_cache,
    writing_layers,
)
from hf_drafthead.bases.slots import SlotCache, padded
from hf_drafthead.bases.topology import Topology

MOST_READ_ON = 64  # tokens that a forward reads behind the ends of rows, where states are kept
STATE_MASKS = {"linear_attention": None, "conv": None}  # of layers that keep a state, by their types in configs


@dataclass(frozen=True)
class Reading:
    """What the base says about whole texts.

    features: (B, T, F*H) for a drafter to read, and behind them keys and values where it reads some; hidden: (B, T, H)
    after the final norm; scores: (B, T, V) logits, or (B, T, H) again where `BaseReader.logits` makes logits of them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, eq=False)
class BaseReader:
    """How to run one base and read logits and features from it.

    base: the causal LM; windows: attention window (None = all) by layer type; split: whether the logits are what
    `output` makes of the decoder's last hidden state, so that the decoder can be run alone; reads: what the drafter
    reads, the layers of hidden states, -1 being the last after the final norm, and types of attention, of each of which
    it reads the last layer's keys and values; mixers: of the layers that keep a state, by number, see `SlotCache`;
    more: other inputs of every forward behind the prompt, by name, each with the axis on which it has an entry per
    token (None: it has none); refused: why no tree can stand behind a prompt with some inputs, by their names, where
    that was tried; stages: of steps that read it, see `generation.step.Stages`.
    """

    base: PreTrainedModel
    windows: dict[str, int | None]
    split: bool
    reads: tuple[int | str, ...]
    output: OutputLayer
    mixers: dict[int, tuple[Mixer, int]] = field(default_factory=dict)
    more: Mapping[str, tuple[Any, int | None]] = field(default_factory=dict)
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)
    stages: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    # looked up once, which a compiler must not do
    cache_name: str = field(init=False)  # that the forward has for it
    states: tuple[int, ...] = field(init=False)  # of `reads`, the layers whose hidden states are read
    keys: list[int] = field(init=False)  # and those whose keys and values are
    vocabulary: int = field(init=False)  # V

    def __post_init__(self) -> None:
        module = self.output.decoder if self.split else self.base
        kinds = [read for read in self.reads if isinstance(read, str)]
        config = self.base.config.get_text_config(decoder=True)
        object.__setattr__(self, "cache_name", cache_argument(module.forward) or CACHE)
        object.__setattr__(self, "states", tuple(layer for layer in self.reads if isinstance(layer, int)))
        object.__setattr__(self, "vocabulary", int(config.vocab_size))
        object.__setattr__(self, "keys", key_layers(config, kinds) if kinds else [])

    @classmethod
    def of_texts(
        cls, base: PreTrainedModel, reads: tuple[int | str, ...] = (-1,), output: OutputLayer | None = None
    ) -> BaseReader:
        """A reader of whole texts, for which a base need not be able to verify trees."""
        output = output or OutputLayer(base)
        return cls(base, {}, splits(base, output), reads, output)

    def cache(self, batch_size: int, capacity: int, nodes: int) -> SlotCache:
        """An empty cache of this base."""
        return SlotCache(batch_size, self.layers, capacity, nodes, self.mixers)

    @functools.cached_property
    def layers(self) -> int:
        """How many layers write to a cache."""
        return writing_layers(self.base.config.get_text_config(decoder=True))

    def __call__(self, last_only: bool, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1 or length, V) and features (B, length, F*H) of a forward with the base's own arguments."""
        inputs.pop("logits_to_keep", None)
        reading = self.read(with_cache(self.cache_name, inputs))
        scores = reading.scores[:, -1:] if last_only else reading.scores
        return self.logits(scores), reading.features

    def read_texts(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Reading:
        """Read whole texts (B, T), padded where the mask (B, T) is 0."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": bool(self.keys)}
        if self.keys:
            inputs[self.cache_name] = WrittenKeys(self.base.config.get_text_config(decoder=True), self.keys)
        reading = self.read(inputs)
        if self.collects:
            keep_picklable(self.base)
        return reading

    @property
    def collects(self) -> bool:
        """Whether other hidden states are read than the last, which transformers collects by hooks that stay."""
        return not self.split or self.states not in ((-1,), ())

    def logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) from the scores of a `Reading`."""
        return self.output.logits(scores) if self.split else scores

    def read(self, inputs: dict) -> Reading:
        """A forward with the base's own arguments."""
        last_layer_only = self.states in ((-1,), ())
        if self.split:
            wanted = {} if last_layer_only else {"output_hidden_states": True}
            outputs = self.output.decoder(**inputs, **wanted, return_dict=True)
            hidden = scores = outputs.last_hidden_state
        else:
            outputs = self.base(**inputs, output_hidden_states=True, return_dict=True)
            hidden, scores = outputs.hidden_states[-1], outputs.logits
        features = hidden if last_layer_only else self.features(outputs.hidden_states, hidden)
        return Reading(self.with_keys(features, inputs) if self.keys else features, hidden, scores)

    def features(self, hidden_states: tuple[torch.Tensor, ...], last: torch.Tensor) -> torch.Tensor:
        """(B, T, F*H) what the drafter reads of a forward's hidden states, of which the last (B, T, H) is normed."""
        states = [one_stream(hidden_states[layer], last).to(last.device) for layer in self.states or (-1,)]
        return torch.cat(states, dim=-1)

    def with_keys(self, features: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Features (B, T, F*H) of a forward, and behind them the keys and values that it has written."""
        cache = inputs[self.cache_name]
        return append_keys(features, (cache.written(layer, features.shape[1]) for layer in self.keys))

    def known(self, features: torch.Tensor, cache: SlotCache, count: int) -> torch.Tensor:
        """Features of a prompt with what is read of `count` past positions in front that no forward has run over.

        Of these there are keys and values, and no hidden states: zeros.
        """
        wide = sum(part.shape[1] * part.shape[3] for layer in self.keys for part in cache.between(layer, 0, 1))
        nothing = features.new_zeros(len(features), count, features.shape[2] - wide)
        past = (cache.between(layer, cache.nodes, cache.nodes + count) for layer in self.keys)
        return torch.cat([append_keys(nothing, past), features], dim=1)

    def rewrite(
        self,
        tokens: torch.Tensor,
        cache: SlotCache,
        start: int,
        position_shift: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> None:
        """One forward over tokens (B, T) of all rows, which become the past from position `start` on."""
        if self.mixers:
            self._read_on(tokens, cache, start, position_shift, visible)
            return
        cache.placed, cache.extent, stop = None, start, start + tokens.shape[1]  # what is read is appended
        positions = torch.arange(start, stop, device=tokens.device) + position_shift
        mask = None if visible is None else padded(visible, stop)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        self.read({**inputs, **self._more(tokens.shape[1]), "use_cache": True})

    def _read_on(
        self,
        tokens: torch.Tensor,
        cache: SlotCache,
        start: int,
        position_shift: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> None:
        """As `rewrite`, from the end of each row's own past on: a state cannot go back to an earlier position."""
        total = tokens.shape[1]
        count = min(total, MOST_READ_ON)
        chain = Topology.of_numbers([0, *range(count - 1)], tokens.device)
        order = torch.arange(count, device=tokens.device)
        for _ in range(0, total, count):
            read = cache.lengths[:, None] - start
            positions = (read + order).clamp(max=total - 1)
            places = positions + start + position_shift
            self.nodes(tokens.gather(1, positions), chain, cache, places, visible)
            cache.keep(order.expand_as(positions), (total - read[:, 0]).clamp(0, count))

    def nodes(
        self,
        tokens: torch.Tensor,
        topology: Topology,
        cache: SlotCache,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over the nodes (B, N) of a step, node 0 the root: logits (B, N, V) and features (B, N, F*H).

        Their position ids are (B, N); `visible` (B, S): which past slots hold no padding, None for all. Their states
        are written before the past. A root alone behind rows of one length is a plain step of the base.
        """
        if tokens.shape[1] == 1 and cache.even and (cache.rows == 1 or not self.mixers):  # rows that ended stand still
            cache.placed = None
            mask: Any = None if visible is None else padded(visible, cache.extent + 1)
        else:
            cache.place(tokens.shape[1])
            tree = topology.ancestors, topology.depths, self.base.dtype
            masks = {kind: cache.mask(*tree, window, visible) for kind, window in self.windows.items()}
            mask = next(iter(masks.values())) if len(masks) == 1 else masks
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        inputs |= {"use_cache": True, **(self._more(tokens.shape[1]) if self.more else {})}
        reading = self._read_tree(inputs, cache, topology) if self.mixers and cache.placed else self.read(inputs)
        return self.logits(reading.scores), reading.features

    def _read_tree(self, inputs: dict[str, Any], cache: SlotCache, topology: Topology) -> Reading:
        """As `read`, over nodes that layers which keep a state follow by their ancestors, and by no mask."""
        mask = inputs["attention_mask"]
        masks = mask if isinstance(mask, dict) else dict.fromkeys(self.windows, mask)
        cache.tree = TreeTables(topology.parents, topology.ancestors)
        try:
            return self.read({**inputs, "attention_mask": {**masks, **STATE_MASKS} if masks else None})
        finally:
            cache.tree = None

    def _more(self, count: int) -> dict[str, Any]:
        """The other inputs of a forward over so many tokens."""
        return {
            name: value
            if axis is None
            else value.expand(*value.shape[:axis], count, *value.shape[axis + 1 :]).contiguous()
            for name, (value, axis) in self.more.items()
        }


def key_layers(config: PreTrainedConfig, kinds: Iterable[str]) -> list[int]:
    """Of each type of attention the last layer that writes keys; the last of all where a base has none of the type."""
    last, layers = {}, DynamicCache(config=config).layers[: writing_layers(config)]
    for number, layer in enumerate(layers):
        if isinstance(layer, CacheLayerMixin):
            last["sliding_attention" if layer.is_sliding else "full_attention"] = number
    return [last.get(kind, max(last.values())) for kind in kinds] if last else []


class WrittenKeys(DynamicCache):
    """In the place of a cache of a forward over whole texts: it keeps what is written, of some layers alone."""

    def __init__(self, config: PreTrainedConfig, layers: Iterable[int]):
        super().__init__(config=config)
        self.held: dict[int, Any] = dict.fromkeys(layers)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        if layer_idx in self.held:
            self.held[layer_idx] = key_states, value_states
        return key_states, value_states

    def written(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `SlotCache.written`."""
        keys, values = self.held[layer]
        return keys, values


def append_keys(features: torch.Tensor, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Features (B, T, F*H), and behind them keys and values (B, G, T, E), flat."""
    flat = (part.transpose(1, 2).flatten(2).to(features.device) for pair in pairs for part in pair)
    return torch.cat([features, *flat], dim=-1)


def one_stream(states: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Hidden states in the shape (B, T, H) of `like`: of several streams, as Gemma 3n has, the mean, as it takes it."""
    if states.dim() == like.dim():
        return states
    extra = next(at for at in range(states.dim()) if states.shape[:at] + states.shape[at + 1 :] == like.shape)
    return states.mean(extra)
