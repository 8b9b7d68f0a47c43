"""The zoo's calibrated trees: predictions against measurements, against the published tree, and `draft_tree="auto"`.

    python benchmarks/calibrated.py tokens                            # tokens per step; the same on every machine
    python benchmarks/calibrated.py sampled                           # the same from prompts that the base samples
    python benchmarks/calibrated.py speed medusa --batch-size 1,2     # one family: minutes on an idle machine
    python benchmarks/calibrated.py wrong medusa eagle3               # drafters that are always wrong
    python benchmarks/calibrated.py tables                            # of what is in results/calibrated.json

The entries are those of `python -m hf_drafthead.zoo.build --part medusa-trees --force` and so on. They were measured on
every second of 240 held-out prompts; the figures here are from the others. Every text is compared with the base's own.

    tokens   with the tree for one row and greedy answers of 128 tokens to the 120 prompts, and to those that it was
             calibrated on, from the ranks of the base's tokens; 16 are generated as well. `error` is the standard error
             over texts of both together
    sampled  1,280 prompts of 32 tokens that the base samples, as `calibrate` lets it where none are given: tokens per
             step of the best tree of the entry's size, predicted from the greedy answers to half of them, and measured
             on the other half; `error` is the standard error over texts of both halves together
    speed    the calibrated tree, "auto", and for one row the published tree cut to its first 4 to 64 nodes. The base,
             the calibrated tree and "auto" answer 30 prompts, or six or seven batches of more rows, with 128 tokens, in
             turn on every batch. What the published trees' steps cost is compared with the calibrated tree's step by
             step in the same calls (`costs.in_turn`), since calls of their own scatter too much. How many steps each
             tree takes is counted on all 120 prompts, from the ranks of the base's tokens, and on those that were
             timed it is what the calls took: 30 texts leave an error of about 6 %. The time of all calls is their
             steps times the cost of a step, and the rest of each call: both the medians over the timed batches, in
             units of the median step of the base on the same batch, since the speed of a machine changes from
             minute to minute. Of "auto", whose steps cost more or less, the times of the calls count, and beside it
             those with the calibrated tree; so where the base decodes by itself: the median ratio over the batches.
             `more` is the calibrated tree over the prefix that is best on the other half of the prompts. It is kept of
             every run with the same entry, and the table holds the mean.
    wrong    256 tokens, forty times, with "auto" and heads of noise, for which the entry promises the tokens per step
             of trained ones. The base is called before and after it in every turn, since the speed of a machine
             drifts: the median over turns of the time of "auto" over the mean of both. The second call of the base over
             the first tells what the figure is good for; `error` is the standard error of the median. The calibrated
             tree: thrice
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import statistics
import time
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from figures import markdown
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.calls import CAPTURED, draft, steps_of
from hf_drafthead.generation.calibration import foretold_steps, own_texts, rank_paths
from hf_drafthead.generation.costs import Timed, in_turn, timed
from hf_drafthead.generation.entries import CalibrationKey, matching, tree_of
from hf_drafthead.generation.identity import drafter_hash
from hf_drafthead.generation.ladder import Size
from hf_drafthead.generation.settings import AUTO, DEFAULT_TREE
from hf_drafthead.generation.tree import MAX_DEPTH, RankPath
from hf_drafthead.generation.worth import sampled_prompts, worth_of_trees
from hf_drafthead.trees.timing import time_interleaved
from hf_drafthead.zoo.trees import BATCH_SIZES, NEW_TOKENS, more_prompts

RESULTS = Path(__file__).parent / "results" / "calibrated.json"
PUBLISHED = (4, 8, 16, 32, 64)  # nodes
COMPILED_PUBLISHED = (4, 8, 16)  # those of 32 and 64 were 8 % and more behind for every family
ROWS, RANKED = 16, 40
SAMPLED_PROMPTS = 1280
SPEED_PROMPTS, LEAST_BATCHES, WRONG_TOKENS = 30, 6, 256
ROUNDS, FEW_ROUNDS, TURNS = 40, 3, 300
BASE, AGAIN, CALIBRATED, PREFIX = "base", "base again", "calibrated", "published"
HALVES = slice(0, None, 2), slice(1, None, 2)  # of the batches
Runs = dict[str, list[Timed]]  # of each contender, by batch
_RANKS: WeakKeyDictionary[Any, dict[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()  # by prompt, by identity


def grown(paths: Sequence[RankPath], count: int) -> list[RankPath]:
    """The first `count` paths whose parent is among them."""
    chosen: list[RankPath] = []
    for path in paths:
        if len(chosen) < count and (len(path) == 1 or path[:-1] in chosen):
            chosen.append(path)
    return chosen


def loaded(family: str, own: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """A model of the zoo, and the prompts that it was not calibrated on, or those that it was, in a random order."""
    model = AutoModelForCausalLM.from_pretrained(zoo.path(family)).eval()
    tokenizer = AutoTokenizer.from_pretrained(zoo.path(family))
    prompts = more_prompts(tokenizer, model.base.config.max_position_embeddings - NEW_TOKENS)
    chosen = [prompt for number, prompt in enumerate(prompts) if (number % 2 == 0) == own]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))
    return model, [chosen[place] for place in order.tolist()]


def entry_of(model: Any, rows: int, captured: bool) -> dict[str, Any]:
    """The calibration entry of a batch size."""
    execution = "compiled" if captured else "eager"
    found = matching(model.generation_config.calibration, CalibrationKey.of(model.base, model.drafter, rows, execution))
    assert found is not None, f"not calibrated for batch size {rows}"
    return found


def batch_of(prompts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Prompts padded on the left."""
    ids = torch.nn.utils.rnn.pad_sequence(list(prompts), True, 0, padding_side="left")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return {
        "input_ids": ids,
        "attention_mask": (torch.arange(ids.shape[1]) >= ids.shape[1] - lengths[:, None]).long(),
    }


