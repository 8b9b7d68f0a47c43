"""What a layout is: how another project names the tensors of draft heads, what it writes about them, what it lacks."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn

from hf_drafthead.formats.disk import Joined, Source
from hf_drafthead.formats.tables import Limits, Prefixes, Row, equal, renamed, some
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.decoder_layer import types_of
from hf_drafthead.modeling.files import shortened

KIND = "speculators_model_type"
SET = "on the command line --set"
# How engines are started with EAGLE heads in FOLDER.
VLLM = 'vllm serve BASE --speculative-config \'{{"method": "{}", "model": FOLDER, "num_speculative_tokens": {}}}\''
VLLM += "; it drafts a chain, without a tree"
SGLANG = "python -m sglang.launch_server --model-path BASE --speculative-algorithm {}"
SGLANG += " --speculative-draft-model-path FOLDER"


@dataclass
class Heads:
    """What a layout's file holds: config fields and tensors of a family here, and what it says of the base.

    vocab_size and num_hidden_layers, of the base, are None if nothing in the file tells them; copies are tensors that
    should equal the base's (INPUT, OUTPUT); tree is what the heads' own project runs them with; notes say where config
    and tensors disagree, what was assumed.
    """

    model_class: type[DraftHeadPreTrainedModel]
    fields: dict[str, Any]
    tensors: dict[str, Joined]
    hidden_size: int
    vocab_size: int | None = None
    num_hidden_layers: int | None = None
    base: str | None = None
    base_inside: bool = False
    copies: dict[str, Tensor] = field(default_factory=dict)
    tree: str = DEFAULT_TREE
    dropped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


class Reader:
    """Hands out the tensors of a file, and knows which of them nobody has asked for.

    names: what they are called in the file, by the names that the layout's table has, where these differ.
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
            what = f"has {key!r} of shape {list(tensor.shape)}, but the tensors beside it ask for {list(shape)}"
            raise ValueError(f"{self.name!r} {what}: the file is damaged or of another layout.")
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
            parts = [self.take(key) for key in row.theirs]
            keys = tuple(self.names.get(key, key) for key in row.theirs)
            forms = sorted({f"{str(part.dtype).removeprefix('torch.')} {list(part.shape)}" for part in parts})
            if len(forms) > 1:
                what = f"{keys[0]!r} and {len(keys) - 1} more that belong together in several forms"
                raise ValueError(f"{self.name!r} has {what} ({', '.join(forms)}): get the file again.")
            first, *rest = parts[0].shape
            shape = (len(parts), first, *rest) if row.stacked else (len(parts) * first, *rest)
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

    def note_differences(self, config: Mapping[str, Any], **actual: Any) -> None:
        """Note config fields that disagree with the tensors, which are right."""
        for name, value in actual.items():
            if config.get(name) not in (None, value):
                what = f"config.json says {name} {config[name]!r}, the tensors have {value!r}"
                self.notes.append(f"{what}: the tensors are right.")

    def heads(self, layout: "Layout", fields: dict[str, Any], tensors: dict[str, Joined], **more: Any) -> Heads:
        """What was read, once every tensor has been: leaving some out unseen would be silent damage."""
        if unknown := sorted(set(self.tensors) - self._taken):
            what = f"{len(unknown)} tensor(s) that the layout {layout.name!r} does not have"
            shown = f"{unknown[0]!r} {list(self.tensors[unknown[0]].shape)}"
            raise ValueError(f"{self.name!r} has {what}, such as {shown}: these are heads of another kind.")
        return Heads(layout.family, fields, tensors, dropped=self.dropped, notes=self.notes, **more)


