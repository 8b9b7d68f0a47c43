"""Tokens per step of an EAGLE-3 head that sees all of a long text, or only a window of it.

    python benchmarks/windows.py --prompts 24                                        # the zoo's
    python benchmarks/windows.py HEADS --base BASE --lengths 200 1000 1800 --windows 0 256 --dtype bfloat16

Prompts are the beginnings of held-out source files (`zoo_recipe/corpus.py`), of the same length in tokens each, and
asked about through the chat template where there is one. A window is a field of the layer's config; 0 is none. The
heads are the same: what is measured is how they guess with less to look at. The figures go to results/windows.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from zoo_recipe.corpus import read_corpus

from hf_drafthead import Eagle3Config, Eagle3ForCausalLM, zoo
from hf_drafthead.evaluation.calls import steps_of
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.generation.settings import SMALL_TREE

RESULTS = Path(__file__).parent / "results" / "windows.jsonl"
QUESTION = "\n\nWhat does this code do?"


def prompts(tokenizer: Any, length: int, count: int) -> torch.Tensor:
    """(count, length) token ids."""
    rows: list[list[int]] = []
    for file in read_corpus():
        if not file.held_out or len(rows) == count:
            continue
        ids = tokenizer(file.text, add_special_tokens=False)["input_ids"]
        if tokenizer.chat_template:
            around = [
                tokenizer(part, add_special_tokens=False)["input_ids"]
                for part in tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"CODE{QUESTION}"}], tokenize=False, add_generation_prompt=True
                ).split("CODE")
            ]
            ids = [*around[0], *ids[: length - len(around[0]) - len(around[1])], *around[1]]
        else:
            ids = [tokenizer.bos_token_id, *ids[: length - 1]]
        if len(ids) == length:
            rows.append(ids)
    return torch.tensor(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="?", default=zoo.path("eagle3"))
    parser.add_argument("--base", help="the base, where the heads name another place")
    parser.add_argument("--lengths", type=int, nargs="*", default=[200, 400], help="tokens of a prompt")
    parser.add_argument("--windows", type=int, nargs="*", default=[0, 64, 128], help="positions; 0 for all")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    more: dict[str, Any] = {"dtype": getattr(torch, args.dtype), **({"base_model": args.base} if args.base else {})}
    base, tokenizer = load(str(args.heads), **more)
    for window in args.windows:
        config = Eagle3Config.from_pretrained(args.heads)
        if window:
            config.layer_config.sliding_window, config.layer_config.layer_types = window, ["sliding_attention"]
        model = Eagle3ForCausalLM.from_pretrained(
            args.heads, config=config, **(more | {"base_model": base.base})
        ).eval()
        assert model.config.window == (window or None)
        for length in args.lengths:
            ids = prompts(tokenizer, length, args.prompts)
            call = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None}
            output = model.generate(
                ids, **call, max_new_tokens=args.tokens, draft_tree=SMALL_TREE, return_dict_in_generate=True
            )
            row = {"heads": Path(args.heads).name, "layers": model.base.config.num_hidden_layers, "window": window}
            row |= {"length": length, "prompts": len(ids), "tokens": args.tokens, "dtype": args.dtype}
            row["tokens_per_step"] = round(tokens_per_step([steps_of(output)]) or 1, 3)
            print(row, flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
