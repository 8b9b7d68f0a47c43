"""Draft trees, the walks and the decoding loop: tensors only, no head family."""

from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.state import DraftHeadGenerateOutput, Guesses, StepRecord
from hf_drafthead.generation.tree import DraftTree, published_trees

__all__ = [
    "DraftHeadGenerateOutput",
    "DraftHeadGenerationMixin",
    "DraftTree",
    "Guesses",
    "StepRecord",
    "TextIndex",
    "published_trees",
]
