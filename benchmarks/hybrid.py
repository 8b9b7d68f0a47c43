"""What a step of 16 nodes costs on bases whose layers keep a state, in tokens of the base's own, and what it remembers.

    python benchmarks/hybrid.py                                    # all shapes, eager
    python benchmarks/hybrid.py --shapes qwen3.5-0.8b --compiled   # compiled steps, and the base compiled

Random weights of published shapes in bfloat16, made so that their text is clear, and guesses that are right three times
a step at no cost: what is measured is verifying, walking and committing 16 nodes. The calls take turns in one process;
figures are medians over the turns, with the least and the largest. The last line is the memory of a step's record.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, PreTrainedModel

from hf_drafthead import DraftTree
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation.batch import with_room
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.prompt_lookup import LookupForCausalLM
from hf_drafthead.trees.timing import time_interleaved

RESULTS = Path(__file__).parent / "results" / "hybrid.json"
NODES, RIGHT, CHOICES = 16, 3, 64
GATED = {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        **GATED,
    },
    "lfm2-350m": {
        "model_type": "lfm2",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 6656,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "granite-4.0-h-350m": {
        "model_type": "granitemoehybrid",
        "vocab_size": 100352,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "shared_intermediate_size": 2048,
        "num_hidden_layers": 32,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "num_local_experts": 0,
        "mamba_n_heads": 48,
        "mamba_d_head": 32,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "layer_types": ["attention" if number in (10, 13, 17, 27) else "mamba" for number in range(32)],
    },
}
# Two layers of it: what a layer records is what each of the 24 that keep a state does.
QWEN_4B = {**SHAPES["qwen3.5-0.8b"], "hidden_size": 2560, "intermediate_size": 64, "vocab_size": 512}
QWEN_4B |= {"num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32, "num_hidden_layers": 2}
QWEN_4B |= {"layer_types": ["linear_attention", "full_attention"]}
LAYERS_OF_4B = 24


class KnownState(NamedTuple):
    """position: (B,) of each row's root in the text; depth: levels that were guessed."""

    position: Tensor
    depth: int = 0


class KnownText(torch.nn.Module):
    """Guesses at no cost: the next tokens of a text, right `RIGHT` times a step.

    Args:
        text: (T,) prompt and continuation, of every row.
    """

    reads, keeps_history, copies, draft_tokens, max_depth = (-1,), False, None, None, None

    def __init__(self, text: Tensor):
        super().__init__()
        self.register_buffer("text", text)
        self.register_buffer("others", torch.arange(5, 5 + CHOICES))
        self.prompt = 0

    def prepare(self) -> None: ...

    def start(self, batch_size: int, capacity: int) -> KnownState:
        return KnownState(torch.full((batch_size,), self.prompt - 1))

    def observe(self, state: KnownState, features: Tensor, tokens: Tensor, lengths: Tensor) -> KnownState:
        return KnownState(state.position + lengths)

    def expand(self, state: KnownState, tokens: Tensor, parents: Tensor) -> tuple[KnownState, Guesses]:
        where = (state.position[:1] + state.depth + 1).clamp(max=len(self.text) - 1)
        best = self.text[where] if state.depth < RIGHT else self.others[:1]
        scores = -torch.arange(CHOICES + 1.0).expand(len(tokens), 1, -1)
        return KnownState(state.position, state.depth + 1), Guesses(scores, torch.cat([best, self.others]))


def build(fields: dict[str, Any]) -> PreTrainedModel:
    """Random weights whose next token is a permutation of the last one, by a wide margin."""
    rest = {**fields, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(rest.pop("model_type"), **rest), dtype=torch.bfloat16)
    with torch.no_grad():
        embeddings = base.get_input_embeddings().weight.normal_()
        order = torch.randperm(len(embeddings))
        base.get_output_embeddings().weight.copy_(embeddings[order] * 0.1)
        for name, weight in base.named_parameters():
            if any(part in name for part in ("o_proj.", "out_proj.", "down_proj.", "w2.", "output_linear.")):
                weight.mul_(0.05)
    return base.eval()


def noting(times: list[float]) -> Any:
    """A streamer, or by its `put` an `on_step`, that notes when each step has ended."""
    return SimpleNamespace(put=lambda _: times.append(time.perf_counter()), end=lambda: None)


def median_step(times: list[float]) -> float:
    """Seconds of a step, of the times at which they ended."""
    return statistics.median(after - before for before, after in itertools.pairwise(times))


