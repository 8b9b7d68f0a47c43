"""The caches of transformers: what one holds, and which layers of a base write to one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_drafthead.bases.releases import CacheLayerMixin, DynamicCache, PreTrainedConfig, writing_layers


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
