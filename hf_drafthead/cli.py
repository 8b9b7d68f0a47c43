"""The command line `hf-drafthead`: each command parses, calls one function and prints.

Exit codes: 0 success; 1 a check failed; 2 bad input, with one line that says what to do.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

app = typer.Typer(
    name="hf-drafthead",
    help="Draft heads as ordinary Hugging Face models: the base's own text in fewer forward passes.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

UsageError: Any = typer.BadParameter.__base__  # of click, which typer brings along without exporting this
# by the depth of the guess; the base's own tokens stay plain
COLOURS = ("green", "cyan", "blue", "magenta", "red", "yellow")

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a draft-head checkpoint, or its id on the Hub.")]
Models = Annotated[list[str], typer.Argument(metavar="MODEL...", help="As MODEL; several are put side by side.")]
Template = Annotated[
    Path | None, typer.Option("--chat-template", metavar="FILE", help="Jinja template, instead of the tokenizer's.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Setting of `generate` (may be repeated).")
]
Dtype = Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16, float16.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the figures there as JSON.")]


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy; without it the model's own settings hold.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling.")] = None,
    tree: Annotated[
        str | None, typer.Option(help="Draft tree: a published one's name, rank paths as JSON, or a JSON file.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print while writing.")] = False,
    color: Annotated[bool, typer.Option("--color", help="Colour accepted guesses by their depth.")] = False,
    json_path: Json = None,
) -> None:
    """Continue a prompt."""
    import torch
    from transformers import set_seed

    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.sample import sample

    check_writable(json_path)
    if not prompt:
        raise ValueError("the prompt is empty: give the text to continue with --prompt 'def main('.")
    chosen = None if tree is None else parse_tree(tree)
    loaded, tokenizer = load(model, dtype="auto", device_map="auto" if torch.cuda.is_available() else None)
    if seed is not None:
        set_seed(seed)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens}
    if temperature is not None:
        settings |= {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    console = output(color)

    def show(piece: str, depth: int) -> None:
        if color:
            console.print(coloured(piece, depth), end="", soft_wrap=True)
        else:
            print(piece, end="", flush=True)  # as it is: a console would expand tabs

    written = sample(loaded, tokenizer, prompt, tree=chosen, on_piece=show if stream else None, **settings)
    if not stream:
        for piece, depth in written.pieces:
            show(piece, depth)
    console.print()
    if color:
        console.print(legend(written.pieces))
    pace = "" if written.tokens_per_step is None else f", {written.tokens_per_step:.2f} per step"
    Console(stderr=True).print(f"{written.new_tokens} tokens in {written.seconds:.2f} s{pace}", style="dim")
    write_json(json_path, vars(written))


@app.command()
def info(model: Model, json_path: Json = None) -> None:
    """Show a checkpoint: family, base, heads, parameters, memory, tree and settings."""
    from hf_drafthead.evaluation.summary import summarize

    check_writable(json_path)
    found = summarize(model)
    rows = {
        "family": found.family,
        "base": f"{found.base or 'not named'} ({found.base_type}{', included' if found.base_included else ''})",
        "base revision": found.base_revision or "not recorded",
        "draft heads": str(found.draft_heads),
        "parameters": f"{found.parameters:,}",
        "memory added": f"{found.memory / 2**20:.1f} MiB ({found.dtype})",
        "heads": ", ".join(f"{name}={value}" for name, value in found.fields.items()),
        "settings": ", ".join(f"{name}={value}" for name, value in found.settings.items() if name != "draft_tree"),
    }
    console = output()
    for name, value in rows.items():
        if value:
            console.print(Text(f"{name:<14} {value}"), soft_wrap=True)
    if found.tree is not None:
        chosen = found.settings["draft_tree"]
        named = f"{chosen}: " if isinstance(chosen, str) else ""
        console.print(f"{'draft tree':<14} {named}{found.tree.num_nodes} nodes, each line a rank among its siblings")
        console.print(Text(found.tree.draw()))
    write_json(json_path, found.to_json())


@app.command()
def demo(
    family: Annotated[list[str] | None, typer.Option(help="Only this family (may be repeated).")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt; the median counts.")] = 3,
    json_path: Json = None,
) -> None:
    """The bundled base against each bundled family: speed, tokens per step, and whether the text is the same."""
    import torch

    from hf_drafthead import zoo
    from hf_drafthead.evaluation.contest import contest, rounds
    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.prompts import read_prompts
    from hf_drafthead.evaluation.sample import sample

    check_writable(json_path)
    paths = {name: zoo.path(name) for name in family or zoo.families()}
    if not paths:
        raise OSError("the zoo holds no heads: build them with `python -m hf_drafthead.zoo.build`.")
    asked = read_prompts(zoo.ASSETS / "prompts.jsonl")[:prompts]
    shown = asked[min(3, len(asked) - 1)]  # the bundled base answers this one with code and prose
    console = output()
    threads = torch.get_num_threads()
    console.print(f"{len(asked)} held-out prompts, {max_new_tokens} tokens each, greedy, float32, {threads} threads")
    contests, samples = {}, {}
    with bar(len(paths) * rounds(asked)) as begin:
        for name, path in paths.items():
            model, tokenizer = load(path, dtype=torch.float32)
            contests[name] = one = contest(
                model, tokenizer, asked, max_new_tokens=max_new_tokens, repeats=repeats, progress=begin(name)
            )
            samples[name] = sample(
                model, tokenizer, shown.text, tree=one.tree, do_sample=False, max_new_tokens=max_new_tokens
            )
    console.print(table_of(contests))
    for name, written in samples.items():
        console.print(Text(f"\n{name} continues {written.prompt.splitlines()[-1].strip()!r}", style="bold"))
        console.print(Text.assemble(*(coloured(piece, depth) for piece, depth in written.pieces)), soft_wrap=True)
        console.print(legend(written.pieces))
    write_json(json_path, {"rows": [one.to_json() for one in contests.values()]})
    if not all(one.identical for one in contests.values()):
        different = ", ".join(name for name, one in contests.items() if not one.identical)
        complain(f"the output of {different} differs from the base's own: see the column 'same text'.")
        raise typer.Exit(1)


@app.command()
def bench(
    models: Models,
    questions: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="MT-Bench or Spec-Bench file, JSON lines with `turns` or `prompt`, data set."
        ),
    ],
    split: Annotated[str | None, typer.Option(help="Of the data set.")] = None,
    chat_template: Template = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer, at most.")] = 256,
    batch_size: Annotated[str, typer.Option(metavar="N[,N...]", help="Questions per call; several for a curve.")] = "1",
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each prompt; the median counts.")] = 3,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0, the default, is greedy; 0.7 with --epsilon.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    epsilon: Annotated[
        str | None,
        typer.Option(metavar="X[,X...]", help="Also typical acceptance with these thresholds, alpha being their root."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="NAME[,NAME...]", help="Also prompt-lookup, assistant=PATH, compiled.")
    ] = None,
    tree: Annotated[
        str | None, typer.Option(help="Draft tree: a published one's name, rank paths as JSON, or a JSON file.")
    ] = None,
    settings: Settings = None,
    dtype: Dtype = "auto",
    plot: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Draw pictures there.")] = None,
    csv_path: Annotated[
        Path | None, typer.Option("--csv", metavar="PATH", help="Write the figures by category.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Speed, acceptance and exactness of models with draft heads against their bases, on questions."""
    from hf_drafthead.evaluation import plots, report
    from hf_drafthead.evaluation.plan import Plan, carry_out
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.evaluation.sharding import process_state

    check_writable(json_path)
    check_writable(csv_path, "--csv")
    thresholds = parse_numbers("--epsilon", epsilon, float)
    heat = temperature if temperature is not None else 0.7 if thresholds else 0.0
    sampling = {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
    plan = Plan(
        models=models,
        questions=read_questions(questions, split)[:limit],
        settings={"max_new_tokens": max_new_tokens, **sampling, **parse_options(settings or [])},
        tree=None if tree is None else parse_tree(tree),
        chat_template=read_template(chat_template),
        thresholds=thresholds,
        compare=compare.split(",") if compare else (),
        batch_sizes=parse_numbers("--batch-size", batch_size, int),
        repeats=repeats,
        seed=seed,
        dtype=dtype,
    )
    said = {"questions": Path(questions).name, "command": command_line()}
    first = process_state().is_main_process

    def keep(measurements: list[Any]) -> None:
        if first:
            write_json(json_path, report.to_json(measurements, **said))
            if csv_path is not None:
                report.write_csv(csv_path, measurements)

    with bar(plan.batches) as begin:
        outcome = carry_out(plan, begin=begin, tell=complain if first else lambda notice: None, keep=keep)
    if first:
        console = output()
        for table in report.tables(outcome.measurements):
            console.print(table)
        if plot is not None:
            plots.draw(outcome.measurements, plot)
    if outcome.stopped:
        complain(f"{outcome.stopped}: the figures, marked with *, are those of the prompts that were finished.")
        raise typer.Exit(130)


@app.command()
def verify(
    model: Model,
    prompts: Annotated[
        str, typer.Option(metavar="FILE", help="As the questions of `bench`; of a chat the first turn.")
    ],
    chat_template: Template = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many prompts.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of the checks in batches.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    settings: Settings = None,
    dtype: Dtype = "auto",
    json_path: Json = None,
) -> None:
    """Whether a model with draft heads writes what its base writes; ends with 1 if it does not."""
    from hf_drafthead.evaluation.plan import load_here
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.evaluation.speed import batched, encode_all
    from hf_drafthead.evaluation.verify import calls, verdict_table, verify

    check_writable(json_path)
    given = parse_options(settings or [])
    asked, template = read_questions(prompts)[:limit], read_template(chat_template)
    loaded, tokenizer = load_here(model, dtype)
    tokenizer.chat_template = template or tokenizer.chat_template
    encoded = encode_all(loaded, tokenizer, batched(asked, 1), max_new_tokens)
    rows = [one["input_ids"][0].tolist() for one in encoded]
    options: dict[str, Any] = {"batch_size": batch_size, "settings": given}
    with bar(calls(rows, **options)) as begin:
        found = verify(loaded, rows, max_new_tokens=max_new_tokens, seed=seed, progress=begin("verify"), **options)
    output().print(verdict_table(found))
    write_json(json_path, found.to_json(tokenizer))
    if undrafted := sum(check.undrafted for check in found.checks):
        complain(f"{undrafted} calls were decoded by the base itself, so they verified nothing: see the warning above.")
    if found.shortest is not None:
        complain(found.shortest.told(tokenizer))
        raise typer.Exit(1)


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
    from hf_drafthead.training.run import sort_options, train_heads

    check_writable(json_path)
    fields, arguments = sort_options(family, parse_options(option or []))
    load: dict[str, Any] = {"dtype": dtype}
    if load_in_4bit:
        from transformers import BitsAndBytesConfig

        load["quantization_config"] = BitsAndBytesConfig(load_in_4bit=True)
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
    from hf_drafthead.training import distill as room
    from hf_drafthead.training.sources import read_rows

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


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    license: Annotated[str | None, typer.Option(metavar="ID", help="License of the heads, such as apache-2.0.")] = None,
    with_code: Annotated[bool, typer.Option("--with-code", help="Write the model code too, as a push does.")] = False,
    json_path: Json = None,
) -> None:
    """Write the model card from the facts in a folder; sections that a person wrote stay."""
    from hf_drafthead.cards import missing, write_card
    from hf_drafthead.hub_upload.bundle import add_bundle

    check_writable(json_path)
    if with_code:
        add_bundle(folder)
    path = write_card(folder, license=license)
    lacks = missing(folder)
    console = output()
    console.print(str(path), soft_wrap=True)
    for one in lacks:
        console.print(f"still missing: {one}", soft_wrap=True)
    write_json(json_path, {"card": str(path), "missing": lacks})


