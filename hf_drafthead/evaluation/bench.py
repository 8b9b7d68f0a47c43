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
from accelerate.utils import gather_object

from hf_drafthead.evaluation.calls import (
    BASE,
    COMPILED,
    HEADS,
    ForwardCount,
    Method,
    batched,
    cannot_batch,
    decoding_methods,
    drafted,
    encode_all,
    encode_turn,
    has_room,
    new_rows,
    steps_of,
    with_reader,
)
from hf_drafthead.evaluation.loading import one_line, process_state
from hf_drafthead.evaluation.measurement import Measurement, Round, Run, answer_quality, summed_up
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.rounding import FirstDifference, first_difference
from hf_drafthead.generation.slots import out_of_memory
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.rank_paths import rank_paths
from hf_drafthead.trees.timing import time_interleaved

INTERRUPTED, NO_MEMORY = "interrupted", "out of memory"


@dataclass
class BenchRun:
    """One measurement: how it is done, and the rounds so far.

    Attributes:
        model: with draft heads.
        tokenizer: the base's.
        methods: of decoding; those that cannot run here are removed, with a notice.
        settings: of every call, `max_new_tokens` among them.
        batch_size: B, questions of one category at a time.
        repeats: timed runs, of which the median counts.
        seed: of sampling; every method starts each round from the same state.
        captured: whether the heads' steps are compiled, as they are in `methods`.
        lossless: whether the text of the heads should be the base's.
        progress: called after each batch of questions.
        stopped: why it ended early, if it did.
        notices: what was left out.
    """

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
    _prepared: set[Any] = field(default_factory=set, init=False, repr=False)  # shapes and rows that were compiled for

    def run_as_far_as_possible(self, questions: Sequence[Question]) -> None:
        """Run, and keep the finished rounds if the memory runs out or the user interrupts."""
        try:
            for finished in self.run(questions):
                self.rounds.append(finished)
        except KeyboardInterrupt:
            self.stopped = INTERRUPTED
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            self.stopped = NO_MEMORY
        if self.stopped == NO_MEMORY and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def run(self, questions: Sequence[Question]) -> Iterator[Round]:
        """Decode the questions with every method, one batch and one turn of the conversation at a time.

        Raises:
            ValueError: as `encode_all` does.
        """
        batches = batched(questions, self.batch_size)
        first_turns = encode_all(self.model, self.tokenizer, batches, self.settings["max_new_tokens"])
        self._warm_up(max(first_turns, key=lambda inputs: inputs["input_ids"].shape[1]))
        for batch, inputs in zip(batches, first_turns, strict=True):
            answers: list[list[str]] = [[] for _ in batch]
            turn, open_rows = 0, list(range(len(batch)))
            while open_rows:
                finished, texts = self._round([batch[row] for row in open_rows], turn, inputs)
                yield finished
                for row, text in zip(open_rows, texts):
                    answers[row].append(text)
                turn += 1
                open_rows = [row for row in open_rows if self._has_next_turn(batch[row], answers[row])]
                if open_rows:
                    rest = [batch[row] for row in open_rows]
                    inputs = encode_turn(self.model, self.tokenizer, rest, [answers[row] for row in open_rows])
            self.progress()

    def measurement(self, **about: Any) -> Measurement:
        """The measurement of the rounds so far."""
        return summed_up(
            self.model,
            self.rounds,
            batch_size=self.batch_size,
            repeats=self.repeats,
            settings=full_settings(self.model, self.settings),
            captured=self.captured,
            complete=self.stopped is None,
            stopped=self.stopped,
            notices=self.notices,
            **about,
        )

    def _warm_up(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Run what happens in the first call only: the probe of the base, compilation, allocations."""
        for name, method in list(self.methods.items()):
            if name in (BASE, HEADS):
                method(inputs, self.settings)
            elif self.batch_size > 1 and cannot_batch(name):
                self._leave_out(name, "transformers decodes this way for one prompt at a time only")
            else:
                self._try(name, inputs)

    def _try(self, name: str, inputs: Mapping[str, torch.Tensor]) -> None:
        """One untimed call; a method that fails is left out."""
        try:
            self.methods[name](inputs, self.settings)
        except Exception as error:  # errors of compilers and of other methods, which the heads do not need
            if out_of_memory(error):
                raise
            self._leave_out(name, one_line(error))
        if name == COMPILED:
            self._prepared.add(inputs["input_ids"].shape)

    def _leave_out(self, name: str, reason: str) -> None:
        del self.methods[name]
        self.notices.append(f"{name} is left out: {reason}.")

    def _prepare(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Untimed calls where a compiled method meets a new shape of prompts, or captured heads a new batch size."""
        shape = inputs["input_ids"].shape
        if COMPILED in self.methods and shape not in self._prepared:
            self._try(COMPILED, inputs)
        if self.captured and shape[0] not in self._prepared:
            self.methods[HEADS](inputs, self.settings)
            self._prepared.add(shape[0])

    def _round(
        self, batch: Sequence[Question], turn: int, inputs: Mapping[str, torch.Tensor]
    ) -> tuple[Round, list[str]]:
        """One turn of a batch, and the base's answers."""
        self._prepare(inputs)
        device = self.model.base.device
        peaks: dict[str, int] = {}  # of the GPU: the most that a process on a CPU has used says nothing of a method
        forwards: dict[str, int] = {}
        seed, self.seed = self.seed, self.seed + 1

        def before() -> None:
            torch.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)

        def after(name: str) -> None:
            if device.type == "cuda":
                peaks[name] = max(peaks.get(name, 0), torch.cuda.max_memory_allocated(device))

        def counted(name: str) -> Any:
            if name in (HEADS, COMPILED):  # the counter would be compiled too, and again whenever the count has changed
                return self.methods[name](inputs, self.settings)
            with ForwardCount(self.model.base) as count:
                output = self.methods[name](inputs, self.settings)
            forwards[name] = count.forwards
            if getattr(output, "past_key_values", None) is not None:
                output.past_key_values = None  # else it would count as memory of the next method
            return output

        calls = {name: functools.partial(counted, name) for name in self.methods}
        outputs, seconds = time_interleaved(calls, self.repeats, device, before=before, after=after)
        sequences = {name: getattr(output, "sequences", output) for name, output in outputs.items()}
        rows = {name: new_rows(self.model, inputs, tokens, self.settings) for name, tokens in sequences.items()}
        if drafted(outputs[HEADS]):
            forwards[HEADS] = 1 + steps_of(outputs[HEADS]).shape[1]
        finished = Round(
            category=batch[0].category,
            rows=len(batch),
            runs={
                name: Run(
                    seconds=seconds[name],
                    tokens=sum(map(len, rows[name])),
                    forwards=forwards.get(name, max(map(len, rows[name]))),
                    identical=torch.equal(sequences[name], sequences[BASE]),
                    peak_memory=peaks.get(name),
                )
                for name in self.methods
            },
            accepted=steps_of(outputs[HEADS]),
            ranks=self._ranks(inputs, rows[BASE]),
            undrafted=int(not drafted(outputs[HEADS])),
        )
        before()
        self.methods[HEADS](inputs, {**self.settings, "on_step": finished.time_split.note})
        if self.lossless and not finished.runs[HEADS].identical:
            finished.runs[HEADS].differences = self._differences(inputs, rows, seed)
        texts = {name: self.tokenizer.batch_decode(rows[name], skip_special_tokens=True) for name in (BASE, HEADS)}
        for question, *answers in zip(batch, texts[BASE], texts[HEADS]):
            if any(question.references[turn : turn + 1]):
                base, heads = (answer_quality(answer, question.references[turn]) for answer in answers)
                finished.quality.append((base, heads))
        return finished, [answer.strip() for answer in texts[BASE]]

    def _differences(
        self, inputs: Mapping[str, torch.Tensor], rows: Mapping[str, list[list[int]]], seed: int
    ) -> list[FirstDifference]:
        """Where the heads' texts leave the base's."""
        settings = with_reader(self.settings, self.tokenizer)
        texts = [(row, *pair) for row, pair in enumerate(zip(rows[BASE], rows[HEADS])) if pair[0] != pair[1]]
        if not texts:  # what follows the end of a row is not the same
            return [FirstDifference(max(map(len, rows[BASE])), None, None)]
        return [first_difference(self.model.base, inputs, settings, *text, seed) for text in texts]

    def _has_next_turn(self, question: Question, answers: list[str]) -> bool:
        """Whether there is a next turn, and room for it."""
        turn = len(answers)
        if turn == len(question.turns):
            return False
        length = encode_turn(self.model, self.tokenizer, [question], [answers])["input_ids"].shape[1]
        if has_room(self.model, length, self.settings["max_new_tokens"]):
            return True
        self.notices.append(
            f"{question.where}: turn {turn + 1} is left out, its {length} tokens leave no room in the base's positions."
        )
        return False

    def _ranks(self, inputs: Mapping[str, torch.Tensor], rows: list[list[int]]) -> torch.Tensor | None:
        """(M, K) at which each head had the base's own tokens, -1 behind a row's end; None where no answer is long."""
        prompts = [tokens[mask.bool()] for tokens, mask in zip(inputs["input_ids"], inputs["attention_mask"])]
        texts = [torch.cat([prompt, prompt.new_tensor(row)]) for prompt, row in zip(prompts, rows)]
        if max(map(len, rows)) < 2:
            return None
        lengths = torch.tensor([len(text) for text in texts], device=prompts[0].device)
        prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=prompts[0].device)
        padded = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        return rank_paths(self.model, padded, prompt_lengths, lengths).flatten(0, 1).cpu()


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
    """One measurement for every batch size, which is halved where memory runs out.

    Under `accelerate launch` every process decodes its share of the questions, and all return the same figures.

    Args:
        model: with draft heads.
        tokenizer: the base's.
        questions: what to ask.
        settings: of every call of `generate`, `max_new_tokens` among them.
        tree: of the heads; None for the model's own.
        acceptance: settings that only the heads are given.
        captured: whether the heads' steps are compiled; the base runs as installed in any case.
        compare: see `decoding_methods`.
        batch_sizes: each at least 1.
        repeats: timed runs of each prompt, of which the median counts.
        seed: of sampling.
        progress: called after each batch of questions.
        notify: called with every notice.

    Returns:
        one per batch size that was begun, complete or not; after an interruption the last one's `stopped` is set.

    Raises:
        KeyboardInterrupt: before there was anything to return.
        OSError, ValueError: as `decoding_methods` and `encode_all` do, or the memory does not suffice for one prompt.
    """
    share, processes = share_of(questions)
    encode_all(model, tokenizer, batched(questions, 1), settings["max_new_tokens"])  # refused in all processes
    acceptance = acceptance_of(model, acceptance or {})
    methods = decoding_methods(model, tokenizer, tree=tree, acceptance=acceptance, captured=captured, compare=compare)
    waiting, measurements = list(dict.fromkeys(batch_sizes)), list[Measurement]()
    begun = set(waiting)
    while waiting:
        size = waiting.pop(0)
        run = BenchRun(model, tokenizer, dict(methods), settings, size, repeats, seed, captured, progress=progress)
        run.lossless = acceptance["acceptance"] == "exact"
        run.run_as_far_as_possible(share)
        if processes > 1:
            gather(run)
        if run.stopped == NO_MEMORY:
            kept = f"{sum(each.rows for each in run.rounds)} prompts were measured"
            run.notices.append(f"out of memory at a batch size of {size}: {kept}.")
            if size > 1 and size // 2 not in begun:
                waiting.insert(0, size // 2)
                begun.add(size // 2)
                run.notices[-1] = f"{run.notices[-1][:-1]}, continuing with a batch size of {size // 2}."
        if undrafted := sum(each.undrafted for each in run.rounds):
            run.notices.append(
                f"{undrafted} of {len(run.rounds)} calls were decoded by the base itself, which counts in the speedup "
                "and not in the tokens per step."
            )
        for notice in run.notices:
            notify(notice)
        if run.rounds:
            measurements.append(run.measurement(compared=compare, acceptance=acceptance, processes=processes))
        elif measurements:
            last = measurements[-1]
            stopped = run.stopped if run.stopped == INTERRUPTED else last.stopped
            measurements[-1] = replace(last, stopped=stopped, notices=[*last.notices, *run.notices])
        if run.stopped == INTERRUPTED:
            break
    if not measurements:
        if run.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        raise OSError("there is not enough memory for a single prompt: use a smaller model, or fewer new tokens.")
    return measurements


def share_of(questions: Sequence[Question]) -> tuple[list[Question], int]:
    """This process's share of the questions, and how many processes there are.

    Raises:
        ValueError: there are fewer questions than processes.
    """
    state = process_state()
    if state.num_processes > max(len(questions), 1):
        raise ValueError(
            f"{len(questions)} questions cannot be shared among {state.num_processes} processes: start fewer of them."
        )
    return list(questions)[state.process_index :: state.num_processes], state.num_processes


def gather(run: BenchRun) -> None:
    """Give every process the rounds of all processes, and a common reason for stopping."""
    run.rounds = gather_object(run.rounds)
    run.notices = list(dict.fromkeys(gather_object(run.notices)))
    run.stopped = next(filter(None, gather_object([run.stopped])), None)


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


@dataclass(frozen=True)
class BenchPlan:
    """What one call of `hf-drafthead bench` measures.

    models: folders or ids; load: gives model and tokenizer of each; questions: for all; settings: of `generate`;
    temperatures: 0 is greedy; of several each is measured with every kind of acceptance; trees: each is measured; None
    is the model's own; thresholds: of typical acceptance, each measured besides exact acceptance, with its root for
    alpha as in the Medusa paper; lookups: tokens that the heads' tree copies from the text, 0 for none, each measured;
    options: of every `bench`.
    """

    models: Sequence[str]
    load: Callable[[str], tuple[Any, Any]]
    questions: Sequence[Question]
    settings: dict[str, Any]
    temperatures: Sequence[float] = ()
    trees: Sequence[str | DraftTree | None] = (None,)
    thresholds: Sequence[float] = ()
    lookups: Sequence[int] = ()
    compare: Sequence[str] = ()
    batch_sizes: Sequence[int] = (1,)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        if not all(0 <= threshold <= 1 for threshold in self.thresholds):
            raise ValueError(f"--epsilon is {list(self.thresholds)}: expected probabilities, from 0 to 1.")

    @property
    def batches(self) -> int:
        """How often `progress` is called at most: less where memory runs out, or where processes share the work."""
        batches = sum(len(batched(self.questions, size)) for size in self.batch_sizes)
        return len(self.models) * len(self.trees) * len(list(self.runs())) * batches

    def runs(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """The settings of `generate` and those of the heads alone, for every measurement of a model."""
        for (settings, acceptance), copied in itertools.product(self._acceptances(), self.lookups or (None,)):
            if not copied or acceptance.get("acceptance") != "rejection":  # which does not go with copies
                lookup = {} if copied is None else {"prompt_lookup_num_tokens": copied}
                yield settings, {**acceptance, **lookup}

    def _acceptances(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        curve = len(self.temperatures) > 1
        for heat in self.temperatures or (None,):
            choice = {} if heat is None else {"do_sample": True, "temperature": heat} if heat else {"do_sample": False}
            settings = {**choice, **self.settings}
            yield settings, {"acceptance": "exact"} if curve or self.thresholds else {}
            if curve and heat:
                yield settings, {"acceptance": "rejection"}
            if curve and heat and not self.thresholds:
                yield settings, {"acceptance": "typical"}
            for threshold in self.thresholds:
                typical = {"posterior_threshold": threshold, "posterior_alpha": threshold**0.5}
                yield settings, {"acceptance": "typical", **typical}


def carry_out(
    plan: BenchPlan,
    *,
    begin: Callable[[str], Callable[[], object]],
    notify: Callable[[str], object],
    keep: Callable[[list[Measurement]], object],
) -> tuple[list[Measurement], str | None]:
    """Measure one model after the other: the measurements, and why these are not all, if they are not.

    Args:
        plan: what to measure.
        begin: is called with each model's name, and gives what to call after each batch of questions.
        notify: called with every notice.
        keep: is called with all measurements so far, whenever there are new ones, so that none is lost.

    Raises:
        KeyboardInterrupt: before anything was measured.
        OSError, TypeError, ValueError: what `load` or `bench` refuse.
    """
    measurements = list[Measurement]()
    try:
        for name in plan.models:
            model, tokenizer = plan.load(name)
            progress = begin(name.rstrip("/").rsplit("/")[-1])
            for tree, (settings, acceptance) in itertools.product(plan.trees, plan.runs()):
                new = bench(
                    model,
                    tokenizer,
                    plan.questions,
                    settings,
                    tree=tree,
                    acceptance=acceptance,
                    compare=plan.compare if acceptance.get("acceptance", "exact") == "exact" else (),
                    batch_sizes=plan.batch_sizes,
                    progress=progress,
                    notify=notify,
                    **plan.options,
                )
                measurements += new
                keep(measurements)
                if faults := sum(each.differences["faults"] for each in new):
                    notify(
                        f"{name}: {faults} texts differ from the base's by more than rounding explains: "
                        "`hf-drafthead verify` finds the shortest prompt that shows it."
                    )
                if new[-1].stopped == INTERRUPTED:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        if not measurements:
            raise
        if measurements[-1].stopped != INTERRUPTED:  # it came between two measurements
            measurements[-1] = replace(measurements[-1], stopped=INTERRUPTED)
            keep(measurements)
        return measurements, INTERRUPTED
    return measurements, None
