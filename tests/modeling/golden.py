"""The published implementations' own numbers, put under this library's names.

Each set in tests/golden holds a tiny base's embeddings, lm_head and hidden states, the published heads under their
original names, and what the original code made of them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drafthead.modeling import Drafter

FOLDER = Path(__file__).parent.parent / "golden"
TREES = ("chain3", "small8", "ragged12")


@dataclass
class Golden:
    """One set: the published heads, their input, and their output."""

    heads: dict[str, Tensor]
    given: dict[str, Tensor]
    out: dict[str, Tensor]
    trees: dict[str, list[list[int]]]

    @classmethod
    def load(cls, name: str) -> "Golden":
        parts: dict[str, dict[str, Tensor]] = {"heads": {}, "in": {}, "out": {}}
        for key, tensor in load_file(FOLDER / f"{name}.safetensors").items():
            part, _, rest = key.partition(".")
            parts[part][rest] = tensor
        return cls(
            parts["heads"], parts["in"], parts["out"], json.loads((FOLDER / f"{name}.json").read_text())["trees"]
        )


def golden_base() -> LlamaForCausalLM:
    fields = json.loads((FOLDER / "base_tiny.json").read_text())
    base = LlamaForCausalLM(LlamaConfig(**fields)).eval()
    base.load_state_dict(load_file(FOLDER / "base_tiny.safetensors"))
    return base


def drafted(drafter: Drafter, state, root: Tensor, paths: list[list[int]]) -> list[int]:
    """Tokens of a tree's nodes in (length, lexicographic) order, root first, each level expanded in one call.

    Args:
        state: after `observe`.
        root: (1, 1) token.
        paths: rank paths without the root; siblings' ranks are contiguous.
    """
    tokens = {(): root.item()}
    paths = [tuple(path) for path in sorted(paths, key=lambda path: (len(path), path))]
    expanded: list[tuple[int, ...]] = [()]
    previous: list[tuple[int, ...]] = [()]
    for depth in range(1, max(map(len, paths)) + 1):
        level_tokens = torch.tensor([[tokens[path] for path in expanded]])
        parents = torch.tensor([[previous.index(path[:-1]) if path else 0 for path in expanded]])
        state, guesses = drafter.expand(state, level_tokens, parents)
        for path in (path for path in paths if len(path) == depth):
            node = expanded.index(path[:-1]) if guesses.logits.shape[1] > 1 else 0
            tokens[path] = guesses.top(path[-1] + 1)[0][0, node, -1].item()
        previous = expanded
        expanded = [path for path in paths if len(path) == depth and any(p[:-1] == path for p in paths)]
    return [tokens[()], *(tokens[path] for path in paths)]
