"""What a GPU shows of the package in ten minutes: the parts of the machine, GPU tests, steps, growth, compilation.

    python benchmarks/gpu.py                                                # 560 seconds at most
    python benchmarks/gpu.py --seconds 240 --phases step compile            # some phases only
    python benchmarks/gpu.py --device cpu --shape tiny                      # a dry run

Needs torch, transformers and this checkout, nothing installed. Every phase is a process with a limit of its own, so
that an error of the device, or a phase that takes too long, ends nothing else. Each figure is a line of
`$OUT/results.jsonl` (by default benchmarks/results/results.jsonl) as soon as it is known; the table comes last.

The bases have random weights of a LLaMA shape, made so that their text is clear (`planted_base`), and heads that guess
three tokens of every step right (`planted.py`). Phases whose name does not end in "cudnn" let PyTorch choose its own
attention kernels before cuDNN's, for base and heads alike: torch 2.11 prefers cuDNN on Hopper GPUs, which prepares a
plan for every new length of a text, and a figure of such calls is a figure of the preparation.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
OUT = Path(os.environ.get("OUT", HERE / "results"))

# hidden, intermediate, layers, heads, key/value heads, vocabulary
SHAPES = {
    "7b": (4096, 11008, 32, 32, 32, 32000),
    "1.1b": (2048, 5632, 22, 32, 4, 32000),
    "135m": (576, 1536, 30, 9, 3, 49152),
    "tiny": (128, 256, 2, 4, 2, 512),
}
# The published tree of Medusa, whose nodes nearest to the root are taken.
TREE = "mc_sim_7b_63"
RIGHT = 3  # guesses of every step that are right


# ---- running the phases --------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", nargs="*", choices=PHASES, default=list(PHASES), help="default: all, in this order")
    parser.add_argument("--seconds", type=float, default=560, help="of all phases together")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--shape", default="7b", choices=SHAPES)
    parser.add_argument("--phase", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        PHASES[args.phase][0](args)
        return
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: run this where torch.cuda.is_available(), or give --device cpu --shape tiny.")
    OUT.mkdir(parents=True, exist_ok=True)
    start, before = time.monotonic(), len(recorded_rows())
    for name in args.phases:
        run_phase(name, args, args.seconds - (time.monotonic() - start))
    show_table(recorded_rows()[before:])


def run_phase(name: str, args: argparse.Namespace, left: float) -> None:
    """Run a phase in a process of its own, within its limit and the seconds that are left."""
    if left < 10:
        record(phase=name, error="no time was left")
        return
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not name.endswith("cudnn"):
        environment["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = "1"
    command = [sys.executable, __file__, "--phase", name, "--device", args.device, "--shape", args.shape]
    begun, outcome = time.monotonic(), {}
    with (OUT / "log.txt").open("a") as log:
        try:
            limit = min(PHASES[name][1], left)
            done = subprocess.run(command, env=environment, timeout=limit, stdout=log, stderr=log, cwd=HERE.parent)
            if done.returncode:
                outcome = {"error": f"exit code {done.returncode}, see log.txt"}
        except subprocess.TimeoutExpired:
            outcome = {"error": f"ended after {limit:.0f} s"}
    record(phase=name, wall_s=round(time.monotonic() - begun, 1), **outcome)


def record(**row: Any) -> None:
    """Append a line to the results."""
    with (OUT / "results.jsonl").open("a") as results:
        results.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def recorded_rows() -> list[dict[str, Any]]:
    """The results so far, also of earlier runs."""
    path = OUT / "results.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show_table(rows: list[dict[str, Any]]) -> None:
    """Print every result as one line."""
    print()
    for row in rows:
        print(
            "  ".join(
                f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
            )
        )


@contextlib.contextmanager
def figure(name: str, **facts: Any) -> Iterator[dict[str, Any]]:
    """One result of a phase, filled by the caller; an error becomes part of it and leaves the next ones alone."""
    row: dict[str, Any] = {"what": name, **facts}
    begun = time.perf_counter()
    try:
        yield row
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        traceback.print_exc()
    record(**row, took_s=round(time.perf_counter() - begun, 1))


def wait(device: str) -> None:
    """Wait until the device has done what was launched."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


# ---- the machine ---------------------------------------------------------------------------------------------------


