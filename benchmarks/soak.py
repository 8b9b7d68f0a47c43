"""Many generations of mixed settings on the bundled models, each compared with the base's own; memory must stay flat.

    python benchmarks/soak.py                      # 2,000 generations, every family (`make soak`)
    python benchmarks/soak.py --count 40 --seed 7  # a short one
    python benchmarks/soak.py --learn              # heads change between generations

Every generation draws from the seed and its own number what it is, so that one can be run again: `--first 1234 --count
1`. That is its family, prompts, lengths, sampling, processors, stops, tree, form of output, copies of its own text and
of earlier ones, tokens that a constraint leaves no choice of, what steps are said to cost, by which those of the tree
`auto` choose their nodes, and whether its steps are captured. With `--learn` heads learn from what some of them have
written. float64, on the CPU; captured steps are traced and not compiled, which takes less long, and those of a family
are of one tree and batch size, so that most of them run a step that was traced for an earlier generation. Exit code 1:
a text, a score or the generator's state differed, or memory grew.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import resource
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer, CompileConfig, LogitsProcessor, PreTrainedModel, StoppingCriteria
from transformers.utils import logging

from hf_drafthead import zoo
from hf_drafthead.evaluation.questions import read_questions
from hf_drafthead.generation.lookup import TextIndex
from hf_drafthead.generation.programs import PROGRAMS
from hf_drafthead.trees.costs import NodeCosts, StepCosts

BUSHY = [[0], [0, 0], [1], [2], [1, 0], [0, 1], [0, 0, 0]]
TREES: list[Any] = ["mc_sim_7b_63", [[0], [1], [0, 0]], [[0]], [[rank] for rank in range(12)], BUSHY, "dynamic", "auto"]
FORBIDS = {"no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"}  # what a constraint may leave alone
LEARNING = 0.1  # of the generations with `--learn`, behind which heads learn from theirs
CAPTURED = 0.04  # of the generations: tracing a step takes seconds
TRACED = CompileConfig(backend="eager", mode="default")
ALLOWED_GROWTH = 1.1  # of the memory after a tenth of the generations
PROGRAM_MB = 15  # at most, of a traced step, which is kept for later calls; a model keeps 8 of them


@dataclass
class Report:
    """What a soak has found.

    differences: one line per generation that differed, with its number; accepted: tokens that a guess brought;
    resident: MB after every hundredth of the generations; programs: traced steps that were kept then.
    """

    generations: int = 0
    drafted: int = 0
    captured: int = 0
    learned: int = 0
    tokens: int = 0
    accepted: int = 0
    with_accepted: int = 0
    families: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)
    resident: list[float] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)

    @property
    def grew(self) -> bool:
        """Whether memory grew after the first tenth, in which caches and buffers are made, by more than programs."""
        settled = max(len(self.resident) // 10, 1)
        more = max(self.programs[-10:]) - max(self.programs[:settled])
        allowed = ALLOWED_GROWTH * max(self.resident[:settled]) + PROGRAM_MB * max(more, 0)
        return len(self.resident) >= 20 and max(self.resident[-10:]) > allowed

    def to_json(self) -> dict[str, Any]:
        shown = {"first_mb": self.resident[0], "peak_mb": max(self.resident), "last_mb": self.resident[-1]}
        told = {"families": dict(self.families), "resident": shown, "programs": self.programs[-1], "grew": self.grew}
        return {**vars(self), **told}


class Mixes(LogitsProcessor):
    """Adds to every row some of what the base says of the others."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 0.3 * scores.flip(0)


class OnMultiple(StoppingCriteria):
    """Fires for a row whose newest token is a multiple of a number."""

    def __init__(self, number: int):
        self.number = number

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % self.number == 0


class Frames:
    """A constraint that leaves one token of every few places, and of the others half of all."""

    def __init__(self, every: int, forced: int, vocabulary: int):
        self.every, self.forced, self.vocabulary = every, forced, vocabulary

    def __call__(self, row: int, ids: torch.Tensor) -> list[int]:
        at = len(ids)
        return [3 + at % 11] if at % self.every < self.forced else [*range(at % 2, self.vocabulary, 2)]


def say_costs(dice: random.Random) -> None:
    """Let steps of every size cost something or other."""
    more = dice.choice([0.0, 0.01, 0.05, 0.2])

    def said(self: StepCosts, trees: Any) -> NodeCosts:
        return NodeCosts({size: 1 + more * size.nodes + 0.05 * size.depth for size in trees})

    StepCosts.__call__ = said  # type: ignore[method-assign]


