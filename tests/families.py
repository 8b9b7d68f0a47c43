"""The one list of families that every law runs over: a new family adds one line and inherits the specification."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hf_drafthead.modeling import (
    AmphistaForCausalLM,
    DraftHeadPreTrainedModel,
    EagleForCausalLM,
    HydraForCausalLM,
    MedusaForCausalLM,
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
        return model.eval()


FAMILIES = [
    Family("medusa", MedusaForCausalLM),
    Family("medusa-shared", MedusaForCausalLM, {"share_lm_head": True, "num_layers": 2}),
    Family("hydra", HydraForCausalLM),
    Family("hydra++", HydraForCausalLM, {"prefix_layer": True, "num_layers": 4}),
    Family("amphista", AmphistaForCausalLM),
    Family("amphista-alpha", AmphistaForCausalLM, {"num_auto_embedding_layers": 2, "lm_head_rank": 16}),
    Family("eagle", EagleForCausalLM),
]
