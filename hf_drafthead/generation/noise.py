"""The random numbers of one call: what the base would draw, drawn ahead, while the process's generators are left alone.

Shapes: B rows, D positions, V vocabulary.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_drafthead.bases.generators import (
    GENERATORS,
    IN_USE,
    LOCKS,
    Use,
    elsewhere,
    generators_of,
    leave_at,
    let_calls_begin_at,
    same_states,
    states_of,
    where_calls_begin,
)


class NoiseTape:
    """The exponential noise of the base's sampling, position by position, drawn ahead of the base's own choices.

    `torch.multinomial(p, 1)` is `argmax(p / noise)` with noise (B, V) drawn anew at every position. The tape draws it
    from a generator of its own and remembers the state before each position: every noise is drawn once, and a row that
    lags can have its position's noise drawn again. Positions that every row has left behind are forgotten.
    """

    KEPT = 32  # positions whose noise is held; older ones are redrawn from their state

    def __init__(self, batch_size: int, generator: torch.Generator):
        self.batch_size, self.generator = batch_size, generator
        self.newest = 0  # position that is drawn next
        # before every position drawn, and after the last one
        self.states: dict[int, torch.Tensor] = {0: generator.get_state()}
        self.drawn: dict[int, torch.Tensor] = {}
        self.widths: dict[int, int] = {}  # V of each position that was drawn

    def noise(self, position: int, like: torch.Tensor) -> torch.Tensor:
        """(B, V) noise of a position, counted from 0; `like` gives V and dtype; drawn again where V was another."""
        if position < self.newest and self.widths[position] != like.shape[-1]:
            self.go_on(position, self.states[position])
        while self.newest <= position:
            self.generator.set_state(self.states[self.newest])
            self.widths[self.newest] = like.shape[-1]
            self.drawn[self.newest] = self._draw(like)
            self.drawn.pop(self.newest - self.KEPT, None)
            self.newest += 1
            self.states[self.newest] = self.generator.get_state()
        if position in self.drawn:
            return self.drawn[position]
        self.generator.set_state(self.states[position])
        return self._draw(like)

    def ahead(self, firsts: list[int], depth: int) -> torch.Tensor:
        """(B, D, V) noise of D positions from each row's first, once that of any position was drawn."""
        like = next(reversed(self.drawn.values()))
        rows = [[self.noise(first + more, like)[row] for more in range(depth)] for row, first in enumerate(firsts)]
        # no row will ask for what lies before
        self.states = {position: state for position, state in self.states.items() if position >= min(firsts)}
        self.widths = {position: width for position, width in self.widths.items() if position in self.states}
        return torch.stack([torch.stack(row) for row in rows])

    def go_on(self, position: int, state: torch.Tensor) -> None:
        """Draw what comes from a position on from another state."""
        self.newest = position
        self.states = {place: before for place, before in self.states.items() if place < position} | {position: state}
        self.drawn = {place: noise for place, noise in self.drawn.items() if place < position}

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        noise = like.new_empty(self.batch_size, like.shape[-1], device=self.generator.device)
        return noise.exponential_(1, generator=self.generator)


