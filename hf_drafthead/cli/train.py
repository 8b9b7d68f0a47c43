"""`hf-drafthead train` and `distill`: new heads, and the text that they learn from."""

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


@app.command()
def train(
    base: Annotated[str, typer.Option(help="Folder of a causal language model, or its id on the Hub.")],
    family: Annotated[str, typer.Option(help="medusa, hydra, hydra++, amphista, amphista-alpha or eagle.")],
    data: Annotated[str, typer.Option(help="Chats or texts: a file, a folder, or the name of a data set.")],
    output_folder: Annotated[str, typer.Option("--output", help="Folder for checkpoints and the trained heads.")],
    heads: Annotated[str | None, typer.Option(help="Go on from these trained heads.")] = None,
    joint: Annotated[bool, typer.Option("--joint", help="Train the base too (Medusa-2).")] = False,
    lora_rank: Annotated[int, typer.Option(min=0, help="Adapters of a trained base; 0: all its weights.")] = 32,
    max_length: Annotated[int | None, typer.Option(min=8, help="Tokens of a row, at most.")] = None,
    packing: Annotated[bool, typer.Option("--packing", help="Fill rows up with whole texts.")] = False,
    streaming: Annotated[bool, typer.Option("--streaming", help="Read the data while training.")] = False,
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    chat_template: Template = None,
    held_out_rows: Annotated[int, typer.Option(min=1, help="Rows to evaluate on.")] = 64,
    answer_tokens: Annotated[int, typer.Option(min=2, help="Of the answers that tell the speed.")] = 128,
    dtype: Annotated[str, typer.Option(help="Of base and heads: auto, float32, bfloat16 or float16.")] = "auto",
    load_in_4bit: Annotated[bool, typer.Option("--load-in-4bit", help="Quantize the base (bitsandbytes).")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A config field or training argument (may be repeated)."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last whole checkpoint.")] = False,
    json_path: Json = None,
) -> None:
    """Train draft heads, showing what they will be worth; defaults are the recipe of the family's paper."""
    from hf_drafthead.evaluation.load_options import floating_type
    from hf_drafthead.training.run import sort_options, train_heads

    check_writable(json_path)
    template = read_template(chat_template)
    fields, arguments = sort_options(family, parse_options(option or []))
    load: dict[str, Any] = {"dtype": floating_type(dtype)}
    if load_in_4bit:
        load["quantization_config"] = four_bits(dtype)
    trained = train_heads(
        base,
        family,
        data,
        output_folder,
        heads=heads,
        fields=fields,
        joint=joint,
        lora_rank=lora_rank,
        max_length=max_length,
        packing=packing,
        streaming=streaming,
        split=split,
        chat_template=template,
        held_out_rows=held_out_rows,
        answer_tokens=answer_tokens,
        resume=resume,
        load=load,
        **arguments,
    )
    console = output()
    held_out = trained.summary["held_out"]
    for name, value in held_out.items():
        if name.endswith(("_top1", "_top5")):
            console.print(f"{name:<14} {value:.3f}")
    expected = trained.summary["tokens_per_step"]
    if expected is not None:
        console.print(f"expected tokens per step of a 64-node tree: {expected:.2f}")
    console.print(f"the heads are in {output_folder}", soft_wrap=True)
    write_json(json_path, trained.summary)


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


@app.command()
def distill(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or id of a causal language model, or of one with draft heads."),
    ],
    data: Annotated[str, typer.Option(help="Chats or texts: a file, a folder, or the name of a data set.")],
    output_file: Annotated[Path, typer.Option("--output", metavar="FILE.jsonl", help="The answers go there.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this probability.")] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows at a time, in each process.")] = 8,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of a prompt with its answer, at most.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Of a plain text, how many are given.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    split: Annotated[str, typer.Option(help="Of a data set.")] = "train",
    chat_template: Template = None,
    json_path: Json = None,
) -> None:
    """Let a model answer the questions of the data itself: what its heads should learn. Goes on where it was killed."""
    from hf_drafthead.data.sources import read_rows
    from hf_drafthead.training import distill as room

    check_writable(json_path)
    check_writable(output_file, "--output")
    template = read_template(chat_template)
    state = room.processes()
    with state.main_process_first():  # the others find the rows in its cache
        rows = read_rows(data, split=split)
    loaded, tokenizer = room.load_model(model, state.device)
    tokenizer.chat_template = template or tokenizer.chat_template
    with bar(len(rows)) as begin:
        report = room.distill(
            loaded,
            tokenizer,
            rows,
            output_file,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            batch_size=batch_size,
            max_length=max_length,
            prompt_tokens=prompt_tokens,
            seed=seed,
            progress=begin("answering"),
        )
    if state.is_main_process:
        output().print(str(report), soft_wrap=True)
        write_json(json_path, report.to_json())
