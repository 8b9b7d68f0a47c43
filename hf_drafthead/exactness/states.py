"""Layers that keep a state: one way to fold tokens in, whether they come as a prompt, one by one, or as a tree.

transformers folds a prompt in by chunks and single tokens one by one, in float32, and rounds on the way. Here all take
the tree form (`bases.mixers`), of which a text is a tree without branches, and states are float64: what an order
changes there does not show in bfloat16 and float16. A convolution adds one tap after the other.

Shapes: B rows, T tokens, C channels, W width of a convolution, H heads, k, v and n sizes, P of a head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_drafthead.bases import releases
from hf_drafthead.bases.mixers import TREE_FORMS
from hf_drafthead.bases.mixers.delta_rule import DeltaRule, delta_rule_of_nodes
from hf_drafthead.bases.mixers.layer import AcceptedPath, Mixer, Nodes, TreeTables
from hf_drafthead.bases.mixers.short_convolution import convolved
from hf_drafthead.bases.mixers.state_space import StateSpace, scan_nodes, scan_root

CHUNK = 64  # tokens of a text at a time


class Text:
    """So many tokens behind each other, in the place of the `Nodes` of a tree."""

    def __init__(self, state: torch.Tensor, count: int, channels: int = 0):
        self.layer, self.state = self, state.double()
        self.record: dict[str, torch.Tensor] = {}
        self.held_inputs = {0: state.new_empty(1, channels, 0)}
        order = torch.arange(count, device=state.device)
        self.tree = TreeTables((order - 1).clamp(min=0)[None], (order[:, None] >= order)[None])

    def write(self, name: str, values: torch.Tensor) -> None:
        self.record[name] = values

    def folded(self, kind: Mixer) -> torch.Tensor:
        """The state behind the tokens."""
        state, rows, count = self.state.clone(), len(self.state), self.tree.parents.shape[1]
        order = torch.arange(count, device=state.device).expand(rows, -1)
        kind.fold(state, self.record, AcceptedPath.of(order, order[:, -1] + 1))
        return state


class Kept(torch.Tensor):
    """A state that is float64 whatever type a mixer gives it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def to(self, *_: Any, **__: Any) -> Kept:  # type: ignore[override]
        return self


def in_chunks(
    form: Callable[..., Any], kind: Mixer, name: str, state: Any, tokens: dict[str, Any], channels: int = 0
) -> Any:
    """What a form gives of what is of each token (B, T, ...), chunk by chunk, and the state, its argument of a name."""
    outputs = []
    for parts in zip(*(tensor.split(CHUNK, dim=1) for tensor in tokens.values())):
        text = Text(state, parts[0].shape[1], channels)
        outputs.append(form(**{name: text}, **dict(zip(tokens, parts)))[0])
        state = text.folded(kind)
    return torch.cat(outputs, dim=1), state.as_subclass(Kept)


def delta_rule(
    query: Any, key: Any, value: Any, g: Any, beta: Any, initial_state: Any = None, output_final_state: bool = False,
    **how: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """As transformers' functions: outputs (B, T, H, v) and, if asked for, the state (B, H, k, v)."""
    (rows, _count, heads, wide), (key_heads, size) = value.shape, key.shape[2:]
    state = value.new_zeros(rows, heads, size, wide) if initial_state is None else initial_state
    channels = 2 * key_heads * size + heads * wide  # queries, keys and values side by side
    form, kind = functools.partial(delta_rule_of_nodes, **how), DeltaRule(g.dim() == 4)
    tokens = {"query": query, "key": key, "value": value, "g": g, "beta": beta}
    outputs, state = in_chunks(form, kind, "initial_state", state, tokens, channels)
    return outputs, state if output_final_state else None


def chunk_scan(
    hidden_states: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int = 0, initial_states: Any = None,
    return_final_states: bool = False, z: Any = None, **how: Any,
) -> Any:  # fmt: skip
    """As `mamba_chunk_scan_combined`: (B, T, H, P), and the state (B, H, P, n) if asked for."""
    rows, _count, heads, size = hidden_states.shape
    state = hidden_states.new_zeros(rows, heads, size, B.shape[-1]) if initial_states is None else initial_states
    form, tokens = functools.partial(scan_nodes, A=A, **how), {"hidden_states": hidden_states, "dt": dt, "B": B, "C": C}
    outputs, state = in_chunks(form, StateSpace(), "initial_states", state, tokens)
    outputs = outputs if z is None else outputs * nn.functional.silu(z)
    return (outputs, state) if return_final_states else outputs


def scan_token(state: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `selective_state_update`: (B, H, P), and the state is another."""
    text: Any = Text(state, 1)
    outputs = scan_root(text, *args, **kwargs)
    state.copy_(text.folded(StateSpace()))
    return outputs


def convolve_token(
    hidden_states: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None, **_: Any
) -> torch.Tensor:
    """As `causal_conv1d_update`: (B, C, T), and the last inputs (B, C, W) are others."""
    line = torch.cat([conv_state, hidden_states.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(line[..., -conv_state.shape[-1] :])
    windows = line[..., -hidden_states.shape[-1] - weight.shape[-1] + 1 :].unfold(2, weight.shape[-1], 1)
    return convolved(windows, weight, bias, activation)


def convolve_text(hidden_states: Any, weight: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """As `causal_conv1d_fn`: (B, C, T)."""
    nothing = hidden_states.new_zeros(*hidden_states.shape[:2], weight.shape[-1])
    return convolve_token(hidden_states, nothing, weight, *args, **kwargs)


EXACT_FORMS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((*releases.DELTA_RULES, *releases.BY_CHANNEL), delta_rule),
    releases.SCANS: chunk_scan,
    releases.SCANS_ONE: scan_token,
    releases.CONVOLVES: convolve_text,
    releases.CONVOLVES_ONE: convolve_token,
    "mamba2_split_conv1d_scan_combined": lambda *_, **__: None,  # a kernel of all, for training
}


def exactly(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a mixer's module: over nodes its tree form, else the form of here."""

    @functools.wraps(function)
    def either(*args: Any, **kwargs: Any) -> Any:
        of_nodes = any(isinstance(value, Nodes) for value in (*args, *kwargs.values()))
        forms: dict[str, Any] = TREE_FORMS if of_nodes else EXACT_FORMS
        return forms[name](*args, **kwargs)

    return either
