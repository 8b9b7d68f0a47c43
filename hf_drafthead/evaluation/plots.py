"""Plots of measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.report import labels

if TYPE_CHECKING:  # matplotlib is imported where it draws
    from matplotlib.axes import Axes


def draw(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """Draw the plots that these measurements allow, one PNG file each.

    Args:
        measurements: of one call, of one or several models.
        folder: created if it does not exist.

    Returns:
        the files.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    heats = {one.temperature for one in measurements}
    swept = {one.model for one in measurements if "posterior_threshold" in one.acceptance and len(heats) == 1}
    several = {
        one.model for one in measurements if len({o.batch_size for o in measurements if o.model == one.model}) > 1
    }
    pictures: list[tuple[str, Callable[[Axes, Sequence[Measurement]], None], Sequence[Measurement]]] = [
        ("speedup_by_category", speedup_by_category, measurements),
        ("accepted_lengths", accepted_lengths, [one for one in measurements if one.accepted_lengths]),
        ("head_accuracy", head_accuracy, [one for one in measurements if one.head_accuracy]),
        ("throughput_by_batch", throughput_by_batch, [one for one in measurements if one.model in several]),
        ("temperature", temperature, measurements if len(heats) > 1 else []),
        ("epsilon", epsilon, [one for one in measurements if one.model in swept]),
    ]
    written = []
    for name, picture, shown in pictures:
        if not shown:
            continue
        figure = Figure(figsize=(7, 4), layout="constrained")
        picture(figure.add_subplot(), shown)
        figure.savefig(folder / f"{name}.png", dpi=150)
        written.append(folder / f"{name}.png")
    return written


