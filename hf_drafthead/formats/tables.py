"""Names of tensors here and in layouts: tables of `Row`s and pairs of prefixes, which are read in both directions."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Prefixes = Sequence[tuple[str, str]]
Limits = Mapping[str, Mapping[str, tuple[Any, ...]]]  # by target and field, the values for which it has a place
NO, YES = (False,), (True,)  # of limits; also 0 and 1


class Row(NamedTuple):
    """A tensor here and its parts in a layout, one behind the other, or stacked as rows of a new dimension."""

    ours: str
    theirs: list[str]
    stacked: bool = False


def parts_of(tensors: Mapping[str, Tensor], rows: Iterable[Row]) -> dict[str, Tensor]:
    """Tensors of this library in a layout's parts, by their names there."""
    parts: dict[str, Tensor] = {}
    for row in rows:
        whole = tensors[row.ours]
        parts |= zip(row.theirs, whole.unbind() if row.stacked else whole.chunk(len(row.theirs)), strict=True)
    return parts


def renamed(name: str, prefixes: Prefixes) -> str | None:
    """The name with the second prefix of the first pair that fits in place of the first; None if no pair fits."""
    return next((new + name.removeprefix(old) for old, new in prefixes if name.startswith(old)), None)


def some(pattern: str, keys: Iterable[str]) -> bool:
    """Whether one of the keys fits the pattern as a whole."""
    return any(re.fullmatch(pattern, key) for key in keys)


def equal(tensors: Iterable[Tensor]) -> bool:
    """Whether all are the same, by what they hold."""
    first, *others = tensors
    return all(other.data_ptr() == first.data_ptr() or torch.equal(first, other) for other in others)
