"""The one cache of the package: keys and values of a verified past, row by row, and of the nodes of one step.

Every layer, of the base or of a drafter, holds `nodes` slots for the step and behind them `capacity` for the past:

    slot      0 ........ nodes | nodes + 0, + 1, ...
    holds     the step's nodes | the row's past, position by position

Nodes are written right before the past, later ones in front of earlier ones, so that [nodes, past] is one slice without
a copy, whatever the lengths of the rows. `keep` moves accepted nodes behind each row's own past, all layers at once.

Shapes: B rows, n nodes of one forward, M nodes written so far (n included), m nodes to keep, S slots, H key/value
heads, E head size, R = 1 or B.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)
from transformers.configuration_utils import PreTrainedConfig

# Layers whose keys have one shape share a tensor, so that moving nodes is one copy for all of them. Where shapes or
# devices differ between layers, a shared tensor may stay partly unused: this bounds the waste.
SLABS_PER_POOL = 64
SLOTS = 64  # for the nodes, in caches of fixed shapes: a multiple of this
BUCKET = 64  # past positions that a GPU attends to: a multiple of this, for it plans anew for every other length
ALIGNED = 8  # numbers in a row of a GPU's mask: a multiple of this, else attention copies the mask in every layer
ROOM = 1024  # positions by which the memory grows at most, unless more is needed at once


class SlotCache(Cache):
    """Keys and values of the verified past and of the nodes of one step.

    Args:
        batch_size: B.
        num_layers: layers that write here.
        capacity: past positions to hold at first.
        nodes: nodes of one step to hold at first.

    Attributes:
        lengths: (B,) past positions of each row, on the device where attention is computed.
        extent: past slots that attention looks at; no row is longer.
        fixed: nothing grows and every slot is attended to, so that all shapes stay the same (`fix`).
    """

    def __init__(self, batch_size: int, num_layers: int, capacity: int, nodes: int = 0):
        self.rows = batch_size
        self.capacity, self.nodes = capacity, nodes
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self.extent = 0
        self.placed: int | None = None  # nodes of this step so far; None while the past itself is written
        self.fixed = False
        self.pools: list[_Pool] = []
        self._starts_of: tuple[int, int, torch.device] | None = None
        self._numbers: torch.Tensor | None = None
        super().__init__(layers=[SlotLayer(self) for _ in range(num_layers)])

    @property
    def seen_extent(self) -> int:
        """Past slots that a step attends to."""
        if self.fixed:
            return self.slots - self.nodes
        return self.extent if self.lengths.device.type == "cpu" else rounded_up(self.extent, BUCKET)

    @property
    def slots(self) -> int:
        """S: the nodes' slots and the past's; read off the memory, of which a compiler knows that it may grow."""
        written = next((layer for layer in self.layers if layer.is_initialized), None)
        return self.nodes + self.capacity if written is None else written.keys.shape[2]

    @property
    def even(self) -> bool:
        """Whether all rows are known to end at `extent`: a GPU, which would wait, is not asked."""
        if self.fixed or self.lengths.device.type != "cpu":
            return False
        return self.lengths.tolist() == [self.extent] * self.rows

    @property
    def memory(self) -> list[torch.Tensor]:
        """The tensors that hold keys and values, slots in their last dimension but one."""
        if self.pools:
            return [pool.data for pool in self.pools]
        return [part for layer in self.layers if layer.is_initialized for part in (layer.keys, layer.values)]

    # ---- what the next forward writes ---------------------------------------------------------------------------

    def append(self) -> None:
        """The next forward writes past positions from `extent` on, the same for all rows."""
        self.placed = None

    def count(self, length: int, lengths: torch.Tensor | None = None) -> None:
        """Count `length` positions, which a forward has just appended, as past; in each row only the first of them.

        Args:
            length: positions.
            lengths: (B,) how many of them are each row's own; default: all.
        """
        if lengths is None:
            self.extent += length
            self.lengths = self.lengths + length
        else:
            self.lengths = self.lengths.to(lengths.device) + lengths
            self.extent = self._longest(self.extent + length)

    def place(self, count: int, again: bool = False) -> int:
        """The next forward writes `count` nodes, in front of those of this step (`again`) or in place of the last's.

        Returns:
            M, the nodes written after it.
        """
        before = self.placed if again and self.placed is not None else 0
        self.placed = before + count
        if not self.fixed:
            self.reserve(self.seen_extent, self.placed)
        return self.placed

    def keep(self, nodes: torch.Tensor, counts: torch.Tensor) -> None:
        """Move nodes of the step behind each row's past. A single one that was appended is there already.

        All m of them are moved; what lies beyond `counts` is not seen, and is written over by the next ones.

        Args:
            nodes: (B, m) node numbers in the order in which they were placed at once.
            counts: (B,) how many of them become past.
        """
        m = nodes.shape[1]
        if self.placed is not None:
            self._move(nodes, self.placed)
        self.lengths.add_(counts.to(self.lengths.device))
        self.extent = self._longest(self.extent + m)

    def _move(self, nodes: torch.Tensor, placed: int) -> None:
        """Copy nodes (B, m) behind each row's past; `placed` of them were written."""
        m = nodes.shape[1]
        if not self.fixed:
            self.reserve(self.extent + m, self.nodes)
        if self.rows == 1 and self.even:  # fewer operations
            first = self.nodes + self.extent
            for pool in self.pools:
                pool.move(nodes[0] + (self.nodes - placed), slice(first, first + m))
            return
        past = self.lengths.to(nodes.device)[:, None] + self.numbers(m, nodes.device)
        if not self.pools:
            rows = torch.arange(self.rows, device=nodes.device)[:, None]
            self._move_alone(rows, self.nodes - placed + nodes, self.nodes + past)
        else:
            starts = self._starts(nodes.device)
            source, target = (starts - placed + nodes).flatten(), (starts + past).flatten()
            for pool in self.pools:
                pool.move(source, target)

    def _move_alone(self, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy slots (B, m) to slots of the same row, in tensors of each layer's own; `rows` is (B, 1).

        A compiler takes a while to trace each operation, of which there are some for every layer.
        """
        places = {rows.device: (rows, source, target)}
        for part in self.memory:
            if part.device not in places:
                places[part.device] = (rows.to(part.device), source.to(part.device), target.to(part.device))
            row, old, new = places[part.device]
            part[row, :, new] = part[row, :, old]

    # ---- memory --------------------------------------------------------------------------------------------------

    def reserve(self, capacity: int, nodes: int) -> None:
        """Make room for `capacity` past positions and for `nodes` nodes per row."""
        if capacity <= self.capacity and nodes <= self.nodes:
            return
        if capacity > self.capacity and self.pools:
            capacity = max(capacity, self.capacity + min(self.capacity, ROOM))
        self._resize(max(capacity, self.capacity), max(nodes, self.nodes))

    def fix(self, capacity: int, nodes: int, alone: bool = True) -> None:
        """From now on every shape stays the same: room for so many positions and nodes, all of it attended to.

        Nothing has changed where there is no memory for it.

        Args:
            alone: give every layer tensors of its own: a compiler takes a write to a tensor that layers share for a
                write to all of it.
        """
        written = [layer for layer in self.layers if layer.is_initialized]
        shape = (nodes + capacity, nodes - self.nodes)
        if alone or not self.pools:
            parts = [(_resized(layer.keys, *shape), _resized(layer.values, *shape)) for layer in written]
            for layer, (keys, values) in zip(written, parts):
                layer.keys, layer.values = keys, values
            self.nodes, self.capacity, self.pools = nodes, capacity, []
        else:
            self._resize(capacity, nodes)
        self.fixed = True

    def _resize(self, capacity: int, nodes: int) -> None:
        """Hold so many past positions and nodes in the pools; nothing has changed where there is no memory for it."""
        data = [_resized(pool.data, nodes + capacity, nodes - self.nodes) for pool in self.pools]
        for pool, new in zip(self.pools, data):
            pool.data = new
        self.nodes, self.capacity = nodes, capacity
        for layer in self.layers:
            layer.bind()

    def bytes_of(self, slots: int) -> int:
        """Bytes that the keys and values of so many slots take."""
        written = (part for layer in self.layers if layer.is_initialized for part in (layer.keys, layer.values))
        return sum(part[..., 0, :].numel() * part.element_size() * slots for part in written)

    def free(self) -> None:
        """Take `fix` back: the memory may grow again. No more of it is taken."""
        self.fixed = False
        self.extent = int(self.lengths.max())
        if not self.pools:
            for layer in self.layers:
                layer.share()

    def load(self, past: Cache) -> None:
        """Start from the past of an ordinary cache; sliding layers hold only its end."""
        known = int(past.get_seq_length())
        self.reserve(known + 1, self.nodes)
        for mine, theirs in zip(self.layers, past.layers):
            if theirs.is_initialized and not holds_nothing(theirs) and theirs.keys.numel():
                mine.put(theirs.keys, theirs.values, known - theirs.keys.shape[-2])
        self.count(known)

    def unload(self, target: Cache, start: int, stop: int) -> None:
        """Append positions `start` to `stop` of every row to an ordinary cache."""
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and stop > start:
                past = slice(self.nodes + start, self.nodes + stop)
                target.update(layer.keys[..., past, :], layer.values[..., past, :], index)

    def slab(self, like: torch.Tensor) -> tuple[_Pool, int]:
        """A place for one layer's keys or values, of the shape of `like` but for the length."""
        for pool in self.pools:
            if pool.fits(like):
                return pool, pool.take()
        unplaced = sum(not layer.is_initialized for layer in self.layers)
        rows, heads, _, size = like.shape
        slabs = min(2 * unplaced, SLABS_PER_POOL)
        self.pools.append(_Pool(like.new_zeros(slabs, heads, rows, self.nodes + self.capacity, size)))
        return self.pools[-1], self.pools[-1].take()

    def _starts(self, device: torch.device) -> torch.Tensor:
        """(B, 1) where each row's past starts, in slots counted over all rows."""
        layout = (self.slots, self.nodes, device)
        if self._starts_of != layout or self.fixed:  # a recorded step makes its own each time
            first = torch.arange(0, self.rows * self.slots, self.slots, device=device)
            self._known_starts = first[:, None] + self.nodes
            self._starts_of = layout
        return self._known_starts

    def numbers(self, count: int, device: torch.device) -> torch.Tensor:
        """(count,) 0, 1, ... Uncaptured steps share one tensor, of which a slice costs less than to make another."""
        if self.fixed:
            return torch.arange(count, device=device)
        known = self._numbers
        if known is None or known.shape[0] < count or known.device != device:
            self._numbers = known = torch.arange(max(count, self.nodes), device=device)
        return known[:count]

    def bound(self, longest: int) -> None:
        """Told by the host, which has read the lengths: no row is longer than this."""
        if not self.fixed:
            self.extent = min(self.extent, longest)

    def _longest(self, bound: int) -> int:
        """The longest row. It is read back on a CPU only: a GPU would wait, and goes by the bound."""
        if self.fixed:
            return self.extent
        if self.lengths.device.type != "cpu":
            return bound
        return int(self.lengths if self.rows == 1 else self.lengths.max())


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
        self.places = (self.cache.slab(key_states), self.cache.slab(value_states))
        self.is_initialized = True
        self.bind()

    def bind(self) -> None:
        """Look at the pools anew, after they moved."""
        if self.is_initialized:
            self.keys, self.values = (pool.slab(index) for pool, index in self.places)

    def share(self) -> None:
        """Make pools of the tensors of this layer's own."""
        if self.is_initialized:
            pools = [_Pool(part.transpose(0, 1)[None], 1) for part in (self.keys, self.values)]
            self.cache.pools += pools
            self.places = ((pools[0], 0), (pools[1], 0))

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
            end = None if cache.fixed else cache.nodes + cache.seen_extent
        keys, values = self.keys, self.values
        keys[..., write : write + length, :] = key_states
        values[..., write : write + length, :] = value_states
        return keys[..., first:end, :], values[..., first:end, :]

    def put(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Copy ready keys and values to the past, from position `start` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        where = slice(self.cache.nodes + start, self.cache.nodes + start + keys.shape[-2])
        self.keys[..., where, :] = keys
        self.values[..., where, :] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return -1


class _Pool:
    """Equally shaped slabs in one tensor (slabs, H, B, S, E), so that moving nodes is one copy.

    Zeroed at first, because a NaN spreads even where it is masked.
    """

    def __init__(self, data: torch.Tensor, taken: int = 0):
        self.data, self.taken = data, taken

    def fits(self, like: torch.Tensor) -> bool:
        slabs, heads, _, _, size = self.data.shape
        alike = like.shape[1::2] == (heads, size) and self.data.dtype == like.dtype and self.data.device == like.device
        return alike and self.taken < slabs

    def take(self) -> int:
        self.taken += 1
        return self.taken - 1

    def slab(self, index: int) -> torch.Tensor:
        """(B, H, S, E), a view."""
        return self.data[index].transpose(0, 1)

    def move(self, source: torch.Tensor, target: torch.Tensor | slice) -> None:
        """Copy slots to slots, both counted over all rows."""
        slabs, heads, rows, slots, size = self.data.shape
        flat = self.data.view(slabs * heads, rows * slots, size)  # copies are faster where there are fewer dimensions
        moved = flat.index_select(1, source.to(flat.device))
        if isinstance(target, slice):
            flat[:, target] = moved
        else:
            flat.index_copy_(1, target.to(flat.device), moved)


def _resized(part: torch.Tensor, slots: int, front: int) -> torch.Tensor:
    """Copy keys and values (..., S, E) to memory of `slots` slots, behind `front` new ones or without `-front` of them.

    A layer's own (B, H, S, E) lie in memory as in a pool, head by head.
    """
    old, front = part[..., max(-front, 0) :, :], max(front, 0)
    *outer, _, size = part.shape
    if len(outer) == 2:
        rows, heads = outer
        new = part.new_zeros(heads, rows, slots, size).transpose(0, 1)
    else:
        new = part.new_zeros(*outer, slots, size)
    known = min(old.shape[-2], slots - front)
    new[..., front : front + known, :] = old[..., :known, :]
    return new


def slot_mask(
    ancestors: torch.Tensor,
    past: torch.Tensor,
    extent: int,
    dtype: torch.dtype,
    *,
    visible: torch.Tensor | None = None,
    window: int | None = None,
    depths: torch.Tensor | None = None,
) -> torch.Tensor:
    """The additive mask of a step, for the base and for drafters: a node sees its ancestors and its row's past.

    Additive and not boolean, because eager attention adds a boolean mask as 0 and 1. Distances for a sliding window are
    those of the sequence that the node stands for, not of the slots.

    Args:
        ancestors: (R, n, M) which nodes each sees, itself included, in the order of the slots.
        past: (B,) past positions of each row.
        extent: past slots.
        dtype: of the attention.
        visible: (B, S') which of the first S' past slots hold no padding; None = all.
        window: positions that a sliding layer sees; None = all.
        depths: (R, n) of the nodes, where there is a window. Where the M nodes are more than these n, they are a tree
            that is no deeper than the window.

    Returns:
        (B, 1, n, M + extent).
    """
    rows, nodes = past.shape[0], ancestors.shape[1]
    slots = torch.arange(extent, device=past.device)
    behind = slots < past[:, None]  # (B, S)
    if visible is not None:
        behind = behind & padded(visible, extent)
    behind = behind[:, None].expand(rows, nodes, -1)
    above = ancestors.expand(rows, -1, -1)
    if window is not None and depths is not None:
        if depths.shape[1] == above.shape[2]:
            above = above & (depths[:, :, None] - depths[:, None, :] < window)
        behind = behind & (past[:, None, None] + depths[:, :, None] - slots < window)
    seen = torch.cat([above, behind], dim=-1)[:, None]
    width = seen.shape[-1] if past.device.type == "cpu" else rounded_up(seen.shape[-1], ALIGNED)
    mask = torch.zeros(*seen.shape[:-1], width, dtype=dtype, device=past.device)[..., : seen.shape[-1]]
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def padded(visible: torch.Tensor, extent: int) -> torch.Tensor:
    """(B, extent) which past slots hold no padding, of `visible` (B, S'); there is none behind them."""
    return torch.nn.functional.pad(visible[:, :extent], (0, max(extent - visible.shape[1], 0)), value=True)


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple.

    >>> rounded_up(0, 8), rounded_up(1, 8), rounded_up(8, 8)
    (0, 8, 8)
    """
    return -(-number // multiple) * multiple


def fixed_slots(nodes: int) -> int:
    """Slots for the nodes of a step in caches of fixed shapes: the same for most trees, which then share programs.

    Attention does not look at more slots than there are nodes.

    >>> fixed_slots(1), fixed_slots(64), fixed_slots(65)
    (64, 64, 128)
    """
    return rounded_up(nodes, SLOTS)


def can_load(past: Cache) -> bool:
    """Whether `SlotCache.load` understands this cache: plain or sliding dynamic layers, nothing offloaded.

    A static cache that the base prepared for this call has nothing in it yet, and is only filled at the end.
    """
    if past.offloading:
        return False
    prepared = not getattr(past, "_is_user_defined", False)
    known = (DynamicLayer, DynamicSlidingWindowLayer, *((StaticLayer, StaticSlidingWindowLayer) if prepared else ()))
    return all(type(layer) in known or holds_nothing(layer) for layer in past.layers)


def holds_nothing(layer: CacheLayerMixin) -> bool:
    """Whether a layer of an ordinary cache only stands for one that writes none, as it reads an earlier layer's."""
    return type(layer).__name__ == "DummyLayer"  # which older versions of transformers do not have


def writing_layers(config: PreTrainedConfig) -> int:
    """How many of a base's layers, the first ones, write keys and values; the others read those of earlier layers."""
    layers = DynamicCache(config=config).layers
    last = next((number for number, layer in enumerate(reversed(layers)) if not holds_nothing(layer)), 0)
    return (len(layers) or config.num_hidden_layers) - last
