"""Draft heads as ordinary Hugging Face models: the base model's own text, in a fraction of its forward passes.

Importing this package registers its model families with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from hf_drafthead.generation import DraftHeadGenerateOutput, DraftTree
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

__version__ = "0.1.0"

__all__ = [
    "AmphistaConfig",
    "AmphistaForCausalLM",
    "DraftHeadConfig",
    "DraftHeadGenerateOutput",
    "DraftHeadPreTrainedModel",
    "DraftTree",
    "EagleConfig",
    "EagleForCausalLM",
    "HydraConfig",
    "HydraForCausalLM",
    "MedusaConfig",
    "MedusaForCausalLM",
    "__version__",
]