def machine(args: argparse.Namespace) -> None:
    """Ceilings: copies, products, launches, the products of a step, attention over the nodes of a tree by kernel."""
    import torch
    from torch.nn import functional

    device, half, gpu = args.device, torch.bfloat16, args.device == "cuda"
    with figure("versions") as row:
        row |= {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "device": device}
        if gpu:
            row["device"] = torch.cuda.get_device_name()
    with figure("copy") as row:
        source = torch.randn(1 << (30 if gpu else 22), device=device, dtype=half)
        target = torch.empty_like(source)
        row["tb_per_s"] = 2 * source.nbytes / microseconds(partial(target.copy_, source), device, 10, 2) / 1e6
    source = target = None
    with figure("product of two 8192 x 8192 matrices") as row:
        size = 8192 if gpu else 256
        left, right = (torch.randn(size, size, device=device, dtype=half) for _ in range(2))
        row["tflops"] = 2 * size**3 / microseconds(lambda: left @ right, device, 10, 2) / 1e6
    with figure("launch of one kernel") as row:
        small = torch.randn(64, 4096, device=device, dtype=half)
        row["graph_us"] = microseconds(lambda: small.mul_(1.0), device, 30, 200 if gpu else 1)
        wait(device)
        begun = time.perf_counter()
        for _ in range(2000):
            small.mul_(1.0)
        row["host_us"] = (time.perf_counter() - begun) / 2000 * 1e6
        wait(device)
    hidden, intermediate, _, _, _, vocabulary = SHAPES[args.shape]
    for name, rows_out, rows_in in (
        ("attention projection", hidden, hidden),
        ("gate", intermediate, hidden),
        ("lm_head", vocabulary, hidden),
    ):
        with figure(f"product with the weights of {name}") as row:
            copies = max(1, min(12, int(4e8 / (2 * rows_out * rows_in))))  # more than the cache of the GPU holds
            weights = [torch.randn(rows_out, rows_in, device=device, dtype=half) for _ in range(copies)]
            for nodes in (1, 16, 64, 128):
                states = torch.randn(nodes, rows_in, device=device, dtype=half)

                def products(states=states, weights=weights):
                    return [functional.linear(states, weight) for weight in weights]

                row[f"nodes_{nodes}_us"] = microseconds(products, device, 20, 1) / copies
    for past in (1152, 8256) if gpu else (96,):
        attention_kernels(device, past)
    if gpu:
        cudnn_plans(device)


def attention_kernels(device: str, past: int) -> None:
    """Attention of 64 nodes over a past, by kernel: time of the first call and of later ones, and error."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    half = torch.bfloat16
    query = torch.randn(1, 32, 64, 128, device=device, dtype=half)
    keys, values = (torch.randn(1, 32, 64 + past, 128, device=device, dtype=half) for _ in range(2))
    mask = torch.zeros(1, 1, 64, 64 + past, device=device, dtype=half)
    hidden_nodes = (torch.rand(64, 64, device=device) < 0.7).fill_diagonal_(False)
    mask[..., :64].masked_fill_(hidden_nodes, torch.finfo(half).min)
    exact = functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), attn_mask=mask.double()
    )
    for backend in (
        SDPBackend.CUDNN_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
        SDPBackend.FLASH_ATTENTION,
    ):
        with figure(f"attention of 64 nodes over {past}", kernel=backend.name) as row, sdpa_kernel(backend):
            shown = None if backend is SDPBackend.FLASH_ATTENTION else mask  # it takes no mask: the floor

            def attend(shown=shown):
                return functional.scaled_dot_product_attention(query, keys, values, attn_mask=shown)

            begun = time.perf_counter()
            outcome = attend()
            wait(device)
            row["first_ms"] = 1e3 * (time.perf_counter() - begun)
            row["us"] = microseconds(attend, device)
            if shown is not None:
                row["relative_error"] = float((outcome.double() - exact).norm() / exact.norm())


def cudnn_plans(device: str) -> None:
    """Milliseconds of cuDNN's attention at lengths that it has not seen before."""
    import torch
    from torch.nn import functional
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with figure("cuDNN attention, a new length each") as row, sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        for nodes in (64, 1):
            taken = []
            for past in range(700, 706):
                query = torch.randn(1, 32, nodes, 128, device=device, dtype=torch.bfloat16)
                keys, values = (torch.randn(1, 32, past, 128, device=device, dtype=torch.bfloat16) for _ in range(2))
                mask = None if nodes == 1 else torch.zeros(1, 1, nodes, past, device=device, dtype=torch.bfloat16)
                wait(device)
                begun = time.perf_counter()
                functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
                wait(device)
                taken.append(1e3 * (time.perf_counter() - begun))
            row[f"nodes_{nodes}_ms"] = taken


