"""Many requests of mixed lengths: a batch that they join and leave, against batches that end with their longest row.

    python benchmarks/many_users.py                                        # writes results/many_users.json
    python benchmarks/many_users.py --requests 8 --most 64 --output /tmp   # a short look
    python benchmarks/many_users.py --model PATH --requests 16 --most 128  # writes results/many_users_NAME.json
    python benchmarks/many_users.py --model PATH --questions mt_bench_question.jsonl --nodes 2 4 8

Held-out prompts of the zoo, or the first turns of a file of questions in the model's chat template; greedy, float32,
all there at once. `many` is `generate_batch` of the model with heads, `batches` its `generate` in batches of as many
rows, each to the longest answer of the batch, `base` the same of the base, and `base many` transformers' own
`generate_batch` of the base; `--nodes` adds runs of `many` with dynamic trees of these sizes, the root included. A
second comparison is one request alone, of a manager that runs, and a third the first token of a request that comes
while all slots but one are taken. Seconds are those of the process on its CPUs, which other processes on the machine
lengthen less than they do those of a clock; both are in the results.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_drafthead import zoo
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.questions import read_questions, text_of
from hf_drafthead.generation.tree import DynamicTree

HERE = Path(__file__).resolve().parent
REPEATS, ROUNDS = 5, 2
Asked = list[tuple[list[int], int]]  # token ids of each prompt, and how many new tokens


def requests(tokenizer: Any, questions: Path, count: int, most: int) -> Asked:
    """The questions' first turns, over and over, with random numbers of new tokens."""
    dice, asked, least = random.Random(0), read_questions(questions), min(16, most)
    texts = [text_of(tokenizer, question, []) for question in asked]
    prompts = [
        tokenizer(text, add_special_tokens=not question.chat)["input_ids"] for text, question in zip(texts, asked)
    ]
    return [(prompts[number % len(prompts)], dice.randint(least, most)) for number in range(count)]


def in_batches(model: Any, asked: Asked, slots: int, padding: int) -> list[list[int]]:
    """`generate` over some requests at a time, cut to what each had asked for."""
    texts = []
    for first in range(0, len(asked), slots):
        part = asked[first : first + slots]
        width = max(len(prompt) for prompt, _ in part)
        rows = [[padding] * (width - len(prompt)) + prompt for prompt, _ in part]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in part]
        longest = max(new for _, new in part)
        settings = {"max_new_tokens": longest, "do_sample": False, "eos_token_id": None, "pad_token_id": padding}
        output = model.generate(torch.tensor(rows), attention_mask=torch.tensor(mask), **settings)
        texts += [row[width : width + new].tolist() for row, (_, new) in zip(output, part)]
    return texts


def joined(
    model: Any, asked: Asked, slots: int, figures: dict[str, Any] | None = None, nodes: int | None = None
) -> list[list[int]]:
    """One manager for all; how many tokens its steps gave goes into `figures`. nodes: of all trees."""
    tree = None if nodes is None else DynamicTree(nodes, min(nodes - 1, model.drafter.max_depth or 4, 4), 4)
    manager = model.init_continuous_batching(slots=slots, draft_tree=tree)
    names = [manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1) for prompt, new in asked]
    manager.start()
    results = {name: manager.get_result(name) for name in names}
    manager.stop()
    if figures is not None:
        figures["tokens_per_step_and_request"] = manager.metrics()["tokens_per_step_and_request"]
    return [results[name].generated_tokens for name in names]


def of_transformers(base: Any, asked: Asked, slots: int) -> list[list[int]]:
    """transformers' own manager on the base, where it runs on this device."""
    config = transformers.GenerationConfig(do_sample=False, max_new_tokens=max(new for _, new in asked))
    config.eos_token_id = -1
    cb_config = transformers.ContinuousBatchingConfig(max_requests_per_batch=slots, num_blocks=64, max_batch_tokens=512)
    manager = base.init_continuous_batching(config, cb_config)
    names = [manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1) for prompt, new in asked]
    manager.start()
    results: dict[str, Any] = {}
    while len(results) < len(names) and manager.is_running():
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            results[result.request_id] = result
    manager.stop(block=True)
    if errors := [result.error for result in results.values() if result.error]:
        raise RuntimeError(errors[0])
    return [results[name].generated_tokens for name in names]


def measured(run: Callable[..., list[list[int]]], *given: Any) -> dict[str, Any]:
    """Tokens, and tokens per second of the process and of the clock; or why it cannot run."""
    processor, clock = time.process_time(), time.perf_counter()
    try:
        texts = run(*given)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds, by_clock = time.process_time() - processor, time.perf_counter() - clock
    tokens = sum(map(len, texts))
    rates = {"tokens_per_second": round(tokens / seconds, 1), "by_clock": round(tokens / by_clock, 1)}
    return {"tokens": tokens, "seconds": round(seconds, 3), **rates, "texts": texts}