class RandomNumbers:
    """Where one call draws from, and where its user's objects do.

    A call of `generate` begins where the process's generators stand as it begins to draw (`sample`). These stand
    elsewhere from then on, so that what other threads draw meanwhile is something else, and are set once, at the end
    (`close`), to where the base would leave them; where somebody else has moved them they are left alone.

    A request has its own numbers from the start: those of `torch.manual_seed(seed)` and a call alone, or without a seed
    those that come next in the process, whose generators go on from elsewhere for good.

    Objects of the user's, which may draw from the process's generators, find these where the call stands (`lent`).
    """

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.states: list[torch.Tensor] = []  # where the call stands
        self.begun_at: list[torch.Tensor] = []
        self.parked: list[torch.Tensor] | None = None  # where the process's generators stand meanwhile
        self.shared = False  # whether others are decoded beside this call
        self.moved = False  # whether objects of the user's have drawn
        self.tape: NoiseTape | None = None
        self.position = 0  # positions at which a token was chosen

    @classmethod
    def of_request(cls, device: torch.device, seed: int | None = None) -> RandomNumbers:
        """Those of one request of many."""
        numbers = cls()
        numbers.shared, numbers.generators = True, generators_of(device)
        if seed is not None:
            fresh = (torch.Generator(generator.device) for generator in numbers.generators)
            numbers.states = [generator.manual_seed(seed).get_state() for generator in fresh]
        else:
            numbers._leave_process(numbers.generators)
        return numbers

    def _leave_process(self, generators: list[torch.Generator]) -> list[torch.Tensor]:
        """Go on from where the process's generators stand, and let these go on elsewhere."""
        with GENERATORS:  # no other call begins where this one does
            self.generators, self.states = generators, where_calls_begin(generators)
            self.begun_at, parked = self.states, [*map(elsewhere, generators, self.states)]
            let_calls_begin_at(generators, parked)
        return parked

    def sample(self, batch_size: int, device: torch.device) -> None:
        """The call is going to sample as the base does, with a generator of its own."""
        if not self.generators:
            self.parked = self._leave_process(generators_of(device))
        generator = torch.Generator(self.generators[-1].device)
        generator.set_state(self.states[-1])
        self.tape = NoiseTape(batch_size, generator)

    def chosen(self, position: int) -> None:
        """So many positions have a token now: where the base's call would stand."""
        self.position = position
        if self.tape is not None and position in self.tape.states:
            self.states = [*self.states[:-1], self.tape.states[position]]

    def stand_at(self, position: int) -> None:
        """So many positions have a token, some of them for certain but not chosen yet."""
        if self.tape is not None:
            self.tape.noise(position - 1, next(reversed(self.tape.drawn.values())))
            self.chosen(position)

    @contextlib.contextmanager
    def lent(self, at_once: bool = False) -> Iterator[None]:
        """Around objects of the user's: they draw from where the call stands, which then goes on behind them. Beside
        other requests generators are lent from the first draw on alone, unless it is known that there will be one
        (`at_once`): what another thread does to them meanwhile stays."""
        if not self.generators:
            yield
            return
        use, lent = Use(self.generators), list[bool]()

        def lend() -> None:
            with GENERATORS:
                if not lent and same_states(states_of(self.generators), use.before):  # else it has set a seed
                    leave_at(self.generators, self.states)
                lent.append(True)

        try:
            if at_once or not self.shared:
                lend()
            with contextlib.nullcontext() if lent else _Draws(lend):
                yield
        finally:
            with GENERATORS:
                states = states_of(self.generators)
                use.end(bool(lent))
            if lent and not same_states(states, self.states):
                self.states, self.moved = states, True
                if self.tape is not None:
                    self.tape.go_on(self.position, states[-1])

    def undo(self) -> None:
        """The base is going to decode by itself, from where the call began."""
        if self.parked is not None:
            with GENERATORS:
                let_calls_begin_at(self.generators, self.begun_at)
            self.__init__()  # type: ignore[misc]

    def close(self) -> None:
        """At the end of a call, also by an exception: leave the process's generators where the base's call would."""
        if self.parked is not None:
            with GENERATORS:
                if same_states(where_calls_begin(self.generators), self.parked):
                    let_calls_begin_at(self.generators, self.states)
            self.parked = None


NOTHING_DRAWN = RandomNumbers()  # of calls that do not sample, and know of no objects that draw


class _Draws(TorchDispatchMode):
    """Tells when this thread is going to draw from a generator of the process."""

    def __init__(self, tell: Callable[[], None]):
        super().__init__()
        self.tell = tell

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            self.tell()
        return func(*args, **kwargs)


def _forked() -> None:
    """In a process that was forked, which has none of the other threads: generators go on from where calls begin."""
    for lock in LOCKS:
        lock._at_fork_reinit()
    for generator, (thread, state) in [*IN_USE.items()]:
        if thread != threading.get_ident():
            del IN_USE[generator]
            if generator.device.type == "cpu":  # a GPU is of no use there
                generator.set_state(state)
    GENERATORS.release()


if hasattr(os, "register_at_fork"):  # nobody else looks at where generators stand while a process is forked
    os.register_at_fork(before=GENERATORS.acquire, after_in_parent=GENERATORS.release, after_in_child=_forked)
