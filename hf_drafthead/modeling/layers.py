"""What two families share: residual blocks, output projections, and the last verified position of every row.

Shapes: B rows, A newly verified positions, K heads, H hidden, V vocabulary.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), with W = 0 at the start (Medusa, section 2.1.1; b as in the published code)."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)

    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ParallelBlocks(nn.Module):
    """One residual block per head, all heads in one batched product.

    Attributes:
        weight: (K, H, H), head i's W in row i.
        bias: (K, H).
    """

    def __init__(self, heads: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.empty(heads, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = self.bias.shape[-1] ** -0.5
        nn.init.zeros_(self.weight)
        nn.init.uniform_(self.bias, -bound, bound)  # what torch gives a linear layer's bias

    def forward(self, x: Tensor) -> Tensor:
        """Head i's block on x[i]; x is (K, N, H)."""
        return x + F.silu(torch.baddbmm(self.bias.unsqueeze(1), x, self.weight.transpose(1, 2)))


class OutputProjections(nn.Module):
    """From a head's state to logits: each head's own projection, or the base's lm_head for all of them.

    Args:
        heads: K.
        hidden_size: H.
        vocab_size: V.
        shared: use the base's lm_head, and have no parameters.
        bias: give the own projections a bias.
        rank: split the own projections in two factors of this rank (Amphista, table 10); None for full ones.
    """

    def __init__(
        self, heads: int, hidden_size: int, vocab_size: int, shared: bool, bias: bool = False, rank: int | None = None
    ) -> None:
        super().__init__()
        self.shared = shared
        own = 0 if shared else heads
        width = hidden_size if rank is None else rank
        self.down = nn.ModuleList(nn.Linear(hidden_size, rank, bias=False) for _ in range(own if rank else 0))
        self.up = nn.ModuleList(nn.Linear(width, vocab_size, bias=bias) for _ in range(own))

    def reset_parameters(self, base: nn.Module) -> None:
        """Start from the base's lm_head (its best approximation, if the rank is low)."""
        if self.shared:
            return
        lm_head = _weight_of(base.get_output_embeddings(), self.up[0].weight)
        for up in self.up:
            up.reset_parameters()
        with torch.no_grad():
            if not self.down:
                for up in self.up:
                    up.weight.copy_(lm_head)
                return
            rank = self.down[0].out_features
            left, scale, right = torch.linalg.svd(lm_head.float(), full_matrices=False)
            for down, up in zip(self.down, self.up, strict=True):
                up.weight.copy_(left[:, :rank] * scale[:rank].sqrt())
                down.weight.copy_(scale[:rank].sqrt().unsqueeze(1) * right[:rank])

    def forward(self, base: nn.Module, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., H)."""
        if self.shared:
            return base.get_output_embeddings()(hidden)
        if self.down:
            hidden = self.down[head](hidden)
        return self.up[head](hidden)


def last_valid(kept: Tensor | None, new: Tensor, lengths: Tensor) -> Tensor:
    """Each row's last valid position of `new`; what was kept where a row has none.

    Args:
        kept: (B, H), or None at the start.
        new: (B, A, H).
        lengths: (B,) valid positions per row.
    """
    last = (lengths - 1).clamp(min=0)
    picked = new[torch.arange(new.shape[0], device=new.device), last]
    if kept is None:
        return picked
    return torch.where((lengths > 0).unsqueeze(1), picked, kept)


def _weight_of(linear: nn.Module, like: Tensor) -> Tensor:
    """The weight (out, in) of a linear layer, also of one that is quantized or offloaded, where `like` is."""
    weight = linear.weight
    if weight.is_floating_point() and weight.dtype.itemsize >= 2 and (weight.device.type != "meta" or like.is_meta):
        return weight.detach().to(like)
    with torch.no_grad():
        size = linear.in_features
        probe = torch.zeros(1 + size, size, dtype=like.dtype, device=like.device)
        probe[1:].fill_diagonal_(1.0)
        out = linear(probe).to(like)
    return (out[1:] - out[0]).T
