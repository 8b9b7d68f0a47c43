"""`hf-drafthead calibrate` and `costs`: which draft tree is fastest here."""

from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli import common
from hf_drafthead.cli.common import amount, count, flag, string


@common.app.command("calibrate")
@common.options_of_groups
def run_calibrate(
    model: common.ModelName,
    loading: common.Loading,
    prompts: Annotated[str | None, string("Prompts as for bench; without them the base writes some.", "FILE")] = None,
    batch_size: Annotated[str, string("Rows of a call; a tree for each.", "N[,N...]")] = "1",
    max_nodes: Annotated[int, typer.Option(metavar="N", min=2, max=4096, help="Of a tree, the root included.")] = 100,
    temperature: Annotated[float, amount("Of the base's answers; 0 is greedy.")] = 0.0,
    max_new_tokens: Annotated[int, count("Tokens per answer, at most.", 2)] = 128,
    limit: Annotated[int, count("Only so many prompts, of all categories.")] = 48,
    captured: Annotated[bool, typer.Option("--captured/--eager", help="Compiled steps, as of static caches.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Show the trees, and store nothing.")] = False,
    json_path: common.Json = None,
) -> None:
    """Find the draft tree that is fastest on this machine, and store it in MODEL's generation config."""
    from hf_drafthead.evaluation.calls import batched, encode_all
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.trees.calibrate import calibrate as measure

    if not dry_run and not Path(model).is_dir():
        raise OSError(f"{model!r} is no folder where trees can be stored: save the heads first, or add --dry-run.")
    sizes = common.parse_numbers("--batch-size", batch_size, int)
    questions = None if prompts is None else read_questions(prompts, limit=limit)
    loaded, tokenizer = loading.load(model)
    texts = None
    if questions is not None:
        inputs = encode_all(loaded, tokenizer, batched(questions, 1), max_new_tokens)
        texts = [prompt["input_ids"][0] for prompt in inputs]

    def keep(entry: dict[str, Any]) -> None:
        if not dry_run:
            loaded.generation_config.save_pretrained(model)

    how: dict[str, Any] = {"max_nodes": max_nodes, "new_tokens": max_new_tokens, "temperature": temperature}
    how |= {"batch_sizes": sizes, "captured": captured}
    entries = measure(loaded, texts, bar=common.bar, keep=keep, **how)
    common.say(*map(entry_in_words, entries))
    common.write_json(json_path, {"entries": entries})
    if not all(entry["measured"]["identical"] for entry in entries):
        counts = f"`hf-drafthead verify {model}` counts near ties and faults"
        if loaded.base.dtype.itemsize < 4:
            dtype = str(loaded.base.dtype).removeprefix("torch.")
            common.say(f"in {dtype} some texts were not the base's own, as rounding makes it: {counts}.")
        else:
            common.complain(f"some text was not the base's own: {counts}.")


def entry_in_words(entry: dict[str, Any]) -> str:
    """One line about a calibration entry: for what, which tree, and how fast it is."""
    from hf_drafthead.trees.entries import CalibrationKey

    figures, nodes, copies = entry["measured"], len(entry["tree"]) + 1, entry.get("lookup", 0)
    key = CalibrationKey.of_entry(entry)
    if nodes == 1 and not copies:
        fastest = max((candidate[-1] for candidate in figures.get("candidates", [])), default=1.0)
        return common.printable(
            f"{key}: no tree pays (the fastest is {fastest:.2f}x the base), so the base decodes by itself"
        )
    copied = f" with {copies} copied tokens" if copies else ""
    between = ""
    if interval := figures.get("interval"):
        between = f" ({interval[0]:.2f} to {interval[1]:.2f} on {figures['held_out']} held-out prompts)"
    return common.printable(
        f"{key}: a tree of {nodes} nodes{copied} is {figures['speedup']:.2f}x{between} as fast as the base "
        f"({figures['tokens_per_second']:.0f} against {figures['base_tokens_per_second']:.0f} tokens/s, "
        f"{figures['tokens_per_step']:.2f} tokens per step)"
    )


@common.app.command()
def costs(
    clear: Annotated[bool, flag("--clear", "Remove them: the next calls measure anew.")] = False,
    json_path: common.Json = None,
) -> None:
    """Show what steps cost on this machine, by which calls without a calibration draft, and the file that holds it."""
    from hf_drafthead.trees import costs as room

    everything = room.stored()
    common.say(str(room.FILE))
    for situation, steps in everything.items():
        common.say(f"{common.printable(situation)}:")
        for name, (*cost, when) in steps.items():
            words = "{:.2f} steps of the base (half of the times at most {:.2f} as long)" if cost else "not measurable"
            common.say(f"  {common.printable(name)}: {words.format(*cost)}, {room.day(when)}")
    common.write_json(json_path, {"file": str(room.FILE), "costs": everything})
    if clear:
        common.say(f"removed: costs of {room.clear()} kind(s) of calls.")
