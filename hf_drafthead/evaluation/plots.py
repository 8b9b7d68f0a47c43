"""Plots of measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_drafthead.cards.pictures import plot_accuracies
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.report import labels

if TYPE_CHECKING:  # matplotlib is imported where it draws
    from matplotlib.axes import Axes

Measurements = Sequence[Measurement]


def draw(measurements: Measurements, folder: Path) -> list[Path]:
    """Draw the plots that the measurements of a call allow: the files, one PNG each, in a folder that may be new."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    heats = {row.temperature for row in measurements}
    of_sizes = [row for row in measurements if len({other.batch_size for other in of_model(row, measurements)}) > 1]
    typical = [row for row in measurements if "posterior_threshold" in row.acceptance and len(heats) == 1]
    pictures: dict[Callable[[Axes, Measurements], None], Measurements] = {
        speedup_by_category: measurements,
        accepted_lengths: [row for row in measurements if row.accepted_lengths],
        head_accuracy: [row for row in measurements if row.head_accuracy],
        throughput_by_batch: of_sizes,
        temperature: measurements if len(heats) > 1 else [],
        epsilon: [row for row in measurements if of_model(row, typical)],
    }
    written = []
    for picture, shown in pictures.items():
        if shown:
            figure = Figure(figsize=(7, 4), layout="constrained")
            axes = figure.add_subplot()
            picture(axes, shown)
            axes.legend(frameon=False)
            written.append(folder / f"{picture.__name__}.png")
            figure.savefig(written[-1], dpi=150)
    return written


def of_model(row: Measurement, measurements: Measurements) -> list[Measurement]:
    """The measurements of the same model."""
    return [other for other in measurements if other.model == row.model]


