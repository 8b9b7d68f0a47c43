"""`hf-drafthead convert` and `export`: heads from other projects, and heads for them."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from hf_drafthead.cli.common import Json, ModelName, app, check_writable, output, parse_options, write_json

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")]
Token = Annotated[str | None, typer.Option(help="Of the Hub, instead of that of `hf auth login`.")]


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder, file or Hub id of heads of another project.")],
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DST]", help="New folder for the heads; without it they are only shown.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Their base, where the layout does not name it.")
    ] = None,
    base_revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of the base.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A config field that the layout leaves open (repeatable)."),
    ] = None,
    revision: Revision = None,
    token: Token = None,
    json_path: Json = None,
) -> None:
    """Convert heads of another project: Medusa, Hydra, EAGLE or EAGLE-3 in any of their layouts."""
    from hf_drafthead.formats import convert_checkpoint

    check_writable(json_path)
    done = convert_checkpoint(
        source,
        folder,
        base_model=base,
        base_revision=base_revision,
        fields=parse_options(option or []),
        revision=revision,
        token=token,
    )
    console = output()
    config = ", ".join(f"{name}={value}" for name, value in done.fields.items() if not isinstance(value, dict))
    for name, value in (("layout", done.layout), ("family", done.family), ("base", done.base or "not named: --base")):
        console.print(Text(f"{name:<8} {value}"), soft_wrap=True)
    console.print(Text(f"{'config':<8} {config}"), soft_wrap=True)
    rows = [("found", "tensors", "became"), *done.table()]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for theirs, shape, ours in rows:
        console.print(Text(f"{theirs:<{widths[0]}}  {shape:<{widths[1]}}  {ours}"), soft_wrap=True)
    for name, reason in done.dropped.items():
        console.print(Text(f"left out: {name}: {reason}"), soft_wrap=True)
    for note in done.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    if done.folder:
        console.print(Text(f"the heads are in {done.folder}"), soft_wrap=True)
    write_json(json_path, done.to_json())


@app.command()
def export(
    model: ModelName,
    folder: Annotated[Path, typer.Argument(metavar="DST", help="New folder to write to.")],
    to: Annotated[
        str, typer.Option(help="medusa, tgi, vllm, hydra, eagle, eagle3, sglang or speculators: what the family has.")
    ],
    fold_bias: Annotated[
        bool, typer.Option("--fold-bias", help="EAGLE to vLLM: move the bias of fc into separate embeddings.")
    ] = False,
    revision: Revision = None,
    token: Token = None,
    json_path: Json = None,
) -> None:
    """Write heads in another project's layout, refusing what that project would silently damage."""
    from hf_drafthead.formats import export_checkpoint

    check_writable(json_path)
    done = export_checkpoint(model, folder, to, fold_bias=fold_bias, revision=revision, token=token)
    console = output()
    console.print(Text(f"{len(done.shapes)} tensors of the layout {done.layout} in {done.folder}"), soft_wrap=True)
    for note in done.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    write_json(json_path, done.to_json())
