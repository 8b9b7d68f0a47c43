"""`hf-drafthead distill`: the base's own text, to train heads on."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli.common import Json, Template, app, bar, check_writable, output, read_template, write_json


@app.command()
def distill(
    data: Annotated[str, typer.Option(help="Chats, prompts or texts: a file, a folder, or the name of a data set.")],
    output_file: Annotated[Path, typer.Option("--output", metavar="FILE.jsonl", help="The answers go there.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder or id of a causal language model, or of one with draft heads; with --endpoint only its "
            "tokenizer is read, and only plain texts need it.",
        ),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask this OpenAI-compatible server: http://host:8000/v1."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="With --endpoint: the model, as the server calls it.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="With --endpoint: concurrent requests.")] = 32,
    retries: Annotated[int, typer.Option(min=0, help="With --endpoint: how often a failed request is sent again.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 1.0,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows at a time, in each process; 8 by default. Not with --endpoint.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt with its answer, at most. Not with --endpoint.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a plain text, how many are given.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    chat_template: Template = None,
    json_path: Json = None,
) -> None:
    """Generate the base's own answers to the prompts of the data, to train heads on.

    The same command resumes an interrupted run.
    """
    from hf_drafthead.data import read_rows
    from hf_drafthead.training import distill as room
    from hf_drafthead.training.collect import processes
    from hf_drafthead.training.endpoint import distill_from_endpoint

    check_writable(json_path)
    check_writable(output_file, "--output")
    if endpoint is None and model is None:
        raise ValueError("no model is named: give MODEL, or --endpoint URL --model NAME.")
    if (endpoint is None) != (served_model is None):
        raise ValueError("--endpoint URL and --model NAME go together: give both, or a MODEL alone.")
    own = {"--batch-size": batch_size, "--max-length": max_length, "--chat-template": chat_template}
    if endpoint is not None and (given := [name for name, value in own.items() if value is not None]):
        raise ValueError(f"{given[0]} does not go with --endpoint: the server decides that; leave it out.")
    template = read_template(chat_template)
    state = processes()
    with state.main_process_first():  # the others find the rows in its cache
        rows = read_rows(data, split=split)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    options |= {"prompt_tokens": prompt_tokens, "seed": seed}
    if endpoint is None:
        loaded, tokenizer = room.load_model(str(model), state.device)
        tokenizer.chat_template = template or tokenizer.chat_template
        options |= {"batch_size": batch_size or 8, "max_length": max_length}
        run = partial(room.distill, loaded, tokenizer)
    else:
        options |= {"concurrency": concurrency, "retries": retries}
        options["tokenizer"] = None if model is None else room.load_tokenizer(model)
        run = partial(distill_from_endpoint, endpoint, str(served_model))
    with bar(len(rows)) as begin:
        report = run(rows, output_file, progress=begin("answering"), **options)
    if state.is_main_process:
        output().print(str(report), soft_wrap=True)
        write_json(json_path, report.to_json())
