"""A transformers cache with room for the nodes of a step, compacted in place.

Every layer holds `capacity` slots per row behind `num_nodes` slots for the tree:

    slot      0 ........ num_nodes | num_nodes + 0, + 1, ...
    holds     the step's nodes     | the row's past, position by position

The nodes of a step are written right before the past, so one constant slice serves rows of any length, and keys are
[nodes, past] without a copy. `commit` moves the accepted nodes behind each row's own past; nothing is concatenated.

Shapes: B rows, N nodes of this step, C capacity, H key/value heads, E head size.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

# Layers whose keys have one shape share a tensor, so that a commit is one copy for all of them. Where shapes or devices
# differ between layers, a shared tensor may stay partly unused: this bounds the waste.
SLABS_PER_POOL = 64


class TreeCache(Cache):
    """Keys and values of the verified past and of the nodes of one step.

    Args:
        num_layers: layers of the base.
        num_nodes: most nodes that one step verifies.
        capacity: positions to hold at first; it grows by doubling.
    """

    def __init__(self, num_layers: int, num_nodes: int, capacity: int):
        self.num_nodes = num_nodes
        self.capacity = capacity
        self.extent = 0  # past slots in use by the longest row
        self.in_step = False  # whether an update writes nodes or appends to the past
        self.pools: list[_Pool] = []
        super().__init__(layers=[TreeLayer(self) for _ in range(num_layers)])

    def append(self, length: int) -> None:
        """Count `length` positions, which a forward has just written to every row, as past."""
        self.extent += length

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions per row."""
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, 2 * self.capacity)
        for pool in self.pools:
            pool.grow(self.num_nodes + self.capacity)
        for layer in self.layers:
            layer.bind()

    def commit(self, nodes: list[list[int]], starts: list[int], step_nodes: int) -> None:
        """Keep nodes of a step of `step_nodes` nodes as past.

        Args:
            nodes: B lists of node numbers from the root down.
            starts: the past position of each row's root, B of them.
            step_nodes: N.
        """
        slots, first = self.num_nodes + self.capacity, self.num_nodes - step_nodes
        source, target = [], []
        for row, (kept, start) in enumerate(zip(nodes, starts)):
            source += [row * slots + first + node for node in kept]
            target += [row * slots + self.num_nodes + start + i for i in range(len(kept))]
        for pool in self.pools:
            device = pool.data.device
            states = pool.data.index_select(2, torch.tensor(source, device=device))
            if len(nodes) == 1:  # in one piece: less than half the time of a scatter
                pool.data[:, :, target[0] : target[0] + len(target)] = states
            else:
                pool.data.index_copy_(2, torch.tensor(target, device=device), states)

    def load(self, past: Cache) -> None:
        """Start from the past of an ordinary cache; sliding layers hold only its end."""
        self.extent = past.get_seq_length()
        self.reserve(self.extent + 1)
        for mine, theirs in zip(self.layers, past.layers):
            if theirs.is_initialized and theirs.keys.numel():
                mine.put(theirs.keys, theirs.values, self.extent - theirs.keys.shape[-2])

    def unload(self, target: Cache, start: int, stop: int) -> None:
        """Append positions `start` to `stop` of every row to an ordinary cache."""
        for index, layer in enumerate(self.layers):
            if layer.is_initialized and stop > start:
                past = slice(self.num_nodes + start, self.num_nodes + stop)
                target.update(layer.keys[..., past, :], layer.values[..., past, :], index)

    def slab(self, like: torch.Tensor) -> tuple[_Pool, int]:
        """A place for one layer's keys or values, of the shape of `like` but for the length."""
        for pool in self.pools:
            if pool.fits(like):
                return pool, pool.take()
        unplaced = sum(not layer.is_initialized for layer in self.layers)
        self.pools.append(_Pool(min(2 * unplaced, SLABS_PER_POOL), self.num_nodes + self.capacity, like))
        return self.pools[-1], self.pools[-1].take()


class TreeLayer(CacheLayerMixin):
    """One layer's view of a `TreeCache`."""

    is_sliding = False
    is_croppable = False

    def __init__(self, cache: TreeCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.places = (self.cache.slab(key_states), self.cache.slab(value_states))
        self.is_initialized = True
        self.bind()

    def bind(self) -> None:
        """Look at the pools anew, after they moved."""
        if self.is_initialized:
            self.keys, self.values = (pool.slab(index) for pool, index in self.places)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the states of a step's nodes, or append them to the past; returns all keys and values to attend to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, length = self.cache, key_states.shape[-2]
        if cache.in_step:
            first, write, end = cache.num_nodes - length, cache.num_nodes - length, cache.num_nodes + cache.extent
        else:
            first, write = cache.num_nodes, cache.num_nodes + cache.extent
            end = write + length
        self.keys[..., write : write + length, :] = key_states
        self.values[..., write : write + length, :] = value_states
        return self.keys[..., first:end, :], self.values[..., first:end, :]

    def put(self, keys: torch.Tensor, values: torch.Tensor, start: int) -> None:
        """Copy ready keys and values to the past, from position `start` on."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        where = slice(self.cache.num_nodes + start, self.cache.num_nodes + start + keys.shape[-2])
        self.keys[..., where, :] = keys
        self.values[..., where, :] = values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.extent + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.extent

    def get_max_length(self) -> int:
        return -1


class _Pool:
    """Equally shaped slabs in one tensor (slabs, H, B * slots, E): rows side by side, so that a commit is one copy.

    Zeroed at first, because a NaN spreads even where it is masked.
    """

    def __init__(self, slabs: int, slots: int, like: torch.Tensor):
        self.rows, heads, _, size = like.shape
        self.data = torch.zeros(slabs, heads, self.rows * slots, size, dtype=like.dtype, device=like.device)
        self.taken = 0

    def fits(self, like: torch.Tensor) -> bool:
        slabs, heads, _, size = self.data.shape
        alike = like.shape[1::2] == (heads, size) and self.data.dtype == like.dtype and self.data.device == like.device
        return alike and self.taken < slabs

    def take(self) -> int:
        self.taken += 1
        return self.taken - 1

    def slab(self, index: int) -> torch.Tensor:
        """(B, H, slots, E), a view."""
        return self.data[index].unflatten(1, (self.rows, -1)).transpose(0, 1)

    def grow(self, slots: int) -> None:
        slabs, heads, _, size = self.data.shape
        old = self.data.view(slabs, heads, self.rows, -1, size)
        self.data = old.new_zeros(slabs, heads, self.rows * slots, size)
        self.data.view(slabs, heads, self.rows, slots, size)[..., : old.shape[3], :] = old


def can_load(past: Cache) -> bool:
    """Whether `TreeCache.load` understands this cache: plain or sliding dynamic layers, nothing offloaded."""
    known = (DynamicLayer, DynamicSlidingWindowLayer)
    return not past.offloading and all(type(layer) in known for layer in past.layers)
