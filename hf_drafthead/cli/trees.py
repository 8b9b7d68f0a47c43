"""`hf-drafthead calibrate`, `roofline` and `trees`: which draft tree is fastest, here or elsewhere."""

import json
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

Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Prompts, chats or texts, as for bench; else the base writes its own."),
]
BatchSize = Annotated[str, typer.Option(metavar="N[,N...]", help="Rows of a call; a tree for each.")]
MaxNodes = Annotated[int, typer.Option(metavar="N", min=2, max=4096, help="Of a tree, the root included.")]
AnswerTemperature = Annotated[float, typer.Option(metavar="X", min=0.0, help="Of the base's answers; 0 is greedy.")]
Method = Annotated[str, typer.Option(help="paths: counted rank paths; product: Medusa's accuracies.")]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per answer, at most.")]
Limit = Annotated[int, typer.Option(metavar="N", min=1, help="Only the first so many prompts.")]


@app.command()
def calibrate(
    model: Model,
    prompts: Prompts = None,
    batch_size: BatchSize = "1",
    max_nodes: MaxNodes = 100,
    captured: Annotated[
        bool, typer.Option("--captured/--eager", help="Compiled steps, as a static cache has them.")
    ] = False,
    temperature: AnswerTemperature = 0.0,
    method: Method = "paths",
    max_new_tokens: MaxNewTokens = 128,
    limit: Limit = 48,
    resume: Annotated[bool, typer.Option("--resume", help="Measure only batch sizes that have no entry yet.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the trees, and store nothing.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Draw tokens per step and per second by nodes there.")
    ] = None,
    chat_template: Template = None,
    device: Device = None,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    trust_remote_code: RemoteCode = False,
    json_path: Json = None,
) -> None:
    """Find the draft tree that is fastest on this machine, and store it in MODEL's generation config."""
    from hf_drafthead.evaluation import plots
    from hf_drafthead.trees.calibrate import calibrate as measure
    from hf_drafthead.trees.calibrate import stages

    check_writable(json_path)
    if not dry_run and not Path(model).is_dir():
        raise OSError(f"{model!r} is no folder where trees can be stored: save the heads first, or add --dry-run.")
    sizes = parse_numbers("--batch-size", batch_size, int)
    loading = (dtype, device, base_model, trust_remote_code)
    loaded, given = load_with_prompts(model, loading, prompts, limit, max_new_tokens, chat_template)

    def keep(entry: dict[str, Any]) -> None:
        if not dry_run:
            loaded.generation_config.save_pretrained(model)

    about = {} if prompts is None else about_prompts(prompts, Path(model))
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
            about=about,
            progress=lambda stage: begin(stage)(),
            keep=keep,
        )
    console = output()
    for entry in found:
        console.print(told(entry), soft_wrap=True)
    if about.get("prompts_trained_on"):
        complain("the prompts are the data that the heads were trained on: expect fewer tokens per step on other text.")
    if plot is not None:
        plots.draw_calibration(found, plot)
    write_json(json_path, {"entries": found})
    if not all(entry["measured"]["identical"] for entry in found):
        complain(f"some text was not the base's own: `hf-drafthead verify {model}` distinguishes rounding from faults.")


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


def load_with_prompts(
    model: str, loading: tuple[Any, ...], prompts: str | None, limit: int, new_tokens: int, chat_template: Path | None
) -> tuple[Any, list[Any] | None]:
    """A model, and the token ids of the prompts in a file; None without one. `loading` is as in `load_model`."""
    from hf_drafthead.evaluation.calls import batched, encode_all
    from hf_drafthead.evaluation.questions import read_questions

    asked = None if prompts is None else read_questions(prompts)[:limit]
    loaded, tokenizer = load_model(model, chat_template, *loading)
    if asked is None:
        return loaded, None
    encoded = encode_all(loaded, tokenizer, batched(asked, 1), new_tokens)
    return loaded, [one["input_ids"][0] for one in encoded]


def told(entry: dict[str, Any]) -> str:
    """One line about a calibration entry: for what, which tree, and how fast it is."""
    from hf_drafthead.generation.entries import CalibrationKey

    figures, nodes = entry["measured"], len(entry["tree"]) + 1
    key = CalibrationKey.of_entry(entry)
    if nodes == 1:
        fastest = max((one[-1] for one in figures.get("candidates", [])), default=1.0)
        return printable(f"{key}: no tree pays (the fastest is {fastest:.2f}x the base), so the base decodes by itself")
    return printable(
        f"{key}: a tree of {nodes} nodes is {figures['speedup']:.2f}x as fast as the base "
        f"({figures['tokens_per_second']:.0f} against {figures['base_tokens_per_second']:.0f} tokens/s, "
        f"{figures['tokens_per_step']:.2f} tokens per step)"
    )


@app.command()
def roofline(
    model: Model,
    gpu: Annotated[str, typer.Option(help="Name of the GPU, such as h100-sxm; a wrong one lists all.")],
    prompts: Prompts = None,
    batch_size: BatchSize = "1",
    context: Annotated[int, typer.Option(metavar="N", min=1, help="Positions that a step attends to.")] = 1024,
    max_nodes: MaxNodes = 100,
    temperature: AnswerTemperature = 0.0,
    method: Method = "paths",
    max_new_tokens: MaxNewTokens = 128,
    limit: Limit = 48,
    chat_template: Template = None,
    device: Device = None,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    trust_remote_code: RemoteCode = False,
    json_path: Json = None,
) -> None:
    """Plan the draft tree for a GPU that is not at hand: tokens per step measured here, the step's cost on paper."""
    from hf_drafthead.evaluation.roofline import machine_named, plan_trees

    check_writable(json_path)
    machine_named(gpu)  # before the model is loaded
    sizes = parse_numbers("--batch-size", batch_size, int)
    loading = (dtype, device, base_model, trust_remote_code)
    loaded, given = load_with_prompts(model, loading, prompts, limit, max_new_tokens, chat_template)
    planned = plan_trees(
        loaded,
        given,
        gpu,
        sizes,
        context=context,
        max_nodes=max_nodes,
        new_tokens=max_new_tokens,
        temperature=temperature,
        method=method,
    )
    console = output()
    for one in planned:
        for line in one.in_words():
            console.print(printable(f"{gpu}, batch size {one.batch_size}: {line}"), soft_wrap=True)
        console.print(Text(one.tree.draw()))
    write_json(json_path, {"gpu": gpu, "context": context, "planned": [one.to_json() for one in planned]})


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
