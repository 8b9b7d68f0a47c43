"""The caches of transformers: what one holds, and which layers of a base write to one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.releases import holds_nothing


def can_load(past: Cache) -> bool:
    """Whether `SlotCache.load` understands this cache: plain or sliding dynamic layers, nothing offloaded.

    A static cache that the base prepared for this call has nothing in it yet, and is only filled at the end.
    """
    if past.offloading:
        return False
    states = [layer for layer in past.layers if isinstance(layer, LinearAttentionLayer)]
    if len(states) == len(past.layers) and not any(isinstance(layer, CacheLayerMixin) for layer in states):
        if any(any(layer.has_previous_state.values()) for layer in states):
            return False  # of how many positions none knows
    prepared = not getattr(past, "_is_user_defined", False)
    classes = (DynamicLayer, DynamicSlidingWindowLayer, *((StaticLayer, StaticSlidingWindowLayer) if prepared else ()))
    return all(holds_nothing(layer) or _keeps(layer, classes) for layer in past.layers)


def _keeps(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin, classes: tuple[type, ...]) -> bool:
    """Whether a layer keeps keys as one of the classes does, or a state, or both."""
    if not isinstance(layer, LinearAttentionLayer):
        return type(layer) in classes
    if layer.record_past:
        return False
    return not isinstance(layer, CacheLayerMixin) or any(issubclass(kind, classes) for kind in type(layer).__bases__)


def rows_of(past: Cache) -> int | None:
    """Rows that an ordinary cache holds; None where nothing is in it yet."""
    for layer in past.layers:
        tensors = [getattr(layer, "keys", None)] if getattr(layer, "is_initialized", False) else []
        for states in (getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}):
            tensors += states.values()
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                return len(tensor)
    return None


def past_length(past: Cache) -> int:
    """Positions that an ordinary cache holds; 0 where no layer keeps keys, for then none knows."""
    return int(past.get_seq_length()) if any(isinstance(layer, CacheLayerMixin) for layer in past.layers) else 0


def writing_layers(config: PreTrainedConfig) -> int:
    """How many of a base's layers, the first ones, write keys and values; the others read those of earlier layers."""
    layers = DynamicCache(config=config).layers
    last = next((number for number, layer in enumerate(reversed(layers)) if not holds_nothing(layer)), 0)
    return (len(layers) or config.num_hidden_layers) - last


def key_layers(config: PreTrainedConfig, kinds: Iterable[str]) -> list[int]:
    """Of each type of attention the last layer that writes keys; the last of all where a base has none of the type."""
    last, layers = {}, DynamicCache(config=config).layers[: writing_layers(config)]
    for number, layer in enumerate(layers):
        if isinstance(layer, CacheLayerMixin):
            last["sliding_attention" if layer.is_sliding else "full_attention"] = number
    return [last.get(kind, max(last.values())) for kind in kinds] if last else []


class WrittenKeys(DynamicCache):
    """In the place of a cache of a forward over whole texts: it keeps what is written, of some layers alone.

    Args:
        config: text config of the base.
        layers: numbers of the layers.
    """

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
