"""`hf-drafthead demo`: the bundled heads against their base."""

from collections.abc import Iterable
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_drafthead.cli.common import Json, app, bar, check_writable, coloured, complain, legend, output, write_json

PREPARED = ("compiled", "captured")  # ways whose first call compiles
FEW_PROMPTS, FEW_TOKENS = 4, 48
DEMO_SECONDS = 80.0  # from its first line on, so that it ends within 90 with the imports before
FULL_TOKENS = 96
COLUMNS = {"family": -15, "how": -13, "nodes": 5, "tok/step": 9, "tok/s": 6, "speedup": 8}  # below 0: to the left
COLUMNS |= {"over compiled": 14, "same text": 10}


@app.command()
def demo(
    full: Annotated[
        bool, typer.Option("--full", help="All prompts, and batches with the published tree: some ten minutes.")
    ] = False,
    compiled: Annotated[
        bool | None,
        typer.Option(
            help="Also the base and the family with most tokens per step compiled, however long that takes, or "
            f"neither; by default as far as a demo of {DEMO_SECONDS:.0f} seconds allows.",
            show_default=False,
        ),
    ] = None,
    family: Annotated[list[str] | None, typer.Option(help="Only this family (may be repeated).")] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help=f"Only the first so many prompts; {FEW_PROMPTS} without --full.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens per prompt: {FEW_TOKENS}, with --full {FULL_TOKENS}.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="With --full: timed runs of each prompt; the median counts.")] = 1,
    json_path: Json = None,
) -> None:
    """The bundled base against each bundled family: speed, tokens per step, and whether the text is the same."""
    import torch

    from hf_drafthead import zoo
    from hf_drafthead.evaluation.prompts import read_prompts

    check_writable(json_path)
    if repeats > 1 and not full:
        raise ValueError("--repeats is for --full: a short demo runs every prompt once.")
    if compiled is not None and full:
        raise ValueError("--compiled and --no-compiled are for the short demo: leave --full out.")
    paths = {name: zoo.path(name) for name in family or zoo.families()}
    if not paths:
        raise OSError("the zoo holds no heads: build them with `python -m hf_drafthead.zoo.build`.")
    asked = read_prompts(zoo.ASSETS / "prompts.jsonl")[: prompts or (None if full else FEW_PROMPTS)]
    tokens = max_new_tokens or (FULL_TOKENS if full else FEW_TOKENS)
    console = output()
    threads = torch.get_num_threads()
    console.print(f"{len(asked)} held-out prompts, {tokens} tokens each, greedy, float32, {threads} threads")
    if full:
        rows, different, (name, found) = show_full(console, paths, asked, tokens, repeats)
    else:
        compile_within = {None: DEMO_SECONDS, True: None, False: 0.0}[compiled]
        rows, different, (name, found) = show_few(console, paths, asked, tokens, compile_within)
    console.print(Text(f"\n{name} continues {found.prompt.splitlines()[-1].strip()!r}", style="bold"))
    console.print(Text.assemble(*(coloured(piece, depth) for piece, depth in found.pieces)), soft_wrap=True)
    console.print(legend(found.pieces))
    write_json(json_path, {"rows": rows})
    if different:
        complain(f"the output of {', '.join(different)} differs from the base's own: see the column 'same text'.")
        raise typer.Exit(1)


# What either demo shows: the rows for --json, who wrote another text than the base, and a sample of the best family.
Shown = tuple[list[dict[str, Any]], list[str], tuple[str, Any]]


def show_few(
    console: Console, paths: dict[str, str], asked: list[Any], tokens: int, compile_within: float | None
) -> Shown:
    """A table that grows line by line: the base, every family, what is compiled (`Look.lines`)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hf_drafthead import zoo
    from hf_drafthead.evaluation.look import Look
    from hf_drafthead.evaluation.sample import sample

    base = AutoModelForCausalLM.from_pretrained(zoo.path("base"), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    console.print(aligned(COLUMNS), soft_wrap=True)
    rows, different = [], []
    look = Look(base, tokenizer, asked, tokens)
    for line in look.lines(paths, compile_within):
        console.print(line_of(line), soft_wrap=True)
        rows.append(line.to_json())
        if line.identical is False and line.name in paths:
            different.append(line.name)
    best = look.best
    assert best is not None  # there is a family
    shown = asked[min(3, len(asked) - 1)]  # the bundled base answers this one with code and prose
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
    found = sample(best.model, tokenizer, shown.text, tree=best.tree, **settings)
    return rows, different, (best.name, found)


def aligned(cells: Iterable[str]) -> str:
    """Cells in their columns."""
    widths = COLUMNS.values()
    return "".join(f"{cell:<{-width}}" if width < 0 else f"{cell:>{width}}" for cell, width in zip(cells, widths))


def line_of(line: Any) -> str:
    """One line of the table; of what is compiled also how long compiling took, or why there are no figures."""
    if line.notice is not None:
        return aligned([line.name, line.way]) + f" {line.notice}"
    figures = (line.tokens_per_step, line.speedup, line.speedup_over_compiled)
    steps, speedup, over_compiled = ("-" if value is None else f"{value:.2f}" for value in figures)
    same = "yes" if line.identical else "NO"
    nodes = "-" if line.tree_nodes is None else str(line.tree_nodes)
    cells = [line.name, line.way, nodes, steps, f"{line.tokens_per_second:.0f}", speedup, over_compiled, same]
    return aligned(cells) + (f"\n{'':<15}compiling took {line.prepared:.0f} s" if line.way in PREPARED else "")


def show_full(console: Console, paths: dict[str, str], asked: list[Any], tokens: int, repeats: int) -> Shown:
    """Every family with its fastest tree against the base in turn, and in batches with the published tree."""
    import torch

    from hf_drafthead.evaluation.compare_with_base import compare_with_base, rounds
    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.sample import sample

    shown = asked[min(3, len(asked) - 1)]
    comparisons, samples = {}, {}
    with bar(len(paths) * rounds(asked)) as begin:
        for name, path in paths.items():
            model, tokenizer = load(path, dtype=torch.float32)
            comparisons[name] = one = compare_with_base(
                model, tokenizer, asked, max_new_tokens=tokens, repeats=repeats, progress=begin(name)
            )
            samples[name] = sample(model, tokenizer, shown.text, tree=one.tree, do_sample=False, max_new_tokens=tokens)
    console.print(table_of(comparisons))
    best = max(samples, key=lambda name: samples[name].tokens_per_step or 0)
    different = [name for name, one in comparisons.items() if not one.identical]
    return [one.to_json() for one in comparisons.values()], different, (best, samples[best])


def table_of(comparisons: dict[str, Any]) -> Table:
    """Every family with its fastest tree, and in batches with the published tree."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("family", no_wrap=True)
    table.add_column("tree", no_wrap=True)
    for column in (
        "nodes",
        "batch",
        "tokens\n/ step",
        "base\ntok/s",
        "heads\ntok/s",
        "speedup",
        "effi-\nciency",
        "same\ntext",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in comparisons.items():
        for label, run in (("fastest", one.fastest), ("published", one.published)):
            table.add_row(
                name,
                label,
                str(run.tree_nodes),
                str(run.batch_size),
                "-" if run.tokens_per_step is None else f"{run.tokens_per_step:.2f}",
                f"{run.base_tokens_per_second:.0f}",
                f"{run.tokens_per_second:.0f}",
                f"{run.speedup:.2f}",
                "-" if run.efficiency is None else f"{run.efficiency:.2f}",
                "yes" if run.identical else "NO",
            )
        table.add_section()
    return table
