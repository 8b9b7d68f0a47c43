"""`hf-drafthead bench` and `verify`: how fast, and whether exact."""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_drafthead.cli import common
from hf_drafthead.cli.common import count, flag, string


@common.app.command("bench")
@common.options_of_groups
def run_bench(
    models: common.ModelNames,
    questions: Annotated[str, string("MT-Bench, Spec-Bench, or any file or data set of chats or texts.", "FILE")],
    loading: common.Loading,
    split: Annotated[str | None, string("Of the data set.", "NAME")] = None,
    limit: Annotated[int | None, count("Only so many questions, of all categories.")] = None,
    max_new_tokens: Annotated[int, count("Tokens per answer, at most.")] = 256,
    batch_size: Annotated[str, string("Questions per call; several for a curve.", "N[,N...]")] = "1",
    repeats: Annotated[int, count("Timed runs of each prompt; the median counts.")] = 3,
    temperature: Annotated[str | None, string("0: greedy, the default; several: a curve.", "X[,X...]")] = None,
    seed: Annotated[int, count("Seed of the sampling.", 0)] = 0,
    lookup: Annotated[str | None, string("Tokens that a tree copies from the text, 0: none.", "N[,N...]")] = None,
    compare: Annotated[str | None, string("prompt-lookup, compiled or none.", "NAME[,NAME...]")] = None,
    captured: Annotated[bool, flag("--captured", "Compile the heads' steps, as a static cache does.")] = False,
    tree: common.TreeOptions = None,
    settings: common.Settings = None,
    json_path: common.Json = None,
) -> None:
    """Speed, acceptance and exactness of models with draft heads against their bases, on questions."""
    from hf_drafthead.door import recognize
    from hf_drafthead.evaluation import report
    from hf_drafthead.evaluation.bench import INTERRUPTED, bench_models, ways_to_call
    from hf_drafthead.evaluation.calls import PROMPT_LOOKUP
    from hf_drafthead.evaluation.questions import read_questions

    sizes = common.parse_numbers("--batch-size", batch_size, int)
    compare = compare or (PROMPT_LOOKUP if sizes == [1] else "none")  # which needs no heads, and decodes one row
    ways = ways_to_call(
        {"max_new_tokens": max_new_tokens, **common.parse_settings(settings)},
        common.parse_numbers("--temperature", temperature, float, zero=True) or [0.0],
        common.parse_numbers("--lookup", lookup, int, zero=True),
    )
    options: dict[str, Any] = {"captured": captured, "repeats": repeats, "seed": seed, "batch_sizes": sizes}
    options["trees"] = [common.parse_tree(text) for text in tree] if tree else [None]
    options["compare"] = [] if compare == "none" else compare.split(",")
    asked = read_questions(questions, split, limit)
    for model in models:  # one that is none is told before another has been measured for an hour
        recognize(model)
    name = Path(questions).resolve().name if Path(questions).exists() else questions
    command = shlex.join(["hf-drafthead", *sys.argv[1:]])
    about = {"questions": name, "split": split, "limit": limit, "command": command}
    about = {name: value for name, value in about.items() if value is not None}

    def keep(measurements: list[Any]) -> None:
        common.write_json(json_path, report.to_json(measurements, **about))

    options |= {"bar": common.bar, "notify": common.complain, "keep": keep}
    measurements = bench_models(models, loading.checked(), asked, ways, **options)
    console = common.output()
    console.print(report.table(measurements))
    common.say(*report.verdicts(measurements))
    if (stopped := measurements[-1].stopped) is not None:
        marked = ", marked with *," if any(not measurement.complete for measurement in measurements) else ""
        where = "" if json_path is None else f", and are kept in {str(json_path)!r}"
        common.complain(f"{stopped}: the figures{marked} are those of the prompts that were finished{where}.")
        raise SystemExit(130 if stopped == INTERRUPTED else 2)


@common.app.command("verify")
@common.options_of_groups
def run_verify(
    model: common.ModelName,
    prompts: Annotated[str, string("As the questions of `bench`; of a chat the first turn.", "FILE")],
    loading: common.Loading,
    split: Annotated[str | None, string("Of the data set.", "NAME")] = None,
    limit: Annotated[int | None, count("Only so many prompts, of all categories.")] = None,
    max_new_tokens: Annotated[int, count("Tokens per prompt.")] = 64,
    batch_size: Annotated[int, count("Rows of the checks in batches.")] = 4,
    seed: Annotated[int, count("Seed of the sampling.", 0)] = 0,
    settings: common.Settings = None,
    json_path: common.Json = None,
) -> None:
    """Whether a model with draft heads writes what its base writes; ends with 1 if it does not."""
    from hf_drafthead.evaluation.calls import batched, encode_all
    from hf_drafthead.evaluation.questions import read_questions
    from hf_drafthead.evaluation.verify import verdict_table
    from hf_drafthead.evaluation.verify import verify as check
    from hf_drafthead.exactness import exact

    options: dict[str, Any] = {"batch_size": batch_size, "settings": common.parse_settings(settings), "seed": seed}
    questions = read_questions(prompts, split, limit)
    loaded, tokenizer = dataclasses.replace(loading, exact=False).load(model)
    inputs = encode_all(loaded, tokenizer, batched(questions, 1), max_new_tokens)
    rows = [prompt["input_ids"][0].tolist() for prompt in inputs]
    options |= {"max_new_tokens": max_new_tokens, "tokenizer": tokenizer, "scores": loading.exact, "bar": common.bar}
    before = None
    if loading.exact:
        before = check(loaded, rows, **options)
        exact(loaded)
    verdict = check(loaded, rows, **options)
    if before is not None:
        common.output().print(verdict_table(before))
        common.say(f"Without --exact: {before.in_words()} With it:")
    common.output().print(verdict_table(verdict))
    common.say(verdict.in_words())
    without = {} if before is None else {"without_exact": before.to_json(tokenizer)}
    common.write_json(json_path, {**verdict.to_json(tokenizer), **without})
    if undrafted := sum(result.undrafted for result in verdict.checks):
        common.complain(f"in {undrafted} calls nothing was guessed, so they verified nothing: see the warning above.")
    if verdict.shortest is not None:
        common.complain(verdict.shortest.in_words(tokenizer))
    if verdict.unverified:
        common.complain(f"nothing was verified of: {', '.join(verdict.unverified)}.")
    if not verdict.passed:
        raise typer.Exit(1)
