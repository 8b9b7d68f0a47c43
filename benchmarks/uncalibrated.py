"""What `generate` takes on a CPU that heads were not calibrated for, against the base: calls in turn, in one process.

    python benchmarks/uncalibrated.py                        # the zoo's heads: float32 and bfloat16; 1, 2 and 8 rows
    python benchmarks/uncalibrated.py HEADS [HEADS ...] --base BASE --prompts QUESTIONS.jsonl --rows 1 8

Each case is measured without entries, and with those of the heads as if they came from another CPU. What steps cost is
measured anew for each, in its first call, which is not counted: `finding_out` is what that took, in steps of the base.

Calls take turns, each on the next prompts, greedily, with one thread. `speedup` is the base's seconds over those with
heads, of all calls, in time of the process: what else the machine does changes it little. The figures go to
results/uncalibrated.json, under the names of the heads' folders.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from figures import markdown

from hf_drafthead import costs, zoo
from hf_drafthead.evaluation.calls import encode_turn, steps_of
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import tokens_per_step
from hf_drafthead.evaluation.questions import Question, read_questions

RESULTS = Path(__file__).parent / "results" / "uncalibrated.json"


def measure(
    model: Any, tokenizer: Any, questions: list[Question], entries: list, *, rows: int, calls: int, tokens: int
) -> dict[str, float | int]:
    """Speedup, its lowest and highest, tokens per step of the calls that drafted, and texts equal to the base's."""
    model.generation_config.calibration = entries
    costs.FILE = Path(tempfile.mkdtemp()) / "costs.json"
    spent: list[float] = []
    kept, costs.StepCosts._measured = costs.StepCosts._measured, timed(costs.StepCosts._measured, spent)
    settings = {"do_sample": False, "eos_token_id": None, "max_new_tokens": tokens}
    seconds: dict[str, list[float]] = {"base": [], "heads": []}
    same, steps = 0, []
    for turn in range(calls + 1):
        asked = [questions[(turn * rows + row) % len(questions)] for row in range(rows)]
        given = {**encode_turn(model, tokenizer, asked, [()] * rows), **settings}
        runs = {
            "base": functools.partial(model.base.generate, **given),
            "heads": functools.partial(model.generate, **given, return_dict_in_generate=True),
        }
        outputs = {}
        for name in [*runs][:: 1 if turn % 2 else -1]:
            start = time.process_time()
            outputs[name] = runs[name]()
            seconds[name].append(time.process_time() - start)
        same += turn > 0 and torch.equal(outputs["heads"].sequences, outputs["base"])
        if turn and getattr(outputs["heads"], "accepted_lengths", None) is not None:
            steps.append(steps_of(outputs["heads"]))
    costs.StepCosts._measured = kept
    base, heads = seconds["base"][1:], seconds["heads"][1:]  # the first call prepares
    each = [one / other for one, other in zip(base, heads, strict=True)]
    return {
        "speedup": round(sum(base) / sum(heads), 3),
        "lowest": round(min(each), 3),
        "highest": round(max(each), 3),
        "tokens_per_step": round(tokens_per_step(steps) or 1.0, 3),
        "finding_out": round(sum(spent) / (sum(base) / calls / tokens), 2),
        "same_text": same,
        "calls": calls,
    }


def timed(function: Any, spent: list[float]) -> Any:
    """The function, which notes the seconds that it takes."""

    def run(*given: Any) -> Any:
        start = time.process_time()
        try:
            return function(*given)
        finally:
            spent.append(time.process_time() - start)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="*", help="folders or ids; default: every one in the zoo")
    parser.add_argument("--base", help="the base, where the heads name another place")
    parser.add_argument("--prompts", default=str(zoo.ASSETS / "prompts.jsonl"), help="questions; the first turn counts")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 8])
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    questions = read_questions(args.prompts)
    questions = [question for first in range(7) for question in questions[first::7]]  # categories mixed
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for path in args.heads or [zoo.path(family) for family in zoo.families()]:
        for dtype in args.dtype:
            model, tokenizer = load(
                str(path), dtype=getattr(torch, dtype), **({"base_model": args.base} if args.base else {})
            )
            entries = [
                {**entry, "device": "another CPU"}
                for entry in getattr(model.generation_config, "calibration", None) or []
            ]
            foreign = [entry for entry in entries if entry.get("threads")]
            for rows, kind in itertools.product(args.rows, ("none", "foreign")[: 1 + bool(foreign)]):
                layers = model.base.config.num_hidden_layers
                name = f"{Path(path).name}, {layers} layers, {dtype}, {rows}, {kind}"
                how = {"rows": rows, "calls": args.calls, "tokens": args.tokens}
                results[name] = measure(model.eval(), tokenizer, questions, foreign if kind != "none" else [], **how)
                print(name, results[name], flush=True)
                RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    lines = [[*name.split(", "), *map(str, figures.values())] for name, figures in sorted(results.items())]
    print(markdown(["heads", "base", "dtype", "rows", "entries", *next(iter(results.values()))], lines))


if __name__ == "__main__":
    main()
