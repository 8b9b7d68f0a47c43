"""Tokens per step of several models with heads on MT-Bench's and Spec-Bench's questions, by category, in batches.

    python benchmarks/chat_figures.py QUESTIONS.jsonl HEADS [HEADS ...] --output figures.jsonl
    python benchmarks/chat_figures.py QUESTIONS.jsonl HEADS --tree dynamic --nodes 32 --limit 4 --device cpu
    python benchmarks/chat_figures.py QUESTIONS.jsonl HEADS --tree chain dynamic --limit 1 --dtype bfloat16 --device cpu
    python benchmarks/chat_figures.py QUESTIONS.jsonl HEADS --draft-vocab-size 2048 8192 49152 \
        --shards benchmarks/chat_text

Every question is asked through the chat template, turn after turn, each after the base's own answer to the one before.
The answers are the base's, so all heads are measured on the same text; how fast they are is for `hf-drafthead bench`,
which times one row. Needs torch, transformers and this checkout. A line of JSON per heads, tree and temperature is
appended to the output at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from chat_training import ShardRows  # beside this file
from transformers import AutoModel, AutoTokenizer

import hf_drafthead  # noqa: F401 - registers the models
from hf_drafthead import DraftTree
from hf_drafthead.training.examples import frequent_tokens, label_frequencies

SPEC_BENCH = {"translation", "summarization", "qa", "math_reasoning", "rag"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path, help="lines with `category` and `turns`")
    parser.add_argument("heads", nargs="+", help="folders or ids of models with heads")
    parser.add_argument("--base", help="the base, where the heads name another place")
    parser.add_argument("--tree", nargs="*", default=["static", "dynamic"], choices=["static", "dynamic", "chain"])
    parser.add_argument("--nodes", type=int, nargs="*", default=[32], help="nodes of a step, the root included")
    parser.add_argument("--temperature", type=float, nargs="*", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of every answer")
    parser.add_argument("--limit", type=int, help="questions of every category")
    parser.add_argument("--batch", type=int, default=40, help="rows of a call; 0 counts no tokens per step")
    parser.add_argument(
        "--draft-vocab-size", type=int, nargs="*", default=[None], help="other sizes, for heads that share the lm_head"
    )
    parser.add_argument("--shards", type=Path, help="of `chat_heads.py`, on whose answers the tokens are counted")
    parser.add_argument("--lookup", type=int, nargs="*", default=[0], help="tokens copied from the text in each step")
    parser.add_argument(
        "--timed", type=int, default=0, help="questions that are also timed beside the base, row by row"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, default=Path("figures.jsonl"))
    args = parser.parse_args()
    questions = read(args.questions, args.limit)
    for heads in args.heads:
        more = {"base_model": args.base} if args.base else {}
        model = AutoModel.from_pretrained(heads, dtype=getattr(torch, args.dtype), **more).to(args.device).eval()
        tokenizer = AutoTokenizer.from_pretrained(args.base or heads, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        for vocabulary, kind, nodes, temperature, copied in itertools.product(
            args.draft_vocab_size, args.tree, args.nodes, args.temperature, args.lookup
        ):
            if vocabulary:
                draft_among(model, vocabulary, args.shards)
            call = {"draft_tree": tree_of(model, kind, nodes), "max_new_tokens": args.tokens}
            call |= {"do_sample": temperature > 0, "top_k": 0} if temperature else {"do_sample": False}
            call |= {"temperature": temperature} if temperature else {}
            call |= {"prompt_lookup_num_tokens": copied} if copied else {}
            row = {"heads": Path(heads).name, "tree": kind, "nodes": nodes, "temperature": temperature}
            row |= {"lookup": copied, "dtype": args.dtype, "device": args.device}
            row |= {"draft_vocab_size": model.drafter.choices}
            if args.batch:
                row |= measured(model, tokenizer, questions, call, args.batch)
            if args.timed:
                row |= timed(model, tokenizer, questions, call, args.timed)
            with args.output.open("a") as output:
                output.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def draft_among(model: Any, size: int, shards: Path) -> None:
    """Let heads that share the base's lm_head guess among so many tokens, those that the base's answers hold most."""
    known = model.config.known_tokens
    tokens = None
    if size < known:
        rows = ShardRows(shards, float("inf"))
        tokens = frequent_tokens(label_frequencies(rows, known), size)[0].sort().values.to(model.base.device)
    model.config.draft_vocab_size, model.drafter.draft_tokens = size, tokens


def read(path: Path, limit: int | None) -> dict[str, list[list[str]]]:
    """The turns of every question, by category; MT-Bench's topics are one category where Spec-Bench's others are."""
    topics: dict[str, list[list[str]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        question = json.loads(line)
        topic = topics[question["category"]]
        if limit is None or len(topic) < limit:
            topic.append(question["turns"])
    if not SPEC_BENCH & set(topics):
        return dict(topics)
    grouped: dict[str, list[list[str]]] = defaultdict(list)
    for name, turns in topics.items():
        grouped[name if name in SPEC_BENCH else "mt_bench"] += turns
    return dict(grouped)


def tree_of(model: Any, kind: str, nodes: int) -> Any:
    """A tree of so many nodes: the published one's nodes nearest to the root and the first guess, or a dynamic one.

    A chain of first guesses is as long as the heads guess, or six tokens.
    """
    deepest = model.drafter.max_depth
    if kind == "chain":
        return DraftTree([(0,) * depth for depth in range(1, (deepest or 6) + 1)])
    if kind == "dynamic":
        return {"dynamic": {"nodes": nodes, **({} if deepest is None else {"depth": min(6, deepest)})}}
    paths = DraftTree.from_name("mc_sim_7b_63").cut(deepest or 99).paths
    return DraftTree(sorted(paths, key=lambda path: (len(path) + sum(path), path))[: nodes - 1])


def measured(model: Any, tokenizer: Any, questions: dict[str, list[list[str]]], call: dict, batch: int) -> dict:
    """Tokens per step of every category and of all, and how many steps they were counted in."""
    torch.manual_seed(0)
    begun = time.perf_counter()
    asked = [(name, turns) for name, group in questions.items() for turns in group]
    tokens, steps = dict.fromkeys(questions, 0), dict.fromkeys(questions, 0)
    for first in range(0, len(asked), batch):
        talks: list[list[dict[str, str]]] = [[] for _ in asked[first : first + batch]]
        for turn in range(max(len(turns) for _, turns in asked[first : first + batch])):
            here = [
                (name, talk, turns[turn])
                for talk, (name, turns) in zip(talks, asked[first : first + batch])
                if turn < len(turns)
            ]
            for _, talk, words in here:
                talk.append({"role": "user", "content": words})
            texts = [
                tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for _, talk, _ in here
            ]
            inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            inputs = inputs.to(model.base.device)
            output = model.generate(**inputs, **call, return_dict_in_generate=True)
            answers = tokenizer.batch_decode(
                output.sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            accepted = [[]] * len(here) if output.accepted_lengths is None else output.accepted_lengths.tolist()
            for (name, talk, _), answer, lengths in zip(here, answers, accepted):
                talk.append({"role": "assistant", "content": answer.strip()})
                tokens[name] += sum(lengths)
                steps[name] += sum(length > 0 for length in lengths)
    all_steps = sum(steps.values())
    return {
        "tokens_per_step": round(sum(tokens.values()) / all_steps, 3) if all_steps else None,
        "by_category": {name: round(tokens[name] / steps[name], 3) if steps[name] else None for name in questions},
        "steps": all_steps,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def timed(model: Any, tokenizer: Any, questions: dict[str, list[list[str]]], call: dict, count: int) -> dict:
    """Tokens per second with heads over those of the base, as installed and in turn, one question at a time.

    The questions are the first of every category, one after the other; `spread` holds the quartiles of their ratios.
    """
    groups = list(questions.values())
    asked = [group[turn][0] for turn in range(count) for group in groups if turn < len(group)][:count]
    calls = {"base": model.base.generate, "heads": model.generate}
    base_call = {name: value for name, value in call.items() if name not in ("draft_tree", "prompt_lookup_num_tokens")}
    ratios, same, seconds, tokens, steps = [], 0, dict.fromkeys(calls, 0.0), 0, 0
    for number, question in enumerate([asked[0], *asked]):  # the first one prepares
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False).to(model.base.device)
        taken, texts = {}, {}
        for name in ("base", "heads") if number % 2 else ("heads", "base"):
            torch.manual_seed(number)
            wait(model.base.device)
            begun = time.perf_counter()
            output = calls[name](**inputs, **(call if name == "heads" else base_call), return_dict_in_generate=True)
            wait(model.base.device)
            taken[name], texts[name] = time.perf_counter() - begun, output.sequences
            if name == "heads" and number and output.accepted_lengths is not None:
                tokens, steps = tokens + int(output.accepted_lengths.sum()), steps + output.accepted_lengths.shape[1]
        if number:
            ratios.append(taken["base"] / taken["heads"])
            same += texts["base"].equal(texts["heads"])
            seconds = {name: seconds[name] + taken[name] for name in calls}
    quartiles = [round(float(q), 3) for q in torch.tensor(ratios).quantile(torch.tensor([0.25, 0.5, 0.75]))]
    speedup = round(seconds["base"] / seconds["heads"], 3)
    return {
        "speedup": speedup,
        "spread": quartiles,
        "timed": len(asked),
        "same_text": same,
        "timed_tokens_per_step": round(tokens / max(steps, 1), 3),
    }


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
