"""The tree forms of layers that keep no keys, and how a base's own mixers come to take them.

A mixer's forward runs as it is: its projections, gates, norms and output are its own. All that a tree changes are the
functions of its module that it calls for its convolution and its recurrence, which in every supported release have the
names and arguments of flash-linear-attention, causal-conv1d and mamba-ssm. `mixers_of` extends these functions, once
for each module: given `Nodes`, which only a `SlotCache` with a tree hands out, they take their tree form; given
anything that they could take before, they are what they were. So nothing is switched on or off, no module holds
anything, and whatever is wrapped around a mixer or its parts stays there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_drafthead.bases import releases
from hf_drafthead.bases.generators import new_lock
from hf_drafthead.bases.hooks import names_in_forward
from hf_drafthead.bases.mixers.delta_rule import DeltaRule, delta_rule_of_nodes
from hf_drafthead.bases.mixers.layer import Mixer, Nodes
from hf_drafthead.bases.mixers.short_convolution import ShortConvolution, convolve_nodes, convolve_root
from hf_drafthead.bases.mixers.state_space import StateSpace, scan_nodes, scan_root

TREE_FORMS: dict[str, Callable[..., Any]] = {
    releases.CONVOLVES: convolve_nodes,
    releases.CONVOLVES_ONE: convolve_root,
    **dict.fromkeys((*releases.DELTA_RULES, *releases.BY_CHANNEL), delta_rule_of_nodes),
    releases.SCANS: scan_nodes,
    releases.SCANS_ONE: scan_root,
}
# by the function that folds tokens into a state
KINDS: dict[str, Mixer] = {
    releases.DELTA_RULES[0]: DeltaRule(by_channel=False),
    releases.BY_CHANNEL[0]: DeltaRule(by_channel=True),
    releases.SCANS: StateSpace(),
}
NO_TREE_FORM = {releases.SELECTIVE_SCAN: "its decay differs by channel and by entry: each pair of nodes costs a state"}
_EXTENDING = new_lock()


class UnknownMixer(Exception):
    """A layer folds tokens into a state in a way that has no tree form; the text is its class, and why."""


def mixers_of(decoder: nn.Module) -> dict[int, Mixer]:
    """By number, how a decoder's layers without keys fold tokens in, made to take trees; UnknownMixer if one cannot."""
    mixers: dict[int, Mixer] = {}
    for module in decoder.modules():
        place, names = names_in_forward(module)
        number = getattr(module, "layer_idx", None)
        if not names & {releases.WRITES_INPUTS, releases.WRITES_STATE} or not isinstance(number, int):
            continue
        kind = next((kind for name, kind in KINDS.items() if name in names), None)
        if kind is None and releases.WRITES_STATE in names:
            reasons = (reason for name, reason in NO_TREE_FORM.items() if name in names)
            raise UnknownMixer(f"{type(module).__name__} ({next(reasons, 'its recurrence has no tree form here')})")
        mixers[number] = kind or mixers.get(number) or ShortConvolution()
        with _EXTENDING:
            for name in names & set(TREE_FORMS):
                if not hasattr(place[name], "tree_form"):
                    place[name] = extended(place[name], TREE_FORMS[name])
    return mixers


def extended(function: Callable[..., Any], tree_form: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which also takes `Nodes`."""

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Nodes):
                return tree_form(*args, **kwargs)
        return function(*args, **kwargs)

    either.tree_form, either.plain = tree_form, function  # type: ignore[attr-defined]
    return either
