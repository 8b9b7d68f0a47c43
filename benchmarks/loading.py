"""What loading a model with draft heads costs beside loading its base: peak memory and time.

    python benchmarks/loading.py [--shape 220m] [--rounds 100] [--dtype bfloat16] [--as float32] [--json PATH]

Makes a random LLaMA of 220 million parameters (or 1.3 billion) and Medusa heads for it in a temporary folder, then
loads in turn: the base alone, the heads' tensors alone, and the model (heads on disk, the base found through their
config). Memory is the peak of a process of its own over what it used before loading, mapped files included: the median
of three. Time is taken in one process, in turns, on the clock, of the loading call and then of asking for one element
of every page: what is loaded in the type that it is stored in is only mapped until then, at a cost that hardly grows
with it. `--as` another type has every weight read by the call. Medians over the rounds, the ratio's of each round's.

It ends with 1 if the model's peak is more than 5% over the base's peak plus the heads, or its time, pages included,
more than 1.1 times that of the base plus that of reading the heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drafthead import MedusaForCausalLM

LOADS = {
    "base": "AutoModelForCausalLM.from_pretrained(folder + '/base', dtype=dtype)",
    "heads": "read(folder + '/heads/model.safetensors')",
    "model": "AutoModelForCausalLM.from_pretrained(folder + '/heads', dtype=dtype)",
}
# What any first loading imports is imported before, for it belongs to none of them.
SETUP = """
import gc, json, sys, time
import torch, hf_drafthead
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
folder, dtype, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])

def read(file):
    return {name: t if dtype == "auto" else t.to(getattr(torch, dtype)) for name, t in load_file(file).items()}

def touch(kept):
    for tensor in (kept if isinstance(kept, dict) else kept.state_dict()).values():
        tensor.flatten()[:: 4096 // tensor.element_size()].sum()

logging.disable_progress_bar()
AutoModelForCausalLM.from_pretrained(folder + "/small")
"""
# Prints bytes of the peak over those before.
MEMORY = """
def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
kept = {load}
touch(kept)
print(json.dumps(memory("VmHWM") - before))
"""
# Prints for each thing to load the seconds of the call and those of touching the pages after it, round by round.
TIME = """
loads = {loads}
seconds = {name: [] for name in loads}
for _ in range(rounds + 1):
    for name, load in loads.items():
        gc.collect()
        start = time.perf_counter()
        kept = load()
        called = time.perf_counter()
        touch(kept)
        seconds[name].append([called - start, time.perf_counter() - called])
        del kept
print(json.dumps({name: taken[1:] for name, taken in seconds.items()}))  # the first round warms up
"""


SHAPES = {
    "220m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 16},
}


def prepare(folder: Path, shape: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Write base, heads and a tiny base; returns the base's parameters, its bytes and the heads' bytes."""
    base = LlamaForCausalLM(LlamaConfig(vocab_size=32000, **SHAPES[shape])).to(dtype)
    base.save_pretrained(folder / "base", max_shard_size="50GB")
    tiny = dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size"), 16)
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **tiny)).save_pretrained(folder / "small")
    model = MedusaForCausalLM.from_base(str(folder / "base"), num_draft_heads=4, dtype="auto")
    model.save_pretrained(folder / "heads", max_shard_size="50GB")
    bytes_of = {one: sum(p.numel() * p.element_size() for p in one.parameters()) for one in (base, model.drafter)}
    return base.num_parameters(), bytes_of[base], bytes_of[model.drafter]


def in_new_process(work: str, words: list[str]) -> Any:
    """What the program prints last, as JSON."""
    done = subprocess.run([sys.executable, "-c", SETUP + work, *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="220m", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--as", dest="into", default="auto", choices=["auto", "bfloat16", "float16", "float32"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        dtype = getattr(torch, args.dtype)
        parameters, *sizes = prepare(Path(place), args.shape, dtype)
        grown = 1 if args.into == "auto" else getattr(torch, args.into).itemsize / dtype.itemsize
        base_bytes, heads_bytes = (size * grown for size in sizes)
        words = [place, args.into, str(args.rounds)]
        lambdas = "{" + ", ".join(f"{name!r}: lambda: {load}" for name, load in LOADS.items()) + "}"
        seconds = in_new_process(TIME.replace("{loads}", lambdas), words)
        peak = {
            name: statistics.median(in_new_process(MEMORY.replace("{load}", load), words) for _ in range(3))
            for name, load in LOADS.items()
        }
    call, pages, both = (
        {name: statistics.median(measure(*taken) for taken in seconds[name]) for name in LOADS}
        for measure in (lambda call, pages: call, lambda call, pages: pages, lambda call, pages: call + pages)
    )

    def ratio(measure: Callable[[float, float], float]) -> float:
        """Of what a round took, for each; a machine that changes its pace changes it for all of them."""
        rounds = zip(
            *([measure(*taken) for taken in seconds[name]] for name in ("model", "base", "heads")), strict=True
        )
        return statistics.median(model / (base + heads) for model, base, heads in rounds)

    figures = {
        "base_parameters": parameters,
        "base_bytes": base_bytes,
        "heads_bytes": heads_bytes,
        "dtype": args.dtype,
        "loaded_as": args.into,
        "rounds": args.rounds,
        "call_seconds": call,
        "page_seconds": pages,
        "seconds": both,
        "peak_bytes": peak,
        "memory_ratio": peak["model"] / (peak["base"] + heads_bytes),
        "memory_over_tensors": peak["model"] / (base_bytes + heads_bytes),
        "time_ratio": ratio(lambda call, pages: call + pages),
        "call_ratio": ratio(lambda call, pages: call),
    }
    print(f"base {parameters / 1e6:.0f}M parameters, {base_bytes / 1e6:.0f} MB; heads {heads_bytes / 1e6:.0f} MB")
    for name in LOADS:
        took = f"{call[name] * 1e3:7.1f} ms + {pages[name] * 1e3:6.1f} ms for the pages"
        print(f"{name:<6} {took}  {peak[name] / 1e6:7.0f} MB at the peak")
    print(f"peak: {figures['memory_ratio']:.3f} of the base's peak plus the heads (at most 1.05)")
    print(f"      {figures['memory_over_tensors']:.3f} of the tensors' own size")
    print(f"time: {figures['time_ratio']:.3f} of the base's plus reading the heads (at most 1.1)")
    print(f"      {figures['call_ratio']:.3f} without the pages")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(0 if figures["memory_ratio"] <= 1.05 and figures["time_ratio"] <= 1.1 else 1)


if __name__ == "__main__":
    main()
