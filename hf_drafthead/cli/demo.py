"""`hf-drafthead demo`: the bundled heads against their base."""

from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from hf_drafthead.cli.common import Json, app, bar, check_writable, coloured, complain, legend, output, write_json


@app.command()
def demo(
    family: Annotated[list[str] | None, typer.Option(help="Only this family (may be repeated).")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt; the median counts.")] = 1,
    json_path: Json = None,
) -> None:
    """The bundled base against each bundled family: speed, tokens per step, and whether the text is the same."""
    import torch

    from hf_drafthead import zoo
    from hf_drafthead.evaluation.compare_with_base import compare_with_base, rounds
    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.prompts import read_prompts
    from hf_drafthead.evaluation.sample import sample

    check_writable(json_path)
    paths = {name: zoo.path(name) for name in family or zoo.families()}
    if not paths:
        raise OSError("the zoo holds no heads: build them with `python -m hf_drafthead.zoo.build`.")
    asked = read_prompts(zoo.ASSETS / "prompts.jsonl")[:prompts]
    shown = asked[min(3, len(asked) - 1)]  # the bundled base answers this one with code and prose
    console = output()
    threads = torch.get_num_threads()
    console.print(f"{len(asked)} held-out prompts, {max_new_tokens} tokens each, greedy, float32, {threads} threads")
    contests, samples = {}, {}
    with bar(len(paths) * rounds(asked)) as begin:
        for name, path in paths.items():
            model, tokenizer = load(path, dtype=torch.float32)
            contests[name] = one = compare_with_base(
                model, tokenizer, asked, max_new_tokens=max_new_tokens, repeats=repeats, progress=begin(name)
            )
            samples[name] = sample(
                model, tokenizer, shown.text, tree=one.tree, do_sample=False, max_new_tokens=max_new_tokens
            )
    console.print(table_of(contests))
    best = max(samples, key=lambda name: samples[name].tokens_per_step or 0)
    written = samples[best]
    console.print(Text(f"\n{best} continues {written.prompt.splitlines()[-1].strip()!r}", style="bold"))
    console.print(Text.assemble(*(coloured(piece, depth) for piece, depth in written.pieces)), soft_wrap=True)
    console.print(legend(written.pieces))
    write_json(json_path, {"rows": [one.to_json() for one in contests.values()]})
    if not all(one.identical for one in contests.values()):
        different = ", ".join(name for name, one in contests.items() if not one.identical)
        complain(f"the output of {different} differs from the base's own: see the column 'same text'.")
        raise typer.Exit(1)


def table_of(contests: dict[str, Any]) -> Table:
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
    for name, one in contests.items():
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
