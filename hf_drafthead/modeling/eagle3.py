"""EAGLE-3: one layer over pairs of a token and hidden states from several depths of the base (Li et al., 2025).

Where EAGLE guesses the base's next hidden state, EAGLE-3 is trained on tokens alone and goes on from its own output:

    verified pair   x = [E(x_{t+1}); fc(s_low, s_mid, s_high)]     s_i: the base's hidden states at t, without norm
    node            x = [E(token); the layer's output at the parent]
    scores          lm_head(norm(output))                          over the draft vocabulary

Shapes: B rows, A newly verified positions, T positions, n nodes of a tree level, F feature layers, H hidden of the
drafter, D draft vocabulary, V vocabulary of the base.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import ChainKeys, DecoderLayer, windows_of
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.eagle import EagleDrafter
from hf_drafthead.modeling.layers import llama_like

PUBLISHED_VOCABULARY = 32000  # tokens that the published drafters choose among, where their base has more
# Li et al. 2025 (EAGLE-3) and the published trainer: step k of the training-time test counts 0.8 ** k, from k = 0 on.
EAGLE3_RECIPE: dict[str, Any] = {
    "next_token_weight": 0.0,
    "teacher_weight": 1.0,
    "head_decay": 0.8,
    "heads_weight": 1.25,  # head_decay counts from 1
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0.015,
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.5,
    "num_train_epochs": 40,
}


class Eagle3Config(DraftHeadConfig):
    """An EAGLE-3 head.

    The first four fields describe every published drafter; the flags name the variants of other trainers.

    Args:
        num_draft_heads: tokens ahead that the head is trained to guess, by going on from its own guesses (the
            training-time test, 7 in the paper). Trees may be deeper.
        feature_layers: hidden states of the base that are read: i is the input of layer i (0: the embeddings), without
            norm. None: 2, L // 2 and L - 3 of L layers, as published.
        draft_vocab_size: D, tokens among which it chooses; None: 32000, or the base's vocabulary if that is smaller.
        layer_config: the decoder layer: sizes, rotary positions, activation, epsilon. Its hidden size may differ from
            the base's. None: a LLaMA layer of the base's sizes.
        num_layers: decoder layers; those after the first are ordinary ones.
        norm_before_residual: add the attention's output to the normed feature, not to the feature itself.
        norm_before_fc: RMS norm over all features, side by side, before they are joined.
        fc_norm: an RMS norm for each feature layer instead.
        fc_bias: give the joining layer a bias.
        norm_output: go on from the normed output.
        own_embeddings: embeddings of its own in the place of the base's; needed where the hidden sizes differ.
        share_lm_head: project with the base's lm_head, where the hidden sizes are the same.
    """

    model_type = "drafthead_eagle3"
    any_depth = True

    num_draft_heads: int = 7
    feature_layers: list[int] | tuple[int, ...] | None = None
    layer_config: dict[str, Any] | PreTrainedConfig | None = None
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    norm_output: bool = False
    own_embeddings: bool = False
    share_lm_head: bool = False

    @classmethod
    def with_norms(cls, **fields: Any) -> "Eagle3Config":
        """EAGLE 3.1 (arXiv 2605.09992): every feature is normed by itself, and the normed output is gone on from."""
        return cls(**{"fc_norm": True, "norm_output": True, **fields})

    @property
    def family(self) -> str:
        return "eagle3.1" if self.fc_norm and self.norm_output else super().family

    @property
    def window(self) -> int | None:
        """How many positions the layers see; None for all."""
        return windows_of(self.own_layer, self.num_layers)[0]

    @property
    def eps(self) -> float:
        """Of the norms, as the layer has it."""
        return getattr(self.own_layer, "rms_norm_eps", None) or 1e-6

    def check(self) -> None:
        """Fill in what is to be as published, once the base is known, and refuse what cannot be built."""
        if self.draft_vocab_size is None and self.known_tokens:
            self.draft_vocab_size = min(PUBLISHED_VOCABULARY, self.known_tokens)
        super().check()
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both True: the features are normed together or each by itself, set one "
                "of them only."
            )
        if not isinstance(self.base_config, PreTrainedConfig):
            return
        text = self.get_text_config()
        if self.layer_config is None:
            self.layer_config = llama_like(text, layers=1, width=self.width)
        self._check_layer("an EAGLE-3 head is a decoder layer", True, same_width=False)
        kinds = (getattr(self.layer_config, "layer_types", None) or [])[: self.num_layers]
        if len(set(kinds)) > 1:
            raise ValueError(
                f"layer_config has the layer_types {list(kinds)}: give all layers of the head the same attention."
            )
        self._check_layer_width()
        layers, published = text.num_hidden_layers, []
        if self.feature_layers is None:
            if layers < 7:
                raise ValueError(
                    f"the base has {layers} layers, too few for the published feature_layers [2, L // 2, L - 3] to be "
                    f"three ascending ones: give feature_layers= yourself, such as {sorted({0, layers // 2})}."
                )
            published = [2, layers // 2, layers - 3]
        self.feature_layers = self._checked_features("EAGLE-3", published, layers)


class PairLayer(nn.Module):
    """A decoder layer whose attention reads an embedding and a feature side by side, each normed on its own.

    It takes over the parts of an ordinary layer, which must be those of a LLaMA's (ValueError).
    """

    def __init__(self, layer: nn.Module, eps: float, normed_residual: bool) -> None:
        super().__init__()
        parts = dict(layer.named_children())
        expected = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
        projections = {name for name, _ in parts.get("self_attn", layer).named_children()}
        if set(parts) != expected or not {"q_proj", "k_proj", "v_proj"} <= projections:
            raise ValueError(
                f"layer_config asks for a {type(layer).__name__}, which EAGLE-3 cannot give pairs to read: give the "
                "config of a model whose layers have the parts of a LLaMA layer, such as a LlamaConfig."
            )
        self.normed_residual = normed_residual
        self.input_layernorm, self.self_attn = parts["input_layernorm"], parts["self_attn"]
        self.post_attention_layernorm, self.mlp = parts["post_attention_layernorm"], parts["mlp"]
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new)
            self.width = old.in_features
        self.hidden_norm = nn.RMSNorm(self.width, eps=eps)

    def forward(self, x: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """(B, T, 2H), embeddings first, -> (B, T, H)."""
        embeddings, features = x.split(self.width, dim=-1)
        normed = self.hidden_norm(features)
        pair = torch.cat([self.input_layernorm(embeddings), normed], dim=-1)
        x = (normed if self.normed_residual else features) + self.self_attn(pair, **attention)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


class PairLayers(DecoderLayer):
    """Decoder layers that share positions and a cache; the first reads pairs (B, T, 2H), the others its output."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config.own_layer, window=config.window)
        self.layer = PairLayer(self.layer, config.eps, config.norm_before_residual)
        self.more = nn.ModuleList(DecoderLayer(config.own_layer).layer for _ in range(config.num_layers - 1))
        for index, layer in enumerate(self.more):
            cast(Any, layer).self_attn.layer_idx = 1 + index  # where the cache holds its keys

    def _run(self, x: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache | None = None) -> Tensor:
        for layer in (self.layer, *self.more):
            x = self._through(layer, x, positions, mask, cache)
        return x


