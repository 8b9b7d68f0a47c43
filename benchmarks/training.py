"""Does it matter how heads are trained? Medusa heads for the bundled base, several seeds of each way.

    python benchmarks/training.py --train             # what benchmarks/results/training.jsonl has no line for
    python benchmarks/training.py                     # the table, from the lines that are there

- other text: 600 steps on the corpus, which the base did not write
- own text: 600 steps on what the base writes when it goes on from the corpus (self-distillation)
- medusa-2: the first 300 steps as in own text, then 300 in which the base learns along through adapters, from its own
  distribution without them

A step is 8 rows of 256 tokens. Tokens per step are measured greedily on the zoo's held-out prompts with the published
64-node tree, against the base that the heads belong to; perplexity is that base's, on held-out files.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from pathlib import Path

import torch
from families import NEW_TOKENS, TREE, measured, texts_of
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_drafthead import MedusaForCausalLM, zoo
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.lora import add_lora, merge_lora
from hf_drafthead.training.trainer import DraftHeadTrainer
from hf_drafthead.zoo.corpus import read_corpus
from hf_drafthead.zoo.own_text import OwnRows
from hf_drafthead.zoo.tokenizer import pack

RESULTS = Path(__file__).parent / "results" / "training.jsonl"
STEPS = 600
WAYS = ("other text", "own text", "medusa-2")
SETTINGS = {
    "per_device_train_batch_size": 8,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 50,
    "weight_decay": 0.0,
    "logging_steps": 100,
    "save_strategy": "no",
    "remove_unused_columns": False,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}
JOINT = {"base_weight": 1.0, "base_objective": "itself", "base_learning_rate": 1e-3, "heads_weight": 0.2}


def trained(way: str, seed: int, work: Path):
    """A Medusa model on a base of its own."""
    base = AutoModelForCausalLM.from_pretrained(zoo.path("base"))
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    rows, _ = texts_of(base, tokenizer, work)
    set_seed(seed)
    model = MedusaForCausalLM.from_base(base, num_draft_heads=4)
    if way == "other text":
        files = [file for file in read_corpus() if not file.held_out]
        corpus = pack(tokenizer, files, 256)
        picked = torch.randperm(len(corpus), generator=torch.Generator().manual_seed(seed))[: len(rows)]
        fit(model, OwnRows(corpus[picked], rows.given), seed, STEPS)
    elif way == "own text":
        fit(model, rows, seed, STEPS)
    else:
        fit(model, rows, seed, STEPS // 2)
        add_lora(model)
        fit(model, OwnRows(rows.rows, rows.given), seed + 100, STEPS // 2, **JOINT)
        merge_lora(model)
    return model.eval(), tokenizer


def fit(model, rows: OwnRows, seed: int, steps: int, **more) -> None:
    """Train with the Trainer, keeping nothing but the weights."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = DraftHeadTrainingArguments(output_dir=folder, seed=seed, max_steps=steps, **SETTINGS, **more)
        DraftHeadTrainer(model, arguments, train_dataset=rows).train()


@torch.no_grad()
def perplexity(base, tokenizer) -> float:
    """On the first 64 packed rows of the held-out files."""
    rows = pack(tokenizer, [file for file in read_corpus() if file.held_out], 512)[:64]
    losses = [base(part, labels=part).loss.item() for part in rows.split(8)]
    return math.exp(sum(losses) / len(losses))


def lines() -> list[dict]:
    """What was measured so far."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", action="store_true", help="train and measure what is missing")
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--work", type=Path, default=Path(".zoo-build"), help="where texts are kept")
    args = parser.parse_args()
    for seed in args.seeds if args.train else []:
        for way in args.ways:
            if any((line["way"], line["seed"]) == (way, seed) for line in lines()):
                continue
            model, tokenizer = trained(way, seed, args.work)
            line = {
                "way": way,
                "seed": seed,
                "steps": STEPS,
                "tokens_per_step": round(measured(model, tokenizer), 4),
                "perplexity": round(perplexity(model.base, tokenizer), 4),
            }
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(line, flush=True)
    print(f"\n| way | tokens per step ({TREE}, {NEW_TOKENS} tokens) | perplexity | seeds |\n|---|---|---|---|")
    for way in WAYS:
        taken = [line for line in lines() if line["way"] == way]
        if taken:
            taus = [line["tokens_per_step"] for line in taken]
            error = statistics.stdev(taus) / len(taus) ** 0.5 if len(taus) > 1 else float("nan")
            mean = statistics.mean(line["perplexity"] for line in taken)
            print(f"| {way} | {statistics.mean(taus):.3f} ± {error:.3f} | {mean:.3f} | {len(taken)} |")


if __name__ == "__main__":
    main()
