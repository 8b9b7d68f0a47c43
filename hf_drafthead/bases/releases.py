"""What differs between the supported releases of transformers, or may: no other module asks for a version, or names a
cache. What `transformers` has at its top is taken from there; what stands in its modules others take from here.

Release 5.24 renamed the cache to `cache` in every forward, in what `generate` hands to a custom loop, and in all
outputs; it was `past_key_values` before, and `cache_params` or `layer_past` in some models. A forward of 5.24 still
takes the old names, with a warning, until 5.40. Layers of some models, and models from the Hub with code of their own,
keep a name that their release had.

Shapes: B rows, P prompt tokens.
"""

# ruff: noqa: E402, F401 - other releases lack some of these names, and other modules take them from here
from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from hf_drafthead.bases.errors import Unsupported

OLDEST, NEWEST, BEYOND = "5.17.0", "5.24.0", "6"  # from one to the other was tested; the last is too new


def numbers(version: str) -> list[int]:
    """The three numbers of a version, by which two are compared.

    >>> numbers("5.25.0.dev0")
    [5, 25, 0]
    """
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def check_installed() -> None:
    """Refuse, by an ImportError, a transformers that is too old or too new for this package."""
    installed = sys.modules["transformers"].__version__
    if not numbers(OLDEST) <= numbers(installed) < numbers(BEYOND):
        raise ImportError(
            f"transformers {installed} is installed, and draft heads need a release from {OLDEST} on and below "
            f"{BEYOND}: pip install 'transformers>={OLDEST},<{BEYOND}'."
        )


check_installed()

from transformers.activations import ACT2FN
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMixin,
    GenerationMode,
    StopStringCriteria,
)
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.streamers import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

CAPTURING = "transformers.utils.output_capturing"  # the module whose hooks collect hidden states
HOOKED = "_output_capturing_hooks_installed"  # the attribute by which transformers marks such a model
STREAMERS = (TextStreamer, TextIteratorStreamer, AsyncTextIteratorStreamer)  # which draw no random numbers
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "layer_past", "past_key_value")


# They look at nothing but a row's scores.
SCORES_ONLY = (
    processors.TemperatureLogitsWarper,
    processors.TopPLogitsWarper,
    processors.TopKLogitsWarper,
    processors.TopHLogitsWarper,
    processors.MinPLogitsWarper,
    processors.TypicalLogitsWarper,
    processors.EpsilonLogitsWarper,
    processors.EtaLogitsWarper,
    processors.InfNanRemoveLogitsProcessor,
    processors.LogitNormalization,
    processors.SuppressTokensLogitsProcessor,
)
# They look at a row's own prefix and scores.
ROW_BY_ROW = (
    *SCORES_ONLY,
    processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor,
    processors.RepetitionPenaltyLogitsProcessor,
    processors.NoRepeatNGramLogitsProcessor,
    processors.SequenceBiasLogitsProcessor,
    processors.NoBadWordsLogitsProcessor,
    processors.ForcedBOSTokenLogitsProcessor,
    processors.ForcedEOSTokenLogitsProcessor,
    processors.ExponentialDecayLengthPenalty,
    processors.SuppressTokensAtBeginLogitsProcessor,
)
CRITERIA_ROW_BY_ROW = (
    criteria.MaxLengthCriteria,
    criteria.MaxTimeCriteria,
    criteria.StopStringCriteria,
    criteria.EosTokenCriteria,
)
CRITERIA_ON_DEVICE = (criteria.MaxLengthCriteria, criteria.EosTokenCriteria)


# Functions of their modules by which layers without keys compute, as the packages of kernels name them.
CONVOLVES, CONVOLVES_ONE = "causal_conv1d_fn", "causal_conv1d_update"
DELTA_RULES = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"  # of several tokens, of one
BY_CHANNEL = "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"
SCANS, SCANS_ONE, SELECTIVE_SCAN = "mamba2_chunk_scan", "mamba2_selective_state_update", "mamba_selective_scan"
COMPUTES_WITHOUT_KEYS = {CONVOLVES, CONVOLVES_ONE, *DELTA_RULES, *BY_CHANNEL, SCANS, SCANS_ONE}
WRITES_INPUTS, WRITES_STATE = "update_conv_state", "update_recurrent_state"  # of a cache


