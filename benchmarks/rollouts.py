"""GRPO with a base that moves away under its heads: tokens per step of the rollouts, learning beside stale.

    python benchmarks/rollouts.py                  # both, ten steps a line
    python benchmarks/rollouts.py --rate 3e-4 --steps 60

The recipe of docs/wiring.md (TRL) with the bundled EAGLE-3 heads. Guesses decide no text, so that both runs train the
same base on the same rollouts, which is checked; what differs is how many steps these take.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import zoo
from hf_drafthead.evaluation.questions import read_questions

EACH = 10  # steps of a line


def run(asked: argparse.Namespace, learning: bool) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """All rollouts, and of each step how many tokens its rows took, and in how many steps of a row."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path(asked.heads), dtype=torch.float32)
    model.base.requires_grad_(True)
    model.drafter.requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    rollouts: list[list[int]] = []
    counts: list[tuple[int, int]] = []
    generate_batch = model.generate_batch

    def counted(prompts: list[list[int]], *args: Any, **named: Any) -> Any:
        outputs = generate_batch(prompts, *args, **named, draft_tree="mc_sim_7b_63")
        done = [*outputs.values()]
        tokens = sum(len(output.generated_tokens) - 1 for output in done)
        counts.append((tokens, tokens - sum(output.accepted for output in done)))
        rollouts.extend(output.generated_tokens for output in done)
        if learning:
            model.learn_from(prompts, [output.generated_tokens for output in done])
        return outputs

    model.generate_batch = counted
    starts = [prompt.text[:60] for prompt in read_questions(zoo.ASSETS / "prompts.jsonl")]
    with tempfile.TemporaryDirectory() as folder:
        settings = trl.GRPOConfig(
            folder,
            max_steps=asked.steps,
            learning_rate=asked.rate,
            lr_scheduler_type="constant",
            per_device_train_batch_size=16,
            num_generations=4,
            max_completion_length=48,
            use_transformers_continuous_batching=True,
            transformers_continuous_batching_config={"max_requests_per_batch": 8},
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trl.GRPOTrainer(
            model,
            lambda completions, **_: [float(len(set(text.split()))) for text in completions],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": start} for start in starts]),
            processing_class=tokenizer,
        ).train()
    return rollouts, counts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--heads", default="eagle3")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--rate", type=float, default=1e-4, help="of the base; constant")
    asked = options.parse_args()
    (stale, before), (learned, after) = run(asked, False), run(asked, True)
    print(f"the same rollouts: {stale == learned}")
    for first in range(0, asked.steps, EACH):
        taken = [[sum(part) for part in zip(*counts[first : first + EACH])] for counts in (before, after)]
        old, new = (tokens / steps for tokens, steps in taken)
        last = min(first + EACH, asked.steps)
        print(f"steps {first + 1} to {last}: stale {old:.3f}, learning {new:.3f}, {new / old:.3f}")


if __name__ == "__main__":
    main()
