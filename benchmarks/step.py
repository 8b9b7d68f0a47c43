"""What one step costs, part by part, in units of the base's one-token step: a token's share of `base.generate`.

    python benchmarks/step.py                         # the bundled models
    python benchmarks/step.py --shape 160m --nodes 16 # random weights of a named LLaMA shape, fresh heads of any family
    python benchmarks/step.py --shape 160m --family medusa --family eagle

The parts are timed inside `generate()`, base and heads in turns in one process; figures are medians over the repeats.
`bookkeeping` is the step without verify and draft: walk, commit and the loop around them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.stages import STAGES, time_split
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.families import FAMILIES, fresh_heads

SHAPES = {
    "68m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}


def measure(model: PreTrainedModel, tree: DraftTree, prompt: torch.Tensor, new_tokens: int, repeats: int) -> dict:
    """Medians over `repeats` of every part's cost per step.

    Args:
        model: with draft heads.
        tree: to verify.
        prompt: (B, P) token ids.
        new_tokens: to generate in each run; the base and the heads take turns.
    """
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    rows: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        forwards: list[float] = []
        with timed_forward(model.base, forwards):
            start = time.perf_counter()
            model.base.generate(prompt, **settings)
            base_seconds = (time.perf_counter() - start) / new_tokens
        outputs = []

        def drafted(note: Any, outputs: list = outputs) -> None:
            outputs.append(
                model.generate(prompt, draft_tree=tree, return_dict_in_generate=True, on_step=note, **settings)
            )

        split = time_split(drafted).to_json()
        if repeat == 0:
            continue  # warm-up
        rows["base_forward_ms"].append(1e3 * statistics.median(forwards[1:]))
        rows["base_step_ms"].append(1e3 * base_seconds)
        rows["step_ms"].append(split["step"])
        for stage in STAGES:
            rows[f"{stage}_ms"].append(split[stage])
        rows["bookkeeping_ms"].append(rows["step_ms"][-1] - rows["verify_ms"][-1] - rows["draft_ms"][-1])
        accepted = outputs[0].accepted_lengths
        rows["tokens_per_step"].append(accepted.sum().item() / accepted.gt(0).sum().item())
    figures = {name: statistics.median(values) for name, values in rows.items()}
    unit = figures["base_step_ms"]
    for part in ("step", *STAGES, "bookkeeping", "base_forward"):
        figures[part] = figures[f"{part}_ms"] / unit
    return figures


@contextlib.contextmanager
def timed_forward(base: PreTrainedModel, seconds: list[float]) -> Iterator[None]:
    """Note the seconds of every forward of a base."""
    forward = base.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = forward(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    base.forward = call
    try:
        yield
    finally:
        del base.forward


def random_model(shape: str, family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights of a named shape, with fresh heads of a family as the paper has it."""
    torch.manual_seed(0)
    config = LlamaConfig(**({"vocab_size": 32000, "max_position_embeddings": 4096} | SHAPES[shape]))
    base = LlamaForCausalLM(config).to(dtype).eval()
    return fresh_heads(family, base)


def models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, torch.Tensor]]:
    """The models asked for, one at a time, each with a name and a prompt (B, P)."""
    dtype = getattr(torch, args.dtype)
    if args.shape:
        asked = args.family or ["medusa"]
        for family in FAMILIES if "all" in asked else asked:
            prompt = torch.randint(0, 32000, (args.batch, 64), generator=torch.Generator().manual_seed(0))
            yield f"{args.shape} {family}", random_model(args.shape, family, dtype).to(args.device), prompt
        return
    for path in [args.model] if args.model else [zoo.path(family) for family in zoo.families()]:
        tokenizer = AutoTokenizer.from_pretrained(path)
        prompt = tokenizer(["import os\n\n\ndef walk("] * args.batch, return_tensors="pt").input_ids
        yield str(path).rsplit("/")[-1], AutoModel.from_pretrained(path, dtype=dtype).to(args.device), prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", help="a draft-head checkpoint; default: every one in the zoo")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument(
        "--family",
        action="append",
        choices=[*FAMILIES, "all"],
        help="heads of the random shape, may be repeated; default: medusa",
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 16, 32, 64], help="tree sizes, root included")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    if args.family and not args.shape:
        parser.error(f"--family {args.family[0]} is for --shape: a checkpoint has the heads it has, drop --family.")
    table = []
    for name, model, prompt in models(args):
        for nodes in args.nodes:
            paths = sorted(DraftTree.from_name(DEFAULT_TREE).paths, key=lambda path: (len(path) + sum(path), path))
            tree = DraftTree(paths[: nodes - 1])
            figures = measure(model, tree, prompt.to(args.device), args.tokens, args.repeats)
            table.append({"model": name, "nodes": nodes, "batch": args.batch, **figures})
            show(table[-1], first=len(table) == 1)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(table, file, indent=1)


def show(row: dict, first: bool) -> None:
    parts = ("step", "verify", "draft", "accept", "commit", "bookkeeping", "base_forward")
    if first:
        print(f"{'model':<20}{'nodes':>6}{'batch':>6}{'base ms':>9}" + "".join(f"{part:>14}" for part in parts))
    print(
        f"{row['model']:<20}{row['nodes']:>6}{row['batch']:>6}{row['base_step_ms']:>9.2f}"
        + "".join(f"{row[part]:>14.3f}" for part in parts),
        flush=True,
    )


if __name__ == "__main__":
    main()
