"""Tokens per step under sampling: guesses that know the coming noise, guesses that do not, rejection and typical.

    python benchmarks/sampling.py --prompts 40 --temperature 0.7,1.0
    python benchmarks/sampling.py --children          # one node alone: how often one of its children is right
    python benchmarks/sampling.py --trees --families eagle --prompts 8 --temperature 1.0  # other trees of 64 nodes
    python benchmarks/sampling.py --cost              # the share of a step that drawing ahead takes

The zoo's held-out prompts, 96 new tokens each, no top-k and no top-p, the published 64-node tree. Prompts are decoded
in batches of 8; every text of the exact methods is compared with the base's own under the same seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from figures import SAMPLING, markdown, samplings
from step import SHAPES, random_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_drafthead import zoo
from hf_drafthead.evaluation.calls import batched, draft, encode, encode_all, steps_of
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.generation.acceptance import rejection_choices
from hf_drafthead.generation.rules import Rules
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import Candidates
from hf_drafthead.generation.step import Step
from hf_drafthead.generation.tree import DraftTree, DynamicTree
from hf_drafthead.trees.grow import grow_tree
from hf_drafthead.trees.rank_paths import own_texts, rank_paths, tilt_of_seed

NEW_TOKENS, BATCH_SIZE = 96, 8
ACCEPTANCE = {"shared noise": "exact", "plain top-k": "exact", "rejection": "rejection", "typical": "typical"}

Prompts = Sequence[Mapping[str, torch.Tensor]]


def outputs(
    model: PreTrainedModel, prompts: Prompts, settings: Mapping[str, Any], method: str, tree: Any = DEFAULT_TREE
) -> Iterator[Any]:
    """What the model generates by one of the methods, batch by batch, each from a seed of its own."""
    tilt = Rules.tilt
    if method == "plain top-k":
        Rules.tilt = lambda self, noise: torch.zeros_like(noise)  # type: ignore[method-assign]
    try:
        for seed, given in enumerate(prompts):
            torch.manual_seed(seed)
            yield draft(model, tree, given, {**settings, "acceptance": ACCEPTANCE[method]})
    finally:
        Rules.tilt = tilt  # type: ignore[method-assign]


def texts_of_base(model: PreTrainedModel, prompts: Prompts, settings: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the base samples from the same seeds."""
    texts = []
    for seed, given in enumerate(prompts):
        torch.manual_seed(seed)
        texts.append(model.base.generate(**given, **settings))
    return texts


def trees(
    model: PreTrainedModel, prompts: Prompts, others: Sequence[torch.Tensor], temperature: float, nodes: int = 64
) -> Iterator[list[str]]:
    """Tokens per step of shared noise and of rejection with the published tree, with one grown on what the base samples
    for other prompts, and of shared noise with a dynamic tree, all of the same size."""
    settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": NEW_TOKENS}
    texts = own_texts(model, others, NEW_TOKENS, temperature, top_k=0)
    ranks = rank_paths(model, *texts, tilt=tilt_of_seed(model, len(others), NEW_TOKENS, temperature))
    deepest = model.drafter.max_depth
    asked = {
        "published": DEFAULT_TREE,
        "grown on sampled texts": DraftTree(grow_tree(ranks, nodes)),
        "dynamic": DynamicTree(nodes, min(6, deepest or 6), 8),
    }
    for name, tree in asked.items():
        cells = []
        for method in ("shared noise", "rejection") if name != "dynamic" else ("shared noise",):
            found = outputs(model, prompts, settings, method, tree)
            cells.append(f"{tokens_per_step(map(steps_of, found)) or 0:.2f}")
        yield [f"{temperature:g}", name, *cells, *[""] * (2 - len(cells))]


def children(draws: int = 4_000, vocabulary: int = 400) -> str:
    """How often one of a node's children is what follows, for distributions made at random, as a table."""
    torch.manual_seed(0)
    rows = []
    for spread in (1.0, 2.5, 5.0):
        logits = spread * torch.randn(vocabulary)
        p, q = logits.softmax(-1), (logits + torch.randn(vocabulary)).softmax(-1)
        for count in (1, 2, 8):
            tree = DraftTree([(rank,) for rank in range(count)])
            noise = torch.empty(draws, vocabulary).exponential_(1)
            tokens = torch.cat([torch.zeros(draws, 1).long(), (q / noise).topk(count).indices], dim=1)
            known = (tokens[:, 1:] == (p / noise).argmax(-1, keepdim=True)).any(1)
            best = p[q.topk(count).indices].sum()
            laws = [law.expand(draws, count + 1, vocabulary) for law in (p, q)]
            chance, last = torch.rand(draws, count + 1), torch.empty(draws, vocabulary).exponential_(1)
            chosen = rejection_choices(*laws, Candidates(tokens, tree.topology()), chance, last)[:, 0]
            taken = (tokens[:, 1:] == chosen[:, None]).any(1)
            entropy, distance = -(p * p.log()).sum(), (p - q).abs().sum() / 2
            shares = (known.float().mean(), best, taken.float().mean())
            facts = [f"{entropy:.1f}", f"{distance:.2f}", str(count)]
            rows.append([*facts, *(f"{float(share):.2f}" for share in shares)])
    return markdown(["entropy", "distance of p and q", "children", "shared noise", "plain top-k", "rejection"], rows)


