"""`hf-drafthead card`, `push` and `serve`: publish and serve heads."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from hf_drafthead.cli.common import Json, app, check_writable, output, write_json


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    license: Annotated[str | None, typer.Option(metavar="ID", help="License of the heads, such as apache-2.0.")] = None,
    with_code: Annotated[bool, typer.Option("--with-code", help="Write the model code too, as a push does.")] = False,
    json_path: Json = None,
) -> None:
    """Write the model card from the facts in a folder; sections that a person wrote stay."""
    from hf_drafthead.cards import missing, write_card
    from hf_drafthead.cards.facts import check_folder
    from hf_drafthead.hub_upload.bundle import add_bundle

    check_writable(json_path)
    check_folder(folder)
    if with_code:
        add_bundle(folder)
    path = write_card(folder, license=license)
    lacks = missing(folder)
    console = output()
    console.print(str(path), soft_wrap=True)
    for lack in lacks:
        console.print(f"still missing: {lack}", soft_wrap=True)
    write_json(json_path, {"card": str(path), "missing": lacks})


@app.command()
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Where to: ORG/NAME on the Hub.")],
    private: Annotated[
        bool | None, typer.Option("--private/--public", help="Of a new repository; another must be so.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch to push to; made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the commit instead of making it.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="Title of the commit.")] = None,
    include_base: Annotated[bool, typer.Option("--include-base", help="Push the base's weights too.")] = False,
    base: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="The base on the Hub, if another is recorded.")
    ] = None,
    license: Annotated[str | None, typer.Option(metavar="ID", help="License of the heads, such as apache-2.0.")] = None,
    token: Annotated[str | None, typer.Option(help="Of the Hub, instead of that of `hf auth login`.")] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Of a file of weights, with --include-base.")
    ] = "50GB",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and show it; send nothing.")] = False,
    to_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the files into a new folder; send nothing.")
    ] = None,
    json_path: Json = None,
) -> None:
    """Publish heads with tokenizer, settings, figures and card, after checking that others can use them."""
    from hf_drafthead.hub_upload import Target, push_folder

    check_writable(json_path)
    target = Target(repo_id, commit_message, None, private, token, revision, create_pr, None, license)
    how: dict[str, Any] = {"max_shard_size": max_shard_size, "dry_run": dry_run, "to_folder": to_folder}
    done = push_folder(folder, target, base=base, include_base=include_base, **how)
    console = output()
    for line in done.lines():
        console.print(line, soft_wrap=True)
    write_json(json_path, done.to_json())
    if done.refused and to_folder is None:
        raise typer.Exit(1)


@app.command(
    "serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run_serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder of a draft-head checkpoint, or its id on the Hub.")
    ] = None,
    show_help: Annotated[bool, typer.Option("--help", "-h", help="Show this message and exit.")] = False,
) -> None:
    """Serve a model with an OpenAI-compatible API: all other options are those of `transformers serve`."""
    from hf_drafthead.hub_upload import serve as server

    if show_help:
        print(context.get_help())
        server_options = Table("option of `transformers serve`", "", box=None, padding=(0, 2, 0, 0))
        for name, text in server.options():
            server_options.add_row(name, text)
        output().print(server_options)
        raise typer.Exit()
    if model is None:
        raise ValueError("Missing argument 'MODEL': see `hf-drafthead serve --help`.")
    server.serve(model, context.args)
