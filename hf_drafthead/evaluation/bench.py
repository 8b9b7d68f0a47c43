"""Speed, acceptance and exactness of models with draft heads against their own bases, on questions.

Base, heads and other methods decode every prompt alternately in one process; a conversation continues with the base's
own answers, so that all get the same prompts.

Shapes: B rows, P prompt tokens, M positions, K heads.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.data.texts import one_line
from hf_drafthead.evaluation import calls
from hf_drafthead.evaluation.calls import BASE, COMPILED, HEADS, Method, drafted, encode_turn, steps_of
from hf_drafthead.evaluation.measurement import Measurement, Round, Run, summed_up
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.rounding import BaseCall
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.calibrate import Bar
from hf_drafthead.trees.entries import is_calibrated
from hf_drafthead.trees.timing import time_interleaved

INTERRUPTED, NO_MEMORY = "interrupted", "out of memory"


@dataclass
class BenchRun:
    """One measurement at one batch size: how it is done, as `bench` is told, and the rounds so far; `methods` that
    cannot run here are removed, with a notice."""

    model: Any
    tokenizer: Any
    methods: dict[str, Method]
    settings: Mapping[str, Any]
    batch_size: int = 1
    repeats: int = 3
    seed: int = 0
    captured: bool = False
    lossless: bool = True
    progress: Callable[[], object] = lambda: None
    rounds: list[Round] = field(default_factory=list)
    stopped: str | None = None
    notices: list[str] = field(default_factory=list)
    _prepared: set[Any] = field(default_factory=set, init=False, repr=False)  # what was compiled, for which shape

    def run(self, questions: Sequence[Question]) -> Iterator[Round]:
        """Decode the questions with every method, one batch and one turn of the conversation at a time."""
        batches = calls.batched(questions, self.batch_size)
        first_turns = calls.encode_all(self.model, self.tokenizer, batches, self.settings["max_new_tokens"])
        self._warm_up(max(first_turns, key=lambda inputs: inputs["input_ids"].shape[1]))
        for batch, inputs in zip(batches, first_turns, strict=True):
            talks: list[tuple[Question, list[str]]] = [(question, []) for question in batch]
            while talks:
                finished, texts = self._round([question for question, _ in talks], len(talks[0][1]), inputs)
                yield finished
                for (_, answers), text in zip(talks, texts):
                    answers.append(text)
                talks = [talk for talk in talks if self._has_next_turn(*talk)]
                if talks:
                    inputs = encode_turn(self.model, self.tokenizer, *zip(*talks))
            self.progress()

    def _warm_up(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run what happens in the first call only: the probe of the base, compilation, allocations."""
        for name, method in list(self.methods.items()):
            if name in (BASE, HEADS):
                method(inputs, self.settings)
            elif self.batch_size > 1 and name != COMPILED:
                self._leave_out(name, "transformers decodes this way for one prompt at a time only")
            else:
                self._try(name, inputs)

    def _try(self, name: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """One untimed call; a method that fails is left out."""
        self._prepared.add((name, inputs["input_ids"].shape))
        try:
            self.methods[name](inputs, self.settings)
        except Exception as error:  # errors of compilers and of other methods, which the heads do not need
            if out_of_memory(error):
                raise
            self._leave_out(name, one_line(error))

    def _leave_out(self, name: str, reason: str) -> None:
        del self.methods[name]
        self.notices.append(f"{name} is left out: {reason}.")

    def _prepare(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Untimed calls where a compiled method meets a new shape of prompts, or captured heads a new batch size."""
        shape = inputs["input_ids"].shape
        if COMPILED in self.methods and (COMPILED, shape) not in self._prepared:
            self._try(COMPILED, inputs)
        if self.captured and (HEADS, shape[0]) not in self._prepared:
            self._prepared.add((HEADS, shape[0]))
            self.methods[HEADS](inputs, self.settings)

    def _round(
        self, batch: Sequence[Question], turn: int, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Round, list[str]]:
        """One turn of a batch, and the base's answers."""
        self._prepare(inputs)
        seed, self.seed = self.seed, self.seed + 1
        timed = {name: functools.partial(method, inputs, self.settings) for name, method in self.methods.items()}
        begin = functools.partial(torch.manual_seed, seed)
        outputs, seconds = time_interleaved(timed, self.repeats, self.model.base.device, before=begin)
        sequences = {name: getattr(output, "sequences", output) for name, output in outputs.items()}
        rows = {name: calls.new_rows(self.model, inputs, tokens, self.settings) for name, tokens in sequences.items()}
        finished = Round(
            category=batch[0].category,
            rows=len(batch),
            runs={
                name: Run(
                    seconds=seconds[name],
                    tokens=sum(map(len, rows[name])),
                    identical=torch.equal(sequences[name], sequences[BASE]),
                )
                for name in self.methods
            },
            accepted=steps_of(outputs[HEADS]),
            undrafted=int(not drafted(outputs[HEADS])),
        )
        begin()
        self.methods[HEADS](inputs, {**self.settings, "on_step": finished.note})
        if self.lossless and not finished.runs[HEADS].identical:
            settings = calls.as_tokens(self.model, self.settings, self.tokenizer)
            parted = BaseCall(self.model.base, inputs, settings, seed).differences(rows[BASE], rows[HEADS])
            finished.runs[HEADS].differences = [first for _, first in parted]
        texts = self.tokenizer.batch_decode(rows[BASE], skip_special_tokens=True)
        return finished, [text.strip() for text in texts]

    def _has_next_turn(self, question: Question, answers: list[str]) -> bool:
        """Whether there is a next turn, and room for it."""
        turn = len(answers)
        if turn == len(question.turns):
            return False
        length = encode_turn(self.model, self.tokenizer, [question], [answers])["input_ids"].shape[1]
        room = calls.has_room(self.model, length, self.settings["max_new_tokens"])
        if not room:
            left_out = f"{question.where}: turn {turn + 1} is left out"
            self.notices.append(f"{left_out}, its {length} tokens leave no room in the base's positions.")
        return room


def bench(
    model: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    settings: Mapping[str, Any],
    *,
    tree: str | DraftTree | None = None,
    acceptance: Mapping[str, Any] | None = None,
    captured: bool = False,
    compare: Sequence[str] = (),
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 3,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
    notify: Callable[[str], object] = lambda notice: None,
) -> list[Measurement]:
    """One measurement for every batch size.

    What was measured is kept where the memory runs out or the user interrupts: the last measurement's `stopped` is
    set. Where there is none yet, that is raised.

    Args:
        model, tokenizer: with draft heads, and the base's.
        questions: what to ask, questions of one category at a time.
        settings: of every call of `generate`, `max_new_tokens` among them.
        tree, acceptance, captured, compare: see `decoding_methods`.
        batch_sizes: each at least 1.
        repeats: timed runs of each prompt, of which the median counts.
        seed: of sampling; every method starts each round from the same state.
        progress, notify: called after each batch of questions, and with every notice.

    Raises:
        OSError, ValueError: as `decoding_methods` and `encode_all` do.
    """
    calls.encode_all(model, tokenizer, calls.batched(questions, 1), settings["max_new_tokens"])
    acceptance = acceptance_of(model, acceptance or {})
    how: dict[str, Any] = {"tree": tree, "acceptance": acceptance, "captured": captured, "compare": compare}
    methods = calls.decoding_methods(model, tokenizer, **how)
    measurements: list[Measurement] = []
    for size in dict.fromkeys(batch_sizes):
        run = BenchRun(model, tokenizer, dict(methods), settings, size, repeats, seed, captured, progress=progress)
        run.lossless = acceptance["acceptance"] == "exact"
        try:
            for finished in run.run(questions):
                run.rounds.append(finished)
        except (KeyboardInterrupt, RuntimeError, MemoryError) as error:
            run.stopped = INTERRUPTED if isinstance(error, KeyboardInterrupt) else NO_MEMORY
            if (run.stopped == NO_MEMORY and not out_of_memory(error)) or not (run.rounds or measurements):
                raise
        if undrafted := sum(batch.undrafted for batch in run.rounds):
            run.notices.append(
                f"{undrafted} of {len(run.rounds)} calls were decoded by the base itself, which counts in the "
                "speedup and not in the tokens per step."
            )
        for notice in run.notices:
            notify(notice)
        if run.rounds:
            about: dict[str, Any] = {"batch_size": size, "repeats": repeats, "captured": captured}
            about |= {"settings": full_settings(model, settings), "acceptance": acceptance}
            about["calibrated"] = is_calibrated(model, size, captured)
            about |= {"complete": run.stopped is None, "stopped": run.stopped, "notices": run.notices}
            measurements.append(summed_up(model, run.rounds, compared=compare, **about))
        if run.stopped is not None:
            measurements[-1] = replace(measurements[-1], stopped=run.stopped)
            break
    return measurements


def full_settings(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the calls, with the sampling settings that only the base's generation config has."""
    usual = model.base.generation_config
    full = {"do_sample": bool(usual.do_sample), **settings}
    if full["do_sample"] and full.get("temperature") is None:
        full["temperature"] = 1.0 if usual.temperature is None else usual.temperature
    return full


def acceptance_of(model: Any, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """How the heads accept: as wanted, else as the model's generation config says, else exactly."""
    names = ("acceptance", "posterior_threshold", "posterior_alpha")
    stored = {name: value for name in names if (value := getattr(model.generation_config, name, None)) is not None}
    merged = {"acceptance": "exact", **stored, **wanted}
    unused = () if merged["acceptance"] == "typical" else names[1:]
    return {name: value for name, value in merged.items() if name not in unused}


def ways_to_call(
    settings: Mapping[str, Any], temperatures: Sequence[float] = (), lookups: Sequence[int] = ()
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The settings of `generate` and those of the heads alone for every measurement: at each temperature, where there
    are several with every kind of acceptance, and with so many tokens that the heads' tree copies from the text."""
    curve, ways = len(temperatures) > 1, []
    for heat in temperatures or (None,):
        kinds = ("exact", "typical") if curve and heat else ("exact",) if curve else (None,)
        for kind, copied in itertools.product(kinds, lookups or (None,)):
            lookup = {} if copied is None else {"prompt_lookup_num_tokens": copied}
            acceptance = {} if kind is None else {"acceptance": kind}
            ways.append(({**calls.sampling(heat), **settings}, {**acceptance, **lookup}))
    return ways


def bench_models(
    names: Sequence[str],
    load: Callable[[str], tuple[Any, Any]],
    questions: Sequence[Question],
    ways: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    *,
    trees: Sequence[Any] = (None,),
    compare: Sequence[str] = (),
    bar: Bar,
    notify: Callable[[str], object],
    keep: Callable[[list[Measurement]], object],
    **options: Any,
) -> list[Measurement]:
    """Measure one model after the other, with every tree and in all ways to call it, up to where it is stopped; `keep`
    is called with all measurements so far, whenever there are new ones; options: of every `bench`."""
    measurements: list[Measurement] = []
    batches = sum(len(calls.batched(questions, size)) for size in options["batch_sizes"])
    with bar(len(names) * len(trees) * len(ways) * batches) as begin:
        for name in names:
            model, tokenizer = load(name)
            options |= {"notify": notify, "progress": begin(name.rstrip("/").rsplit("/")[-1])}
            for tree, (settings, acceptance) in itertools.product(trees, ways):
                others = compare if acceptance.get("acceptance", "exact") == "exact" else ()
                how: dict[str, Any] = {"tree": tree, "acceptance": acceptance, "compare": others, **options}
                new = bench(model, tokenizer, questions, settings, **how)
                measurements += new
                keep(measurements)
                if faults := sum(measurement.differences["faults"] for measurement in new):
                    notify(
                        f"{name}: {faults} texts differ from the base's by more than rounding explains: "
                        "`hf-drafthead verify` finds the shortest prompt that shows it."
                    )
                if new[-1].stopped is not None:
                    return measurements
    return measurements
