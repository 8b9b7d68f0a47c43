"""How often half precision changes a greedy text, and how close the choice was where it did.

    python benchmarks/half_precision.py --dtype bfloat16

A step verifies several tokens in one forward, and matrix products of another shape round differently. In float32 that
changes nothing that greedy decoding can see; in half precision two tokens whose logits round to neighbours can swap.
"""

from __future__ import annotations

import argparse
import json

import torch
from transformers import AutoModel, AutoTokenizer

import hf_drafthead  # noqa: F401  registers the families
from hf_drafthead import zoo
from hf_drafthead.evaluation.questions import read_prompts


def first_difference(left: torch.Tensor, right: torch.Tensor) -> int | None:
    """Index of the first token in which two texts differ; None if one begins with the other."""
    shorter = min(len(left), len(right))
    different = (left[:shorter] != right[:shorter]).nonzero()
    return int(different[0]) if len(different) else None


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a draft-head checkpoint; default: every one in the zoo")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="also write the figures here")
    args = parser.parse_args()
    prompts = read_prompts(zoo.ASSETS / "prompts.jsonl")
    rows = []
    for name in [args.model] if args.model else [zoo.path(family) for family in zoo.families()]:
        model = AutoModel.from_pretrained(name, dtype=getattr(torch, args.dtype)).to(args.device)
        tokenizer = AutoTokenizer.from_pretrained(name)
        compared, margins = 0, []
        for prompt in prompts:
            inputs = tokenizer(prompt.text, return_tensors="pt").to(args.device)
            length = inputs.input_ids.shape[1]
            settings = {"max_new_tokens": args.tokens, "do_sample": False}
            plain = model.base.generate(**inputs, **settings)[0]
            drafted = model.generate(**inputs, **settings)[0]
            at = first_difference(plain, drafted)
            compared += (len(plain) if at is None else at + 1) - length
            if at is not None:
                best, second = model.base(plain[None, :at]).logits[0, -1].float().topk(2).values.tolist()
                margins.append(best - second)
        rows.append(
            {
                "model": name.rsplit("/")[-1],
                "dtype": args.dtype,
                "prompts": len(prompts),
                "prompts_changed": len(margins),
                "tokens_compared": compared,
                "flips_per_1000_tokens": 1000 * len(margins) / compared,
                "largest_margin": max(margins, default=0.0),
            }
        )
        print(rows[-1], flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
