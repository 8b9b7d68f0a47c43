"""Measurements as a table, in sentences and as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hf_drafthead.cards.facts import FULL_PRECISION, counts_in_words
from hf_drafthead.evaluation.measurement import Measurement


def to_json(measurements: Sequence[Measurement], **about: Any) -> dict[str, Any]:
    """One measurement as an object, several as the `rows` of one; `about` is added to each."""
    rows = [{**measurement.to_json(), **about} for measurement in measurements]
    return rows[0] if len(rows) == 1 else {"rows": rows}


def labels(measurements: Sequence[Measurement]) -> list[str]:
    """Labels for the measurements of one call: the family, and whatever else differs."""
    families = {row.model: row.family for row in measurements}
    clear = len(set(families.values())) == len(families)
    sizes, heats = {row.batch_size for row in measurements}, {row.temperature for row in measurements}
    alike = [(row.model, row.batch_size, row.temperature, str(row.acceptance)) for row in measurements]
    swept = len(set(alike)) < len(alike)  # with several trees
    names = []
    for row in measurements:
        parts = [row.family if clear else row.model.rstrip("/").rsplit("/")[-1]]
        parts += [f"{row.tree_nodes} nodes"] if swept else []
        parts += [f"batch {row.batch_size}"] if len(sizes) > 1 else []
        parts += [f"T={row.temperature:g}"] if len(heats) > 1 else []
        parts += [f"lookup {copied}"] if (copied := row.acceptance.get("prompt_lookup_num_tokens")) is not None else []
        parts += [] if row.lossless else [row.acceptance["acceptance"]]
        names.append(" ".join(parts))
    return names


def table(measurements: Sequence[Measurement]) -> Table:
    """What the command line prints: each measurement, below it its categories, and what else it was compared with."""
    columns = ("prompts", "nodes", "batch", "tokens\n/ step", "base\ntok/s", "heads\ntok/s", "speedup", "spread")
    shown = plain_table("", *columns, "effi-\nciency", "same\ntext")
    for label, row in zip(labels(measurements), measurements):
        low, high = row.speedup_spread
        size, whole = (str(row.tree_nodes or "-"), str(row.batch_size)), _speeds(vars(row))
        end = (f"{low:.2f}-{high:.2f}", _figure(row.efficiency), same_text(row))
        shown.add_row(label + ("" if row.complete else " *"), str(row.prompts), *size, *whole, *end)
        for category, part in row.per_category.items() if len(row.per_category) > 1 else ():
            shown.add_row(f"  {category}", str(part["prompts"]), "", "", *_speeds(part))
        for name, other in row.compared.items():
            speeds = ("-", "-") if other is None else (f"{other['tokens_per_second']:.0f}", _figure(other["speedup"]))
            shown.add_row(f"  {name}", "", "", "", "", "", *speeds)
    return shown


def _speeds(part: Mapping[str, Any]) -> tuple[str, str, str, str]:
    speeds = (f"{part[name]:.0f}" for name in ("base_tokens_per_second", "tokens_per_second"))
    return _figure(part["tokens_per_step"]), *speeds, _figure(part["speedup"])  # type: ignore[return-value]


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


def plain_table(first: str, *columns: str) -> Table:
    """A table without lines whose first column is of words, and all others are of numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