def measure(name: str, repeats: int, tokens: int, compiled: bool) -> dict[str, Any]:
    """The cost of a step with `NODES` nodes on one base, in steps of the base as installed and, if asked, compiled."""
    base = build(SHAPES[name])
    paths = sorted(DraftTree.from_name(DEFAULT_TREE).paths, key=lambda path: (len(path) + sum(path), path))
    tree = DraftTree(paths[: NODES - 1])
    prompt = torch.randint(5, 500, (1, 32), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "max_new_tokens": tokens}
    call |= {"do_sample": False, "eos_token_id": None}
    text = base.generate(**{**call, "max_new_tokens": tokens + 16})[0]
    model = LookupForCausalLM.from_base(base)
    model.drafter = KnownText(text)
    model.drafter.prompt = prompt.shape[1]
    model.drafter.eval()
    clocks: dict[str, list[float]] = {}
    steps: dict[str, Tensor] = {}

    def of_base(label: str, **how: Any) -> Any:
        def run() -> Tensor:
            times: list[float] = []
            output = with_room(base.generate)(**call, **how, streamer=noting(times))
            clocks.setdefault(label, []).append(median_step(times[1:]))  # a streamer is shown the prompt first
            return output

        return run

    def drafted(label: str, **how: Any) -> Any:
        def run() -> Tensor:
            times: list[float] = []
            noted = {"on_step": noting(times).put, "return_dict_in_generate": True}
            output = model.generate(**call, **how, draft_tree=tree, **noted)
            assert output.accepted_lengths is not None, model.why_no_drafts()
            clocks.setdefault(label, []).append(median_step(times))
            steps[label] = output.accepted_lengths
            return output.sequences

        return run

    runs = {"base": of_base("base"), "heads": drafted("heads")}
    if compiled:
        config = CompileConfig()
        config._compile_all_devices = True
        static = {"cache_implementation": "static", "compile_config": config}
        runs |= {"base compiled": of_base("base compiled", **static)}
        runs |= {"heads compiled": drafted("heads compiled", cache_implementation="static")}
    time_interleaved(runs, 1, base.device)  # what is loaded and compiled first
    clocks.clear()
    outputs, _ = time_interleaved(runs, repeats, base.device)
    row: dict[str, Any] = {"shape": name, "nodes": NODES, "threads": torch.get_num_threads(), "repeats": repeats}
    row["parameters"] = sum(parameter.numel() for parameter in base.parameters())
    for label, over in (("heads", "base"), ("heads compiled", "base compiled"), ("heads compiled", "base")):
        if label in clocks and over in clocks:
            ratios = sorted(ours / theirs for ours, theirs in zip(clocks[label], clocks[over]))
            figures = [round(value, 3) for value in (statistics.median(ratios), ratios[0], ratios[-1])]
            row[f"{label} over {over}"] = figures
    row["milliseconds"] = {label: round(1e3 * statistics.median(times), 2) for label, times in clocks.items()}
    row["tokens per step"] = round(float(steps["heads"].float().mean()), 3)
    row["identical"] = all(torch.equal(output, outputs["base"]) for output in outputs.values())
    return row


def record_of_4b() -> dict[str, Any]:
    """MiB a row that a step of 16 nodes keeps for its commit at the shape of Qwen3.5-4B, beside MiB of its states."""
    base = build(QWEN_4B)
    reader, tree = probe(base, (-1,)), DraftTree([[0] * depth for depth in range(1, NODES)])
    cache, topology = reader.cache(1, 64, NODES), tree.topology(base.device)
    with torch.no_grad():
        reader(True, **{"input_ids": torch.arange(5, 16)[None], CACHE: cache, "use_cache": True})
        cache.count(11)
        reader.nodes(torch.arange(5, 5 + NODES)[None], topology, cache, cache.lengths[:, None] + topology.depths, None)
    layer = cache.recurrent[0]
    recorded, held = (sum(each.nbytes for each in part) for part in (layer.record.values(), layer.tensors))
    of_all = LAYERS_OF_4B / 2**20
    return {"shape": "qwen3.5-4b", "record MiB": round(recorded * of_all, 2), "states MiB": round(held * of_all, 2)}


def measured_as(row: dict[str, Any]) -> tuple[str, bool]:
    """What a row is of; a later one of the same takes its place."""
    return row["shape"], "heads compiled over base" in row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--compiled", action="store_true", help="also compiled steps, and the base compiled")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the rows are written, beside those of others")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json.is_file() else []
    measured = (measure(name, args.repeats, args.tokens, args.compiled) for name in args.shapes)
    for row in itertools.chain(measured, (record() for record in [record_of_4b])):
        print(json.dumps(row), flush=True)
        rows = [other for other in rows if measured_as(other) != measured_as(row)] + [row]
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
