"""Gemma 4's assistants: a small transformer without keys of its own, whose layers read the last ones of the base.

    node       x = pre [E(token); s]         s: the base's hidden state after its final norm; below the root's children
                                             post(out) of the parent
    layers     out = norm(layers(x))         queries alone, to keys and values that the base's last layers have made
    scores     lm_head(out)                  of all tokens, or of those in a few of many clusters of the vocabulary

All nodes of a tree stand at the position of its root: they see the verified text, and of the path what `s` says of it.

Shapes: B rows, A newly verified positions, T positions, n nodes of a level, S past slots, G key-value heads, E of a
head, H hidden of the base, W of the assistant, N clusters, V vocabulary, D draft vocabulary.
"""

import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.output_layer import probe_tokens
from hf_drafthead.bases.reader import BaseReader, key_layers
from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.block_layers import remember
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer
from hf_drafthead.modeling.drafter import Drafter

LAYERS = ("gemma4_text", "gemma4_unified_text")  # whose layers can do without keys of their own
FULL, SLIDING = "full_attention", "sliding_attention"


class GemmaAssistantConfig(DraftHeadConfig):
    """An assistant as Google publishes them for Gemma 4; a fresh one can be trained for any base with attention.

    Args:
        num_draft_heads: levels that training unrolls. Trees may be deeper.
        num_layers: decoder layers of a fresh assistant; else as many as layer_config has.
        layer_config: of the assistant's layers, a Gemma 4's; its heads must be those of the base's keys. None: layers
            of a quarter of the base's width.
        num_centroids: N, clusters of the vocabulary, of which only the likeliest are scored; 0: all tokens are.
        centroid_top_k: how many clusters are scored.
    """

    model_type = "drafthead_gemma4_assistant"
    any_depth = True

    num_draft_heads: int = 4
    num_layers: int = 4
    layer_config: dict[str, Any] | PreTrainedConfig | None = None
    num_centroids: int = 0
    centroid_top_k: int = 32

    @property
    def kinds(self) -> list[str]:
        """Types of attention, of each of which the base's last keys are read."""
        return sorted(set(getattr(self.layer_config, "layer_types", ())))

    @property
    def keys(self) -> list[tuple[int, int]]:
        """Of each type of attention G and E."""
        types = list(getattr(self.layer_config, "layer_types", ()))
        return [heads_of(self.layer_config, types.index(kind)) for kind in self.kinds]

    def check(self) -> None:
        """Fill in the layers, once the base is known, and refuse what cannot be built."""
        super().check()
        self._check_count("num_centroids", 0)
        if self.num_centroids:
            if self.draft_vocab_size is not None or (self.known_tokens or 0) % self.num_centroids:
                raise ValueError(
                    f"num_centroids is {self.num_centroids}, which must divide the base's {self.known_tokens} tokens "
                    "into clusters of one size, and leaves no place for a draft_vocab_size: give one of the two."
                )
            self._check_count("centroid_top_k", 1, self.num_centroids)
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        text = self.get_text_config()
        has_keys = key_layers(text, [FULL]) and getattr(text, "num_attention_heads", None)
        if not has_keys:
            raise ValueError(
                f"an assistant reads keys and values of its base, and a {text.model_type!r} model has none: use Medusa "
                "or Hydra heads."
            )
        if getattr(text, "kv_lora_rank", None):
            sizes = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
            if len({*sizes, *(heads_of(text, number)[1] for number in key_layers(text, [FULL]))}) > 1:
                raise ValueError(
                    f"an assistant reads keys and values of one size, and a {text.model_type!r} model has keys of "
                    f"{sizes[0]} and values of {sizes[1]}: use Medusa or Hydra heads."
                )
        self.layer_config = assistant_like(text, self.num_layers) if self.layer_config is None else self.layer_config
        layer: Any = self.layer_config
        if layer.model_type not in LAYERS or layer.hidden_size_per_layer_input or layer.enable_moe_block:
            raise ValueError(
                f"layer_config is of a {layer.model_type!r} model: expected a Gemma 4 text model's, dense and without "
                "inputs per layer, whose layers can read the keys of another model."
            )
        self.num_layers = layer.num_kv_shared_layers = layer.num_hidden_layers
        for kind, mine, number in zip(self.kinds, self.keys, key_layers(text, self.kinds), strict=True):
            theirs = heads_of(text, number)
            if mine != theirs:
                raise ValueError(
                    f"the assistant reads {mine[0]} key heads of size {mine[1]} ({kind}); layer {number} of the base "
                    f"has {theirs[0]} of size {theirs[1]}: give the base that it was trained for."
                )


