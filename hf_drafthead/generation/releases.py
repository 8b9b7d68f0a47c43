"""What differs between the supported releases of transformers: no other module asks for a version or names a cache.

Release 5.24 renamed the cache to `cache` in every forward, in what `generate` hands to a custom loop, and in all
outputs; it was `past_key_values` before, and `cache_params` or `layer_past` in some models. A forward of 5.24 still
takes the old names, with a warning, until 5.40. Layers of some models, and models from the Hub with code of their own,
keep a name that their release had.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.generation import GenerationMixin

CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past", "past_key_value")


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name that a forward has for its cache; None where it names none.

    >>> cache_argument(lambda input_ids, past_key_values=None: None)
    'past_key_values'
    """
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in names), None)


# In what `generate` prepares, in outputs, and in forwards that name no cache because they hand on what they are given.
CACHE = str(cache_argument(GenerationMixin.prepare_inputs_for_generation))


def with_cache(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Model inputs with their cache under another name.

    Raises:
        TypeError: they hold it under two names.

    >>> with_cache("layer_past", {"use_cache": True, "past_key_values": "a cache"})
    {'use_cache': True, 'layer_past': 'a cache'}
    """
    caches = {key: inputs[key] for key in CACHE_NAMES if inputs.get(key) is not None}
    if len(caches) > 1:
        raise TypeError(f"the cache is given under {len(caches)} names, {' and '.join(caches)}: give {name} alone.")
    rest = {key: value for key, value in inputs.items() if key not in CACHE_NAMES}
    return {**rest, name: next(iter(caches.values()))} if caches else rest
