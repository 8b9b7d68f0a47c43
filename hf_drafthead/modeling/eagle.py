"""EAGLE: one decoder layer guesses the base's next hidden state, level after level (Li et al., 2024; version 1).

    verified       h_t, E(x_{t+1})  ->  fc  ->  layer  ->  y, a guess of h_{t+1}  ->  lm_head  ->  x_{t+2}
    tree           y,   E(guess)    ->  fc  ->  layer  ->  ...

The layer sees the verified positions and, in a tree, the node's ancestors. Embeddings and lm_head are the base's.

Shapes: B rows, A newly verified positions, T positions, n nodes of a level, M nodes of the tree so far,
F feature layers, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import Guesses, last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer, next_level
from hf_drafthead.modeling.drafter import Drafter

# Li et al. 2024 (EAGLE) and the published trainer; the noise is its 0.2 * 512 / T at T = 2048
EAGLE_RECIPE: dict[str, Any] = {
    "next_token_weight": 0.0,
    "teacher_weight": 0.1,
    "feature_weight": 1.0,
    "feature_noise": 0.05,
    "learning_rate": 3e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2000,
    "adam_beta2": 0.95,
    "max_grad_norm": 0.0,  # clipped by value instead
    "max_grad_value": 0.5,
    "num_train_epochs": 20,
}


class EagleConfig(DraftHeadConfig):
    """An EAGLE head. There is one, and it guesses as deep as a tree is: num_draft_heads is 1.

    Args:
        fc_bias: give the joining layer a bias, as most published weights have.
        layer_config: whose decoder layer it is; None for the base's own kind.
    """

    model_type = "drafthead_eagle"
    any_depth = True

    num_draft_heads: int = 1
    fc_bias: bool = False
    layer_config: dict[str, Any] | PreTrainedConfig | None = None

    def check(self) -> None:
        super().check()
        self._check_single_head("EAGLE has 1 head that guesses")
        self._check_layer("an EAGLE head is a decoder layer", True)


class EagleState(NamedTuple):
    """The verified text, and the tree level that was guessed last."""

    cache: SlotCache
    last: Tensor  # (B, H) the layer's output at each row's last verified position
    level: Tensor | None = None  # (B, n, H) the layer's output at the nodes that the next level hangs on
    ancestors: Tensor | None = None  # (B, n, M) which nodes of the tree so far these see, the last level first
    depth: int = 0


class EagleDrafter(Drafter):
    """One layer that runs on its own guesses.

    State dict: `fc.{weight,bias}` (H, 2H), embedding first; `body.layer.*` with the base's names, without the layer's
    input norm.
    """

    config: EagleConfig
    keeps_history = True
    layers = 1
    body: DecoderLayer
    reduce: Callable[[Tensor], Tensor] = nn.Identity()  # what the layer reads (..., H) of features (..., F*H)
    feed_back: Callable[[Tensor], Tensor] = nn.Identity()  # and of its own output in their place

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(2 * config.width, config.width, bias=config.fc_bias)
        self.body = DecoderLayer(config.own_layer, input_norm=False)

    def start(self, batch_size: int, capacity: int) -> EagleState:
        nothing = self.placed(torch.zeros(batch_size, self.fc.out_features))
        return EagleState(SlotCache(batch_size, self.layers, min(capacity, ROOM)), nothing)

    def observe(self, state: EagleState, features: Tensor, tokens: Tensor, lengths: Tensor) -> EagleState:
        x = self._joined(self.reduce(self.placed(features)), tokens)
        out = self.body.over_verified(state.cache, x, lengths)
        return EagleState(state.cache, last_valid(state.last, out, lengths))

    def expand(self, state: EagleState, tokens: Tensor, parents: Tensor) -> tuple[EagleState, Guesses]:
        out, ancestors = state.last.unsqueeze(1), None  # the root's own pair was observed already
        if state.level is not None:
            parents = parents.to(state.last.device)[..., None]
            ancestors = next_level(state.ancestors, parents)
            x = self._joined(self.feed_back(state.level.take_along_dim(parents, dim=1)), tokens)
            out = self.body.over_nodes(state.cache, x, state.depth, ancestors)
        state = EagleState(state.cache, state.last, out, ancestors, state.depth + 1)
        return state, Guesses(self.head_logits(0, out), self.draft_tokens)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """One entry: the guess of the base's next hidden state at every position."""
        x = self._joined(self.reduce(features), input_ids.roll(-1, dims=1))
        return [self.body.over_text(x, attention_mask)]

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        return self.base_logits(hidden)

    def _joined(self, features: Tensor, tokens: Tensor) -> Tensor:
        return self.fc(torch.cat([self.embed(tokens, like=features), features], dim=-1))


class EagleForCausalLM(DraftHeadPreTrainedModel):
    """A base with an EAGLE head."""

    config_class = EagleConfig
    drafter_class = EagleDrafter
