"""The random generators of the process, which belong to whoever calls: where they stand, and who may move them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch

from hf_drafthead.bases.errors import Unsupported

GENERATORS = threading.RLock()  # of all calls: where the process's generators stand is looked at and changed together
LOCKS: weakref.WeakSet[Any] = weakref.WeakSet()  # others, which nobody holds in a process that is forked


def new_lock(kind: Any = threading.Lock) -> Any:
    """A lock that is free in a process that is forked, which has none of the threads that would release it."""
    LOCKS.add(lock := kind())
    return lock


def generator_of(device: torch.device) -> torch.Generator:
    """The random generator that sampling on a device draws from."""
    if device.type != "cuda":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The generators that objects of the user's may draw from: that of the CPU, and that of the device, the last."""
    found = torch.default_generator, generator_of(device)
    return list({id(generator): generator for generator in found}.values())


def states_of(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Where generators stand, once a compilation's putting them back is undone."""
    return [*map(_state_of, generators)]


def _state_of(generator: torch.Generator) -> torch.Tensor:
    state = generator.get_state()
    left = LEFT.get(generator)
    if left is not None and _hash_of(state) in left.earlier:
        state = left.last
        generator.set_state(state)
    return state


def leave_at(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Let generators go on from these states."""
    for generator, state in zip(generators, states):
        if generator in LEFT:
            LEFT[generator].go_on(state)
        generator.set_state(state)


def where_calls_begin(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    """Where calls of this thread begin: where generators stand, or stood before another thread took them into use."""
    used = (IN_USE.get(generator) for generator in generators)
    return [
        use[1] if use is not None and use[0] != threading.get_ident() else _state_of(generator)
        for generator, use in zip(generators, used)
    ]


def let_calls_begin_at(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    """Let generators go on from these states, once no other thread uses them."""
    for generator, state in zip(generators, states):
        use = IN_USE.get(generator)
        if use is not None and use[0] != threading.get_ident():
            IN_USE[generator] = use[0], state
        else:
            leave_at([generator], [state])


class Use:
    """A while in which this thread draws from generators of the process, or is tried for it; until `end`.

    Calls of other threads that begin or end meanwhile would move them, and be taken for draws of this one: they go by
    where the generators stood `before`.
    """

    def __init__(self, generators: Sequence[torch.Generator]):
        with GENERATORS:
            self.generators, self.before = generators, states_of(generators)
            self.own = [generator for generator in generators if generator not in IN_USE]
            states = dict(zip(generators, self.before))
            IN_USE.update({generator: (threading.get_ident(), states[generator]) for generator in self.own})

    def end(self, moved: bool) -> None:
        """Let the generators go on from where other threads are to find them, if they were moved here."""
        with GENERATORS:
            for generator, before in zip(self.generators, self.before):
                stands = IN_USE.pop(generator)[1] if generator in self.own else before
                if moved or stands is not before:
                    leave_at([generator], [stands])


def same_states(states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether these are the same states."""
    return all(map(torch.equal, states, others))


def elsewhere(generator: torch.Generator, state: torch.Tensor) -> torch.Tensor:
    """Another state, the same in every process, so that a run that begins with `torch.manual_seed` can be repeated."""
    seed = int.from_bytes(sha256(state.numpy().tobytes()).digest()[:7], "big")
    return torch.Generator(generator.device).manual_seed(seed).get_state()


@contextlib.contextmanager
def refusing_draws(device: torch.device) -> Iterator[None]:
    """Around a trial of a base, after which the generators stand where they stood; Unsupported if the base moved them.

    In a tree its forwards are fewer, and would draw other numbers.
    """
    use, moved = Use(generators_of(device)), False
    try:
        yield
    finally:
        with GENERATORS:
            moved = not same_states(states_of(use.generators), use.before)
            use.end(moved)
    if moved:
        raise Unsupported("the base draws random numbers in its forward")


class Left:
    """Where calls leave a process's generator while a program is compiled: last, and at which states before."""

    def __init__(self, state: torch.Tensor):
        self.last, self.earlier = state, set[int]()

    def go_on(self, state: torch.Tensor) -> None:
        self.earlier.add(_hash_of(self.last))
        self.earlier.discard(_hash_of(state))
        self.last = state


# The generators that a thread uses: which one, and where calls of other threads begin meanwhile.
IN_USE: dict[torch.Generator, tuple[int, torch.Tensor]] = {}
LEFT: dict[torch.Generator, Left] = {}  # of the generators that compilations may put back


@contextlib.contextmanager
def not_put_back(device: torch.device) -> Iterator[None]:
    """Around a compilation, of which there is one at a time: dynamo puts the process's generators back to where they
    stood as it began. Calls of other threads that begin meanwhile would write what others wrote: they undo it."""
    generators = generators_of(device)
    with GENERATORS:
        LEFT.update({generator: Left(generator.get_state()) for generator in generators})
    try:
        yield
    finally:
        with GENERATORS:
            for generator in generators:
                left = LEFT.pop(generator)
                if _hash_of(generator.get_state()) in left.earlier:
                    generator.set_state(left.last)


def _hash_of(state: torch.Tensor) -> int:
    return hash(state.numpy().tobytes())
