"""Decoder layers that fill blocks behind a text that they know as keys and values alone (DFlash's "KV injection").

Shapes: B rows, A newly verified positions, T positions, M anchors, W slots of a block, G key-value heads, E of a head,
H hidden.
"""

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.modeling.decoder_layer import DecoderLayer


class ContextKeys(NamedTuple):
    """Keys and values (B, G, T, E) of a context in every layer, as the cache of layers that are trained."""

    pairs: list[tuple[Tensor, Tensor]]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Those of the context, and behind them the blocks'."""
        context_keys, context_values = self.pairs[layer]
        return torch.cat([context_keys, keys], dim=-2), torch.cat([context_values, values], dim=-2)


def remember(cache: SlotCache, pairs: list[tuple[Tensor, Tensor]], lengths: Tensor) -> None:
    """Keep each layer's keys and values (B, G, A, E), of which the first lengths (B,) count, behind what is kept."""
    count = pairs[0][0].shape[2]
    cache.place(count, past=True)
    for layer, pair in enumerate(pairs):
        cache.update(*pair, layer)
    cache.keep(torch.arange(count, device=pairs[0][0].device).expand(cache.rows, -1), lengths)


class BlockLayers(DecoderLayer):
    """Decoder layers over blocks; to keys and values of the block come those of a context that passed no layer.

    Args:
        config: of the layers.
        windows: how far before its first slot a block sees, layer by layer; None for all.
        causal: in which layers a slot sees of the block only itself and those before it.
        per_slot: a window counts from every slot, itself included, and hides what lies as far behind a slot, too.
    """

    def __init__(
        self, config: PreTrainedConfig, windows: list[int | None], causal: list[bool], per_slot: bool = False
    ) -> None:
        super().__init__(config)
        layers = [self.layer, *(DecoderLayer(config).layer for _ in windows[1:])]
        del self.layer
        self.layers = nn.ModuleList(layers)
        self.windows, self.causal, self.per_slot = windows, causal, per_slot
        attention: Any = getattr(layers[0], "self_attn", None)
        projections = {f"{name}_proj" for name in "qkvo"}
        supported_parts = [projections, projections | {"q_norm", "k_norm"}]
        if attention is None or {name for name, _ in attention.named_children()} not in supported_parts:
            raise ValueError(
                f"layer_config asks for a {type(layers[0]).__name__}, whose keys and values cannot be made of a "
                "context: give the config of a model whose attention has the parts of a LLaMA's or a Qwen3's."
            )
        for index, layer in enumerate(layers):
            layer.self_attn.layer_idx = index  # where the cache holds its keys
        self._turned = sys.modules[type(attention).__module__].apply_rotary_pos_emb

    def context(self, x: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values, (B, G, A, E), of a context (B, A, H) at positions (B or 1, A)."""
        cos, sin = self.rotary(x, positions)
        pairs = []
        for layer in self.layers:
            attention: Any = layer.self_attn
            shape = (*x.shape[:2], -1, attention.head_dim)
            keys, values = attention.k_proj(x).view(shape), attention.v_proj(x).view(shape).transpose(1, 2)
            keys = attention.k_norm(keys) if hasattr(attention, "k_norm") else keys
            keys = keys.transpose(1, 2)
            pairs.append((self._turned(keys, keys, cos, sin)[1], values))
        return pairs

    def remember(self, cache: SlotCache, x: Tensor, lengths: Tensor) -> None:
        """Keep a context (B, A, H), of which the first lengths (B,) positions count, behind what is kept already."""
        positions = cache.lengths[:, None].to(x.device) + torch.arange(x.shape[1], device=x.device)
        remember(cache, self.context(x, positions), lengths)

    def over_block(self, cache: SlotCache, x: Tensor) -> Tensor:
        """One block (B, W, H) behind each row's context, which is soon forgotten."""
        cache.place(x.shape[1])
        order = torch.arange(x.shape[1], device=x.device)
        counted = self._counted_from(order)[None]

        def mask(window: int | None, causal: bool) -> Tensor:
            return cache.mask(self._in_block(order, window, causal)[None], counted, x.dtype, self._reach(window))

        return self._through_all(x, cache.lengths[:, None] + order, mask, cache)

    def of_text(self, context: Tensor, real: Tensor | None) -> tuple[ContextKeys, Tensor]:
        """The keys and values of a text's context (B, T, H), and its positions (B, T)."""
        places, _ = self._of_text(context, real)
        places = places.expand(len(context), -1)
        return ContextKeys(self.context(context, places)), places

    def over_anchors(
        self, x: Tensor, context: ContextKeys, places: Tensor, anchors: Tensor, real: Tensor | None
    ) -> Tensor:
        """Blocks (B, M W, H), one behind the other, each with the context up to its anchor in a text, see `of_text`.

        anchors: (B, M) indices of the last position that a block sees; real: (B, T) where the text is no padding.
        """
        size = x.shape[1] // anchors.shape[1]
        at = places.gather(1, anchors) + 1  # (B, M) the anchors' positions
        order = torch.arange(x.shape[1], device=x.device)
        before = torch.arange(places.shape[1], device=x.device) <= anchors[..., None]  # (B, M, T)
        before = (before if real is None else before & real.bool()[:, None]).repeat_interleave(size, 1)
        counted = (at[..., None] + self._counted_from(order[:size])).flatten(1)[..., None]  # (B, M W, 1)

        def mask(window: int | None, causal: bool) -> Tensor:
            reach = self._reach(window)
            seen = before if reach is None else before & (counted - places[:, None] < reach)
            within_block = self._in_block(order, window, causal) & (order[:, None] // size == order // size)
            seen = torch.cat([seen, within_block.expand(len(x), -1, -1)], 2)
            additive: Tensor = self._additive(seen, x)  # type: ignore[assignment]
            return additive

        positions = (at[..., None] + torch.arange(size, device=x.device)).flatten(1)
        return self._through_all(x, positions, mask, context)  # type: ignore[arg-type]

    def _counted_from(self, order: Tensor) -> Tensor:
        """From which slot (W,) of its block each slot's window counts: itself, or the anchor."""
        return order if self.per_slot else torch.zeros_like(order)

    def _reach(self, window: int | None) -> int | None:
        """How many positions that slot sees, itself included; the anchor sees the window's beside itself."""
        return None if window is None else window + (not self.per_slot)

    def _in_block(self, order: Tensor, window: int | None, causal: bool) -> Tensor:
        """Which slots (W, W) each of a block sees."""
        seen = order[None] <= order[:, None] if causal else (order[None] >= 0).expand(len(order), -1)
        return seen if window is None or not self.per_slot else seen & ((order[None] - order[:, None]).abs() < window)

    def _through_all(self, x: Tensor, positions: Tensor, mask: Any, cache: Cache) -> Tensor:
        masks = {kind: mask(*kind) for kind in set(zip(self.windows, self.causal))}
        for layer, *kind in zip(self.layers, self.windows, self.causal):
            x = self._through(layer, x, positions, masks[tuple(kind)], cache)  # type: ignore[index]
        return x
