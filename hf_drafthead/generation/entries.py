"""Entries of a calibration: the situation in which a tree was measured, and the entry that fits a call.

An entry is a JSON object of the generation config: `device`, `dtype`, `batch_size`, `captured`, `heads_hash`, `tree`
(rank paths, the most valuable first; none where no tree pays) and `measured` (the figures, see `calibrate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_drafthead.generation.identity import device_name, drafter_hash
from hf_drafthead.generation.tree import DraftTree


class Situation(NamedTuple):
    """What the speed of a tree depends on, besides the text.

    device: the GPU's name, or "cpu"; dtype: of the base; batch_size: rows; captured: whether steps are compiled;
    heads_hash: of the drafter's weights, see `drafter_hash`.
    """

    device: str
    dtype: str
    batch_size: int
    captured: bool
    heads_hash: str | None

    @classmethod
    def of(cls, base: Any, drafter: torch.nn.Module, batch_size: int, captured: bool) -> Situation:
        """The situation of a call."""
        dtype = str(base.dtype).removeprefix("torch.")
        return cls(device_name(base.device), dtype, batch_size, captured, drafter_hash(drafter))

    def __str__(self) -> str:
        steps = "captured" if self.captured else "uncaptured"
        return f"{self.device}, {self.dtype}, batch size {self.batch_size}, {steps} steps, heads {self.heads_hash}"


def matching(entries: Sequence[dict[str, Any]], situation: Situation) -> dict[str, Any] | None:
    """The entry that was measured in this situation; None if there is none."""
    wanted = situation._asdict()
    return next((one for one in entries if all(one.get(name) == value for name, value in wanted.items())), None)


def merged(entries: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries with a new one, in place of the one of its situation and of those of its type for other heads."""

    def stays(one: dict[str, Any]) -> bool:
        if one.get("dtype") != new["dtype"]:  # the same heads have another hash where their values are rounded
            return True
        same_heads = one.get("heads_hash") == new["heads_hash"]
        return same_heads and any(one.get(name) != new[name] for name in ("device", "batch_size", "captured"))

    return [*filter(stays, entries), new]


def tree_of(entry: dict[str, Any], max_depth: int | None, vocabulary: int) -> DraftTree:
    """The tree of an entry; without paths it is the root alone.

    Raises:
        ValueError: the entry holds none, or one that these heads cannot fill.
    """
    try:
        paths = entry.get("tree")
        if not isinstance(paths, list):
            raise TypeError(f"its tree is of type {type(paths).__name__}, expected a list of rank paths.")
        return DraftTree.resolve(paths, max_depth, vocabulary) if paths else DraftTree.root_alone()
    except (TypeError, ValueError) as error:
        raise damaged(entry, error) from None


def damaged(entry: dict[str, Any], error: Exception) -> ValueError:
    """One line about an entry that cannot be used."""
    return ValueError(
        f"the calibration entry for {entry.get('device')}, batch size {entry.get('batch_size')}, is damaged "
        f"({' '.join(str(error).split())[:300]}): run `hf-drafthead calibrate` again, or give draft_tree=."
    )
