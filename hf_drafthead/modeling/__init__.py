"""One file per family of draft heads; importing this registers them with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_drafthead.modeling.amphista import AmphistaConfig, AmphistaForCausalLM
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.eagle import EagleConfig, EagleForCausalLM
from hf_drafthead.modeling.hydra import HydraConfig, HydraForCausalLM
from hf_drafthead.modeling.medusa import MedusaConfig, MedusaForCausalLM

MODEL_CLASSES: tuple[type[DraftHeadPreTrainedModel], ...] = (
    MedusaForCausalLM,
    HydraForCausalLM,
    AmphistaForCausalLM,
    EagleForCausalLM,
)

for _model_class in MODEL_CLASSES:
    AutoConfig.register(_model_class.config_class.model_type, _model_class.config_class, exist_ok=True)
    AutoModel.register(_model_class.config_class, _model_class, exist_ok=True)
    AutoModelForCausalLM.register(_model_class.config_class, _model_class, exist_ok=True)

__all__ = [
    "MODEL_CLASSES",
    "AmphistaConfig",
    "AmphistaForCausalLM",
    "DraftHeadConfig",
    "DraftHeadPreTrainedModel",
    "Drafter",
    "EagleConfig",
    "EagleForCausalLM",
    "HydraConfig",
    "HydraForCausalLM",
    "MedusaConfig",
    "MedusaForCausalLM",
]
