"""`hf-drafthead convert` and `export`, `card`, `push` and `serve`: heads from others, and for them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hf_drafthead.cli.common import Json, ModelName, app, flag, output, parse_options, say, string, write_json

Revision = Annotated[str | None, string("Branch, tag or commit on the Hub.")]
Token = Annotated[str | None, string("Of the Hub, instead of that of `hf auth login`.")]
License = Annotated[str | None, string("License of the heads, such as apache-2.0.", "ID")]


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or Hub id of heads of another project.")],
    folder: Annotated[Path | None, typer.Argument(metavar="[DST]", help="New folder, else they are shown.")] = None,
    base: Annotated[str | None, string("Their base, where the layout does not name it.", "MODEL")] = None,
    base_revision: Annotated[str | None, string("Branch, tag or commit of the base.")] = None,
    option: Annotated[list[str] | None, string("A field that the layout leaves open.", "NAME=VALUE", "--set")] = None,
    revision: Revision = None,
    token: Token = None,
    json_path: Json = None,
) -> None:
    """Convert heads of another project, in any layout that `hf_drafthead.from_pretrained` reads."""
    from hf_drafthead.formats import convert_checkpoint

    where = {"base_model": base, "base_revision": base_revision, "revision": revision, "token": token}
    done = convert_checkpoint(source, folder, fields=parse_options(option or []), **where)
    config = ", ".join(f"{name}={value}" for name, value in done.fields.items() if not isinstance(value, dict))
    about = {"layout": done.layout, "family": done.family, "base": done.base or "not named: --base", "config": config}
    rows = [("found", "tensors", "became"), *done.table()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    say(*(f"{name:<8} {value}" for name, value in about.items()))
    say(*(f"{theirs:<{widths[0]}}  {shape:<{widths[1]}}  {ours}" for theirs, shape, ours in rows))
    say(*(f"left out: {name}: {reason}" for name, reason in done.dropped.items()))
    say(*(f"note: {note}" for note in done.notes), *([f"the heads are in {done.folder}"] if done.folder else []))
    write_json(json_path, asdict(done))


@app.command()
def export(
    model: ModelName,
    folder: Annotated[Path, typer.Argument(metavar="DST", help="New folder to write to.")],
    to: Annotated[str, string("medusa, tgi, vllm, hydra, eagle, eagle3, sglang or speculators: what the family has.")],
    revision: Revision = None,
    token: Token = None,
    json_path: Json = None,
) -> None:
    """Write heads in another project's layout, refusing what that project would silently damage."""
    from hf_drafthead.formats import export_checkpoint

    done = export_checkpoint(model, folder, to, revision=revision, token=token)
    say(f"{len(done.shapes)} tensors of the layout {done.layout} in {done.folder}")
    say(*(f"note: {note}" for note in done.notes))
    write_json(json_path, asdict(done))


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a draft-head checkpoint.")],
    license: License = None,
    json_path: Json = None,
) -> None:
    """Write the model card from the facts in a folder; sections that a person wrote stay."""
    from hf_drafthead.cards import missing, write_card
    from hf_drafthead.cards.facts import check_folder

    check_folder(folder)
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
    license: License = None,
    token: Token = None,
    max_shard_size: Annotated[str, string("Of a file of weights, with --include-base.", "SIZE")] = "50GB",
    dry_run: Annotated[bool, flag("--dry-run", "Check everything and show it; send nothing.")] = False,
    json_path: Json = None,
) -> None:
    """Publish heads with tokenizer, settings, figures and card, after checking that others can use them."""
    from hf_drafthead.hub_upload import Target, push_folder

    words = (commit_message, None, private, token, revision, create_pr, None, license)
    done = push_folder(
        folder, Target(repo_id, *words, include_base or None, max_shard_size), base=base, dry_run=dry_run
    )
    say(*done.lines())
    write_json(json_path, done.to_json())
    if done.refused:
        raise typer.Exit(1)


@app.command(
    "serve", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def run_serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help="Folder of a checkpoint, or its Hub id.")] = None,
) -> None:
    """Serve a model with an OpenAI-compatible API."""
    from hf_drafthead import serving

    words = [*([] if model is None else [model]), *context.args]
    if {"-h", "--help"} & set(words):
        output().print(serving.parser().format_help(), highlight=False, markup=False)
        raise typer.Exit()
    if model is None or model.startswith("-"):
        raise ValueError("Missing argument 'MODEL': see `hf-drafthead serve --help`.")
    serving.serve(model, context.args)
