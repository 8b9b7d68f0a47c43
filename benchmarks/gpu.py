"""Everything that is worth measuring on a GPU, within a given time, in one results file.

    python benchmarks/gpu.py                                                  # writes results/gpu.json
    python benchmarks/gpu.py --device cpu --dtype float32 --shape 68m --minutes 2 --output /tmp/cpu.json

Random weights of LLaMA shapes with fresh heads that are made right in three guesses of a step (`planted.py`), each case
as `step.py` measures it: parts of the step, the captured step, the base as installed and compiled, bytes and roofline.
The cases stand in the order of their worth; whatever does not fit into the time is named in the file as left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import sys
import time
from pathlib import Path

import torch
import transformers
from step import SHAPES, measure, random_model, show

from hf_drafthead import DraftTree
from hf_drafthead.evaluation.loading import one_line
from hf_drafthead.generation.identity import device_name
from hf_drafthead.generation.settings import DEFAULT_TREE

HERE = Path(__file__).resolve().parent
# shape, family, nodes, context, batch
CASES = [
    ("7b", "medusa", 64, 1024, 1),
    ("7b", "medusa", 16, 1024, 1),
    ("7b", "hydra", 64, 1024, 1),
    ("7b", "eagle", 64, 1024, 1),
    ("7b", "medusa", 16, 1024, 8),
    ("1.1b", "medusa", 16, 1024, 1),
    ("250m", "medusa", 16, 512, 1),
    ("68m", "medusa", 16, 512, 1),
    ("7b", "medusa", 16, 8192, 1),
    ("7b", "medusa", 16, 512, 4),
    ("1.1b", "hydra", 16, 4096, 1),
    ("13b", "medusa", 64, 1024, 1),
]
RIGHT = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="no case begins after this time")
    parser.add_argument("--shape", nargs="*", choices=SHAPES, help="only these")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gpu.json")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no GPU: run this where torch.cuda.is_available(), or give --device cpu.")
    transformers.utils.logging.disable_progress_bar()
    start, rows, left_out = time.monotonic(), [], []
    for case in CASES:
        shape, family, nodes, context, batch = case
        if args.shape and shape not in args.shape:
            continue
        name = f"{shape} {family}, {nodes} nodes, context {context}, batch {batch}"
        if time.monotonic() - start > 60 * args.minutes:
            left_out.append(f"{name}: no time was left")
        else:
            try:
                rows.append({"model": f"{shape} {family}", "nodes": nodes, "batch": batch, "context": context})
                rows[-1] |= one_case(args, shape, family, nodes, context, batch)
                show(rows[-1], first=len(rows) == 1)
            except (RuntimeError, MemoryError) as error:  # out of memory, mostly: the other cases are still worth it
                rows.pop()
                left_out.append(f"{name}: {one_line(error)}")
        keep(args, rows, left_out)
    print(f"{len(rows)} cases in {args.output}" + "".join(f"\nleft out: {line}" for line in left_out))


def one_case(
    args: argparse.Namespace, shape: str, family: str, nodes: int, context: int, batch: int
) -> dict[str, float]:
    """The figures of one case."""
    model = random_model(shape, family, getattr(torch, args.dtype), args.device)
    prompt = torch.randint(0, 32000, (batch, context), generator=torch.Generator().manual_seed(0)).to(args.device)
    paths = sorted(DraftTree.from_name(DEFAULT_TREE).paths, key=lambda path: (len(path) + sum(path), path))
    tree = DraftTree(paths[: nodes - 1])
    try:
        return measure(model, tree, prompt, new_tokens=args.tokens, repeats=args.repeats, captured=True, accept=RIGHT)
    finally:
        del model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def keep(args: argparse.Namespace, rows: list[dict], left_out: list[str]) -> None:
    """Write what was measured so far."""
    said = {
        "command": shlex.join(["python", "benchmarks/gpu.py", *sys.argv[1:]]),
        "device": device_name(torch.device(args.device)),
        "dtype": args.dtype,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "right_per_step": RIGHT,
        "rows": rows,
        "left_out": left_out,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(said, indent=1) + "\n")


if __name__ == "__main__":
    main()
