"""Hydra: each head reads the tokens guessed before it, so a path of the tree hangs together (Ankner et al., 2024).

Hydra++ is Hydra with deeper heads, which read what a decoder layer of their own makes of the base's hidden states.

Shapes: B rows, T positions, n nodes of a level, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import shortened
from hf_drafthead.modeling.layers import ResidualBlock, output_projections
from hf_drafthead.modeling.medusa import MEDUSA_RECIPE

# Ankner et al. 2024, section 5
HYDRA_RECIPE: dict[str, Any] = {**MEDUSA_RECIPE, "head_decay": 1.0, "num_train_epochs": 1}
# sections 3.1 and 5 of the same, and the published command
HYDRA_PLUS_PLUS_RECIPE: dict[str, Any] = {
    "next_token_weight": 0.0,
    "teacher_weight": 1.0,
    "learning_rate": 5e-4,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.33},
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "num_train_epochs": 10,
}


class HydraConfig(DraftHeadConfig):
    """Hydra heads, grounded in the tokens of the path.

    Args:
        num_layers: residual blocks per head; the first one reads the path, the others are H to H.
        tie_blocks: apply one block num_layers - 1 times, as the published checkpoints do; False gives each its own.
        prefix_layer: let the heads read a decoder layer over all verified hidden states (Hydra++; section 3.1 and
            appendix A.2).
        layer_config: whose decoder layer that is; None for the base's own kind.
        share_lm_head: project with the base's lm_head instead of one projection per head.
        dropout: before every block and before the projection, in training.
    """

    model_type = "drafthead_hydra"

    num_layers: int = 1
    tie_blocks: bool = False
    prefix_layer: bool = False
    layer_config: dict[str, Any] | PreTrainedConfig | None = None
    share_lm_head: bool = False
    dropout: float = 0.0

    @classmethod
    def plus_plus(cls, **fields: Any) -> "HydraConfig":
        """Hydra++ as in the paper: four layers per head, prefix layer; the dropout is the published recipe's."""
        return cls(**{"num_layers": 4, "prefix_layer": True, "dropout": 0.2, **fields})

    @property
    def family(self) -> str:
        return "hydra++" if self.prefix_layer else "hydra"

    def check(self) -> None:
        super().check()
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(
                f"dropout is {shortened.repr(self.dropout)}: expected a number from 0 up to, but not including, 1."
            )
        if self.tie_blocks and self.num_layers == 1:
            raise ValueError(
                "tie_blocks is True, but num_layers is 1: there is no block behind the first one to tie, ask for more "
                "layers or for tie_blocks=False."
            )
        self._check_layer(f"prefix_layer is {self.prefix_layer}", self.prefix_layer)


class HydraHead(nn.Module):
    """Head i: R x + SiLU(L x) of x = [h; E(x_{t+1}); ...; E(x_{t+1+i})], then plain residual blocks.

    R and L are one product: `path` has R's rows first, then L's.
    """

    def __init__(self, head: int, hidden_size: int, config: HydraConfig) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.repeats = config.num_layers - 1
        self.path = nn.Linear((head + 2) * hidden_size, 2 * hidden_size)
        block_count = min(self.repeats, 1) if config.tie_blocks else self.repeats
        self.blocks = nn.ModuleList(ResidualBlock(hidden_size) for _ in range(block_count))
        nn.init.zeros_(self.path.weight[hidden_size:])

    def forward(self, x: Tensor) -> Tensor:
        """(..., (i + 2) H) -> (..., H)."""
        residual, gate = self.path(self._dropped(x)).chunk(2, dim=-1)
        x = residual + F.silu(gate)
        for turn in range(self.repeats):
            x = self.blocks[turn % len(self.blocks)](self._dropped(x))
        return x

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class HydraState(NamedTuple):
    """The last verified position, and for the current tree level what each node's path has come to."""

    features: Tensor  # (B, H)
    paths: Tensor  # (B, n, (level + 1) H): h, then the embeddings from the root to the node
    level: int = 0
    cache: SlotCache | None = None  # of the prefix layer


class HydraDrafter(Drafter):
    """Sequentially dependent heads (section 3).

    State dict: `heads.{i}.path.{weight,bias}` (2H, (i + 2)H), `heads.{i}.blocks.{l}.linear.{weight,bias}`; own
    projections `projections.up.{i}.{weight,bias}`; the prefix layer `prefix.layer.*` with the base's names, and its
    `prefix.norm.*`.
    """

    config: HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        self.keeps_history = config.prefix_layer
        self.prefix = DecoderLayer(config.own_layer, ends_with_norm=True) if config.prefix_layer else None
        heads, hidden_size = config.num_draft_heads, config.width
        self.heads = nn.ModuleList(HydraHead(i, hidden_size, config) for i in range(heads))
        self.projections: Any = output_projections(config, self.choices, bias=True)

    def start(self, batch_size: int, capacity: int) -> HydraState:
        nothing = self.placed(torch.zeros(batch_size, self.config.width))
        cache = SlotCache(batch_size, 1, min(capacity, ROOM)) if self.prefix is not None else None
        return HydraState(nothing, nothing.unsqueeze(1), cache=cache)

    def observe(self, state: HydraState, features: Tensor, tokens: Tensor, lengths: Tensor) -> HydraState:
        if self.prefix is not None and state.cache is not None:
            features = self.prefix.over_verified(state.cache, self.placed(features), lengths)
        last = last_valid(state.features, features, lengths)
        return HydraState(last, last.unsqueeze(1), cache=state.cache)

    def expand(self, state: HydraState, tokens: Tensor, parents: Tensor) -> tuple[HydraState, Guesses]:
        above = state.paths.take_along_dim(parents.to(state.paths.device)[..., None], dim=1)
        paths = torch.cat([above, self.embed(tokens, like=above)], dim=-1)
        logits = self.head_logits(state.level, self.heads[state.level](paths))
        return HydraState(state.features, paths, state.level + 1, state.cache), Guesses(logits, self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        embeddings = self.embed(input_ids, like=features)
        states, path = [], self.prefix.over_text(features, attention_mask) if self.prefix is not None else features
        for i, head in enumerate(self.heads):
            path = torch.cat([path, embeddings.roll(-(i + 1), dims=1)], dim=-1)
            states.append(head(path))
        return states

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        if self.config.dropout:
            hidden = F.dropout(hidden, self.config.dropout, self.training)
        return self.base_logits(hidden) if self.config.share_lm_head else self.projections.up[head](hidden)


class HydraForCausalLM(DraftHeadPreTrainedModel):
    """A base with Hydra heads; `from_base(base, config=HydraConfig.plus_plus())` for Hydra++."""

    config_class = HydraConfig
    drafter_class = HydraDrafter