def draw_calibration(entries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw tokens per step and speedup by the nodes of the tree (Hydra, arXiv 2402.05109, figures 7 to 9).

    A point for every tree that was timed, a star for the one that was kept; a level line for the base.

    Args:
        entries: of a calibration, see `trees.calibrate`.
        folder: created if it does not exist.

    Returns:
        the picture, calibration.png.
    """
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 4), layout="constrained")
    steps, speedups = figure.subplots(1, 2)
    for number, entry in enumerate(entries):
        figures, colour = entry["measured"], f"C{number}"
        if not figures.get("candidates"):  # an entry of an earlier version
            continue
        nodes, _, taus, faster = zip(*figures["candidates"])
        for axes, timed, kept in ((steps, taus, "tokens_per_step"), (speedups, faster, "speedup")):
            axes.plot(nodes, timed, ".", color=colour, label=f"batch size {entry['batch_size']}")
            axes.plot([len(entry["tree"]) + 1], [figures[kept]], "*", color=colour, markersize=12)
            axes.set_xlabel("nodes, the root included")
    speedups.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
    steps.set_ylabel("tokens per step")
    speedups.set_ylabel("speedup over the base")
    steps.legend(frameon=False)
    figure.savefig(folder / "calibration.png", dpi=150)
    return folder / "calibration.png"


def speedup_by_category(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """Bars in groups, one group per category; the base is the line at 1."""
    categories = list(dict.fromkeys(category for one in measurements for category in one.per_category))
    width = 0.8 / len(measurements)
    for place, (label, one) in enumerate(zip(labels(measurements), measurements)):
        known = [
            (at, one.per_category[name]["speedup"]) for at, name in enumerate(categories) if name in one.per_category
        ]
        left = [at + (place - (len(measurements) - 1) / 2) * width for at, _ in known]
        axes.bar(left, [speedup for _, speedup in known], width, label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("speedup over the base")
    axes.legend(frameon=False)


def accepted_lengths(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """The share of steps that emitted 1, 2, 3 ... tokens."""
    width = 0.8 / len(measurements)
    for place, (label, one) in enumerate(zip(labels(measurements), measurements)):
        steps = sum(one.accepted_lengths.values())
        left = [length + (place - (len(measurements) - 1) / 2) * width for length in one.accepted_lengths]
        axes.bar(left, [count / steps for count in one.accepted_lengths.values()], width, label=label)
    axes.set_xlabel("tokens emitted by a step")
    axes.set_ylabel("share of steps")
    axes.legend(frameon=False)


def head_accuracy(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """How often each head has the next token first, and among its best five (Amphista, arXiv 2406.13170, figure 1)."""
    for number, (label, one) in enumerate(zip(labels(measurements), measurements)):
        shares = one.head_accuracy or []
        heads = range(1, len(shares) + 1)
        axes.plot(heads, [100 * share[-1] for share in shares], "o--", color=f"C{number}", label=f"{label}, top 5")
        axes.plot(heads, [100 * share[0] for share in shares], "o-", color=f"C{number}", label=f"{label}, top 1")
    axes.set_xticks(range(1, 1 + max(len(one.head_accuracy or []) for one in measurements)))
    axes.set_xlabel("head")
    axes.set_ylabel("accuracy in %")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False)


def throughput_by_batch(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """Tokens per second of the heads and of the base by batch size (Hydra, arXiv 2402.05109, figure 3)."""
    for number, model in enumerate(dict.fromkeys(one.model for one in measurements)):
        own = sorted((one for one in measurements if one.model == model), key=lambda one: one.batch_size)
        sizes = [one.batch_size for one in own]
        colour = f"C{number}"
        axes.plot(sizes, [one.tokens_per_second for one in own], "o-", color=colour, label=own[0].family)
        axes.plot(
            sizes, [one.base_tokens_per_second for one in own], "o:", color=colour, label=f"base of {own[0].family}"
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({one.batch_size for one in measurements}))
    axes.get_xaxis().set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch size")
    axes.set_ylabel("tokens per second")
    axes.legend(frameon=False)


def temperature(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """Tokens per step and speedup by temperature, a line for every model and kind of acceptance."""
    right = axes.twinx()
    lines: dict[tuple[str, ...], list[Measurement]] = {}
    for one in measurements:
        threshold = one.acceptance.get("posterior_threshold", "")
        kind = "shared noise" if one.lossless else f"{one.acceptance['acceptance']} {threshold}".strip()
        batch = f"batch {one.batch_size}" if len({other.batch_size for other in measurements}) > 1 else ""
        lines.setdefault((one.family, kind, batch), []).append(one)
    for number, (names, found) in enumerate(lines.items()):
        found = sorted(found, key=lambda one: one.temperature)
        at = [one.temperature for one in found]
        axes.plot(at, [_tau(one) for one in found], "o-", color=f"C{number}", label=" ".join(filter(None, names)))
        right.plot(at, [one.speedup for one in found], "s--", color=f"C{number}")
    axes.plot([], [], "s--", color="grey", label="speedup")
    axes.set_xlabel("temperature (0: greedy)")
    axes.set_ylabel("tokens per step")
    right.set_ylabel("speedup over the base")
    axes.legend(frameon=False)


def epsilon(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """Tokens per step and quality by the threshold of typical acceptance; exact sampling as a horizontal line.

    Hydra, arXiv 2402.05109, figure 4; Medusa, arXiv 2401.10774, figure 5.
    """
    right = axes.twinx()
    for number, model in enumerate(dict.fromkeys(one.model for one in measurements)):
        own = [one for one in measurements if one.model == model]
        typical = sorted(
            (one for one in own if not one.lossless), key=lambda one: one.acceptance["posterior_threshold"]
        )
        at = [one.acceptance["posterior_threshold"] for one in typical]
        for side, style, value in ((axes, "o-", _tau), (right, "s--", _quality)):
            side.plot(at, [value(one) for one in typical], style, color=f"C{number}")
            for one in own:
                if one.lossless:
                    side.axhline(value(one), color=f"C{number}", linewidth=0.8, linestyle=style[1:])
        axes.plot([], [], color=f"C{number}", label=own[0].family)
    axes.plot([], [], "o-", color="grey", label="tokens per step")
    axes.plot([], [], "s--", color="grey", label="ROUGE-L")
    axes.set_xlabel("epsilon (level lines: exact sampling)")
    axes.set_ylabel("tokens per step")
    right.set_ylabel("ROUGE-L against the references")
    axes.legend(frameon=False)


def _tau(one: Measurement) -> float:
    return math.nan if one.tokens_per_step is None else one.tokens_per_step


def _quality(one: Measurement) -> float:
    return one.quality["heads"] if one.quality else math.nan
