"""`hf-drafthead distill`: the base's own text, to train heads on."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli import common
from hf_drafthead.cli.common import amount, count, string


@common.app.command("distill")
def run_distill(
    output_file: Annotated[Path, typer.Option("--output", metavar="FILE.jsonl", help="The answers go there.")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The base, or its heads; with --endpoint only a tokenizer is read."),
    ] = None,
    data: Annotated[str | None, string("Chats, prompts or texts: a file, a folder, or the name of a data set.")] = None,
    synthesize: Annotated[int | None, count("Without --data: write N chats, questions by the base too.")] = None,
    turns: Annotated[int, count("With --synthesize: questions of a chat, at most.")] = 1,
    greedy: Annotated[float, amount("With --synthesize: share of chats with greedy answers.", most=1.0)] = 0.5,
    question_tokens: Annotated[int, count("With --synthesize: tokens of a question, at most.")] = 96,
    endpoint: Annotated[str | None, string("Ask this OpenAI-compatible server: http://host:8000/v1.", "URL")] = None,
    served_model: Annotated[str | None, string("With --endpoint: the model on the server.", "NAME", "--model")] = None,
    concurrency: Annotated[int, count("With --endpoint: concurrent requests.")] = 32,
    retries: Annotated[int, count("With --endpoint: how often a failed request is sent again.", 0)] = 8,
    max_new_tokens: Annotated[int, count("Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float | None, amount("0 is greedy, as by default; with --synthesize 1.")] = None,
    top_p: Annotated[float, string("Sample from the likeliest tokens of this probability.")] = 1.0,
    batch_size: Annotated[int | None, count("Rows at a time; 8 with --data. Not with --endpoint.")] = None,
    max_length: Annotated[int | None, count("Tokens of prompt and answer, at most. Not with --endpoint.", 2)] = None,
    prompt_tokens: Annotated[int, count("Of a plain text, how many are given.")] = 64,
    seed: Annotated[int, count("Seed of the sampling.", 0)] = 0,
    split: Annotated[str, string("Of a data set.")] = "train",
    chat_template: common.Template = None,
    json_path: common.Json = None,
) -> None:
    """Generate the base's own answers to train heads on, to the prompts of the data or to questions of its own.

    The same command resumes an interrupted run.
    """
    from hf_drafthead.data import read_rows
    from hf_drafthead.training import distill as room
    from hf_drafthead.training.endpoint import Server

    common.check_writable(json_path)
    common.check_writable(output_file, "--output")
    if endpoint is None and model is None:
        raise ValueError("no model is named: give MODEL, or --endpoint URL --model NAME.")
    if (endpoint is None) != (served_model is None):
        raise ValueError("--endpoint URL and --model NAME go together: give both, or a MODEL alone.")
    own = {"--batch-size": batch_size, "--max-length": max_length, "--chat-template": chat_template}
    if endpoint is not None and (given := [name for name, value in own.items() if value is not None]):
        raise ValueError(f"{given[0]} does not go with --endpoint: the server decides that; leave it out.")
    template = common.read_template(chat_template)
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
    with common.bar(synthesize or len(rows)) as begin:
        tell = begin("answering" if synthesize is None else "writing")
        report = run(answers, tokenizer, rows, output_file, progress=tell, **options)
    if state.is_main_process:
        common.say(str(report))
        common.write_json(json_path, report.to_json())
