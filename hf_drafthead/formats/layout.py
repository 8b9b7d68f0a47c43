"""What a layout is: how another project names the tensors of draft heads, and what it writes about them.

Names stand in tables of `Row`s and in pairs of prefixes, which are read in both directions: a conversion joins the
layout's tensors to those of this library, an export splits them again.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel

Prefixes = Sequence[tuple[str, str]]
# How engines are started with EAGLE heads in FOLDER.
VLLM = 'vllm serve BASE --speculative-config \'{{"method": "{}", "model": FOLDER, "num_speculative_tokens": {}}}\''
VLLM += "; it drafts a chain, without a tree"
SGLANG = "python -m sglang.launch_server --model-path BASE --speculative-algorithm {}"
SGLANG += " --speculative-draft-model-path FOLDER"


class Row(NamedTuple):
    """A tensor here and its parts in a layout, which lie one behind the other along the first dimension.

    ours: its name; theirs: the names of the parts; shape: of each part; stacked: the parts are rows of a new dimension.
    """

    ours: str
    theirs: list[str]
    shape: tuple[int, ...]
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


@dataclass
class Heads:
    """What a layout's file holds.

    Attributes:
        model_class, fields: the family's, and of its config, without those about the base.
        tensors: the drafter's, by the names of its state dict.
        hidden_size, vocab_size: H and V of the base; V is None if nothing in the file tells it.
        base: Hub id or path of the base, as the layout names it.
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


class Reader:
    """Hands out the tensors of a file, and knows which of them nobody has asked for.

    Args:
        name: of the checkpoint, for messages.
        tensors: by their names in the file.
        names: their names in the file by those that the layout's table has, where these differ.
    """

    def __init__(self, name: str, tensors: Mapping[str, Tensor], names: Mapping[str, str] | None = None) -> None:
        self.name = name
        self.tensors = tensors
        self.names = names or {}
        self.dropped: dict[str, str] = {}
        self.notes: list[str] = []
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self.names.get(key, key) in self.tensors

    def take(self, key: str, shape: Sequence[int] | None = None) -> Tensor:
        """The tensor of that name; a ValueError if there is none, or if it has another shape."""
        key = self.names.get(key, key)
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
        return Joined((tensor,), tuple(tensor.shape), (self.names.get(key, key),))

    def rows(self, rows: Iterable[Row]) -> dict[str, Joined]:
        """The tensors of a table, by their names here; where several rows are the same tensor, the first is taken."""
        tensors: dict[str, Joined] = {}
        for row in rows:
            if row.ours in tensors:
                self.drop(row.theirs[0], "the same block as the one before, applied again (tie_blocks)")
                continue
            parts = [self.take(key, row.shape) for key in row.theirs]
            keys = tuple(self.names.get(key, key) for key in row.theirs)
            types = sorted({str(part.dtype).removeprefix("torch.") for part in parts})
            if len(types) > 1:
                raise ValueError(
                    f"{self.name!r} has {keys[0]!r} and {len(keys) - 1} more that belong together in several types "
                    f"({', '.join(types)}): save them in one."
                )
            first, *rest = row.shape
            shape = (len(parts), *row.shape) if row.stacked else (len(parts) * first, *rest)
            tensors[row.ours] = Joined(tuple(parts), shape, keys)
        return tensors

    def renamed(self, prefixes: Prefixes) -> dict[str, Joined]:
        """The tensors whose names begin with the second prefix of a pair, with the first in its place."""
        theirs = [(their_prefix, our_prefix) for our_prefix, their_prefix in prefixes]
        tensors = {}
        for key in self.tensors:
            if key.endswith("inv_freq"):
                self.drop(key, "computed from the config")
            elif key.startswith("verifier_"):
                self.drop(key, "the base's own, which only training needs")
            elif (name := renamed(key, theirs)) is not None:
                tensors[name] = self.one(key)
        return tensors

    def drop(self, key: str, reason: str) -> Tensor:
        """Leave a tensor out, saying why."""
        self.dropped[self.names.get(key, key)] = reason
        return self.take(key)

    def copies(self, of_base: Mapping[str, str]) -> dict[str, Tensor]:
        """Leave out the tensors that are copies of the base's, of which `of_base` says by their names which."""
        return {which: self.drop(key, f"a copy of the base's {which}") for key, which in of_base.items() if key in self}

    def note_difference(self, config: Mapping[str, Any], name: str, actual: Any) -> None:
        """Note a config field that disagrees with the tensors, which are right."""
        if config.get(name) not in (None, actual):
            self.notes.append(
                f"config.json says {name} {config[name]!r}, the tensors have {actual!r}: the tensors are right."
            )

    def heads(self, layout: "Layout", fields: dict[str, Any], tensors: dict[str, Joined], **more: Any) -> Heads:
        """What was read, once every tensor has been: leaving some out unseen would be silent damage."""
        if unknown := sorted(set(self.tensors) - self._taken):
            raise ValueError(
                f"{self.name!r} has {len(unknown)} tensor(s) that the layout {layout.name!r} does not have, such as "
                f"{unknown[0]!r} {list(self.tensors[unknown[0]].shape)}: these are heads of another kind."
            )
        return Heads(layout.family, fields, tensors, dropped=self.dropped, notes=self.notes, **more)


@dataclass
class SavedHeads:
    """Heads of this library that are to be written in another layout.

    Attributes:
        name, config: where they lie, for messages, and their config.
        tensors: of the drafter, by the names of its state dict.
        base: Hub id or path of their base; None if the config names none.
        base_tensors: the base's own, by the names of its state dict, if its weights lie in the same checkpoint.
        base_model: the loaded base, if there is one.
        fold_bias: move a bias that the target would drop into tensors that it reads.
    """

    name: str
    config: Any
    tensors: Mapping[str, Tensor]
    base: str | None
    base_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    base_model: nn.Module | None = None
    fold_bias: bool = False


class Loss(Exception):
    """What a target cannot hold, and what to do instead."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")


@dataclass
class Files:
    """What a layout writes: a file of weights, whose ending tells its form, a config.json, and notes for the user."""

    weights: str
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)


class Layout(ABC):
    """One project's form of one family's heads.

    Attributes:
        name: by which messages and reports call it.
        family: model class of the heads.
        targets: names under which `export --to` writes it; empty for a layout that is only read.
        holds_base: the base's weights lie in the same files.
        holds_vocabulary: it has a place for a draft vocabulary.
    """

    name: ClassVar[str]
    family: ClassVar[type[DraftHeadPreTrainedModel]]
    targets: ClassVar[tuple[str, ...]] = ()
    holds_base: ClassVar[bool] = False
    holds_vocabulary: ClassVar[bool] = False

    @abstractmethod
    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        """Whether tensors of these names, beside this config.json (empty without one), are of this layout."""

    @abstractmethod
    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        """The heads under this library's names; a ValueError where a tensor or a field is not as the layout has it.

        fields: of the config that the user has set: they settle what a layout leaves open.
        """

    def write(self, saved: SavedHeads, target: str) -> Files:
        """The heads under the layout's names for one of its targets; Loss if that would lose or change something."""
        raise NotImplementedError


def some(pattern: str, keys: Iterable[str]) -> bool:
    """Whether one of the keys fits the pattern as a whole."""
    return any(re.fullmatch(pattern, key) for key in keys)
