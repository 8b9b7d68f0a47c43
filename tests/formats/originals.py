"""The golden heads, written as their own projects save them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.modeling import DraftHeadPreTrainedModel, EagleForCausalLM, HydraForCausalLM, MedusaForCausalLM
from tests.modeling.golden import FOLDER, Golden


@dataclass(frozen=True)
class Original:
    """One set of golden heads and the files it came in.

    Attributes:
        golden: name of the set.
        model_class: of the family.
        file: that the project writes.
        config: what the project writes about the heads, apart from the base's name.
        names_base: whether config.json names the base.
    """

    golden: str
    model_class: type[DraftHeadPreTrainedModel]
    file: str
    config: dict[str, Any]
    names_base: bool = True

    def write(self, folder: Path, base: Path) -> dict[str, Tensor]:
        """The project's folder; returns its tensors."""
        folder.mkdir()
        heads = Golden.load(self.golden).heads
        torch.save(heads, folder / self.file)
        named = {"base_model_name_or_path": str(base)} if self.names_base else {}
        (folder / "config.json").write_text(json.dumps(self.config | named))
        return heads


def _config(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())["config"]


MEDUSA = {"medusa_num_heads": 2, "medusa_num_layers": 1}  # as published: the file has five heads
ORIGINALS = [
    Original("medusa_v1_own_lmhead_l1", MedusaForCausalLM, "medusa_lm_head.pt", MEDUSA),
    Original("medusa_v2_shared_lmhead_l1", MedusaForCausalLM, "medusa_lm_head.pt", MEDUSA | {"version": "2"}),
    Original(
        "hydra_mlp_l1_grounded",
        HydraForCausalLM,
        "hydra_lm_head.pt",
        {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "mlp", "grounded_heads": True},
    ),
    Original(
        "hydrapp_prefix_mlp_l1_grounded",
        HydraForCausalLM,
        "hydra_lm_head.pt",
        {"hydra_num_heads": 4, "hydra_num_layers": 1, "hydra_head_arch": "prefix-mlp", "grounded_heads": True},
    ),
    Original("eagle1", EagleForCausalLM, "pytorch_model.bin", _config("eagle1"), names_base=False),
]
