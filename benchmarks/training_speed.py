"""How fast heads of each family are trained, as a share of the base's own forward, and what memory a step takes.

    python benchmarks/training_speed.py                                  # a GPU, else a CPU with a tiny shape
    python benchmarks/training_speed.py --base FOLDER --device cpu --rows 2 --length 512

Texts are random tokens, three quarters of them labels. The base's forward gives all logits, without gradients and in
its own type; a training step is forward, backward and AdamW of the heads, as `hf-drafthead train` runs it, with the
family's objective, a shared lm_head where the family can, and a draft vocabulary. Both are timed in turn, `--repeats`
times, and the median of the ratios is printed. Memory is the peak of a step on a GPU, less what weights and optimizer
hold.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from chat_training import FIELDS
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_drafthead.modeling.families import fresh_heads
from hf_drafthead.training.heads_loss import IGNORED, label_positions
from hf_drafthead.training.trainer import loss_of, recipe_of

FAMILIES = ["medusa", "hydra", "hydra++", "amphista", "eagle", "eagle3", "draft-model"]
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "vocab_size": 512,
}


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(base, family: str, args: argparse.Namespace, device: torch.device) -> dict[str, float | str]:
    """Tokens per second of the base and of a training step, in turn."""
    torch.manual_seed(0)
    vocabulary = base.config.vocab_size
    size = min(args.draft_vocab_size, vocabulary)
    fields = {**FIELDS[family], **({"num_draft_heads": 5} if family == "eagle3" else {})}
    model = fresh_heads(family, base, draft_vocab_size=size, **fields)
    model.drafter.float().requires_grad_(True)
    model.train()
    model.base.eval()
    ids = torch.randint(0, size, (args.rows, args.length), device=device)
    labels = ids.clone()
    labels[:, : args.length // 4] = IGNORED
    inputs = {"input_ids": ids, "labels": labels, "label_positions": label_positions(labels)}
    loss = loss_of(model, recipe_of(model))
    optimizer = torch.optim.AdamW(model.drafter.parameters(), lr=1e-4, fused=True)

    def forward() -> None:
        with torch.no_grad():
            base(ids, use_cache=False)

    def step() -> None:
        loss(model, inputs, count=False)[0].backward()
        optimizer.step()
        optimizer.zero_grad()

    forward()
    step()
    held = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() - held if device.type == "cuda" else 0
    pairs = [(seconds(forward, device), seconds(step, device)) for _ in range(args.repeats)]
    tokens = args.rows * args.length
    return {
        "family": family,
        "share": round(statistics.median(one / other for one, other in pairs), 3),
        "tokens_per_second": round(tokens / min(other for _, other in pairs)),
        "base_tokens_per_second": round(tokens / min(one for one, _ in pairs)),
        "peak_mib": round(peak / 2**20),
        "parameters": sum(one.numel() for one in model.drafter.parameters()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="folder or id of a causal language model; default: random weights, a tiny shape")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--families", nargs="*", default=FAMILIES, choices=FAMILIES)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", help="write the figures to this file, a line each")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.base:
        base = AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.bfloat16)
    else:
        base = LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16)
        args.draft_vocab_size = min(args.draft_vocab_size, TINY["vocab_size"] // 4)
    base = base.to(device).eval()
    lines = []
    for family in args.families:
        found = measure(base, family, args, device)
        lines.append(json.dumps(found))
        print(
            f"{family:12} {found['share']:.2f} of the base's forward: {found['tokens_per_second']:,} of "
            f"{found['base_tokens_per_second']:,} tokens per second, peak {found['peak_mib']} MiB",
            flush=True,
        )
    if args.json:
        with open(args.json, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
