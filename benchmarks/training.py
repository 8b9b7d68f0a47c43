"""Does it matter how heads are trained? Medusa heads for the bundled base, several seeds of each way.

    python benchmarks/training.py --train             # what benchmarks/results/training.jsonl has no line for
    python benchmarks/training.py                     # the table, from the lines that are there

- other text: 600 steps on the corpus, which the base did not write
- own text: 600 steps on what the base writes when it goes on from the corpus (self-distillation)
- medusa-2: as own text, but the base learns along through adapters: its own distribution without them, and, with a
  weight that rises to a fiftieth, to be foreseen by its heads

A step is 8 rows of 256 tokens. Tokens per step are measured greedily on the zoo's held-out prompts with the published
64-node tree, against the base that the heads belong to; perplexity is that base's, on held-out files. `foretold` is
what the training said at its end for its held-out rows, `generated` what `generate` then gave on the same rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
from pathlib import Path

import torch
from families import measured
from figures import TRAININGS, trainings
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo_recipe.build import own_data
from zoo_recipe.corpus import read_corpus
from zoo_recipe.heads import ALIKE, HEADS
from zoo_recipe.own_text import OwnRows
from zoo_recipe.tokenizer import pack

from hf_drafthead import zoo
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling import DraftHeadPreTrainedModel
from hf_drafthead.training.examples import PreparedData, own_prompts
from hf_drafthead.training.run import FORETOLD_PROMPTS, Trained, train_heads

BASE = zoo.path("base")
STEPS = 600
ANSWER_TOKENS = 192  # with the 64 that are given as long as the rows
WAYS = ("other text", "own text", "medusa-2")
JOINT = {
    "joint": True,
    "base_objective": "itself",
    "base_learning_rate": 1e-3,
    "heads_weight": 0.02,
    "heads_schedule": "sine",
}


def trained(way: str, seed: int, work: Path) -> tuple[Trained, PreparedData]:
    """Medusa heads, on a base of their own where it learnt too, and what they learnt from."""
    base, tokenizer = (one.from_pretrained(BASE) for one in (AutoModelForCausalLM, AutoTokenizer))
    data = own_data(base, tokenizer, work)
    with tempfile.TemporaryDirectory() as folder:
        if way == "medusa-2":
            return fit(data, folder, seed, **JOINT), data
        if way == "other text":
            files = [file for file in read_corpus() if not file.held_out]
            corpus = pack(tokenizer, files, data.rows.rows.shape[1])
            picked = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(seed))[: len(data.rows)]
            data = dataclasses.replace(data, rows=OwnRows(corpus[picked], data.rows.given))
        return fit(data, folder, seed), data


def fit(data: PreparedData, folder: str, seed: int, **more) -> Trained:
    """What `hf-drafthead train` does."""
    given = {**ALIKE, "save_strategy": "no", "max_steps": STEPS, "seed": seed, "answer_tokens": ANSWER_TOKENS, **more}
    return train_heads(BASE, "medusa", data, folder, fields=HEADS, **given)


def generated(model: DraftHeadPreTrainedModel, data: PreparedData) -> tuple[float, int]:
    """Tokens per step of `generate` on the rows of the expected figure, and the number of steps."""
    prompts = torch.stack(own_prompts(data.held_out, FORETOLD_PROMPTS, data.rows.given))
    settings = {"do_sample": False, "max_new_tokens": ANSWER_TOKENS, "draft_tree": DEFAULT_TREE}
    accepted = []
    for part in prompts.split(8):
        output = model.generate(part, attention_mask=torch.ones_like(part), return_dict_in_generate=True, **settings)
        accepted.append(output.accepted_lengths)
    return tokens_per_step(accepted), sum(int((lengths > 0).sum()) for lengths in accepted)


@torch.no_grad()
def perplexity(base, tokenizer) -> float:
    """On the first 64 packed rows of the held-out files."""
    rows = pack(tokenizer, [file for file in read_corpus() if file.held_out], 512)[:64]
    losses = [base(part, labels=part).loss.item() for part in rows.split(8)]
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train and measure what is missing")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path(".zoo-build"), help="where texts are kept")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    done = [json.loads(line) for line in TRAININGS.read_text().splitlines()] if TRAININGS.is_file() else []
    for seed in args.seeds if args.train else []:
        for way in args.ways:
            if any((line["way"], line["seed"]) == (way, seed) for line in done):
                continue
            told, data = trained(way, seed, args.work)
            model = told.model
            there, steps = generated(model, data)
            line = {
                "way": way,
                "seed": seed,
                "steps": STEPS,
                "expected": round(told.summary["tokens_per_step"], 4),
                "generated": round(there, 4),
                "generated_steps": steps,
                "tokens_per_step": round(measured(model, tokenizer), 4),
                "perplexity": round(perplexity(model.base, tokenizer), 4),
            }
            with TRAININGS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    print(f"\n{trainings()}")


if __name__ == "__main__":
    main()
