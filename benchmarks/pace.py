"""How the cost of a captured step changes on two CPU cores from one quarter of a minute to the next, and by what.

    python benchmarks/pace.py hydra --minutes 4
    python benchmarks/pace.py draft-model --callers

In each window calls of the base, uncaptured, and of its heads with the captured tree of the entry for one row take
turns, 64 tokens each, the latter with matrix products on all threads and on one; and so does one product of 256 x 256:
it shows how long two threads take to reach each other, which a step of hundreds of short products does as often.
Medians in milliseconds.

With `--callers` it is how the cost depends on how many functions deep the caller of `generate` is: trees of 8 nodes
with one to five levels are compared step by step (`costs.in_turn`), with `generate` as it is and without the room that
it makes for the interpreter's frames (`generation.frames`). Both are written to results/pace.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from calibrated import batch_of, entry_of, loaded
from figures import markdown

from hf_drafthead import DraftTree
from hf_drafthead.generation.costs import in_turn, timed
from hf_drafthead.generation.entries import tree_of
from hf_drafthead.generation.mixin import DraftHeadGenerationMixin

RESULTS = Path(__file__).parent / "results" / "pace.json"
WINDOW, TOKENS, SIDE = 15.0, 64, 256  # seconds
NAMES = "base", "captured", "captured, one thread", "product", "product, one thread"
NODES, LEVELS, TURNS = 8, range(1, 6), 100
DEPTHS = 0, 2, 4, 8, 16, 24


@contextmanager
def one_thread() -> Iterator[None]:
    """Products run on one thread here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    """The median time of some work."""
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return 1e3 * statistics.median(seconds)


def windows(family: str, minutes: float) -> list[dict[str, float]]:
    """The medians of each window."""
    model, prompts = loaded(family)
    entry = entry_of(model, 1, True)
    tree = tree_of(entry, model.drafter.max_depth, model.config.get_text_config().vocab_size)
    square = torch.randn(SIDE, SIDE)

    def turn(prompt: torch.Tensor) -> tuple[float, ...]:
        call = {**batch_of([prompt]), "do_sample": False, "max_new_tokens": TOKENS}
        base, captured = (1e3 * timed(model, one, call, one is not None).step for one in (None, tree))
        product = milliseconds(lambda: square @ square)
        with one_thread():
            alone = 1e3 * timed(model, tree, call, True).step
            return base, captured, alone, product, milliseconds(lambda: square @ square)

    turn(prompts[0])  # compiles
    found = []
    for _ in range(round(60 * minutes / WINDOW)):
        turns: list[tuple[float, ...]] = []
        end = time.perf_counter() + WINDOW
        while time.perf_counter() < end:
            turns.append(turn(prompts[len(turns) % len(prompts)]))
        found.append(dict(zip(NAMES, map(statistics.median, zip(*turns)))))
        print(found[-1], flush=True)
    return found


def callers(family: str) -> list[dict[str, float | bool]]:
    """What a step with each number of levels costs over one with three, for callers of each depth."""
    model, prompts = loaded(family)
    trees = {}
    for depth in [level for level in LEVELS if level <= (model.drafter.max_depth or max(LEVELS))]:
        beside = [[rank] for rank in range(1, NODES - depth)]
        trees[str(depth)] = DraftTree([[0] * level for level in range(1, depth + 1)] + beside)
    settings = {"do_sample": False, "max_new_tokens": 2 * TOKENS, "eos_token_id": None}
    calls = [{**batch_of([one]), **settings} for one in prompts[:12]]
    roomy = DraftHeadGenerationMixin.generate
    in_turn(model, trees, calls, 1, True)  # compiles
    found = []
    for room, deep in itertools.product((False, True), DEPTHS):
        DraftHeadGenerationMixin.generate = roomy if room else roomy.__wrapped__
        shares = below(deep, lambda: in_turn(model, trees, calls, TURNS, True))
        found.append({"room": room, "deep": deep, **{depth: share / shares["3"] for depth, share in shares.items()}})
        print(found[-1], flush=True)
    return found


def below(depth: int, function: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Call a function that many functions deeper."""
    return below(depth - 1, function) if depth else function()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", default="hydra")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--callers", action="store_true")
    given = parser.parse_args()
    if given.callers:
        part, found = "callers", callers(given.family)
    else:
        part, found = "windows", windows(given.family, given.minutes)
    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    known.setdefault(given.family, {})[part] = found
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    print(
        markdown(
            [*found[0]],
            [[str(value) if type(value) in (bool, int) else f"{value:.2f}" for value in one.values()] for one in found],
        )
    )


if __name__ == "__main__":
    main()