def tokens(family: str) -> dict[str, Any]:
    """Tokens per step, predicted by the entry for one row, and measured on its own prompts and on others."""
    model, others = loaded(family)
    _, own = loaded(family, own=True)
    entry = entry_of(model, 1, False)
    tree = tree_of(entry, None, model.config.get_text_config().vocab_size)
    steps, emitted = per_text(model, tree, others)
    own_steps, own_emitted = per_text(model, tree, own)
    return {
        "nodes": tree.num_nodes,
        "predicted": entry["measured"]["predicted_tokens_per_step"],
        "own": float(own_emitted.sum() / own_steps.sum()),
        "measured": float(emitted.sum() / steps.sum()),
        "steps": int(steps.sum()),
        "error": (share_of_error(steps, emitted) ** 2 + share_of_error(own_steps, own_emitted) ** 2) ** 0.5,
    }


def sampled(family: str) -> dict[str, Any]:
    """Tokens per step on prompts that the base sampled, predicted from half of them and measured on the other half."""
    model, _ = loaded(family)
    entry = entry_of(model, 1, False)
    prompts = sampled_prompts(model, SAMPLED_PROMPTS)
    size = Size(len(entry["tree"]) + 1, max(map(len, entry["tree"])))
    worth = worth_of_trees(model, prompts[0::2], NEW_TOKENS, size.nodes)
    counted = [(len(text), sum(text)) for text in worth.steps[size]]
    counted_steps, counted_emitted = torch.tensor(counted).double().T
    steps, emitted = per_text(model, worth.tree(size), prompts[1::2])
    return {
        "nodes": size.nodes,
        "predicted": worth.tokens_per_step(size),
        "measured": float(emitted.sum() / steps.sum()),
        "steps": int(steps.sum()),
        "error": (share_of_error(steps, emitted) ** 2 + share_of_error(counted_steps, counted_emitted) ** 2) ** 0.5,
    }


