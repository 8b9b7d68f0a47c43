"""Does `bench` agree with a stopwatch? A plain loop around `generate`, beside what `bench` says of the same prompts.

    python tests/tools/stopwatch.py MODEL QUESTIONS --limit 10 --max-new-tokens 64

The loop and `bench` take each prompt one after the other, so that both see the same moods of the machine. Printed are
both speedups and their ratio, which should lie within 5% of 1, and both tokens per step, which should be equal.
"""

import argparse
import statistics
import time

import torch

from hf_drafthead.evaluation.bench import bench
from hf_drafthead.evaluation.loading import load
from hf_drafthead.evaluation.questions import read_questions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("questions")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    model, tokenizer = load(args.model, device_map="auto" if torch.cuda.is_available() else None)
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens}
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    seconds = {"base": 0.0, "heads": 0.0}
    told = {"base": 0.0, "heads": 0.0}
    emitted = steps = tokens = 0
    bench_emitted = bench_steps = 0
    for question in read_questions(args.questions)[: args.limit]:
        inputs = tokenizer(question.text, return_tensors="pt").to(model.device)
        taken: dict[str, list[float]] = {"base": [], "heads": []}
        for repeat in range(args.repeats + 1):
            for name, decoder in (("base", model.base), ("heads", model)):
                wait()
                start = time.perf_counter()
                output = decoder.generate(**inputs, **settings, return_dict_in_generate=True)
                wait()
                if repeat:  # the first time warms up
                    taken[name].append(time.perf_counter() - start)
        for name in seconds:
            seconds[name] += statistics.median(taken[name])
        emitted += int(output.accepted_lengths.sum())
        steps += int((output.accepted_lengths > 0).sum())
        (found,) = bench(model, tokenizer, [question], settings, repeats=args.repeats)
        tokens += found.new_tokens
        told["base"] += found.new_tokens / found.base_tokens_per_second
        told["heads"] += found.new_tokens / found.tokens_per_second
        bench_emitted += sum(length * count for length, count in found.accepted_lengths.items())
        bench_steps += sum(found.accepted_lengths.values())
    plain, benched = seconds["base"] / seconds["heads"], told["base"] / told["heads"]
    print(f"speedup: loop {plain:.3f}, bench {benched:.3f}, ratio {benched / plain:.3f}, on {tokens} tokens")
    print(f"tokens per step: loop {emitted / steps:.4f}, bench {bench_emitted / bench_steps:.4f}")


if __name__ == "__main__":
    main()
