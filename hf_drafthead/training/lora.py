"""Low-rank adapters on the base, for training it together with its heads (Medusa-2); through peft."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


def add_lora(model: DraftHeadPreTrainedModel, rank: int = 32, alpha: int = 16, dropout: float = 0.05) -> None:
    """Put adapters on all linear layers of the base but its lm_head; the defaults are the published ones.

    Args:
        model: its base must have no adapters yet.
        rank: of the adapters, above 0.
        alpha: their outputs are scaled by alpha / rank.
        dropout: on their inputs, in training.

    Raises:
        ValueError: a rank below 1, or adapters are there already.
    """
    if rank < 1:
        raise ValueError(f"the rank of the adapters is {rank}: expected at least 1, or train the base without them.")
    if adapter_layers(model.base):
        raise ValueError("the base has adapters already: merge them first, with merge_lora(model).")
    from peft import LoraConfig

    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model.base.add_adapter(config)


@contextmanager
def adapters_off(base: Any) -> Iterator[None]:
    """The base as it was before its adapters."""
    base.disable_adapters()
    try:
        yield
    finally:
        base.enable_adapters()


def merge_lora(model: DraftHeadPreTrainedModel) -> None:
    """Merge the adapters into the base's weights and remove them: *exact* then refers to the merged base."""
    base: Any = model.base
    for name, layer in adapter_layers(base):
        layer.merge()
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, layer.get_base_layer())
    base._hf_peft_config_loaded = False
    base.__dict__.pop("peft_config", None)


def adapter_layers(base: Any) -> list[tuple[str, BaseTunerLayer]]:
    """Every layer of the base that has an adapter, by name."""
    if "peft" not in sys.modules:  # which is not needed where there are none
        return []
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [(name, module) for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)]