def per_text(model: Any, tree: DraftTree, prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps of each text and the tokens that they emitted, both (T,), counted on the ranks of the base's tokens.

    A few texts are generated as well: they must be the base's, in as many steps.
    """
    given, call = batch_of(prompts[:ROWS]), {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    output = draft(model, tree, given, call)
    assert torch.equal(output.sequences, model.base.generate(**given, **call)), "not the base's text"
    texts = [foretold_steps(tree, ranks[None])[0] for ranks in ranks_of(model, prompts)]
    steps, emitted = torch.tensor([(len(text), sum(text)) for text in texts]).T
    assert steps[:ROWS].tolist() == (steps_of(output) > 0).sum(1).tolist(), "not the steps that were counted"
    return steps.double(), emitted.double()


def share_of_error(steps: torch.Tensor, emitted: torch.Tensor) -> float:
    """Standard error of tokens per step over texts, as a share: of a ratio of two sums (Cochran, section 6.4)."""
    texts = len(steps)
    squares = (emitted - emitted.sum() / steps.sum() * steps).square().sum()
    return float((squares * texts / (texts - 1)).sqrt() / emitted.sum())


def speed(family: str, batch_sizes: Sequence[int], captured: bool) -> dict[str, Any]:
    """The figures of each batch size."""
    model, prompts = loaded(family)
    return {str(rows): contest(model, prompts, rows, captured) for rows in batch_sizes}


def contest(model: Any, prompts: Sequence[torch.Tensor], rows: int, captured: bool) -> dict[str, Any]:
    """Speedups of every contender with some batch size."""
    entry = entry_of(model, rows, captured)
    deepest = model.drafter.max_depth
    trees: dict[str, DraftTree] = {}
    if entry["tree"]:
        trees[CALIBRATED] = tree_of(entry, deepest, model.config.get_text_config().vocab_size)
    if entry["tree"] and rows == 1:
        file = resources.files("hf_drafthead.generation") / "trees" / f"{DEFAULT_TREE}.json"
        paths = [tuple(path) for path in json.loads(file.read_text())["paths"] if len(path) <= (deepest or MAX_DEPTH)]
        sizes = COMPILED_PUBLISHED if captured else PUBLISHED
        trees |= {f"{PREFIX} {size}": DraftTree(grown(paths, size - 1)) for size in sizes}
    batches = [prompts[at : at + rows] for at in range(0, len(prompts) - rows + 1, rows)]
    few = [batch_of(batch) for batch in batches[: max(SPEED_PROMPTS // rows**2, LEAST_BATCHES)]]
    run = {BASE: None, CALIBRATED: trees.get(CALIBRATED), AUTO: AUTO}
    run_in_turn(model, run, few[:1], captured)  # one-time work; what "auto" compiles later is in few of its calls
    runs = run_in_turn(model, run, few, captured)
    taken = {
        name: 1 / statistics.median(one.seconds / base.seconds for one, base in zip(runs[name], runs[BASE]))
        for name in (CALIBRATED, AUTO)
    }
    found: dict[str, Any] = {
        "nodes": len(entry["tree"]) + 1,
        "texts": rows * len(batches),
        "predicted_speedup": entry["measured"]["predicted_speedup"],
        "speedups": {},
        "in_calls": taken,
    }
    if not trees:
        return found
    call = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    others = {name: tree for name, tree in trees.items() if tree != trees[CALIBRATED]}
    different = {CALIBRATED: trees[CALIBRATED], **others}
    shares = in_turn(model, different, [{**given, **call} for given in few], TURNS, captured) if others else {}
    costs = {name: shares[name] / shares[CALIBRATED] if name in others else 1.0 for name in trees}
    steps = steps_of_batches(model, trees, batches)
    for name in (BASE, CALIBRATED):
        assert steps[name][: len(few)] == [one.steps for one in runs[name]], f"{name}: not the steps that were counted"
    found["speedups"] = speedups(runs, steps, costs)
    print(rows, {name: round(one, 3) for name, one in found["speedups"].items()}, taken, flush=True)
    if rows > 1:
        return found
    halves = [speedups(runs, {name: all_of[half] for name, all_of in steps.items()}, costs) for half in HALVES]
    return {**found, "costs": costs, "over_best_published": [over_best_published(halves)]}


def steps_of_batches(
    model: Any, trees: dict[str, DraftTree], batches: Sequence[Sequence[torch.Tensor]]
) -> dict[str, list[int]]:
    """How many steps each batch of prompts takes with every tree, and with the base: as many as its slowest row."""
    found: dict[str, list[int]] = {}
    ranks = ranks_of(model, [prompt for batch in batches for prompt in batch])
    for name, tree in {BASE: DraftTree.root_alone(), **trees}.items():
        texts = iter([len(foretold_steps(tree, one[None])[0]) for one in ranks])
        found[name] = [max(itertools.islice(texts, len(batch))) for batch in batches]
    return found


def ranks_of(model: Any, prompts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The ranks of the base's tokens after each prompt; kept, since batches of all sizes ask for them."""
    known = _RANKS.setdefault(model, {})
    missing = [prompt for prompt in prompts if prompt not in known]
    for first in range(0, len(missing), RANKED):
        some = missing[first : first + RANKED]
        texts = own_texts(model, some, NEW_TOKENS, draft_tree=[[0]])
        known |= dict(zip(some, rank_paths(model, *texts)))
    return [known[prompt] for prompt in prompts]


def speedups(runs: Runs, steps: dict[str, list[int]], costs: dict[str, float]) -> dict[str, float]:
    """How many times as fast as the base each tree is.

    Args:
        runs: of the base and of the calibrated tree.
        steps: by the tree, or the base, the steps of each batch.
        costs: by the tree, of a step in steps of the calibrated tree.
    """
    both = list(zip(runs[CALIBRATED], runs[BASE]))
    step = statistics.median(run.step / one.step for run, one in both)
    rest = statistics.median(run.rest / one.step for run, one in both)
    base_rest = statistics.median(one.rest / one.step for _, one in both)
    base = base_rest * len(steps[BASE]) + sum(steps[BASE])
    return {name: base / (rest * len(steps[name]) + cost * step * sum(steps[name])) for name, cost in costs.items()}


def over_best_published(halves: Sequence[dict[str, float]]) -> float:
    """The calibrated tree over the best published prefix, which is the best one of the other half of the batches.

    The best of five on the same batches would be favoured by chance.

    Args:
        halves: how many times as fast as the base each one is.
    """
    ratios = []
    for here, there in (halves, halves[::-1]):
        best = max((name for name in there if name.startswith(PREFIX)), key=there.__getitem__)
        ratios.append(here[CALIBRATED] / here[best])
    return statistics.mean(ratios)


def with_earlier_runs(found: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """The figures of the last run, and of every run of the same entry how the published tree compared."""
    more = "over_best_published"
    same = more in found and before.get("predicted_speedup") == found["predicted_speedup"]
    return {**found, more: before[more] + found[more]} if same else found


def run_in_turn(model: Any, trees: dict[str, Any], batches: Sequence[dict[str, torch.Tensor]], captured: bool) -> Runs:
    """The calls of the base and with each tree, by batch; every text is compared.

    They take turns on every batch, and another one begins each time: the speed of a machine changes meanwhile.
    """
    runs: Runs = {name: [] for name in trees}
    call: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    for turn, given in enumerate(batches):
        names = [*trees]
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if name == BASE or isinstance(trees[name], DraftTree):
                run = timed(model, trees[name], {**given, **call}, captured)
            else:  # "auto", or the entry's own where it leaves the call to the base
                settings = {**call, **(CAPTURED if captured else {})}
                start = time.perf_counter()
                output = draft(model, trees[name], given, settings)
                run = Timed(math.nan, math.nan, time.perf_counter() - start, sequences=output.sequences)
            runs[name].append(run)
        text = runs[BASE][-1].sequences
        assert all(torch.equal(of_one[-1].sequences, text) for of_one in runs.values()), "not the base's text"
    return runs


def wrong(family: str) -> dict[str, Any]:
    """Heads of noise with the entry of trained ones, with "auto" against the base."""
    model, prompts = loaded(family)
    entry = entry_of(model, 1, False)
    torch.manual_seed(0)
    for weight in model.drafter.parameters():
        torch.nn.init.normal_(weight)
    model.generation_config.calibration = [{**entry, "heads_hash": drafter_hash(model.drafter)}]
    given = batch_of(prompts[:1])
    call: dict[str, Any] = {"do_sample": False, "max_new_tokens": WRONG_TOKENS, "eos_token_id": None}
    runs = {
        BASE: lambda: model.base.generate(**given, **call, return_dict_in_generate=True),
        AGAIN: lambda: model.base.generate(**given, **call, return_dict_in_generate=True),
        AUTO: lambda: draft(model, AUTO, given, call),
        CALIBRATED: lambda: draft(model, None, given, call),
    }
    over_base: dict[str, float] = {}
    for names, rounds in (((BASE, CALIBRATED, AGAIN), FEW_ROUNDS), ((BASE, AUTO, AGAIN), ROUNDS)):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            outputs, once = time_interleaved({name: runs[name] for name in names}, 1, model.base.device)
            assert all(torch.equal(one.sequences, outputs[BASE].sequences) for one in outputs.values())
            for name in names if turn else ():  # the first turn does the one-time work
                seconds[name] += once[name]
        over_base[AGAIN] = statistics.median(map(operator.truediv, seconds[AGAIN], seconds[BASE]))
        both = map(statistics.mean, zip(seconds[BASE], seconds[AGAIN]))
        ratios = list(map(operator.truediv, seconds[names[1]], both))
        over_base[names[1]] = statistics.median(ratios)
        if CALIBRATED in outputs:
            per_step = float(steps_of(outputs[CALIBRATED]).double().mean())
    error = 1.25 * statistics.stdev(ratios) / ROUNDS**0.5  # of a median, about
    return {"tokens_per_step": per_step, "seconds_over_base": over_base, "error": error}


def tables(found: dict[str, Any]) -> list[str]:
    """The tables of docs/trees.md."""
    stored: list[list[str]] = []
    predicted, on_sampled, fastest, auto, noise = [], [], [], [], []
    for family in zoo.families():
        settings = json.loads((Path(zoo.path(family)) / "generation_config.json").read_text())
        for entry in settings["calibration"]:
            told = entry["measured"]
            stored.append([
                family, "captured" if entry["execution"] == "compiled" else "uncaptured", str(entry["batch_size"]),
                str(len(entry["tree"]) + 1), f"{told['predicted_speedup']:.2f}", f"{told['speedup']:.2f}",
            ])  # fmt: skip
    for family in sorted(found):
        one = found[family]
        if figures := one.get("tokens"):
            own, off = (figures["predicted"] / figures[which] - 1 for which in ("own", "measured"))
            predicted.append([
                family, str(figures["nodes"]), f"{figures['predicted']:.3f}", f"{figures['own']:.3f}", f"{own:+.1%}",
                f"{figures['measured']:.3f}", f"{off:+.1%}", f"{figures['error']:.1%}", f"{figures['steps']:,}",
            ])  # fmt: skip
        if figures := one.get("sampled"):
            off = figures["predicted"] / figures["measured"] - 1
            on_sampled.append([
                family, str(figures["nodes"]), f"{figures['predicted']:.3f}", f"{figures['measured']:.3f}",
                f"{off:+.1%}", f"{figures['error']:.1%}", f"{figures['steps']:,}",
            ])  # fmt: skip
        if figures := one.get("wrong"):
            ratios = figures["seconds_over_base"]
            slower = (f"{ratios[name] - 1:+.1%}" if name in ratios else "" for name in (AGAIN, AUTO, CALIBRATED))
            error = f"{figures['error']:.1%}" if "error" in figures else ""
            noise.append([family, f"{figures['tokens_per_step']:.2f}", *slower, error])
        for way in sorted(set(one) - {"tokens", "sampled", "wrong"}, reverse=True):
            for rows, figures in one.get(way, {}).items():
                ratio, timed_calls = figures["speedups"], figures["in_calls"]
                line = [family, way, rows, str(figures["nodes"])]
                expected = f"{figures['predicted_speedup']:.2f}"
                on_all = f"{ratio[CALIBRATED]:.2f}" if CALIBRATED in ratio else ""
                of_calls = [f"{timed_calls[name]:.2f}" if name in timed_calls else "" for name in (CALIBRATED, AUTO)]
                auto.append([*line, str(figures["texts"]), expected, on_all, *of_calls])
                prefixes = {name: value for name, value in ratio.items() if name.startswith(PREFIX)}
                if prefixes:
                    best = max(prefixes, key=prefixes.__getitem__)
                    runs = figures["over_best_published"]
                    each = ", ".join(f"{over - 1:+.1%}" for over in runs)
                    fastest.append([
                        *line[:2], line[3], str(figures["texts"]), f"{ratio[CALIBRATED]:.2f}", best.split()[1],
                        f"{prefixes[best]:.2f}", f"{statistics.mean(runs) - 1:+.1%}", each if len(runs) > 1 else "",
                    ])  # fmt: skip
    return [
        markdown(["heads", "steps", "rows", "nodes", "speedup predicted", "speedup in the check"], stored),
        markdown(
            ["heads", "nodes", "predicted", "on its prompts", "off", "on others", "off", "one standard error", "steps"],
            predicted,
        ),
        markdown(["heads", "nodes", "predicted", "measured", "off", "one standard error", "steps"], on_sampled),
        markdown(
            [
                "heads",
                "steps",
                "nodes",
                "texts",
                "calibrated",
                "nodes of the best published",
                "best published",
                "more",
                "in each run",
            ],
            fastest,
        ),
        markdown(
            ["heads", "steps", "rows", "nodes", "texts", "predicted", "calibrated", "calibrated, calls", "auto, calls"],
            auto,
        ),
        markdown(
            [
                "heads of noise",
                "tokens per step",
                "time, base again",
                "time, auto",
                "time, calibrated",
                "one standard error",
            ],
            noise,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["tokens", "sampled", "speed", "wrong", "tables"])
    parser.add_argument("families", nargs="*", default=zoo.families())
    parser.add_argument("--batch-size", default=",".join(map(str, BATCH_SIZES)), metavar="N[,N...]")
    parser.add_argument("--captured", action="store_true", help="compiled steps")
    given = parser.parse_args()
    for family in given.families if given.part != "tables" else []:
        if given.part == "wrong":
            figures = {"wrong": wrong(family)}
        elif given.part == "tokens":
            figures = {"tokens": tokens(family)}
        elif given.part == "sampled":
            figures = {"sampled": sampled(family)}
        else:
            way = "captured" if given.captured else "uncaptured"
            sizes = [int(size) for size in given.batch_size.split(",")]
            figures = {way: speed(family, sizes, given.captured)}
        print(family, figures, flush=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        mine = known.setdefault(family, {})
        for name, value in figures.items():
            for rows in value if given.part == "speed" else []:
                value[rows] = with_earlier_runs(value[rows], mine.get(name, {}).get(rows, {}))
            mine[name] = {**mine[name], **value} if name in mine else value
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print("\n\n".join(tables(json.loads(RESULTS.read_text()) if RESULTS.is_file() else {})))


if __name__ == "__main__":
    main()
