"""The settings of drafting, wherever they are given or stored, and the plan of a call that is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from transformers import GenerationConfig

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.lookup import HeldTexts, TextIndex
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import COPIES, LOOKUP, LookupTree, Tree, resolve

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
            raise ValueError(f"acceptance is {self.acceptance!r}: expected one of {', '.join(map(repr, ACCEPTANCES))}.")
        for name in ("posterior_threshold", "posterior_alpha"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"{name} is {value!r}: expected a number from 0 to 1.")
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


class Plans:
    """How calls of some settings draft.

    named: the plan with the tree that `draft_tree` names, None where what was measured decides; copies: tokens that
    each step copies from the text, as many as were calibrated where it is None and no tree is named; texts: others that
    are copied from; plan: of all calls, None where one is to be chosen.
    """

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        settings: DraftSettings,
        draft_tree: Any,
        copies: int | None = None,
        texts: TextIndex | None = None,
    ):
        if model.drafter.copies is not None and settings.draft_tree == AUTO:
            settings = replace(settings, draft_tree=LOOKUP)  # copies alone are drafted as long as they pay, anyway
        self.model, self.config, self.settings, self.texts = model, config, settings, texts
        self.execution = Execution.wanted(model, config)
        always = model.drafter.copies if texts is None or model.drafter.copies is not None else COPIES
        self.copies = always if copies is None else copies
        # checked also where a measured tree comes before it
        plan = None if settings.draft_tree == AUTO else settings.plan(*guessed_among(model))
        self.named = None if draft_tree in (None, AUTO) and model.drafter.copies is None else plan
        self.plan = self.named if self.copies is None else None

    def choose(self, reader: BaseReader, rows: int) -> DraftPlan:
        """The plan of a call, or of steps, of so many rows; ValueError: an entry is damaged, or settings do not fit."""
        return self.plan or _trees().choose(self, reader, rows)


def _trees() -> Any:
    """The room where a tree is chosen, by what was measured with this one's steps; imported when it is asked for."""
    from hf_drafthead import trees

    return trees
