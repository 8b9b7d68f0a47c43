"""Heads that learn from what they serve: tokens per step, a hundred requests at a time.

    python benchmarks/learning.py --heads eagle3                      # the bundled heads, completions of Python files
    python benchmarks/learning.py --heads hydra++ --fresh             # heads just made
    python benchmarks/learning.py --heads eagle3 --then docs/*.md     # other texts from the middle on
    python benchmarks/learning.py --heads eagle3 --busy               # no idle time: the share of the time alone

The bundled base completes pieces of files (default: the configuration files of transformers), greedily and in float32,
48 tokens each. Requests come in twenties, behind which nobody asks for a while, unless `--busy`; `--still` leaves the
heads as they are.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_drafthead
from hf_drafthead import zoo

AT_ONCE, LINES, LONGEST = 20, 12, 64


def prompts(tokenizer: Any, files: list[Path], count: int, seed: int) -> list[list[int]]:
    """Beginnings of pieces of files."""
    dice, found = random.Random(seed), list[list[int]]()
    while len(found) < count:
        lines = dice.choice(files).read_text("utf-8", "ignore").splitlines(keepends=True)
        first = dice.randrange(max(len(lines) - LINES, 1))
        ids = tokenizer("".join(lines[first : first + LINES])[:2000])["input_ids"][:LONGEST]
        found += [ids] if len(ids) > LONGEST // 2 else []
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--heads", default="eagle3")
    options.add_argument("--requests", type=int, default=500)
    options.add_argument("--files", nargs="+", type=Path)
    options.add_argument("--then", nargs="+", type=Path, help="files of the second half of the requests")
    options.add_argument("--share", type=float, default=0.1)
    for flag in ("--fresh", "--busy", "--still"):
        options.add_argument(flag, action="store_true")
    asked = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    if asked.fresh:
        model = hf_drafthead.from_base(zoo.path("base"), asked.heads).float()
    else:
        model = AutoModelForCausalLM.from_pretrained(zoo.path(asked.heads), dtype=torch.float32)
    files = asked.files or sorted((Path(transformers.__file__).parent / "models").rglob("configuration_*.py"))
    half = asked.requests // 2 if asked.then else asked.requests
    requests = prompts(tokenizer, files, half, 0)
    requests += prompts(tokenizer, asked.then, asked.requests - half, 1) if asked.then else []
    manager = model.init_continuous_batching(slots=8, draft_tree={"dynamic": {"nodes": 16}})
    learner = None if asked.still else manager.learn(share=asked.share)
    manager.start()
    metrics, before, begun = manager.figures, (0, 0, 0), time.perf_counter()
    for first in range(0, len(requests), AT_ONCE):
        for name in manager.add_requests(requests[first : first + AT_ONCE], max_new_tokens=48, do_sample=False):
            assert manager.get_result(name).error is None
        while learner is not None and learner.wants and not asked.busy:
            time.sleep(0.01)
        if (done := first + AT_ONCE) % 100 == 0:
            now = metrics.tokens, metrics.finished, metrics.rows
            tokens, finished, rows = (after - then for after, then in zip(now, before))
            before, spent = now, 0.0 if learner is None else learner.spent / (learner.spent + learner.served)
            counts = {} if learner is None else {name[9:]: round(value, 3) for name, value in learner.counts().items()}
            print(f"{done - 99} to {done}: {(tokens - finished) / rows:.3f} tokens per step, {spent:.1%} of the time")
            print(f"    {counts}, {time.perf_counter() - begun:.0f} s", flush=True)
    manager.stop()


if __name__ == "__main__":
    main()
