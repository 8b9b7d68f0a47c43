"""How a base is read: its forwards, the cache, the layers that keep a state, and the probe whether trees can go."""

from hf_drafthead.bases import releases as releases  # first: it refuses a transformers that is too old or too new
