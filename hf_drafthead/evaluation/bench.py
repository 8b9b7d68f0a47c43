"""Speed, acceptance and exactness of a model with draft heads against its own base, on questions.

Base, heads and other methods decode every prompt alternately in one process; a conversation continues with the base's
own answers, so that all get the same prompts.

Shapes: B rows, P prompt tokens, M positions, K heads.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_drafthead.evaluation.compare import Method, cannot_batch, decoding_methods, with_reader
from hf_drafthead.evaluation.loading import one_line
from hf_drafthead.evaluation.measurement import (
    BASE,
    COMPILED,
    HEADS,
    Measurement,
    Round,
    Run,
    identity,
    summed_up,
    undrafted_notice,
)
from hf_drafthead.evaluation.quality import quality
from hf_drafthead.evaluation.questions import Question
from hf_drafthead.evaluation.rounding import FirstDifference, first_difference
from hf_drafthead.evaluation.sharding import Shard
from hf_drafthead.evaluation.speed import (
    ForwardCount,
    batched,
    drafted,
    encode_all,
    encode_turn,
    has_room,
    new_rows,
    steps_of,
    time_interleaved,
)
from hf_drafthead.evaluation.stages import time_split
from hf_drafthead.generation.calibration import rank_paths
from hf_drafthead.generation.memory import out_of_memory
from hf_drafthead.generation.tree import DraftTree

INTERRUPTED, NO_MEMORY = "interrupted", "out of memory"


def measure(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Question],
    *,
    tree: DraftTree,
    max_new_tokens: int,
    batch_size: int = 1,
    repeats: int = 3,
    progress: Callable[[], object] = lambda: None,
) -> Measurement:
    """Decode texts greedily with the base and with the heads, alternately: measures speed and exactness only.

    Args:
        model: a model with draft heads; its base is what it is compared with.
        tokenizer: the base's.
        prompts: what to continue, `batch_size` of one category at a time, padded on the left.
        tree: the draft tree of every step.
        max_new_tokens: per prompt, at most.
        batch_size: prompts per call.
        repeats: timed runs of each prompt, of which the median counts.
        progress: called after each batch.

    Raises:
        ValueError: no prompt, one that is empty, or one that leaves the base no room for `max_new_tokens`.
    """
    course = Course(
        model,
        tokenizer,
        decoding_methods(model, tokenizer, tree=tree),
        {"do_sample": False, "max_new_tokens": max_new_tokens},
        batch_size=batch_size,
        repeats=repeats,
        closely=False,
        progress=progress,
    )
    course.rounds += course.run(prompts)
    course.notices += undrafted_notice(course.rounds)
    return course.measurement(tree_nodes=tree.num_nodes)


@dataclass
class Course:
    """One measurement: how it is done, and the rounds so far.

    Attributes:
        model: with draft heads.
        tokenizer: the base's.
        runners: the decoding methods; those that cannot run here are removed, with a notice.
        settings: of every call, `max_new_tokens` among them.
        batch_size: B, questions of one category at a time.
        repeats: timed runs, of which the median counts.
        seed: of sampling; every method starts each round from the same state.
        closely: also analyse the steps, the guesses and the answers, in a run that is not timed.
        captured: whether the heads' steps are compiled, as they are in `runners`.
        lossless: whether the text of the heads should be the base's.
        progress: called after each batch of questions.
        stopped: why it ended early, if it did.
        notices: what was left out.
    """

    model: Any
    tokenizer: Any
    runners: dict[str, Method]
    settings: Mapping[str, Any]
    batch_size: int = 1
    repeats: int = 3
    seed: int = 0
    closely: bool = True
    captured: bool = False
    lossless: bool = True
    progress: Callable[[], object] = lambda: None
    rounds: list[Round] = field(default_factory=list)
    stopped: str | None = None
    notices: list[str] = field(default_factory=list)
    _compiled_for: set[torch.Size] = field(default_factory=set, init=False, repr=False)
    _captured_for: set[int] = field(default_factory=set, init=False, repr=False)

    def run_as_far_as_possible(self, questions: Sequence[Question]) -> None:
        """Run, and keep the finished rounds if the memory runs out or the user interrupts."""
        try:
            for one in self.run(questions):
                self.rounds.append(one)
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
        self._warm_up(max(first_turns, key=lambda given: given["input_ids"].shape[1]))
        for batch, given in zip(batches, first_turns, strict=True):
            answers: list[list[str]] = [[] for _ in batch]
            turn, asked = 0, list(range(len(batch)))
            while asked:
                one, told = self._round([batch[row] for row in asked], turn, given)
                yield one
                for row, answer in zip(asked, told):
                    answers[row].append(answer)
                turn += 1
                asked = [row for row in asked if self._goes_on(batch[row], answers[row])]
                if asked:
                    rest = [batch[row] for row in asked]
                    given = encode_turn(self.model, self.tokenizer, rest, [answers[row] for row in asked])
            self.progress()

    def measurement(self, **said: Any) -> Measurement:
        """The measurement of the rounds so far."""
        return summed_up(
            self.model,
            self.rounds,
            batch_size=self.batch_size,
            repeats=self.repeats,
            settings=told_settings(self.model, self.settings),
            captured=self.captured,
            complete=self.stopped is None,
            stopped=self.stopped,
            notices=self.notices,
            **said,
        )

    def _warm_up(self, given: Mapping[str, torch.Tensor]) -> None:
        """Run what happens in the first call only: the probe of the base, compilation, allocations."""
        for name, runner in list(self.runners.items()):
            if name in (BASE, HEADS):
                runner(given, self.settings)
            elif self.batch_size > 1 and cannot_batch(name):
                self._leave_out(name, "transformers decodes this way for one prompt at a time only")
            else:
                self._try(name, given)

    def _try(self, name: str, given: Mapping[str, torch.Tensor]) -> None:
        """One untimed call; a method that fails is left out."""
        try:
            self.runners[name](given, self.settings)
        except Exception as error:  # errors of compilers and of other methods, which the heads do not need
            if out_of_memory(error):
                raise
            self._leave_out(name, one_line(error))
        if name == COMPILED:
            self._compiled_for.add(given["input_ids"].shape)

    def _leave_out(self, name: str, reason: str) -> None:
        del self.runners[name]
        self.notices.append(f"{name} is left out: {reason}.")

    def _round(
        self, batch: Sequence[Question], turn: int, given: Mapping[str, torch.Tensor]
    ) -> tuple[Round, list[str]]:
        """One turn of a batch, and the base's answers."""
        if COMPILED in self.runners and given["input_ids"].shape not in self._compiled_for:
            self._try(COMPILED, given)  # every new shape is compiled again
        if self.captured and len(given["input_ids"]) not in self._captured_for:
            self.runners[HEADS](given, self.settings)  # every new number of rows
            self._captured_for.add(len(given["input_ids"]))
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
                return self.runners[name](given, self.settings)
            with ForwardCount(self.model.base) as count:
                output = self.runners[name](given, self.settings)
            forwards[name] = count.take()
            if getattr(output, "past_key_values", None) is not None:
                output.past_key_values = None  # else it would count as memory of the next method
            return output

        calls = {name: functools.partial(counted, name) for name in self.runners}
        outputs, seconds = time_interleaved(calls, self.repeats, device, before=before, after=after)
        sequences = {name: getattr(output, "sequences", output) for name, output in outputs.items()}
        rows = {name: new_rows(self.model, given, found, self.settings) for name, found in sequences.items()}
        if drafted(outputs[HEADS]):
            forwards[HEADS] = 1 + steps_of(outputs[HEADS]).shape[1]
        one = Round(
            category=batch[0].category,
            rows=len(batch),
            runs={
                name: Run(
                    seconds=seconds[name],
                    tokens=sum(map(len, rows[name])),
                    forwards=forwards.get(name, max(map(len, rows[name]))),
                    identical=torch.equal(sequences[name], sequences[BASE]),
                    differences=self._differences(given, sequences, rows, seed) if name == HEADS else [],
                    peak_memory=peaks.get(name),
                )
                for name in self.runners
            },
            accepted=steps_of(outputs[HEADS]),
            undrafted=int(not drafted(outputs[HEADS])),
        )
        texts = {name: self.tokenizer.batch_decode(rows[name], skip_special_tokens=True) for name in (BASE, HEADS)}
        if self.closely:
            before()
            one.time_split = time_split(lambda note: self.runners[HEADS](given, {**self.settings, "on_step": note}))
            one.ranks = self._ranks(given, rows[BASE])
            for question, *answers in zip(batch, texts[BASE], texts[HEADS]):
                if any(question.references[turn : turn + 1]):
                    base, heads = (quality(answer, question.references[turn]) for answer in answers)
                    one.quality.append((base, heads))
        return one, [answer.strip() for answer in texts[BASE]]

    def _differences(
        self,
        given: Mapping[str, torch.Tensor],
        sequences: Mapping[str, torch.Tensor],
        rows: Mapping[str, list[list[int]]],
        seed: int,
    ) -> list[FirstDifference]:
        """Where the heads' texts leave the base's; nowhere where they need not be the same."""
        if not self.lossless or torch.equal(sequences[HEADS], sequences[BASE]):
            return []
        settings = with_reader(self.settings, self.tokenizer)
        pairs = enumerate(zip(rows[BASE], rows[HEADS]))
        differing = [(row, base, heads) for row, (base, heads) in pairs if base != heads]
        if not differing:  # what follows the end of a row is not the same
            return [FirstDifference(max(map(len, rows[BASE])), None, None)]
        return [first_difference(self.model.base, given, settings, *texts, seed) for texts in differing]

    def _goes_on(self, question: Question, answers: list[str]) -> bool:
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

    def _ranks(self, given: Mapping[str, torch.Tensor], rows: list[list[int]]) -> torch.Tensor | None:
        """(M, K) at which each head had the base's own tokens, -1 behind a row's end; None where no answer is long."""
        prompts = [tokens[mask.bool()] for tokens, mask in zip(given["input_ids"], given["attention_mask"])]
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
    tell: Callable[[str], object] = lambda notice: None,
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
        tell: called with every notice.

    Returns:
        one per batch size that was begun, complete or not; after an interruption the last one's `stopped` is set.

    Raises:
        KeyboardInterrupt: before there was anything to return.
        OSError, ValueError: as `decoding_methods` and `encode_all` do, or the memory does not suffice for one prompt.
    """
    shard = Shard(questions)
    encode_all(model, tokenizer, batched(questions, 1), settings["max_new_tokens"])  # refused in all processes
    acceptance = acceptance_of(model, acceptance or {})
    runners = decoding_methods(model, tokenizer, tree=tree, acceptance=acceptance, captured=captured, compare=compare)
    waiting, found = list(dict.fromkeys(batch_sizes)), list[Measurement]()
    done = set(waiting)
    how = {"compared": compare, "acceptance": acceptance, "processes": shard.processes, **identity(model)}
    while waiting:
        size = waiting.pop(0)
        how_run: dict[str, Any] = {"repeats": repeats, "seed": seed, "captured": captured, "progress": progress}
        how_run["lossless"] = acceptance["acceptance"] == "exact"
        course = Course(model, tokenizer, dict(runners), settings, size, **how_run)
        course.run_as_far_as_possible(shard.questions)
        shard.gather(course)
        if course.stopped == NO_MEMORY:
            kept = f"{sum(one.rows for one in course.rounds)} prompts were measured"
            course.notices.append(f"out of memory at a batch size of {size}: {kept}.")
            if size > 1 and size // 2 not in done:
                waiting.insert(0, size // 2)
                done.add(size // 2)
                course.notices[-1] = f"{course.notices[-1][:-1]}, continuing with a batch size of {size // 2}."
        course.notices += undrafted_notice(course.rounds)
        for notice in course.notices:
            tell(notice)
        if course.rounds:
            found.append(course.measurement(**how))
        elif found:
            stopped = course.stopped if course.stopped == INTERRUPTED else found[-1].stopped
            found[-1] = replace(found[-1], stopped=stopped, notices=[*found[-1].notices, *course.notices])
        if course.stopped == INTERRUPTED:
            break
    if not found:
        if course.stopped == INTERRUPTED:
            raise KeyboardInterrupt
        raise OSError("there is not enough memory for a single prompt: use a smaller model, or fewer new tokens.")
    return found


def told_settings(model: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the calls, with the sampling settings that only the base's generation config has."""
    usual = model.base.generation_config
    told = {"do_sample": bool(usual.do_sample), **settings}
    if told["do_sample"] and told.get("temperature") is None:
        told["temperature"] = 1.0 if usual.temperature is None else usual.temperature
    return told


def acceptance_of(model: Any, asked: Mapping[str, Any]) -> dict[str, Any]:
    """How the heads accept: as asked, else as the model's generation config says, else exactly."""
    names = ("acceptance", "posterior_threshold", "posterior_alpha")
    stored = {name: value for name in names if (value := getattr(model.generation_config, name, None)) is not None}
    merged = {"acceptance": "exact", **stored, **asked}
    return merged if merged["acceptance"] == "typical" else {"acceptance": merged["acceptance"]}
