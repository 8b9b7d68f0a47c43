"""What `hf_drafthead.exact` gives and costs, on the chat model SmolLM2: texts and scores that differ, steps, the trial.

    python benchmarks/exact.py differ mt_bench_question.jsonl --limit 24 --max-new-tokens 128   # hours on two cores
    python benchmarks/exact.py steps
    python benchmarks/exact.py trial

Each figure is printed as a line of JSON. `differ` compares every way to write a text, without `exact` and with it, with
the text that the base writes alone: how many texts have other tokens, and how many have other bits in some logit.
`steps` times forwards of the base and of trees, exact and not, in turns within one process; the least time counts; the
memory is that of tensors of one step, beside the cache.
"""

from __future__ import annotations

import argparse
import copy
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

import hf_drafthead
from hf_drafthead.bases.probe import probe
from hf_drafthead.bases.topology import Topology
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.zoo import chat

FAMILIES = ("hydra++", "medusa", "eagle3")
NODES = (8, 16, 64)
MODES = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 0.8}}


def tree_of(nodes: int, deepest: int) -> list[list[int]]:
    """So many rank paths, small ranks and short paths first."""
    paths: list[list[int]] = [[]]
    for path in paths:
        if len(path) < deepest and len(paths) <= nodes:
            paths += [[*path, rank] for rank in range(3)]
    return paths[1 : nodes + 1]


def prompts_of(args: argparse.Namespace, tokenizer: Any) -> list[torch.Tensor]:
    """The first turns of the questions, as the chat template has them."""
    questions = read_questions(args.questions, None, args.limit)
    asked = ([{"role": "user", "content": question.turns[0]}] for question in questions)
    made = (tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt") for turn in asked)
    return [ids if isinstance(ids, torch.Tensor) else ids["input_ids"] for ids in made]


class Said:
    """New tokens and logits (T, V) of rows, as calls of `generate` leave them."""

    def __init__(self, output: Any, prompt: int):
        self.rows = [
            (tokens, torch.stack([step[row] for step in output.logits]))
            for row, tokens in enumerate(output.sequences[:, prompt:])
        ]


def differing(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    """Whether tokens differ, and whether bits of logits do."""
    return int(not torch.equal(one[0], other[0])), int(not torch.equal(one[1], other[1]))


def ways(
    model: Any, prompts: list[torch.Tensor], args: argparse.Namespace, how: dict[str, Any], expected: list[Any]
) -> Iterator[tuple[str, Any]]:
    """Every way to write the texts: its name, and (texts, scores) that differ for each text."""
    deepest, pad = model.drafter.max_depth or 5, how["pad_token_id"]
    for nodes in NODES:
        for copies in (None, 4):
            name = f"{nodes} nodes{'' if copies is None else ' and copies'}"
            found = []
            for ids, text in zip(prompts, expected):
                torch.manual_seed(3)
                tree = {"draft_tree": tree_of(nodes, deepest), "prompt_lookup_num_tokens": copies}
                output = model.generate(ids, attention_mask=torch.ones_like(ids), **how, **tree)
                found.append(differing(Said(output, ids.shape[1]).rows[0], text))
            yield name, found
    for rows in (2, 8):
        for who, drafts in (("the base", {}), ("heads", {"draft_tree": tree_of(8, deepest)})):
            found = []
            for start in range(0, 0 if how.get("do_sample") else len(prompts), rows):
                some = prompts[start : start + rows]
                longest = max(ids.shape[1] for ids in some)
                batch = torch.cat(
                    [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0), value=pad) for ids in some]
                )
                mask = torch.stack([torch.arange(longest) >= longest - ids.shape[1] for ids in some]).long()
                generate = model.generate if drafts else model.base.generate
                said = Said(generate(batch, attention_mask=mask, **how, **drafts), longest)
                found += [differing(*pair) for pair in zip(said.rows, expected[start : start + rows])]
            yield f"{who} in batches of {rows}", found
    yield f"{args.requests} requests", many(model, prompts, args, how, expected)


