"""`hf-drafthead page`: a model with draft heads in the browser."""

from importlib.util import find_spec
from typing import Annotated

import typer

from hf_drafthead.cli.common import Loading, ModelName, app, options_of_groups


@app.command()
@options_of_groups
def page(
    model: ModelName,
    loading: Loading,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Initial value of the page's setting.")] = 128,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")] = 7860,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Open a page in the browser: base and heads side by side, guesses in colour, the draft tree of every step."""
    if find_spec("gradio") is None:
        raise OSError("the page needs gradio: pip install 'hf-drafthead[page]'.")
    from hf_drafthead.page.app import build, launch

    loaded, tokenizer = loading.load(model)
    blocks = build(loaded, tokenizer, max_new_tokens=max_new_tokens)
    launch(blocks, host=host, port=port, open_browser=open_browser)
