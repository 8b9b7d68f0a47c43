"""Three ways to find a draft tree, predictions against measurements, and dynamic trees: tokens per step on the zoo.

    python benchmarks/trees.py                          # eagle, eagle3 and hydra++
    python benchmarks/trees.py medusa hydra             # others

The figures go to results/trees.json, and the tables of docs/trees.md to standard output.

Trees are grown on the base's greedy answers to all held-out prompts but the first 12, and measured on these, 96 new
tokens each, in one batch. Tokens per step do not depend on the machine. Every text is compared with the base's own.

    product     per-head, per-rank accuracies multiplied (Medusa, arXiv 2401.10774, section 2.3.3)
    paths       rank paths counted at every position of the text
    two stages  node by node, the one that lengthens the steps of generating the text most (Hydra, arXiv 2402.05109);
                its second stage, the speed of each size, is what `hf-drafthead calibrate` measures
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from figures import markdown

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.calls import encode, steps_of
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.evaluation.questions import read_prompts
from hf_drafthead.generation.calibration import (
    UNKNOWN,
    foretold_steps,
    grow_tree,
    grow_tree_by_product,
    own_texts,
    rank_paths,
)
from hf_drafthead.generation.dynamic import DynamicTree
from hf_drafthead.generation.tree import RankPath

RESULTS = Path(__file__).parent / "results" / "trees.json"
MEASURED, NEW_TOKENS = 12, 96
SIZES = (8, 16, 32, 64)
DYNAMIC = (16, 32, 64)  # sizes that are run
FAMILIES = ("eagle", "eagle3", "hydra++")


def grow_tree_in_steps(ranks: Sequence[torch.Tensor], nodes: int) -> list[RankPath]:
    """Hydra's first stage: always add the node at which most steps of generating the texts with the tree so far end."""
    chosen: list[RankPath] = []
    known: set[RankPath] = set()
    rows = [[levels for levels in text.tolist() if levels[-1] != UNKNOWN] for text in ranks]
    while len(chosen) < nodes - 1:
        missing: Counter[RankPath] = Counter()
        for row in rows:
            position = 0
            while position < len(row):
                depth = 0
                while depth < len(row[position]) and tuple(row[position][: depth + 1]) in known:
                    depth += 1
                if depth < len(row[position]):
                    missing[tuple(row[position][: depth + 1])] += 1
                position += depth + 1
        if not missing:
            break
        chosen.append(min(missing, key=lambda path: (-missing[path], len(path), path)))
        known.add(chosen[-1])
    return chosen


def measure(family: str) -> dict[str, Any]:
    """Every figure of one family."""
    model, tokenizer = load(zoo.path(family))
    model.eval()
    prompts = [prompt.turns[0] for prompt in read_prompts(zoo.ASSETS / "prompts.jsonl")]
    ids = [encode(model, tokenizer, [text])["input_ids"][0] for text in prompts]
    ranks = []
    for part in (ids[:MEASURED], ids[MEASURED:]):
        texts = own_texts(model, part, NEW_TOKENS)
        ranks.append(list(rank_paths(model, *texts)))
    held_out, grown_on = ranks
    together = torch.cat(grown_on)
    ways = {
        "product": grow_tree_by_product(together, 256),
        "paths": grow_tree(together, 256),
        "two stages": grow_tree_in_steps(grown_on, max(SIZES)),
    }
    given = encode(model, tokenizer, prompts[:MEASURED])
    call = {**given, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    expected = model.base.generate(**call)

    def generated(tree: DraftTree | DynamicTree) -> tuple[float, int]:
        output = model.generate(**call, draft_tree=tree, return_dict_in_generate=True)
        assert torch.equal(output.sequences, expected), f"{family}: the text is not the base's"
        accepted = steps_of(output)
        return tokens_per_step([accepted]), int((accepted > 0).sum())

    found: dict[str, Any] = {"family": family, "ways": {}, "static": {}, "dynamic": {}}
    for way, paths in ways.items():
        found["ways"][way] = {size: foretold(paths, size, held_out) for size in SIZES}
    for size in DYNAMIC:
        tau, steps = generated(DraftTree(ways["paths"][: size - 1]))
        predicted_elsewhere = foretold(ways["paths"], size, grown_on)
        found["static"][size] = {
            "measured": tau, "steps": steps, "held_out": found["ways"]["paths"][size], "grown_on": predicted_elsewhere
        }  # fmt: skip
        depth = min(6, model.drafter.max_depth or 6)
        found["dynamic"][size] = {"measured": generated(DynamicTree(size, depth, 8))[0], "depth": depth, "width": 8}
        print(family, size, found["static"][size], found["dynamic"][size], flush=True)
    return found


def foretold(paths: Sequence[RankPath], size: int, ranks: Sequence[torch.Tensor]) -> float:
    """Tokens per step of the tree of so many nodes on these texts."""
    tree = DraftTree(paths[: size - 1])
    steps = [count for text in ranks for count in foretold_steps(tree, text[None])[0]]
    return sum(steps) / len(steps)


def tables(found: Sequence[dict[str, Any]]) -> list[str]:
    """The tables of the docs."""
    ways = [
        [one["family"], way, *(f"{by_size[str(size)]:.3f}" for size in SIZES)]
        for one in found
        for way, by_size in one["ways"].items()
    ]
    dynamic, predicted = [], []
    for one in found:
        for size in map(str, DYNAMIC):
            static, other = one["static"][size], one["dynamic"][size]
            more = other["measured"] / static["measured"] - 1
            shape = f"{other['depth']} deep, {other['width']} wide"
            dynamic.append([
                one["family"], size, shape, f"{static['measured']:.3f}", f"{other['measured']:.3f}", f"{more:+.1%}"
            ])  # fmt: skip
            off = static["grown_on"] / static["measured"] - 1
            predicted.append([
                one["family"], size, f"{static['grown_on']:.3f}", f"{static['held_out']:.3f}",
                f"{static['measured']:.3f}", str(static["steps"]), f"{off:+.1%}",
            ])  # fmt: skip
    return [
        markdown(["heads", "found by", *(f"{size} nodes" for size in SIZES)], ways),
        markdown(["heads", "nodes", "dynamic tree", "static", "dynamic", "more"], dynamic),
        markdown(
            ["heads", "nodes", "predicted, other texts", "predicted, same texts", "measured", "steps", "error"],
            predicted,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    for family in parser.parse_args().families:
        found = measure(family)
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
        every = sorted([*(one for one in known if one["family"] != family), found], key=lambda one: one["family"])
        RESULTS.write_text(json.dumps(every, indent=1) + "\n")
    print("\n\n".join(tables(json.loads(RESULTS.read_text()))))


if __name__ == "__main__":
    main()
