"""`hf-drafthead calibrate`, `roofline` and `trees`: which draft tree is fastest, here or elsewhere."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli.common import (
    Json,
    Loading,
    ModelName,
    app,
    bar,
    check_writable,
    complain,
    options_of_groups,
    output,
    parse_numbers,
    parse_tree,
    printable,
    write_json,
)


@dataclass(frozen=True)
class Search:
    """The options of every command that looks for a tree: on which texts, and among which trees."""

    prompts: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Prompts, chats or texts, as for bench; else the base writes its own."),
    ] = None
    batch_size: Annotated[str, typer.Option(metavar="N[,N...]", help="Rows of a call; a tree for each.")] = "1"
    max_nodes: Annotated[int, typer.Option(metavar="N", min=2, max=4096, help="Of a tree, the root included.")] = 100
    temperature: Annotated[float, typer.Option(metavar="X", min=0.0, help="Of the base's answers; 0 is greedy.")] = 0.0
    method: Annotated[str, typer.Option(help="paths: counted rank paths; product: Medusa's accuracies.")] = "paths"
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per answer, at most.")] = 128
    limit: Annotated[int, typer.Option(metavar="N", min=1, help="Only the first so many prompts.")] = 48

    def sizes(self) -> list[int]:
        """The batch sizes."""
        return parse_numbers("--batch-size", self.batch_size, int)

    def load(self, name: str, loading: Loading) -> tuple[Any, list[Any] | None]:
        """A model, and the token ids of the prompts in the file; None without one."""
        from hf_drafthead.evaluation.calls import batched, encode_all
        from hf_drafthead.evaluation.questions import read_questions

        questions = None if self.prompts is None else read_questions(self.prompts)[: self.limit]
        model, tokenizer = loading.load(name)
        if questions is None:
            return model, None
        inputs = encode_all(model, tokenizer, batched(questions, 1), self.max_new_tokens)
        return model, [each["input_ids"][0] for each in inputs]

    def how(self) -> dict[str, Any]:
        """The arguments that `calibrate` and `plan_trees` share."""
        return {
            "max_nodes": self.max_nodes,
            "new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "method": self.method,
        }


@app.command("calibrate")
@options_of_groups
def run_calibrate(
    model: ModelName,
    search: Search,
    loading: Loading,
    captured: Annotated[
        bool, typer.Option("--captured/--eager", help="Compiled steps, as a static cache has them.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only batch sizes that have no entry yet.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trees, and store nothing.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw tokens per step and per second by nodes there.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Find the draft tree that is fastest on this machine, and store it in MODEL's generation config."""
    from hf_drafthead.evaluation import plots
    from hf_drafthead.trees.calibrate import calibrate as measure

    check_writable(json_path)
    if not dry_run and not Path(model).is_dir():
        raise OSError(f"{model!r} is no folder where trees can be stored: save the heads first, or add --dry-run.")
    sizes = search.sizes()
    loaded, texts = search.load(model, loading)

    def keep(entry: dict[str, Any]) -> None:
        if not dry_run:
            loaded.generation_config.save_pretrained(model)

    about = {} if search.prompts is None else about_prompts(search.prompts, Path(model))
    with bar(1 + len(sizes)) as begin:  # the text, and each batch size
        entries = measure(
            loaded,
            texts,
            batch_sizes=sizes,
            captured=captured,
            resume=resume,
            about=about,
            progress=lambda stage: begin(stage)(),
            keep=keep,
            **search.how(),
        )
    console = output()
    for entry in entries:
        console.print(entry_in_words(entry), soft_wrap=True)
    if about.get("prompts_trained_on"):
        complain("the prompts are the data that the heads were trained on: expect fewer tokens per step on other text.")
    if plot is not None:
        plots.draw_calibration(entries, plot)
    write_json(json_path, {"entries": entries})
    if not all(entry["measured"]["identical"] for entry in entries):
        counts = f"`hf-drafthead verify {model}` counts near ties and faults"
        if loaded.base.dtype.itemsize < 4:
            dtype = str(loaded.base.dtype).removeprefix("torch.")
            console.print(f"in {dtype} some texts were not the base's own, as rounding makes it: {counts}.")
        else:
            complain(f"some text was not the base's own: {counts}.")


def about_prompts(prompts: str, heads: Path) -> dict[str, Any]:
    """The hash of a file of prompts, and whether the heads were trained on it, where their folder says on what."""
    from hf_drafthead.data.rows import data_hash
    from hf_drafthead.data.sources import read_rows

    about: dict[str, Any] = {"prompts_sha256": data_hash(read_rows(prompts))}
    summary = heads / "training_summary.json"
    if summary.is_file():
        trained_on = json.loads(summary.read_text(encoding="utf-8")).get("data_sha256")
        about["prompts_trained_on"] = trained_on == about["prompts_sha256"]
    return about


def entry_in_words(entry: dict[str, Any]) -> str:
    """One line about a calibration entry: for what, which tree, and how fast it is."""
    from hf_drafthead.generation.entries import CalibrationKey

    figures, nodes, copies = entry["measured"], len(entry["tree"]) + 1, entry.get("lookup", 0)
    key = CalibrationKey.of_entry(entry)
    if nodes == 1 and not copies:
        fastest = max((each[-1] for each in figures.get("candidates", [])), default=1.0)
        return printable(f"{key}: no tree pays (the fastest is {fastest:.2f}x the base), so the base decodes by itself")
    copied = f" with {copies} copied tokens" if copies else ""
    return printable(
        f"{key}: a tree of {nodes} nodes{copied} is {figures['speedup']:.2f}x as fast as the base "
        f"({figures['tokens_per_second']:.0f} against {figures['base_tokens_per_second']:.0f} tokens/s, "
        f"{figures['tokens_per_step']:.2f} tokens per step)"
    )


@app.command()
@options_of_groups
def roofline(
    model: ModelName,
    gpu: Annotated[str, typer.Option(help="Name of the GPU, such as h100-sxm; a wrong one lists all.")],
    search: Search,
    loading: Loading,
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Positions that a step attends to.")] = 1024,
    json_path: Json = None,
) -> None:
    """Plan the draft tree for a GPU that is not at hand: tokens per step measured here, the step's cost on paper."""
    from hf_drafthead.evaluation.roofline import machine_named, plan_trees

    check_writable(json_path)
    machine_named(gpu)  # before the model is loaded
    sizes = search.sizes()
    loaded, texts = search.load(model, loading)
    plans = plan_trees(loaded, texts, gpu, sizes, context=context, **search.how())
    console = output()
    for plan in plans:
        for line in plan.in_words():
            console.print(printable(f"{gpu}, batch size {plan.batch_size}: {line}"), soft_wrap=True)
        console.print(Text(plan.tree.draw()))
    write_json(json_path, {"gpu": gpu, "context": context, "planned": [plan.to_json() for plan in plans]})


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
