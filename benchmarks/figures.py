"""Writes measured figures into Markdown pages, so that none is typed by hand.

A page says where a table goes, which one it is, and which families are in it (all of them if it names none); what
stands between the two comments is replaced:

    <!-- figures: families medusa hydra -->
    <!-- end of figures -->
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zoo_recipe.heads import FAMILIES

from hf_drafthead import zoo

RESULTS = Path(__file__).parent / "results"
STEPS = RESULTS / "step.json"  # what `step.py --json` has written
TRAININGS = RESULTS / "training.jsonl"  # a line for each seed of a way to train
CHAT = RESULTS / "chat_families.jsonl"  # what `chat_families.py` has written
BENCH = RESULTS / "chat_bench.jsonl"  # what `hf-drafthead bench --json` has written, a line each
PLACE = re.compile(r"(<!-- figures: ([^>]*?) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
NOTHING = "*Not measured yet.*"

# A table for the families named, or for all of them if none is.
Table = Callable[[Sequence[str]], str]


def fill(folder: Path, tables: Mapping[str, Table]) -> list[Path]:
    """Write the tables into the pages under a folder; the pages that are other than before are returned.

    Raises:
        ValueError: a page asks for a table that there is not.
    """
    changed = []
    for page in sorted(folder.rglob("*.md")):

        def written(place: re.Match, page: Path = page) -> str:
            name, *families = place[2].split()
            if name not in tables:
                raise ValueError(f"{page} asks for the table {name!r}: expected one of {', '.join(tables)}.")
            return f"{place[1]}{tables[name](families) or NOTHING}\n{place[3]}"

        text = page.read_text(encoding="utf-8")
        filled = PLACE.sub(written, text)
        if filled != text:
            page.write_text(filled, encoding="utf-8")
            changed.append(page)
    return changed


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; nothing if it has no rows."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) if rows else ""


def accuracies(families: Sequence[str]) -> str:
    """How often each head of the bundled models was right, from what their training noted down."""
    rows = []
    for family in families or FAMILIES:
        summary = zoo.ASSETS / family / "training_summary.json"
        if summary.is_file():
            noted = json.loads(summary.read_text())
            noted |= noted.get("held_out", {})
            heads = [noted.get(f"head{head}_top1") for head in range(4)]
            rows.append([family, *("" if share is None else f"{share:.3f}" for share in heads)])
    return markdown(["top-1 accuracy", "head 1", "head 2", "head 3", "head 4"], rows)


def steps(families: Sequence[str]) -> str:
    """The parts of a step, in units of the base's one-token step; and the captured step where it was measured."""
    measured = json.loads(STEPS.read_text()) if STEPS.is_file() else []
    taken = [row for row in measured if not families or row["model"].split()[-1] in families]
    parts = ["step", "verify", "draft", "bookkeeping"]
    parts += ["captured_step"] * any("captured_step" in row for row in taken)
    rows = [
        [
            row["model"],
            str(row["nodes"]),
            str(row["batch"]),
            *(f"{row[part]:.2f}" if part in row else "" for part in parts),
        ]
        for row in taken
    ]
    return markdown(["heads", "nodes", "batch", *(part.replace("_", " ") for part in parts)], rows)


def trainings(ways: Sequence[str] = ()) -> str:
    """What each way to train gave, mean and standard error over the seeds; all ways if none is named."""
    lines = [json.loads(line) for line in TRAININGS.read_text().splitlines()] if TRAININGS.is_file() else []
    rows = []
    for way in dict.fromkeys(line["way"] for line in lines if not ways or line["way"] in ways):
        taken = [line for line in lines if line["way"] == way]

        def cell(name: str, digits: int, taken: list[dict] = taken) -> str:
            values = [line[name] for line in taken]
            error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.{digits}f}" if len(values) > 1 else ""
            return f"{statistics.mean(values):.{digits}f}{error}"

        there = [cell("tokens_per_step", 3), cell("perplexity", 3), cell("expected", 3), cell("generated", 3)]
        rows.append([way, *there, f"{sum(line['generated_steps'] for line in taken):,}", str(len(taken))])
    return markdown(["trained on", "tokens per step", "perplexity", "expected", "generated", "steps", "seeds"], rows)


def chat_families(families: Sequence[str] = ()) -> str:
    """Heads of every family for the chat model, those that were trained on the same text together."""
    lines = [line for line in _chat() if ("1" in line or "rows" in line) and line["family"] in (families or FAMILIES)]
    rows = [
        [
            line["family"],
            f"{line['parameters'] / 1e6:.1f}",
            *(f"{line[name] / 1e6:.{1 if line[name] >= 1e6 else 2}f}" for name in ("text", "tokens")),
            *(f"{line[heat]['tokens_per_step']:.2f}" if heat in line else "" for heat in ("0", "1")),
        ]
        for line in sorted(lines, key=lambda line: -line["text"])
    ]
    head = ["heads", "million parameters", "million tokens of text", "of it read", "greedy", "temperature 1"]
    return markdown(head, rows)


def chat_topics(families: Sequence[str] = ()) -> str:
    """Greedy tokens per step of the chat model by category of MT-Bench."""
    lines = [line for line in _chat() if "by_category" in line["0"] and line["family"] in (families or FAMILIES)]
    names = list(lines[0]["0"]["by_category"]) if lines else []
    rows = [[line["family"], *(f"{line['0']['by_category'][name]:.2f}" for name in names)] for line in lines]
    return markdown(["heads", *names], rows)


def chat_curve(families: Sequence[str] = ()) -> str:
    """Greedy tokens per step of the chat model by how much text the heads have read."""
    lines = sorted(_chat(), key=lambda line: line["tokens"])
    several = [family for family in families or FAMILIES if sum(line["family"] == family for line in lines) > 1]
    rows = []
    for tokens in dict.fromkeys(line["tokens"] for line in lines if line["family"] in several):
        here = {line["family"]: line["0"]["tokens_per_step"] for line in lines if line["tokens"] == tokens}
        rows.append([f"{tokens / 1e6:.2f}", *(f"{here[family]:.2f}" if family in here else "" for family in several)])
    return markdown(["million tokens read", *several], rows)


def chat_bench(families: Sequence[str] = ()) -> str:
    """Bundled heads of the chat model on Spec-Bench, compiled, beside what needs no heads."""
    runs = [json.loads(line) for line in BENCH.read_text().splitlines()] if BENCH.is_file() else []
    runs = [run for run in runs if run["captured"] and run["family"] in (families or FAMILIES)]
    if not runs:
        return ""
    categories = list(runs[0]["per_category"])
    rows = []
    for run in runs:
        heat, found = run["settings"].get("temperature", 0), run["differences"]
        about = [run["family"], run["dtype"], f"{heat:g}", f"{run['tokens_per_step']:.2f}", f"{run['speedup']:.2f}"]
        beside = [f"{run['speedup_over_compiled']:.2f}", f"{run['compared']['prompt-lookup']['speedup']:.2f}"]
        speeds = [f"{run['per_category'][name]['speedup']:.2f}" for name in categories]
        rows.append([*about, *beside, *speeds, f"{found['rounding']} of {found['texts']}"])
    head = ["heads", "type", "temperature", "tokens per step", "speedup", "over the base compiled", "prompt lookup"]
    return markdown([*head, *categories, "texts that differ"], rows)


def _chat() -> list[dict]:
    return [json.loads(line) for line in CHAT.read_text().splitlines()] if CHAT.is_file() else []
