"""What the original code of DFlash and DSpark made of tiny weights, and these weights as the projects publish them."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_drafthead.modeling import DFlash2ForCausalLM, DFlashForCausalLM, PEagleForCausalLM
from tests.modeling.golden import FOLDER

DATA = FOLDER / "block"
TOLERANCE = {"atol": 2e-5, "rtol": 0.0}


@dataclass(frozen=True)
class Case:
    """A case: what was recorded, its tensors, and its weights in a folder of the original's layout."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def weights(self) -> dict[str, Tensor]:
        """By their published names."""
        weights = {key: tensor for key, tensor in self.tensors.items() if key.startswith("drafter.")}
        return {key.removeprefix("drafter."): tensor for key, tensor in weights.items()}

    def write(self, folder: Path, **changed: Any) -> Path:
        """The published form, with some fields of config.json changed; None takes one away."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.weights, folder / "model.safetensors")
        config = {key: value for key, value in {**self.facts["config"], **changed}.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    def model(self, folder: Path, base: Any = None, **fields: Any) -> DFlashForCausalLM:
        """The converted drafter on its base."""
        base = golden_base() if base is None else base
        kinds = {"candidate_selector.hidden_projection.weight": DFlash2ForCausalLM, "mask_hidden": PEagleForCausalLM}
        kind: Any = next((kinds[key] for key in kinds if key in self.weights), DFlashForCausalLM)
        model = kind.from_pretrained(self.write(folder), convert=True, base_model=base, **fields)
        return model.eval()


@cache
def load(name: str) -> Case:
    return Case(json.loads((DATA / f"{name}.json").read_text()), load_file(DATA / f"{name}.safetensors"))


@cache
def golden_base() -> Qwen3ForCausalLM:
    config = json.loads((DATA / "base_qwen3.json").read_text())["config"]
    base = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    base.load_state_dict(load_file(DATA / "base_qwen3.safetensors"))
    return base
