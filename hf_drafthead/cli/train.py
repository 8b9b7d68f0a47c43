"""`hf-drafthead distill`, `vocabulary` and `train`: the base's own text, and what is learned from it."""

import hashlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli import common
from hf_drafthead.cli.common import amount, count, flag, string
from hf_drafthead.cli.trees import entry_in_words


@common.app.command("distill")
@common.options_of_groups
def run_distill(
    loading: common.Loading,
    output_file: Annotated[Path, common.new_file("The answers go there.", "FILE.jsonl", "--output")],
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="The base, or its heads; with --endpoint only a tokenizer is read."),
    ] = None,
    data: Annotated[str | None, string("Chats, prompts or texts: a file, a folder, or the name of a data set.")] = None,
    synthesize: Annotated[int | None, count("Without --data: write N chats, questions by the base too.")] = None,
    turns: Annotated[int, count("With --synthesize: questions of a chat, at most.")] = 1,
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
    json_path: common.Json = None,
) -> None:
    """Generate the base's own answers to train heads on, to the prompts of the data or to questions of its own.

    The same command resumes an interrupted run.
    """
    from hf_drafthead.data import read_rows
    from hf_drafthead.modeling.base_model import load_tokenizer
    from hf_drafthead.training import distill as room
    from hf_drafthead.training.endpoint import Server

    if endpoint is None and model is None:
        raise ValueError("no model is named: give MODEL, or --endpoint URL --model NAME.")
    if (endpoint is None) != (served_model is None):
        raise ValueError("--endpoint URL and --model NAME go together: give both, or a MODEL alone.")
    without_endpoint = {
        "--batch-size": batch_size,
        "--max-length": max_length,
        "--chat-template": loading.chat_template,
    }
    if endpoint is not None and (misplaced := [name for name, value in without_endpoint.items() if value is not None]):
        raise ValueError(f"{misplaced[0]} does not go with --endpoint: the server decides that; leave it out.")
    if (data is None) == (synthesize is None):
        raise ValueError("give --data, or --synthesize N for chats of which the base writes the questions too.")
    if synthesize is not None and model is None:
        raise ValueError("--synthesize needs the base's chat template: name the base (hf-drafthead distill MODEL ...).")
    rows: Any = synthesize
    if data is not None:
        rows = read_rows(data, split=split)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p}
    options |= {"prompt_tokens": prompt_tokens, "turns": turns, "question_tokens": question_tokens, "seed": seed}
    if endpoint is None:
        answers, tokenizer = loading.load(str(model))
        answers = answers.base if answers.drafter.copies is not None else answers  # a base alone
        options |= {"batch_size": batch_size, "max_length": max_length}
    else:
        values = loading.chat_template_kwargs
        answers = Server(endpoint, str(served_model), retries, common.template_values(values))
        tokenizer = None if model is None else load_tokenizer(model)
        if tokenizer is not None and values:
            tokenizer.chat_template = common.with_values(tokenizer.chat_template, values)
        options["batch_size"] = concurrency
    report = room.distill(answers, tokenizer, rows, output_file, bar=common.bar, **options)
    common.say(str(report))
    common.write_json(json_path, report.to_json())


@common.app.command()
def vocabulary(
    base: Annotated[str, typer.Argument(help="Folder of a causal language model, or its id on the Hub.")],
    data: Annotated[str, string("Chats or texts of the base: a file, a folder, or the name of a data set.")],
    output_file: Annotated[Path, common.new_file("The token ids go there.", "FILE.json", "--output")],
    size: Annotated[int, count("Tokens, at most; those that do not occur are left out.")] = 32_000,
    split: Annotated[str, string("Of a data set.", "NAME")] = "train",
    chat_template: common.Template = None,
) -> None:
    """Count the tokens of the base's own text: the most frequent ones, for heads that guess among these (MTP)."""
    import json

    from hf_drafthead.data.sources import read_rows
    from hf_drafthead.modeling.base_model import load_tokenizer
    from hf_drafthead.training.data import tokenize_rows
    from hf_drafthead.training.examples import frequent_tokens, label_frequencies

    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = common.read_template(chat_template) or tokenizer.chat_template
    rows, report = tokenize_rows(read_rows(data, split=split), tokenizer)
    counts = label_frequencies(rows, len(tokenizer))
    tokens, share = frequent_tokens(counts, min(size, int((counts > 0).sum())))
    output_file.write_text(json.dumps(tokens.tolist()) + "\n", encoding="utf-8")
    common.say(str(report), f"{len(tokens):,} tokens are {share:.2%} of the text".replace("%", " %"))


