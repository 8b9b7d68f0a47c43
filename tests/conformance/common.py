"""transformers' own common tests for models, read from a folder that is given, and what they ask of the model tested.

`CONFORMANCE` is the `tests` folder of transformers' source, of the version that is installed. Its package on an index
holds the tests for models and configs, but not those for generation and export, whose place stays empty then.
"""

import importlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drafthead import MedusaConfig, MedusaForCausalLM

PACKAGE = "transformers_tests"
FOLDER = os.environ.get("CONFORMANCE", "")
MISSING = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}


def is_missing(module: str) -> bool:
    """Whether a module of transformers' tests is not in the folder."""
    return not Path(FOLDER).joinpath(*module.split(".")).with_suffix(".py").is_file()


def load(name: str) -> Any:
    """A module of transformers' tests; classes of modules that are not in the folder have no tests."""
    folder = Path(FOLDER).resolve()
    for place in ("", ".exporters", ".generation"):
        package = types.ModuleType(PACKAGE + place)
        package.__path__ = [str(folder.joinpath(*place.split(".")[1:]))]
        sys.modules.setdefault(package.__name__, package)
    for module, mixin in MISSING.items():
        if is_missing(module):
            empty = types.ModuleType(f"{PACKAGE}.{module}")
            setattr(empty, mixin, type(mixin, (), {}))
            sys.modules.setdefault(empty.__name__, empty)
    return importlib.import_module(f"{PACKAGE}.{name}")


class LlamaTester:
    """The sizes and inputs of a tiny LLaMA, as transformers' tests ask for them."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, hidden_size = 2, 7, 2, 4, 32
    vocab_size, is_training = 99, True
    all_model_classes: tuple[type, ...] = (LlamaForCausalLM,)

    def __init__(self, parent: Any) -> None:
        self.parent = parent

    def get_config(self) -> Any:
        return LlamaConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=128,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length), generator=generator)
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def prepare_config_and_inputs_for_model_class(self, model_class: type) -> tuple[Any, dict[str, torch.Tensor]]:
        return self.prepare_config_and_inputs_for_common()


class MedusaTester(LlamaTester):
    """The same LLaMA with Medusa heads."""

    all_model_classes = (MedusaForCausalLM,)

    def get_config(self) -> Any:
        return MedusaConfig(base_config=super().get_config(), num_draft_heads=2)
