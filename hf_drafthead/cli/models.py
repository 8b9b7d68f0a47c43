"""`hf-drafthead generate` and `info`: one model, used and described."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from hf_drafthead.cli.common import Json, Model, app, check_writable, coloured, legend, output, parse_tree, write_json


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
