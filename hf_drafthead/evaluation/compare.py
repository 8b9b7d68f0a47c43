"""The decoding methods that are measured: the base as installed, the heads, and alternatives of transformers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, CompileConfig

from hf_drafthead.evaluation.loading import one_line
from hf_drafthead.evaluation.measurement import BASE, COMPILED, HEADS
from hf_drafthead.evaluation.speed import CAPTURED, draft
from hf_drafthead.generation.tree import DraftTree

PROMPT_LOOKUP, ASSISTANT = "prompt-lookup", "assistant"
LOOKUP_TOKENS = 10  # guesses per step, as in the documentation of transformers

# takes the prompts and the settings of `generate`, returns its output
Method = Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], Any]


def decoding_methods(
    model: Any,
    tokenizer: Any,
    *,
    tree: str | DraftTree | None = None,
    acceptance: Mapping[str, Any] | None = None,
    captured: bool = False,
    compare: Sequence[str] = (),
) -> dict[str, Method]:
    """The base, the heads, and other methods by name, in the order in which they are run.

    Args:
        model: with draft heads.
        tokenizer: the base's.
        tree: of the heads; None for the model's own.
        acceptance: settings that only the heads are given.
        captured: whether the heads' steps are compiled.
        compare: `prompt-lookup` and `assistant=PATH`, which decode one prompt at a time; `compiled`, the base with a
            static cache under `torch.compile`.

    Raises:
        OSError: there is no model at PATH.
        ValueError: another name.
    """
    base, steps = model.base, CAPTURED if captured else {}
    found: dict[str, Method] = {
        BASE: lambda given, settings: base.generate(**given, **with_reader(settings, tokenizer)),
        HEADS: lambda given, settings: draft(
            model, tree, given, {**with_reader(settings, tokenizer), **steps, **(acceptance or {})}
        ),
    }
    for name in compare:
        kind, _, path = name.partition("=")
        if name == PROMPT_LOOKUP:
            more: dict[str, Any] = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
        elif name == COMPILED:
            more = {"cache_implementation": "static", "compile_config": _compile_everywhere()}
        elif kind == ASSISTANT and path:
            more = _assistant(base, tokenizer, path)
        else:
            raise ValueError(
                f"--compare {name!r} is not known: expected {PROMPT_LOOKUP}, {ASSISTANT}=PATH or {COMPILED}."
            )
        found[name] = _with(base, tokenizer, more)
    return found


def cannot_batch(name: str) -> bool:
    """Whether this method decodes one prompt at a time only."""
    return name == PROMPT_LOOKUP or name.startswith(ASSISTANT)


def with_reader(settings: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The settings, with the tokenizer where they have `stop_strings`."""
    return {**settings, "tokenizer": tokenizer} if settings.get("stop_strings") else dict(settings)


def _with(base: Any, tokenizer: Any, more: Mapping[str, Any]) -> Method:
    return lambda given, settings: base.generate(**given, **{**with_reader(settings, tokenizer), **more})


def _compile_everywhere() -> CompileConfig:
    config = CompileConfig()
    config._compile_all_devices = True  # else only a GPU's forward is compiled
    return config


def _assistant(base: Any, tokenizer: Any, path: str) -> dict[str, Any]:
    try:
        assistant = AutoModelForCausalLM.from_pretrained(path, dtype=base.dtype).to(base.device).eval()
        theirs = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise OSError(
            f"no assistant could be read at {path!r} ({one_line(error)}): give a model's folder or id."
        ) from None
    if theirs.get_vocab() == tokenizer.get_vocab():
        return {"assistant_model": assistant}
    return {"assistant_model": assistant, "tokenizer": tokenizer, "assistant_tokenizer": theirs}
