"""Draft trees, the tree cache, the walk and the decoding loop: tensors only, no head family."""

from hf_drafthead.generation.cache import TreeCache
from hf_drafthead.generation.decoding import DraftHeadGenerateOutput
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin
from hf_drafthead.generation.tree import DraftTree, published_trees

__all__ = ["DraftHeadGenerateOutput", "DraftHeadGenerationMixin", "DraftTree", "TreeCache", "published_trees"]
