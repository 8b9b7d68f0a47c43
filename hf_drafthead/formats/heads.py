"""Draft heads on their way between two layouts: this library's names and fields, the other layout's tensors.

Shapes: B, T and so on do not occur here; a tensor is what a file holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel

INPUT, OUTPUT = "input embeddings", "lm_head"  # tensors of the base that some layouts hold a copy of


@dataclass(frozen=True)
class Joined:
    """A tensor that consists of other tensors, one behind the other in memory; nothing is copied before it is used.

    Joining along the first dimension, and stacking, are both just that.

    Args:
        parts: tensors of one type.
        shape: of the whole.
        sources: what the parts are called in the file that they come from.
    """

    parts: tuple[Tensor, ...]
    shape: tuple[int, ...]
    sources: tuple[str, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of every part."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return sum(part.nbytes for part in self.parts)

    def tensor(self) -> Tensor:
        """The whole; a single part of the right shape is returned as it is."""
        if len(self.parts) == 1:
            return self.parts[0].view(self.shape)
        return torch.cat([part.reshape(-1) for part in self.parts]).view(self.shape)


class Reader:
    """Hands out the tensors of a file, and knows which of them nobody has asked for.

    Args:
        name: of the checkpoint, for messages.
        tensors: by the names of the layout.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self.name = name
        self.tensors = tensors
        self.dropped: dict[str, str] = {}
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self.tensors

    def take(self, key: str, shape: Sequence[int] | None = None) -> Tensor:
        """The tensor of that name.

        Raises:
            ValueError: there is none, or it has another shape.
        """
        if key not in self.tensors:
            raise ValueError(f"{self.name!r} lacks the tensor {key!r}: the file is not complete, get it again.")
        tensor = self.tensors[key]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise ValueError(
                f"{self.name!r} has {key!r} of shape {list(tensor.shape)}, but the tensors beside it ask for "
                f"{list(shape)}: the file is damaged or of another layout."
            )
        self._taken.add(key)
        return tensor

    def one(self, key: str, shape: Sequence[int] | None = None) -> Joined:
        """The tensor of that name, as a whole of one part."""
        tensor = self.take(key, shape)
        return Joined((tensor,), tuple(tensor.shape), (key,))

    def stacked(self, keys: Sequence[str], shape: Sequence[int] | None = None) -> Joined:
        """Tensors of one shape as rows of a larger one."""
        rows = [self.take(key, shape) for key in keys]
        self._same_type(keys, rows)
        return Joined(tuple(rows), (len(rows), *rows[0].shape), tuple(keys))

    def concatenated(self, keys: Sequence[str], shape: Sequence[int] | None = None) -> Joined:
        """Tensors behind each other along their first dimension."""
        parts = [self.take(key, shape) for key in keys]
        self._same_type(keys, parts)
        return Joined(tuple(parts), (sum(part.shape[0] for part in parts), *parts[0].shape[1:]), tuple(keys))

    def drop(self, key: str, reason: str) -> Tensor:
        """Leave a tensor out, saying why."""
        self.dropped[key] = reason
        return self.take(key)

    def finish(self, layout: str) -> None:
        """Refuse tensors that the layout does not have: leaving them out unseen would be silent damage.

        Raises:
            ValueError: there are some.
        """
        unknown = sorted(set(self.tensors) - self._taken)
        if unknown:
            raise ValueError(
                f"{self.name!r} has {len(unknown)} tensor(s) that the layout {layout!r} does not have, such as "
                f"{unknown[0]!r} {list(self.tensors[unknown[0]].shape)}: these are heads of another kind."
            )

    def _same_type(self, keys: Sequence[str], tensors: Sequence[Tensor]) -> None:
        types = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
        if len(types) > 1:
            raise ValueError(
                f"{self.name!r} has {keys[0]!r} and {len(keys) - 1} more that belong together in several types "
                f"({', '.join(types)}): save them in one."
            )


@dataclass
class Heads:
    """What a layout's file holds.

    Attributes:
        model_class: the family's.
        fields: of its config, without those about the base.
        tensors: the drafter's, by the names of its state dict.
        hidden_size: H of the base that they were trained for.
        vocab_size: V of that base; None if nothing in the file tells it.
        base: Hub id or path of that base, as the layout names it.
        base_inside: the base's own weights lie in the same files.
        copies: tensors that should equal the base's: INPUT, OUTPUT.
        tree: name of the draft tree that the heads' own project runs them with.
        dropped: tensors that are left out, and why.
        notes: what the user should know: where config and tensors disagree, what was assumed.
    """

    model_class: type[DraftHeadPreTrainedModel]
    fields: dict[str, Any]
    tensors: dict[str, Joined]
    hidden_size: int
    vocab_size: int | None = None
    base: str | None = None
    base_inside: bool = False
    copies: dict[str, Tensor] = field(default_factory=dict)
    tree: str = DEFAULT_TREE
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def note_difference(notes: list[str], config: Mapping[str, Any], name: str, found: Any) -> None:
    """Note a config field that disagrees with the tensors, which are right."""
    if name in config and config[name] != found:
        notes.append(f"config.json says {name} {config[name]!r}, the tensors have {found!r}: the tensors are right.")


def equal(tensors: Iterable[Tensor]) -> bool:
    """Whether all are the same, by what they hold."""
    first, *others = tensors
    return all(other.data_ptr() == first.data_ptr() or torch.equal(first, other) for other in others)
