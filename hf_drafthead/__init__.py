"""Draft heads as ordinary Hugging Face models: the base model's own text, in a fraction of its forward passes.

Importing this package registers its model families with `AutoConfig`, `AutoModel` and `AutoModelForCausalLM`.
"""

from typing import TYPE_CHECKING

from hf_drafthead.formats import convert_checkpoint, export_checkpoint
from hf_drafthead.generation import DraftHeadGenerateOutput, DraftTree
from hf_drafthead.modeling import DraftHeadConfig, DraftHeadPreTrainedModel
from hf_drafthead.modeling.families import CLASSES

if TYPE_CHECKING:  # at run time these are the classes of the table
    from hf_drafthead.modeling.families import *  # noqa: F403

__version__ = "0.1.0"

globals().update(CLASSES)
__all__ = [
    "DraftHeadConfig",
    "DraftHeadGenerateOutput",
    "DraftHeadPreTrainedModel",
    "DraftTree",
    "convert_checkpoint",
    "export_checkpoint",
    *CLASSES,
]
