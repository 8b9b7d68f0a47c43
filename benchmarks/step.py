"""What one step costs, part by part, in units of the base's one-token step: a token's share of `base.generate`.

    python benchmarks/step.py                         # the bundled models
    python benchmarks/step.py --shape 160m --nodes 16 # random weights of a named LLaMA shape, fresh heads of any family
    python benchmarks/step.py --model DFLASH --chain --nodes 8 --dtype bfloat16
    python benchmarks/step.py --shape 250m --nodes 16 --captured --accept 3
    python benchmarks/step.py --loading --model HEADS --dtype bfloat16 --repeats 60   # of loading, instead of a step

The parts are timed inside `generate()`, base and heads in turns in one process; figures are medians over the repeats.
`bookkeeping` is the step without verify and draft: walk, commit and the loop around them. With `--captured` the whole
step is also run compiled, and so is the base. `--accept N` makes the heads right N times per step, at their own cost
(`planted.py`): what the step would be worth to trained heads of that quality. With `--loading` a checkpoint and its
base alone are loaded in turns in one process; of the processor's seconds, and of the most memory held when every page
was read, the least counts.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from planted import PlantedDrafter
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.calls import BASE, COMPILED, HEADS, decoding_methods
from hf_drafthead.evaluation.measurement import STAGES, time_split
from hf_drafthead.generation import StepRecord
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.families import TRAINED, fresh_heads
from hf_drafthead.trees.timing import time_interleaved

SHAPES: dict[str, dict[str, int]] = {
    "68m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 2, "num_attention_heads": 12},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "250m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16},
    "1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "13b": {"hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40},
}
POSITIONS = 16384  # of a random shape


def measure(
    model: PreTrainedModel,
    tree: DraftTree,
    prompt: torch.Tensor,
    *,
    new_tokens: int,
    repeats: int,
    captured: bool = False,
    accept: int | None = None,
) -> dict[str, float]:
    """Medians over `repeats` of every part's cost per step.

    Args:
        model: with draft heads.
        tree: to verify.
        prompt: (B, P) token ids.
        new_tokens: to generate in each run; the base and the heads take turns.
        captured: also measure the compiled step, and the compiled base.
        accept: guesses of each step that shall be right; None for as many as are.
    """
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
    given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    text = model.base.generate(**given, **settings)
    heads = model.drafter
    if accept is not None:
        model.drafter = PlantedDrafter(heads, text, accept)
    try:
        rows = _uncaptured(model, tree, given, settings, repeats)
        figures = {name: statistics.median(values) for name, values in rows.items()}
        if captured:
            figures |= _captured(model, tree, given, settings, repeats)
    finally:
        model.drafter = heads
    unit = figures["base_step_ms"]
    for part in ("step", *STAGES, "bookkeeping", "base_forward", *(("captured_step",) if captured else ())):
        figures[part] = figures[f"{part}_ms"] / unit
    return figures


def _uncaptured(
    model: PreTrainedModel, tree: DraftTree, given: dict, settings: dict, repeats: int
) -> dict[str, list[float]]:
    """Milliseconds of every part of a step that is run operation by operation, and of the base, run by run."""
    rows: dict[str, list[float]] = defaultdict(list)
    for repeat in range(repeats + 1):
        forwards: list[float] = []
        with timed_forward(model.base, forwards):
            start = time.perf_counter()
            model.base.generate(**given, **settings)
            base_seconds = (time.perf_counter() - start) / settings["max_new_tokens"]
        outputs = []

        def drafted(note: Any, outputs: list = outputs) -> None:
            outputs.append(
                model.generate(**given, draft_tree=tree, return_dict_in_generate=True, on_step=note, **settings)
            )

        records: list[StepRecord] = []
        drafted(records.append)
        split = time_split(records[1:])  # without the prefill
        if repeat == 0:
            continue  # warm-up
        rows["base_forward_ms"].append(1e3 * statistics.median(forwards[1:]))
        rows["base_step_ms"].append(1e3 * base_seconds)
        rows["step_ms"].append(split["step"])
        for stage in STAGES:
            rows[f"{stage}_ms"].append(split[stage])
        rows["bookkeeping_ms"].append(rows["step_ms"][-1] - rows["verify_ms"][-1] - rows["draft_ms"][-1])
        accepted = outputs[0].accepted_lengths
        rows["tokens_per_step"].append(accepted.sum().item() / accepted.gt(0).sum().item())
    return rows


def _captured(model: PreTrainedModel, tree: DraftTree, given: dict, settings: dict, repeats: int) -> dict[str, float]:
    """The whole step compiled, against the base as installed and the base compiled, in turns."""
    runners = decoding_methods(model, None, tree=tree, captured=True, compare=[COMPILED])
    start = time.perf_counter()
    runners[HEADS](given, settings)
    prepared = time.perf_counter() - start
    runners[COMPILED](given, settings)
    runs: dict[str, Callable[[], Any]] = {
        name: lambda runner=runner: runner(given, settings)  # type: ignore[misc]
        for name, runner in runners.items()
    }
    outputs, seconds = time_interleaved(runs, repeats, model.base.device)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    records: list[StepRecord] = []
    runners[HEADS](given, {**settings, "on_step": records.append})
    steps = time_split(records[1:])  # without the prefill
    return {
        "prepared_s": prepared,
        "captured_step_ms": steps["step"],
        "compiled_base_step_ms": 1e3 * median[COMPILED] / settings["max_new_tokens"],
        "speedup": median[BASE] / median[HEADS],
        "speedup_over_compiled": median[COMPILED] / median[HEADS],
        "identical": float(torch.equal(outputs[HEADS].sequences, outputs[BASE])),
    }


@contextlib.contextmanager
def timed_forward(base: PreTrainedModel, seconds: list[float]) -> Iterator[None]:
    """Note the seconds of every forward of a base."""
    forward = base.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = forward(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return result

    base.forward = call
    try:
        yield
    finally:
        del base.forward


def random_model(shape: str, family: str, dtype: torch.dtype, device: str, vocabulary: int = 32000) -> PreTrainedModel:
    """Random weights of a named shape, with fresh heads of a family as the paper has it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=vocabulary, max_position_embeddings=POSITIONS, **SHAPES[shape])
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return fresh_heads(family, base).to(device).eval()


