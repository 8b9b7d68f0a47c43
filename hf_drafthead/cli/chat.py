"""`hf-drafthead chat` and `page`: a conversation in the terminal, and a model in the browser."""

import sys
from importlib.util import find_spec
from typing import Annotated

import typer

from hf_drafthead.cli import common
from hf_drafthead.cli.common import count, flag, string


@common.app.command("chat")
@common.options_of_groups
def run_chat(
    model: common.ModelName,
    loading: common.Loading,
    system: common.System = None,
    max_new_tokens: Annotated[int, count("Tokens of an answer, at most.")] = 1024,
    temperature: common.Temperature = None,
    seed: common.SamplingSeed = None,
    tree: common.TreeOption = None,
    lookup: common.Lookup = None,
    color: Annotated[bool, typer.Option("--color/--no-color", help="Colour accepted guesses by their depth.")] = True,
) -> None:
    """Hold a conversation: answers stream, accepted guesses are coloured by depth; /clear starts anew, /exit ends."""
    from transformers import set_seed

    from hf_drafthead.evaluation.calls import sampling
    from hf_drafthead.evaluation.conversation import Conversation

    chosen = None if tree is None else common.parse_tree(tree)
    loaded, tokenizer = loading.load(model)
    settings = {"max_new_tokens": max_new_tokens, **sampling(temperature, lookup)}
    conversation = Conversation(loaded, tokenizer, system=system, tree=chosen, settings=settings)
    if seed is not None:
        set_seed(seed)
    console = common.output()

    def show(piece: str, depth: int) -> None:
        console.print(common.coloured(piece, depth if color else 0), end="", soft_wrap=True)

    if sys.stdin.isatty():
        console.print("/clear starts a new conversation, /exit or Ctrl-D ends.", style="dim")
    while (asked := next_question()) is not None:
        if asked == "/clear":
            conversation.clear()
        elif asked:
            try:
                written = conversation.ask(asked, show)
            except KeyboardInterrupt:
                console.print()
                common.complain("interrupted: the question and its answer are left out of the conversation.")
            except ValueError as error:  # such as no room for an answer: the user can start a new conversation
                common.complain(str(error))
            else:
                console.print()
                common.show_pace(written)


def next_question() -> str | None:
    """The user's next line without white space around it, shown where it comes from a pipe; None at the end."""
    try:
        line = input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    if line == "/exit":
        return None
    if line and not sys.stdin.isatty():
        print(f"> {line}")
    return line


@common.app.command()
@common.options_of_groups
def page(
    model: common.ModelName,
    loading: common.Loading,
    max_new_tokens: Annotated[int, count("Initial value of the page's setting.")] = 128,
    host: Annotated[str, string("Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen on.")] = 7860,
    open_browser: Annotated[bool, flag("--open", "Open the page in the browser.")] = False,
) -> None:
    """Open a page in the browser: base and heads side by side, guesses in colour, the draft tree of every step."""
    if find_spec("gradio") is None:
        raise OSError("the page needs gradio: pip install 'hf-drafthead[page]'.")
    from hf_drafthead.page.app import build, launch

    loaded, tokenizer = loading.load(model)
    blocks = build(loaded, tokenizer, max_new_tokens=max_new_tokens)
    launch(blocks, host=host, port=port, open_browser=open_browser)
