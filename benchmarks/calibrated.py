"""Trees that `calibrate` finds now, those that the zoo's heads carry, and the default without any: calls in turn.

    python benchmarks/calibrated.py medusa eagle --batch-size 1,4
    python benchmarks/calibrated.py hydra --captured

Trees are found on every second one of the zoo's further held-out prompts and timed on the others; every text is
compared with the base's. The figures go to results/calibrated.json, a table of all of them to standard output.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from figures import markdown
from transformers import AutoModelForCausalLM, AutoTokenizer
from zoo_recipe.trees import NEW_TOKENS, more_prompts

from hf_drafthead import zoo
from hf_drafthead.generation.entries import CalibrationKey, nearest, tree_of
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.calibrate import batches_of, calibrate
from hf_drafthead.trees.timing import time_interleaved

RESULTS = Path(__file__).parent / "results" / "calibrated.json"
WHICH, FORMS = ("stored", "found", "default"), {"nodes": "d", "depth": "d", "speedup": ".2f"}
CALLS, TOKENS, WARM_TOKENS = 16, 64, 4


def ratio(slow: list[float], fast: list[float]) -> float:
    """The median over rounds of how many times as long a call took as the other one of its round."""
    return statistics.median(one / other for one, other in zip(slow, fast, strict=True))


def measure(family: str, rows: int, captured: bool) -> dict[str, Any]:
    """The stored, the found and the default tree: nodes, depth, and how many times as fast as the base."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path(family)).eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.path(family))
    prompts = more_prompts(tokenizer, model.base.config.max_position_embeddings - NEW_TOKENS)
    stored = model.generation_config.calibration
    (found,) = calibrate(model, prompts[:96:2], batch_sizes=(rows,), captured=captured)
    key = CalibrationKey.of_entry(found)
    entries = {"stored": nearest(stored, key), "found": found}
    trees = {name: tree_of(entry or {}, None, 2**31) for name, entry in entries.items()}
    settings = DraftSettings(draft_tree=model.generation_config.draft_tree)  # without entries
    trees["default"] = settings.for_call(key, model.drafter.max_depth, 2**31).tree
    seconds: dict[str, list[float]] = {name: [] for name in ("base", *trees)}
    calls = batches_of(model, prompts[1::2], rows)[:CALLS]
    for turn, batch in enumerate([calls[0], *calls]):
        call = {**batch, "do_sample": False, "eos_token_id": None, "max_new_tokens": TOKENS if turn else WARM_TOKENS}
        runs = {name: functools.partial(generate, model, trees.get(name), call, captured) for name in seconds}
        names = list(runs)[turn % 4 :] + list(runs)[: turn % 4]
        outputs, once = time_interleaved({name: runs[name] for name in names}, 1, model.base.device)
        assert all(torch.equal(outputs[name], outputs["base"]) for name in trees), "the text is not the base's"
        for name in seconds:
            seconds[name] += once[name] if turn else []
    figures = {
        name: {"nodes": tree.num_nodes, "depth": tree.max_depth, "speedup": ratio(seconds["base"], seconds[name])}
        for name, tree in trees.items()
    }
    total = {name: sum(seconds[name]) for name in trees}
    return {**figures, "found_over_stored": total["stored"] / total["found"], "calls": len(calls)}


def generate(model: Any, tree: DraftTree | None, call: dict[str, Any], captured: bool) -> torch.Tensor:
    """The text of the base, or of the heads with a tree; one without guesses leaves it to the base."""
    if tree is None or not tree.max_depth:
        return model.base.generate(**call)
    static = {"cache_implementation": "static"} if captured else {}
    return model.generate(**call, **static, draft_tree=tree)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=zoo.families())
    parser.add_argument("--batch-size", default="1", metavar="N[,N...]")
    parser.add_argument("--captured", action="store_true", help="compiled steps")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    for family in arguments.families:
        for rows in map(int, arguments.batch_size.split(",")):
            steps = "compiled" if arguments.captured else "eager"
            results[f"{family}, {steps}, {rows}"] = figures = measure(family, rows, arguments.captured)
            print(family, steps, rows, figures, flush=True)
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    lines = []
    for name, figures in sorted(results.items()):
        trees = (f"{figures[which][part]:{form}}" for which in WHICH for part, form in FORMS.items())
        lines.append([*name.split(", "), *trees, f"{figures['found_over_stored']:.3f}"])
    columns = [f"{which}: {part}" for which in WHICH for part in FORMS]
    print(markdown(["heads", "steps", "rows", *columns, "found over stored"], lines))
    ratios = [figures["found_over_stored"] for figures in results.values()]
    print(f"mean of found over stored: {statistics.mean(ratios):.3f}")


if __name__ == "__main__":
    main()
