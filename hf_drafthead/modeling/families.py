"""The one table of families of draft heads: what the package exports, registers, trains, describes and tests.

A new family is a module of its own in this folder, and an import and a line here.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hf_drafthead.modeling.amphista import AMPHISTA_RECIPE, AmphistaConfig, AmphistaForCausalLM
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.dflash import DFLASH_RECIPE, DSPARK_RECIPE, DFlashConfig, DFlashForCausalLM
from hf_drafthead.modeling.dflash2 import DFlash2Config, DFlash2ForCausalLM
from hf_drafthead.modeling.draft_model import DRAFT_MODEL_RECIPE, DraftModelConfig, DraftModelForCausalLM
from hf_drafthead.modeling.eagle import EAGLE_RECIPE, EagleConfig, EagleForCausalLM
from hf_drafthead.modeling.eagle3 import EAGLE3_RECIPE, Eagle3Config, Eagle3ForCausalLM
from hf_drafthead.modeling.gemma4_assistant import GemmaAssistantConfig, GemmaAssistantForCausalLM
from hf_drafthead.modeling.hydra import HYDRA_PLUS_PLUS_RECIPE, HYDRA_RECIPE, HydraConfig, HydraForCausalLM
from hf_drafthead.modeling.medusa import MEDUSA_JOINT_RECIPE, MEDUSA_RECIPE, MedusaConfig, MedusaForCausalLM
from hf_drafthead.modeling.mtp import MtpConfig, MtpForCausalLM
from hf_drafthead.modeling.peagle import PEAGLE_RECIPE, PEagleConfig, PEagleForCausalLM
from hf_drafthead.modeling.prompt_lookup import LookupConfig, LookupForCausalLM

# For type checkers, for which the package's classes are the public names of this module; at run time CLASSES has them.
__all__ = ["AmphistaConfig", "DFlashConfig", "DraftModelConfig", "EagleConfig", "Eagle3Config", "HydraConfig"]
__all__ += ["MedusaConfig", "MtpConfig", "AmphistaForCausalLM", "DFlashForCausalLM", "DraftModelForCausalLM"]
__all__ += ["GemmaAssistantConfig", "GemmaAssistantForCausalLM"]
__all__ += ["EagleForCausalLM", "Eagle3ForCausalLM", "HydraForCausalLM", "MedusaForCausalLM", "MtpForCausalLM"]
__all__ += ["LookupConfig", "LookupForCausalLM", "DFlash2Config", "DFlash2ForCausalLM"]
__all__ += ["PEagleConfig", "PEagleForCausalLM"]


@dataclass(frozen=True)
class Family:
    """A family of draft heads.

    Attributes:
        name: as `DraftHeadConfig.family` returns it.
        title: as its paper writes it.
        paper: arXiv number.
        model_class: its model; several families may share one.
        config: makes the config of fresh heads from config fields.
        recipe: training arguments of its paper; None where there is nothing to train.
        joint_recipe: training arguments that differ where the base is trained too.
    """

    name: str
    title: str
    paper: str
    model_class: type[DraftHeadPreTrainedModel]
    config: Callable[..., DraftHeadConfig]
    recipe: Mapping[str, Any] | None
    joint_recipe: Mapping[str, Any] = field(default_factory=dict)


_TABLE = (
    Family("medusa", "Medusa", "2401.10774", MedusaForCausalLM, MedusaConfig, MEDUSA_RECIPE, MEDUSA_JOINT_RECIPE),
    Family("hydra", "Hydra", "2402.05109", HydraForCausalLM, HydraConfig, HYDRA_RECIPE),
    Family("hydra++", "Hydra++", "2402.05109", HydraForCausalLM, HydraConfig.plus_plus, HYDRA_PLUS_PLUS_RECIPE),
    Family("amphista", "Amphista", "2406.13170", AmphistaForCausalLM, AmphistaConfig, AMPHISTA_RECIPE),
    Family(
        "amphista-alpha", "Amphista-alpha", "2406.13170", AmphistaForCausalLM, AmphistaConfig.alpha, AMPHISTA_RECIPE
    ),
    Family("eagle", "EAGLE", "2401.15077", EagleForCausalLM, EagleConfig, EAGLE_RECIPE),
    Family("eagle3", "EAGLE-3", "2503.01840", Eagle3ForCausalLM, Eagle3Config, EAGLE3_RECIPE),
    Family("eagle3.1", "EAGLE 3.1", "2605.09992", Eagle3ForCausalLM, Eagle3Config.with_norms, EAGLE3_RECIPE),
    Family("peagle", "P-EAGLE", "2602.01469", PEagleForCausalLM, PEagleConfig, PEAGLE_RECIPE),
    # trained as EAGLE-3 is: on the base's own distribution, several levels deep
    Family("mtp", "MTP", "2412.19437", MtpForCausalLM, MtpConfig, EAGLE3_RECIPE),
    Family("dflash", "DFlash", "2602.06036", DFlashForCausalLM, DFlashConfig, DFLASH_RECIPE),
    Family("dflash2", "DFlash 2", "2602.06036", DFlash2ForCausalLM, DFlash2Config, DFLASH_RECIPE),
    Family("dspark", "DSpark", "2607.05147", DFlashForCausalLM, DFlashConfig.dspark, DSPARK_RECIPE),
    Family(
        "gemma4-assistant",
        "Gemma 4 assistant",
        "2402.02082",
        GemmaAssistantForCausalLM,
        GemmaAssistantConfig,
        EAGLE3_RECIPE,
    ),
    Family("draft-model", "Draft model", "2211.17192", DraftModelForCausalLM, DraftModelConfig, DRAFT_MODEL_RECIPE),
    Family("lookup", "Prompt lookup", "2304.04487", LookupForCausalLM, LookupConfig, None),
)
FAMILIES: dict[str, Family] = {family.name: family for family in _TABLE}
TRAINED = {name: family for name, family in FAMILIES.items() if family.recipe is not None}  # those that have heads
BY_MODEL_TYPE: dict[str, type[DraftHeadPreTrainedModel]] = {
    family.model_class.config_class.model_type: family.model_class for family in FAMILIES.values()
}
MODEL_CLASSES = tuple(BY_MODEL_TYPE.values())
# Config and model of every family, by their names: what `from hf_drafthead import ...` offers of them.
CLASSES: dict[str, type] = {
    kind.__name__: kind for model_class in MODEL_CLASSES for kind in (model_class.config_class, model_class)
}


def find_family(name: str) -> Family:
    """The family of a name; a ValueError for any other name."""
    if name not in FAMILIES:
        raise ValueError(f"the family {name!r} is not known: expected one of {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[name]


def find_recipe(name: str) -> Mapping[str, Any]:
    """The training arguments of a family's paper; a ValueError where there is no such family or nothing to train."""
    family = find_family(name)
    if family.recipe is None:
        raise ValueError(
            f"{name!r} has nothing to train, it copies from the text alone: give one of {', '.join(sorted(TRAINED))}."
        )
    return family.recipe


