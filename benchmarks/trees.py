"""Static trees grown in two ways, and dynamic trees of their size: tokens per step on the zoo.

    python benchmarks/trees.py                          # eagle, eagle3 and hydra++
    python benchmarks/trees.py medusa hydra             # others

The figures go to results/trees.json, and the tables to results/trees.md.

Trees are grown on the base's greedy answers to all held-out prompts but the first 12, and measured on these, 96 new
tokens each, in one batch. Tokens per step do not depend on the machine. Every text is compared with the base's own.

    product     per-head, per-rank accuracies multiplied (Medusa, arXiv 2401.10774, section 2.3.3)
    paths       rank paths counted at every position of the text, as `hf-drafthead calibrate` does
    dynamic     the shape follows the guesses (EAGLE-2, arXiv 2406.16858), 8 wide and up to 6 deep
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from figures import markdown

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.calls import encode, steps_of
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.generation.tree import DynamicTree
from hf_drafthead.trees.grow import METHODS
from hf_drafthead.trees.rank_paths import foretold_steps, own_texts, rank_paths

RESULTS = Path(__file__).parent / "results" / "trees.json"
MEASURED, NEW_TOKENS = 12, 96
SIZES = (8, 16, 32, 64)
FAMILIES = ("eagle", "eagle3", "hydra++")


def measure(family: str) -> dict[str, Any]:
    """Every figure of one family."""
    model, tokenizer = load(zoo.path(family))
    model.eval()
    prompts = [prompt.turns[0] for prompt in read_questions(zoo.ASSETS / "prompts.jsonl")]
    ids = [encode(model, tokenizer, [text])["input_ids"][0] for text in prompts]
    ranks = []
    for part in (ids[:MEASURED], ids[MEASURED:]):
        texts = own_texts(model, part, NEW_TOKENS)
        ranks.append(list(rank_paths(model, *texts)))
    held_out, grown_on = ranks
    given = encode(model, tokenizer, prompts[:MEASURED])
    call = {**given, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    expected = model.base.generate(**call)

    def tokens_of(tree: DraftTree | DynamicTree) -> float:
        output = model.generate(**call, draft_tree=tree, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected), f"{family}: the text is not the base's"
        return tokens_per_step([steps_of(output)])

    found: dict[str, Any] = {"family": family}
    depth = min(6, model.drafter.max_depth or 6)
    for way, grow in METHODS.items():
        trees = {size: DraftTree(grow(torch.cat(grown_on), size)) for size in SIZES}
        found[way] = {size: tokens_of(tree) for size, tree in trees.items()}
        foretold = {size: [foretold_steps(tree, one[None])[0] for one in held_out] for size, tree in trees.items()}
        for size, steps in foretold.items():
            counts = [count for text in steps for count in text]
            assert abs(sum(counts) / len(counts) - found[way][size]) < 1e-6, "not the steps that were counted"
    found["dynamic"] = {size: tokens_of(DynamicTree(size, depth, 8)) for size in SIZES[1:]}
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Tokens per step by heads, way and nodes."""
    lines = [
        [one["family"], way, *(f"{one[way][size]:.3f}" if size in one[way] else "" for size in map(str, SIZES))]
        for one in found
        for way in (*METHODS, "dynamic")
    ]
    return markdown(["heads", "tree", *(f"{size} nodes" for size in SIZES)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    for family in parser.parse_args().families:
        found = measure(family)
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
        every = sorted([*(one for one in known if one["family"] != family), found], key=lambda one: one["family"])
        RESULTS.write_text(json.dumps(every, indent=1) + "\n")
    about = (
        "Tokens per step on 12 held-out prompts of the zoo, 96 greedy tokens each (`python benchmarks/trees.py`).\n\n"
    )
    RESULTS.with_suffix(".md").write_text(about + table(json.loads(RESULTS.read_text())) + "\n")


if __name__ == "__main__":
    main()
