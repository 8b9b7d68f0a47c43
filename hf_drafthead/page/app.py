"""The page itself: its fields, what it shows, and what happens when a button is pressed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # read on import: a local page reports nothing to anybody

import gradio as gr

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.data.texts import one_line
from hf_drafthead.evaluation.calls import as_tokens, draft, encode
from hf_drafthead.generation.settings import ACCEPTANCES
from hf_drafthead.generation.tree import DraftTree, published_trees
from hf_drafthead.page import drawing
from hf_drafthead.page.comparison import BASE, HEADS, OWN_TREE, Asked, SideBySide, WalkedStep

CHAT, TEXT = "Chat", "Continue a text"
DEEPEST = 5  # depths that the legend names where the heads have no limit of their own
# of the visitor's own system, so that the page fetches nothing from elsewhere
SANS, MONO = ("ui-sans-serif", "system-ui", "sans-serif"), ("ui-monospace", "monospace")


class Page:
    """One model and the generation that is running on it; methods return what to show, by the names of the outputs."""

    def __init__(self, model: Any, tokenizer: Any):
        self.model = model
        self.tokenizer = tokenizer
        self._running: tuple[str | None, SideBySide] | None = None  # and the visitor who started it

    def generate(self, asked: Asked, visitor: str | None) -> Iterator[dict[str, Any]]:
        """Decode one prompt on both sides; a `gr.Error` of one line, where the input or a setting cannot be used."""
        try:
            running = asked.comparison(self.model, self.tokenizer)
            before = drawing.conversation(asked.conversation) if asked.chat else drawing.prompt(asked.written)
            self._running = (visitor, running)
            for _ in running.run():
                yield self._shown(running, before)
        except (OSError, TypeError, ValueError) as error:
            raise gr.Error(f"{one_line(error)}.", print_exception=False) from error
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            raise gr.Error("Out of memory: ask for fewer new tokens.", print_exception=False) from error
        finally:
            self._running = None
        steps = list(running.sides[HEADS].steps)
        yield {
            "steps": (running.tree, steps),
            "step": gr.Slider(maximum=max(len(steps), 2), value=max(len(steps), 1), interactive=len(steps) > 1),
        }
        if asked.chat:
            answer = self.tokenizer.decode(running.sides[HEADS].tokens, skip_special_tokens=True)
            yield {"messages": [*asked.conversation, {"role": "assistant", "content": answer}], "written": ""}

    def stop(self, visitor: str | None) -> None:
        if self._running is not None and self._running[0] == visitor:
            self._running[1].stop()

    def show_step(self, tree: DraftTree | None, steps: list[WalkedStep], number: int) -> dict[str, Any]:
        """The tree of one step, counted from 1."""
        if tree is None or not 1 <= number <= len(steps):
            return {}
        return {
            "tree": drawing.tree(self.tokenizer, tree, steps, number - 1),
            "walked": drawing.step_in_words(tree, steps, number - 1),
        }

    def _shown(self, running: SideBySide, before: str) -> dict[str, Any]:
        shown = {"verdict": verdict(running)}
        for name in (HEADS, BASE):
            side = running.sides.get(name)
            shown[f"{name}_text"] = drawing.text(self.tokenizer, side, before) if side else ""
            shown[f"{name}_figures"] = drawing.figures_row(side) if side else ""
        steps = list(running.sides[HEADS].steps)
        return {**shown, **self.show_step(running.tree, steps, len(steps))}


def verdict(running: SideBySide) -> str:
    """What the two sides say about each other, as Markdown; empty while they write."""
    if running.sides[HEADS].drafted is False:
        return "These settings are decoded by the base itself, without guesses: the log names the reason."
    if running.same is None:
        return ""
    difference = running.difference
    wrote = "the same text" if running.same else "**different texts**"
    if difference is not None and difference.near_tie:
        wrote = (
            f"different texts after token {difference.position}, by rounding: there the two best tokens are "
            f"{difference.margin:.3g} apart in the logits"
        )
    return f"Speedup **{running.speedup or 0:.2f}**. Heads and base wrote {wrote}."


def build(model: Any, tokenizer: Any, *, max_new_tokens: int = 128) -> gr.Blocks:
    """The page of one model, to be launched: with a chat where the tokenizer has a template for it."""
    warm_up(model, tokenizer)
    page = Page(model, tokenizer)
    modes = [CHAT, TEXT] if tokenizer.chat_template else [TEXT]
    with gr.Blocks(title=f"Draft heads: {name_of(model)}", analytics_enabled=False, fill_width=True) as blocks:
        gr.Markdown(heading(model))
        inputs: dict[str, Any] = {}
        with gr.Row():
            with gr.Column(scale=3):
                inputs["mode"] = gr.Radio(modes, value=modes[0], label="Mode", visible=len(modes) > 1, elem_id="mode")
                inputs["written"] = gr.Textbox(label="Prompt", lines=5, max_lines=12, elem_id="prompt")
                with gr.Row():
                    generate = gr.Button("Generate", variant="primary", elem_id="generate")
                    stop = gr.Button("Stop", elem_id="stop")
                    clear = gr.Button("New conversation", visible=len(modes) > 1, elem_id="clear")
            with gr.Column(scale=2):
                inputs |= settings(max_new_tokens)
        inputs["messages"] = gr.State([])
        outputs: dict[str, Any] = {"verdict": gr.Markdown(elem_id="verdict"), "steps": gr.State((None, []))}
        with gr.Row():
            for side, title in ((HEADS, "With draft heads"), (BASE, "Base alone")):
                with gr.Column():
                    gr.Markdown(f"### {title}")
                    outputs[f"{side}_figures"] = gr.HTML(elem_id=f"{side}-figures")
                    outputs[f"{side}_text"] = gr.HTML(elem_id=f"{side}-text")
        gr.HTML(drawing.depth_legend(model.drafter.max_depth or DEEPEST))
        gr.Markdown(
            "### Draft tree\nThe accepted path with its tokens; every other guess with its rank. Lines are thicker the "
            "more often a guess was accepted."
        )
        outputs["walked"] = gr.Markdown(elem_id="walked")
        outputs["step"] = gr.Slider(1, 2, value=1, step=1, label="Step", interactive=False, elem_id="step")
        outputs["tree"] = gr.HTML(elem_id="tree")
        outputs |= {name: inputs[name] for name in ("messages", "written")}

        def named(shown: dict[str, Any]) -> dict[Any, Any]:
            return {outputs[name]: value for name, value in shown.items()}

        def run(values: dict[Any, Any], visitor: gr.Request) -> Iterator[dict[Any, Any]]:
            fields = {name: values[component] for name, component in inputs.items()}
            asked = Asked(chat=fields.pop("mode") == CHAT, **fields)
            for shown in page.generate(asked, visitor.session_hash):
                yield named(shown)

        def end(visitor: gr.Request) -> None:
            page.stop(visitor.session_hash)

        def show_step(steps: tuple[DraftTree | None, list[WalkedStep]], number: float) -> dict[Any, Any]:
            return named(page.show_step(*steps, int(number)))

        def forget() -> dict[Any, Any]:
            return named({"messages": [], "heads_text": "", "base_text": "", "verdict": ""})

        quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
        # one generation at a time: two would share the device, and neither would be measured as it is alone
        writing = generate.click(lambda: gr.Button(interactive=False), None, generate, queue=False, **quiet).then(
            run, set(inputs.values()), list(outputs.values()), concurrency_limit=1, **quiet
        )
        for ended in (writing.success, writing.failure):
            ended(lambda: gr.Button(interactive=True), None, generate, queue=False, **quiet)
        stop.click(end, queue=False, **quiet)
        clear.click(forget, None, list(outputs.values()), **quiet)
        outputs["step"].input(
            show_step,
            [outputs["steps"], outputs["step"]],
            [outputs["tree"], outputs["walked"]],
            trigger_mode="always_last",
            **quiet,
        )
    return blocks


def warm_up(model: Any, tokenizer: Any) -> None:
    """Do what happens in the first call only: the probe of the base, allocations."""
    inputs, settings = encode(model, tokenizer, ["1, 2, 3"]), {"max_new_tokens": 4, "do_sample": False}
    model.base.generate(**inputs, **as_tokens(model, settings, tokenizer))
    draft(model, None, inputs, settings, tokenizer)


def name_of(model: Any) -> str:
    path = str(model.name_or_path)
    return os.path.basename(os.path.abspath(path) if os.path.isdir(path) else path.rstrip("/")) or "a model"


def heading(model: Any) -> str:
    base = model.config.base_model_name_or_path or model.base.name_or_path
    dtype = str(model.base.dtype).removeprefix("torch.")
    where = f"{dtype} on {model.base.device.type}"
    return f"## {name_of(model)}\n{model.config.family} heads, base: {os.path.basename(str(base).rstrip('/'))}, {where}"


def settings(max_new_tokens: int) -> dict[str, Any]:
    """The fields of the settings, by the names that `Asked` has for them."""
    fields: dict[str, Any] = {}
    fields["tree"] = gr.Dropdown(
        [OWN_TREE, *published_trees()],
        value=OWN_TREE,
        allow_custom_value=True,
        label="Draft tree",
        info="A name, or rank paths such as [[0], [1], [0, 0]].",
        elem_id="tree-choice",
    )
    with gr.Row():
        fields["temperature"] = gr.Slider(
            0, 2, 0, step=0.05, label="Temperature", info="0 is greedy.", elem_id="temperature"
        )
        fields["acceptance"] = gr.Radio(
            list(ACCEPTANCES),
            value=ACCEPTANCES[0],
            label="Acceptance",
            info="Under sampling, rejection writes another sample of the base's distribution; typical is lossy.",
            elem_id="acceptance",
        )
    with gr.Row():
        fields["max_new_tokens"] = gr.Number(
            max_new_tokens, precision=0, minimum=1, label="New tokens", elem_id="length"
        )
        fields["copies"] = gr.Number(0, precision=0, minimum=0, label="Copied tokens", elem_id="copies")
        fields["seed"] = gr.Number(0, precision=0, minimum=0, label="Seed", elem_id="seed")
        fields["with_base"] = gr.Checkbox(True, label="Run the base too", elem_id="with-base")
    return fields


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
        css=drawing.CSS,
        footer_links=[],
    )
    if block:
        print(f"the page is at {address} (Ctrl-C ends it).", flush=True)
        blocks.block_thread()
    return address
