"""Calls of this checkout and of an earlier one in turn: which is faster, and how much memory each takes.

    git worktree add ../before 6598bdb
    python benchmarks/two_checkouts.py ../before medusa eagle hydra
    python benchmarks/two_checkouts.py ../before --captured
    python benchmarks/two_checkouts.py ../before medusa --heads FOLDER --dtype bfloat16 --tokens 24   # other heads

Each checkout runs in a process of its own, both with the heads of the earlier one's zoo, or those of FOLDER/medusa and
so on, which it can load, and one tree; calls take turns, so that whatever else the machine does slows both alike.
Seconds are the processor's, of one thread. `speed` is the median over the rounds of the earlier one's seconds by this
one's, above 1 where this one is faster, with its quartiles;
`noise` is how far two calls of one checkout, one after the other, are apart in the median. `memory` is the most that
the process holds during a warm call, in MB. A line for each family is appended to results/two_checkouts.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "two_checkouts.jsonl"
FAMILIES = ("medusa", "hydra", "hydra++", "amphista", "eagle", "eagle3", "draft-model")
TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
WARM = 4  # calls that compile, and fill what is kept


def serve(model: str, captured: bool, tokens: int, dtype: str) -> None:
    """Make one call for each line of standard input, and answer with its seconds and MB; first with its text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_drafthead  # noqa: F401

    torch.set_num_threads(1)
    heads, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval(),
        AutoTokenizer.from_pretrained(model),
    )
    call: dict[str, Any] = {
        **tokenizer("def main(", return_tensors="pt"),
        "max_new_tokens": tokens,
        "do_sample": False,
        "eos_token_id": None,
        "draft_tree": TREE,
        **({"cache_implementation": "static"} if captured else {}),
    }
    for _ in range(WARM):
        output = heads.generate(**call, return_dict_in_generate=True)
    if output.accepted_lengths is None:
        raise SystemExit("this checkout drafts nothing with the installed transformers: install one that it knows.")
    print(json.dumps([output.sequences.tolist(), output.accepted_lengths.tolist()]), flush=True)
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        start = time.process_time()
        heads.generate(**call)
        print(json.dumps([time.process_time() - start, peak_mb()]), flush=True)


def peak_mb() -> float:
    """The most memory that this process has held, as the operating system says."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def compare(args: argparse.Namespace, family: str) -> dict[str, Any]:
    """One family's figures."""
    before, rounds = args.before, args.rounds
    model = (args.heads or before / "hf_drafthead" / "zoo" / "assets") / family
    command = [sys.executable, __file__, "--serve", str(model), "--tokens", str(args.tokens), "--dtype", args.dtype]
    command += ["--captured"] * args.captured
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder in (before, Path(__file__).resolve().parents[1])
    ]

    def answer(process: subprocess.Popen, asks: bool = True) -> Any:
        assert process.stdin is not None and process.stdout is not None
        if asks:
            print(file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{' '.join(map(str, process.args))} ended, see above.")
        return json.loads(line)

    try:
        first, second = (answer(process, asks=False) for process in processes)
        assert first == second, "the two checkouts take other steps, or write another text"
        old, new = [], []
        for turn in range(rounds):
            for one in (0, 1) if turn % 2 else (1, 0):
                (new if one else old).append(answer(processes[one]))
    finally:
        for process in processes:
            process.kill()
    ratios = sorted(slow / fast for (slow, _), (fast, _) in zip(old, new))
    apart = [abs(a - b) / min(a, b) for calls in (old, new) for (a, _), (b, _) in zip(calls, calls[1:])]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "family": family,
        **({"heads": args.heads.name, "dtype": args.dtype} if args.heads else {}),
        "steps": "captured" if args.captured else "eager",
        "speed": statistics.median(ratios),
        "low": low,
        "high": high,
        "noise": statistics.median(apart),
        "memory": statistics.median(mb for _, mb in new),
        "memory_before": statistics.median(mb for _, mb in old),
        "rounds": rounds,
        "tokens": args.tokens,
        "before": subprocess.check_output(["git", "-C", before, "rev-parse", "--short", "HEAD"], text=True).strip(),
    }


def main() -> None:
    """Compare the families that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="folder of the earlier checkout")
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--heads", type=Path, help="folder of heads by family")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--captured", action="store_true", help="compiled steps")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve, arguments.captured, arguments.tokens, arguments.dtype)
    for family in arguments.families:
        row = compare(arguments, family)
        line = json.dumps({name: round(value, 4) if type(value) is float else value for name, value in row.items()})
        with RESULTS.open("a") as file:
            print(line, file=file)
        print(line, flush=True)


if __name__ == "__main__":
    main()
