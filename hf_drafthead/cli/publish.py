"""`hf-drafthead card`, `push` and `serve`: publish and serve heads."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from hf_drafthead.cli.common import Json, app, check_writable, flag, output, say, string, write_json


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    license: Annotated[str | None, string("License of the heads, such as apache-2.0.", "ID")] = None,
    with_code: Annotated[bool, flag("--with-code", "Write the model code too, as a push does.")] = False,
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
    say(str(path), *(f"still missing: {lack}" for lack in lacks))
    write_json(json_path, {"card": str(path), "missing": lacks})


@app.command()
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Where to: ORG/NAME on the Hub.")],
    private: Annotated[bool | None, typer.Option("--private/--public", help="Of a new repository.")] = None,
    revision: Annotated[str | None, string("Branch to push to; made if it is not there.")] = None,
    create_pr: Annotated[bool, flag("--create-pr", "Propose the commit instead of making it.")] = False,
    commit_message: Annotated[str | None, string("Title of the commit.")] = None,
    include_base: Annotated[bool, flag("--include-base", "Push the base's weights too.")] = False,
    base: Annotated[str | None, string("The base on the Hub, if another is recorded.", "ORG/NAME")] = None,
    license: Annotated[str | None, string("License of the heads, such as apache-2.0.", "ID")] = None,
    token: Annotated[str | None, string("Of the Hub, instead of that of `hf auth login`.")] = None,
    max_shard_size: Annotated[str, string("Of a file of weights, with --include-base.", "SIZE")] = "50GB",
    dry_run: Annotated[bool, flag("--dry-run", "Check everything and show it; send nothing.")] = False,
    to_folder: Annotated[Path | None, string("Write the files into a new folder; send nothing.", "FOLDER")] = None,
    json_path: Json = None,
) -> None:
    """Publish heads with tokenizer, settings, figures and card, after checking that others can use them."""
    from hf_drafthead.hub_upload import Target, push_folder

    check_writable(json_path)
    words = (commit_message, None, private, token, revision, create_pr, None, license, include_base, max_shard_size)
    done = push_folder(folder, Target(repo_id, *words), base=base, dry_run=dry_run, to_folder=to_folder)
    say(*done.lines(), *([] if to_folder is None else [f"the files are in {str(to_folder)!r}"]))
    write_json(json_path, done.to_json())
    if done.refused and to_folder is None:
        raise typer.Exit(1)


@app.command(
    "serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run_serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its Hub id.")] = None,
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
