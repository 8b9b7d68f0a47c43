"""Tokens per step of every head family over several training seeds, and of Amphista with parts left out.

    python benchmarks/families.py --train             # heads that benchmarks/results/families.jsonl has no line for
    python benchmarks/families.py --train --seeds 0 1 --heads "eagle3, 100 steps" "eagle3.1, 100 steps" --texts 1200
    python benchmarks/families.py                     # the tables, from the lines that are there
    python benchmarks/families.py --docs docs benchmarks/results    # and into the pages
    python benchmarks/families.py --again .zoo-build/families/*     # trained heads, as chains and in small trees

Every training is the zoo's (`zoo_recipe/heads.py`): same text, same steps; with parts left out half of them, and the
norms of EAGLE 3.1 are compared over 100 steps. The base's hidden states are computed once for all. Seed 0 of a family
is the bundled model itself. Heads are measured greedily on the zoo's held-out prompts, 96 new tokens each, with the
published 64-node tree; every text is compared with the base's own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from figures import (
    accuracies,
    chat_bench,
    chat_curve,
    chat_families,
    chat_topics,
    fill,
    markdown,
    steps,
    trainings,
)
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from zoo_recipe.build import OWN_TEXTS, STEPS, own_data
from zoo_recipe.heads import AMPHISTA, FAMILIES, HEADS, Recipe, train_heads

from hf_drafthead import zoo
from hf_drafthead.evaluation.calls import draft, encode, steps_of
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.tree import resolve

RESULTS = Path(__file__).parent / "results" / "families.jsonl"
NEW_TOKENS = 96


def without(**fields) -> Recipe:
    """Amphista with these config fields."""
    return Recipe("amphista", {**HEADS, **fields}, AMPHISTA)


OF_2026 = ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")
ABLATION_STEPS = STEPS // 2
ABLATIONS = {
    "amphista with all parts": without(),
    "amphista without auto-embedding": without(num_auto_embedding_layers=0),
    "amphista without adaptation": without(num_stages=0),
    "amphista without sampled token": without(use_sampled_token=False),
    "amphista with one stage": without(num_stages=1),
    "amphista without head positions": without(use_head_positions=False),
}
# EAGLE 3.1 beside EAGLE-3.
NORMS_STEPS = 100
NORMS = {f"{name}, {NORMS_STEPS} steps": FAMILIES[name] for name in ("eagle3", "eagle3.1")}
# Drafters of 2026 beside EAGLE-3: one pass over a quarter of a million tokens (`--texts 1024`, of 256 tokens each).
YOUNG_STEPS = 128
YOUNG = {f"{name}, {YOUNG_STEPS} steps": FAMILIES[name] for name in OF_2026}
DEEP = Recipe("peagle", {**FAMILIES["peagle"].fields, "num_layers": 4}, FAMILIES["peagle"].arguments)  # as published
YOUNG[f"peagle of 4 layers, {YOUNG_STEPS} steps"] = DEEP

# Amphista's recipe was chosen among these.
TRIED = {
    f"amphista, {name}": Recipe("amphista", HEADS, arguments)
    for name, arguments in {
        "the text's tokens alone": {},
        "both objectives": {"teacher_weight": 1.0},
        "both, weight decay 0.1": {"teacher_weight": 1.0, "weight_decay": 0.1},
        "both, rate 2.5e-3": {"teacher_weight": 1.0, "learning_rate": 2.5e-3},
        "both, rate 6e-3, weight decay 0.1": {"teacher_weight": 1.0, "learning_rate": 6e-3, "weight_decay": 0.1},
        "both, rate 8e-3, weight decay 0.1": {"teacher_weight": 1.0, "learning_rate": 8e-3, "weight_decay": 0.1},
    }.items()
}


def measured(model: PreTrainedModel, tokenizer, draft_tree: object = DEFAULT_TREE) -> float:
    """Tokens per step on the held-out prompts; every text must be the base's own."""
    prompts = [prompt.text for prompt in read_questions(zoo.ASSETS / "prompts.jsonl")]
    tree = resolve(draft_tree, model.drafter.max_depth, model.base.config.vocab_size)
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    accepted = []
    for first in range(0, len(prompts), 8):
        given = encode(model, tokenizer, prompts[first : first + 8])
        output = draft(model, tree, given, settings)
        assert torch.equal(output.sequences, model.base.generate(**given, **settings))
        accepted.append(steps_of(output))
    return tokens_per_step(accepted)