def microseconds(function: Callable[[], Any], device: str, repeats: int = 30, inner: int = 10) -> float:
    """Median microseconds of a call, `inner` of them in a CUDA graph; on a CPU one call by the clock."""
    import torch

    function()
    if device == "cpu":
        begun = time.perf_counter()
        function()
        return 1e6 * (time.perf_counter() - begun)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            function()
    taken = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) * 1e3 / inner)
    return statistics.median(taken)


def tests(args: argparse.Namespace) -> None:
    """The tests that need a GPU."""
    files = [HERE.parent / "tests" / "generation" / name for name in ("test_gpu.py", "test_recorded.py")]
    options = (
        ["-q", "-p", "no:cacheprovider", "-k", "gpu", "--timeout=90"] if args.device == "cuda" else ["-q", "-k", "gpu"]
    )
    with figure("GPU tests") as row:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *map(str, files)],
            capture_output=True,
            text=True,
            cwd=HERE.parent,
        )
        print(done.stdout[-30000:], done.stderr[-3000:])
        lines = done.stdout.splitlines() or done.stderr.splitlines()[-1:]
        row["result"] = lines[-1]
        row["failed"] = [line[:200] for line in lines if line.startswith("FAILED")][:12]


# ---- steps ---------------------------------------------------------------------------------------------------------


def planted_base(shape: str, device: str, most_layers: int | None = None):
    """Random weights of a shape whose next token is a permutation of the last one, by a wide margin.

    In half precision the logits of an ordinary random model tie so often that the text of one and of 64 tokens at once
    part after a few.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    hidden, intermediate, layers, heads, key_value_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=vocabulary,
        max_position_embeddings=16384,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=min(layers, most_layers or layers),
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    torch.manual_seed(0)
    with torch.device(device):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        embeddings = base.model.embed_tokens.weight.normal_()
        order = torch.randperm(vocabulary, device=device)
        base.lm_head.weight.copy_(embeddings[order] * (0.02 if hidden > 1000 else 0.1))
        for layer in base.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.05)
            layer.mlp.down_proj.weight.mul_(0.05)
    return base


class Case:
    """One base with heads, a tree and a prompt.

    Args:
        base: from `planted_base`.
        family: of the heads.
        nodes: of the tree, root included.
        context: tokens of the prompt; on a CPU 32.
        batch: rows.
        device: "cuda" or "cpu".
    """

    def __init__(self, base, family: str, nodes: int, context: int, batch: int, device: str):
        import torch
        from planted import PlantedDrafter

        from hf_drafthead import DraftTree
        from hf_drafthead.modeling.families import fresh_heads

        self.base, self.device = base, device
        self.long, self.short = (160, 48) if device == "cuda" else (24, 12)
        paths = sorted(DraftTree.from_name(TREE).paths, key=lambda path: (len(path) + sum(path), path))
        self.tree = DraftTree(paths[: nodes - 1])
        vocabulary = base.config.vocab_size
        shape = (batch, context if device == "cuda" else 32)
        prompt = torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(0)).to(device)
        mask = torch.ones_like(prompt)
        self.call = {"input_ids": prompt, "attention_mask": mask, "do_sample": False, "eos_token_id": None}
        text = base.generate(**self.call, max_new_tokens=self.long + 16, disable_compile=True)
        self.text = text
        with torch.device(device):  # a CPU takes seconds for the random numbers
            heads = fresh_heads(family, base)
        self.model = heads.to(device).eval()
        self.model.drafter = PlantedDrafter(self.model.drafter, text, RIGHT)

    def heads(self, **settings: Any) -> Callable[[int], Any]:
        """A call of so many tokens with heads."""
        return lambda tokens: self.model.generate(
            **{**self.call, **settings}, max_new_tokens=tokens, draft_tree=self.tree, return_dict_in_generate=True
        )

    def alone(self, **settings: Any) -> Callable[[int], Any]:
        """A call of so many tokens of the base."""
        return lambda tokens: self.base.generate(
            **{**self.call, **settings}, max_new_tokens=tokens, return_dict_in_generate=True
        )

    def compare(self, name: str, calls: dict[str, Callable[[int], Any]], repeats: int = 3) -> None:
        """Time calls in turn, of two lengths: what a step takes, what a call takes besides, and the speedup over the
        first of the calls, which is the base's."""
        taken: dict[tuple[str, int], list[float]] = {}
        outcomes: dict[tuple[str, int], Any] = {}
        failed: dict[str, str] = {}
        for turn, tokens, (label, call) in itertools.product(
            range(-1, repeats), (self.short, self.long), calls.items()
        ):
            if label in failed:
                continue
            wait(self.device)
            begun = time.perf_counter()
            try:
                outcomes[label, tokens] = call(tokens)
                wait(self.device)
            except Exception as error:
                traceback.print_exc()
                failed[label] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
                continue
            if turn >= 0:  # the first one prepares
                taken.setdefault((label, tokens), []).append(time.perf_counter() - begun)
            elif tokens == self.short:
                taken[label, -1] = [time.perf_counter() - begun]
        reference = next(iter(calls))
        for label in calls:
            with figure(f"{name}: {label}") as row:
                if label in failed:
                    row["error"] = failed[label]
                    continue
                row["first_call_s"] = taken[label, -1][0]
                self._figures(row, taken, outcomes, label)
                if label != reference and reference not in failed:
                    pairs = zip(taken[reference, self.long], taken[label, self.long])
                    ratios = sorted(theirs / ours for theirs, ours in pairs)
                    row["speedup"], row["spread"] = statistics.median(ratios), [ratios[0], ratios[-1]]

    def _figures(self, row: dict[str, Any], taken, outcomes, label: str) -> None:
        short, long = (statistics.median(taken[label, tokens]) for tokens in (self.short, self.long))
        counts = [getattr(outcomes[label, tokens], "accepted_lengths", None) for tokens in (self.short, self.long)]
        steps = [self.short, self.long]
        if counts[0] is not None:
            steps = [int(lengths.gt(0).any(0).sum()) for lengths in counts]
            row["tokens_per_step"] = float(counts[1].sum() / counts[1].gt(0).sum())
        row["step_ms"] = 1e3 * (long - short) / (steps[1] - steps[0])
        row["call_ms"] = 1e3 * short - row["step_ms"] * steps[0]
        row["tokens_per_s"] = self.long / long * len(self.text)
        if not self.call.get("do_sample"):
            sequences = outcomes[label, self.long].sequences
            row["same_text"] = bool((sequences == self.text[:, : sequences.shape[1]]).all())


