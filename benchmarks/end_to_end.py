"""The bundled models from end to end: every family against its base, against the base at its best, and against what
needs no trained heads.

    python benchmarks/end_to_end.py                                      # writes RESULTS.md, results/end_to_end.json
    python benchmarks/end_to_end.py --cards                              # and each model's own evaluation.json
    python benchmarks/end_to_end.py --limit 4 --tokens 16 --output /tmp  # a short look

Held-out code prompts of the zoo, greedy, float32, one prompt at a time and in batches; base, heads and the others take
turns on every prompt in one process (`hf_drafthead.evaluation.bench`). The heads run captured steps
(`cache_implementation="static"`), and with `--uncaptured` also steps as they are by default. `compiled` is the base
with a static cache under `torch.compile`; `prompt lookup` and `assisted` are transformers' own, measured beside the
draft model, which is their assistant unless another is given. The draft tree of each family is the one that `generate`
takes: that of the calibration entry for this machine and batch size, or of the nearest.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers

from hf_drafthead import zoo
from hf_drafthead.evaluation import report
from hf_drafthead.evaluation.bench import INTERRUPTED, bench
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.questions import Question, read_questions

HERE = Path(__file__).resolve().parent
LINE = "\n"
DRAFT_MODEL = "draft-model"


def rows_of(measurements: list[Measurement]) -> list[str]:
    """One line per measurement and contender."""
    names = "batch|steps|tokens per step|base tokens/s|tokens/s|speedup|spread|over compiled|same text".split("|")
    lines = [f"| | {' | '.join(names)} |"]
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    for one in measurements:
        low, high = one.speedup_spread
        steps = "captured" if one.captured else ""
        over = "-" if one.speedup_over_compiled is None else f"{one.speedup_over_compiled:.2f}"
        lines.append(
            f"| {one.family}, {one.tree_nodes} nodes | {one.batch_size} | {steps} | "
            f"{one.tokens_per_step or 1:.2f} | {one.base_tokens_per_second:.0f} | {one.tokens_per_second:.0f} | "
            f"**{one.speedup:.2f}** | {low:.2f} to {high:.2f} | {over} | {report.same_text(one)} |"
        )
    for one in measurements:
        for name, found in one.compared.items():
            if found is None:
                continue
            called = name.partition("=")[0].replace("-", " ")
            lines.append(
                f"| {called}, beside {one.family} | {one.batch_size} | | | "
                f"{one.base_tokens_per_second:.0f} | {found['tokens_per_second']:.0f} | {found['speedup']:.2f} | | | "
                f"{'yes' if found['identical'] else 'NO'} |"
            )
    return lines


def page_of(measurements: list[Measurement], command: str) -> str:
    """The page, with everything that is needed to measure again."""
    one = measurements[0]
    machine = f"{one.device} ({platform.processor() or platform.machine()}, {torch.get_num_threads()} threads)"
    notices = dict.fromkeys(notice for measurement in measurements for notice in measurement.notices)
    return f"""# Results

Written by

    {command}

{one.prompts} held-out prompts of the zoo, {one.settings["max_new_tokens"]} new tokens each, greedy, {one.dtype},
{machine}, {one.repeats} repeats of which the median counts; torch {one.torch}, transformers {one.transformers}.

{LINE.join(rows_of(measurements))}

`tokens per step` is tokens per forward of the base after the prompt's; for the others per forward, the prompt's
included. `spread` is the lowest and the highest speedup of the repeats, `over compiled` the speedup over the base with
a static cache under `torch.compile`.

{LINE.join(f"- {notice}" for notice in notices)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", help="only these; default: every one in the zoo")
    parser.add_argument("--limit", type=int, help="only the first so many prompts of every category")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--without-compiled", action="store_true", help="where no C++ compiler is at hand")
    parser.add_argument("--uncaptured", action="store_true", help="also with steps that are not captured")
    parser.add_argument("--cards", action="store_true", help="keep each model's figures in its folder, for its card")
    parser.add_argument("--output", type=Path, default=HERE)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    compiled = [] if args.without_compiled else ["compiled"]
    untrained = ["prompt-lookup"]  # it depends on no heads: once is enough
    of_category: dict[str | None, list[Question]] = {}
    for prompt in read_questions(zoo.ASSETS / "prompts.jsonl"):
        of_category.setdefault(prompt.category, []).append(prompt)
    prompts = [prompt for category in of_category.values() for prompt in category[: args.limit]]
    command = shlex.join(["python", "benchmarks/end_to_end.py", *sys.argv[1:]])
    results = args.output / "results"
    results.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    for family in args.family or zoo.families():
        print(family, flush=True)
        torch.compiler.reset()  # else dynamo soon has compiled the base's code as often as it does
        model, tokenizer = load(zoo.path(family), dtype=torch.float32)
        measured: list[Measurement] = []
        for captured in (True, False) if args.uncaptured else (True,):
            new = bench(
                model,
                tokenizer,
                prompts,
                {"do_sample": False, "max_new_tokens": args.tokens},
                captured=captured,
                compare=[*compiled, *(untrained if family == DRAFT_MODEL else [])] if captured else (),
                batch_sizes=args.batch,
                repeats=args.repeats,
                notify=print,
            )
            measured += new
            print(*report.verdicts(new), sep="\n", flush=True)
        measurements += measured
        here = f"{HERE.parent}/"  # the page and the figures name the project's own files, wherever it lies
        files = {results / "end_to_end.json": measurements}
        if args.cards:
            files[Path(zoo.path(family)) / "evaluation.json"] = measured
        for file, told in files.items():
            said = report.to_json(told, command=command, questions="hf_drafthead/zoo/assets/prompts.jsonl")
            file.write_text(json.dumps(said, indent=1).replace(here, "") + "\n")
        (args.output / "RESULTS.md").write_text(page_of(measurements, command).replace(here, ""))
        if measurements[-1].stopped == INTERRUPTED:
            break
    print((args.output / "RESULTS.md").read_text())


if __name__ == "__main__":
    main()