@app.command()
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Where to: ORG/NAME on the Hub.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repository.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the commit instead of making it.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="Title of the commit.")] = None,
    include_base: Annotated[bool, typer.Option("--include-base", help="Push the base's weights too.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="The base on the Hub, if it is local here.")
    ] = None,
    license: Annotated[str | None, typer.Option(metavar="ID", help="License of the heads, such as apache-2.0.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; send nothing.")] = False,
    json_path: Json = None,
) -> None:
    """Publish heads with tokenizer, settings, figures and card, after checking that others can use them."""
    from hf_drafthead.hub_upload import Target, push_folder

    check_writable(json_path)
    target = Target(repo_id, commit_message, None, private, None, revision, create_pr, None, license)
    done = push_folder(folder, target, base=base, include_base=include_base, dry_run=dry_run)
    console = output()
    for line in done.lines():
        console.print(line, soft_wrap=True)
    write_json(json_path, done.to_json())


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def serve(model: Model, context: typer.Context) -> None:
    """Serve a model with an OpenAI-compatible API: all other options are those of `transformers serve`."""
    from hf_drafthead.hub_upload.serve import serve as run

    run(model, context.args)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; a user's mistake ends in one line on stderr and exit code 2.

    Args:
        arguments: the words after `hf-drafthead`; those of the process by default.

    Raises:
        SystemExit: always, with the exit code.
    """
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    hub_logging.set_verbosity_error()  # a Hub that cannot be reached is told once, not at every retry
    logging.disable_progress_bar()
    try:
        words = sys.argv[1:] if arguments is None else arguments
        code = app(args=words or ["--help"], prog_name="hf-drafthead", standalone_mode=False)
    except UsageError as error:
        asked = error.ctx.command_path if error.ctx else "hf-drafthead"
        complain(f"{error.format_message().rstrip('.')}: see `{asked} --help`.")
        code = 2
    except (FloatingPointError, OSError, TypeError, ValueError) as error:
        complain(str(error))
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        complain("interrupted.")
        code = 130
    sys.exit(code or 0)


# ---- shared by the commands ----------------------------------------------------------------------------------------


def parse_tree(given: str) -> Any:
    """A draft tree from the command line: rank paths as JSON, a file that holds them, or a published tree's name."""
    from hf_drafthead.generation.tree import DraftTree

    if given.lstrip().startswith("["):
        return DraftTree.from_json(given)
    if given.endswith(".json"):
        if not Path(given).is_file():
            raise OSError(f"there is no tree file {given!r}: give a file of rank paths such as [[0], [1], [0, 0]].")
        return DraftTree.from_json(Path(given).read_text(encoding="utf-8"))
    return DraftTree.from_name(given)