def package_warnings() -> list[str]:
    """The warnings of the package from now on, which say why steps are not recorded or compiled."""
    import logging

    collected: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            collected.append(record.getMessage()[:300])

    logger = logging.getLogger("hf_drafthead")
    logger.addHandler(Collect())
    logger.setLevel(logging.WARNING)
    return collected


def step(args: argparse.Namespace) -> None:
    """One case in detail: recorded steps, uncaptured ones and their parts, the base; the kernels of a recorded call."""
    import torch

    warned = package_warnings()
    with figure("base is made"):
        base = planted_base(args.shape, args.device)
    with figure("heads and text are made") as row:
        case = Case(base, "medusa", 64, 1024, 1, args.device)
        row["why_no_drafts"] = case.model.why_no_drafts()
        row["different_tokens"] = int(case.text.unique().numel())
    calls = {"base": case.alone(), "recorded": case.heads(), "uncaptured": case.heads(disable_compile=True)}
    case.compare(f"{args.shape}, medusa, 64 nodes, context 1024", calls)
    with figure("parts of an uncaptured step, waiting after each") as row:
        notes: list[Any] = []
        case.heads(disable_compile=True, on_step=notes.append)(case.short)
        for name in ("draft", "verify", "walk", "commit", "step"):
            row[f"{name}_ms"] = 1e3 * statistics.median(note.seconds[name] for note in notes[3:])
    if args.device == "cuda":
        with figure("kernels of a recorded call") as row:
            kernels(case, row)
        with figure("memory") as row:
            row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    with figure("warnings") as row:
        row["warned"] = sorted(set(warned))