def models(args: argparse.Namespace) -> Iterator[tuple[str, PreTrainedModel, torch.Tensor]]:
    """The models asked for, one at a time, each with a name and a prompt (B, P)."""
    dtype = getattr(torch, args.dtype)
    if args.shape:
        asked = args.family or ["medusa"]
        for family in TRAINED if "all" in asked else asked:
            prompt = torch.randint(0, 32000, (args.batch, args.context), generator=torch.Generator().manual_seed(0))
            yield f"{args.shape} {family}", random_model(args.shape, family, dtype, args.device), prompt
        return
    for path in args.model or [zoo.path(family) for family in zoo.families()]:
        tokenizer = AutoTokenizer.from_pretrained(path)
        prompt = tokenizer(["import os\n\n\ndef walk("] * args.batch, return_tensors="pt").input_ids
        yield str(path).rsplit("/")[-1], AutoModel.from_pretrained(path, dtype=dtype).to(args.device), prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--model", nargs="+", help="draft-head checkpoints; default: every one in the zoo")
    what.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument(
        "--family",
        action="append",
        choices=[*TRAINED, "all"],
        help="heads of the random shape, may be repeated; default: medusa",
    )
    parser.add_argument("--nodes", type=int, nargs="*", default=[8, 16, 32, 64], help="tree sizes, root included")
    parser.add_argument("--chain", action="store_true", help="trees of first guesses only, a block's whole depth")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of a random shape")
    parser.add_argument("--captured", action="store_true", help="also the compiled step, and the compiled base")
    parser.add_argument("--accept", type=int, help="guesses that are right in every step; default: as many as are")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--loading", action="store_true", help="only what loading takes, beside loading the base alone")
    parser.add_argument("--json", help="also write the figures here, beside those of other models")
    args = parser.parse_args()
    if args.family and not args.shape:
        parser.error(f"--family {args.family[0]} is for --shape: a checkpoint has the heads it has, drop --family.")
    if args.loading:
        transformers.utils.logging.disable_progress_bar()
        for heads in args.model or map(zoo.path, zoo.families()):
            print(json.dumps(loading(heads, args.dtype, args.repeats)), flush=True)
        return
    table = []
    for name, model, prompt in models(args):
        for nodes in args.nodes:
            paths = sorted(DraftTree.from_name(DEFAULT_TREE).paths, key=lambda path: (len(path) + sum(path), path))
            tree = DraftTree([(0,) * depth for depth in range(1, nodes)] if args.chain else paths[: nodes - 1])
            if args.accept is not None and args.accept > tree.max_depth:
                parser.error(f"--accept {args.accept} is more than the {tree.max_depth} levels of {nodes} nodes.")
            how: dict[str, Any] = {"captured": args.captured, "accept": args.accept}
            figures = measure(model, tree, prompt.to(args.device), new_tokens=args.tokens, repeats=args.repeats, **how)
            table.append({"model": name, "nodes": nodes, "batch": args.batch, "context": prompt.shape[1], **figures})
            show(table[-1], first=len(table) == 1)
    if args.json:
        merge(table, Path(args.json))


