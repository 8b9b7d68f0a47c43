"""Does `bench` agree with a stopwatch? A plain loop around `generate`, beside what `bench` says of the same questions.

    python tests/tools/stopwatch.py MODEL QUESTIONS --limit 10 --max-new-tokens 64

The loop and `bench` take each question one after the other, so that both see the same moods of the machine, and ask it
in the same way: through the chat template, every turn after the base's own answers. Printed are both speedups and both
tokens per step. It ends with exit code 1 if the speedups are more than 5% apart, or the tokens per step not equal.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_drafthead.evaluation.bench import bench
from hf_drafthead.evaluation.calls import encode_all, encode_turn, has_room
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.questions import Question, read_questions

MOST_APART = 0.05


@dataclass
class Tally:
    """Seconds of base and heads, and what the steps emitted, summed over questions."""

    seconds: dict[str, float] = field(default_factory=lambda: {"base": 0.0, "heads": 0.0})
    emitted: int = 0
    steps: int = 0
    tokens: int = 0

    @property
    def speedup(self) -> float:
        return self.seconds["base"] / self.seconds["heads"]

    @property
    def tokens_per_step(self) -> float | None:
        return self.emitted / self.steps if self.steps else None


def by_hand(
    model: Any, tokenizer: Any, question: Question, settings: Mapping[str, Any], repeats: int, told: Tally
) -> None:
    """Time every turn of a question with base and heads in turn; the first time of each warms up."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    answers: list[str] = []
    while len(answers) < len(question.turns):
        inputs = encode_turn(model, tokenizer, [question], [answers])
        width = inputs["input_ids"].shape[1]
        if answers and not has_room(model, width, settings["max_new_tokens"]):
            break
        taken: dict[str, list[float]] = {"base": [], "heads": []}
        output: dict[str, Any] = {}
        for repeat in range(repeats + 1):
            for name, decoder in (("base", model.base), ("heads", model)):
                wait()
                start = time.perf_counter()
                output[name] = decoder.generate(**inputs, **settings, return_dict_in_generate=True)
                wait()
                if repeat:
                    taken[name].append(time.perf_counter() - start)
        for name in taken:
            told.seconds[name] += statistics.median(taken[name])
        accepted = output["heads"].accepted_lengths
        told.emitted += int(accepted.sum())
        told.steps += int((accepted > 0).sum())
        new = output["base"].sequences[0, width:]
        told.tokens += len(new)
        answers.append(tokenizer.decode(new, skip_special_tokens=True).strip())


def by_bench(
    model: Any, tokenizer: Any, question: Question, settings: Mapping[str, Any], repeats: int, told: Tally
) -> None:
    """What `bench` says of the same question."""
    (found,) = bench(model, tokenizer, [question], settings, repeats=repeats)
    told.seconds["base"] += found.new_tokens / found.base_tokens_per_second
    told.seconds["heads"] += found.new_tokens / found.tokens_per_second
    told.emitted += round(found.steps * (found.tokens_per_step or 0))
    told.steps += found.steps
    told.tokens += found.new_tokens


def disagreements(loop: Tally, benched: Tally) -> list[str]:
    """Where the two do not agree, one line each."""
    found = []
    if abs(benched.speedup / loop.speedup - 1) > MOST_APART:
        found.append(f"the speedups are more than {MOST_APART:.0%} apart.")
    if (loop.emitted, loop.steps) != (benched.emitted, benched.steps):
        found.append("the tokens per step are not those of the loop.")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions")
    parser.add_argument("--chat-template", type=Path)
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    model, tokenizer = load(args.model, device_map="auto" if torch.cuda.is_available() else None)
    if args.chat_template is not None:
        tokenizer.chat_template = args.chat_template.read_text(encoding="utf-8")
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    questions = read_questions(args.questions, limit=args.limit)
    encode_all(model, tokenizer, [[question] for question in questions], args.max_new_tokens)  # refused at once
    loop, benched = Tally(), Tally()
    for question in questions:
        by_hand(model, tokenizer, question, settings, args.repeats, loop)
        by_bench(model, tokenizer, question, settings, args.repeats, benched)
    ratio = benched.speedup / loop.speedup
    print(f"speedup: loop {loop.speedup:.3f}, bench {benched.speedup:.3f}, ratio {ratio:.3f}, {loop.tokens} tokens")
    print(f"tokens per step: loop {loop.tokens_per_step}, bench {benched.tokens_per_step}")
    found = disagreements(loop, benched)
    for line in found:
        print(line, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
