"""Medusa: every head guesses its own token from the base's last hidden state alone (Cai et al., 2024).

Shapes: B rows, T positions, K heads, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.layers import ParallelBlocks, output_projections

# Cai et al. 2024, section 2.2.1 and the published trainer; lengths and batch sizes depend on the user's memory and data
MEDUSA_RECIPE: dict[str, Any] = {
    "next_token_weight": 1.0,
    "head_decay": 0.8,
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "weight_decay": 0.0,
    "num_train_epochs": 2,
}
# section 2.2.2: the base learns at a quarter of the heads' rate
MEDUSA_JOINT_RECIPE: dict[str, Any] = {"learning_rate": 2e-3}


class MedusaConfig(DraftHeadConfig):
    """Medusa heads.

    Args:
        num_layers: residual blocks per head.
        share_lm_head: project with the base's lm_head instead of one projection per head.
    """

    model_type = "drafthead_medusa"

    num_layers: int = 1
    share_lm_head: bool = False


class MedusaState(NamedTuple):
    """What a row's guesses depend on: its last verified position, and how far the current tree has come."""

    features: Tensor  # (B, H); of Amphista each stage's output there (G, B, H), G at least 1
    level: int = 0
    guesses: Tensor | None = None  # of all heads: logits (K, B, V) if shared, else hidden (K, B, H)
    caches: tuple[SlotCache, ...] = ()  # of Amphista's stages


class MedusaDrafter(Drafter):
    """K heads side by side (section 2.1.1): p_i = softmax(P_i block^n(h)), head i for the token i + 2 after h's own.

    State dict: `blocks.{layer}.weight` (K, H, H) and `.bias` (K, H); own projections `projections.up.{head}.weight`.
    """

    config: MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        heads, hidden_size = config.num_draft_heads, config.width
        self.blocks = nn.ModuleList(ParallelBlocks(heads, hidden_size) for _ in range(config.num_layers))
        self.projections: Any = output_projections(config, self.choices)

    def start(self, batch_size: int, capacity: int) -> Any:
        return MedusaState(self.placed(torch.zeros(batch_size, self.config.width)))

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        return MedusaState(last_valid(state.features, features, lengths))

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Any, Guesses]:
        level, guesses, shared = state.level, state.guesses, self.config.share_lm_head
        if guesses is None:
            guesses = self._side_by_side(state.features)  # (K, B, H)
            # One product reads a shared lm_head once for all heads; own projections wait until their level is asked.
            guesses = self.base_logits(guesses) if shared else guesses
        guess = guesses[level] if shared else self.projections.up[level](guesses[level])
        after = MedusaState(state.features, level + 1, guesses, state.caches)  # made anew: see `generation.step.Stages`
        return after, Guesses(guess.unsqueeze(1), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        hidden = self._side_by_side(features.flatten(0, 1))
        return [state.view_as(features) for state in hidden]

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        return self.base_logits(hidden) if self.config.share_lm_head else self.projections.up[head](hidden)

    def _side_by_side(self, x: Tensor) -> Tensor:
        """(N, H) through every head's blocks: (K, N, H)."""
        x = x.expand(self.config.num_draft_heads, *x.shape)
        for block in self.blocks:
            x = block(x)
        return x


class MedusaForCausalLM(DraftHeadPreTrainedModel):
    """A base with Medusa heads."""

    config_class = MedusaConfig
    drafter_class = MedusaDrafter
