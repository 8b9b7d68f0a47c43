"""Which draft tree: rank paths counted on the base's own text, trees grown from them and timed; a choice."""

from hf_drafthead.trees.choice import choose as choose
