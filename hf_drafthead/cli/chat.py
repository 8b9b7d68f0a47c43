"""`hf-drafthead chat`: a conversation in the terminal."""

import sys
from typing import Annotated

import typer

from hf_drafthead.cli.common import (
    Loading,
    Lookup,
    ModelName,
    SamplingSeed,
    System,
    Temperature,
    TreeOption,
    app,
    coloured,
    complain,
    copying,
    options_of_groups,
    output,
    parse_tree,
    sampling,
    show_pace,
)


@app.command("chat")
@options_of_groups
def run_chat(
    model: ModelName,
    loading: Loading,
    system: System = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens of an answer, at most.")] = 1024,
    temperature: Temperature = None,
    seed: SamplingSeed = None,
    tree: TreeOption = None,
    lookup: Lookup = None,
    color: Annotated[
        bool, typer.Option("--color/--no-color", help="Colour accepted guesses by their depth, and copies.")
    ] = True,
) -> None:
    """Hold a conversation: answers stream, accepted guesses are coloured by depth; /clear starts anew, /exit ends."""
    from transformers import set_seed

    from hf_drafthead.evaluation.conversation import Conversation

    chosen = None if tree is None else parse_tree(tree)
    loaded, tokenizer = loading.load(model)
    settings = {"max_new_tokens": max_new_tokens, **sampling(temperature), **copying(lookup)}
    conversation = Conversation(loaded, tokenizer, system=system, tree=chosen, settings=settings)
    if seed is not None:
        set_seed(seed)
    console = output()

    def show(piece: str, depth: int) -> None:
        console.print(coloured(piece, depth if color else 0), end="", soft_wrap=True)

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
                complain("interrupted: the question and its answer are left out of the conversation.")
            except ValueError as error:  # such as no room for an answer: the user can start a new conversation
                complain(str(error))
            else:
                console.print()
                show_pace(written)


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
