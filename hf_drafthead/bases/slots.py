"""The one cache of the package: keys and values of a verified past, row by row, and of the nodes of one step.

Every layer, of the base or of a drafter, holds `nodes` slots for the step and behind them `capacity` for the past, to
all of which a step attends: shapes change where the capacity does, which is kept near to the text (`Batch.fit`).

    slot      0 ........ nodes | nodes + 0, + 1, ...
    holds     the step's nodes | the row's past, position by position

Nodes are written right before the past, later ones in front of earlier ones, so that [nodes, past] is one slice without
a copy, whatever the lengths of the rows. `keep` moves accepted nodes behind each row's own past, all layers at once.

Shapes: B rows, n nodes of one forward, M nodes written so far (n included), m nodes to keep, S slots, H key/value
heads, E head size, R = 1 or B.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from hf_drafthead.bases.mixers.layer import AcceptedPath, Mixer, RecurrentLayer, TreeTables
from hf_drafthead.bases.releases import Cache, CacheLayerMixin, LinearAttentionLayer, holds_nothing, past_length

# Layers whose keys have one size share a block, so that moving nodes is one copy for all of them. Where sizes or
# devices differ between layers, a block may stay partly unused: at most so many keys or values of layers in one block.
MOST_TENSORS = 64
SLOTS = 64  # for the nodes, in caches of fixed shapes: a multiple of this
BUCKET = 64  # past positions in a GPU's cache: a multiple of this, for it plans anew for every other length
ALIGNED = 8  # numbers in a row of a GPU's mask: a multiple of this, else attention copies the mask in every layer
ROOM = 128  # positions that are taken at first, and by which memory grows at most, unless more is needed at once


class SlotCache(Cache):
    """Keys and values of the verified past and of the nodes of one step.

    The memory is a list of blocks (X, B, S, E): the heads of the keys and values of many layers side by side, or, for a
    compiler (`apart`), of one layer's keys or values alone.

    Args:
        batch_size, num_layers: B, and how many layers write here.
        capacity, nodes: past positions, and nodes of one step, to hold at first.
        mixers: by the number of a layer that keeps a state, how it folds tokens in, and how many states it has.

    Attributes:
        lengths: (B,) past positions of each row, on the device where attention is computed; extent: no row is longer.
        fixed: programs run here: nothing grows by itself, and no number is looked at on the host.
        tree: of the nodes that a forward runs over, for layers that keep a state; None behind it.
    """

    def __init__(
        self,
        batch_size: int,
        num_layers: int,
        capacity: int,
        nodes: int = 0,
        mixers: Mapping[int, tuple[Mixer, int]] | None = None,
    ):
        self.rows = batch_size
        self.capacity, self.nodes = capacity, nodes
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.extent = 0
        self.placed: int | None = None  # nodes of this step so far; None while the past itself is written
        self.fixed = self.apart = False
        self.blocks: list[torch.Tensor] = []
        self.taken: list[int] = []  # heads of each block that hold a layer's keys or values
        self.tree: TreeTables | None = None
        mixers = mixers or {}
        super().__init__(
            layers=[
                RecurrentSlotLayer(self, *mixers[number]) if number in mixers else SlotLayer(self)
                for number in range(num_layers)
            ]
        )
        self.recurrent = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]

    def mask(
        self, ancestors: torch.Tensor, depths: torch.Tensor, dtype: torch.dtype, window: int | None = None, visible=None
    ) -> torch.Tensor:
        """The additive mask (B, 1, n, M + S) of a step over its nodes and S past slots, for the base and for drafters.

        A node sees its ancestors (R, n, M), itself included, and its row's past; where a `window` slides by the
        distance in the text, of depths (R, n), and not in slots. `visible` (B, S'): which of the first S' past slots
        hold no padding. Eager attention would add a boolean mask as 0 and 1.
        """
        past, slots = self.lengths[:, None], torch.arange(self.slots - self.nodes, device=self.lengths.device)
        behind = slots < past if visible is None else (slots < past) & padded(visible, len(slots))  # (B, S)
        above, behind = ancestors.expand(self.rows, -1, -1), behind[:, None].expand(-1, ancestors.shape[1], -1)
        if window is not None:
            above, behind = within(window, depths, above, behind, slots - past)
        seen = torch.cat([above, behind], dim=-1)[:, None]
        width = seen.shape[-1] if past.device.type == "cpu" else rounded_up(seen.shape[-1], ALIGNED)
        mask = torch.zeros(*seen.shape[:-1], width, dtype=dtype, device=past.device)[..., : seen.shape[-1]]
        return mask.masked_fill_(~seen, torch.finfo(dtype).min)

    @property
    def slots(self) -> int:
        """S: read off the memory, of which a compiler knows that it may grow."""
        written = next((layer for layer in self.layers if layer.is_initialized), None)
        return self.nodes + self.capacity if written is None else written.keys.shape[2]

    @property
    def even(self) -> bool:
        """Whether all rows are known to end at `extent`: a GPU, which would wait, is not asked."""
        if self.fixed or self.lengths.device.type != "cpu":
            return False
        return self.lengths.tolist() == [self.extent] * self.rows

    def count(self, length: int) -> None:
        """Count the positions that a forward has just appended as past, in all rows."""
        self.extent += length
        self.lengths = self.lengths + length

    def place(self, count: int, again: bool = False, past: bool = False) -> bool:
        """The next forward writes `count` nodes, before those of this step (`again`) or in their place; or, whether it
        does, it appends what is to be `past` behind nothing, where it is read as any text is."""
        alone, nodes = past and not self.fixed and self.extent == 0, count + (self.placed or 0 if again else 0)
        self.placed = None if alone else nodes
        if nodes > self.nodes and not alone:
            self.reserve(self.capacity, nodes)
        return alone

    def keep(self, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        """Move nodes (B, m) of the step, of which the first `counts` (B,) become past, behind each row's past.

        All are moved: what lies beyond is not seen, and is written over by the next ones. What was appended is there.
        """
        m, on_host = nodes.shape[1], not self.fixed and self.lengths.device.type == "cpu"  # else the host would wait
        if self.placed is not None:
            path = AcceptedPath.of(nodes, counts) if self.recurrent else None
            for layer in self.recurrent:
                layer.fold(path)  # type: ignore[arg-type]
            if not self.fixed:
                self.reserve(self.extent + m, self.nodes)
            source = self.nodes - self.placed + nodes
            if self.rows == 1 and on_host:
                first = self.nodes + int(self.lengths)
                for block in self.blocks:  # fewer operations than `_move`
                    block[:, 0, first : first + m] = block[:, 0].index_select(1, source[0].to(block.device))
            else:
                (self._move_apart if self.apart else self._move)(source)
        self.lengths.add_(counts.to(self.lengths.device))
        if not self.fixed:  # a program must not look at a number that differs from call to call
            self.extent = int(self.lengths.max()) if on_host else self.extent + m

    def longest(self, bound: int) -> int:
        """The longest row, read back on a CPU only: a GPU would wait, and goes by the bound."""
        return bound if self.lengths.device.type != "cpu" else int(self.lengths.max())

    def _move(self, source: torch.Tensor) -> None:
        """Copy slots (B, m) behind each row's past."""
        device, m = source.device, source.shape[1]
        starts = torch.arange(0, self.rows * self.slots, self.slots, device=device)[:, None]
        target = starts + self.nodes + self.lengths.to(device)[:, None] + torch.arange(m, device=device)
        source, target = (starts + source).flatten(), target.flatten()
        for block in self.blocks:
            flat = block.view(block.shape[0], -1, block.shape[3])  # copies are faster where there are fewer dimensions
            flat.index_copy_(1, target.to(flat.device), flat.index_select(1, source.to(flat.device)))

    def _move_apart(self, source: torch.Tensor) -> None:
        """As `_move`, layer by layer: a compiler sees the layers' keys and values only."""
        device, m = source.device, source.shape[1]
        rows = torch.arange(self.rows, device=device)[:, None]
        target = self.nodes + self.lengths.to(device)[:, None] + torch.arange(m, device=device)
        for layer in self.layers:
            for part in (layer.keys, layer.values) if layer.is_initialized else ():
                torch._check(part.shape[2] == self.slots)  # else a program reads the size of every one in each step
                row, old, new = (places.to(part.device) for places in (rows, source, target))
                part[row, :, new] = part[row, :, old]

    def reserve(self, capacity: int, nodes: int) -> None:
        """Make room for `capacity` past positions and for `nodes` nodes per row."""
        if capacity <= self.capacity and nodes <= self.nodes:
            return
        if capacity > self.capacity and self.blocks:
            capacity = max(capacity, self.capacity + min(self.capacity, ROOM))
        self.resize(max(capacity, self.capacity), max(nodes, self.nodes))

    def resize(self, capacity: int, nodes: int) -> None:
        """Hold so many past positions and nodes; nothing has changed where there is no memory for it."""
        blocks = [block.new_zeros(*block.shape[:2], nodes + capacity, block.shape[3]) for block in self.blocks]
        front = nodes - self.nodes
        for old, new in zip(self.blocks, blocks):
            old, start = old[:, :, max(-front, 0) :], max(front, 0)
            copied = min(old.shape[2], new.shape[2] - start)
            new[:, :, start : start + copied] = old[:, :, :copied]
        self.blocks, self.nodes, self.capacity = blocks, nodes, capacity
        for layer in self.layers:
            layer.bind()

    def split(self) -> None:
        """Give every layer's keys and values a block of their own: parts of the blocks of all until these are resized.

        A compiler takes a write to memory that layers share for a write to all of it.
        """
        if self.apart:
            return
        layers = [layer for layer in self.layers if layer.is_initialized]
        self.blocks = [part.transpose(0, 1) for layer in layers for part in (layer.keys, layer.values)]
        self.taken, self.apart = [len(block) for block in self.blocks], True
        for number, layer in enumerate(layers):
            layer.places = ((2 * number, 0), (2 * number + 1, 0))

    def clear(self) -> None:
        """Zero what is not past: what is not a number spreads even where it is masked."""
        for block in self.blocks:
            past = torch.arange(block.shape[2], device=block.device) - self.nodes
            is_past = (past >= 0) & (past < self.lengths.to(block.device)[:, None])  # (B, slots)
            block.masked_fill_(~is_past[None, :, :, None], 0.0)

    def twin(self) -> SlotCache:
        """Another cache in the same memory, which it leaves when it is resized."""
        twin = copy.copy(self)
        twin.layers, twin.lengths, twin.taken = [*map(copy.copy, self.layers)], self.lengths.clone(), [*self.taken]
        twin.recurrent = [layer for layer in twin.layers if isinstance(layer, RecurrentLayer)]
        for layer in twin.layers:
            layer.cache = twin
        for layer in twin.recurrent:
            layer.leave()
        return twin

    def written(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (B, H, count, E) that the last forward has written to a layer, before they are counted."""
        first = self.nodes + self.extent if self.placed is None else self.nodes - self.placed
        return self.between(layer, first, first + count)

    def past(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The past keys and values (B, H, S, E) of a layer, S as much as a step attends to."""
        return self.between(layer, self.nodes, self.slots)

    def between(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values in some slots."""
        layer_cache = self.layers[layer]
        return layer_cache.keys[..., start:stop, :], layer_cache.values[..., start:stop, :]

    @property
    def advancing(self) -> list[torch.Tensor]:
        """What a commit changes, and a second one would change again."""
        return [self.lengths, *(tensor for layer in self.recurrent for tensor in layer.tensors)]

    def states(self) -> list[torch.Tensor]:
        """Copies of all states, for `put_back`; where keys are kept, lengths say it all."""
        return [tensor.clone() for layer in self.recurrent for tensor in layer.tensors]

    def put_back(self, states: list[torch.Tensor]) -> None:
        """Hold states of before again."""
        for place, value in zip((tensor for layer in self.recurrent for tensor in layer.tensors), states):
            place.copy_(value)

    def copy_past(self, other: SlotCache) -> None:
        """Hold what another cache of the same layers holds, of which there is room for every row."""
        past = min(self.capacity, other.capacity)
        for mine, theirs in zip(self.layers, other.layers):
            if theirs.is_initialized:
                for new, old in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    new.zero_()  # for what is not a number spreads even where it is masked
                    new[..., self.nodes : self.nodes + past, :] = old[..., other.nodes : other.nodes + past, :]
        for mine, theirs in zip(self.recurrent, other.recurrent):
            mine.copy_states(theirs)
        self.lengths.copy_(other.lengths)

    def select(self, rows: list[int]) -> None:
        """Hold these rows alone, in this order, in memory of their own."""
        self.blocks = [block.index_select(1, torch.tensor(rows, device=block.device)) for block in self.blocks]
        self.lengths = self.lengths.index_select(0, torch.tensor(rows, device=self.lengths.device))
        self.rows = len(rows)
        for layer in self.layers:
            layer.bind()
        for layer in self.recurrent:
            index = torch.tensor(rows, device=layer.device)
            layer.held_inputs, layer.held_states = (
                {key: None if tensor is None else tensor.index_select(0, index) for key, tensor in tensors.items()}
                for tensors in (layer.held_inputs, layer.held_states)
            )
        self.extent = self.longest(self.extent)

    def put_row(self, row: int, other: SlotCache) -> None:
        """Hold in one row what the only row of another cache of the same layers holds, of which there must be room."""
        past, states = other.extent, zip(self.recurrent, other.recurrent)
        for mine, theirs in zip(self.layers, other.layers):
            if theirs.is_initialized:
                for new, old in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
                    new[row, :, self.nodes : self.nodes + past] = old[0, :, other.nodes : other.nodes + past]
        for place, value in (pair for mine, theirs in states for pair in zip(mine.tensors, theirs.tensors)):
            place[row] = value[0]
        self.lengths[row] = other.lengths[0]
        if not self.fixed:
            self.extent = max(self.extent, past)

    def bytes_of(self, slots: int) -> int:
        """Bytes that the keys and values of so many slots take."""
        return sum(block[:, :, 0].numel() * block.element_size() * slots for block in self.blocks)

    def load(self, past: Cache) -> None:
        """Start from the past of an ordinary cache; sliding layers hold only its end."""
        past_tokens = past_length(past)
        self.reserve(past_tokens + 1, self.nodes)
        for mine, theirs in zip(self.layers, past.layers):
            if isinstance(mine, RecurrentLayer):
                mine.copy_states(theirs)
            if getattr(theirs, "is_initialized", False) and not holds_nothing(theirs) and theirs.keys.numel():
                self.extent = past_tokens - theirs.keys.shape[-2]
                mine.update(theirs.keys, theirs.values)
        self.extent = 0
        self.count(past_tokens)

    def unload(self, target: Cache, start: int, stop: int) -> None:
        """Append positions `start` to `stop` of every row to an ordinary cache; states are those of now."""
        for index, layer in enumerate(self.layers):
            if isinstance(layer, RecurrentLayer):
                layer.unload(target.layers[index])
            if layer.is_initialized and stop > start:
                target.update(*self.between(index, self.nodes + start, self.nodes + stop), index)

    def place_of(self, like: torch.Tensor) -> tuple[int, int]:
        """A block and the first of its heads, for one layer's keys or values of the shape of `like` but the length."""
        rows, heads, _, size = like.shape
        for number, block in enumerate(self.blocks):
            alike = block.shape[3] == size and block.dtype == like.dtype and block.device == like.device
            if alike and self.taken[number] + heads <= len(block):
                self.taken[number] += heads
                return number, self.taken[number] - heads
        unplaced = sum(not layer.is_initialized for layer in self.layers)
        tensors = 1 if self.apart else min(2 * unplaced, MOST_TENSORS)
        # zeroed, for what is not a number spreads even where it is masked
        self.blocks.append(like.new_zeros(tensors * heads, rows, self.nodes + self.capacity, size))
        self.taken.append(heads)
        return len(self.blocks) - 1, 0


class SlotLayer(CacheLayerMixin):
    """One layer's view of a `SlotCache`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: SlotCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if not any(layer.is_initialized for layer in self.cache.layers):
            self.cache.lengths = self.cache.lengths.to(key_states.device)
        self.places = (self.cache.place_of(key_states), self.cache.place_of(value_states))
        self.heads = (key_states.shape[1], value_states.shape[1])
        self.is_initialized = True
        self.bind()

    def bind(self) -> None:
        """Look at the memory anew, after it moved: keys and values (B, H, S, E)."""
        if self.is_initialized:
            self.keys, self.values = (
                self.cache.blocks[number][first : first + heads].transpose(0, 1)
                for (number, first), heads in zip(self.places, self.heads)
            )

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write what the layer has computed, (B, H, n, E) each, and return all keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, length = self.cache, key_states.shape[-2]
        if cache.placed is None:
            cache.reserve(cache.extent + length, cache.nodes)
            first, write = cache.nodes, cache.nodes + cache.extent
            end: int | None = write + length
        else:
            first = write = cache.nodes - cache.placed
            end = None
        self.keys[..., write : write + length, :] = key_states
        self.values[..., write : write + length, :] = value_states
        return self.keys[..., first:end, :], self.values[..., first:end, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        cache = self.cache
        return cache.extent + query_length if cache.placed is None else cache.placed + cache.slots - cache.nodes, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return -1


class RecurrentSlotLayer(RecurrentLayer, SlotLayer):
    """A layer that keeps a state; some keep keys beside it."""

    def __init__(self, cache: SlotCache, kind: Mixer, number_of_states: int):
        SlotLayer.__init__(self, cache)
        LinearAttentionLayer.__init__(self, number_of_states)
        self.kind, self.record = kind, {}

    def lazy_initialization(self, *keys: torch.Tensor, **states: Any) -> None:
        """As transformers calls it: keys and values by place, inputs or a state by name."""
        if keys:
            SlotLayer.lazy_initialization(self, *keys)
        else:
            inputs, state = states.get("conv_states"), states.get("recurrent_states")
            self.start(inputs, state, states.get("state_idx", 0), states.get("conv_kernel_size"))


def within(
    window: int, depths: torch.Tensor, above: torch.Tensor, behind: torch.Tensor, distance: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What nodes at depths (R, n) see of nodes (B, n, M) and of a past (B, n, S), at distances (B, S) from the root.

    Where M is more than n, the nodes are a tree that is no deeper than the window.
    """
    if depths.shape[1] == above.shape[2]:
        above = above & (depths[:, :, None] - depths[:, None, :] < window)
    return above, behind & (depths[:, :, None] - distance[:, None] < window)


def padded(visible: torch.Tensor, extent: int) -> torch.Tensor:
    """(B, extent) which past slots hold no padding, of `visible` (B, S'); there is none behind them."""
    return torch.nn.functional.pad(visible[:, :extent], (0, max(extent - visible.shape[1], 0)), value=True)


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
