"""The settings of drafting, wherever they are given or stored, and the plan of a call that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from hf_drafthead.generation.lookup import HeldTexts, TextIndex
from hf_drafthead.generation.tree import LookupTree, Tree, resolve

DEFAULT_TREE = "mc_sim_7b_63"  # the 64 nodes that the Medusa and Hydra papers' code drafts
AUTO = "auto"  # draft, or do not draft for a while
MOST_RESOLVED = 64  # trees that are kept, each with its tensors
_RESOLVED: dict[tuple[str, int | None, int], Tree] = {}  # by what named them, the heads and the vocabulary
ACCEPTANCES = ("exact", "typical")


@dataclass(frozen=True)
class DraftSettings:
    """How calls draft and accept, as a generation config stores it; TypeError or ValueError where that is not possible.

    See `generate`. calibration: which tree was measured to be the fastest, an entry for each situation (see
    `trees.entries`); the entry that fits a call comes before `draft_tree`.
    """

    draft_tree: Any = DEFAULT_TREE
    acceptance: str = "exact"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    calibration: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.acceptance not in ACCEPTANCES:
            text = isinstance(self.acceptance, str)
            kind = "" if text else f" ({type(self.acceptance).__name__})"
            raise (ValueError if text else TypeError)(
                f"acceptance is {self.acceptance!r}{kind}: expected one of {', '.join(map(repr, ACCEPTANCES))}."
            )
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r} ({type(value).__name__}): expected a number from 0 to 1.")
            if not 0 <= value <= 1:
                raise ValueError(f"{name} is {value}: expected a number from 0 to 1.")
        entries = self.calibration
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise TypeError(
                f"calibration is {entries!r} ({type(entries).__name__}): expected a list of entries as "
                "`hf-drafthead calibrate` writes them."
            )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names of all settings, as a generation config has them."""
        return tuple(setting.name for setting in fields(cls))

    @classmethod
    def stored_in(cls, config: Any) -> dict[str, Any]:
        """The settings that a generation config, or its dict, holds; not checked."""
        stored = config if isinstance(config, Mapping) else vars(config)
        return {each.name: stored[each.name] for each in fields(cls) if stored.get(each.name) is not None}

    @classmethod
    def from_config(cls, config: Any, **overrides: Any) -> DraftSettings:
        """The settings given, else the generation config's, else the defaults; None is a setting not given."""
        arguments = {name: value for name, value in overrides.items() if value is not None}
        settings = cls(**{**cls.stored_in(config), **arguments})
        for name in ("posterior_threshold", "posterior_alpha"):
            if name in arguments and settings.acceptance != "typical":
                raise ValueError(
                    f"{name} is {arguments[name]}, but acceptance is {settings.acceptance!r}: pass "
                    f"acceptance='typical', or leave {name} out."
                )
        return settings

    def plan(self, max_depth: int | None, vocabulary: int) -> DraftPlan:
        """The plan of a call with the tree that `draft_tree` names, see `resolve`; "auto" names none."""
        key = str(self.draft_tree), max_depth, vocabulary
        if type(self.draft_tree) not in (str, list) or key not in _RESOLVED:
            while len(_RESOLVED) >= MOST_RESOLVED:
                _RESOLVED.pop(next(iter(_RESOLVED)), None)
            _RESOLVED[key] = resolve(self.draft_tree, max_depth, vocabulary)
        return DraftPlan(_RESOLVED[key], self)


@dataclass(frozen=True)
class DraftPlan:
    """How one call drafts and accepts, once everything about the call is known, and why.

    tree: that its steps fill; settings: by which nodes are accepted; texts: others to copy from; sizes: its `begin`
    makes what says how many nodes each step takes, see `trees.sizes.SizeRule`; why: where the tree comes from, and what
    was measured, in sentences; base_decodes: by itself, for nothing pays.
    """

    tree: Tree
    settings: DraftSettings = field(default=DraftSettings(), compare=False)
    texts: TextIndex | None = None
    sizes: Any = field(default=None, compare=False)
    why: str = field(default="the call names its tree", compare=False)
    base_decodes: bool = False

    def __str__(self) -> str:
        nodes = f"{self.tree.num_nodes} nodes" if self.tree.num_nodes > 1 else "nothing"
        copies = f" with {self.tree.copies} copied tokens" if isinstance(self.tree, LookupTree) else ""
        return f"{nodes}{copies}{', as many as pay on the text' if self.sizes else ''}: {self.why}"

    def texts_on(self, device: torch.device) -> HeldTexts | None:
        """The other texts on a device; None where there are none."""
        return None if self.texts is None else self.texts.on(device)
