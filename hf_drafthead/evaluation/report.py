"""Measurements as a table, as JSON and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_drafthead.cards.exactness import FULL_PRECISION, in_words
from hf_drafthead.evaluation.measurement import Measurement
from hf_drafthead.evaluation.quality import METRIC
from hf_drafthead.evaluation.stages import STAGES

CSV_COLUMNS = (
    "model",
    "family",
    "acceptance",
    "posterior_threshold",
    "temperature",
    "batch_size",
    "category",
    "prompts",
    "tokens_per_step",
    "base_tokens_per_second",
    "tokens_per_second",
    "speedup",
    "identical",
    "undrafted",
    "quality_base",
    "quality_heads",
    "complete",
)


def to_json(measurements: Sequence[Measurement], **said: Any) -> dict[str, Any]:
    """One measurement as an object, several as the `rows` of one; `said` is added to each."""
    rows = [{**one.to_json(), **said} for one in measurements]
    return rows[0] if len(rows) == 1 else {"rows": rows}


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """One line for all prompts of a measurement, and one for each category."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for one in measurements:
            whole = one.to_json()
            for category, figures in [("all", whole), *one.per_category.items()]:
                judged = figures["quality"] or {}
                heat = {"temperature": one.temperature}
                scores = {"quality_base": judged.get("base"), "quality_heads": judged.get("heads")}
                writer.writerow({**whole, **figures, **one.acceptance, **heat, **scores, "category": category})


def labels(measurements: Sequence[Measurement], sizes_shown: bool = True) -> list[str]:
    """Labels for the measurements of one call: the family, and whatever else differs.

    Args:
        measurements: of one call.
        sizes_shown: whether batch size and nodes are part of it, where there are several.
    """
    families = {one.model: one.family for one in measurements}
    clear = len(set(families.values())) == len(families)
    sizes, heats = {one.batch_size for one in measurements}, {one.temperature for one in measurements}
    alike = [(one.model, one.batch_size, one.temperature, str(one.acceptance)) for one in measurements]
    swept = len(set(alike)) < len(alike)  # with several trees
    found = []
    for one in measurements:
        parts = [one.family if clear else one.model.rstrip("/").rsplit("/")[-1]]
        parts += [f"{one.tree_nodes} nodes"] if swept and sizes_shown else []
        parts += [f"batch {one.batch_size}"] if len(sizes) > 1 and sizes_shown else []
        parts += [f"T={one.temperature:g}"] if len(heats) > 1 else []
        if not one.lossless:
            parts.append(f"{one.acceptance['acceptance']} {one.acceptance.get('posterior_threshold', '')}".strip())
        found.append(" ".join(parts))
    return found


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """What the command line prints; for a curve over temperatures only the summary."""
    curve = len({one.temperature for one in measurements}) > 1
    if curve:
        return [summary_table(measurements)]
    categories = {category for one in measurements for category in one.per_category}
    views = (summary_table, *((category_table,) if len(categories) > 1 else ()), details_table)
    return [view(measurements) for view in views]


def summary_table(measurements: Sequence[Measurement]) -> Table:
    """One line per measurement."""
    table = _table(
        "", "nodes", "batch", "prompts", "tokens\n/ step", "base\ntok/s", "heads\ntok/s", "speedup", "spread"
    )
    for name in ("effi-\nciency", "same\ntext"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, one in zip(labels(measurements, sizes_shown=False), measurements):
        low, high = one.speedup_spread
        table.add_row(
            label + ("" if one.complete else " *"),
            str(one.tree_nodes or "-"),
            str(one.batch_size),
            str(one.prompts),
            _figure(one.tokens_per_step),
            f"{one.base_tokens_per_second:.0f}",
            f"{one.tokens_per_second:.0f}",
            _figure(one.speedup),
            f"{low:.2f}-{high:.2f}",
            _figure(one.efficiency),
            same_text(one),
        )
    return table


def same_text(one: Measurement) -> str:
    """Whether the text was the base's own, or rounding changed some; what it does not explain is in capitals."""
    if not one.identical and one.lossless:
        rounding, texts = one.differences["rounding"], one.differences["texts"]
        return "NO" if one.differences["faults"] else f"rounding ({rounding} of {texts})"
    if not one.identical:
        return "no"
    return "-" if one.undrafted and one.tokens_per_step is None else "yes"


def verdicts(measurements: Sequence[Measurement]) -> list[str]:
    """What the figures of each measurement mean, in a sentence or two."""
    lines = []
    for label, one in zip(labels(measurements), measurements):
        sentence = f"{label}: {one.speedup:.2f}x: {_pace_in_words(one)}."
        if one.lossless and not one.identical:
            sentence += f" {in_words(one.differences).capitalize()}."
        if one.lossless and one.dtype not in FULL_PRECISION:
            sentence += " The check of exactness is --dtype float32."
        lines.append(sentence)
    return lines


def _pace_in_words(one: Measurement) -> str:
    if one.tokens_per_step is None:
        return "the base decoded every call by itself, so this says nothing of the heads"
    if one.speedup >= 1.05:
        return "faster than the base"
    pace = "slower than the base" if one.speedup < 0.95 else "as fast as the base"
    return pace + "; calibrate (`hf-drafthead calibrate`)" + ("" if one.captured else ", or --captured")


def category_table(measurements: Sequence[Measurement]) -> Table:
    """Speedup and tokens per step by category, the measurements side by side."""
    table = _table("speedup (tokens per step)", *labels(measurements))
    categories = dict.fromkeys(category for one in measurements for category in one.per_category)
    for category in categories:
        cells = []
        for one in measurements:
            figures = one.per_category.get(category)
            told = "-" if figures is None else f"{figures['speedup']:.2f} ({_figure(figures['tokens_per_step'])})"
            cells.append(told)
        table.add_row(category, *cells)
    return table


def details_table(measurements: Sequence[Measurement]) -> Table:
    """The time of each stage of a step, the accuracy of the heads, and the other methods; side by side."""
    table = _table("", *labels(measurements))

    def line(name: str, cells: list[str]) -> None:
        if set(cells) != {"-"}:
            table.add_row(name, *cells)

    for stage in (*STAGES, "rest", "step"):
        line(f"{stage}, ms per step", [_figure((one.time_split or {}).get(stage)) for one in measurements])
    heads = max(len(one.head_accuracy or []) for one in measurements)
    for head in range(heads):
        shares = [(one.head_accuracy or [])[head : head + 1] for one in measurements]
        told = [f"{100 * share[0][0]:.0f} / {100 * share[0][-1]:.0f} %" if share else "-" for share in shares]
        line(f"head {head + 1}, top 1 / top 5", told)
    for name in dict.fromkeys(name for one in measurements for name in one.compared):
        figures = [one.compared.get(name) for one in measurements]
        line(f"{name}, speedup", ["-" if one is None else f"{one['speedup']:.2f}" for one in figures])
    for who in ("base", "heads"):
        line(f"{METRIC} of the {who}", [_figure((one.quality or {}).get(who)) for one in measurements])
    for who in dict.fromkeys(name for one in measurements for name in one.peak_memory or {}):
        peaks = [(one.peak_memory or {}).get(who) for one in measurements]
        line(f"{who}, peak memory", ["-" if peak is None else f"{peak / 2**20:.0f} MiB" for peak in peaks])
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
