"""Many requests at once: rows that join and leave while the tree goes on, behind transformers' own calls for that."""

from hf_drafthead.batching.calls import generate_batch, running_manager
from hf_drafthead.batching.manager import Manager

__all__ = ["Manager", "generate_batch", "running_manager"]