def many(
    model: Any, prompts: list[torch.Tensor], args: argparse.Namespace, how: dict[str, Any], expected: list[Any]
) -> Any:
    """Whether texts differ that 8 slots write for 32 requests; a manager gives no logits."""
    asked = (prompts * -(-args.requests // len(prompts)))[: args.requests]
    manager = model.init_continuous_batching(slots=8, draft_tree=tree_of(8, model.drafter.max_depth or 5))
    manager.start()
    call = {name: how[name] for name in ("max_new_tokens", "do_sample", "temperature") if name in how}
    call |= {"eos_token_id": -1, **({"seed": 3} if how["do_sample"] else {})}
    names = [manager.add_request(ids[0].tolist(), **call) for ids in asked]
    texts = [[*manager.request_id_iter(name)][-1].generated_tokens for name in names]
    manager.stop(hard_stop=True, timeout=60)
    return [(int(text != expected[at % len(prompts)][0].tolist()), 0) for at, text in enumerate(texts)]


def differ(args: argparse.Namespace) -> None:
    """Texts and scores that differ from what the base writes alone."""
    for dtype in args.dtypes:
        for family in args.families:
            folder = chat.chat_heads(family)
            model, tokenizer = (
                AutoModel.from_pretrained(folder, dtype=getattr(torch, dtype)),
                AutoTokenizer.from_pretrained(folder),
            )
            prompts = prompts_of(args, tokenizer)
            for exact in (False, True) if args.without else (True,):
                hf_drafthead.exact(model, exact)
                for settings in (MODES[mode] for mode in args.modes):
                    how = {"max_new_tokens": args.max_new_tokens, "pad_token_id": 2, "eos_token_id": None, **settings}
                    how |= {"output_logits": True, "return_dict_in_generate": True}
                    expected = []
                    for ids in prompts:
                        torch.manual_seed(3)
                        alone = model.base.generate(ids, attention_mask=torch.ones_like(ids), **how)
                        expected.append(Said(alone, ids.shape[1]).rows[0])
                    about = {"dtype": dtype, "family": family, "exact": exact, "sampled": settings["do_sample"]}
                    for way, pairs in ways(model, prompts, args, how, expected):
                        texts, scores = map(sum, zip(*pairs)) if pairs else (None, None)
                        say({**about, "way": way, "of": len(pairs), "texts": texts, "scores": scores})


def steps(args: argparse.Namespace) -> None:
    """Milliseconds of a step, of the processor, exact over not, behind so many positions."""
    model = AutoModel.from_pretrained(chat.chat_heads("hydra++"), dtype=getattr(torch, args.dtypes[0]))
    readers = {False: probe(model.base, (-1,)), True: probe(hf_drafthead.exact(copy.deepcopy(model.base)), (-1,))}
    for length in args.lengths:
        caches = {}
        for exact, reader in readers.items():
            cache = caches[exact] = reader.cache(1, length + 80, 64)
            inputs = {"input_ids": torch.arange(8)[None], reader.cache_name: cache, "use_cache": True}
            with torch.no_grad():
                reader(True, **inputs)
            cache.count(8)
            for block in cache.blocks:
                block.normal_()
        for nodes in (1, *NODES):
            topology = Topology.of_numbers([0, *[node // 2 for node in range(nodes - 1)]], torch.device("cpu"))
            times: dict[bool, list[float]] = {False: [], True: []}
            for exact in [False, True] * args.repeats:
                cache = caches[exact]
                cache.extent, cache.placed = length, None
                cache.lengths.fill_(length)
                start = time.process_time()
                with torch.no_grad():
                    readers[exact].nodes(torch.arange(nodes)[None], topology, cache, length + topology.depths, None)
                times[exact].append(1e3 * (time.process_time() - start))
            plain, ours = min(times[False]), min(times[True])
            cache.extent, cache.placed = length, None
            with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
                readers[True].nodes(torch.arange(nodes)[None], topology, cache, length + topology.depths, None)
            figures = {"positions": length, "nodes": nodes, "sdpa_ms": plain, "exact_ms": ours, "ratio": ours / plain}
            say({**figures, "exact_peak_mebibytes": peak(profile)})


def peak(profile: torch.profiler.profile) -> float:
    """How much more memory for tensors was held at once than at the beginning."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = [event for event in json.load(open(file.name))["traceEvents"] if event.get("name") == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    held = [event["args"]["Total Allocated"] for event in events]
    return (max(held) - held[0] + abs(events[0]["args"]["Bytes"])) / 2**20


def trial(args: argparse.Namespace) -> None:
    """Seconds that `exact` takes, of the processor, and memory that it adds to the process, which has run the base."""
    for dtype in args.dtypes:
        base = AutoModel.from_pretrained(chat.chat_heads("hydra++"), dtype=getattr(torch, dtype)).base
        with torch.no_grad():
            base(torch.ones(2, 17, dtype=torch.long))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        hf_drafthead.exact(base)
        first = time.process_time() - start
        start = time.process_time()
        hf_drafthead.exact(base)
        again = time.process_time() - start
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        hf_drafthead.exact(base, False)
        start = time.process_time()
        with torch.no_grad():
            for _ in range(10):
                base(torch.ones(1, 1, dtype=torch.long))
        step = (time.process_time() - start) / 10
        say({"dtype": dtype, "first_s": first, "again_s": again, "step_s": step, "mebibytes": memory})


def say(figures: dict[str, Any]) -> None:
    rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps(rounded), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["differ", "steps", "trial"])
    parser.add_argument("questions", nargs="?", help="of `differ`: as for `hf-drafthead bench`")
    parser.add_argument("--limit", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--without", action="store_true", help="also without `exact`")
    args = parser.parse_args()
    {"differ": differ, "steps": steps, "trial": trial}[args.what](args)


if __name__ == "__main__":
    main()
