"""What the base says about recent texts, each of which it reads once: in a round of learning most are read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_drafthead.bases.reader import BaseReader, Reading
from hf_drafthead.learning.texts import Text, batch_of
from hf_drafthead.training.trainer import adapter_layers
from hf_drafthead.trees.entries import state_of

ANOTHER = 0.1  # of the hidden states' norm: rounding is less


class Readings:
    """Hidden states of texts, on the host, in about `limit` bytes; those that were asked for last stay.

    All are of one base: where a text is read with other weights or adapters, what was read before is forgotten.
    """

    def __init__(self, base: Any, drafter: Any, limit: int):
        self.reader = BaseReader.of_texts(base, drafter.reads, drafter.output)
        self.limit, self.size, self.state, self.moved = limit, 0, state_of_base(base), False
        self.known: dict[Text, tuple[torch.Tensor, ...]] = {}

    def of(self, texts: Sequence[Text]) -> Reading:
        """Of texts padded on the right, where the base is."""
        unknown, read = [text for text in texts if text not in self.known], {}
        if unknown and (state := state_of_base(self.reader.base)) != self.state:
            self.known, self.size, self.state, self.moved, unknown = {}, 0, state, True, [*texts]
        if unknown:
            reading = self._read(unknown)
            parts = reading.features, reading.hidden, reading.scores  # which may be one tensor
            if size_of(parts) > self.limit:
                return reading if len(unknown) == len(texts) else self._read(texts)
            for row, text in enumerate(unknown):
                held = {id(part): part[row, : len(text.ids)].to("cpu", copy=True) for part in parts}
                read[text] = tuple(held[id(part)] for part in parts)
                self.size += size_of(read[text])
        rows = [read[text] if text in read else self.known.pop(text) for text in texts]
        self.known.update(zip(texts, rows))
        while self.size > self.limit:
            self.size -= size_of(self.known.pop(next(iter(self.known))))
        columns = (torch.nn.utils.rnn.pad_sequence([*column], batch_first=True) for column in zip(*rows, strict=True))
        return Reading(*(column.to(self._device) for column in columns))

    def base_has_moved(self) -> bool:
        """Whether weights or adapters are others than when the first text was read."""
        return self.moved or state_of_base(self.reader.base) != self.state

    def agree(self) -> bool:
        """Whether the base says the same again about a text; a change of hooks or buffers shows in no weight."""
        if not self.known:
            return True
        text, (_, before, _) = next(reversed(self.known.items()))
        difference = self._read([text]).hidden[0].to(before.device) - before
        return bool(difference.float().norm() <= ANOTHER * before.float().norm())

    def _read(self, texts: Sequence[Text]) -> Reading:
        with torch.no_grad():
            return self.reader.read_texts(batch_of(texts, self._device)[0])

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.reader.base.get_input_embeddings().weight.device
        return device


def state_of_base(base: Any) -> list[Any]:
    """What is another where a base was trained, or its adapters were switched."""
    switches = ("active_adapters", "disable_adapters")
    adapters = [[str(getattr(layer, name, None)) for name in switches] for layer in adapter_layers(base)]
    return [*adapters, *state_of(base.parameters())]


def size_of(parts: Sequence[torch.Tensor]) -> int:
    """Bytes of some tensors, of which several may be one."""
    return sum({id(part): part.nbytes for part in parts}.values())
