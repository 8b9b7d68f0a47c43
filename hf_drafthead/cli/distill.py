"""`hf-drafthead distill`: the base's own text, to train heads on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli.common import Json, Template, app, bar, check_writable, output, read_template, write_json


@app.command("distill")
def run_distill(
    output_file: Annotated[Path, typer.Option("--output", metavar="FILE.jsonl", help="The answers go there.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Folder or id of a causal language model, or of one with draft heads; with --endpoint only its "
            "tokenizer is read, which plain texts and --synthesize need.",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Chats, prompts or texts: a file, a folder, or the name of a data set.")
    ] = None,
    synthesize: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Without --data: write N chats, for which the base writes the questions."
        ),
    ] = None,
    turns: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --synthesize: questions of a chat, at most.")
    ] = 1,
    greedy: Annotated[
        float,
        typer.Option(metavar="X", min=0.0, max=1.0, help="With --synthesize: share of chats with greedy answers."),
    ] = 0.5,
    question_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --synthesize: tokens of a question, at most.")
    ] = 96,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ask this OpenAI-compatible server: http://host:8000/v1."),
    ] = None,
    served_model: Annotated[
        str | None, typer.Option("--model", metavar="NAME", help="With --endpoint: the model, as the server calls it.")
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, help="With --endpoint: concurrent requests.")] = 32,
    retries: Annotated[
        int, typer.Option(metavar="N", min=0, help="With --endpoint: how often a failed request is sent again.")
    ] = 8,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(metavar="X", min=0.0, help="0 is greedy, as by default; with --synthesize 1.")
    ] = None,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 1.0,
    batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows at a time, in each process; 8 with --data. Not with --endpoint."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="N", min=2, help="Tokens of a prompt with its answer, at most. Not with --endpoint."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of a plain text, how many are given.")] = 64,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the sampling.")] = 0,
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    chat_template: Template = None,
    json_path: Json = None,
) -> None:
    """Generate the base's own answers to train heads on, to the prompts of the data or to questions of its own.

    The same command resumes an interrupted run.
    """
    from hf_drafthead.data import read_rows
    from hf_drafthead.training import distill as room
    from hf_drafthead.training.endpoint import Server

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
    if (data is None) == (synthesize is None):
        raise ValueError("give --data, or --synthesize N for chats of which the base writes the questions too.")
    if synthesize is not None and model is None:
        raise ValueError("--synthesize needs the base's chat template: name the base (hf-drafthead distill MODEL ...).")
    state = room.processes()
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "top_p": top_p, "seed": seed}
    if data is not None:
        with state.main_process_first():  # the others find the rows in its cache
            rows: Any = read_rows(data, split=split)
        options |= {"temperature": temperature or 0.0, "prompt_tokens": prompt_tokens}
    else:
        rows = synthesize
        options |= {"temperature": 1.0 if temperature is None else temperature, "turns": turns, "greedy": greedy}
        options["question_tokens"] = question_tokens
    if endpoint is None:
        answers, tokenizer = room.load_model(str(model), state.device)
        tokenizer.chat_template = template or tokenizer.chat_template
        options |= {"batch_size": batch_size if data is None else batch_size or 8, "max_length": max_length}
    else:
        answers = Server(endpoint, str(served_model), retries)
        tokenizer = None if model is None else room.tokenizer_of(model)
        options["batch_size"] = concurrency
    run = room.distill if synthesize is None else room.synthesize
    with bar(synthesize or len(rows)) as begin:
        tell = begin("answering" if synthesize is None else "writing")
        report = run(answers, tokenizer, rows, output_file, progress=tell, **options)
    if state.is_main_process:
        output().print(str(report), soft_wrap=True)
        write_json(json_path, report.to_json())
