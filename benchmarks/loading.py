"""What loading a model with draft heads costs beside loading its base: peak memory and time.

    python benchmarks/loading.py [--shape 220m] [--runs 5] [--dtype bfloat16] [--as float32] [--json PATH]

Makes a random LLaMA of 220 million parameters (or 1.1 billion) and Medusa heads for it in a temporary folder, then
loads in turn, each time in a process of its own: the base alone, the heads' tensors alone, and the model (heads on
disk, the base found through their config). Memory is the peak of the process over what it used before loading, mapped
files included; time is that of the loading call, on the clock and of the CPU. Medians over the runs, interleaved.
What is loaded in the type that it is stored in is only mapped, at a cost that hardly grows with it; `--as` another
type has every weight read.

It ends with 1 if the model's peak is more than 5% over the base's peak plus the heads, or its time more than 1.1 times
that of the base plus that of reading the heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_drafthead import MedusaForCausalLM

LOADS = {
    "base": "AutoModelForCausalLM.from_pretrained(folder + '/base', dtype=dtype)",
    "heads": "read(folder + '/heads/model.safetensors')",
    "model": "AutoModelForCausalLM.from_pretrained(folder + '/heads', dtype=dtype)",
}
# Prints seconds on the clock, seconds of CPU, and bytes of the peak over those before. What any first loading imports
# is imported before, for it belongs to neither. Tensors are mapped, not read, by loading: one element of every page is
# asked for, so that all of them are in memory at the end.
PROCESS = """
import json, sys, time
import torch, hf_drafthead
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging
folder, dtype = sys.argv[1:]

def read(file):
    return {name: t if dtype == "auto" else t.to(getattr(torch, dtype)) for name, t in load_file(file).items()}

logging.disable_progress_bar()
AutoModelForCausalLM.from_pretrained(folder + "/small")

def memory(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

before = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
clock, cpu = time.perf_counter(), time.process_time()
kept = {load}
for tensor in (kept if isinstance(kept, dict) else kept.state_dict()).values():
    tensor.flatten()[:: 4096 // tensor.element_size()].sum()
clock, cpu = time.perf_counter() - clock, time.process_time() - cpu
print(json.dumps([clock, cpu, memory("VmHWM") - before]))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="220m", choices=SHAPES)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--as", dest="into", default="auto", help="type to load into")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        dtype = getattr(torch, args.dtype)
        parameters, *sizes = prepare(Path(place), args.shape, dtype)
        grown = 1 if args.into == "auto" else getattr(torch, args.into).itemsize / dtype.itemsize
        base_bytes, heads_bytes = (size * grown for size in sizes)
        measured: dict[str, list[list[float]]] = {name: [] for name in LOADS}
        for _ in range(args.runs):
            for name, load in LOADS.items():
                words = [sys.executable, "-c", PROCESS.replace("{load}", load), place, args.into]
                done = subprocess.run(words, capture_output=True, text=True, check=True)
                measured[name].append(json.loads(done.stdout.splitlines()[-1]))
    clock, cpu, peak = ({name: statistics.median(run[i] for run in measured[name]) for name in LOADS} for i in range(3))
    figures = {
        "base_parameters": parameters,
        "base_bytes": base_bytes,
        "heads_bytes": heads_bytes,
        "dtype": args.dtype,
        "loaded_as": args.into,
        "runs": args.runs,
        "seconds": clock,
        "cpu_seconds": cpu,
        "peak_bytes": peak,
        "memory_ratio": peak["model"] / (peak["base"] + heads_bytes),
        "memory_over_tensors": peak["model"] / (base_bytes + heads_bytes),
        "time_ratio": clock["model"] / (clock["base"] + clock["heads"]),
        "cpu_time_ratio": cpu["model"] / (cpu["base"] + cpu["heads"]),
    }
    print(f"base {parameters / 1e6:.0f}M parameters, {base_bytes / 1e6:.0f} MB; heads {heads_bytes / 1e6:.0f} MB")
    for name in LOADS:
        print(f"{name:<6} {clock[name]:7.3f} s  {cpu[name]:7.3f} s of CPU  {peak[name] / 1e6:7.0f} MB at the peak")
    print(f"peak: {figures['memory_ratio']:.3f} of the base's peak plus the heads (at most 1.05)")
    print(f"      {figures['memory_over_tensors']:.3f} of the tensors' own size")
    print(f"time: {figures['time_ratio']:.3f} of the base's plus reading the heads (at most 1.1)")
    print(f"      {figures['cpu_time_ratio']:.3f} in CPU time")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(0 if figures["memory_ratio"] <= 1.05 and figures["time_ratio"] <= 1.1 else 1)


if __name__ == "__main__":
    main()
