"""Checkpoint folders made of files alone: a card is written from these, and no model is built for it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]


def write_checkpoint(folder: Path, family: str = "hydra", **config: Any) -> Path:
    """Heads of 320 bfloat16 parameters for `org/base`, with a tree of 7 nodes; None takes a field of the config out."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "model_type": f"drafthead_{family}",
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "base_config": {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 100},
        "base_included": False,
        "base_model_name_or_path": "org/base",
        "base_model_revision": "0123456789abcdef0123456789abcdef01234567",
        "num_draft_heads": 3,
        "num_layers": 2,
        "dtype": "float32",
        "transformers_version": "5.23.0",
        **config,
    }
    put(folder, "config.json", {name: value for name, value in fields.items() if value is not None})
    put(folder, "generation_config.json", {"draft_tree": TREE, "eos_token_id": 2})
    tensors = {
        "drafter.blocks.0.weight": torch.zeros(3, 8, 8),
        "drafter.up.weight": torch.zeros(16, 8),
        "base.lm_head.weight": torch.zeros(100, 8),
    }
    kept = {name: tensor for name, tensor in tensors.items() if fields["base_included"] or name.startswith("drafter.")}
    save_file({name: tensor.bfloat16() for name, tensor in kept.items()}, folder / "model.safetensors")
    return folder


def put(folder: Path, name: str, found: Any) -> None:
    """Write a JSON file; several runs as `bench --json` does."""
    (folder / name).write_text(json.dumps({"rows": found} if isinstance(found, list) else found))


def run(**figures: Any) -> dict[str, Any]:
    """What `hf-drafthead bench --json` writes of one run."""
    part = {"prompts": 20, "identical": True}
    split = {
        "writing": {**part, "tokens_per_step": 2.5, "speedup": 1.3},
        "math": {**part, "tokens_per_step": None, "speedup": 1.7},
    }
    return {
        "model": "heads", "base": "org/base", "family": "hydra", "device": "NVIDIA A100", "dtype": "float16",
        "batch_size": 1, "prompts": 40, "new_tokens": 3840, "base_forwards": 1500, "tokens_per_step": 2.713,
        "base_tokens_per_second": 162.0, "tokens_per_second": 240.0, "speedup": 1.4815, "speedup_over_compiled": None,
        "efficiency": 0.55, "identical": True, "per_category": split, "tree_nodes": 24, "transformers": "5.23.0",
        "torch": "2.13.0", "questions": "mt_bench.jsonl",
        "command": "hf-drafthead bench heads --questions mt_bench.jsonl --json evaluation.json", **figures,
    }  # fmt: skip