def parse_options(given: list[str]) -> dict[str, Any]:
    """NAME=VALUE pairs; values are read as JSON where they are some, else as text.

    Raises:
        ValueError: one is no such pair.
    """
    options = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise ValueError(f"--set {pair!r} is no NAME=VALUE: give for example --set learning_rate=1e-3.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    return options


def parse_numbers(option: str, given: str | None, kind: Callable[[str], Any]) -> list[Any]:
    """Numbers above 0 with commas between them."""
    try:
        found = [kind(word) for word in given.split(",")] if given else []
    except ValueError:
        found = [0]
    if not all(0 < number < float("inf") for number in found):
        expected = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"{option} {given!r}: expected {expected} above 0 with commas between them.")
    return found


def read_template(path: Path | None) -> str | None:
    """The text of a chat template."""
    if path is not None and not path.is_file():
        raise OSError(f"there is no chat template {str(path)!r}: give a Jinja file.")
    return None if path is None else path.read_text(encoding="utf-8")


def command_line() -> str:
    """What the user typed, for whoever wants to measure again."""
    return shlex.join(["hf-drafthead", *sys.argv[1:]])


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a place where no file can be written, before any work is done for it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "is a folder" if path.is_dir() else f"lies in {str(path.parent)!r}, which does not exist"
        raise OSError(f"{option} {str(path)!r} {found}: give the path of a file in a folder that exists.")


