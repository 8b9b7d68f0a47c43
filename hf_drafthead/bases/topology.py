"""How the nodes of a step hang together, as tensors.

Shapes: B rows, N nodes (root included), M nodes of which the best are kept, D nodes on the longest path (root
included), R = 1 or B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Topology(NamedTuple):
    """How the nodes of a step hang together, as tensors; R is 1 (all rows alike) or the batch size.

    parents (R, N) with the root as its own parent; depths (R, N); ancestors (R, N, N), True where the column is the
    row's node or above it; unrelated (R, N, N), True where the column is the root or no ancestor; paths (R, N, D), the
    nodes from the root down to each node, padded with 0.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    unrelated: torch.Tensor
    paths: torch.Tensor

    @classmethod
    def of_numbers(cls, parents: Sequence[int], device: torch.device) -> Topology:
        """The topology of one tree for all rows, of each node's parent; parents come before their children."""
        depths = [0]
        for parent in parents[1:]:
            depths.append(depths[parent] + 1)
        return cls.of(torch.tensor([parents], device=device), torch.tensor([depths], device=device), max(depths))

    @classmethod
    def of(cls, parents: torch.Tensor, depths: torch.Tensor, deepest: int) -> Topology:
        """The topology of every row's own tree, whose parents and depths are (B, N), without waiting for the device; D
        - 1 is `deepest`.
        """
        line = [torch.arange(parents.shape[1], device=parents.device).expand_as(parents)]
        for _ in range(deepest):
            line.append(parents.gather(1, line[-1]))
        upwards = torch.stack(line, dim=2)  # (B, N, D) each node, its parent, ..., the root, and the root again
        nodes = parents.shape[1]
        ancestors = torch.zeros(*parents.shape, nodes, dtype=torch.bool, device=parents.device)
        ancestors = ancestors.scatter(2, upwards, True)
        unrelated = ~ancestors
        unrelated[..., 0] = True
        columns = depths[:, None].expand(-1, nodes, -1).gather(2, upwards)
        return cls(parents, depths, ancestors, unrelated, torch.zeros_like(upwards).scatter(2, columns, upwards))

    @classmethod
    def of_best(
        cls,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depths: torch.Tensor,
        value: torch.Tensor,
        nodes: int,
        deepest: int,
    ) -> tuple[torch.Tensor, Topology, torch.Tensor]:
        """The N most valuable of (B, M) nodes, of equal ones the first: tokens (B, N), how they hang together, values.

        No node is worth more than its parent, which comes before it.
        """
        best = value.sort(dim=1, descending=True, stable=True).indices[:, :nodes].sort(dim=1).values  # (B, N)
        numbers = torch.arange(nodes, device=best.device).expand_as(best)
        place = torch.zeros_like(tokens).scatter(1, best, numbers)  # (B, M)
        topology = cls.of(place.gather(1, parents.gather(1, best)), depths.gather(1, best), deepest)
        return tokens.gather(1, best), topology, value.gather(1, best)
