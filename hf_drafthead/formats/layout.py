"""What a layout is: how another project names the tensors of draft heads, and what it writes about them."""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from hf_drafthead.formats.disk import Source
from hf_drafthead.formats.heads import INPUT, OUTPUT, Heads
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.checkpoint import checkpoint_files, map_tensors


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


ENDS = {
    INPUT: ("embed_tokens.weight", "wte.weight", "embed_in.weight"),
    OUTPUT: ("lm_head.weight", "embed_out.weight"),
}
COMPARED_AT_ONCE = 4096  # compared at a time


def base_tensor(base: str | nn.Module | Mapping[str, Tensor], which: str, revision: str | None = None) -> Tensor | None:
    """The base's input embeddings or lm_head (V, H), if its weights are on this machine.

    Args:
        base: a loaded model, its tensors, a folder, or a Hub id whose files are in the cache.
        which: INPUT or OUTPUT.
        revision: of a Hub id.

    Returns:
        None if the weights are not here, or are not stored as plain safetensors.
    """
    if isinstance(base, nn.Module):
        module: Any = base
        found = module.get_input_embeddings() if which == INPUT else module.get_output_embeddings()
        weight = found.weight
        plain = weight.is_floating_point() and weight.dtype.itemsize >= 2 and not weight.is_meta
        return weight.detach() if plain else None
    if isinstance(base, str):
        hub = {} if os.path.isdir(base) else {"local_files_only": True, "revision": revision or "main"}
        try:
            base = map_tensors(checkpoint_files(base, None, hub))
        except OSError:
            return None
    for kind in (which, INPUT) if which == OUTPUT else (which,):  # a tied lm_head is not stored
        names = [name for name in base if name.endswith(ENDS[kind])]
        if len(names) == 1 and base[names[0]].is_floating_point():
            return base[names[0]]
    return None


def read_base_tensor(own: Own, which: str, target: str) -> Tensor:
    """A tensor of the base of heads that are to be written with it.

    Raises:
        ValueError: the base is not on this machine.
    """
    found = base_tensor(own.base_model or own.base or {}, which)
    if found is None:
        refuse(
            own,
            target,
            f"the target holds the {which} of the base, and the weights of {own.base!r} are not on this machine",
            "download the base first (`hf download`)",
        )
    return found


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, as far as the coarser of their types can tell."""
    if one.shape != other.shape:
        return False
    exact = one.dtype == other.dtype
    rounding = max(torch.finfo(one.dtype).eps, torch.finfo(other.dtype).eps)
    smallest = 2.0**-24  # the spacing of float16 around zero, where it rounds more coarsely than bfloat16
    pairs = zip(one.split(COMPARED_AT_ONCE), other.split(COMPARED_AT_ONCE), strict=True)
    if exact:
        return all(torch.equal(a, b.to(a.device)) for a, b in pairs)
    return all(torch.allclose(a.float(), b.to(a.device).float(), rtol=rounding, atol=smallest) for a, b in pairs)