class Eagle3Drafter(EagleDrafter):
    """One layer that runs on its own output, and its own projection to a reduced vocabulary.

    State dict: `fc.weight` (H, F*H of the base); `body.layer.*` the first layer with LLaMA's names and `hidden_norm`,
    its queries, keys and values reading (2H), embedding first; `body.more.{i}.*` further ones; `norm.weight` (H);
    `lm_head.weight` (D, H); where D is less than V, `draft_tokens` (D,) the base's id of each draft token, int64.
    By variant: no `lm_head.weight`, `fc.bias`, `input_norm.weight`, `fc_norm.{i}.weight`, `embed_tokens.weight` (V, H).
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        Drafter.__init__(self, config)
        text, layer = config.get_text_config(), config.own_layer
        width, eps, count = layer.hidden_size, config.eps, len(config.feature_layers or ())
        self.reads = tuple(config.feature_layers or ())
        self.layers = config.num_layers
        self.input_norm = nn.RMSNorm(count * text.hidden_size, eps=eps) if config.norm_before_fc else nn.Identity()
        own_norms = count if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(nn.RMSNorm(text.hidden_size, eps=eps) for _ in range(own_norms))
        self.fc = nn.Linear(count * text.hidden_size, width, bias=config.fc_bias)
        self.body = PairLayers(config)
        self.norm = nn.RMSNorm(width, eps=eps)
        if not config.share_lm_head:
            self.lm_head = nn.Linear(width, self.choices, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(text.vocab_size, width)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """The training-time test (section 3.2): entry k is guess k of chains that begin at every position.

        A chain reads the true tokens, but in the place of features its own output of the entry before.
        """
        chains = ChainKeys({})
        states, x = [], self.reduce(features)
        for step in range(self.config.num_draft_heads):
            pair = self._joined(x, input_ids.roll(-1 - step, dims=1))
            states.append(self.body.over_chains(chains, pair, step, attention_mask))
            x = self.feed_back(states[-1])
        return states

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., D) over the draft vocabulary from an output (..., H) of the layer."""
        normed = self.norm(hidden)
        return self.base_logits(normed) if self.lm_head is None else self.lm_head(normed)

    def reduce(self, features: Tensor) -> Tensor:
        if self.fc_norm:
            parts = features.chunk(len(self.reads), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(self.input_norm(features))

    def feed_back(self, out: Tensor) -> Tensor:
        return self.norm(out) if self.config.norm_output else out

    def _joined(self, features: Tensor, tokens: Tensor) -> Tensor:
        return torch.cat([self.embed(tokens, like=features), features], dim=-1)


class Eagle3ForCausalLM(DraftHeadPreTrainedModel):
    """A base with an EAGLE-3 head."""

    config_class = Eagle3Config
    drafter_class = Eagle3Drafter
