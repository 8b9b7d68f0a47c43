"""A decoder layer of the base's own kind, as some drafters have one: with rotary positions and a cache of its own.

Shapes: B rows, T positions, A newly verified positions, n nodes of a level, M nodes of the tree so far, H hidden.
"""

import copy
import functools
import inspect
import itertools
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_drafthead.bases.probe import CHOOSES_KEYS
from hf_drafthead.bases.releases import CACHE, cache_argument
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.modeling.layers import Undrawn

FINAL_NORMS = ("norm", "final_layer_norm", "final_layernorm", "norm_f")
FULL_ATTENTION = ("full_attention",)


class ChainKeys(NamedTuple):
    """Keys and values of every layer and step of chains of guesses, as a text is trained on: the cache of step k.

    Taking those of a step a second time changes nothing: a layer that is recomputed in the backward pass does that.
    """

    taken: dict[tuple[int, int], tuple[Tensor, Tensor]]
    step: int = 0

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values (B, G, (1 + k) T, D) of a layer up to this step."""
        self.taken.setdefault((layer, self.step), (keys, values))
        before = [self.taken[layer, step] for step in range(self.step)]
        all_keys, all_values = zip(*before, (keys, values))
        return torch.cat(all_keys, dim=-2), torch.cat(all_values, dim=-2)


class InTurn(nn.ModuleList):
    """Layers of one mixer each that together are one, such as attention and experts (Nemotron-H)."""

    def forward(self, x: Tensor, **inputs: Any) -> Tensor:
        """What the last makes of what the one before it made."""
        for layer in self:
            x = layer(x, **inputs)
        return x


class OfText(nn.Module):
    """A rotary embedding that takes a position in the text and two in an image, of which text has none of its own."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, positions: Tensor) -> Any:
        """Of positions (B or 1, T)."""
        return self.rotary(x, positions.expand(3, -1, -1))