def draw_calibration(entries: Sequence[dict[str, Any]], folder: Path) -> Path:
    """Draw tokens per step and speedup by the nodes of the tree (Hydra, arXiv 2402.05109, figures 7 to 9).

    A point for every tree that was timed, a star for the one that was kept; a level line for the base. The picture is
    calibration.png in a folder that may be new.
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
        for axes, timed, metric in ((steps, taus, "tokens_per_step"), (speedups, faster, "speedup")):
            axes.plot(nodes, timed, ".", color=colour, label=f"batch size {entry['batch_size']}")
            axes.plot([len(entry["tree"]) + 1], [figures[metric]], "*", color=colour, markersize=12)
    speedups.axhline(1.0, color="gray", linewidth=0.8, linestyle="--")
    steps.set(xlabel="nodes, the root included", ylabel="tokens per step")
    speedups.set(xlabel="nodes, the root included", ylabel="speedup over the base")
    steps.legend(frameon=False)
    figure.savefig(folder / "calibration.png", dpi=150)
    return folder / "calibration.png"


def speedup_by_category(axes: Axes, measurements: Measurements) -> None:
    """Bars in groups, one group per category; the base is the line at 1."""
    categories = list(dict.fromkeys(category for row in measurements for category in row.per_category))
    for label, offset, width, row in _side_by_side(measurements):
        places = [categories.index(name) + offset for name in row.per_category]
        axes.bar(places, [figures["speedup"] for figures in row.per_category.values()], width, label=label)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xticks(range(len(categories)), categories, rotation=30, ha="right")
    axes.set_ylabel("speedup over the base")


def accepted_lengths(axes: Axes, measurements: Measurements) -> None:
    """The share of steps that emitted 1, 2, 3 ... tokens."""
    for label, offset, width, row in _side_by_side(measurements):
        steps = sum(row.accepted_lengths.values())
        places = [length + offset for length in row.accepted_lengths]
        axes.bar(places, [count / steps for count in row.accepted_lengths.values()], width, label=label)
    axes.set(xlabel="tokens emitted by a step", ylabel="share of steps")


def head_accuracy(axes: Axes, measurements: Measurements) -> None:
    """How often each head has the next token first, and among its best five."""
    for number, (label, row) in enumerate(zip(labels(measurements), measurements)):
        shares = row.head_accuracy or []
        of_best = {k: [by_k[k - 1] for by_k in shares] for k in (1, len(shares[0]))}
        plot_accuracies(axes, of_best, f"{label}, ", f"C{number}")


def throughput_by_batch(axes: Axes, measurements: Measurements) -> None:
    """Tokens per second of the heads and of the base by batch size (Hydra, arXiv 2402.05109, figure 3)."""
    for number, model in enumerate(dict.fromkeys(row.model for row in measurements)):
        rows = sorted((row for row in measurements if row.model == model), key=lambda row: row.batch_size)
        sizes, family = [row.batch_size for row in rows], rows[0].family
        axes.plot(sizes, [row.tokens_per_second for row in rows], "o-", color=f"C{number}", label=family)
        base = [row.base_tokens_per_second for row in rows]
        axes.plot(sizes, base, "o:", color=f"C{number}", label=f"base of {family}")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.batch_size for row in measurements}))
    axes.get_xaxis().set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylim(bottom=0)
    axes.set(xlabel="batch size", ylabel="tokens per second")


def temperature(axes: Axes, measurements: Measurements) -> None:
    """Tokens per step and speedup by temperature, a line for every model and kind of acceptance."""
    right = axes.twinx()
    several_sizes = len({row.batch_size for row in measurements}) > 1
    lines: dict[str, list[Measurement]] = {}
    for row in measurements:
        threshold = row.acceptance.get("posterior_threshold", "")
        kind = "shared noise" if row.lossless else f"{row.acceptance['acceptance']} {threshold}"
        batch = f"batch {row.batch_size}" if several_sizes else ""
        lines.setdefault(f"{row.family} {kind} {batch}".strip(), []).append(row)
    for number, (name, rows) in enumerate(lines.items()):
        rows = sorted(rows, key=lambda row: row.temperature)
        heats = [row.temperature for row in rows]
        axes.plot(heats, [_tau(row) for row in rows], "o-", color=f"C{number}", label=name)
        right.plot(heats, [row.speedup for row in rows], "s--", color=f"C{number}")
    axes.plot([], [], "s--", color="grey", label="speedup")
    axes.set(xlabel="temperature (0: greedy)", ylabel="tokens per step")
    right.set_ylabel("speedup over the base")


def epsilon(axes: Axes, measurements: Measurements) -> None:
    """Tokens per step and quality by the threshold of typical acceptance; exact sampling as a horizontal line.

    Hydra, arXiv 2402.05109, figure 4; Medusa, arXiv 2401.10774, figure 5.
    """
    right = axes.twinx()
    for number, model in enumerate(dict.fromkeys(row.model for row in measurements)):
        rows = [row for row in measurements if row.model == model]
        typical = [row for row in rows if not row.lossless]
        typical = sorted(typical, key=lambda row: row.acceptance["posterior_threshold"])
        thresholds = [row.acceptance["posterior_threshold"] for row in typical]
        for side, style, value in ((axes, "o-", _tau), (right, "s--", _quality)):
            side.plot(thresholds, [value(row) for row in typical], style, color=f"C{number}")
            for row in rows:
                if row.lossless:
                    side.axhline(value(row), color=f"C{number}", linewidth=0.8, linestyle=style[1:])
        axes.plot([], [], color=f"C{number}", label=rows[0].family)
    axes.plot([], [], "o-", color="grey", label="tokens per step")
    axes.plot([], [], "s--", color="grey", label="ROUGE-L")
    axes.set(xlabel="epsilon (level lines: exact sampling)", ylabel="tokens per step")
    right.set_ylabel("ROUGE-L against the references")


def _side_by_side(measurements: Measurements) -> Iterator[tuple[str, float, float, Measurement]]:
    """Each measurement with its label, and how far from the middle of a group of bars its bar is, and how wide."""
    width = 0.8 / len(measurements)
    for number, (label, row) in enumerate(zip(labels(measurements), measurements)):
        yield label, (number - (len(measurements) - 1) / 2) * width, width, row


def _tau(row: Measurement) -> float:
    return math.nan if row.tokens_per_step is None else row.tokens_per_step


def _quality(row: Measurement) -> float:
    return row.quality["heads"] if row.quality else math.nan