def train(names: list[str], seeds: list[int], work: Path, texts: int) -> None:
    """Add a line for every (name, seed) that has none yet."""
    base = AutoModelForCausalLM.from_pretrained(zoo.path("base"))
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    recipes = {**FAMILIES, **ABLATIONS, **NORMS, **YOUNG, **TRIED}
    for seed in seeds:
        for name in names:
            if any((line["heads"], line["seed"]) == (name, seed) for line in lines()):
                continue
            start = time.perf_counter()
            lengths = {**dict.fromkeys(ABLATIONS, ABLATION_STEPS), **dict.fromkeys(NORMS, NORMS_STEPS)}
            length = (lengths | dict.fromkeys(YOUNG, YOUNG_STEPS)).get(name, STEPS)
            if seed == 0 and name in FAMILIES:
                model = AutoModel.from_pretrained(zoo.path(name))
            else:
                data = own_data(base, tokenizer, work, texts)
                folder = work / "families" / f"{name} {seed}"
                place = Path(zoo.path("base"))
                model = train_heads(recipes[name], place, data, folder, steps=length, seed=seed).model
            line = {
                "heads": name,
                "seed": seed,
                "steps": length,
                "parameters": sum(parameter.numel() for parameter in model.drafter.parameters()),
                "tokens_per_step": round(measured(model, tokenizer), 4),
                "minutes": round((time.perf_counter() - start) / 60, 1),
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)


def measure_again(folder: Path) -> None:
    """Print the tokens per step of trained heads as a chain of five guesses, and in dynamic trees of 16 nodes."""
    model = AutoModel.from_pretrained(folder, base_model=zoo.path("base"))
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    trees = {"chain": [[0] * depth for depth in range(1, 6)], "dynamic, 16 nodes": {"dynamic": {"nodes": 16}}}
    print(folder.name, {name: round(measured(model, tokenizer, tree), 3) for name, tree in trees.items()}, flush=True)


def lines() -> list[dict]:
    """What was measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def table(title: str, unit: str, names: Sequence[str]) -> str:
    """Mean and standard error over seeds, in Markdown, for names in the order of the recipes and the unit they have."""
    means = {}
    for name in [*FAMILIES, *ABLATIONS, *NORMS, *YOUNG, *TRIED]:
        taken = [line for line in lines() if line["heads"] == name]
        if taken and (name in names or name == unit):
            values = [line["tokens_per_step"] for line in taken]
            error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
            means[name] = (statistics.mean(values), error, len(values), taken[0]["parameters"])
    rows = []
    for name, (mean, error, seeds, parameters) in means.items():
        ratio = f"{mean / means[unit][0]:.3f}" if unit in means else "?"
        spread = "" if error is None else f" ± {error:.3f}"
        rows.append([name, f"{mean:.3f}{spread}", str(seeds), ratio, f"{parameters:,}"])
    return markdown([title, "tokens per step", "seeds", f"against {unit}", "parameters"], rows)


def of_families(names: Sequence[str] = ()) -> str:
    """The families' table."""
    return table("family", "medusa", names or list(FAMILIES))


def of_ablations(names: Sequence[str] = ()) -> str:
    """The table of Amphista with parts left out."""
    title = f"amphista, {ABLATION_STEPS} steps"
    return table(title, "amphista with all parts", names or list(ABLATIONS))


def of_norms(names: Sequence[str] = ()) -> str:
    """The table of EAGLE 3.1 beside EAGLE-3."""
    return table("heads", next(iter(NORMS)), names or list(NORMS))


def of_young(names: Sequence[str] = ()) -> str:
    """The table of drafters of 2026 beside EAGLE-3."""
    return table("heads", next(iter(YOUNG)), names or list(YOUNG))


def of_tried(names: Sequence[str] = ()) -> str:
    """The table of recipes that Amphista's was chosen from."""
    return table("recipe", "amphista", names or list(TRIED))


TABLES = {
    "families": of_families,
    "ablations": of_ablations,
    "norms": of_norms,
    "young": of_young,
    "tried": of_tried,
    "accuracies": accuracies,
    "chat-families": chat_families,
    "chat-topics": chat_topics,
    "chat-curve": chat_curve,
    "chat-bench": chat_bench,
    "steps": steps,
    "trainings": trainings,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train and measure what is missing")
    names = [*FAMILIES, *ABLATIONS, *NORMS, *YOUNG, *TRIED]
    parser.add_argument("--heads", nargs="*", default=names, choices=names)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--texts", type=int, default=OWN_TEXTS, help="of the base, which the heads learn from")
    parser.add_argument("--work", type=Path, default=Path(".zoo-build"), help="where texts and checkpoints are kept")
    parser.add_argument(
        "--docs", type=Path, nargs="*", default=[], metavar="DIR", help="also write the tables into the pages under DIR"
    )
    parser.add_argument(
        "--again", type=Path, nargs="*", default=[], metavar="DIR", help="trained heads, to measure in other trees"
    )
    args = parser.parse_args()
    for folder in args.again:
        measure_again(folder)
    if args.again:
        return
    if args.train:
        train(args.heads, args.seeds, args.work, args.texts)
    print(f"\n{of_families()}\n\n{of_ablations()}\n\n{of_young()}")
    for page in (page for folder in args.docs for page in fill(folder, TABLES)):
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
