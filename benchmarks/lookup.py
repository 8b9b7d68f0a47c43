"""Copies from the text in the tree: tokens per step at equal nodes beside heads alone, copies alone and transformers'
own prompt lookup, and what a step with copies costs, in processor seconds.

    python benchmarks/lookup.py zoo                      # the bundled families on the held-out prompts
    python benchmarks/lookup.py zoo --family medusa --nodes 32 --copies 4 8 --tokens 64
    python benchmarks/lookup.py chat QUESTIONS.jsonl HEADS [HEADS ...] --base BASE   # Spec-Bench, by category
    python benchmarks/lookup.py step [--heads HEADS --base BASE --dtype bfloat16]    # captured, with over without
    python benchmarks/lookup.py match --heads HEADS --base BASE                      # the search in 8,000 tokens

Greedy; the text of every call is compared with the base's. `zoo` and `step` decode in float32, and any other text than
the base's ends them; `chat` counts texts that rounding changed. Each part of the figures stands under its own name in
results/lookup.json.

With `--below`, `zoo` also counts trees in which copies hang below the heads' best guess where the root alone matches
nothing, which the library does not do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from hf_drafthead import DraftTree, zoo
from hf_drafthead.evaluation.calls import counted_forwards, encode_turn
from hf_drafthead.evaluation.questions import Question, read_questions
from hf_drafthead.generation import drafting, step
from hf_drafthead.generation.lookup import Copies, copies, joined
from hf_drafthead.trees.rank_paths import left_padded
from hf_drafthead.trees.timing import StepClock, time_interleaved

RESULTS = Path(__file__).resolve().parent / "results" / "lookup.json"
LONGEST_MATCH = 3
GREEDY = {"do_sample": False, "return_dict_in_generate": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, count in (("zoo", 96), ("chat", 64), ("step", 96), ("match", 24)):
        part = parts.add_parser(name)
        part.add_argument("--nodes", type=int, default=16, help="of a step, the root included")
        part.add_argument("--copies", type=int, nargs="*", default=[8], help="tokens copied in each step")
        part.add_argument("--tokens", type=int, default=count, help="new tokens of every prompt")
        part.add_argument("--limit", type=int, default=5 if name == "chat" else None, help="prompts, of each category")
        part.add_argument("--output", type=Path, default=RESULTS)
        part.add_argument("--base", help="the base, where the heads name another place")
        part.add_argument("--dtype", default="bfloat16" if name in ("chat", "match") else "float32")
        if name == "zoo":
            part.add_argument("--family", nargs="*", default=zoo.families())
            part.add_argument("--below", action="store_true", help="also count copies below the best guess")
        elif name == "chat":
            part.add_argument("questions", type=Path, help="lines with `category` and `turns`")
            part.add_argument("heads", nargs="+", help="folders or ids of models with heads")
        else:
            part.add_argument("--heads", default=zoo.path("medusa"), help="folder or id of a model with heads")
            part.add_argument("--repeats", type=int, default=15)
            part.add_argument("--length", type=int, default=8000, help="tokens of the text that is searched")
    args = parser.parse_args()
    for figures in {"zoo": of_zoo, "chat": of_chat, "step": of_step, "match": of_match}[args.part](args):
        stored = json.loads(args.output.read_text()) if args.output.is_file() else {}
        args.output.write_text(json.dumps({**stored, args.part: figures}, indent=1) + "\n")


def of_zoo(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    """Tokens per step of the bundled families on the held-out prompts, family by family."""
    questions = read_questions(zoo.ASSETS / "prompts.jsonl")[: args.limit]
    rows: list[dict[str, Any]] = []
    for family in args.family:
        model, tokenizer = loaded(str(zoo.path(family)), None, args.dtype)
        prompts = [tokenizer(question.text, return_tensors="pt").input_ids[:, -128:] for question in questions]
        counts = Counted(model, static_tree(model, args.nodes), args)
        for prompt in prompts:
            given = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
            counts.add_all(given, model.base.generate(**given, max_new_tokens=args.tokens, do_sample=False))
        if counts.different:
            raise SystemExit(f"{family}: {counts.different} texts are not the base's: that is a fault, report it.")
        rows.append({"family": family, "nodes": args.nodes, "prompts": len(prompts), **counts.figures()})
        print(json.dumps(rows[-1]), flush=True)
        yield rows


def of_chat(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens per step by category of a file of questions, written after every question."""
    base = AutoModelForCausalLM.from_pretrained(args.base, dtype=getattr(torch, args.dtype)).eval()
    models = [loaded(heads, base, args.dtype)[0] for heads in args.heads]
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    groups: dict[str, list[Question]] = defaultdict(list)
    for question in read_questions(args.questions):
        groups[question.category].append(question)
    spread = [group[:: max(len(group) // args.limit, 1)][: args.limit] for group in groups.values()]
    tree = {"dynamic": {"nodes": args.nodes}}
    counted: dict[str, list[Counted]] = defaultdict(list)
    for question in itertools.chain(*itertools.zip_longest(*spread)):  # one of each category, and so on
        kept = counted[question.category] = counted[question.category] or [
            Counted(model, tree, args, alone=model is models[0]) for model in models
        ]
        answers: list[str] = []
        for _ in question.turns:
            given = encode_turn(models[0], tokenizer, [question], [answers])
            text = base.generate(**given, max_new_tokens=args.tokens, do_sample=False)
            for counts in kept:
                counts.add_all(given, text)
            answers.append(tokenizer.decode(text[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
        by_category = {
            category: {
                "texts": each[0].texts,
                **{model.config.family: counts.figures() for model, counts in zip(models, each)},
                "texts_that_rounding_changed": sum(counts.different for counts in each),
            }
            for category, each in counted.items()
        }
        figures = {"nodes": args.nodes, "tokens": args.tokens, "dtype": args.dtype, "tree": "dynamic", **by_category}
        print(question.category, json.dumps(by_category[question.category]), flush=True)
        yield figures


def of_step(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A captured step with copies over one without, in turn, at equal nodes: medians and quartiles over calls."""
    model, tokenizer = loaded(args.heads, args.base, args.dtype)
    texts = [question.text for question in read_questions(zoo.ASSETS / "prompts.jsonl")]
    prompts = [tokenizer(text, return_tensors="pt").input_ids[0, -128:] for text in texts]
    tree = static_tree(model, args.nodes)
    base = model.base.config.get_text_config()
    figures: dict[str, Any] = {"layers": base.num_hidden_layers, "hidden_size": base.hidden_size, "dtype": args.dtype}
    stored = json.loads(args.output.read_text()).get("step", {}) if args.output.is_file() else {}
    for rows in (1, 4):
        given = left_padded(model, prompts[:rows])
        call = {**given, "max_new_tokens": args.tokens, "eos_token_id": None, "cache_implementation": "static"}
        clocks: dict[str, list[float]] = {"without": [], "with": []}

        def timed(name: str, more: dict[str, Any], call: dict[str, Any] = call, clocks: dict = clocks) -> torch.Tensor:
            clock = OwnSeconds()
            text: torch.Tensor = model.generate(**call, do_sample=False, draft_tree=tree, on_step=clock.put, **more)
            clocks[name].append(clock.step())
            return text

        runs = {
            "without": lambda timed=timed: timed("without", {}),
            "with": lambda timed=timed: timed("with", {"prompt_lookup_num_tokens": args.copies[0]}),
        }
        outputs, _ = time_interleaved(runs, args.repeats + 1, model.base.device)  # the first call compiles
        if args.dtype == "float32" and not torch.equal(outputs["with"], outputs["without"]):
            raise SystemExit("the texts differ: that is a fault, report it.")
        clocks = {name: seconds[1:] for name, seconds in clocks.items()}
        ratios = [longer / shorter for longer, shorter in zip(clocks["with"], clocks["without"], strict=True)]
        figures[f"batch {rows}"] = {
            "ratio": round(statistics.median(ratios), 4),
            "quartiles": [round(value, 4) for value in statistics.quantiles(ratios, n=4)],
            "calls": len(ratios),
        }
        print(json.dumps(figures), flush=True)
        yield {**stored, f"{base.num_hidden_layers} layers": figures}


def of_match(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds of the search in a long text over those of a step, between whose steps it runs.

    The steps are those of a short text, which take less time than those of the long one.
    """
    model, _ = loaded(args.heads, args.base, args.dtype)
    text = torch.randint(3, 2000, (1, args.length), generator=torch.Generator().manual_seed(0))
    lengths, searches, steps, ended = torch.tensor([args.length]), list[float](), list[float](), list[float]()

    def search(record: Any) -> None:
        begun = time.process_time()
        copies(text, lengths, args.copies[0], LONGEST_MATCH, 2000)
        if record.step:
            steps.append(begun - ended[-1])
            searches.append(time.process_time() - begun)
        ended.append(time.process_time())

    call = {"max_new_tokens": args.tokens, "eos_token_id": None, "do_sample": False, "on_step": search}
    prompt = text[:, :128]
    model.generate(prompt, attention_mask=torch.ones_like(prompt), draft_tree=static_tree(model, args.nodes), **call)
    shares = [search / step for search, step in zip(searches, steps, strict=True)]
    figures = {"tokens": args.length, "nodes": args.nodes, "layers": model.base.config.num_hidden_layers}
    figures |= {"dtype": args.dtype, "steps": len(shares), "share": round(statistics.median(shares), 5)}
    figures |= {"quartiles": [round(value, 5) for value in statistics.quantiles(shares, n=4)]}
    print(json.dumps(figures), flush=True)
    yield figures


class OwnSeconds(StepClock):
    """Counts the seconds of this process alone, which other load on the machine changes little."""

    def put(self, _: Any) -> None:
        self.times.append(time.process_time())


class Counted:
    """Tokens and steps of every way to decode, over the texts so far.

    Args:
        model: with heads.
        tree: of the heads.
        args: nodes, copies and tokens.
        alone: whether the ways that need no heads are counted too.
    """

    def __init__(self, model: Any, tree: Any, args: argparse.Namespace, alone: bool = True):
        self.model, self.tree, self.args, self.alone = model, tree, args, alone
        self.tokens: Counter[str] = Counter()
        self.steps: Counter[str] = Counter()
        self.texts = self.different = 0

    def add_all(self, given: dict[str, torch.Tensor], text: torch.Tensor) -> None:
        """One prompt, decoded in every way; `text` is the base's."""
        call = {**given, **GREEDY, "max_new_tokens": self.args.tokens}
        self.texts += 1
        self._add("heads", self.model.generate(**call, draft_tree=self.tree), text)
        for count in self.args.copies:
            both = {**call, "draft_tree": self.tree, "prompt_lookup_num_tokens": count}
            self._add(f"both, {count}", self.model.generate(**both), text)
            if getattr(self.args, "below", False):
                with below_the_guess():
                    self._add(f"both, {count}, also below the best guess", self.model.generate(**both), text)
        if not self.alone:
            return
        copied = {"prompt_lookup_num_tokens": self.args.nodes - 1}
        self._add("copies alone", self.model.generate(**call, **copied, draft_tree="lookup"), text)
        with counted_forwards(self.model.base) as forwards:
            theirs = self.model.base.generate(**call, **copied)
        # the prefill counts as one token, though it checks a copy too
        self.tokens["transformers"] += theirs.sequences.shape[1] - given["input_ids"].shape[1] - 1
        self.steps["transformers"] += len(forwards) - 1

    def figures(self) -> dict[str, Any]:
        """Tokens per step of every way."""
        return {name: round(self.tokens[name] / max(steps, 1), 3) for name, steps in self.steps.items()}

    def _add(self, name: str, output: Any, text: torch.Tensor) -> None:
        self.different += not torch.equal(output.sequences, text)
        self.tokens[name] += int(output.accepted_lengths.sum())
        self.steps[name] += output.accepted_lengths.shape[1]


@contextlib.contextmanager
def below_the_guess() -> Iterator[None]:
    """Let copies also hang below the heads' best guess, in rows where the root alone matches nothing."""
    searched: list[Any] = []

    def noted(sequences: torch.Tensor, lengths: torch.Tensor, *more: int) -> Copies:
        searched[:] = [sequences, lengths, more]
        return copies(sequences, lengths, *more)

    def below(tokens: torch.Tensor, parents: Any, depths: Any, value: Any, copied: Copies, *more: int) -> Any:
        (sequences, lengths, how), guess = searched, tokens[:, 1:2]  # the first child of the root
        again = copies(sequences.scatter(1, lengths[:, None], guess), lengths + 1, *how)
        used = again.matched & ~copied.matched
        line = torch.cat([guess, again.tokens[:, :-1]], dim=1)
        copied = Copies(torch.where(used[:, None], line, copied.tokens), copied.matched | used)
        return joined(tokens, parents, depths, value, copied, *more)

    step.copies, step.joined, drafting.joined = noted, below, below
    try:
        yield
    finally:
        step.copies, step.joined, drafting.joined = copies, joined, joined


def loaded(heads: str, base: Any, dtype: str) -> tuple[Any, Any]:
    """A model with heads, on a base that is loaded, named, or the one that the heads name; and its tokenizer."""
    more = {} if base is None else {"base_model": base}
    model = AutoModel.from_pretrained(heads, dtype=getattr(torch, dtype), **more).eval()
    return model, AutoTokenizer.from_pretrained(heads)


def static_tree(model: Any, nodes: int) -> DraftTree:
    """So many nodes of the published tree, those nearest to the root and to the first guess."""
    paths = DraftTree.from_name("mc_sim_7b_63").cut(model.drafter.max_depth or 5).paths
    return DraftTree(sorted(paths, key=lambda path: (len(path) + sum(path), path))[: nodes - 1])


if __name__ == "__main__":
    main()
