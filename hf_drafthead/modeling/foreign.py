"""Heads in another project's layout, recognised by their config: what to do with them instead of loading them."""

from collections.abc import Callable, Mapping
from typing import Any

# Config keys, architectures and files by which other projects' heads are known, and the family here.
FOREIGN_KEYS = {
    "medusa_num_heads": "Medusa",
    "hydra_num_heads": "Hydra",
    "speculators_model_type": "Eagle3",
    "draft_vocab_size": "Eagle3",
}
FOREIGN_ARCHITECTURES = {
    "MedusaModel": "Medusa",
    "EagleLlamaForCausalLM": "Eagle",
    "LlamaForCausalLMEagle": "Eagle",
    "LlamaForCausalLMEagle3": "Eagle3",
}
FOREIGN_FILES = {
    "medusa_lm_head.safetensors": "Medusa",
    "medusa_lm_head.pt": "Medusa",
    "hydra_lm_head.safetensors": "Hydra",
    "hydra_lm_head.pt": "Hydra",
}


def how_to_convert(path: str, config: Mapping[str, Any], has_file: Callable[[str], bool] | None = None) -> str | None:
    """What a message says about a checkpoint in another project's layout; None if it does not look like one.

    Args:
        path: folder or Hub id.
        config: what its config.json says; empty without one.
        has_file: whether it has a file of a name; asked only where the config does not tell.
    """
    family = foreign_family(config, has_file)
    if family is None:
        return None
    return (
        f"it looks like {family} heads in another project's layout, load them with "
        f"{family}ForCausalLM.from_pretrained({path!r}, convert=True), or convert them once with "
        f"`hf-drafthead convert {path} NEW_FOLDER`"
    )


def foreign_family(config: Mapping[str, Any], has_file: Callable[[str], bool] | None = None) -> str | None:
    """The first part of the model class for another project's heads, as far as their config shows it."""
    for key, family in FOREIGN_KEYS.items():
        if key in config:
            return family
    if config.get("model_type") == "medusa":
        return "Medusa"
    for architecture in config.get("architectures") or ():
        if architecture in FOREIGN_ARCHITECTURES:
            return FOREIGN_ARCHITECTURES[architecture]
    if config.get("num_hidden_layers") == 1 and config.get("model_type") in ("llama", "mixtral"):
        return "Eagle"  # nobody publishes a language model of one layer
    if config or has_file is None:
        return None
    return next((family for file, family in FOREIGN_FILES.items() if has_file(file)), None)
