"""The families that every law runs over: those of the package's table that have heads, so that a new one inherits the
specification."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig, Qwen3Config

from hf_drafthead.bases.releases import CACHE, cache_argument
from hf_drafthead.modeling import (
    DFlash2ForCausalLM,
    DFlashForCausalLM,
    DraftHeadConfig,
    DraftHeadPreTrainedModel,
    Eagle3ForCausalLM,
    MedusaForCausalLM,
    MtpForCausalLM,
    families,
)


@dataclass(frozen=True)
class Family:
    """A family as the tests build it.

    Attributes:
        name: test id.
        model_class: its model class.
        fields: config fields that make it this family.
    """

    name: str
    model_class: type[DraftHeadPreTrainedModel]
    fields: dict[str, Any] = field(default_factory=dict)

    def build(self, base: nn.Module, *, seed: int = 0, **overrides: Any) -> DraftHeadPreTrainedModel:
        """This family's model on a live base, with random weights: no zero, no copy of the lm_head is left."""
        model = self.model_class.from_base(base, **{**self.fields, **overrides})
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.drafter.named_parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                if "norm" in name and parameter.dim() == 1:
                    parameter.copy_(1.0 + 0.2 * noise)
                else:
                    parameter.copy_(noise * max(parameter.shape[-1], 8) ** -0.5 * 1.5)
            if (own := model.drafter.draft_tokens) is not None:
                vocabulary = model.config.get_text_config().vocab_size
                own.copy_(torch.randperm(vocabulary, generator=generator)[: len(own)])
        return model.eval()


def features_of(model: DraftHeadPreTrainedModel, input_ids: torch.Tensor) -> torch.Tensor:
    """(B, T, F*H) what the drafter reads of the base's hidden states over texts, by transformers' own numbers."""
    with torch.no_grad():
        hidden = model.base(input_ids, output_hidden_states=True, use_cache=False).hidden_states
    hidden = [states.mean(0) if states.dim() == 4 else states for states in hidden]  # of several streams
    kinds = [kind for kind in model.drafter.reads if isinstance(kind, str)]
    keys = keys_of(model.base, input_ids, kinds) if kinds else []
    layers = [layer for layer in model.drafter.reads or (-1,) if isinstance(layer, int)]
    return torch.cat([*(hidden[layer] for layer in layers), *keys], dim=-1)


def keys_of(base: nn.Module, input_ids: torch.Tensor, kinds: list[str]) -> list[torch.Tensor]:
    """Keys and values (B, T, G*E) of the last layer of each type of attention that writes some, by transformers'."""
    with torch.no_grad():
        cache = DynamicCache()  # without windows: of every layer all keys
        base(input_ids, use_cache=True, **{cache_argument(base.forward) or CACHE: cache})
    types = getattr(base.config.get_text_config(), "layer_types", None) or ["full_attention"] * len(cache.layers)
    last = dict(zip(types, cache.layers))
    layers = [last.get(kind, cache.layers[-1]) for kind in kinds]
    return [part.transpose(1, 2).flatten(2) for layer in layers for part in (layer.keys, layer.values)]


def feature_size(drafter: Any, width: int = 32) -> int:
    """Numbers at a position of what a drafter reads of a base of this width."""
    return width * sum(isinstance(layer, int) for layer in drafter.reads) + drafter.key_width


# Nearly every flag set, a layer more, and a layer of another width than the base.
EAGLE3_VARIANTS = {
    "num_draft_heads": 2,
    "feature_layers": [1],
    "layer_config": LlamaConfig(
        hidden_size=24,
        intermediate_size=40,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    ),
    "num_layers": 2,
    "norm_before_residual": True,
    "fc_norm": True,
    "fc_bias": True,
    "norm_output": True,
    "own_embeddings": True,
}
# Several modules, and all else that some base has otherwise.
MTP_VARIANTS = {
    "num_modules": 3,
    "hidden_first": True,
    "output_norm": True,
    "feed_normed": False,
    "own_lm_heads": True,
    "own_embeddings": True,
}
# A layer that slides and whose slots see those before them, one that does not, narrower than the base; all of a path.
DSPARK_VARIANTS = {
    "num_draft_heads": 3,
    "num_layers": 2,
    "layer_config": Qwen3Config(
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "feature_layers": [1],
    "mask_token_id": 5,
    "causal_layers": [0],
    "own_embeddings": True,
    "share_lm_head": False,
    "markov_rank": 6,
    "markov_head_type": "rnn",
    "confidence_head": True,
    "confidence_with_markov": False,
}
# Windows that count from every slot, more taps, logits and embeddings that are scaled, fewer tokens.
DFLASH2_VARIANTS = {
    name: value for name, value in DSPARK_VARIANTS.items() if "markov" not in name and "confid" not in name
}
DFLASH2_VARIANTS |= {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 7}
DFLASH2_VARIANTS |= {"input_embedding_scale": 1.7, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
DFLASH2_VARIANTS |= {"share_lm_head": False, "draft_vocab_size": 50, "sample_from_anchor": True}


def own_fields(config: DraftHeadConfig) -> dict[str, Any]:
    """What distinguishes a family's config from its class's defaults."""
    plain = type(config)()
    values = {name: getattr(config, name) for name in config.heads_fields()}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


# What the tests want otherwise than the papers: no chance in training, and parts that are not used by default.
VARIED: dict[str, dict[str, Any]] = {
    "hydra++": {"dropout": 0.0, "draft_vocab_size": 50},
    "amphista-alpha": {"draft_vocab_size": 50},
    "eagle3": {"num_draft_heads": 3, "feature_layers": [0, 1], "draft_vocab_size": 50},
    "eagle3.1": {"num_draft_heads": 3, "feature_layers": [0, 1], "draft_vocab_size": 50},
    "peagle": {"num_draft_heads": 3, "feature_layers": [0, 1], "draft_vocab_size": 50, "num_layers": 2},
    "mtp": {"draft_vocab_size": 50},
    "gemma4-assistant": {"num_draft_heads": 3, "num_layers": 2},
    "dflash": {"num_draft_heads": 3, "num_layers": 1},
    "dflash2": {"num_draft_heads": 3, "num_layers": 1, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 9},
    "dspark": {"num_draft_heads": 3, "num_layers": 1, "markov_rank": 6, "draft_vocab_size": 50},
}
FAMILIES = [
    Family(name, family.model_class, own_fields(family.config()) | VARIED.get(name, {}))
    for name, family in families.TRAINED.items()
]
FAMILIES.insert(
    1, Family("medusa-shared", MedusaForCausalLM, {"share_lm_head": True, "num_layers": 2, "draft_vocab_size": 50})
)
FAMILIES.append(Family("eagle3-variants", Eagle3ForCausalLM, EAGLE3_VARIANTS))
FAMILIES.append(Family("mtp-modules", MtpForCausalLM, MTP_VARIANTS))
FAMILIES.append(Family("dspark-variants", DFlashForCausalLM, DSPARK_VARIANTS))
FAMILIES.append(Family("dflash2-variants", DFlash2ForCausalLM, DFLASH2_VARIANTS))
