"""Calls of this checkout and of an earlier one in turn: which is faster, and how much memory each takes.

    git worktree add ../before 6598bdb
    python benchmarks/two_checkouts.py ../before medusa eagle hydra
    python benchmarks/two_checkouts.py ../before --captured
    python benchmarks/two_checkouts.py ../before medusa --heads FOLDER --dtype bfloat16 --tokens 24   # other heads
    python benchmarks/two_checkouts.py ../before SmolLM2-135M-Instruct-hydra++ --dtype bfloat16 --tokens 64 --rounds 2 \
        --heads ~/.cache/huggingface/hf_drafthead --questions mt_bench_question.jsonl --every 2

Each checkout runs in a process of its own, both with the heads of the earlier one's zoo, or those of FOLDER/medusa and
so on, which it can load, and one tree; calls take turns, so that whatever else the machine does slows both alike.
Seconds are the processor's, of one thread. `speed` is the median over the rounds of the earlier one's seconds by this
one's, above 1 where this one is faster, with its quartiles;
`noise` is how far two calls of one checkout, one after the other, are apart in the median. `memory` is the most that
the process holds during a warm call, in MB. A line for each family is appended to results/two_checkouts.jsonl.

With questions each checkout chooses what it drafts by itself (`"auto"`, without a calibration) for their first turns.
Of each question the least seconds of both count; `ratios` are the earlier one's by this one's, question by question,
`speed` that of all seconds together, and `over_base` how many times as fast as the base this one is.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "two_checkouts.jsonl"
FAMILIES = ("medusa", "hydra", "hydra++", "amphista", "eagle", "eagle3", "draft-model")
TREE = [[0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]]
WARM = 4  # calls that compile, and fill what is kept


def serve(model: str, captured: bool, tokens: int, dtype: str, questions: Path | None, every: int) -> None:
    """Make the call that each line of standard input names, of the base where it is below 0, and answer with its
    seconds and MB, and of questions with its text; first with the text and steps of one, or how many there are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import hf_drafthead  # noqa: F401

    torch.set_num_threads(1)
    heads, tokenizer = (
        AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval(),
        AutoTokenizer.from_pretrained(model),
    )
    call: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None}
    prompts = [tokenizer("def main(", return_tensors="pt")]
    how: dict[str, Any] = {"draft_tree": "auto" if questions else TREE}
    how |= {"cache_implementation": "static"} if captured else {}
    if questions:
        heads.generation_config.calibration = None
        chats = [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in questions.open()][::every]
        apply = tokenizer.apply_chat_template
        prompts = [apply(c, add_generation_prompt=True, return_tensors="pt", return_dict=True) for c in chats]
    for _ in range(WARM):
        output = heads.generate(**prompts[0], **call, **how, return_dict_in_generate=True)
    if output.accepted_lengths is None:
        raise SystemExit("this checkout drafts nothing with the installed transformers: install one that it knows.")
    first = [output.sequences.tolist(), output.accepted_lengths.tolist()]
    print(json.dumps(len(prompts) if questions else first), flush=True)
    for line in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        number, start = int(line), time.process_time()
        of_base = number < 0
        text = (
            heads.base.generate(**prompts[~number], **call)
            if of_base
            else heads.generate(**prompts[number], **call, **how)
        )
        print(json.dumps([time.process_time() - start, peak_mb(), text.tolist() if questions else None]), flush=True)


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
    command += ["--questions", str(args.questions), "--every", str(args.every)] if args.questions else []
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

    def answer(process: subprocess.Popen, asked: int | None = 0) -> Any:
        assert process.stdin is not None and process.stdout is not None
        if asked is not None:
            print(asked, file=process.stdin, flush=True)
        if not (line := process.stdout.readline()):
            raise SystemExit(f"{' '.join(map(str, process.args))} ended, see above.")
        return json.loads(line)

    try:
        first, second = (answer(process, None) for process in processes)
        assert first == second, "the two checkouts take other steps, or write another text"
        if args.questions:
            return {"family": family, **by_question([functools.partial(answer, p) for p in processes], first, args)}
        old, new = [], []
        for turn in range(rounds):
            for one in (0, 1) if turn % 2 else (1, 0):
                (new if one else old).append(answer(processes[one]))
    finally:
        for process in processes:
            process.kill()
    ratios = sorted(slow / fast for (slow, *_), (fast, *_) in zip(old, new))
    apart = [abs(a - b) / min(a, b) for calls in (old, new) for (a, *_), (b, *_) in zip(calls, calls[1:])]
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "family": family,
        **({"heads": args.heads.name, "dtype": args.dtype} if args.heads else {}),
        "steps": "captured" if args.captured else "eager",
        "speed": statistics.median(ratios),
        "low": low,
        "high": high,
        "noise": statistics.median(apart),
        "memory": statistics.median(mb for _, mb, _ in new),
        "memory_before": statistics.median(mb for _, mb, _ in old),
        "rounds": rounds,
        "tokens": args.tokens,
        "before": subprocess.check_output(["git", "-C", before, "rev-parse", "--short", "HEAD"], text=True).strip(),
    }


def by_question(ask: list[Callable[[int], Any]], count: int, args: argparse.Namespace) -> dict[str, Any]:
    """How many times as fast as the earlier checkout this one answers each question, and both as the base."""
    seconds: list[list[list[float]]] = [[[], [], []] for _ in range(count)]  # of both checkouts and the base
    different = 0
    for turn, question in itertools.product(range(args.rounds), range(count)):
        texts = {}
        order = [0, 1] if (turn + question) % 2 else [1, 0]
        for who in [*order, *[2] * (not turn)]:
            taken, _, texts[who] = ask[who % 2](~question if who == 2 else question)
            seconds[question][who].append(taken)
        different += texts[0] != texts[1]
    before, now, base = ([min(each[who]) for each in seconds] for who in range(3))
    ratios = sorted(old / new for old, new in zip(before, now))
    low, middle, high = statistics.quantiles(ratios, n=4)
    figures = {"speed": sum(before) / sum(now), "median": middle, "low": low, "high": high, "least": ratios[0]}
    figures |= {"over_base": sum(base) / sum(now), "over_base_before": sum(base) / sum(before)}
    how = {"questions": count, "rounds": args.rounds, "tokens": args.tokens, "dtype": args.dtype}
    return {**figures, **how, "other_texts": different, "ratios": [round(ratio, 3) for ratio in ratios]}


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
    parser.add_argument("--questions", type=Path, help="lines with `turns`, each asked alone; the tree is chosen")
    parser.add_argument("--every", type=int, default=1, help="one in so many of the questions")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        how = arguments.captured, arguments.tokens, arguments.dtype, arguments.questions, arguments.every
        return serve(arguments.serve, *how)
    for family in arguments.families:
        row = compare(arguments, family)
        line = json.dumps({name: round(value, 4) if type(value) is float else value for name, value in row.items()})
        with RESULTS.open("a") as file:
            print(line, file=file)
        print(line, flush=True)


if __name__ == "__main__":
    main()
