"""The page itself: its fields, what it shows, and what happens when a button is pressed."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read on import: a local page reports nothing to anybody

import gradio as gr
import torch

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.data.texts import one_line
from hf_drafthead.evaluation.calls import BASE, HEADS, as_tokens, check_room, encode, sampling
from hf_drafthead.evaluation.conversation import Piece, Sample, sample
from hf_drafthead.evaluation.measurement import COPIED
from hf_drafthead.evaluation.questions import chat_text
from hf_drafthead.evaluation.rounding import BaseCall
from hf_drafthead.generation.tree import DraftTree, published_trees

Message = dict[str, str]  # role and content, as chat templates take them
Write = Callable[[Callable[[str, int], object]], Sample]  # from what is called with each piece to what was written
CHAT, TEXT = "Chat", "Continue a text"
OWN_TREE = "the model's own"
REFRESH = 0.1  # seconds between two looks at what was written
COLOURS = ("#2e9e4f", "#1496a8", "#3b6fd4", "#9b51c9", "#d0455c", "#c98a12")  # of depths 1, 2 ...; then from the start
FIGURES = ("", "tokens", "seconds", "tokens per second", "steps", "tokens per step")
# of the visitor's own system, so that the page fetches nothing from elsewhere
SANS, MONO = ("ui-sans-serif", "system-ui", "sans-serif"), ("ui-monospace", "monospace")


class Stopped(Exception):
    """Raised inside a generation that was asked to stop."""


@dataclass(frozen=True)
class Asked:
    """What a visitor asks for: a prompt or the next message, and the settings."""

    written: str
    chat: bool  # whether the chat template applies
    messages: list[Message]  # the conversation so far
    tree: str  # `OWN_TREE`, a name that `draft_tree` takes, or rank paths as JSON
    temperature: float  # 0 is greedy
    max_new_tokens: int
    copies: int  # tokens copied from the text in each step
    seed: int  # of the sampling

    @property
    def conversation(self) -> list[Message]:
        return [*self.messages, {"role": "user", "content": self.written}]

    @property
    def settings(self) -> dict[str, Any]:
        return {"max_new_tokens": self.max_new_tokens, **sampling(self.temperature)}

    def prompt(self, model: Any, tokenizer: Any) -> str:
        """The text that both continue; a ValueError where it is empty or too long."""
        if not self.written.strip():
            raise ValueError("the prompt is empty: write the text that the model shall continue.")
        text = chat_text(tokenizer, self.conversation) if self.chat else self.written
        length = encode(model, tokenizer, [text], special_tokens=not self.chat)["input_ids"].shape[1]
        check_room(model, length, self.max_new_tokens)
        return text

    def writers(self, model: Any, tokenizer: Any) -> dict[str, Write]:
        """Heads and base, each from the same seed."""
        text, name = self.prompt(model, tokenizer), self.tree.strip()
        tree: Any = None if name in ("", OWN_TREE) else DraftTree.from_json(name) if name.startswith("[") else name
        copies = {"prompt_lookup_num_tokens": self.copies} if self.copies else {}

        def writer(of_heads: dict[str, Any]) -> Write:
            def write(on_piece: Callable[[str, int], object]) -> Sample:
                torch.manual_seed(self.seed)
                how = {**self.settings, **of_heads, "on_piece": on_piece, "special_tokens": not self.chat}
                return sample(model, tokenizer, text, **how)

            return write

        return {HEADS: writer({"tree": tree, **copies}), BASE: writer({"alone": True})}

    def verdict(self, model: Any, tokenizer: Any, written: dict[str, Sample]) -> str:
        """What the two texts say about each other, as Markdown."""
        ours, theirs = written[HEADS], written[BASE]
        if not ours.steps:
            return "These settings are decoded by the base itself, without guesses: the log names the reason."
        same = "the same text"
        if ours.tokens != theirs.tokens:
            same = "**different texts**"
            inputs = encode(model, tokenizer, [self.prompt(model, tokenizer)], special_tokens=not self.chat)
            call = BaseCall(model.base, inputs, as_tokens(model, self.settings, tokenizer), self.seed)
            parted = call.first_difference(0, theirs.tokens, ours.tokens)
            if parted.near_tie:
                same = f"different texts after token {parted.position}, where rounding decides a near tie"
        return f"Speedup **{theirs.seconds / ours.seconds:.2f}**. Heads and base wrote {same}."


class Page:
    """One model; methods return what to show, by the names of the outputs."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model, self.tokenizer = model, tokenizer
        self._stops: dict[str | None, threading.Event] = defaultdict(threading.Event)  # by visitor

    def generate(self, asked: Asked, visitor: str | None) -> Iterator[dict[str, Any]]:
        """Decode one prompt with heads and base; a `gr.Error` of one line, where it or a setting cannot be used."""
        stop, written = self._stops[visitor], dict[str, Sample]()
        stop.clear()
        try:
            writers = asked.writers(self.model, self.tokenizer)
            before = [] if asked.chat else [(asked.written, None)]
            yield {HEADS: before, BASE: before, "figures": [], "verdict": ""}
            for name, write in writers.items():
                for pieces, written[name] in streamed(write, stop):
                    yield {name: [*before, *map(labelled, pieces)]}
                yield {"figures": [figures_row(*pair) for pair in written.items()]}
            yield {"verdict": asked.verdict(self.model, self.tokenizer, written)}
        except Stopped:
            return
        except (OSError, TypeError, ValueError) as error:
            raise gr.Error(f"{one_line(error)}.", print_exception=False) from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise gr.Error("Out of memory: ask for fewer new tokens.", print_exception=False) from error
        if asked.chat:
            messages = [*asked.conversation, {"role": "assistant", "content": written[HEADS].text}]
            yield {"messages": messages, "chat": messages, "written": ""}

    def stop(self, visitor: str | None) -> None:
        self._stops[visitor].set()


