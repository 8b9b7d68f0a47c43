"""`hf-drafthead bench` and `verify`: how fast, and whether exact."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli.common import (
    Json,
    Loading,
    ModelName,
    ModelNames,
    Settings,
    TreeOptions,
    app,
    bar,
    check_writable,
    command_line,
    complain,
    options_of_groups,
    output,
    parse_numbers,
    parse_tree,
    write_json,
)
from hf_drafthead.cli.settings import parse_settings

PROMPT_LOOKUP = "prompt-lookup"


@app.command("bench")
@options_of_groups
def run_bench(
    models: ModelNames,
    questions: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="MT-Bench or Spec-Bench file, any other file of chats, prompts or texts, data set."
        ),
    ],
    loading: Loading,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Of the data set.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per answer, at most.")] = 256,
    batch_size: Annotated[str, typer.Option(metavar="N[,N...]", help="Questions per call; several for a curve.")] = "1",
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs of each prompt; the median counts.")] = 3,
    temperature: Annotated[
        str | None,
        typer.Option(
            metavar="X[,X...]",
            help="0, the default, is greedy; 0.7 with --epsilon; several for a curve with every kind of acceptance.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")] = 0,
    epsilon: Annotated[
        str | None,
        typer.Option(metavar="X[,X...]", help="Also typical acceptance with these thresholds, alpha being their root."),
    ] = None,
    lookup: Annotated[
        str | None,
        typer.Option(metavar="N[,N...]", help="Tokens that the tree copies from the text in a step, 0 for none; each."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]", help="Also prompt-lookup (usual with one row), assistant=PATH, compiled; or none."
        ),
    ] = None,
    captured: Annotated[
        bool, typer.Option("--captured", help="Compile the heads' steps, as a static cache does.")
    ] = False,
    tree: TreeOptions = None,
    settings: Settings = None,
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw pictures there.")] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", metavar="PATH", help="Write the figures by category.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Speed, acceptance and exactness of models with draft heads against their bases, on questions."""
    from hf_drafthead.evaluation import plots, report
    from hf_drafthead.evaluation.bench import BenchPlan, carry_out
    from hf_drafthead.evaluation.loading import process_state
    from hf_drafthead.evaluation.questions import read_questions

    check_writable(json_path)
    check_writable(csv_path, "--csv")
    thresholds = parse_numbers("--epsilon", epsilon, float)
    sizes = parse_numbers("--batch-size", batch_size, int)
    usual = [0.7] if thresholds else [0.0]
    plan = BenchPlan(
        models=models,
        questions=read_questions(questions, split)[:limit],
        settings={"max_new_tokens": max_new_tokens, **parse_settings(settings)},
        temperatures=parse_numbers("--temperature", temperature, float, zero=True) or usual,
        trees=[parse_tree(text) for text in tree] if tree else [None],
        thresholds=thresholds,
        lookups=parse_numbers("--lookup", lookup, int, zero=True),
        compare=compared_methods(compare, sizes),
        batch_sizes=sizes,
        options={"captured": captured, "repeats": repeats, "seed": seed},
        load=loading.checked(),
    )
    about = {"questions": named(questions), "split": split, "limit": limit, "command": command_line()}
    about = {name: value for name, value in about.items() if value is not None}
    first = process_state().is_main_process

    def keep(measurements: list[Any]) -> None:
        if first:
            write_json(json_path, report.to_json(measurements, **about))
            if csv_path is not None:
                report.write_csv(csv_path, measurements)

    with bar(plan.batches) as begin:
        notify = complain if first else lambda notice: None
        measurements, stopped = carry_out(plan, begin=begin, notify=notify, keep=keep)
    if first:
        console = output()
        for table in report.tables(measurements):
            console.print(table)
        for sentence in report.verdicts(measurements):
            console.print(sentence, soft_wrap=True)
        if plot is not None:
            plots.draw(measurements, plot)
    if stopped:
        marked = ", marked with *," if any(not each.complete for each in measurements) else ""
        kept = f", and are kept in {str(json_path)!r}" if json_path is not None else ""
        complain(f"{stopped}: the figures{marked} are those of the prompts that were finished{kept}.")
        raise typer.Exit(130)


def compared_methods(names: str | None, sizes: list[int]) -> list[str]:
    """What base and heads are compared with: as asked, else with one row prompt lookup, which needs no heads."""
    if names is None:
        return [PROMPT_LOOKUP] if sizes == [1] else []
    return [] if names == "none" else names.split(",")


def named(questions: str) -> str:
    """The name of the questions in the figures: that of the file or folder, or the id of the data set."""
    return Path(questions).resolve().name if Path(questions).exists() else questions


@app.command("verify")
@options_of_groups
def run_verify(
    model: ModelName,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="As the questions of `bench`; of a chat the first turn.")
    ],
    loading: Loading,
    split: Annotated[str | None, typer.Option(metavar="NAME", help="Of the data set.")] = None,
    limit: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per prompt.")] = 64,
    batch_size: Annotated[int, typer.Option(metavar="N", min=1, help="Rows of the checks in batches.")] = 4,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")] = 0,
    settings: Settings = None,
    json_path: Json = None,
) -> None:
    """Whether a model with draft heads writes what its base writes; ends with 1 if it does not."""
    from hf_drafthead.evaluation.calls import batched, encode_all
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.evaluation.verify import calls, verdict_table
    from hf_drafthead.evaluation.verify import verify as check

    check_writable(json_path)
    options: dict[str, Any] = {"batch_size": batch_size, "settings": parse_settings(settings)}
    questions = read_questions(prompts, split)[:limit]
    loaded, tokenizer = loading.load(model)
    inputs = encode_all(loaded, tokenizer, batched(questions, 1), max_new_tokens)
    rows = [each["input_ids"][0].tolist() for each in inputs]
    with bar(calls(rows, **options)) as begin:
        options |= {"max_new_tokens": max_new_tokens, "seed": seed, "tokenizer": tokenizer}
        verdict = check(loaded, rows, progress=begin("verify"), **options)
    console = output()
    console.print(verdict_table(verdict))
    console.print(verdict.in_words(), soft_wrap=True)
    write_json(json_path, verdict.to_json(tokenizer))
    if verdict.stopped:
        kept = f", and is kept in {str(json_path)!r}" if json_path is not None else ""
        complain(f"interrupted: this is what was compared until then{kept}; it does not show that all is well.")
        raise typer.Exit(130)
    if undrafted := sum(each.undrafted for each in verdict.checks):
        complain(f"{undrafted} calls were decoded by the base itself, so they verified nothing: see the warning above.")
    if verdict.shortest is not None:
        complain(verdict.shortest.in_words(tokenizer))
        raise typer.Exit(1)
