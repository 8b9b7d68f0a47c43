"""A summary of a draft-head checkpoint, read from its files without loading the base."""

from dataclasses import fields
from typing import Any

import torch
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.cards.facts import size_of_heads, static_tree
from hf_drafthead.evaluation.calls import drafted
from hf_drafthead.generation.entries import device_name
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.modeling.checkpoint import read_generation_settings, read_heads_config
from hf_drafthead.modeling.config import DraftHeadConfig


def summarize(name: str) -> dict[str, Any]:
    """What a checkpoint's config, its generation config and the headers of its weights say, by name.

    `parameters` and `memory` (bytes) are what the heads add to the base, in the `dtype` they are stored in; `fields`
    are the family's own config fields, `settings` the drafting settings of the generation config, `tree` is a list of
    rank paths, None where steps have trees of their own.

    Args:
        name: its folder, or its id on the Hub.

    Raises:
        OSError, ValueError: as `read_heads_config` does, or its weights cannot be read.
    """
    config = read_heads_config(name)
    settings = DraftSettings.stored_in(read_generation_settings(name, {}))
    text_config = config.get_text_config()
    tree = static_tree(settings.get("draft_tree"), config.max_depth, text_config.vocab_size)
    return {
        "model": name,
        "family": config.family,
        "base": config.base_model_name_or_path,
        "base_type": text_config.model_type,
        "base_revision": config.base_model_revision,
        "base_included": config.base_included,
        "draft_heads": config.num_draft_heads,
        **size_of_heads(name),
        "fields": family_fields(config),
        "settings": settings,
        "tree": tree and [list(path) for path in tree.paths],
        "tree_nodes": tree and tree.num_nodes,
    }


def try_on_base(model: Any) -> dict[str, Any]:
    """Draft a few tokens with loaded heads: whether `generate` uses them, why not, and what base and heads take.

    Args:
        model: a model with draft heads, in eval mode.
    """
    prompt = torch.arange(1, 5, device=model.base.device)[None]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    drafts = drafted(model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings))
    return {
        "drafts": drafts,
        "why_not": None if drafts else model.why_no_drafts() or "see the warning",
        "base_parameters": sum(parameter.numel() for parameter in model.base.parameters()),
        "memory": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
        "device": device_name(model.base.device),
        "dtype": str(model.base.dtype).removeprefix("torch."),
    }


def family_fields(config: DraftHeadConfig) -> dict[str, Any]:
    """The config fields that this family adds to what all have; of another config only the kind of model."""
    added = config.heads_fields() - DraftHeadConfig.heads_fields()
    values = {field.name: getattr(config, field.name) for field in fields(config) if field.name in added}
    return {name: value.model_type if isinstance(value, PreTrainedConfig) else value for name, value in values.items()}