def heads_of(config: Any, number: int) -> tuple[int, int]:
    """Key-value heads G of a layer, and their size E, by a text config."""
    layer = config.per_layer_config[number] if hasattr(config, "per_layer_config") else config
    heads = layer.num_attention_heads
    size = getattr(layer, "head_dim", None) or config.hidden_size // heads
    return getattr(layer, "num_key_value_heads", None) or heads, size


def assistant_like(text: Any, layers: int) -> PreTrainedConfig:
    """The config of fresh layers for a base: a quarter as wide, with its heads, windows and rotary frequencies."""
    numbers, window = key_layers(text, (FULL, SLIDING)), getattr(text, "sliding_window", None)
    slides = window is not None and numbers[0] != numbers[1]
    (groups, size), (few, small) = heads_of(text, numbers[0]), heads_of(text, numbers[1])
    rope = getattr(text, "rope_parameters", None) or {}
    default = {"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0}
    width = max(text.hidden_size // 4, 64)
    return Gemma4TextConfig(
        vocab_size=text.vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=few,
        head_dim=small,
        global_head_dim=size,
        attention_k_eq_v=groups != few,  # without keys of their own the layers are the same
        num_global_key_value_heads=groups,
        layer_types=[SLIDING if slides else FULL] * (layers - 1) + [FULL],
        sliding_window=window or 512,
        rope_parameters={kind: dict(rope.get(kind) or default) for kind in (FULL, SLIDING)},
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        num_kv_shared_layers=layers,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
        pad_token_id=None,
    )


class AssistantLayers(DecoderLayer):
    """Decoder layers of a Gemma 4 text model that are handed keys and values of another model."""

    def __init__(self, config: PreTrainedConfig) -> None:
        nn.Module.__init__(self)
        small: Any = copy.deepcopy(config)
        small.vocab_size, small.pad_token_id = 1, 0
        model: Any = MODEL_MAPPING[type(config)]
        small._attn_implementation = "sdpa"
        model = model(small)
        self.layers, self.norm, self.rotary = model.layers, model.norm, model.rotary_emb
        self.types, self.reach = list(small.layer_types), small.sliding_window
        self.window, self.first, self._sdpa, self._takes_causal_flag = None, 0, True, True

    def forward(self, x: Tensor, positions: Tensor, masks: dict[str, Tensor], pairs: dict[str, Any]) -> Tensor:
        """(B, n, W) at positions (B, n); of each type of attention a mask (B, 1, n or 1, S), and keys and values."""
        turned = {kind: self.rotary(x, positions, kind) for kind in pairs}
        for layer, kind in zip(self.layers, self.types):
            about = {"position_embeddings": turned[kind], "attention_mask": masks[kind], "position_ids": positions}
            x = layer(x, None, shared_kv_states=pairs, **about)
        return self.norm(x)

    @property
    def windows(self) -> dict[str, int | None]:
        """Of each type of attention, how many positions before its own a node sees: one more than the base's window."""
        return {kind: self.reach + 1 if kind == SLIDING else None for kind in self.types}

    def of_text(self, x: Tensor, attention_mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions (B or 1, T) of the nodes behind every position of a text, and what they see of it."""
        positions, seen = self._of_text(x, attention_mask)
        seen = self._causal(positions) if seen is None else seen
        distance = positions.unsqueeze(2) - positions.unsqueeze(1)
        near = {kind: seen if window is None else seen & (distance < window) for kind, window in self.windows.items()}
        return positions + 1, {kind: cast(Tensor, self._additive(mask, x)) for kind, mask in near.items()}


class AssistantState(NamedTuple):
    """The base's keys and values of the verified text, and the tree level that was guessed last.

    last: (B, H) the base's hidden state at each row's last position; level: (B, n, H) in its place at the last level.
    """

    cache: SlotCache
    last: Tensor
    level: Tensor
    depth: int = 0


class GemmaAssistantDrafter(Drafter):
    """An assistant.

    State dict: `pre.weight` (W, 2H), `post.weight` (H, W), `body.layers.{i}.*` and `body.norm.weight` with Gemma 4's
    names, without keys and values; `lm_head.weight` (V, W), or (D, W) with `draft_tokens` (D,); with clusters
    `centroids.weight` (N, W) and `token_ordering` (V,), the tokens of one cluster after the other.
    """

    config: GemmaAssistantConfig
    keeps_history = True
    needs_range = True
    lm_head: nn.Linear

    def __init__(self, config: GemmaAssistantConfig) -> None:
        super().__init__(config)
        layer: Any = config.own_layer
        self.reads = (-1, *config.kinds)
        self.key_width = sum(2 * heads * size for heads, size in config.keys)
        self.pre = nn.Linear(2 * config.width, layer.hidden_size, bias=False)
        self.post = nn.Linear(layer.hidden_size, config.width, bias=False)
        self.body = AssistantLayers(layer)
        self.lm_head = nn.Linear(layer.hidden_size, self.choices, bias=False)
        clusters = config.num_centroids
        self.centroids = nn.Linear(layer.hidden_size, clusters, bias=False) if clusters else None
        self.register_buffer("token_ordering", torch.arange(self.choices) if clusters else None)

    def prepare(self) -> None:
        super().prepare()
        if self.__dict__.get("_tried") is not self.base:
            tokens = probe_tokens(self.base)[None, :2]
            with torch.no_grad():
                wide = BaseReader.of_texts(self.base, self.reads, self.output).read_texts(tokens).features.shape[-1]
            if wide != self.config.width + self.key_width:
                raise Unsupported("the base keeps other keys and values than its config says")
            self.__dict__["_tried"] = self.base

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_tried": None}

    def check_values(self, path: str) -> None:
        super().check_values(path)
        if self.token_ordering is not None:
            self._check_map(cast(Tensor, self.token_ordering), f"'drafter.token_ordering' in {path!r}")

    def start(self, batch_size: int, capacity: int) -> AssistantState:
        cache = SlotCache(batch_size, len(self.config.kinds), min(capacity, ROOM))
        nothing = self.placed(torch.zeros(batch_size, self.config.width))
        return AssistantState(cache, nothing, nothing.unsqueeze(1))

    def observe(self, state: AssistantState, features: Tensor, tokens: Tensor, lengths: Tensor) -> AssistantState:
        hidden, pairs = self._parts(self.placed(features))
        remember(state.cache, list(pairs.values()), lengths)
        last = last_valid(state.last, hidden, lengths)
        return AssistantState(state.cache, last, last.unsqueeze(1))

    def expand(self, state: AssistantState, tokens: Tensor, parents: Tensor) -> tuple[AssistantState, Guesses]:
        cache, hidden = state.cache, state.level
        if state.depth:
            hidden = hidden.take_along_dim(parents.to(hidden.device)[..., None], dim=1)
        pairs = {kind: cache.past(number) for number, kind in enumerate(self.config.kinds)}
        root = torch.zeros(1, 1, dtype=torch.long, device=hidden.device)
        nothing = root.new_zeros(1, 1, 0, dtype=torch.bool)
        masks = {
            kind: cache.mask(nothing, root, hidden.dtype, window and window + 1)
            for kind, window in self.body.windows.items()
        }
        out = self.body(self._joined(tokens, hidden), cache.lengths[:, None].expand(tokens.shape), masks, pairs)
        state = AssistantState(cache, state.last, self.post(out), state.depth + 1)
        return state, Guesses(self.head_logits(0, out), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """Entry k is guess k of chains that begin at every position and read the true tokens, all (B, T, W)."""
        (hidden, pairs), states = self._parts(features), []
        positions, masks = self.body.of_text(hidden, attention_mask)
        for step in range(self.config.num_draft_heads):
            x = self._joined(input_ids.roll(-1 - step, dims=1), hidden)
            states.append(self.body(x, positions, masks, pairs))
            hidden = self.post(states[-1])
        return states

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V); of tokens in other clusters than the likeliest, one less than the least of those."""
        if self.centroids is None:
            return self.lm_head(hidden)
        tokens = cast(Tensor, self.token_ordering).view(self.config.num_centroids, -1)
        chosen = tokens[self.centroids(hidden).topk(self.config.centroid_top_k).indices].flatten(-2)
        weight = self.lm_head.weight
        offloaded = weight.is_meta  # its hooks bring all of it
        scores = self.lm_head(hidden).gather(-1, chosen) if offloaded else (weight[chosen] @ hidden[..., None])[..., 0]
        least = scores.amin(-1, keepdim=True) - 1
        return least.expand(*least.shape[:-1], self.choices).scatter(-1, chosen, scores)

    def _joined(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        return self.pre(torch.cat([self.embed(tokens, like=hidden), hidden], dim=-1))

    def _parts(self, features: Tensor) -> tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]:
        """Hidden states (B, A, H), and of each type of attention keys and values (B, G, A, E), of features."""
        sizes = [pair for pair in self.config.keys for _ in range(2)]
        hidden, *parts = features.split([self.config.width, *(heads * size for heads, size in sizes)], dim=-1)
        parts = [part.unflatten(-1, pair).transpose(1, 2) for part, pair in zip(parts, sizes)]
        return hidden, dict(zip(self.config.kinds, zip(parts[::2], parts[1::2])))


class GemmaAssistantForCausalLM(DraftHeadPreTrainedModel):
    """A base with an assistant of Gemma 4's kind."""

    config_class = GemmaAssistantConfig
    drafter_class = GemmaAssistantDrafter
