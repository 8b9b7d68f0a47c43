"""Where a request draws from: what it would draw alone, whatever is drawn beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from hashlib import sha256

import torch

from hf_drafthead.generation.rules import GENERATOR, generator_of


class RequestNoise:
    """The random numbers of one request.

    With a seed they are those of `torch.manual_seed(seed)` and a call alone. Without one they go on from where the
    process's generators stand, as those of a call that begins now; these are moved to somewhere else, so that no other
    request draws the same.

    Args:
        device: of the prompt.
        seed: of the request.
    """

    def __init__(self, device: torch.device, seed: int | None = None):
        self.device = device
        generators = torch.default_generator, generator_of(device)
        self.process = list({id(generator): generator for generator in generators}.values())
        if seed is not None:
            self.states = [
                torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self.process
            ]
            return
        with GENERATOR:
            self.states = [generator.get_state() for generator in self.process]
            for generator, state in zip(self.process, self.states):
                generator.manual_seed(int.from_bytes(sha256(state.numpy().tobytes()).digest()[:7], "big"))

    def generator(self) -> torch.Generator:
        """A generator that nobody else draws from, for a call in which nothing else draws."""
        generator = torch.Generator(self.process[-1].device)
        generator.set_state(self.states[-1])
        return generator

    @contextlib.contextmanager
    def in_process(self) -> Iterator[None]:
        """Meanwhile the process's generators stand where this request has left them, for objects that draw there.

        Other threads that draw at the same time move them; a request in a server is not the only one that can.
        """
        with GENERATOR:
            others = [generator.get_state() for generator in self.process]
            for generator, state in zip(self.process, self.states):
                generator.set_state(state)
        try:
            yield
        finally:
            with GENERATOR:
                self.states = [generator.get_state() for generator in self.process]
                for generator, state in zip(self.process, others):
                    generator.set_state(state)
