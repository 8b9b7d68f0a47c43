"""A layer of the cache that keeps no keys: its past is folded into a state and the last inputs of a convolution.

The nodes of a step are never folded in. They are computed from the committed state by the tree's ancestors (`mixers`),
which record of each node what the commit needs; `fold` then folds the accepted path of every row into the state.

While the base runs over the nodes, a mixer that asks for its state is given `Nodes`. It hands them to the functions of
its convolution and its recurrence, which take their tree form when, and only when, they are given these.

Shapes: B rows, N nodes, D nodes on the longest path, C channels of a convolution, W its width, R = 1 or B.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from hf_drafthead.bases.releases import LinearAttentionLayer


class Mixer(Protocol):
    """How one kind of layers folds tokens into its state."""

    def record(self, inputs: torch.Tensor, state: torch.Tensor) -> dict[str, tuple[int, ...]]:
        """Shapes of what is recorded of each node, for a convolution's inputs (B, C, W) and a state (B, ...)."""
        ...

    def fold(self, state: torch.Tensor, accepted: dict[str, torch.Tensor], path: AcceptedPath) -> None:
        """Fold what was recorded of the nodes on the paths, (B, D, ...) each, into the states (B, ...), in place."""
        ...


class AcceptedPath(NamedTuple):
    """To fold in: rows (B, 1), nodes (B, D) from the root down, counts (B,) how many, beyond (B, D) all others."""

    rows: torch.Tensor
    nodes: torch.Tensor
    counts: torch.Tensor
    beyond: torch.Tensor

    @classmethod
    def of(cls, nodes: torch.Tensor, counts: torch.Tensor) -> AcceptedPath:
        counts, places = counts.to(nodes.device), torch.arange(nodes.shape[1], device=nodes.device)
        rows = torch.arange(len(nodes), device=nodes.device)[:, None]
        return cls(rows, nodes, counts, places >= counts[:, None])

    def to(self, device: torch.device) -> AcceptedPath:
        return AcceptedPath(*(part.to(device) for part in self))

    def decays(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How much is left of the state (B, ...) and of each node (B, D, ...), from `along` of summed log decays."""
        wide = (-1, 1, *[1] * (sums.dim() - 2))
        last = sums.take_along_dim((self.counts - 1).clamp(min=0).view(wide), dim=1)
        return last[:, 0].exp(), (last - sums).exp()

    def along(self, values: torch.Tensor) -> torch.Tensor:
        """What is on the paths (B, D, ...) of the nodes' values (B, N, ...); zero behind them, where NaN may be."""
        beyond = self.beyond.view(*self.beyond.shape, *[1] * (values.dim() - 2))
        return values[self.rows, self.nodes].masked_fill(beyond, 0.0)


class TreeTables:
    """The nodes of a step as its layers without keys need them: parents (R, N), which come first, and ancestors (R, N,
    N).
    """

    def __init__(self, parents: torch.Tensor, ancestors: torch.Tensor):
        self.parents, self.ancestors = parents, ancestors
        self.tables: dict[Any, torch.Tensor] = {}

    def above(self, device: torch.device) -> torch.Tensor:
        """`ancestors` on a device."""
        return self._once(("above", device), lambda: self.ancestors.to(device))

    def sums(self, like: torch.Tensor) -> torch.Tensor:
        """(R, N, N) of the type of another tensor, which sums over each node and those above it."""
        return self._once(("sums", like.device, like.dtype), lambda: self.ancestors.to(like))

    def windows(self, width: int, device: torch.device) -> torch.Tensor:
        """(R, N, W) what each node's window holds, oldest first, of W committed inputs with all nodes behind them."""
        return self._once((width, device), lambda: self._windows(width).to(device))

    def _windows(self, width: int) -> torch.Tensor:
        parents = self.parents
        committed = torch.arange(width, device=parents.device).expand(len(parents), -1)
        # what comes before each of these: before the root the last of the committed
        before = torch.cat([committed[:, :1], committed[:, :-1], committed[:, -1:], parents[:, 1:] + width], dim=1)
        line = [torch.arange(parents.shape[1], device=parents.device).expand_as(parents) + width]
        for _ in range(width - 1):
            line.append(before.gather(1, line[-1]))
        return torch.stack(line[::-1], dim=2)

    def _once(self, key: Any, make: Any) -> torch.Tensor:
        if key not in self.tables:
            self.tables[key] = make()
        return self.tables[key]


class Nodes:
    """The nodes of a step in the place of a layer's state, or with their inputs in the place of a convolution's.

    inputs: (B, C, N) of the convolution, None until it has been given them; number: of the state, where there are
        several.
    """

    def __init__(self, layer: RecurrentLayer, number: int, inputs: Any = None):
        self.layer, self.number, self.inputs = layer, number, inputs
        self.tree: TreeTables = layer.cache.tree

    @property
    def state(self) -> torch.Tensor:
        """The committed state, float32 or wider."""
        return (state := self.layer.held_states[self.number]).to(torch.promote_types(state.dtype, torch.float32))

    def to(self, *_: Any) -> Nodes:
        """Themselves: mixers give the new state another dtype, and there is none yet."""
        return self


class RecurrentLayer(LinearAttentionLayer):
    """One layer's states in a `SlotCache`; what it is given while no tree is there is folded in as it comes.

    Attributes:
        held_inputs, held_states: by number, the last inputs of a convolution (B, C, W) and the state (B, ...).
        record: by name, (B, N, ...) of the nodes of the step.
    """

    is_compileable = False  # else transformers prepares masks of its own for it
    cache: Any
    kind: Mixer
    record: dict[str, torch.Tensor]
    has_previous_state: dict[int, bool]

    # what the mixers of all releases read, some of them past the cache's methods
    @property
    def conv_states(self) -> dict[int, Any]:  # type: ignore[override]
        return self._shown(self.held_inputs)

    @conv_states.setter
    def conv_states(self, states: dict[int, Any]) -> None:
        self.held_inputs = states

    @property
    def recurrent_states(self) -> dict[int, Any]:  # type: ignore[override]
        return self._shown(self.held_states)

    @recurrent_states.setter
    def recurrent_states(self, states: dict[int, Any]) -> None:
        self.held_states = states

    def _shown(self, states: dict[int, Any]) -> dict[int, Any]:
        return states if self.cache.tree is None else {number: Nodes(self, number) for number in states}

    def start(self, inputs: torch.Tensor | None, state: torch.Tensor | None, number: int, width: int | None) -> None:
        """Hold zeros of these shapes; not at an address that a compiler would take for a constant."""
        if inputs is not None:
            width = inputs.shape[-1] if width is None else width
            self.held_inputs[number] = inputs.new_zeros(*inputs.shape[:-1], width)
            self.conv_kernel_size[number], self.is_conv_states_initialized[number] = width, True
        if state is not None:
            self.held_states[number] = torch.zeros_like(state)
            self.is_recurrent_states_initialized[number] = True
        if (like := state if inputs is None else inputs) is None:  # the layer has not run yet
            return
        self.device, self.dtype = like.device, like.dtype
        self.cache.lengths = self.cache.lengths.to(like.device) if self.cache.extent == 0 else self.cache.lengths

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Take inputs (B, C, n) of a convolution; returns all that it may look at."""
        if self.cache.tree is not None:
            return Nodes(self, state_idx, conv_states)
        return super().update_conv_state(conv_states, state_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Any, state_idx: int = 0, **kwargs: Any) -> Any:
        """Take the state after a forward; that over a tree leaves none."""
        if self.cache.tree is not None:
            return recurrent_states
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def write(self, name: str, values: torch.Tensor) -> None:
        """Record (B, N, ...) of the nodes."""
        if self.cache.fixed:
            self.record[name][:, : values.shape[1]] = values
        else:
            self.record[name] = values

    def fold(self, path: AcceptedPath) -> None:
        """Make the nodes on the paths past."""
        if self.device is None:  # of a part of the base, in which it is not run
            return
        path = path.to(self.device)
        accepted = {name: path.along(values) for name, values in self.record.items()}
        if (state := self.held_states[0]) is not None:
            self.kind.fold(state, accepted, path)
        for number, inputs in self.held_inputs.items():
            if inputs is not None:
                lines = torch.cat([inputs, accepted[f"inputs {number}"].transpose(1, 2)], dim=2)
                last = path.counts[:, None] + torch.arange(inputs.shape[2], device=inputs.device)
                inputs.copy_(lines.gather(2, last[:, None].expand(-1, inputs.shape[1], -1)))

    def resize_record(self, nodes: int) -> None:
        """Hold a record of so many nodes in memory that stays where it is: shapes are to be fixed."""
        conv_inputs = {f"inputs {number}": inputs for number, inputs in self.held_inputs.items() if inputs is not None}
        shapes: dict[str, Any] = {name: (inputs.shape[1:2], inputs.dtype) for name, inputs in conv_inputs.items()}
        if (state := self.held_states[0]) is not None:
            dtype = torch.promote_types(state.dtype, torch.float32)
            shapes |= {name: (shape, dtype) for name, shape in self.kind.record(self.held_inputs[0], state).items()}
        self.record = {
            name: torch.zeros(self.cache.rows, nodes, *shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in shapes.items()
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What a commit changes in place."""
        return [tensor for tensor in (*self.held_inputs.values(), *self.held_states.values()) if tensor is not None]

    def leave(self) -> None:
        """Go on with states of its own."""
        both = (self.held_inputs, self.held_states)
        self.held_inputs, self.held_states = (
            {number: None if tensor is None else tensor.clone() for number, tensor in states.items()} for states in both
        )
        self.has_previous_state = {**self.has_previous_state}
        self.record = {}

    def copy_states(self, other: LinearAttentionLayer) -> None:
        """Hold what another layer holds, of this cache's kind or transformers'."""
        for number, inputs in other.conv_states.items():
            theirs = (inputs, other.recurrent_states[number])
            if self.held_inputs[number] is None and self.held_states[number] is None:
                self.start(*theirs, number, None)
            for mine, their in zip((self.held_inputs[number], self.held_states[number]), theirs):
                if their is not None:
                    mine.copy_(their)
            self.has_previous_state[number] = other.has_previous_state[number]

    def unload(self, target: LinearAttentionLayer) -> None:
        """Let a layer of an ordinary cache hold the state."""
        for number, inputs in self.held_inputs.items():
            for name, state in (("conv_states", inputs), ("recurrent_states", self.held_states[number])):
                if state is not None:
                    if not getattr(target, f"is_{name}_initialized")[number]:
                        target.lazy_initialization(**{name: state}, state_idx=number)
                    getattr(target, name)[number].copy_(state)
            target.has_previous_state[number] = self.has_previous_state[number]