@common.app.command()
def train(
    output_folder: Annotated[str, typer.Option("--output", help="Folder for checkpoints and the trained heads.")],
    base: Annotated[str | None, string("A causal language model: folder or id. Default: that of --from.")] = None,
    family: Annotated[str | None, string("Of fresh heads: medusa, eagle3, ...; a wrong name lists all.")] = None,
    data: Annotated[str | None, string("Chats or texts: a file, a folder, or the name of a data set.")] = None,
    synthesize: Annotated[int | None, count("Without --data: chats to write first (2,000, or H/2 hours).", 20)] = None,
    hours: Annotated[float | None, amount("Train for so long, by the quick recipe.", least=0.001, metavar="H")] = None,
    recipe: Annotated[str | None, string("paper, or quick for runs shorter than a paper's warm-up.", "NAME")] = None,
    heads: Annotated[str | None, string("Train these further, also published ones.", None, "--from", "--heads")] = None,
    joint: Annotated[bool, flag("--joint", "Train the base too (Medusa-2).")] = False,
    lora_rank: Annotated[int, count("Adapters of a trained base; 0: all its weights.", 0)] = 32,
    max_length: Annotated[int | None, count("Tokens of a row, at most.", 8)] = None,
    split: Annotated[str, string("Of a data set.", "NAME")] = "train",
    chat_template: common.Template = None,
    chat_template_kwargs: common.TemplateValues = None,
    held_out_rows: Annotated[int | None, count("Rows to evaluate on; by default a tenth of them, at most 64.")] = None,
    answer_tokens: Annotated[int, count("Tokens of the answers from which the expected speed is computed.", 2)] = 128,
    answer_temperature: Annotated[float, amount("Of these answers; 0 is greedy.")] = 0.0,
    dtype: Annotated[str, string("Of base and heads: auto, float32, bfloat16 or float16.", "NAME")] = "auto",
    load_in_4bit: Annotated[bool, flag("--load-in-4bit", "Quantize the base (bitsandbytes).")] = False,
    option: Annotated[list[str] | None, string("A config field or training argument.", "NAME=VALUE", "--set")] = None,
    resume: Annotated[bool, flag("--resume", "Resume from the last complete checkpoint.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Show the expected memory, steps and time, then stop.")] = False,
    no_calibrate: Annotated[bool, flag("--no-calibrate", "Do not look for the fastest tree at the end.")] = False,
    json_path: common.Json = None,
) -> None:
    """Train draft heads and show their expected tokens per step; defaults are the recipe of the family's paper.

    Without --data the base writes the training text itself, into the output folder: questions and answers, or plain
    texts where its tokenizer has no chat template.
    """
    import torch
    from accelerate import PartialState
    from datasets import disable_progress_bars

    from hf_drafthead.door import OURS, recognize, start_from
    from hf_drafthead.evaluation.loading import floating_type
    from hf_drafthead.modeling.base_model import load_tokenizer
    from hf_drafthead.training.arguments import sort_options
    from hf_drafthead.training.run import train_heads

    template = common.read_template(chat_template)
    said, start = common.parse_options(option or []), None
    if heads is not None and (base is None or family is None or recognize(heads).kind != OURS):
        known_by = hashlib.sha256(repr((heads, base, said)).encode()).hexdigest()[:8]
        with PartialState(cpu=not torch.accelerator.is_available()).main_process_first():  # others find its folder
            start = start_from(heads, f"{output_folder}-start-{known_by}", base, said)
        heads, base, family = start.folder, start.base, family or start.family
    if base is None or family is None:
        raise ValueError("--base and --family are missing: give both, or --from with trained heads.")
    if chat_template_kwargs:
        template = common.with_values(template or load_tokenizer(base).chat_template, chat_template_kwargs)
    fields, arguments = sort_options(family, said)
    load: dict[str, Any] = {"dtype": floating_type(dtype)}
    if load_in_4bit:
        from transformers import BitsAndBytesConfig

        four: dict[str, Any] = {"bnb_4bit_compute_dtype": "bfloat16" if dtype == "auto" else dtype}
        load["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **four)
    if not sys.stderr.isatty():
        disable_progress_bars()  # each would be one line without an end
    options: dict[str, Any] = {"lora_rank": lora_rank, "max_length": max_length, "recipe": recipe, "hours": hours}
    options |= {"split": split, "chat_template": template}
    options |= {"held_out_rows": held_out_rows, "calibrate_tree": not no_calibrate}
    options |= {"answer_tokens": answer_tokens, "answer_temperature": answer_temperature, **arguments}
    how: dict[str, Any] = {"heads": heads, "fields": fields, "joint": joint, "load": load}
    how |= {"resume": resume, "dry_run": dry_run, "tell": common.say, "chats": synthesize, "bar": common.bar}
    trained = train_heads(base, family, data, output_folder, **how, **options)
    if not PartialState().is_main_process:
        return
    if start is not None and start.targets is not None and not dry_run:
        common.say(start.write_back(output_folder))
    if not dry_run:
        entries = trained.model.generation_config.to_dict().get("calibration") or []
        common.say(*outcome(trained.summary), *map(entry_in_words, entries), f"the heads are in {output_folder}")
    common.write_json(json_path, trained.summary)


def outcome(summary: dict[str, Any]) -> list[str]:
    """The held-out accuracies of a training, line by line; heads are counted from 1."""
    from hf_drafthead.training.callbacks import heads_of

    held_out = summary["held_out"]
    lines = [
        f"head {number}: first guess right {first:.1%}, among the first five {five:.1%}".replace("%", " %")
        for (number, first), (_, five) in zip(heads_of(held_out, 1), heads_of(held_out, 5))
    ]
    expected, heat = summary["tokens_per_step"], summary["answer_temperature"]
    sampled = f" at temperature {heat:g}" if heat else ""
    return lines + (
        [] if expected is None else [f"expected tokens per step of a 64-node tree{sampled}: {expected:.2f}"]
    )
