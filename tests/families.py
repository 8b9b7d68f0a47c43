"""The families that every law runs over: those of the package's table, so that a new one inherits the specification."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel, MedusaForCausalLM, families


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
        return model.eval()


def own_fields(config: DraftHeadConfig) -> dict[str, Any]:
    """What distinguishes a family's config from its class's defaults."""
    plain = type(config)()
    values = {name: getattr(config, name) for name in config.heads_fields()}
    return {name: value for name, value in values.items() if value != getattr(plain, name)}


# What the tests want otherwise than the papers: no chance in training, and parts that are not used by default.
VARIED: dict[str, dict[str, Any]] = {"hydra++": {"dropout": 0.0}, "amphista-alpha": {"lm_head_rank": 16}}
FAMILIES = [
    Family(name, family.model_class, own_fields(family.config()) | VARIED.get(name, {}))
    for name, family in families.FAMILIES.items()
]
FAMILIES.insert(1, Family("medusa-shared", MedusaForCausalLM, {"share_lm_head": True, "num_layers": 2}))
