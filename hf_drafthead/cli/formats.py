"""`hf-drafthead convert` and `export`: heads from other projects, and heads for them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hf_drafthead.cli.common import Json, ModelName, app, check_writable, flag, parse_options, say, string, write_json

Revision = Annotated[str | None, string("Branch, tag or commit on the Hub.")]
Token = Annotated[str | None, string("Of the Hub, instead of that of `hf auth login`.")]


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
    fold_bias: Annotated[bool, flag("--fold-bias", "EAGLE to vLLM: the bias of fc as separate embeddings.")] = False,
    revision: Revision = None,
    token: Token = None,
    json_path: Json = None,
) -> None:
    """Write heads in another project's layout, refusing what that project would silently damage."""
    from hf_drafthead.formats import export_checkpoint

    check_writable(json_path)
    done = export_checkpoint(model, folder, to, fold_bias=fold_bias, revision=revision, token=token)
    say(f"{len(done.shapes)} tensors of the layout {done.layout} in {done.folder}")
    say(*(f"note: {note}" for note in done.notes))
    write_json(json_path, asdict(done))