def cost_of_drawing(
    model: PreTrainedModel, given: Mapping[str, torch.Tensor], new_tokens: int, rounds: int
) -> list[str]:
    """Nodes, milliseconds of a step and of drawing ahead in it, and its share: medians over the steps of some calls."""
    drawing, steps = [], []
    noise_ahead = Step.noise_ahead

    def timed(self: Step, state: Any) -> Any:
        start = time.perf_counter()
        drawn = noise_ahead(self, state)
        drawing.append(time.perf_counter() - start)
        return drawn

    tree = DraftTree.resolve(DEFAULT_TREE, model.drafter.max_depth, model.config.get_text_config().vocab_size)
    Step.noise_ahead = timed  # type: ignore[method-assign]
    try:
        for seed in range(rounds + 1):
            if seed == 1:  # the first call warms up
                drawing.clear()
                steps.clear()
            torch.manual_seed(seed)
            model.generate(
                **given,
                do_sample=True,
                top_k=0,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                draft_tree=tree,
                on_step=lambda record: steps.append(record.seconds["step"]) if record.step else None,
            )
    finally:
        Step.noise_ahead = noise_ahead  # type: ignore[method-assign]
    step, drawn = statistics.median(steps), statistics.median(drawing)
    return [str(tree.num_nodes), f"{1e3 * step:.2f}", f"{1e3 * drawn:.3f}", f"{drawn / step:.1%}"]


def costs(families: Sequence[str], shape: str | None, vocabulary: int) -> str:
    """What drawing ahead costs the bundled models, or random weights of a shape with a large vocabulary, as a table."""
    rows = []
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    for family in families if shape is None else []:
        model = AutoModelForCausalLM.from_pretrained(zoo.path(family)).eval()
        rows.append([family, *cost_of_drawing(model, tokenizer("import os\n\n\ndef", return_tensors="pt"), 96, 3)])
    if shape is not None:
        model = random_model(shape, "eagle", torch.float32, "cpu", vocabulary=vocabulary)
        given = {"input_ids": torch.arange(16)[None]}
        rows.append([f"eagle, {shape} shape, {vocabulary:,} tokens", *cost_of_drawing(model, given, 6, 1)])
    return markdown(["heads", "nodes", "step, ms", "drawing ahead, ms", "share"], rows)


def main() -> None:
    """Measure, and keep every line as soon as it is known; then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(zoo.families()))
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--temperature", default="0.7,1.0")
    parser.add_argument("--methods", default=",".join(ACCEPTANCE))
    parser.add_argument("--children", action="store_true", help="one node alone, with distributions made at random")
    parser.add_argument("--trees", action="store_true", help="shared noise and rejection with other trees of 64 nodes")
    parser.add_argument("--cost", action="store_true", help="what drawing ahead takes of a step, at batch size 1")
    parser.add_argument("--shape", choices=SHAPES, help="with --cost: random weights of this shape instead")
    parser.add_argument("--vocabulary", type=int, default=128000, help="tokens of --shape")
    asked = parser.parse_args()
    if asked.cost:
        print(costs(asked.families.split(","), asked.shape, asked.vocabulary))
        return
    if asked.children:
        print(children())
        return
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    every = read_questions(zoo.ASSETS / "prompts.jsonl")
    questions = every[: asked.prompts]
    methods, command = asked.methods.split(","), " ".join(["python", *sys.argv])
    expected: dict[float, list[torch.Tensor]] = {}
    for family in asked.families.split(","):
        model = AutoModelForCausalLM.from_pretrained(zoo.path(family)).eval()
        prompts = encode_all(model, tokenizer, batched(questions, BATCH_SIZE), NEW_TOKENS)
        if asked.trees:
            others = [encode(model, tokenizer, [text.text])["input_ids"][0] for text in every[asked.prompts :][:16]]
            temperatures = map(float, asked.temperature.split(","))
            rows = [[family, *row] for heat in temperatures for row in trees(model, prompts, others, heat)]
            print(markdown(["heads", "temperature", "tree", "shared noise", "rejection"], rows), flush=True)
            continue
        for temperature in map(float, asked.temperature.split(",")):
            settings = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": NEW_TOKENS}
            if temperature not in expected:
                expected[temperature] = texts_of_base(model, prompts, settings)
            line: dict[str, Any] = {"family": family, "temperature": temperature, "prompts": len(questions)}
            line |= {"command": command, "different": 0}
            for method in methods:
                found = list(outputs(model, prompts, settings, method))
                line[method] = round(tokens_per_step(map(steps_of, found)) or 0, 3)
                if ACCEPTANCE[method] == "exact":
                    pairs = zip(expected[temperature], found, strict=True)
                    line["different"] += sum(not torch.equal(text, output.sequences) for text, output in pairs)
            with SAMPLING.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    if not asked.trees:
        print(samplings())


if __name__ == "__main__":
    main()
