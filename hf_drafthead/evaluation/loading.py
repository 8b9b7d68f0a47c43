"""From a name to a model with draft heads and its tokenizer, or to what its files say; else to a one-line error."""

from dataclasses import fields
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.cards.facts import size_of_heads, static_tree
from hf_drafthead.data.texts import one_line
from hf_drafthead.door import from_pretrained
from hf_drafthead.generation.settings import DraftSettings, Plans
from hf_drafthead.modeling.base_model import load_tokenizer
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.loading import read_generation_settings, read_heads_config
from hf_drafthead.trees.entries import device_name


def load(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """Model and tokenizer of any id that drafts, by `hf_drafthead.from_pretrained`; else the base's tokenizer.

    Args:
        name: of heads, of a drafter, or of a base, which then drafts by itself: folder, file or id on the Hub.
        kwargs: for `from_pretrained`: `dtype`, `device_map`, `base_model`, `trust_remote_code` (of the base), ...

    Raises:
        OSError, ValueError: as there.
    """
    try:
        model: Any = from_pretrained(name, **kwargs)
    except OSError as error:
        if "trust_remote_code" not in str(error.__cause__):
            raise
        what = f"the base of {name!r} has its own model code, which runs only if you trust it"
        raise OSError(f"{what}: read it, then give --trust-remote-code (trust_remote_code=True).") from error
    trust: dict[str, Any] = {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}
    try:
        tokenizer = load_tokenizer(name, **trust, revision=kwargs.get("revision", "main"))
    except (OSError, ValueError):
        tokenizer = load_tokenizer(model.base.name_or_path, model.config.base_gguf_file, **trust)
    return model, tokenizer


def load_arguments(
    dtype: str = "auto", device: str | None = None, base_model: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Keyword arguments of `load` for the options of a command; a ValueError where there is no such type, or device
    here. Without a device: all GPUs, or the CPU where there is no GPU."""
    try:
        torch.zeros((), device=None if device == "auto" else device).item()
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise ValueError(f"--device {device!r} cannot be used ({one_line(error)}): give another, or none.") from None
    place = device or ("auto" if torch.cuda.is_available() else None)
    arguments: dict[str, Any] = {"dtype": floating_type(dtype), "base_model": base_model}
    arguments["device_map"] = None if place in (None, "cpu") else "auto" if place == "auto" else {"": place}
    arguments["trust_remote_code"] = trust_remote_code or None
    return {name: value for name, value in arguments.items() if value is not None}


def floating_type(name: str) -> Any:
    """What `--dtype` names: `auto`, or a floating point type of torch; a ValueError if there is none."""
    wanted = name if name == "auto" else getattr(torch, name, None)
    if wanted != "auto" and not (isinstance(wanted, torch.dtype) and wanted.is_floating_point and wanted.itemsize > 1):
        raise ValueError(f"--dtype {name!r} is no floating point type: expected auto, float32, bfloat16 or float16.")
    return wanted


def summarize(name: str) -> dict[str, Any]:
    """What a checkpoint's config, its generation config and the headers of its weights say, by name.

    `parameters` and `memory` (bytes) are what the heads add to the base, in the `dtype` they are stored in; `fields`
    are the family's own config fields, `settings` the drafting settings of the generation config, `tree` is a list of
    rank paths, None where steps have trees of their own.

    The name is its folder, or its id on the Hub; OSError or ValueError where config or weights cannot be read.
    """
    config = read_heads_config(name)
    settings = DraftSettings.stored_in(read_generation_settings(name, {}))
    text_config = config.get_text_config()
    tree = static_tree(settings.get("draft_tree"), config.max_depth, text_config.vocab_size)
    added = config.heads_fields() - DraftHeadConfig.heads_fields()
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name in added}
    kinds = {name: value.model_type for name, value in values.items() if isinstance(value, PreTrainedConfig)}
    return {
        "model": name,
        "family": config.family,
        "base": config.base_model_name_or_path,
        "base_type": text_config.model_type,
        "base_revision": config.base_model_revision,
        "base_included": config.base_included,
        "draft_heads": config.num_draft_heads,
        **size_of_heads(name),
        "fields": values | kinds,  # of another config only the kind of model
        "settings": settings,
        "tree": tree and [list(path) for path in tree.paths],
        "tree_nodes": tree and tree.num_nodes,
    }


def try_on_base(model: Any) -> dict[str, Any]:
    """Whether calls of `generate` draft with heads in eval mode, how, why not, and what base and heads take."""
    why_not, (config, settings, _) = model.why_no_drafts(), model._merged_config(None, {"use_cache": True})
    plans = Plans(model, config, settings, None, config.prompt_lookup_num_tokens or None)
    return {
        "drafts": why_not is None,
        "plan": str(plans.choose(model._base_reader(), 1)) if why_not is None else None,
        "why_not": why_not,
        "base_parameters": sum(parameter.numel() for parameter in model.base.parameters()),
        "memory": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "device": device_name(model.base.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
    }
