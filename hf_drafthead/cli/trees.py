"""`hf-drafthead calibrate` and `trees`: which draft tree is fastest here, and which there are."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli.common import (
    BaseModel,
    Device,
    Dtype,
    Json,
    Model,
    RemoteCode,
    Template,
    app,
    bar,
    check_writable,
    complain,
    load_model,
    output,
    parse_numbers,
    parse_tree,
    printable,
    write_json,
)


@app.command()
def calibrate(
    model: Model,
    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts, chats or texts, as for bench; else the base writes its own."),
    ] = None,
    batch_size: Annotated[str, typer.Option(metavar="N[,N...]", help="Rows of a call; a tree for each.")] = "1",
    max_nodes: Annotated[int, typer.Option(min=2, max=4096, help="Of a tree, the root included.")] = 100,
    captured: Annotated[
        bool, typer.Option("--captured/--eager", help='Compiled steps, as cache_implementation="static" has them.')
    ] = False,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the base's answers; 0 is greedy.")] = 0.0,
    method: Annotated[str, typer.Option(help="paths: counted rank paths; product: Medusa's accuracies.")] = "paths",
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer, at most.")] = 128,
    limit: Annotated[int, typer.Option(min=1, help="Only the first so many prompts.")] = 32,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only batch sizes that have no entry yet.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trees, and store nothing.")] = False,
    chat_template: Template = None,
    device: Device = None,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    trust_remote_code: RemoteCode = False,
    json_path: Json = None,
) -> None:
    """Find the draft tree that is fastest on this machine, and store it in MODEL's generation config."""
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.evaluation.speed import batched, encode_all
    from hf_drafthead.generation.calibrate import calibrate as measure
    from hf_drafthead.generation.calibrate import stages
    from hf_drafthead.generation.tree import DraftTree

    check_writable(json_path)
    if not dry_run and not Path(model).is_dir():
        raise OSError(f"{model!r} is no folder where trees can be stored: save the heads first, or add --dry-run.")
    sizes = parse_numbers("--batch-size", batch_size, int)
    asked = None if prompts is None else read_questions(prompts)[:limit]
    loaded, tokenizer = load_model(model, chat_template, dtype, device, base_model, trust_remote_code)
    given = None
    if asked is not None:
        encoded = encode_all(loaded, tokenizer, batched(asked, 1), max_new_tokens)
        given = [one["input_ids"][0] for one in encoded]

    def keep(entry: dict[str, Any]) -> None:
        if not dry_run:
            loaded.generation_config.save_pretrained(model)

    with bar(stages(sizes)) as begin:
        found = measure(
            loaded,
            given,
            batch_sizes=sizes,
            captured=captured,
            max_nodes=max_nodes,
            new_tokens=max_new_tokens,
            temperature=temperature,
            method=method,
            resume=resume,
            progress=lambda stage: begin(stage)(),
            keep=keep,
        )
    console = output()
    for entry in found:
        console.print(told(entry), soft_wrap=True)
        console.print(Text(DraftTree(entry["tree"]).draw()))
    write_json(json_path, {"entries": found})
    if not all(entry["measured"]["identical"] for entry in found):
        complain(f"some text was not the base's own: `hf-drafthead verify {model}` distinguishes rounding from faults.")


def told(entry: dict[str, Any]) -> str:
    """One line about a calibration entry."""
    figures = entry["measured"]
    return printable(
        f"batch size {entry['batch_size']}, {'captured' if entry['captured'] else 'uncaptured'} steps, "
        f"{entry['device']}, {entry['dtype']}: {len(entry['tree']) + 1} nodes, "
        f"{figures['tokens_per_step']:.2f} tokens per step ({figures['predicted_tokens_per_step']:.2f} predicted), "
        f"{figures['tokens_per_second']:.0f} tokens/s ({figures['predicted_tokens_per_second']:.0f} predicted), "
        f"{figures['speedup']:.2f}x the base"
    )


@app.command()
def trees(
    name: Annotated[str | None, typer.Argument(help="Draw this published tree, or a JSON file of rank paths.")] = None,
) -> None:
    """List the published draft trees, or draw one."""
    from hf_drafthead.generation.tree import DraftTree, published_trees

    console = output()
    if name is not None:
        chosen = parse_tree(name)
        if not isinstance(chosen, DraftTree):
            raise ValueError(f"{name!r} has another shape in every step: give a published tree's name, or rank paths.")
        console.print(Text(chosen.draw()))
        return
    width = max(map(len, published_trees()))
    for published in published_trees():
        tree = DraftTree.from_name(published)
        console.print(f"{published:<{width}}  {tree.num_nodes:3} nodes, depth {tree.max_depth}")
