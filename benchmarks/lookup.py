"""Tokens per step with copies from the text in the tree, beside heads alone and copies alone, at equal nodes.

    python benchmarks/lookup.py                                  # the bundled families on the held-out prompts
    python benchmarks/lookup.py --family medusa --nodes 32 --copies 4 8 --tokens 64

Greedy, float32, one row at a time; the text of every call is compared with the base's. The figures are written to
results/lookup.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModel, AutoTokenizer

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.questions import read_questions

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=zoo.families())
    parser.add_argument("--nodes", type=int, default=16, help="of a step, the root included")
    parser.add_argument("--copies", type=int, nargs="*", default=[8], help="tokens copied in each step")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of every prompt")
    parser.add_argument("--limit", type=int, help="prompts")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "lookup.json")
    args = parser.parse_args()
    questions = read_questions(zoo.ASSETS / "prompts.jsonl")[: args.limit]
    rows = []
    for family in args.family:
        path = zoo.path(family)
        model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
        paths = DraftTree.from_name("mc_sim_7b_63").cut(model.drafter.max_depth or 5).paths
        tree = DraftTree(sorted(paths, key=lambda path: (len(path) + sum(path), path))[: args.nodes - 1])
        prompts = [tokenizer(question.text, return_tensors="pt").input_ids[:, -128:] for question in questions]
        expected = [model.base.generate(prompt, max_new_tokens=args.tokens, do_sample=False) for prompt in prompts]
        row: dict[str, Any] = {"family": family, "nodes": args.nodes}
        row["heads"] = tokens_per_step(model, prompts, expected, args.tokens, draft_tree=tree)
        for copies in args.copies:
            looked_up = {"prompt_lookup_num_tokens": copies}
            row[f"both, {copies}"] = tokens_per_step(
                model, prompts, expected, args.tokens, draft_tree=tree, **looked_up
            )
        row["copies alone"] = tokens_per_step(
            model, prompts, expected, args.tokens, draft_tree="lookup", prompt_lookup_num_tokens=args.nodes - 1
        )
        rows.append(row)
        print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
        args.output.write_text(json.dumps(rows, indent=1) + "\n")


def tokens_per_step(model: Any, prompts: list, expected: list, tokens: int, **settings: Any) -> float:
    """Over all prompts; a text that is not the base's ends the run."""
    emitted = steps = 0
    for prompt, text in zip(prompts, expected):
        output = model.generate(
            prompt, max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, **settings
        )
        if not torch.equal(output.sequences, text):
            raise SystemExit(f"with {settings} the text is not the base's: that is a fault, report it.")
        emitted, steps = emitted + int(output.accepted_lengths.sum()), steps + output.accepted_lengths.shape[1]
    return round(emitted / steps, 3)


if __name__ == "__main__":
    main()