def kernels(case: Case, row: dict[str, Any]) -> None:
    """The kernels that take most of a recorded call; all of them in kernels.txt."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    call = case.heads()
    call(96)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        outcome = call(96)
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.device_time_total)
    table = trace.key_averages().table(sort_by="device_time_total", row_limit=60, max_name_column_width=90)
    (OUT / "kernels.txt").write_text(table)
    row["steps"] = int(outcome.accepted_lengths.gt(0).any(0).sum())
    row["kernels"] = sum(event.count for event in events)
    row["kernel_ms"] = sum(event.device_time_total for event in events) / 1e3
    row["top"] = [[event.key[:60], event.count, round(event.device_time_total / 1e3, 2)] for event in events[:12]]


def growth_cudnn(args: argparse.Namespace) -> None:
    """With cuDNN's attention first, as torch has it on Hopper GPUs: new lengths of the base, and a text that grows."""
    import torch

    warned = package_warnings()
    base = planted_base(args.shape, args.device)
    case = Case(base, "medusa", 16, 128, 1, args.device)
    with figure("cuDNN, base: 24 tokens at new lengths, then again") as row:
        prompt = torch.randint(0, base.config.vocab_size, (1, 700), device=args.device)
        call = {**case.call, "input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": 24}
        for name in ("first_s", "again_s"):
            wait(args.device)
            begun = time.perf_counter()
            base.generate(**call)
            wait(args.device)
            row[name] = time.perf_counter() - begun
    tokens = 700 if args.device == "cuda" else 24
    for name, settings in (("recorded", {}), ("uncaptured", {"disable_compile": True})):
        with figure(f"cuDNN, {name}, a text of {tokens} tokens") as row:
            wait(args.device)
            begun = time.perf_counter()
            outcome = case.heads(**settings)(tokens if not settings else min(tokens, 200))
            wait(args.device)
            row["seconds"] = time.perf_counter() - begun
            row["steps"] = int(outcome.accepted_lengths.shape[1])
            row["warned"] = sorted(set(warned))
            if args.device == "cuda":
                row["stream_is_default"] = torch.cuda.current_stream() == torch.cuda.default_stream()


def more(args: argparse.Namespace) -> None:
    """Other shapes, families, trees, batches and contexts, recorded, each with its base."""
    import torch

    cases = [
        (args.shape, "medusa", 16, 1024, 8),
        (args.shape, "medusa", 16, 8192, 1),
        (args.shape, "eagle", 64, 1024, 1),
        (args.shape, "hydra", 64, 1024, 1),
        ("135m" if args.device == "cuda" else args.shape, "eagle", 32, 256, 1),
        ("135m" if args.device == "cuda" else args.shape, "medusa", 32, 256, 8),
    ]
    made: dict[str, Any] = {}
    for shape, family, nodes, context, batch in cases:
        warned = package_warnings()
        case = None
        with figure("case is made", shape=shape, family=family):
            if shape not in made:
                made.clear()
                made[shape] = planted_base(shape, args.device)
            case = Case(made[shape], family, nodes, context, batch, args.device)
        if case is None:
            continue
        name = f"{shape}, {family}, {nodes} nodes, context {context}, batch {batch}"
        case.compare(name, {"base": case.alone(), "recorded": case.heads()}, repeats=2)
        if warned:
            record(what=f"{name}: warnings", warned=sorted(set(warned)))
        del case
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def compile(args: argparse.Namespace) -> None:
    """The base at its best (static cache, compiled, CUDA graphs) and compiled steps.

    Of eight layers: compiling all 32 takes longer than everything else here.
    """
    warned = package_warnings()
    case = Case(planted_base(args.shape, args.device, most_layers=8), "medusa", 64, 1024, 1, args.device)
    static = {"cache_implementation": "static"}
    name, base = f"{args.shape}, 8 layers, medusa, 64 nodes, context 1024", {"base, compiled": case.alone(**static)}
    case.compare(name, {**base, "recorded": case.heads()})
    case.compare(name, {**base, "compiled": case.heads(**static)})  # apart: its compilation may take all of the time
    with figure("warnings") as row:
        row["warned"] = sorted(set(warned))


def sample(args: argparse.Namespace) -> None:
    """Sampled calls."""
    case = Case(planted_base(args.shape, args.device), "medusa", 64, 1024, 1, args.device)
    case.call["do_sample"] = True
    for name, settings in (("top-p", {"top_k": 50, "top_p": 0.9}), ("temperature", {"top_k": 0, "temperature": 0.8})):
        calls = {"base": case.alone(**settings), "heads": case.heads(**settings)}
        case.compare(f"{args.shape}, sampled with {name}", calls, repeats=1)


# name: the function, its limit in seconds
PHASES: dict[str, tuple[Callable[[argparse.Namespace], None], float]] = {
    "machine": (machine, 75),
    "tests": (tests, 110),
    "step": (step, 130),
    "growth-cudnn": (growth_cudnn, 100),
    "compile": (compile, 170),
    "more": (more, 110),
    "sample": (sample, 45),
}


if __name__ == "__main__":
    main()
