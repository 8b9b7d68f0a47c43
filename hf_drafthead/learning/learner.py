"""Heads learn from the texts that they have served: a copy of them is trained, tried, and taken over if it is better.

    texts      a finished request gives its text; every sixth one is held out
    learn      steps of the family's own loss, on a copy of the heads
    try        the copy on the texts held out: tokens per step, beside those of the heads that serve
    keep       its weights are taken over if these rise, on what is asked now, and do not fall on what was asked earlier

Each of these is a short piece of work, done by the thread that decodes, between two steps (`between`). What heads guess
decides nothing but how many steps a text takes, so that no text changes with them.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from transformers.utils import logging

from hf_drafthead.bases.errors import out_of_memory
from hf_drafthead.bases.generators import new_lock
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import resolve
from hf_drafthead.learning.readings import Readings
from hf_drafthead.learning.texts import LONGEST, RecentTexts, Text, batch_of
from hf_drafthead.training.examples import collate
from hf_drafthead.training.trainer import loss_of, recipe_of
from hf_drafthead.trees.entries import state_of
from hf_drafthead.trees.rank_paths import UNKNOWN, rank_paths

logger = logging.get_logger(__name__)

ROWS = 8  # texts of a step
FRESH = 8  # new texts for which a round begins
MOST_ROUNDS = 3  # for so many texts, where each round brings something
LEAST_HELD_OUT = 2
WARM = 8  # steps in which the rate rises
PATIENCE = 3  # rounds without a rise, behind which the copy begins anew
ALLOWED_FALL = 0.98  # of tokens per step on what was asked earlier
GRADIENT = 1.0  # norm of all gradients, at most
LONGEST_STAYS = 0.9  # of the longest piece of work, with each further one
SLOWEST = 1e-5  # rate at which learning has come to an end
_WRITING = new_lock()  # while weights are taken over, or saved


class Learner:
    """Trains the heads of a model on recent texts.

    Args:
        model: with heads; its weights are written in place.
        share: of the time, that learning takes while requests wait or run; idle time is free.
        memory: tokens of recent texts.
        held_out: recent texts by which weights are judged.
        steps: of a round, between two trials.
        learning_rate: at first, and again with twice as many texts; it halves where rounds have brought nothing.
        everybody: whether texts are taken whose request does not say (`add_request(learn=...)`).
        readings: bytes of hidden states of these texts, on the host, which the base need not read again.

    Raises:
        ValueError: these heads cannot learn here, in one line.
    """

    def __init__(
        self,
        model: Any,
        *,
        share: float = 0.1,
        memory: int = 1 << 17,
        held_out: int = 24,
        steps: int = 16,
        learning_rate: float = 2e-3,
        everybody: bool = True,
        readings: int = 1 << 29,
    ):
        numbers = {"memory": (memory, ROWS * LONGEST), "held_out": (held_out, LEAST_HELD_OUT), "steps": (steps, 1)}
        for name, (number, least) in {**numbers, "readings": (readings, 0)}.items():
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}: expected a whole number from {least} on.")
        parts = {
            "share": (share, "the part of the time that learning takes"),
            "learning_rate": (learning_rate, "a rate"),
        }
        for name, (part, what) in parts.items():
            if type(part) not in (int, float) or not 0 < part < 1:
                raise ValueError(f"{name} is {part!r}: expected {what}, between 0 and 1.")
        if type(everybody) is not bool:
            raise ValueError(f"everybody is {everybody!r}: expected True or False.")
        refuse(model)
        self.model, self.share, self.steps, self.everybody = model, share, steps, everybody
        self.given: dict[str, Any] = {}  # settings of `learn_from`
        self.rate = self.first_rate = learning_rate
        self.known = 0  # texts that had been seen when the rate was the first one last
        self.texts = RecentTexts(memory, held_out)
        self.stopped: str | None = None  # why nothing is learned any more
        self.spent = self.served = 0.0  # seconds, while requests waited or ran
        self.longest = 0.0  # seconds that the next piece of work may take
        self.rounds = self.taken = self.dropped = self.tries = 0
        self.first: float | None = None  # tokens per step on recent texts, before anything was learned
        self.now: float | None = None
        self._work: Iterator[None] | None = None
        self._copy: Any = None
        self._state: Any = None  # of the heads that serve, when they were looked at last
        self._limit = readings
        self._readings: Any = None  # `Readings` of the base as it is

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the model has no learner."""
        return type(None), ()

    def offer(
        self, prompt: Sequence[int], answer: Sequence[int], allowed: bool | None = None, accepted: int = 0
    ) -> None:
        """Take the text of a finished request, so many guesses of which were accepted, if its client allows that."""
        if self.stopped is None and (self.everybody if allowed is None else allowed):
            self.texts.add(prompt, answer, accepted)

    @property
    def wants(self) -> bool:
        """Whether there is something to learn."""
        texts = self.texts
        ready = texts.fresh >= FRESH and len(texts.texts) >= ROWS and len(texts.recent) >= LEAST_HELD_OUT
        return self.stopped is None and (self._work is not None or ready)

    def between(self, seconds: float, idle: bool = False) -> None:
        """Between two steps, `seconds` after the last call: learn for a moment, where nobody waits (`idle`) or the
        share of the time allows it. Whatever goes wrong is told in one line and ends learning, and nothing else."""
        self.served += seconds
        spent = self.spent + self.longest
        if not self.wants or not (idle or spent <= self.share * (spent + self.served)):
            self._readings = None if self.stopped is not None else self._readings  # here no work goes on
            return
        start = time.perf_counter()
        try:
            self.work()
        except BaseException as error:  # of hooks of the user's, as in a step
            memory = "there is no memory for the gradients" if out_of_memory(error) else None
            self.stop(memory or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        took = time.perf_counter() - start
        self.spent, self.longest = self.spent + took * (not idle), max(took, LONGEST_STAYS * self.longest)

    def stop(self, reason: str = "stop() was called.") -> None:
        """Learn no more; the heads stay as they are."""
        self.stopped, self._work, self._copy = reason, None, None
        logger.warning(f"Heads do not learn any more, and serve as they are: {reason}")

    def work(self) -> bool:
        """Do a piece of a round; whether it was the last one."""
        self._work = self._work or self._round()
        try:
            with torch.inference_mode(False):
                next(self._work)
            return False
        except StopIteration:
            self._work = None
            return True

    def _round(self) -> Iterator[None]:
        if self.model.base.training:
            raise RuntimeError("the base is in training mode: call eval().")
        self.texts.fresh = 0
        base, drafter, known = self.model.base, self.model.drafter, self._readings
        if moved := known is not None and (known.reader.base is not base or known.base_has_moved()):
            self.texts.base_has_moved()  # in reinforcement learning: there is something to learn again
        if moved or self.texts.seen >= 2 * self.known:  # what failed on few texts may not on twice as many
            self.rate, self.known = self.first_rate, self.texts.seen
        if moved or known is None or known.reader.reads != drafter.reads or not known.agree():
            self._readings = Readings(base, drafter, self._limit)
        learning = self._begin()
        for step in range(self.steps):
            if not self._step(learning, step):
                self._drop()
                return
            yield
        recent, serves = list(self.texts.recent), learning.source
        before = statistics.mean((yield from self._measured(recent, serves)))
        self.first = before if self.first is None else self.first
        new = self.texts.new()
        for text, then in zip(new, (yield from self._measured(new, serves))):
            self.texts.keep(text, then)
        tried = self._copied(serves)
        write([*tried.parameters()], learning.mean)
        after, falls = statistics.mean((yield from self._measured(recent, tried))), False
        for texts, then in self.texts.kinds():
            falls = falls or statistics.mean((yield from self._measured(texts, tried))) < ALLOWED_FALL * then
        self.rounds += 1
        with _WRITING:
            if self._outdated(learning):  # heads that have learned elsewhere meanwhile, or were trained
                self._copy = None
                return
            if better := after > before and not falls:
                write([*serves.parameters()], learning.mean)
                learning.state = self._state = state_of(serves.parameters())
        self.now = after if better else before
        if better:
            self.taken, self.tries = self.taken + 1, 0
            if FRESH * self.rounds < MOST_ROUNDS * self.texts.seen:
                self.texts.fresh += FRESH  # there may be more to gain
            logger.info(f"Heads have learned: {before:.2f} -> {after:.2f} tokens per step on recent texts.")
            return
        self.tries += 1
        if falls or self.tries >= PATIENCE:
            self._drop()

    def _drop(self) -> None:
        """Begin anew from the weights that serve, more slowly."""
        self._copy, self.tries, self.dropped = None, 0, self.dropped + 1
        self.rate = max(self.rate / 2, SLOWEST)

    def _begin(self) -> Any:
        """The copy that learns; a new one where the heads are others now."""
        drafter, learning, state = self.model.drafter, self._copy, state_of(self.model.drafter.parameters())
        if self._state not in (None, state):  # trained elsewhere meanwhile: what they had before is no bound any more
            self.texts.kept.clear()
        self._state = state
        if learning is None or self._outdated(learning):
            twin = self._copied(drafter).float().requires_grad_(True)
            weights = [*twin.parameters()]
            settings = {**recipe_of(self.model), "feature_noise": 0.0}
            nothing = SimpleNamespace(get_output_embeddings=torch.nn.Identity)  # of a base whose weights do not learn
            learning = self._copy = SimpleNamespace(
                source=drafter,
                base=self.model.base,
                state=state,
                weights=weights,
                mean=[weight.detach().clone() for weight in weights],
                done=0,
                model=SimpleNamespace(base=nothing, drafter=twin, config=self.model.config, training=False),
                loss=loss_of(self.model, settings),
                optimizer=torch.optim.AdamW(weights, self.rate, betas=(0.9, 0.99), weight_decay=0.0),
            )
        return learning

    def _step(self, learning: Any, step: int) -> bool:
        """A step of the copy, whose mean over a round is what is tried; False where the loss is no number."""
        texts = self.texts.some(ROWS)
        reading = self._readings.of(texts)
        inputs = {name: tensor.to(reading.hidden.device) for name, tensor in collate([t.row() for t in texts]).items()}
        with torch.enable_grad():
            loss_of_reading = replace(learning.loss, reader=self._readings.reader)
            loss, _ = loss_of_reading(learning.model, inputs, count=False, reading=reading)
            gradients = torch.autograd.grad(loss, learning.weights, allow_unused=True)
        for weight, gradient in zip(learning.weights, gradients):
            weight.grad = gradient
        norm = torch.nn.utils.clip_grad_norm_(learning.weights, GRADIENT)
        if not bool(norm.isfinite()):
            return False
        learning.done += 1
        for group in learning.optimizer.param_groups:
            group["lr"] = self.rate * min(learning.done / WARM, 1.0)
        learning.optimizer.step()
        learning.optimizer.zero_grad()
        for mean, weight in zip(learning.mean, learning.weights):
            mean.lerp_(weight.detach(), 1 / (step + 1))
        return True

    def _outdated(self, learning: Any) -> bool:
        """Whether heads or base are not those any more that a copy was made of."""
        others = learning.source is not self.model.drafter or learning.base is not self.model.base
        return others or learning.state != state_of(learning.source.parameters())

    def _copied(self, drafter: Any) -> Any:
        return copy.deepcopy(drafter, {id(self.model.base): self.model.base}).eval()

    def _measured(self, texts: Sequence[Text], drafter: Any) -> Generator[None, None, list[float]]:
        """Tokens per step of a drafter on each text, a few at a time."""
        values: list[float] = []
        for first in range(0, len(texts), ROWS):
            values += self._rates(texts[first : first + ROWS], drafter)
            yield
        return values

    def _rates(self, texts: Sequence[Text], drafter: Any) -> list[float]:
        """Tokens per step on each text, at any of its places, with a tree of 64 nodes."""
        model, features = SimpleNamespace(base=self.model.base, drafter=drafter), self._readings.of(texts).features
        tree: Any = resolve(DEFAULT_TREE, *guessed_among(model))
        batch, paths, values = batch_of(texts, features.device), set(tree.paths), list[float]()
        for row in rank_paths(model, *batch, depth=tree.max_depth, features=features).tolist():
            places = [tuple(levels) for levels in row if levels[0] != UNKNOWN]
            depths = (next((d for d in range(tree.max_depth, 0, -1) if at[:d] in paths), 0) for at in places)
            values.append(1 + sum(depths) / max(len(places), 1))
        return values

    def counts(self) -> dict[str, float]:
        """Rounds of learning, how many were taken over and dropped; tokens per step before the first one, and now."""
        known = {"learning_first_tokens_per_step": self.first, "learning_tokens_per_step": self.now}
        rounds = {"learning_rounds": self.rounds, "learning_taken": self.taken, "learning_dropped": self.dropped}
        return rounds | {name: value for name, value in known.items() if value is not None}

    def save_pretrained(self, folder: Any, **arguments: Any) -> None:
        """Save the model as it has learned, as its own method does; no weights change meanwhile."""
        with _WRITING:
            self.model.save_pretrained(folder, **arguments)


def refuse(model: Any) -> None:
    """Refuse, in one line, heads that cannot learn where they are; a ValueError."""
    recipe_of(model)  # there is nothing to train in copies of the text
    weights, of_base = [*model.drafter.parameters()], [*model.base.parameters()]
    if any(not weight.is_floating_point() or type(weight) is not torch.nn.Parameter for weight in weights):
        raise ValueError("the heads are quantized, and their weights cannot learn: load them without a quantizer.")
    if len({weight.device for weight in (*weights, *of_base)}) > 1 or any(weight.is_meta for weight in of_base):
        raise ValueError("the model is spread over several devices: heads learn where all of it is on one.")
    if any(weight.is_inference() for weight in (*weights, *of_base)):
        raise ValueError("the model was loaded in inference mode, in which nothing can be learned: load it outside.")


def write(places: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write weights where they are, so that programs of steps read them."""
    with torch.no_grad():
        for place, value in zip(places, values, strict=True):
            place.copy_(value)
