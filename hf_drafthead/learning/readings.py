"""What the base says about recent texts, each of which it reads once: in a round of learning most are read again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from hf_drafthead.bases.reader import BaseReader, Reading
from hf_drafthead.learning.texts import Text, batch_of


class Readings:
    """Hidden states of texts, on the host, in at most `limit` bytes; those that were asked for last stay."""

    def __init__(self, base: Any, drafter: Any, limit: int):
        self.reader = BaseReader.of_texts(base, drafter.reads, drafter.output)
        self.limit, self.size = limit, 0
        self.known: OrderedDict[Text, tuple[torch.Tensor, ...]] = OrderedDict()

    def of(self, texts: Sequence[Text]) -> Reading:
        """Of texts padded on the right, with zeros behind their ends; where the base is."""
        device = self.reader.base.get_input_embeddings().weight.device
        if unknown := [text for text in texts if text not in self.known]:
            with torch.no_grad():
                reading = self.reader.read_texts(batch_of(unknown, device)[0])
            parts = reading.features, reading.hidden, reading.scores  # which may be one tensor
            for row, text in enumerate(unknown):
                held = {id(part): part[row, : len(text.ids)].to("cpu", copy=True) for part in parts}
                self.known[text] = tuple(held[id(part)] for part in parts)
                self.size += size_of(self.known[text])
        rows = []
        for text in texts:
            self.known.move_to_end(text)
            rows.append(self.known[text])
        while self.size > self.limit:
            self.size -= size_of(self.known.popitem(last=False)[1])
        columns = (torch.nn.utils.rnn.pad_sequence([*column], batch_first=True) for column in zip(*rows, strict=True))
        return Reading(*(column.to(device) for column in columns))


def size_of(parts: Sequence[torch.Tensor]) -> int:
    """Bytes of some tensors, of which several may be one."""
    return sum({id(part): part.nbytes for part in parts}.values())