def limits_of(criteria_list: Iterable[Any]) -> tuple[int | None, list[int]]:
    """The longest length that stopping criteria allow, None where none asks for one; and the tokens that end a row."""
    lengths, ends = [], set[int]()
    for each in criteria_list:
        if isinstance(each, criteria.MaxLengthCriteria):
            lengths.append(each.max_length)
        elif isinstance(each, criteria.EosTokenCriteria):
            ends.update(each.eos_token_id.flatten().tolist())
    return math.ceil(min(lengths)) if lengths else None, sorted(ends)


def temperature_of(processor_list: Iterable[Any]) -> float:
    """The temperature with which processors sample."""
    warpers = (each for each in processor_list if isinstance(each, processors.TemperatureLogitsWarper))
    return math.prod(warper.temperature for warper in warpers)


def untested() -> str:
    """For the end of a reason that was found by running: that transformers is newer than any tested; or nothing."""
    installed = sys.modules["transformers"].__version__
    if numbers(installed) <= numbers(NEWEST):
        return ""
    return f" (transformers {installed} is installed, which is newer than {NEWEST}, the newest that was tested)"


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name that a forward has for its cache, or what it annotates as a `Cache`; None where it names none."""
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
    """Model inputs with their cache under another name; a TypeError if they hold it under two.

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


def can_load(past: Cache) -> bool:
    """Whether `SlotCache.load` understands this cache: plain or sliding dynamic layers, nothing offloaded."""
    if past.offloading:
        return False
    states = [layer for layer in past.layers if isinstance(layer, LinearAttentionLayer)]
    if len(states) == len(past.layers) and not any(isinstance(layer, CacheLayerMixin) for layer in states):
        if any(any(layer.has_previous_state.values()) for layer in states):
            return False  # of how many positions none knows
    return all(holds_nothing(layer) or _keeps(layer) for layer in past.layers)


def _keeps(layer: CacheLayerMixin | LinearAttentionCacheLayerMixin) -> bool:
    """Whether a layer keeps keys that grow, of a window or of all positions, or a state, or both."""
    classes = (DynamicLayer, DynamicSlidingWindowLayer)
    if not isinstance(layer, LinearAttentionLayer):
        return type(layer) in classes
    if layer.record_past:
        return False
    return not isinstance(layer, CacheLayerMixin) or any(issubclass(kind, classes) for kind in type(layer).__bases__)


def rows_of(past: Cache) -> int | None:
    """Rows that an ordinary cache holds; None where nothing is in it yet."""
    for layer in past.layers:
        tensors = [getattr(layer, "keys", None)] if getattr(layer, "is_initialized", False) else []
        for states in (getattr(layer, "conv_states", None) or {}, getattr(layer, "recurrent_states", None) or {}):
            tensors += states.values()
        for tensor in tensors:
            if tensor is not None and tensor.numel():
                return len(tensor)
    return None


def past_length(past: Cache) -> int:
    """Positions that an ordinary cache holds; 0 where no layer keeps keys, for then none knows."""
    return int(past.get_seq_length()) if any(isinstance(layer, CacheLayerMixin) for layer in past.layers) else 0


def writing_layers(config: PreTrainedConfig) -> int:
    """How many of a base's layers, the first ones, write keys and values; the others read those of earlier layers."""
    layers = DynamicCache(config=config).layers
    last = next((number for number, layer in enumerate(reversed(layers)) if not holds_nothing(layer)), 0)
    return (len(layers) or config.num_hidden_layers) - last


