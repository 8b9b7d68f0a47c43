"""`hf-drafthead train`: new heads."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli.common import (
    Json,
    Template,
    app,
    bar,
    check_writable,
    output,
    parse_options,
    read_template,
    write_json,
)
from hf_drafthead.cli.trees import entry_in_words

OWN_CHATS, MOST_CHATS = 2000, 200_000


@app.command()
def train(
    base: Annotated[str, typer.Option(help="Folder of a causal language model, or its id on the Hub.")],
    family: Annotated[
        str, typer.Option(help="Of the heads, such as medusa, hydra++ or eagle3; a wrong name lists all.")
    ],
    output_folder: Annotated[str, typer.Option("--output", help="Folder for checkpoints and the trained heads.")],
    data: Annotated[
        str | None, typer.Option(help="Chats or texts: a file, a folder, or the name of a data set.")
    ] = None,
    synthesize: Annotated[
        int | None,
        typer.Option(
            min=20,
            metavar="N",
            help="Without --data: the base writes N chats first; by default 2,000, or a third of H hours long.",
        ),
    ] = None,
    hours: Annotated[
        float | None,
        typer.Option(metavar="H", min=0.001, help="Train for so long: the quick recipe, in as many epochs as fit."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="paper, or quick for runs shorter than a paper's warm-up."),
    ] = None,
    heads: Annotated[str | None, typer.Option(help="Train these trained heads further.")] = None,
    joint: Annotated[bool, typer.Option("--joint", help="Train the base too (Medusa-2).")] = False,
    lora_rank: Annotated[
        int, typer.Option(metavar="N", min=0, help="Adapters of a trained base; 0: all its weights.")
    ] = 32,
    max_length: Annotated[int | None, typer.Option(metavar="N", min=8, help="Tokens of a row, at most.")] = None,
    packing: Annotated[bool, typer.Option("--packing", help="Join whole texts to full rows.")] = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while training.")] = False,
    split: Annotated[str, typer.Option(metavar="NAME", help="Of a data set.")] = "train",
    chat_template: Template = None,
    held_out_rows: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Rows to evaluate on; by default a tenth of them, at most 64."),
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option(metavar="N", min=2, help="Tokens of the answers from which the expected speed is computed.")
    ] = 128,
    answer_temperature: Annotated[
        float, typer.Option(metavar="X", min=0.0, help="Of these answers; 0 is greedy.")
    ] = 0.0,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of base and heads: auto, float32, bfloat16 or float16.")
    ] = "auto",
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="Quantize the base (bitsandbytes).")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A config field or training argument (may be repeated)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last complete checkpoint.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the expected memory, steps and time, then stop.")
    ] = False,
    no_calibrate: Annotated[
        bool, typer.Option("--no-calibrate", help="Do not measure at the end which draft tree is fastest here.")
    ] = False,
    json_path: Json = None,
) -> None:
    """Train draft heads and show their expected tokens per step; defaults are the recipe of the family's paper.

    Without --data the base writes the training text itself, questions included, into the output folder.
    """
    from accelerate import PartialState

    from hf_drafthead.evaluation.loading import floating_type
    from hf_drafthead.training.arguments import sort_options
    from hf_drafthead.training.callbacks import plain_log
    from hf_drafthead.training.run import train_heads

    check_writable(json_path)
    template = read_template(chat_template)
    fields, arguments = sort_options(family, parse_options(option or []))
    load: dict[str, Any] = {"dtype": floating_type(dtype)}
    if load_in_4bit:
        load["quantization_config"] = four_bits(dtype)
    console = output()
    if not sys.stderr.isatty():
        plain_log()
    if data is None:
        begin, file = time.monotonic(), Path(output_folder) / "own.jsonl"
        if not (resume and file.is_file()):
            if dry_run:
                raise ValueError("--dry-run needs --data: without it the base has to write the text first.")
            own_text(base, file, synthesize, hours, {"chat_template": template, "max_length": max_length})
        data = str(file)
        hours = hours and hours - (time.monotonic() - begin) / 3600
    elif synthesize is not None:
        raise ValueError("--synthesize N is for a training without --data: leave one of them out.")
    options = {
        "lora_rank": lora_rank,
        "max_length": max_length,
        "recipe": recipe,
        "hours": hours,
        "packing": packing,
        "streaming": streaming,
        "split": split,
        "chat_template": template,
        "held_out_rows": held_out_rows,
        "answer_tokens": answer_tokens,
        "answer_temperature": answer_temperature,
        "calibrate_tree": not no_calibrate,
    }
    trained = train_heads(
        base,
        family,
        data,
        output_folder,
        heads=heads,
        fields=fields,
        joint=joint,
        resume=resume,
        dry_run=dry_run,
        load=load,
        tell=lambda line: console.print(line, soft_wrap=True),
        **{**options, **arguments},
    )
    if not PartialState().is_main_process:
        return
    if not dry_run:
        for line in outcome(trained.summary):
            console.print(line)
        for entry in trained.model.generation_config.to_dict().get("calibration") or []:
            console.print(entry_in_words(entry), soft_wrap=True)
        console.print(f"the heads are in {output_folder}", soft_wrap=True)
    write_json(json_path, trained.summary)


def own_text(base: str, file: Path, chats: int | None, hours: float | None, settings: dict[str, Any]) -> None:
    """Let the base write chats from nothing: so many, or those that a third of the hours is enough for.

    Args:
        base: its name.
        file: they go there; what an earlier run wrote stays.
        chats, hours: as the user gave them.
        settings: of `own_chats`.
    """
    from hf_drafthead.training.distill import own_chats

    count = chats or (OWN_CHATS if hours is None else MOST_CHATS)
    file.parent.mkdir(parents=True, exist_ok=True)
    seconds = None if hours is None else 3600 * hours / 3
    if seconds is not None and chats is None:
        output().print(f"the base writes chats for {seconds / 60:.0f} min, into {file}", soft_wrap=True)
    with bar(count) as begin:
        report = own_chats(base, file, count, seconds=seconds, progress=begin("writing"), **settings)
    output().print(str(report), soft_wrap=True)


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


def four_bits(dtype: str) -> Any:
    """How `--load-in-4bit` quantizes a base: NF4, computing in the type asked for, else in bfloat16.

    Raises:
        OSError: bitsandbytes is missing.
    """
    from importlib.util import find_spec

    from transformers import BitsAndBytesConfig

    if find_spec("bitsandbytes") is None:
        raise OSError("--load-in-4bit needs bitsandbytes: pip install 'hf-drafthead[quantized]', or leave it out.")
    computed_in = "bfloat16" if dtype == "auto" else dtype
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computed_in)