@dataclass
class SavedHeads:
    """Heads of this library that are to be written in another layout.

    base is where their base lies, base_tensors are its own if its weights lie in the same checkpoint, base_model is the
    loaded one if there is one.
    """

    name: str
    config: Any
    tensors: Mapping[str, Tensor]
    base: str | None
    base_tensors: Mapping[str, Tensor] = field(default_factory=dict)
    base_model: nn.Module | None = None

    @property
    def text(self) -> Any:
        """The config of the base's text model."""
        return self.config.get_text_config()

    @property
    def dtype(self) -> str:
        """Of the tensors, as config.json names it."""
        first = next(tensor for tensor in self.tensors.values() if tensor.is_floating_point())
        return str(first.dtype).removeprefix("torch.")

    # what limits name beside fields of the config
    layer_model_type = property(lambda self: self.config.own_layer.model_type)
    biases_in_layers = property(lambda self: some(r"body\..*\.bias", self.tensors))
    biases_beside_qkv = property(lambda self: some(r"body\..*(?<![qkv]_proj)\.bias", self.tensors))
    feature_count = property(lambda self: len(self.config.feature_layers))
    block_layers = property(lambda self: len(types_of(self.config.own_layer)))
    reads_in_order = property(lambda self: list(self.config.feature_layers) == sorted(self.config.feature_layers))
    reads_as_published = property(lambda self: list(self.config.feature_layers) == published_layers(self.text))
    reads_embeddings = property(lambda self: 0 in self.config.feature_layers)
    reduced_vocabulary = property(lambda self: "draft_tokens" in self.tensors)
    reduced_projections = property(lambda self: self.reduced_vocabulary and some(r"projections\.up\..*", self.tensors))
    windows_from_anchor = property(lambda self: any(self.config.windows) and not self.config.window_per_slot)
    windows_from_slots = property(lambda self: any(self.config.windows) and self.config.window_per_slot)
    rotary_type = property(lambda self: (self.config.own_layer.rope_parameters or {}).get("rope_type", "default"))
    as_wide_as_base = property(lambda self: self.config.own_layer.hidden_size == self.text.hidden_size)
    shared_blocks = property(lambda self: self.config.num_layers if self.config.share_lm_head else 0)

    @property
    def one_block(self) -> bool:
        """Whether the blocks of each head are one, applied again and again, as original code has it."""
        groups: dict[str, list[Tensor]] = {}
        for name, tensor in self.tensors.items():
            groups.setdefault(re.sub(r"blocks\.\d+", "", name), []).append(tensor)
        return all(map(equal, groups.values()))

    @property
    def heads_fill_width(self) -> bool:
        """Whether the heads of attention are as wide as the layer, side by side."""
        layer = self.config.own_layer
        return layer.head_dim * layer.num_attention_heads == layer.hidden_size


def published_layers(text: Any) -> list[int]:
    """The inputs of layers that EAGLE-3 heads read where nothing else is said."""
    return [2, text.num_hidden_layers // 2, text.num_hidden_layers - 3]


class Loss(Exception):
    """What a target cannot hold, and what to do instead."""

    def __init__(self, what: str, advice: str) -> None:
        super().__init__(f"{what}; {advice}")


@dataclass
class Files:
    """What a layout writes: a file of weights, whose ending tells its form, a config.json, and notes for the user."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    weights: str = "model.safetensors"


class Layout(ABC):
    """One project's form of one family's heads.

    Attributes:
        targets: names under which `export --to` writes it; empty for a layout that is only read.
        limits: by target, "" for all of them: fields of which it has a place for some values alone.
        kinds: what config.json says where speculators wrote it (KIND).
        holds_base: the base's weights lie in the same files.
        holds_vocabulary: it has a place for a draft vocabulary.
    """

    name: ClassVar[str]
    family: ClassVar[type[DraftHeadPreTrainedModel]]
    targets: ClassVar[tuple[str, ...]] = ()
    limits: ClassVar[Limits] = {}
    kinds: ClassVar[Collection[str]] = ()
    holds_base: ClassVar[bool] = False
    holds_vocabulary: ClassVar[bool] = False

    def detect(self, keys: Iterable[str], config: Mapping[str, Any]) -> bool:
        """Whether tensors of these names, beside this config.json (empty without one), are of this layout."""
        return config.get(KIND) in self.kinds

    @abstractmethod
    def read(self, source: Source, fields: Mapping[str, Any]) -> Heads:
        """The heads under this library's names; a ValueError where a tensor or a field is not as the layout has it.

        fields: of the config that the user has set: they settle what a layout leaves open.
        """

    def lost(self, saved: SavedHeads, target: str) -> tuple[str, str, str] | None:
        """What the target has no place for, what it has one for, and of which field; None if all fits its limits."""
        for name, values in {**self.limits.get("", {}), **self.limits.get(target, {})}.items():
            value = getattr(saved if hasattr(saved, name) else saved.config, name)
            value = list(value) if isinstance(value, tuple) else value
            if value not in values:
                return f"{name} is {' '.join(shortened.repr(value).split())}", " or ".join(map(repr, values)), name
        return None

    def write(self, saved: SavedHeads, target: str) -> Files:
        """The heads under the layout's names for one of its targets; Loss if that would lose or change something."""
        raise NotImplementedError
