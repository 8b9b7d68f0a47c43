"""One file per family of draft heads; importing this registers them with transformers' Auto classes."""

from typing import TYPE_CHECKING

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.families import BY_MODEL_TYPE, CLASSES, FAMILIES, MODEL_CLASSES, Family, from_base

if TYPE_CHECKING:  # at run time these are the classes of the table
    from hf_drafthead.modeling.families import *  # noqa: F403

for _model_type, _model_class in BY_MODEL_TYPE.items():
    AutoConfig.register(_model_type, _model_class.config_class, exist_ok=True)
    AutoModel.register(_model_class.config_class, _model_class, exist_ok=True)
    AutoModelForCausalLM.register(_model_class.config_class, _model_class, exist_ok=True)

globals().update(CLASSES)
__all__ = ["FAMILIES", "MODEL_CLASSES", "DraftHeadConfig", "DraftHeadPreTrainedModel", "Drafter", "Family", "from_base"]
__all__ += list(CLASSES)