def check_length(config, longest: int, nodes: int = 0) -> None:
    """Refuse lengths at which the base computes positions in another way than at shorter ones (Unsupported).

    Its rotary scaling looks at the sequence length, and `longest` positions of the text and a tree behind it reach
    beyond it; or attention is divided into chunks, scaled or thinned out from a position on, which the nodes may reach.
    """
    keeps = getattr(config, "keep_window_size", None)  # of Doge: from there on it keeps the keys of the highest scores
    if keeps is not None and longest + nodes > keeps:
        raise Unsupported(f"the base's attention chooses keys by score beyond {keeps} positions")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        scaled = [config.floor_scale - 1] if getattr(config, "attn_temperature_tuning", False) else []
        limit = min([config.attention_chunk_size, *scaled])
        if longest + nodes > limit:
            raise Unsupported(f"the base attends in chunks, and the text may reach beyond the first {limit} positions")
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for scaling in scalings:
        original: int = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        if scaling.get("rope_type") in ("dynamic", "longrope") and longest > original:
            raise Unsupported(
                f"the base's {scaling['rope_type']} rotary scaling changes with the length beyond {original} positions"
            )


def position_table(config) -> int | None:
    """How many positions a base without rotary frequencies can embed; None where there is no such table."""
    if getattr(config, "rope_parameters", None):
        return None
    return getattr(config, "max_position_embeddings", None)


def table_of_positions(base: Any) -> int | None:
    """How many positions a base has that embeds them by a table; None for others, which go on behind their window."""
    positions = position_table(base.config.get_text_config(decoder=True))
    tables = {module for module in base.modules() if isinstance(module, nn.Embedding)} - {base.get_input_embeddings()}
    sizes = range(positions or 0, (positions or 0) + 3)  # OPT's begins with two that stand for none
    return positions if any(table.num_embeddings in sizes for table in tables) else None


def mask_length(config: GenerationConfig, mask: torch.Tensor | None) -> int | None:
    """Positions of the prompt and of the past that a call's mask (B, length) tells of; None where nothing does.

    A mask of ones alone does not reach a loop since 5.18: its length is left in the call's config.
    """
    return getattr(config, "_mask_length", None) if mask is None else mask.shape[1]


def prompt_inputs(
    base: PreTrainedModel, input_ids: torch.Tensor, config: GenerationConfig, inputs: dict[str, Any], past: Cache
) -> dict[str, Any]:
    """The base's own arguments for the prompt; where a cache holds its beginning, only for the rest.

    As in transformers, `input_ids` may be the whole text or only its new part; the attention mask tells which. `inputs`
    are those of a call, without the cache.
    """
    past_length, rest = past.get_seq_length(), None
    if inputs.get("inputs_embeds") is not None:
        rest = inputs["inputs_embeds"].shape[1] - past_length
    elif past_length and mask_length(config, inputs.get("attention_mask")) == input_ids.shape[1]:
        rest = input_ids.shape[1] - past_length
    return base.prepare_inputs_for_generation(
        input_ids, next_sequence_length=rest, is_first_iteration=True, **{CACHE: past}, **inputs
    )


@dataclass(frozen=True)
class PromptInputs:
    """What the base has prepared for a prompt of a call, and how its rows lie in the cache.

    input_ids: (B, P); arguments: of the prompt's forward; call: the inputs of the call, without the cache;
    position_shift, visible: as the steps have them.
    """

    input_ids: torch.Tensor
    arguments: dict[str, Any]
    call: dict[str, Any]
    position_shift: torch.Tensor
    visible: torch.Tensor | None

    @property
    def unusual(self) -> tuple[str, ...]:
        """Names of the inputs that a step does not make by itself; positions of several axes are such."""
        prepared = {name for args in (self.arguments, self.call) for name, value in args.items() if value is not None}
        positions = self.arguments.get("position_ids")
        several = {"position_ids"} if positions is not None and positions.dim() > 2 else set()
        return tuple(sorted(prepared - INPUTS_OF_A_STEP | several))

    @property
    def ends_on_several_places(self) -> bool:
        """Whether a row ends in an image, where its axes (time, height, width, the last three) have come to differ."""
        positions = self.arguments.get("position_ids")
        if positions is None or positions.dim() < 3:
            return False
        last = positions[-3:, :, -1]
        return bool((last != last[-1]).any())


def next_inputs(
    base: PreTrainedModel, text: torch.Tensor, outputs: Any, inputs: dict[str, Any], new_tokens: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The base's own arguments for the step behind another, as `generate` makes them, and the inputs of the call behind
    it.

    The text (B, P + new_tokens) ends with the tokens of this step; outputs and inputs are of the prompt, or of the step
    before, the inputs as this function returned them.
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