def streamed(write: Write, stop: threading.Event) -> Iterator[tuple[list[Piece], Any]]:
    """The pieces so far, again and again while a thread writes, and at the end what was written too; a Stopped where it
    was asked to stop."""
    pieces: list[Piece] = []

    def keep(text: str, depth: int) -> None:
        if stop.is_set():
            raise Stopped
        pieces.append((text, depth))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write, keep)
        try:
            while not writing.done():
                wait([writing], timeout=REFRESH)
                yield list(pieces), None
        except GeneratorExit:  # nobody reads on
            stop.set()
            raise
        yield list(pieces), writing.result()


def labelled(piece: Piece) -> tuple[str, str | None]:
    """A piece of text and the name of its colour; the base's own tokens have none."""
    text, depth = piece
    return text, "copied" if depth == COPIED else f"depth {depth}" if depth else None


def figures_row(name: str, written: Sample) -> list[str]:
    """How much a side has written, how fast, and in how many steps after the prompt's forward."""
    steps = written.steps or written.new_tokens - 1
    per_step = "-" if written.tokens_per_step is None else f"{written.tokens_per_step:.2f}"
    pace = f"{written.new_tokens / written.seconds:.1f}"
    return [name, str(written.new_tokens), f"{written.seconds:.2f}", pace, str(steps), per_step]


