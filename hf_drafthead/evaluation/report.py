"""Measurements as a table, as JSON and as CSV."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hf_drafthead.cards.facts import FULL_PRECISION, counts_in_words
from hf_drafthead.evaluation.measurement import STAGES, Measurement

CSV_COLUMNS = (
    "model family acceptance posterior_threshold temperature batch_size category prompts tokens_per_step "
    "base_tokens_per_second tokens_per_second speedup identical undrafted complete "
    "prompt_lookup_num_tokens"
).split()


def to_json(measurements: Sequence[Measurement], **about: Any) -> dict[str, Any]:
    """One measurement as an object, several as the `rows` of one; `about` is added to each."""
    rows = [{**measurement.to_json(), **about} for measurement in measurements]
    return rows[0] if len(rows) == 1 else {"rows": rows}


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """One line for all prompts of a measurement, and one for each category."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for measurement in measurements:
            whole = measurement.to_json()
            for category, figures in [("all", whole), *measurement.per_category.items()]:
                heat = {"temperature": measurement.temperature}
                writer.writerow({**whole, **figures, **measurement.acceptance, **heat, "category": category})


def labels(measurements: Sequence[Measurement], sizes_shown: bool = True) -> list[str]:
    """Labels for the measurements of one call: the family, and whatever else differs; batch size and nodes if shown."""
    families = {row.model: row.family for row in measurements}
    clear = len(set(families.values())) == len(families)
    sizes, heats = {row.batch_size for row in measurements}, {row.temperature for row in measurements}
    alike = [(row.model, row.batch_size, row.temperature, str(row.acceptance)) for row in measurements]
    swept = len(set(alike)) < len(alike)  # with several trees
    names = []
    for row in measurements:
        parts = [row.family if clear else row.model.rstrip("/").rsplit("/")[-1]]
        parts += [f"{row.tree_nodes} nodes"] if swept and sizes_shown else []
        parts += [f"batch {row.batch_size}"] if len(sizes) > 1 and sizes_shown else []
        parts += [f"T={row.temperature:g}"] if len(heats) > 1 else []
        parts += [f"lookup {copied}"] if (copied := row.acceptance.get("prompt_lookup_num_tokens")) is not None else []
        if not row.lossless:
            parts.append(f"{row.acceptance['acceptance']} {row.acceptance.get('posterior_threshold', '')}".strip())
        names.append(" ".join(parts))
    return names


def tables(measurements: Sequence[Measurement]) -> list[Table]:
    """What the command line prints; for a curve over temperatures only the summary."""
    if len({row.temperature for row in measurements}) > 1:
        return [summary_table(measurements)]
    categories = {category for row in measurements for category in row.per_category}
    views = (summary_table, *((category_table,) if len(categories) > 1 else ()), details_table)
    return [view(measurements) for view in views]


def summary_table(measurements: Sequence[Measurement]) -> Table:
    """One line per measurement."""
    counts = sorted({row.prompts for row in measurements})
    prompts = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    columns = ("nodes", "batch", "tokens\n/ step", "base\ntok/s", "heads\ntok/s", "speedup", "spread", "effi-\nciency")
    table = plain_table("1 prompt" if prompts == "1" else f"{prompts} prompts", *columns, "same\ntext")
    for label, row in zip(labels(measurements, sizes_shown=False), measurements):
        low, high = row.speedup_spread
        table.add_row(
            label + ("" if row.complete else " *"),
            str(row.tree_nodes or "-"),
            str(row.batch_size),
            _figure(row.tokens_per_step),
            f"{row.base_tokens_per_second:.0f}",
            f"{row.tokens_per_second:.0f}",
            _figure(row.speedup),
            f"{low:.2f}-{high:.2f}",
            _figure(row.efficiency),
            same_text(row),
        )
    return table


def same_text(measurement: Measurement) -> str:
    """Whether the text was the base's own, or rounding changed some; what it does not explain is in capitals."""
    if not measurement.identical and measurement.lossless:
        counts = measurement.differences
        return "NO" if counts["faults"] else f"rounding ({counts['rounding']} of {counts['texts']})"
    if not measurement.identical:
        return "no"
    return "-" if measurement.undrafted and measurement.tokens_per_step is None else "yes"


