"""`hf-drafthead generate`, `chat`, `page` and `info`: one model, used and described."""

import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli import common
from hf_drafthead.cli.common import amount, count, flag, string
from hf_drafthead.cli.trees import entry_in_words

APART = ("draft_tree", "calibration")  # settings that have lines of their own


@dataclass(frozen=True)
class Writing:
    """The options of every command that prints what a model writes."""

    system: Annotated[str | None, string("System message, in front of the first question of a chat.", "TEXT")] = None
    temperature: Annotated[float | None, amount("0 is greedy; without it the model's own settings hold.")] = None
    seed: Annotated[int | None, count("Seed of the sampling.", 0)] = None
    tree: Annotated[str | None, typer.Option("--tree", "--draft-tree", metavar="TREE", help=common.TREE_HELP)] = None
    lookup: Annotated[int | None, count("Also guess so many tokens copied from the text.")] = None

    def begin(self, name: str, loading: common.Loading, max_new_tokens: int) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Model, tokenizer, tree and settings of `generate`; the random generator is seeded."""
        from transformers import set_seed

        from hf_drafthead.evaluation.calls import sampling

        tree = None if self.tree is None else common.parse_tree(self.tree)
        model, tokenizer = loading.load(name)
        if self.seed is not None:
            set_seed(self.seed)
        return model, tokenizer, tree, {"max_new_tokens": max_new_tokens, **sampling(self.temperature, self.lookup)}


@common.app.command()
@common.options_of_groups
def generate(
    model: common.ModelName,
    loading: common.Loading,
    writing: Writing,
    prompt: Annotated[str | None, string("Text to continue or question of a chat; else of standard input.")] = None,
    raw: Annotated[bool, flag("--raw", "Continue the text as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, count("Tokens to write, at most.")] = 128,
    stream: Annotated[bool, flag("--stream", "Print while writing.")] = False,
    color: Annotated[bool, flag("--color", "Colour accepted guesses by their depth, and copies.")] = False,
    json_path: common.Json = None,
) -> None:
    """Continue a prompt, or answer it where the tokenizer has a chat template."""
    from hf_drafthead.evaluation.conversation import Conversation, sample

    if raw and (writing.system or loading.chat_template):
        raise ValueError("--raw leaves the chat template out: drop it, or drop --system and --chat-template.")
    if prompt is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("there is no prompt: give one with --prompt 'def main(', or pipe a text in.")
    # without the byte order mark of a file
    asked = sys.stdin.read().removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}") if prompt is None else prompt
    if not asked:
        raise ValueError("the prompt is empty: give the text to continue with --prompt 'def main('.")
    loaded, tokenizer, tree, settings = writing.begin(model, loading, max_new_tokens)
    console = common.output(color)

    def show(piece: str, depth: int) -> None:
        if color:
            console.print(Text(piece, style=common.colour_of(depth)), end="", soft_wrap=True)
        else:
            print(piece, end="", flush=True)  # not through the console, which would expand tabs

    on_piece = show if stream else (lambda piece, depth: None) if color else None  # which tells copies apart
    if writing.system or (tokenizer.chat_template and not raw):
        conversation = Conversation(loaded, tokenizer, system=writing.system, tree=tree, settings=settings)
        written = conversation.ask(asked.rstrip("\n"), on_piece)
    else:
        written = sample(loaded, tokenizer, asked, tree=tree, on_piece=on_piece, **settings)
    if not stream:
        for piece, depth in written.pieces:
            show(piece, depth)
    console.print()
    if color:
        console.print(common.legend(written.pieces))
    common.show_pace(written)
    common.write_json(json_path, vars(written))


@common.app.command("chat")
@common.options_of_groups
def run_chat(
    model: common.ModelName,
    loading: common.Loading,
    writing: Writing,
    max_new_tokens: Annotated[int, count("Tokens of an answer, at most.")] = 1024,
    color: Annotated[bool, typer.Option("--color/--no-color", help="Colour accepted guesses by their depth.")] = True,
) -> None:
    """Hold a conversation: answers stream, accepted guesses are coloured by depth; /clear starts anew, /exit ends."""
    from hf_drafthead.evaluation.conversation import Conversation

    loaded, tokenizer, tree, settings = writing.begin(model, loading, max_new_tokens)
    conversation = Conversation(loaded, tokenizer, system=writing.system, tree=tree, settings=settings)
    console = common.output()

    def show(piece: str, depth: int) -> None:
        console.print(Text(piece, style=common.colour_of(depth if color else 0)), end="", soft_wrap=True)

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
    """Open a page in the browser: heads and base continue one prompt, guesses in colour."""
    if find_spec("gradio") is None:
        raise OSError("the page needs gradio: pip install 'hf-drafthead[page]'.")
    from hf_drafthead.page.app import build, launch

    loaded, tokenizer = loading.load(model)
    blocks = build(loaded, tokenizer, max_new_tokens=max_new_tokens)
    launch(blocks, host=host, port=port, open_browser=open_browser)


@common.app.command()
@common.options_of_groups
def info(
    model: common.ModelName,
    loading: common.Loading,
    try_base: Annotated[bool, flag("--probe", "Load the base too and try whether the heads draft on it.")] = False,
    draw: Annotated[bool, flag("--draw", "Draw the draft tree too.")] = False,
    json_path: common.Json = None,
) -> None:
    """Say what an id is; of heads of this library family, base, parameters, memory, tree and settings.

    Options that say how to load the base imply --probe.
    """
    from hf_drafthead.evaluation.loading import summarize, try_on_base
    from hf_drafthead.generation.tree import DraftTree

    loading.checked()  # before anything is read
    if (found := what_else(model)) is not None:
        for name, value in found.items():
            common.output().print(Text(common.printable(f"{name:<14} {value}")), soft_wrap=True)
        return common.write_json(json_path, found)
    summary = summarize(model)
    probed = try_on_base(loading.load(model)[0]) if try_base or loading != common.Loading() else None
    console = common.output()
    for name, value in rows_of(summary, probed):
        console.print(Text(common.printable(f"{name:<14} {value}")), soft_wrap=True)
    if draw and summary["tree"] is not None:
        console.print(f"{'drawn':<14} each line a rank among its siblings")
        console.print(Text(DraftTree(summary["tree"]).draw()))
    common.write_json(json_path, {**summary, **({} if probed is None else {"probe": probed})})


def what_else(model: str) -> dict[str, str] | None:
    """What `info` says of an id that is no checkpoint of this library, without its weights; None of one that is."""
    from hf_drafthead.door import BASE, DRAFTER, recognize

    found = recognize(model)
    if found.kind not in (BASE, DRAFTER):
        return None
    how = f"by {found.modules} module(s) of its own" if found.modules else "by copies of the text"
    about = {"base": found.base or "not named"} if found.kind == DRAFTER else {"drafts": how}
    return {"model": model, "is": f"{found.kind} ({found.by})", **about, "load": found.line}


def rows_of(summary: dict[str, Any], probed: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What `info` prints of a checkpoint, and of its base where that was tried."""
    settings, included = summary["settings"], ", included" if summary["base_included"] else ""
    rows = [
        ("family", summary["family"]),
        ("base", f"{summary['base'] or 'not named'} ({summary['base_type']}{included})"),
        ("base revision", summary["base_revision"] or "not recorded"),
        ("draft heads", str(summary["draft_heads"])),
        ("parameters", f"{summary['parameters']:,}"),
        ("memory added", f"{summary['memory'] / 2**20:.1f} MiB ({summary['dtype']})"),
        ("heads", ", ".join(f"{name}={value}" for name, value in summary["fields"].items())),
        ("settings", ", ".join(f"{name}={value}" for name, value in settings.items() if name not in APART)),
    ]
    if probed is None:
        rows.append(("drafts", "not tried: --probe loads the base and tries"))
    else:
        weights = f"{probed['base_parameters']:,} parameters, {probed['memory'] / 2**20:.1f} MiB with the heads"
        rows.append(("on its base", f"{weights} ({probed['dtype']}, {probed['device']})"))
        rows.append(("calls draft", probed["plan"]))
        rows.append(("drafts", "yes" if probed["drafts"] else f"no, the base decodes by itself: {probed['why_not']}"))
    chosen = settings.get("draft_tree")
    if summary["tree"] is not None:
        name = f"{chosen}: " if isinstance(chosen, str) else ""
        depth = max(map(len, summary["tree"]), default=0)
        rows.append(("draft tree", f"{name}{summary['tree_nodes']} nodes, {depth} guesses deep (--draw draws it)"))
    elif chosen is not None:
        rows.append(("draft tree", str(chosen)))
    for entry in settings.get("calibration") or []:
        with suppress(AttributeError, LookupError, TypeError):  # of another version
            rows.append(("calibrated", entry_in_words(entry)))
    return [(name, value) for name, value in rows if value]
