"""What differs between the supported releases of transformers: no other module asks for a version or names a cache.

Release 5.24 renamed the cache to `cache` in every forward, in what `generate` hands to a custom loop, and in all
outputs; it was `past_key_values` before, and `cache_params` or `layer_past` in some models. A forward of 5.24 still
takes the old names, with a warning, until 5.40. Layers of some models, and models from the Hub with code of their own,
keep a name that their release had.

Shapes: B rows, P prompt tokens.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMixin

OLDEST, NEWEST, BEYOND = (
    "5.17.0",
    "5.24.0",
    "6",
)  # the first two were tested, and what lies between; the last is too new
CAPTURING = "transformers.utils.output_capturing"  # the module whose hooks collect hidden states
HOOKED = "_output_capturing_hooks_installed"  # the attribute by which transformers marks such a model
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past", "past_key_value")


def numbers(version: str) -> list[int]:
    """The three numbers of a version, by which two are compared.

    >>> numbers("5.25.0.dev0")
    [5, 25, 0]
    """
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_installed() -> None:
    """Refuse a transformers for which this package is not made.

    Raises:
        ImportError: the release is too old or too new.
    """
    installed = sys.modules["transformers"].__version__
    if not numbers(OLDEST) <= numbers(installed) < numbers(BEYOND):
        raise ImportError(
            f"transformers {installed} is installed, and draft heads need a release from {OLDEST} on and below "
            f"{BEYOND}: pip install 'transformers>={OLDEST},<{BEYOND}'."
        )


check_installed()


def untested() -> str:
    """For the end of a reason that was found by running: that transformers is newer than any tested; or nothing."""
    installed = sys.modules["transformers"].__version__
    if numbers(installed) <= numbers(NEWEST):
        return ""
    return f" (transformers {installed} is installed, which is newer than {NEWEST}, the newest that was tested)"


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name that a forward has for its cache; None where it names none.

    A release that renames it again still annotates it as a `Cache`.

    >>> cache_argument(lambda input_ids, past_key_values=None: None)
    'past_key_values'
    """
    arguments = inspect.signature(forward).parameters
    annotated = (name for name, argument in arguments.items() if _is_cache(argument.annotation))
    return next((name for name in CACHE_NAMES if name in arguments), next(annotated, None))


def _is_cache(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return text.partition("|")[0].strip().rpartition(".")[2] == Cache.__name__


# In what `generate` prepares, in outputs, and in forwards that name no cache because they hand on what they are given.
CACHE = str(cache_argument(GenerationMixin.prepare_inputs_for_generation))
# What a step makes for its nodes by itself, or for the prompt alone, or what changes nothing.
INPUTS_OF_A_STEP = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE}
INPUTS_OF_A_STEP |= {"use_cache", "logits_to_keep", "cache_position"}


def with_cache(name: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Model inputs with their cache under another name.

    Raises:
        TypeError: they hold it under two names.

    >>> with_cache("layer_past", {"use_cache": True, "past_key_values": "a cache"})
    {'use_cache': True, 'layer_past': 'a cache'}
    """
    names = {CACHE, *CACHE_NAMES}
    caches = {key: inputs[key] for key in names if inputs.get(key) is not None}
    if len(caches) > 1:
        raise TypeError(
            f"the cache is given under {len(caches)} names, {' and '.join(sorted(caches))}: give {name} alone."
        )
    rest = {key: value for key, value in inputs.items() if key not in names}
    return {**rest, name: next(iter(caches.values()))} if caches else rest


def holds_nothing(layer: CacheLayerMixin) -> bool:
    """Whether a layer of an ordinary cache only stands for one that writes none, as it reads an earlier layer's."""
    return type(layer).__name__ == "DummyLayer"  # since 5.22; before, there is no layer for these


def mask_length(config: GenerationConfig, mask: torch.Tensor | None) -> int | None:
    """Positions of the prompt and of the past that a call's mask (B, length) tells of; None where nothing does.

    A mask of ones alone does not reach a loop since 5.18: its length is left in the call's config.
    """
    return getattr(config, "_mask_length", None) if mask is None else mask.shape[1]


def prompt_inputs(
    base: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, inputs: dict[str, Any], past: Cache
) -> dict[str, Any]:
    """The base's own arguments for the prompt; where a cache holds its beginning, only for the rest.

    As in transformers, `input_ids` may be the whole text or only its new part; the attention mask tells which.

    Args:
        inputs: of a call, without the cache.
    """
    past_length, rest = past.get_seq_length(), None
    if inputs.get("inputs_embeds") is not None:
        rest = inputs["inputs_embeds"].shape[1] - past_length
    elif past_length and mask_length(config, inputs.get("attention_mask")) == input_ids.shape[1]:
        rest = input_ids.shape[1] - past_length
    return base.prepare_inputs_for_generation(
        input_ids, next_sequence_length=rest, is_first_iteration=True, **{CACHE: past}, **inputs
    )


def next_inputs(
    base: PreTrainedModel, text: torch.Tensor, outputs: Any, inputs: dict[str, Any], new_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base's own arguments for the step behind another, as `generate` makes them.

    Args:
        text: (B, P + new_tokens) with the tokens of this step.
        outputs, inputs: of the prompt, or of the step before; the inputs as this function returned them.
        new_tokens: of this step.

    Returns:
        The arguments, and the inputs of the call behind this step.
    """
    later = base._update_model_kwargs_for_generation(outputs, dict(inputs), num_new_tokens=new_tokens)
    return base.prepare_inputs_for_generation(text, next_sequence_length=new_tokens, **later), later


class _Installed(int):
    """1 in place of transformers' mark of a model that has its hooks; pickled as False, so that a copy gets its own.

    A deep copy keeps its hooks, as modules that are copied do.
    """

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return bool, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Installed:
        return self


class _CapturingHook(functools.partial):
    """One of transformers' hooks that collect hidden states, a local function; pickled as one that does nothing."""

    def __new__(cls, hook: Callable[..., Any]) -> _CapturingHook:
        made = super().__new__(cls, hook)
        made.__module__ = CAPTURING  # by which others know that it is not the user's own
        return made

    def __reduce__(self) -> tuple[type, tuple[Any]]:
        return _CapturingHook, (_nothing,)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CapturingHook:
        return self


def _nothing(*args: Any) -> None:
    """What is left of a hook in a model that was pickled: transformers installs new ones there."""


def keep_picklable(model: nn.Module) -> None:
    """Make a model that has collected hidden states fit for pickle again, which transformers' hooks are not."""
    for module in model.modules():
        if module.__dict__.get(HOOKED) is True:
            setattr(module, HOOKED, _Installed(True))
        for number, hook in module._forward_hooks.items():
            ours = isinstance(hook, _CapturingHook)
            if getattr(hook, "__module__", None) == CAPTURING and not ours and "<locals>" in hook.__qualname__:
                module._forward_hooks[number] = _CapturingHook(hook)
