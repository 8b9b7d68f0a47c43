"""What a step would cost on a machine that is not at hand: the roofline model (Medusa, arXiv 2401.10774, appendix G).

An operator takes as long as its arithmetic or its memory traffic, whichever is longer:

    seconds = max(FLOP / peak FLOP per second, bytes / bandwidth)

A step is the sum over the matrix products of the base with N nodes in the place of one token, and of drafting. This is
the least that a step can take: kernels reach some share of it, and a small model is bound by launching them.

Shapes: B rows, N nodes (root included), S positions attended to, H hidden, I intermediate, V vocabulary; n heads, of
them k for keys and values, of size d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.state import draft_vocabulary
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.calibrate import count_trees
from hf_drafthead.trees.grow import TreeStatistics
from hf_drafthead.trees.rank_paths import sampled_prompts

GB, TERA = 1e9, 1e12
# About what transformers launches in a layer of a dense decoder, and the seconds of each that no arithmetic or memory
# traffic accounts for: in a recorded step (a CUDA graph), and in one that Python launches.
KERNELS_PER_LAYER, RECORDED_LAUNCH, EAGER_LAUNCH = 40, 2e-6, 15e-6


@dataclass(frozen=True)
class Machine:
    """Memory bandwidth in bytes per second, and peak FLOP per second by dtype, without sparsity."""

    bandwidth: float
    flops: dict[str, float]


def _gpu(gigabytes: float, half: float, single: float) -> Machine:
    """GB/s, and TFLOP/s in half precision (tensor cores) and in float32."""
    return Machine(gigabytes * GB, {"bfloat16": half * TERA, "float16": half * TERA, "float32": single * TERA})


MACHINES = {
    "a40": _gpu(696, 149.7, 37.4),  # "NVIDIA A40 data sheet"
    "a6000": _gpu(768, 154.8, 38.7),  # "NVIDIA RTX A6000 data sheet"
    "a100-40gb": _gpu(1555, 312, 19.5),  # "NVIDIA A100 Tensor Core GPU data sheet", 40 GB
    "a100-80gb-pcie": _gpu(1935, 312, 19.5),  # the same data sheet, 80 GB PCIe
    "a100-80gb-sxm": _gpu(2039, 312, 19.5),  # the same data sheet, 80 GB SXM
    "h100-pcie": _gpu(2000, 756, 51),  # "NVIDIA H100 Tensor Core GPU data sheet", PCIe
    "h100-sxm": _gpu(3350, 989, 67),  # the same data sheet, SXM
    "h200-sxm": _gpu(4800, 989, 67),  # "NVIDIA H200 Tensor Core GPU data sheet", SXM
    "l4": _gpu(300, 121, 30.3),  # "NVIDIA L4 Tensor Core GPU data sheet"
    "l40s": _gpu(864, 362, 91.6),  # "NVIDIA L40S data sheet"
    "rtx-4090": _gpu(1008, 165.2, 82.6),  # "NVIDIA Ada GPU architecture" white paper, accumulating in float32
}


class Operator(NamedTuple):
    """The work of some matrix products: FLOP and bytes moved."""

    flop: float
    bytes: float

    def seconds(self, machine: Machine, dtype: str) -> float:
        """max(FLOP / peak, bytes / bandwidth)."""
        return max(self.flop / machine.flops[dtype], self.bytes / machine.bandwidth)


def linear(tokens: int, inputs: int, outputs: int, width: int, count: int = 1) -> Operator:
    """`count` linear layers over B N tokens (table 5: b q h i multiplications, b q (h + i) + h i numbers moved, of
    `width` bytes each)."""
    flop = 2.0 * tokens * inputs * outputs
    return Operator(count * flop, count * width * (tokens * (inputs + outputs) + float(inputs) * outputs))


def attention(
    rows: int, nodes: int, past: int, heads: int, key_heads: int, size: int, width: int, count: int = 1
) -> Operator:
    """Q K^T and P V of `count` layers (table 5: b s q n d multiplications, b s q n + b (s + q) n d numbers moved).

    Groups of the n heads share k `key_heads`; the nodes are part of the S positions of the past.
    """
    flop = 2.0 * rows * past * nodes * heads * size
    moved = rows * (past * nodes * heads + nodes * heads * size + past * key_heads * size)
    return Operator(2 * count * flop, 2.0 * count * width * moved)


def base_work(config: Any, rows: int, nodes: int, past: int, width: int) -> list[Operator]:
    """The matrix products of one forward pass of a base over N nodes of B rows, which are part of the S positions of
    the past, in numbers of `width` bytes.

    Raises:
        ValueError: a mixture of experts, or no such sizes.
    """
    config = config.get_text_config(decoder=True)
    unknown = f"a base of type {config.model_type!r} {{}}: run `hf-drafthead calibrate` on the machine itself."
    for name in ("num_experts", "num_local_experts"):
        if experts := getattr(config, name, None):
            raise ValueError(unknown.format(f"has {experts} experts, of which the text chooses some"))
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    hidden, heads, layers, inner = (getattr(config, name, None) for name in names)
    if not (hidden and heads and layers and inner):
        raise ValueError(unknown.format(f"does not tell {', '.join(names[:3])} and {names[3]}"))
    size = getattr(config, "head_dim", None) or hidden // heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    tokens = rows * nodes
    return [
        linear(tokens, hidden, heads * size, width, 2 * layers),  # queries and the output
        linear(tokens, hidden, key_heads * size, width, 2 * layers),  # keys and values
        attention(rows, nodes, past, heads, key_heads, size, width, layers),
        linear(tokens, hidden, inner, width, 3 * layers),  # gate, up and down
        linear(tokens, hidden, config.vocab_size, width),
    ]


def draft_work(model: Any, rows: int, tree: DraftTree) -> list[Operator]:
    """What drafting a tree takes, level by level: each level reads what projects its guesses.

    A layer that guesses every level is read at every level; heads of one level each are read once. Where they project
    with the base's lm_head, it is read as well.
    """
    drafter = model.drafter
    weights = list(drafter.parameters())
    width = weights[0].element_size()
    vocabulary = model.base.config.get_text_config(decoder=True).vocab_size
    own_projection = any(draft_vocabulary(model.base, drafter) in weight.shape for weight in weights)
    share = 1.0 if drafter.max_depth is None else 1 / drafter.max_depth
    count = sum(weight.numel() for weight in weights)
    work = []
    for level in tree.levels():
        tokens = rows * len(level.expanded)
        work.append(Operator(2.0 * tokens * count * share, width * count * share))
        if not own_projection:
            work.append(linear(tokens, model.base.get_output_embeddings().weight.shape[1], vocabulary, width))
    return work


def step_work(model: Any, rows: int, tree: DraftTree, past: int) -> list[Operator]:
    """The matrix products of a step: drafting the tree, and the base over its nodes, which are part of the past."""
    width = model.base.get_input_embeddings().weight.element_size()
    return draft_work(model, rows, tree) + base_work(model.base.config, rows, tree.num_nodes, past, width)


def seconds_of(work: Sequence[Operator], machine: Machine, dtype: str) -> float:
    """Seconds of operators that run one after the other."""
    return sum(operator.seconds(machine, dtype) for operator in work)


@dataclass(frozen=True)
class PlannedTree:
    """The tree with most tokens per second on a machine, on paper."""

    batch_size: int
    tree: DraftTree
    tokens_per_step: float  # on texts that it was not grown on
    seconds: float  # of a step
    base_seconds: float  # of a step of the base
    speedup: float  # tokens per second over those of the base
    recorded_floor: float  # seconds that launching the base's kernels takes about, in a CUDA graph
    eager_floor: float  # and without

    def in_words(self) -> list[str]:
        """The plan, and where launching kernels takes longer than the step on paper, that it does."""
        figures = (
            f"{self.tree.num_nodes} nodes, {self.tokens_per_step:.2f} tokens per step; on paper a step takes "
            f"{1e3 * self.seconds:.3g} ms, one of the base {1e3 * self.base_seconds:.3g} ms: "
            f"{self.speedup:.2f}x the base"
        )
        if self.recorded_floor < self.seconds:
            return [figures]
        return [
            figures,
            f"but launching the base's kernels takes about {1e3 * self.recorded_floor:.2g} ms a step as a CUDA graph "
            f"and {1e3 * self.eager_floor:.2g} ms without: of a base this small it decides, and more nodes cost next "
            "to nothing; measure it on the GPU itself",
        ]

    def to_json(self) -> dict[str, Any]:
        """All fields, the tree as rank paths."""
        return {**vars(self), "tree": [list(path) for path in self.tree.paths]}


def plan_trees(
    model: Any,
    prompts: Sequence[torch.Tensor] | None,
    machine: str,
    batch_sizes: Sequence[int] = (1,),
    *,
    context: int = 1024,
    max_nodes: int = 100,
    new_tokens: int = 128,
    temperature: float = 0.0,
) -> list[PlannedTree]:
    """Choose trees for a machine that is not at hand: tokens per step from the base's own text, seconds on paper.

    Args:
        model: with draft heads, in eval mode, in the dtype that the machine shall run.
        prompts: (P,) token ids each; None for some that the base writes itself.
        machine: a name in `MACHINES`.
        batch_sizes: rows of a call; a plan for each.
        context: S, the positions that a step attends to, nodes not included; the others as in `calibrate`.

    Raises:
        ValueError: no such machine, or not in this dtype; a base that the model does not fit; too few prompts.
    """
    hardware, dtype = machine_named(machine), str(model.base.dtype).removeprefix("torch.")
    if dtype not in hardware.flops:
        raise ValueError(f"the base is in {dtype}, expected one of {', '.join(hardware.flops)}: give --dtype.")
    base_work(model.base.config, 1, 1, 1, 1)  # raises where the model does not fit, before any work is done
    prompts = sampled_prompts(model, new_tokens=new_tokens) if prompts is None else prompts
    counted = count_trees(model, prompts, new_tokens, max_nodes, temperature)
    return [_best(model, counted, hardware, dtype, rows, context) for rows in batch_sizes]


def machine_named(name: str) -> Machine:
    """A machine of the table; a ValueError where it has none of that name."""
    if name not in MACHINES:
        raise ValueError(f"no machine {name!r} is known: expected one of {', '.join(MACHINES)}.")
    return MACHINES[name]


def _best(model: Any, counted: TreeStatistics, machine: Machine, dtype: str, rows: int, context: int) -> PlannedTree:
    alone = seconds_of(step_work(model, rows, DraftTree.root_alone(), context + 1), machine, dtype)
    kernels = KERNELS_PER_LAYER * model.base.config.get_text_config(decoder=True).num_hidden_layers
    floors = kernels * RECORDED_LAUNCH, kernels * EAGER_LAUNCH
    plans = []
    for size in counted.steps:
        tree, tau = counted.tree(size), counted.tokens_per_step(size)
        seconds = seconds_of(step_work(model, rows, tree, context + size.nodes), machine, dtype)
        plans.append(PlannedTree(rows, tree, tau, seconds, alone, tau * alone / seconds, *floors))
    return max(plans, key=lambda plan: plan.speedup)