def loading(heads: str, dtype: str, repeats: int) -> dict[str, Any]:
    """The least processor seconds and MB of loading heads with their base, and of loading that base alone."""
    places = {BASE: AutoModelForCausalLM.from_pretrained(heads).base.name_or_path, HEADS: heads}
    seconds, memory = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def held(name: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 2**10

    def load(place: str) -> tuple[float, float]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, start = held("VmRSS"), time.process_time()
        model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype)
        taken = time.process_time() - start
        for tensor in model.state_dict().values():
            tensor.flatten()[:: 4096 // tensor.element_size()].sum()
        return taken, held("VmHWM") - before

    for way, place in list(places.items()) * (repeats + 1):
        gc.collect()
        for figures_of, figure in zip((seconds, memory), load(place)):
            figures_of[way].append(figure)
    figures: dict[str, Any] = {"model": heads, "dtype": dtype, "repeats": repeats}
    for name, taken in (("seconds", seconds), ("mb", memory)):  # without the first round, which fills caches
        least = {way: min(taken[way][1:]) for way in places}
        figures |= {f"{name}_{way}": round(least[way], 4) for way in places}
        figures[f"{name}_ratio"] = round(least[HEADS] / least[BASE], 3)
    return figures


def merge(table: list[dict], path: Path) -> None:
    """Write figures into a file, in the place of those of the same model, nodes, batch and context; others stay."""

    def case(row: dict) -> tuple:
        return row["model"], row["nodes"], row["batch"], row["context"]

    measured = {case(row) for row in table}
    known = json.loads(path.read_text()) if path.is_file() else []
    rows = [*(row for row in known if case(row) not in measured), *table]
    path.write_text(json.dumps(sorted(rows, key=case), indent=1) + "\n")


def show(row: dict, first: bool) -> None:
    parts = [
        "step",
        "verify",
        "draft",
        "walk",
        "commit",
        "bookkeeping",
        "base_forward",
        "tokens_per_step",
    ]
    if "captured_step" in row:
        parts += ["captured_step", "speedup", "speedup_over_compiled", "identical", "prepared_s"]
    widths = [max(len(part), 6) + 2 for part in parts]
    if first:
        print(f"{'model':<20}{'nodes':>6}{'batch':>6}{'context':>8}{'base ms':>9}", end="")
        print("".join(f"{part:>{width}}" for part, width in zip(parts, widths)))
    print(
        f"{row['model']:<20}{row['nodes']:>6}{row['batch']:>6}{row['context']:>8}{row['base_step_ms']:>9.2f}"
        + "".join(f"{row[part]:>{width}.3f}" for part, width in zip(parts, widths)),
        flush=True,
    )


if __name__ == "__main__":
    main()