class DecoderLayer(nn.Module):
    """One layer as transformers builds it from a model's config; attention to all positions unless told otherwise.

    Args:
        config: text config of the base, or of another model whose layer is to be used.
        input_norm: False replaces the layer's first norm by the identity (EAGLE).
        ends_with_norm: normalise the output as the model does after its last layer (Hydra++).
        window: how many positions the layer sees; None for all.
        layer_types: which of the kinds of layers that the model has; several are one behind the other (`InTurn`).
        rotary: False takes a layer without positions, too.
        first: the first place of the cache that others see, and position 0: for a layer that begins later in a text.

    Raises:
        ValueError: no such layer can be built from this config.
    """

    gradient_checkpointing = False  # a Trainer sets it, as for transformers' own

    def __init__(
        self,
        config: PreTrainedConfig,
        input_norm: bool = True,
        ends_with_norm: bool = False,
        window: int | None = None,
        layer_types: tuple[str, ...] = FULL_ATTENTION,
        rotary: bool = True,
        first: int = 0,
    ) -> None:
        super().__init__()
        self.window, self.first = window, first
        model = _one_layer_model(config, layer_types, rotary)
        self.layer: Any = InTurn(model.layers) if len(layer_types) > 1 else model.layers[0]
        attention = cast(Any, getattr(self.layer, "self_attn", None))
        if getattr(attention, "store_full_length_kv", False):
            attention.store_full_length_kv = False  # for layers behind it, of which there are none
        self.rotary = cast(Any, getattr(model, "rotary_emb", None))
        if not input_norm:
            self.layer.input_layernorm = nn.Identity()
        self.norm = (ends_with_norm and final_norm(model)) or nn.Identity()
        self._sdpa = model._supports_sdpa
        self._takes_causal_flag = model.config._attn_implementation == "sdpa"
        self._cache_argument = cache_argument(type(model.layers[0]).forward) or CACHE
        # Models with several kinds of layers ask which kind the frequencies are for.
        several = "layer_type" in inspect.signature(type(self.rotary).forward).parameters if self.rotary else False
        self._rotary_kind = {"layer_type": layer_types[0]} if several else {}
        if hasattr(self.rotary, "mrope_section"):
            try:
                self.rotary(torch.zeros(1, 1, config.hidden_size), torch.zeros(1, 1))
            except IndexError:  # Qwen's up to transformers 5.17
                self.rotary = OfText(self.rotary)

    def follow(self, base: PreTrainedConfig) -> None:
        """Compute attention and experts as the base does.

        Attention that takes no mask of a tree, such as flash attention, is the exception: the layer keeps its own.
        """
        attention = base._attn_implementation
        heeded = attention == "eager" or (attention == "sdpa" and self._sdpa)
        if heeded:
            self._takes_causal_flag = attention == "sdpa"
        configs = [getattr(module, "config", None) for module in self.modules()]
        for config in {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values():
            config._attn_implementation_internal = attention if heeded else config._attn_implementation
            config._experts_implementation_internal = base._experts_implementation

    def over_text(self, x: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Every position of a text (B, T, H) sees itself and those before it; padding (B, T) is seen by none."""
        positions, seen = self._of_text(x, attention_mask)
        if seen is None and not self._takes_causal_flag:
            seen = self._causal(positions)
        return self._run(x, positions, self._additive(seen, x))

    def over_chains(self, chains: "ChainKeys", x: Tensor, step: int, attention_mask: Tensor | None) -> Tensor:
        """Step k of chains of guesses (B, T, H), one from every position of a text, as EAGLE-3 is trained.

        A position sees the text up to itself as it was in step 0, and itself in the steps since: what a node k below it
        would see in a generation. The keys of this step are added to those of the steps before.
        """
        cache: Any = ChainKeys(chains.taken, step)
        positions, seen = self._of_text(x, attention_mask, step)
        if seen is None and self._takes_causal_flag and step == 0:
            return self._run(x, positions, None, cache)
        seen = self._causal(positions) if seen is None else seen
        itself = torch.eye(x.shape[1], dtype=torch.bool, device=x.device).expand_as(seen)
        return self._run(x, positions + step, self._additive(torch.cat([seen, *[itself] * step], dim=2), x), cache)

    def over_verified(self, cache: SlotCache, x: Tensor, lengths: Tensor) -> Tensor:
        """New verified positions (B, A, H), the first lengths[b] of them valid: they are remembered."""
        order = torch.arange(x.shape[1], device=x.device)[None]
        if cache.place(x.shape[1], past=True):
            mask = None  # plain causal attention is all there is
            if not self._takes_causal_flag or self._hides(x.shape[1]):
                seen = self._causal(order)
                mask = self._additive(self._begun(seen, cache.lengths) if self.first else seen, x)
            out = self._run(x, order - self.first, mask, cache)
        else:
            seen = order[:, None] <= order[..., None]
            out = self._behind(cache, x, order, self._begun(seen, cache.lengths) if self.first else seen)
        cache.keep(order.expand(len(x), -1), lengths)
        return out

    def over_nodes(self, cache: SlotCache, x: Tensor, depth: int, ancestors: Tensor) -> Tensor:
        """A level of nodes (B, n, H) so many positions behind the last verified one: they are soon forgotten.

        ancestors: (B, n, M) which nodes of the tree so far each sees, the last level first, as the cache holds them.
        """
        count = x.shape[1]
        cache.place(count, again=ancestors.shape[2] > count)
        return self._behind(cache, x, torch.full((1, count), depth - 1, device=x.device), ancestors)

    def _behind(self, cache: SlotCache, x: Tensor, depths: Tensor, seen: Tensor) -> Tensor:
        """What x (B, n, H) becomes at depths (1, n) behind the past, where of its step each sees (R, n, M)."""
        visible = x.new_zeros(1, self.first, dtype=torch.bool) if self.first else None
        mask = cache.mask(seen, depths, x.dtype, self.window, visible)
        return self._run(x, cache.lengths[:, None] + depths - self.first, mask, cache)

    def without_order(self, x: Tensor) -> Tensor:
        """A set (N, K, H): everything sees everything, and nothing has a position."""
        nowhere = torch.zeros(1, x.shape[1], dtype=torch.long, device=x.device)  # position 0 is turned by nothing
        seen = torch.ones(1, x.shape[1], x.shape[1], dtype=torch.bool, device=x.device)
        return self._run(x, nowhere, self._additive(seen, x))

    def _begun(self, seen: Tensor, past: Tensor) -> Tensor:
        """What is seen (R, A, A) of new positions behind a past of (B,), without those before the layer's first."""
        order = torch.arange(seen.shape[1], device=seen.device)
        diagonal = torch.eye(seen.shape[1], dtype=torch.bool, device=seen.device)  # no row of scores is empty
        return seen & ((past.to(seen.device)[:, None, None] + order >= self.first) | diagonal)

    def _of_text(self, x: Tensor, attention_mask: Tensor | None, ahead: int = 0) -> tuple[Tensor, Tensor | None]:
        """Positions (B or 1, T) of a text, and what is seen (B, T, T) from `ahead` behind each; None: all up to it."""
        count = x.shape[1]
        if attention_mask is None or bool(attention_mask[:, 0].all()):  # padding on the right is never looked back at
            positions = torch.arange(count, device=x.device).unsqueeze(0)
            return positions, self._causal(positions, ahead) if self._hides(count + ahead) else None
        real = attention_mask.to(x.device).bool()
        positions = (real.cumsum(1) - 1).clamp(min=0)
        # A padded position sees itself, so that no row of scores is empty.
        itself = torch.eye(count, dtype=torch.bool, device=x.device)
        before = itself.cumsum(1).T.bool() & self._causal(positions, ahead)
        return positions, (real.unsqueeze(1) & before) | itself

    def _causal(self, positions: Tensor, ahead: int = 0) -> Tensor:
        """Which positions (B, T, T) are not behind a position, and not too far before what is `ahead` behind it."""
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        seen = distance >= 0
        return seen if self.window is None else seen & (distance + ahead < self.window)

    def _hides(self, count: int) -> bool:
        """Whether something in a text of so many positions is outside the window, or before the layer's first."""
        return self.first > 0 or (self.window is not None and count > self.window)

    def _additive(self, seen: Tensor | None, x: Tensor) -> Tensor | None:
        """The additive mask of what is seen (B, A, S), for eager attention would add a boolean one as 0 and 1."""
        if seen is None:
            return None
        mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device)
        return mask.masked_fill_(~seen, torch.finfo(x.dtype).min).unsqueeze(1)

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None) -> Tensor:
        return self.norm(self._through(self.layer, x, positions, mask, cache))

    def _through(self, layer: nn.Module, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """What a layer makes of x, computed again in the backward pass where a trainer asks for that."""
        inputs = {"attention_mask": mask, "position_ids": positions, self._cache_argument: cache}
        if self.rotary is not None:
            inputs["position_embeddings"] = self.rotary(x, positions, **self._rotary_kind)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            # a layer of transformers would leave its cache out then
            layer.apply(lambda part: setattr(part, "gradient_checkpointing", False))
            layer = functools.partial(checkpoint, layer, use_reentrant=False)  # type: ignore[assignment]
        out = layer(x, **inputs)
        return out[0] if isinstance(out, tuple) else out


def final_norm(decoder: nn.Module) -> nn.Module | None:
    """The norm behind the last layer of a model's decoder; None if it has none."""
    return next((norm for name in FINAL_NORMS if (norm := getattr(decoder, name, None)) is not None), None)


def next_level(ancestors: Tensor | None, parents: Tensor) -> Tensor:
    """Which nodes (B, n, M) those with parents (B, n, 1) see, themselves included, of those that the last level sees.

    No ancestors: that was the root, of which no node is in a cache.
    """
    itself = torch.eye(parents.shape[1], dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
    return itself if ancestors is None else torch.cat([itself, ancestors.take_along_dim(parents, dim=1)], dim=2)


def has_layers(config: PreTrainedConfig, layer_types: tuple[str, ...] = FULL_ATTENTION, rotary: bool = True) -> bool:
    """Whether a `DecoderLayer` can be built from a config, with one rotary position per token: tried without memory."""
    if any(getattr(config, name, None) for name in CHOOSES_KEYS):  # by an index that the model hands to its layers
        return False
    try:
        with torch.device("meta"), Undrawn():
            layer = DecoderLayer(config, layer_types=layer_types, rotary=rotary)
            if layer.rotary is not None:
                layer.rotary(torch.zeros(1, 2, config.hidden_size), torch.zeros(1, 2), **layer._rotary_kind)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError):
        return False
    return True


def one_layer_config(config: PreTrainedConfig, layer_types: tuple[str, ...] = FULL_ATTENTION) -> PreTrainedConfig:
    """The config of a model with one layer, of these kinds one behind the other, and no vocabulary."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(layer_types)
    small.vocab_size, small.pad_token_id = 1, 0
    if getattr(small, "layer_types", None):
        small.layer_types = [*layer_types]
    if getattr(small, "mlp_layer_types", None):
        small.mlp_layer_types = small.mlp_layer_types[:1]
    return small


def last_layer_config(config: PreTrainedConfig, fields: dict[str, Any], model_type: str | None) -> PreTrainedConfig:
    """The config of a model whose only layer is like a model's last but for these fields, or of another type of model.

    Where the config says of which kinds its modules for multi-token prediction are, it is of these.
    """
    last = copy.deepcopy(config)
    if model_type is not None:
        last = CONFIG_MAPPING[model_type]()
        for name in set(last.to_dict()) - {"model_type"}:
            setattr(last, name, getattr(config, name, getattr(last, name)))
    last.dtype = None  # the model's, which may be loaded in another
    for name, value in {"first_k_dense_replace": 0, "decoder_sparse_step": 1, "mlp_only_layers": []}.items():
        if hasattr(last, name):  # experts, where the model has some
            setattr(last, name, value)
    mlps = getattr(config, "mtp_mlp_layer_types", None) or list(getattr(config, "mlp_layer_types", None) or ())[-1:]
    kinds = getattr(config, "mtp_layers_block_type", None) or [*FULL_ATTENTION]
    last.num_hidden_layers = len(kinds)
    for name, value in {"layer_types": kinds, "mlp_layer_types": mlps[:1], **fields}.items():
        if getattr(last, name, None) is not None:
            setattr(last, name, value)
    return last


def windows_of(config: PreTrainedConfig, layers: int) -> list[int | None]:
    """How many positions each of a model's first layers sees; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds = list(getattr(config, "layer_types", None) or ["sliding_attention"] * layers)[:layers]
    return [window if kind == "sliding_attention" else None for kind in kinds] + [None] * (layers - len(kinds))


def types_of(config: PreTrainedConfig) -> tuple[str, ...]:
    """Kinds of the layers that make a model's first: one that attends, and behind it those that are experts or MLP."""
    first, *others = getattr(config, "layer_types", None) or FULL_ATTENTION
    return first, *itertools.takewhile({"moe", "mlp"}.__contains__, others)


def _one_layer_model(config: PreTrainedConfig, layer_types: tuple[str, ...], rotary: bool) -> Any:
    """The model of such a config."""
    try:
        small = one_layer_config(config, layer_types)
        model_class = MODEL_MAPPING[type(config)]
        small._attn_implementation = "sdpa" if model_class._supports_sdpa else "eager"
        model = model_class(small)
        parameters = inspect.signature(type(model.layers[0]).forward).parameters
        turned = getattr(model, "rotary_emb", None) is not None and "position_embeddings" in parameters
        fits = "attention_mask" in parameters and (turned or (not rotary and layer_types[0] in FULL_ATTENTION))
    except (ArithmeticError, AttributeError, KeyError, IndexError, TypeError):
        fits = False
    if not fits:
        raise ValueError(
            f"no decoder layer with rotary positions can be built from a {config.model_type!r} config: give "
            "layer_config= of a model that has one (such as a LlamaConfig of the same hidden size), or use Medusa or "
            "Hydra heads."
        )
    return model