def write_json(path: Path | None, figures: dict[str, Any]) -> None:
    """Write figures as one JSON object, if a path was given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def complain(message: str) -> None:
    """One line on stderr."""
    print(f"hf-drafthead: {' '.join(message.split())}", file=sys.stderr)


def output(color: bool = False) -> Console:
    """Standard output; coloured on a terminal, or wherever it goes if that was asked for."""
    return Console(highlight=False, markup=False, force_terminal=True if color else None)


@contextmanager
def bar(total: int) -> Iterator[Callable[[str], Callable[[], None]]]:
    """A progress bar on stderr; what it yields names a part of the work and returns what to call at each step."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    hidden = not console.is_terminal
    # drawn between measurements: a thread that draws would share the clock with what is measured
    with Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False) as progress:
        task = progress.add_task("", total=total)

        def begin(part: str) -> Callable[[], None]:
            progress.update(task, description=part, refresh=True)
            return lambda: progress.update(task, advance=1, refresh=True)

        yield begin


def coloured(piece: str, depth: int) -> Text:
    """A piece of text in the colour of the depth at which it was accepted."""
    return Text(piece, style=COLOURS[(depth - 1) % len(COLOURS)] if depth else "")


def legend(pieces: list[tuple[str, int]]) -> Text:
    """Which colour is which depth, and how many pieces were accepted there."""
    line = Text("plain: the base's own token", style="dim")
    for depth in sorted({depth for _, depth in pieces} - {0}):
        count = sum(1 for _, other in pieces if other == depth)
        line.append(f"  depth {depth}: {count}", style=COLOURS[(depth - 1) % len(COLOURS)])
    return line


def table_of(contests: dict[str, Any]) -> Table:
    """Every family with its fastest tree, with the published tree, and in a batch."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("family", no_wrap=True)
    table.add_column("tree", no_wrap=True)
    for column in (
        "nodes",
        "batch",
        "tokens\n/ step",
        "base\ntok/s",
        "heads\ntok/s",
        "speedup",
        "effi-\nciency",
        "same\ntext",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in contests.items():
        for label, run in (("fastest", one.fastest), ("published", one.published), ("fastest", one.batch)):
            table.add_row(
                name,
                label,
                str(run.tree_nodes),
                str(run.batch_size),
                "-" if run.tokens_per_step is None else f"{run.tokens_per_step:.2f}",
                f"{run.base_tokens_per_second:.0f}",
                f"{run.tokens_per_second:.0f}",
                f"{run.speedup:.2f}",
                "-" if run.efficiency is None else f"{run.efficiency:.2f}",
                "yes" if run.identical else "NO",
            )
        table.add_section()
    return table