def settings(dice: random.Random, tokenizer) -> dict[str, Any]:
    """Arguments of one call of `generate`."""
    call: dict[str, Any] = {"max_new_tokens": dice.choice([1, 2, 7, 24, 48]), "do_sample": dice.random() < 0.5}
    if call["do_sample"]:
        call |= {"temperature": dice.choice([0.3, 0.7, 1.0]), "top_k": dice.choice([0, 5, 50])}
        call |= dice.choice([{}, {"top_p": 0.8}, {"min_p": 0.05}, {"typical_p": 0.9}])
    call |= dice.choice(
        [
            {},
            {},
            {"repetition_penalty": 1.2},
            {"no_repeat_ngram_size": 3},
            {"min_new_tokens": 5},
            {"bad_words_ids": [[17], [5, 6]]},
            {"exponential_decay_length_penalty": (4, 1.1)},
            {"suppress_tokens": [12]},
            {"stop_strings": ["return", "\n\n"], "tokenizer": tokenizer},
            {"eos_token_id": [0, 13]},
            {"num_return_sequences": 2, "do_sample": True},
            {"logits_processor": [Mixes()], "eos_token_id": [0, 13]},
            {"stopping_criteria": [OnMultiple(dice.choice([5, 17]))]},
        ]
    )
    if dice.random() < 0.3:
        call |= {"output_scores": True, "output_logits": True}
    if dice.random() < 0.25 and not call.keys() & FORBIDS:
        every = dice.choice([3, 8, 20])
        call["prefix_allowed_tokens_fn"] = Frames(every, dice.randint(1, every - 1), len(tokenizer))
    return call


def one(
    number: int,
    seed: int,
    models: dict[str, PreTrainedModel],
    tokenizer,
    prompts: list[str],
    report: Report,
    earlier: TextIndex,
    learn: bool,
) -> None:
    """Run the generation of a number on the base and on the model, and note what differs."""
    dice = random.Random(f"{seed} {number}")
    family = dice.choice(sorted(models))
    model = models[family]
    tree, rows, captured = dice.choice(TREES), dice.randint(1, 4), dice.random() < CAPTURED
    if captured:
        place = sorted(models).index(family)
        tree, rows = TREES[place % len(TREES)], 1 + place % 4
    texts = [text[: dice.randint(4, 160)] for text in dice.sample(prompts, rows)]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    call = settings(dice, tokenizer)
    own: dict[str, Any] = {"draft_tree": tree} | ({"compile_config": TRACED} if captured else {})
    if dice.random() < 0.4:
        own |= {"prompt_lookup_num_tokens": dice.choice([1, 4, 9])} if dice.random() < 0.7 else {}
        own |= {"lookup_texts": earlier} if dice.random() < 0.5 else {}
    say_costs(dice)
    told = f"{number} ({family}, {len(texts)} rows, {own}, {dict(call, tokenizer=None)})"
    outputs, states = [], []
    for runner, mine in ((model.base, {}), (model, own)):
        torch.manual_seed(number)
        outputs.append(runner.generate(**given, **call, **mine, return_dict_in_generate=True))
        states.append(torch.get_rng_state())
    expected, got = outputs
    lengths = getattr(got, "accepted_lengths", None)
    report.generations += 1
    report.captured += captured
    report.families[family] += 1
    report.tokens += int(got.sequences.shape[1] - given["input_ids"].shape[1]) * got.sequences.shape[0]
    if lengths is not None:
        brought = int((lengths - 1).clamp(min=0).sum())
        report.drafted += 1
        report.accepted += brought
        report.with_accepted += brought > 0
    if not torch.equal(expected.sequences, got.sequences):
        report.differences.append(f"{told}: other tokens")
    elif not torch.equal(*states):
        report.differences.append(f"{told}: the generator is left in another state")
    start = given["input_ids"].shape[1]
    for row in got.sequences[:, start:].tolist():
        earlier.put(row)
    if learn and dice.random() < LEARNING:
        texts = zip(given["input_ids"].tolist(), got.sequences[:, start:].tolist())
        mine = [(prompt, answer) for prompt, answer in texts for _ in range(8)]
        model.learn_from(*zip(*mine))
        report.learned += 1
    for name in ("scores", "logits"):
        theirs, ours = expected.get(name) or (), got.get(name) or ()
        if len(theirs) != len(ours) or not all(map(torch.allclose, theirs, ours)):
            report.differences.append(f"{told}: other {name}")


def resident_mb() -> float:
    """Memory that the process holds now; at its peak where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def soak(count: int, first: int = 0, seed: int = 0, families: list[str] | None = None, learn: bool = False) -> Report:
    """Run so many generations, of the numbers from `first` on."""
    paths = {name: zoo.path(name) for name in families or zoo.families()}
    models = {name: AutoModel.from_pretrained(path, dtype=torch.float64).eval() for name, path in paths.items()}
    tokenizer = AutoTokenizer.from_pretrained(next(iter(paths.values())))
    prompts = [prompt.text for prompt in read_questions(zoo.ASSETS / "prompts.jsonl")]
    report, earlier = Report(), TextIndex(capacity=1 << 13)
    every = max(count // 100, 1)
    for number in range(first, first + count):
        one(number, seed, models, tokenizer, prompts, report, earlier, learn)
        if report.generations % every == 0:
            gc.collect()
            report.resident.append(resident_mb())
            report.programs.append(sum(len(kept.compiled) for kept in PROGRAMS.values()))
            found = f"{report.with_accepted} with an accepted guess, {len(report.differences)} differences"
            print(
                f"{report.generations} of {count}: {found}, {report.resident[-1]:.0f} MB", file=sys.stderr, flush=True
            )
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="generations")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", action="append", help="may be repeated; default: all of the zoo")
    parser.add_argument("--learn", action="store_true", help="heads learn from some of what was written")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    report = soak(arguments.count, arguments.first, arguments.seed, arguments.family, arguments.learn)
    figures = report.to_json()
    print(json.dumps(figures, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if report.differences or report.grew else 0)


if __name__ == "__main__":
    main()
