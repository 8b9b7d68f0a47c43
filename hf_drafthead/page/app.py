"""The page itself: its fields, what it shows, and what happens when a button is pressed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
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

OWN_TREE = "the model's own"
REFRESH = 0.1  # seconds between two looks at what was written
COLOURS = ("#2e9e4f", "#1496a8", "#3b6fd4", "#9b51c9", "#d0455c", "#c98a12")  # of depths 1, 2 ...; then from the start
FIGURES = ("", "tokens", "seconds", "tokens per second", "steps", "tokens per step")
# of the visitor's own system, so that the page fetches nothing from elsewhere
SANS, MONO = ("ui-sans-serif", "system-ui", "sans-serif"), ("ui-monospace", "monospace")


def shown(
    model: Any,
    tokenizer: Any,
    prompt: str,
    chat: bool = False,
    tree: str = OWN_TREE,
    temperature: float = 0,
    max_new_tokens: int = 128,
    copies: int = 0,
    seed: int = 0,
) -> Iterator[dict[str, Any]]:
    """What is to be shown while the heads, and then the base, continue a prompt, by the names of the outputs.

    chat: whether the prompt is a question, in the chat template; tree: `OWN_TREE`, a name that `draft_tree` takes, or
    rank paths as JSON; copies: tokens copied from the text in each step. A `gr.Error` of one line, where the prompt or
    a setting cannot be used.
    """
    how = {"max_new_tokens": max_new_tokens, **sampling(temperature), "special_tokens": not chat}
    try:
        if not prompt.strip():
            raise ValueError("the prompt is empty: write the text that the model shall continue.")
        text = chat_text(tokenizer, [{"role": "user", "content": prompt}]) if chat else prompt
        inputs = encode(model, tokenizer, [text], special_tokens=not chat)
        check_room(model, inputs["input_ids"].shape[1], max_new_tokens)
        name, before, written = tree.strip(), [] if chat else [(prompt, None)], dict[str, Sample]()
        of_heads: dict[str, Any] = {"prompt_lookup_num_tokens": copies} if copies else {}
        if name not in ("", OWN_TREE):
            of_heads["tree"] = DraftTree.from_json(name) if name.startswith("[") else name
        yield {HEADS: before, BASE: before, "figures": [], "verdict": ""}
        for side, more in ((HEADS, of_heads), (BASE, {"alone": True})):
            torch.manual_seed(seed)
            for pieces, written[side] in streamed(model, tokenizer, text, **how, **more):
                yield {side: [*before, *map(labelled, pieces)]}
            yield {"figures": [figures_row(*pair) for pair in written.items()]}
        del how["special_tokens"]
        call = BaseCall(model.base, inputs, as_tokens(model, how, tokenizer), seed)
        yield {"verdict": verdict(call, written[HEADS], written[BASE])}
    except (OSError, TypeError, ValueError) as error:
        raise gr.Error(f"{one_line(error)}.", print_exception=False) from error
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise gr.Error("Out of memory: ask for fewer new tokens.", print_exception=False) from error


def streamed(model: Any, tokenizer: Any, text: str, **how: Any) -> Iterator[tuple[list[Piece], Any]]:
    """The pieces so far, again and again while a thread writes, and at the end the `Sample` too; whoever reads no
    further ends the thread."""
    pieces, stop = list[Piece](), threading.Event()

    def keep(text: str, depth: int) -> None:
        if stop.is_set():
            raise CancelledError
        pieces.append((text, depth))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(sample, model, tokenizer, text, on_piece=keep, **how)
        try:
            while not writing.done():
                wait([writing], timeout=REFRESH)
                yield list(pieces), None
        finally:
            stop.set()
        yield list(pieces), writing.result()


def verdict(call: BaseCall, ours: Sample, theirs: Sample) -> str:
    """What the texts of the heads and of the base say about each other, as Markdown."""
    if not ours.steps:
        return "These settings are decoded by the base itself, without guesses: the log names the reason."
    same = "the same text"
    if ours.tokens != theirs.tokens:
        parted = call.first_difference(0, theirs.tokens, ours.tokens)
        tie = f"different texts after token {parted.position}, where rounding decides a near tie"
        same = tie if parted.near_tie else "**different texts**"
    return f"Speedup **{theirs.seconds / ours.seconds:.2f}**. Heads and base wrote {same}."


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
    """The page of one model, to be launched: with a switch for chats where the tokenizer has a template for them."""
    for alone in (False, True):  # what happens in the first call only
        sample(model, tokenizer, "1, 2, 3", alone=alone, max_new_tokens=4)
    chats = bool(tokenizer.chat_template)
    names = [*(f"depth {depth}" for depth in range(1, (model.drafter.max_depth or len(COLOURS)) + 1)), "copied"]
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    number: dict[str, Any] = {"precision": 0, "minimum": 0}
    text: dict[str, Any] = {"color_map": colours, "show_inline_category": False, "show_whitespaces": True}
    trees: dict[str, Any] = {"allow_custom_value": True, "info": "A name, or rank paths such as [[0], [1], [0, 0]]."}
    with gr.Blocks(title=f"Draft heads: {name_of(model)}", analytics_enabled=False, fill_width=True) as blocks:
        gr.Markdown(heading(model))
        with gr.Row():
            with gr.Column(scale=3):
                prompt = gr.Textbox(label="Prompt", lines=5, elem_id="prompt")
                chat = gr.Checkbox(chats, label="A question, in the chat template", visible=chats, elem_id="chat")
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
            with gr.Column(scale=2):
                tree = gr.Dropdown([OWN_TREE, *published_trees()], value=OWN_TREE, label="Draft tree", **trees)
                heat = gr.Slider(0, 2, 0, step=0.05, label="Temperature (0 is greedy)")
                with gr.Row():
                    length = gr.Number(max_new_tokens, label="New tokens", elem_id="length", **number)
                    copies = gr.Number(0, label="Copied tokens", **number)
                    seed = gr.Number(0, label="Seed", **number)
        outputs: dict[str, Any] = {"verdict": gr.Markdown(elem_id="verdict")}
        outputs["figures"] = gr.Dataframe(headers=list(FIGURES), interactive=False, elem_id="figures")
        with gr.Row():
            outputs[HEADS] = gr.HighlightedText(label="With draft heads", show_legend=True, elem_id=HEADS, **text)
            outputs[BASE] = gr.HighlightedText(label="Base alone", elem_id=BASE, **text)

        def run(*asked: Any) -> Iterator[dict[Any, Any]]:
            for values in shown(model, tokenizer, *asked):
                yield {outputs[name]: value for name, value in values.items()}

        asked = [prompt, chat, tree, heat, length, copies, seed]
        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # one generation at a time: two would share the device, and neither would be measured as it is alone
        writing = generate.click(run, asked, list(outputs.values()), concurrency_limit=1, **quiet)
        stop.click(None, cancels=[writing])
    return blocks


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
