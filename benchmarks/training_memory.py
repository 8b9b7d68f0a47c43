"""Peak memory of a training step: heads' loss in chunks, against a plain implementation with all logits at once.

    python benchmarks/training_memory.py              # batch 4, length 1024, vocabulary 32000, 4 heads, hidden 512

Each variant runs in a process of its own; what is compared is the most memory it held during one step, less what it
held before (weights and their gradients are in both).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from hf_drafthead import MedusaForCausalLM
from hf_drafthead.training.heads_loss import HeadsLoss
from tests.training.plain_loss import plain_loss


def step(kind: str, batch: int, length: int, vocabulary: int, hidden: int, teacher: float) -> dict[str, float]:
    """One forward and backward: loss, norm of the gradients, MiB at the most."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2, "num_attention_heads": 8}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=length, **sizes))
    model = MedusaForCausalLM.from_base(base.eval(), num_draft_heads=4)
    model.base.requires_grad_(False)
    ids = torch.randint(0, vocabulary, (batch, length))
    for parameter in model.drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = _peak()
    if kind == "plain":
        loss = plain_loss(model, ids, ids, teacher=teacher)
    else:
        loss, _ = HeadsLoss(next_token=1.0, teacher=teacher)(model, {"input_ids": ids, "labels": ids})
    loss.backward()
    norm = torch.stack([parameter.grad.norm() for parameter in model.drafter.parameters()]).norm()
    return {"loss": loss.item(), "gradient_norm": norm.item(), "mib": (_peak() - before) / 2**10}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--teacher", type=float, default=0.0, help="weight of the base's distribution")
    parser.add_argument("--kind", choices=["plain", "chunks"], help="only this one, in this process")
    args = vars(parser.parse_args())
    kind = args.pop("kind")
    if kind:
        print(json.dumps(step(kind, **args)))
        return
    found = {}
    for kind in ("plain", "chunks"):
        given = [word for name, value in args.items() for word in (f"--{name}", str(value))]
        command = [sys.executable, __file__, "--kind", kind, *given]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found[kind] = json.loads(output.splitlines()[-1])
        print(kind, found[kind])
    print(f"chunks need {found['chunks']['mib'] / found['plain']['mib']:.3f} of the plain step's memory")


if __name__ == "__main__":
    main()