def one_alone(model: Any, asked: Asked, slots: int) -> list[float]:
    """Seconds of `generate` over those of a manager that runs and has nobody else, request by request, in turns."""
    manager = model.init_continuous_batching(slots=slots)
    manager.start()

    def of_manager(prompt: list[int], new: int) -> list[list[int]]:
        name = manager.add_request(prompt, max_new_tokens=new, eos_token_id=-1)
        return [manager.get_result(name).generated_tokens]

    def by_generate(prompt: list[int], new: int) -> list[list[int]]:
        return in_batches(model, [(prompt, new)], 1, 0)

    ratios: list[float] = []
    for number, one in enumerate([asked[0], *asked * ROUNDS]):  # the first one warms up
        order = [of_manager, by_generate][:: 1 if number % 2 else -1]  # the second one finds caches filled
        seconds = {call.__name__: measured(call, *one)["seconds"] for call in order}
        ratios.append(seconds["by_generate"] / seconds["of_manager"])
    manager.stop()
    return ratios[1:]


def first_token(model: Any, asked: Asked, slots: int) -> dict[str, Any]:
    """Steps that are taken between a request and its first token, while others run in all slots but one."""
    manager = model.init_continuous_batching(slots=slots)
    manager.start()
    others = [manager.add_request(prompt, max_new_tokens=1000, eos_token_id=-1) for prompt, _ in asked[: slots - 1]]
    while manager._figures.began < len(others):
        time.sleep(0.01)
    before = manager._figures.steps
    name = manager.add_request(asked[-1][0], max_new_tokens=20, eos_token_id=-1, streaming=True)
    manager.get_result(name)
    steps = manager._figures.steps - before
    for other in others:
        manager.cancel_request(other)
    manager.stop()
    return {"others": len(others), "steps_until_first_token": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="eagle3")
    parser.add_argument("--model", help="a folder of heads in the place of the bundled model's family")
    parser.add_argument("--questions", type=Path, default=zoo.ASSETS / "prompts.jsonl", help="lines with `turns`")
    parser.add_argument("--nodes", type=int, nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--most", type=int, default=256, help="new tokens of a request, 16 at least")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load(args.model or zoo.path(args.family), dtype=torch.float32)
    asked = requests(tokenizer, args.questions, args.requests, args.most)
    padding = tokenizer.pad_token_id or 0
    figures: dict[str, dict[str, Any]] = defaultdict(dict)
    runs: dict[str, Callable[[], list[list[int]]]] = {
        "many": lambda: joined(model, asked, args.slots, figures["many"]),
        "batches": lambda: in_batches(model, asked, args.slots, padding),
        "base": lambda: in_batches(model.base, asked, args.slots, padding),
        "base many": lambda: of_transformers(model.base, asked, args.slots),
    }
    for nodes in args.nodes:
        name = f"many, {nodes} nodes"
        runs[name] = partial(joined, model, asked, args.slots, figures[name], nodes)
    for warm in ("many", "batches"):  # costs of steps are measured once for a machine
        {"many": joined, "batches": lambda *given: in_batches(*given, padding)}[warm](
            model, asked[: args.slots], args.slots
        )
    found = {}
    for name, run in runs.items():
        found[name] = measured(run) | figures[name]
        print(name, {key: value for key, value in found[name].items() if key != "texts"}, flush=True)
    ratios = one_alone(model, [(prompt, args.most) for prompt, _ in asked[:REPEATS]], args.slots)
    first = first_token(model, asked, args.slots)
    texts = {name: one.pop("texts", None) for name, one in found.items()}
    result: dict[str, Any] = {
        "family": args.family if args.model is None else Path(args.model).name,
        "questions": args.questions.name,
        "requests": args.requests,
        "slots": args.slots,
        "new_tokens": [16, args.most],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "found": found,
        "differ_from_base": sum(one != other for one, other in zip(texts["many"] or [], texts["base"] or [])),
        "first_token": first,
    }
    rate = {name: one.get("tokens_per_second", 0.0) for name, one in found.items()}
    result["many_over"] = {
        name: round(rate["many"] / rate[name], 3) for name in ("batches", "base", "base many") if rate[name]
    }
    result["one_over_generate"] = round(statistics.median(ratios), 3)
    result["one_over_generate_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    args.output.mkdir(parents=True, exist_ok=True)
    name = "many_users" if args.model is None else f"many_users_{Path(args.model).name}"
    (args.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print({name: result[name] for name in ("many_over", "one_over_generate", "first_token", "differ_from_base")})


if __name__ == "__main__":
    main()
