"""Heads of every family for the chat model, trained on the same text, and of three on parts of it: figures on MT-Bench.

    python benchmarks/chat_families.py BASE benchmarks/chat_text OUTPUT --questions mt_bench_question.jsonl --device cpu

A training is one of `chat_training.py`, one epoch in steps of 8 rows, and a measurement one of `chat_figures.py`, with
dynamic trees of 32 nodes, greedy and, for heads trained on all of these tokens, at temperature 1; the bundled heads are
measured beside them. What is in OUTPUT is not done again, so the same command resumes; the lines of
`results/chat_families.jsonl` about heads that have read as much are replaced after each. A step of so small a model
waits for the host on a GPU, so that several trainings can share one, each for a limited time:

    python benchmarks/chat_families.py BASE benchmarks/chat_text OUTPUT --questions mt_bench_question.jsonl \
        --device cuda --families eagle3 eagle hydra++ hydra amphista medusa --at-once 6 --tokens 3e6 --rows 16 \
        --steps 4800 --seconds 480 --limit 10 --parts
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from chat_training import ShardRows  # beside this file
from safetensors import safe_open

from hf_drafthead import zoo

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "chat_families.jsonl"
ALL = ["eagle3", "hydra++", "medusa", "eagle", "hydra", "amphista", "draft-model", "eagle3.1", "amphista-alpha"]
ALL += ["mtp", "dflash", "dspark"]
CURVE = ["eagle3", "hydra++", "medusa"]  # also the bundled ones
FIELDS = {"eagle3": {"share_lm_head": True}, "eagle3.1": {"share_lm_head": True}, "hydra++": {"num_layers": 2}}
WRITING = Lock()


def run(script: str, args: argparse.Namespace, *words: Any) -> None:
    """Run a script with a thread for each core of its share, so that processes side by side do not wait for cores."""
    threads = {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // args.at_once, 1))}
    command = [sys.executable, str(HERE / script), *map(str, words)]
    subprocess.run(command, check=True, env={**threads, **os.environ})


def parameters(heads: Path) -> int:
    with safe_open(heads / "model.safetensors", "pt") as file:
        return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())


def measured(heads: Path, place: Path, temperatures: set[float], args: argparse.Namespace) -> dict[str, dict]:
    """The figures of `chat_figures.py` by temperature."""
    place.parent.mkdir(parents=True, exist_ok=True)
    words = ["--tree", "dynamic", "--nodes", 32, "--dtype", "bfloat16"]
    words += ["--limit", args.limit, "--batch", 8 * args.limit]
    known = [json.loads(line) for line in place.read_text().splitlines()] if place.is_file() else []
    if missing := temperatures - {line["temperature"] for line in known}:
        words += ["--device", args.device, "--output", place, "--temperature", *sorted(missing)]
        run("chat_figures.py", args, args.questions, heads, "--base", args.base, *words)
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    kept = ("tokens_per_step", "steps", "by_category")
    return {f"{line['temperature']:g}": {name: line[name] for name in kept} for line in lines}


def trained(family: str, tokens: int, args: argparse.Namespace) -> Path:
    """The folder of heads that have read so many tokens of the text, in every epoch."""
    heads = args.output / f"{family}-{tokens}"
    if (heads / "training_summary.json").is_file():
        return heads
    words = ["--tokens", tokens, "--epochs", args.epochs, "--batch", args.rows, "--held-out", 32]
    words += ["--device", args.device, "--fields", json.dumps(FIELDS.get(family, {}))]
    words += ["--seconds", args.seconds] if args.seconds else []
    words += ["--set", json.dumps({"max_steps": args.steps})] if args.steps else []
    run("chat_training.py", args, family, args.base, args.shards, heads, *words)
    return heads


def bundled(family: str, text: int) -> tuple[Path, float, float]:
    """The folder of bundled heads, the tokens of this text that they have read, and the hours it took."""
    heads = Path(zoo.chat_heads(family))
    summary = json.loads((heads / "training_summary.json").read_text())
    parts = [summary, summary.get("first", {"epochs": 0.0, "hours": 0.0})]
    return heads, text * sum(part["epochs"] for part in parts), sum(part["hours"] for part in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="folder of safetensors")
    parser.add_argument("shards", help="folder of the shards")
    parser.add_argument("output", type=Path)
    parser.add_argument("--questions", required=True, help="MT-Bench's")
    parser.add_argument("--limit", type=int, default=2, help="questions of every category")
    parser.add_argument("--tokens", type=lambda text: int(float(text)), default=500_000, help="of the text, for all")
    parser.add_argument("--families", nargs="*", default=ALL, choices=ALL, help="that are trained")
    parser.add_argument("--parts", type=int, nargs="*", default=[2], help="of these tokens, for the curve")
    parser.add_argument("--epochs", type=float, default=1)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--steps", type=int, help="of each training, at most, in place of epochs")
    parser.add_argument("--seconds", type=float, help="of each training, at most")
    parser.add_argument("--at-once", type=int, default=1, help="trainings side by side")
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    if not Path(args.base, "config.json").is_file():
        parser.error(f"{args.base} is no folder of a model: give that of `hf-drafthead zoo chat`")
    text = sum(len(ids) for ids, _ in ShardRows(Path(args.shards), float("inf")).rows)

    def note(family: str, heads: Path, given: int, about: dict[str, Any]) -> None:
        line = {"family": family, "text": min(given, text), **about, "parameters": parameters(heads)}
        line["questions"] = 8 * args.limit
        temperatures = {0.0} if line["text"] < min(args.tokens, text) else {0.0, 1.0}
        line |= measured(heads, args.output / f"figures-{heads.name}.jsonl", temperatures, args)
        with WRITING:
            known = [json.loads(one) for one in RESULTS.read_text().splitlines()] if RESULTS.is_file() else []
            same = ("family", "text", "tokens", "questions")
            kept = [one for one in known if any(one[name] != line[name] for name in same)]
            RESULTS.write_text("".join(json.dumps(one) + "\n" for one in [*kept, line]))

    def done(family: str, given: int) -> None:
        heads = trained(family, given, args)
        summary = json.loads((heads / "training_summary.json").read_text())
        about = {"tokens": round(summary["epochs"] * min(given, text)), "hours": round(summary["hours"], 3)}
        note(family, heads, given, about)

    def of_bundled(family: str) -> None:
        heads, tokens, hours = bundled(family, text)
        note(family, heads, text, {"tokens": round(tokens), "hours": round(hours, 3)})

    runs = [(family, args.tokens) for family in args.families]
    runs += [(family, args.tokens // part) for part in args.parts for family in CURVE if family in args.families]
    with ThreadPoolExecutor(args.at_once) as pool:
        waiting = [pool.submit(done, *one) for one in runs] + [pool.submit(of_bundled, family) for family in CURVE]
        for one in waiting:
            one.result()


if __name__ == "__main__":
    main()
