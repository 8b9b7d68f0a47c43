"""A drafter's own memory: keys and values of one layer, every row with a length of its own.

Shapes: B rows, A newly verified positions, n nodes of a level, M nodes of the tree so far, S slots, h key heads,
D head size.

A row's verified positions lie in its first slots in order; a tree's nodes are written behind them and are forgotten
when the next verified positions are written over them:

    row 0   v v v v v n n n . .        length 5, three nodes
    row 1   v v n n n . . . . .        length 2
"""

from typing import Any

import torch
from torch import Tensor

ROOM = 1024  # new positions for which memory is taken at first; it doubles when they are used up


def reads_back(device: torch.device) -> bool:
    """Whether a length is read back in every step: it makes less to attend to, but would stall a GPU, where besides
    shapes that stay the same can be captured."""
    return device.type == "cpu"


class RowCache:
    """What a decoder layer of a drafter is given as `past_key_values`.

    Args:
        batch_size: B.
        capacity: most positions that a row can ever hold.

    Attributes:
        lengths: (B,) verified positions per row.
    """

    def __init__(self, batch_size: int, capacity: int) -> None:
        self.lengths = torch.zeros(batch_size, dtype=torch.long)
        self._capacity = capacity
        self._reach = 0  # no row is longer
        self._room = 0  # slots that memory is taken for
        self._seen = 0  # slots that the layer gets to see
        self._slots = self.lengths.unsqueeze(1)
        self._keys = self._values = torch.empty(batch_size, 0, 0, 0)

    @property
    def fresh(self) -> bool:
        """True as long as nothing was kept."""
        return self._reach == 0

    def append(self, count: int, device: torch.device) -> Tensor:
        """Get ready to write `count` positions behind each row's verified ones.

        Returns:
            Their positions in the row's text (B, count), which are their slots as well.
        """
        return self._ready(0, count, device)

    def append_nodes(self, before: int, count: int, device: torch.device) -> None:
        """Get ready to write `count` nodes behind each row's verified positions and `before` other nodes."""
        self._ready(before, count, device)

    def up_to(self, slots: Tensor) -> Tensor:
        """Which slots (B, A, S) are not behind the given ones (B, A)."""
        return torch.arange(self._seen, device=slots.device) <= slots.unsqueeze(2)

    def verified_and(self, ancestors: Tensor) -> Tensor:
        """Which slots (B, n, S) are verified ones or those of the nodes' ancestors (B, n, M)."""
        rows, nodes, total = ancestors.shape
        # What a slot is: 0 verified, 1 ... M a node, M + 1 unused.
        kinds = torch.arange(1, self._seen + 1, device=ancestors.device) - self.lengths.unsqueeze(1)
        kinds = kinds.clamp(0, total + 1).unsqueeze(1).expand(-1, nodes, -1)  # (B, n, S)
        always = ancestors.new_ones(rows, nodes, 1)
        return torch.cat([always, ancestors, ~always], dim=2).gather(2, kinds)

    def keep(self, lengths: Tensor) -> None:
        """Count the first lengths[b] of the positions appended last as verified."""
        self.lengths = self.lengths + lengths.to(self.lengths.device)
        exact = reads_back(self.lengths.device)
        self._reach = int(self.lengths.max()) if exact else self._reach + self._slots.shape[1]

    def update(self, keys: Tensor, values: Tensor, *layer: Any, **unused: Any) -> tuple[Tensor, Tensor]:
        """Write what the layer has computed, each (B, h, A, D), and return all that it gets to see, (B, h, S, D)."""
        self._keys, self._values = self._written(self._keys, keys), self._written(self._values, values)
        return self._keys[:, :, : self._seen], self._values[:, :, : self._seen]

    def _ready(self, offset: int, count: int, device: torch.device) -> Tensor:
        """Slots (B, count) from `offset` behind the verified positions on, and room for them."""
        self.lengths = self.lengths.to(device)
        top = self._reach + offset + count
        if top > self._room and self._room:
            self._reach = int(self.lengths.max())
            top = self._reach + offset + count
        if top > self._room:
            self._room = top + min(max(ROOM, self._room), max(self._capacity - top, 64))
        self._seen = top if self.fresh or reads_back(device) else self._room
        self._slots = self.lengths.unsqueeze(1) + torch.arange(offset, offset + count, device=device)
        return self._slots

    def _written(self, store: Tensor, new: Tensor) -> Tensor:
        rows, heads, _, size = new.shape
        if store.shape[2] < self._room:
            # Zeros, for what was never written is masked by a large negative score: it must be a number.
            larger = new.new_zeros(rows, heads, self._room, size)
            if store.numel():
                larger[:, :, : store.shape[2]] = store
            store = larger
        store[torch.arange(rows, device=new.device).unsqueeze(1), :, self._slots] = new.transpose(1, 2)
        return store
