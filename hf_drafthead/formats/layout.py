"""What a layout is: how another project names the tensors of draft heads, and what it writes about them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

from torch import Tensor, nn

from hf_drafthead.formats.heads import Heads
from hf_drafthead.formats.source import Source
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel


@dataclass
class Own:
    """Heads of this library that are to be written in another layout.

    Attributes:
        name: where they lie, for messages.
        config: theirs.
        tensors: of the drafter, by the names of its state dict.
        base: Hub id or path of their base; None if the config names none.
        base_tensors: the base's own, by the names of its state dict, if its weights lie in the same checkpoint.
        base_model: the loaded base, if there is one.
    """

    name: str
    config: Any
    tensors: Mapping[str, Tensor]
    base: str | None
    base_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    base_model: nn.Module | None = None

    def part(self, key: str, index: int) -> Tensor:
        """One row of a tensor that holds all heads."""
        return self.tensors[key][index]


@dataclass
class Files:
    """What a layout writes.

    Attributes:
        weights: name of the file of weights; its ending says in which form.
        tensors: by the names of the layout.
        config: for config.json.
        notes: what the user should know; how the result is run.
    """

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
    """

    name: ClassVar[str]
    family: ClassVar[type[DraftHeadPreTrainedModel]]
    targets: ClassVar[tuple[str, ...]] = ()
    holds_base: ClassVar[bool] = False

    @abstractmethod
    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        """Whether tensors of these names are of this layout.

        Args:
            keys: all names in the file.
            config: config.json beside it; empty without one.
        """

    @abstractmethod
    def read(self, source: Source, given: Mapping[str, Any]) -> Heads:
        """The heads under this library's names.

        Args:
            source: the file.
            given: config fields that the user has set: they settle what a layout leaves open.

        Raises:
            ValueError: a tensor is missing, unknown or of another shape, or the family here has no form for it.
        """

    def write(self, own: Own, target: str, fold_bias: bool = False) -> Files:
        """The heads under the layout's names.

        Args:
            own: the heads.
            target: one of `targets`.
            fold_bias: move a bias that the target would drop into tensors that it reads.

        Raises:
            ValueError: the target would lose or change something; the message says what to do.
        """
        raise NotImplementedError


def some(pattern: str, keys: Iterable[str]) -> bool:
    """Whether one of the keys fits the pattern as a whole."""
    return any(re.fullmatch(pattern, key) for key in keys)


def refuse(own: Own, target: str, what: str, advice: str) -> NoReturn:
    """Raise, since the target cannot hold something.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"{own.name!r} cannot be written as {target!r}: {what}; {advice}.")


def refuse_own_base(own: Own, target: str) -> None:
    """Refuse heads whose base lies with them: a target that only names a base would run them on another.

    Raises:
        ValueError: it does.
    """
    if own.base_tensors:
        refuse(
            own,
            target,
            "they were trained together with the base that lies with them, and the target only names a base",
            "save the base on its own (model.base.save_pretrained), load the heads' tensors onto it and name it",
        )
