"""A family by its name: fresh heads on a base."""

import os
from typing import Any

from torch import nn

from hf_drafthead.modeling import (
    AmphistaConfig,
    AmphistaForCausalLM,
    DraftHeadConfig,
    DraftHeadPreTrainedModel,
    EagleConfig,
    EagleForCausalLM,
    HydraConfig,
    HydraForCausalLM,
    MedusaConfig,
    MedusaForCausalLM,
)
from hf_drafthead.training.arguments import recipe

CLASSES: dict[str, type[DraftHeadPreTrainedModel]] = {
    "medusa": MedusaForCausalLM,
    "hydra": HydraForCausalLM,
    "hydra++": HydraForCausalLM,
    "amphista": AmphistaForCausalLM,
    "amphista-alpha": AmphistaForCausalLM,
    "eagle": EagleForCausalLM,
}


def fresh_heads(family: str, base: str | os.PathLike | nn.Module, **arguments: Any) -> DraftHeadPreTrainedModel:
    """Untrained heads of a family on a base.

    Args:
        family: one of "medusa", "hydra", "hydra++", "amphista", "amphista-alpha", "eagle".
        base: id, path or loaded model, see `from_base`.
        arguments: config fields and whatever else `from_base` takes.

    Raises:
        ValueError: no such family, or a field that does not fit.
    """
    recipe(family)  # which knows the families
    return CLASSES[family].from_base(base, config=_config(family), **arguments)


def _config(family: str) -> DraftHeadConfig:
    configs: dict[str, Any] = {
        "medusa": MedusaConfig,
        "hydra": HydraConfig,
        "hydra++": HydraConfig.plus_plus,
        "amphista": AmphistaConfig,
        "amphista-alpha": AmphistaConfig.alpha,
        "eagle": EagleConfig,
    }
    return configs[family]()
