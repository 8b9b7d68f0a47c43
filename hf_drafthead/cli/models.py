"""`hf-drafthead generate` and `info`: one model, used and described."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli.common import (
    BaseModel,
    Device,
    Dtype,
    Json,
    Model,
    RemoteCode,
    SamplingSeed,
    System,
    Temperature,
    Template,
    Tree,
    app,
    check_writable,
    coloured,
    legend,
    load_model,
    output,
    parse_tree,
    printable,
    sampling,
    show_pace,
    write_json,
    write_picture,
)

CALIBRATED_FOR = ("device", "threads", "dtype", "batch_size", "execution")
APART = ("draft_tree", "calibration")  # settings that have lines of their own


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue, or question of a chat; without it standard input is read.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    system: System = None,
    chat_template: Template = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write, at most.")] = 128,
    temperature: Temperature = None,
    seed: SamplingSeed = None,
    tree: Tree = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print while writing.")] = False,
    color: Annotated[bool, typer.Option("--color", help="Colour accepted guesses by their depth.")] = False,
    svg: Annotated[Path | None, typer.Option(metavar="PATH", help="Also write the coloured text as a picture.")] = None,
    device: Device = None,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    trust_remote_code: RemoteCode = False,
    json_path: Json = None,
) -> None:
    """Continue a prompt, or answer it where the tokenizer has a chat template."""
    from transformers import set_seed

    from hf_drafthead.evaluation.conversation import chat_text, need_template
    from hf_drafthead.evaluation.sample import sample

    check_writable(json_path)
    check_writable(svg, "--svg")
    if raw and (system or chat_template):
        raise ValueError("--raw leaves the chat template out: drop it, or drop --system and --chat-template.")
    asked = read_standard_input() if prompt is None else prompt
    if not asked:
        raise ValueError("the prompt is empty: give the text to continue with --prompt 'def main('.")
    chosen = None if tree is None else parse_tree(tree)
    loaded, tokenizer = load_model(model, chat_template, dtype, device, base_model, trust_remote_code)
    if system:
        need_template(tokenizer)
    chat = bool(tokenizer.chat_template) and not raw
    text = asked
    if chat:
        said = [{"role": "system", "content": system}] if system else []
        text = chat_text(tokenizer, [*said, {"role": "user", "content": asked.rstrip("\n")}], "the prompt")
    if seed is not None:
        set_seed(seed)
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, **sampling(temperature)}
    console = output(color)

    def show(piece: str, depth: int) -> None:
        if color:
            console.print(coloured(piece, depth), end="", soft_wrap=True)
        else:
            print(piece, end="", flush=True)  # not through the console, which would expand tabs

    written = sample(
        loaded, tokenizer, text, tree=chosen, on_piece=show if stream else None, special_tokens=not chat, **settings
    )
    if not stream:
        for piece, depth in written.pieces:
            show(piece, depth)
    console.print()
    if color:
        console.print(legend(written.pieces))
    show_pace(written)
    if svg is not None:
        write_picture(svg, f"hf-drafthead generate {Path(model).name} --color", asked, written.pieces)
    write_json(json_path, vars(written))


def read_standard_input() -> str:
    """All of standard input.

    Raises:
        ValueError: it is a terminal, so no text was piped in.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("there is no prompt: give one with --prompt 'def main(', or pipe a text in.")
    return sys.stdin.read()


@app.command()
def info(
    model: Model,
    try_base: Annotated[
        bool, typer.Option("--probe", help="Load the base too and try whether the heads draft on it.")
    ] = False,
    device: Device = None,
    dtype: Dtype = "auto",
    base_model: BaseModel = None,
    trust_remote_code: RemoteCode = False,
    json_path: Json = None,
) -> None:
    """Show a checkpoint: family, base, heads, parameters, memory, tree and settings.

    Options that say how to load the base imply --probe.
    """
    from hf_drafthead.evaluation.load_options import LoadOptions, load_here
    from hf_drafthead.evaluation.summary import probe, summarize

    check_writable(json_path)
    options = LoadOptions(dtype, device, base_model, trust_remote_code)
    found = summarize(model)
    tried = probe(load_here(model, options)[0]) if try_base or options != LoadOptions() else None
    rows = {
        "family": found.family,
        "base": f"{found.base or 'not named'} ({found.base_type}{', included' if found.base_included else ''})",
        "base revision": found.base_revision or "not recorded",
        "draft heads": str(found.draft_heads),
        "parameters": f"{found.parameters:,}",
        "memory added": f"{found.memory / 2**20:.1f} MiB ({found.dtype})",
        "heads": ", ".join(f"{name}={value}" for name, value in found.fields.items()),
        "settings": ", ".join(f"{name}={value}" for name, value in found.settings.items() if name not in APART),
    }
    if tried is not None:
        rows["on its base"] = (
            f"{tried.base_parameters:,} parameters, {tried.memory / 2**20:.1f} MiB with the heads "
            f"({tried.dtype}, {tried.device})"
        )
        rows["drafts"] = "yes" if tried.drafts else f"no, the base decodes by itself: {tried.why_not}"
    else:
        rows["drafts"] = "not tried: --probe loads the base and tries"
    console = output()
    for name, value in rows.items():
        if value:
            console.print(Text(printable(f"{name:<14} {value}")), soft_wrap=True)
    if found.tree is not None:
        chosen = found.settings["draft_tree"]
        named = f"{printable(chosen)}: " if isinstance(chosen, str) else ""
        console.print(f"{'draft tree':<14} {named}{found.tree.num_nodes} nodes, each line a rank among its siblings")
        console.print(Text(found.tree.draw()))
    elif found.settings.get("draft_tree") is not None:
        console.print(Text(printable(f"{'draft tree':<14} {found.settings['draft_tree']}")), soft_wrap=True)
    for line in calibrated(found.settings.get("calibration")):
        console.print(Text(printable(f"{'calibrated':<14} {line}")), soft_wrap=True)
    write_json(json_path, {**found.to_json(), **({} if tried is None else {"probe": vars(tried)})})


def calibrated(entries: Any) -> list[str]:
    """A line for each entry of a calibration, as far as it can be read."""
    lines = []
    for entry in entries if isinstance(entries, list) else []:
        if isinstance(entry, dict) and isinstance(entry.get("tree"), list):
            told = ", ".join(f"{name} {entry[name]}" for name in CALIBRATED_FOR if entry.get(name) is not None)
            nodes = len(entry["tree"]) + 1
            lines.append(f"{nodes} {'node' if nodes == 1 else 'nodes'}: {told}")
    return lines