def from_base(
    base: str | os.PathLike | nn.Module, family: str = "lookup", **arguments: Any
) -> DraftHeadPreTrainedModel:
    """A model whose `generate` writes the base's own text in fewer forward passes; without a family, untrained.

    Without a family it copies its guesses from the text itself (prompt lookup), on every base that can verify a path of
    guesses, with batches, seeds and captured steps: text that repeats parts of itself or of the prompt, such as code,
    summaries and answers about a document, takes fewer passes. `prompt_lookup_num_tokens` and `max_matching_ngram_size`
    of `generate` say how many tokens a step copies (10) and how many must match (3 at most); `save_pretrained` writes a
    folder that names the base and holds no tensors, which `AutoModel.from_pretrained` loads.

    Args:
        base: Hub id or path of a causal language model, or a loaded model.
        family: of fresh heads instead, to be trained (`medusa`, `eagle3`, ...).
        arguments: config fields, and arguments for loading the base, as of the model class's own `from_base`.

    Raises:
        OSError, TypeError, ValueError: as there; or there is no such family.
    """
    return fresh_heads(family, base, **arguments)


def fresh_heads(family: str, base: str | os.PathLike | nn.Module, **arguments: Any) -> DraftHeadPreTrainedModel:
    """Untrained heads of a family; large projections are shared as in `from_base` without a config."""
    entry = find_family(family)
    if getattr(entry.model_class.config_class, "share_lm_head", None) is False:
        arguments = {"share_lm_head": None, **arguments}
    return entry.model_class.from_base(base, config=entry.config(), **arguments)