def verdicts(measurements: Sequence[Measurement]) -> list[str]:
    """What the figures of each measurement mean, in a sentence or two."""
    lines = []
    for label, row in zip(labels(measurements), measurements):
        sentence = f"{label}: {row.speedup:.2f}x: {_pace_in_words(row)}."
        if row.drafting_share is not None and row.drafting_share < 1 and row.tokens_per_drafting_step is not None:
            share, tokens = f"{100 * row.drafting_share:.0f} %", f"{row.tokens_per_drafting_step:.2f} tokens"
            sentence += f" {share} of the steps drafted {row.tree_nodes} nodes and emitted {tokens} each, the others 1."
        if row.lossless and not row.identical:
            sentence += f" {counts_in_words(row.differences).capitalize()}."
        if row.lossless and row.dtype not in FULL_PRECISION:
            sentence += " The check of exactness is --dtype float32."
        lines.append(sentence)
    return lines


def _pace_in_words(measurement: Measurement) -> str:
    if measurement.tokens_per_step is None:
        return "the base decoded every call by itself, so this says nothing of the heads"
    if measurement.speedup >= 1.05:
        return "faster than the base"
    pace = "slower than the base" if measurement.speedup < 0.95 else "as fast as the base"
    if measurement.calibrated:  # then the tree is the best there is, or there is none
        return pace + ", with the tree that was calibrated here" + ("" if measurement.captured else "; try --captured")
    return pace + "; calibrate (`hf-drafthead calibrate`)" + ("" if measurement.captured else ", or --captured")


def category_table(measurements: Sequence[Measurement]) -> Table:
    """Speedup and tokens per step by category, the measurements side by side."""
    table = plain_table("speedup (tokens per step)", *labels(measurements))
    categories = dict.fromkeys(category for row in measurements for category in row.per_category)
    for category in categories:
        parts = [row.per_category.get(category) for row in measurements]
        cells = [f"{part['speedup']:.2f} ({_figure(part['tokens_per_step'])})" if part else "-" for part in parts]
        table.add_row(category, *cells)
    return table


def details_table(measurements: Sequence[Measurement]) -> Table:
    """The time of each stage of a step, the accuracy of the heads, and the other methods; side by side."""
    table = plain_table("", *labels(measurements))

    def line(name: str, cells: list[str]) -> None:
        if set(cells) != {"-"}:
            table.add_row(name, *cells)

    for stage in (*STAGES, "rest", "step"):
        line(f"{stage}, ms per step", [_figure((row.time_split or {}).get(stage)) for row in measurements])
    if any(row.drafting_share not in (None, 1.0) for row in measurements):
        drafting = [row.drafting_share for row in measurements]
        line("steps that drafted", ["-" if share is None else f"{100 * share:.0f} %" for share in drafting])
        line("tokens in each of these", [_figure(row.tokens_per_drafting_step) for row in measurements])
    heads = max(len(row.head_accuracy or []) for row in measurements)
    for head in range(heads):
        shares = [(row.head_accuracy or [])[head : head + 1] for row in measurements]
        cells = [f"{100 * share[0][0]:.0f} / {100 * share[0][-1]:.0f} %" if share else "-" for share in shares]
        line(f"head {head + 1}, top 1 / top 5", cells)
    for name in dict.fromkeys(name for row in measurements for name in row.compared):
        figures = [row.compared.get(name) for row in measurements]
        line(f"{name}, speedup", ["-" if other is None else f"{other['speedup']:.2f}" for other in figures])
    for who in dict.fromkeys(name for row in measurements for name in row.peak_memory or {}):
        peaks = [(row.peak_memory or {}).get(who) for row in measurements]
        line(f"{who}, peak memory", ["-" if peak is None else f"{peak / 2**20:.0f} MiB" for peak in peaks])
    return table


def plain_table(first: str, *columns: str) -> Table:
    """A table without lines whose first column is of words, and all others are of numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