def build(model: Any, tokenizer: Any, *, max_new_tokens: int = 128) -> gr.Blocks:
    """The page of one model, to be launched: with a chat where the tokenizer has a template for it."""
    for alone in (False, True):  # what happens in the first call only
        sample(model, tokenizer, "1, 2, 3", alone=alone, max_new_tokens=4)
    page, chats = Page(model, tokenizer), bool(tokenizer.chat_template)
    modes = [CHAT, TEXT] if chats else [TEXT]
    names = [*(f"depth {depth}" for depth in range(1, (model.drafter.max_depth or len(COLOURS)) + 1)), "copied"]
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    with gr.Blocks(title=f"Draft heads: {name_of(model)}", analytics_enabled=False, fill_width=True) as blocks:
        gr.Markdown(heading(model))
        inputs: dict[str, Any] = {"messages": gr.State([])}
        outputs: dict[str, Any] = {"messages": inputs["messages"]}
        with gr.Row():
            with gr.Column(scale=3):
                outputs["chat"] = gr.Chatbot(visible=chats, render_markdown=False, elem_id="chat")
                inputs["mode"] = gr.Radio(modes, value=modes[0], label="Mode", visible=chats, elem_id="mode")
                inputs["written"] = outputs["written"] = gr.Textbox(label="Prompt", lines=5, elem_id="prompt")
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
                    clear = gr.Button("New conversation", visible=chats, elem_id="clear")
            with gr.Column(scale=2):
                inputs |= settings(max_new_tokens)
        outputs["verdict"] = gr.Markdown(elem_id="verdict")
        outputs["figures"] = gr.Dataframe(headers=list(FIGURES), interactive=False, elem_id="figures")
        with gr.Row():
            shown: dict[str, Any] = {"color_map": colours, "show_inline_category": False, "show_whitespaces": True}
            outputs[HEADS] = gr.HighlightedText(label="With draft heads", show_legend=True, elem_id=HEADS, **shown)
            outputs[BASE] = gr.HighlightedText(label="Base alone", elem_id=BASE, **shown)

        def named(values: dict[str, Any]) -> dict[Any, Any]:
            return {outputs[name]: value for name, value in values.items()}

        def run(values: dict[Any, Any], visitor: gr.Request) -> Iterator[dict[Any, Any]]:
            fields = {name: values[component] for name, component in inputs.items()}
            asked = Asked(chat=fields.pop("mode") == CHAT, **fields)
            yield from map(named, page.generate(asked, visitor.session_hash))

        def end(visitor: gr.Request) -> None:
            page.stop(visitor.session_hash)

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # one generation at a time: two would share the device, and neither would be measured as it is alone
        writing = generate.click(lambda: gr.Button(interactive=False), None, generate, queue=False, **quiet).then(
            run, set(inputs.values()), list(outputs.values()), concurrency_limit=1, **quiet
        )
        for ended in (writing.success, writing.failure):
            ended(lambda: gr.Button(interactive=True), None, generate, queue=False, **quiet)
        stop.click(end, queue=False, **quiet)
        fresh = {"messages": [], "chat": [], HEADS: [], BASE: [], "figures": [], "verdict": ""}
        clear.click(lambda: named(fresh), None, list(outputs.values()), **quiet)
    return blocks


def settings(max_new_tokens: int) -> dict[str, Any]:
    """The fields of the settings, by the names that `Asked` has for them."""
    number: dict[str, Any] = {"precision": 0, "minimum": 0}
    fields: dict[str, Any] = {
        "tree": gr.Dropdown(
            [OWN_TREE, *published_trees()],
            value=OWN_TREE,
            allow_custom_value=True,
            label="Draft tree",
            info="A name, or rank paths such as [[0], [1], [0, 0]].",
            elem_id="tree-choice",
        )
    }
    fields["temperature"] = gr.Slider(0, 2, 0, step=0.05, label="Temperature (0 is greedy)", elem_id="temperature")
    with gr.Row():
        fields["max_new_tokens"] = gr.Number(max_new_tokens, label="New tokens", elem_id="length", **number)
        fields["copies"] = gr.Number(0, label="Copied tokens", elem_id="copies", **number)
        fields["seed"] = gr.Number(0, label="Seed", elem_id="seed", **number)
    return fields


def name_of(model: Any) -> str:
    path = str(model.name_or_path)
    return os.path.basename(os.path.abspath(path) if os.path.isdir(path) else path.rstrip("/")) or "a model"


def heading(model: Any) -> str:
    base = model.config.base_model_name_or_path or model.base.name_or_path
    dtype = str(model.base.dtype).removeprefix("torch.")
    where = f"{dtype} on {model.base.device.type}"
    return f"## {name_of(model)}\n{model.config.family} heads, base: {os.path.basename(str(base).rstrip('/'))}, {where}"


def launch(blocks: gr.Blocks, *, host: str, port: int, open_browser: bool = False, block: bool = True) -> str:
    """Serve a page, until it is interrupted or, without `block`, from a thread; its address. An OSError if the port is
    taken."""
    _, address, _ = blocks.launch(
        server_name=host,
        server_port=port,
        inbrowser=open_browser,
        prevent_thread_lock=True,
        quiet=True,  # else it advises to share the page with everybody
        share=False,
        theme=gr.themes.Default(font=SANS, font_mono=MONO),
        css=".token, .token .text { margin: 0; padding: 0; }",  # words stay whole
        footer_links=[],
    )
    if block:
        print(f"the page is at {address} (Ctrl-C ends it).", flush=True)
        blocks.block_thread()
    return address
