"""A plot of a training."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_training(history: Sequence[dict[str, Any]], file: Path) -> None:
    """Top-1 accuracy of every head and tokens per step over the steps, on held-out rows.

    Args:
        history: the Trainer's `state.log_history`.
        file: of the picture; its ending says which kind.
    """
    from matplotlib.figure import Figure

    rows = [entry for entry in history if "eval_loss" in entry]
    steps = [entry["step"] for entry in rows]
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    heads, speed = figure.subplots(1, 2)
    head = 0
    while rows and f"eval_head{head}_top1" in rows[0]:
        heads.plot(steps, [entry[f"eval_head{head}_top1"] for entry in rows], marker="o", label=f"head {head + 1}")
        head += 1
    heads.set(xlabel="step", ylabel="top-1 accuracy", title="held-out rows", ylim=(0, 1))
    if head:
        heads.legend()
    told = [entry for entry in rows if entry.get("eval_tokens_per_step") is not None]
    speed.plot([entry["step"] for entry in told], [entry["eval_tokens_per_step"] for entry in told], marker="o")
    speed.set(xlabel="step", ylabel="tokens per step", title="expected of a 64-node tree")
    figure.savefig(file, dpi=120)
