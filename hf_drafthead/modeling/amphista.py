"""Amphista: heads that guess in parallel and look at each other while they do (Li et al., 2024; arXiv 2406.13170).

    (1)     h_t, E(x_{t+1}) -> stage 1 -> stage 2      causal, over the verified text, each with its own cache
                                  |          |
    (2)                        heads 1, 2  heads 3, 4  a residual MLP each
    (3, 4)                        + their positions
    (5)                        auto-embedding block    every head sees every other
                                  |    |    |    |
    (6)                        output projections

The equations are the paper's. What it leaves open is fixed here as the fields of `AmphistaConfig` say.

Shapes: B rows, A newly verified positions, T positions, N places to guess from, K heads, G stages, H hidden,
V vocabulary.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.slots import ROOM, SlotCache
from hf_drafthead.generation.state import last_valid
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import MAX_LAYERS, DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.layers import ParallelBlocks, output_projections
from hf_drafthead.modeling.medusa import MEDUSA_RECIPE, MedusaDrafter, MedusaState

# Li et al. 2024 (Amphista), section 4.1; its two weights are not given there
AMPHISTA_RECIPE: dict[str, Any] = {**MEDUSA_RECIPE, "head_decay": 1.0, "teacher_weight": 1.0, "num_train_epochs": 4}


class AmphistaConfig(DraftHeadConfig):
    """Amphista heads.

    Args:
        num_stages: staged adaptation layers; heads are dealt out to them evenly, the first ones to the first. 0 for
            none (tables 4, 5 and 10).
        use_sampled_token: let the stages read the token that follows each position (tables 4 and 5).
        num_auto_embedding_layers: layers of the auto-embedding block; 2 is Amphista-alpha, 0 is none (tables 4, 5
            and 9).
        use_head_positions: add a learned vector per head before that block (tables 4 and 5).
        num_layers: residual blocks in each head's MLP. The paper's MLP is d to d; here it is Medusa's block.
        layer_config: whose decoder layer the stages and the block are made of; None for the base's own kind (pre-norm,
            with its attention heads and MLP). Stages are causal with rotary positions; the block has neither.
        share_lm_head: project with the base's lm_head instead of one projection per head.
    """

    model_type = "drafthead_amphista"

    num_stages: int = 2
    use_sampled_token: bool = True
    num_auto_embedding_layers: int = 1
    use_head_positions: bool = True
    num_layers: int = 1
    layer_config: dict[str, Any] | PreTrainedConfig | None = None
    share_lm_head: bool = False

    @classmethod
    def alpha(cls, **fields: Any) -> "AmphistaConfig":
        """Amphista-alpha (appendix A.2.4, table 9): two layers in the auto-embedding block."""
        return cls(**{"num_auto_embedding_layers": 2, **fields})

    @property
    def family(self) -> str:
        return "amphista-alpha" if self.num_auto_embedding_layers > 1 else super().family

    def check(self) -> None:
        super().check()
        self._check_count("num_stages", 0)
        self._check_count("num_auto_embedding_layers", 0, MAX_LAYERS)
        if self.num_stages > self.num_draft_heads:
            raise ValueError(
                f"num_stages is {self.num_stages}, but num_draft_heads is {self.num_draft_heads}: a stage that no head "
                "reads is of no use, ask for as many stages as heads at most."
            )
        stages, layers = self.num_stages, self.num_auto_embedding_layers
        self._check_layer(f"num_stages is {stages} and num_auto_embedding_layers is {layers}", stages + layers > 0)


class AdaptationStage(nn.Module):
    """SAL(fc([x_t; e_{t+1}])), equation 1; without the sampled token SAL(fc(x_t)).

    fc starts as the identity on x_t, so that the base's lm_head is a sensible start for the heads' projections.
    """

    def __init__(self, config: AmphistaConfig) -> None:
        super().__init__()
        hidden_size = config.width
        self.fc = nn.Linear((2 if config.use_sampled_token else 1) * hidden_size, hidden_size)
        with torch.no_grad():
            self.fc.weight[:, :hidden_size] = torch.eye(hidden_size)
        self.adaptation = DecoderLayer(config.own_layer)

    def joined(self, x: Tensor, embeddings: Tensor | None) -> Tensor:
        """What the decoder layer reads (B, A, H)."""
        return self.fc(x if embeddings is None else torch.cat([x, embeddings], dim=-1))


class AmphistaDrafter(MedusaDrafter):
    """Staged adaptation, heads, auto-embedding block; guesses all levels at once, as Medusa does.

    State dict: `stages.{g}.fc.*` and `stages.{g}.adaptation.layer.*` (with the base's names),
    `blocks.{l}.{weight,bias}` (K, ...), `head_positions.weight` (K, H), `auto_embedding.{l}.layer.*`,
    `projections.up.{head}.weight`.
    """

    config: AmphistaConfig  # type: ignore[assignment]

    def __init__(self, config: AmphistaConfig) -> None:
        Drafter.__init__(self, config)
        heads, hidden_size = config.num_draft_heads, config.width
        self.keeps_history = config.num_stages > 0
        self.stages = nn.ModuleList(AdaptationStage(config) for _ in range(config.num_stages))
        self.blocks = nn.ModuleList(ParallelBlocks(heads, hidden_size) for _ in range(config.num_layers))
        depth = config.num_auto_embedding_layers
        self.auto_embedding = nn.ModuleList(DecoderLayer(config.own_layer) for _ in range(depth))
        with_positions = depth > 0 and config.use_head_positions
        positions = torch.zeros(heads, hidden_size)
        self.head_positions = nn.Embedding.from_pretrained(positions, freeze=False) if with_positions else None
        self.projections = output_projections(config, self.choices)
        groups = max(config.num_stages, 1)
        self._stage_of_head = [head * groups // heads for head in range(heads)]

    def start(self, batch_size: int, capacity: int) -> Any:
        groups, hidden_size = max(len(self.stages), 1), self.config.width
        caches = tuple(SlotCache(batch_size, 1, min(capacity, ROOM)) for _ in self.stages)
        return MedusaState(self.placed(torch.zeros(groups, batch_size, hidden_size)), caches=caches)

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        x = self.placed(features)
        embeddings = self.embed(tokens, like=x) if self.stages and self.config.use_sampled_token else None
        outputs = [] if self.stages else [x]
        for stage, cache in zip(cast("list[AdaptationStage]", self.stages), state.caches, strict=True):
            x = stage.adaptation.over_verified(cache, stage.joined(x, embeddings), lengths)
            outputs.append(x)
        last = [last_valid(previous, new, lengths) for previous, new in zip(state.features, outputs, strict=True)]
        return MedusaState(torch.stack(last), caches=state.caches)

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        x = features
        with_token = self.stages and self.config.use_sampled_token
        embeddings = self.embed(input_ids, like=x).roll(-1, dims=1) if with_token else None
        outputs = [] if self.stages else [x]
        for stage in cast("list[AdaptationStage]", self.stages):
            x = stage.adaptation.over_text(stage.joined(x, embeddings), attention_mask)
            outputs.append(x)
        hidden = self._side_by_side(torch.stack(outputs).flatten(1, 2))
        return [state.view_as(features) for state in hidden]

    def _side_by_side(self, x: Tensor) -> Tensor:
        """The stages' outputs (G, N, H) through every head's MLP and the block, equations 2 to 5: (K, N, H)."""
        x = torch.stack([x[stage] for stage in self._stage_of_head])  # a list as index is a copy from the host
        for block in self.blocks:
            x = block(x)
        if not self.auto_embedding:
            return x
        x = x.transpose(0, 1).contiguous()  # (N, K, H)
        if self.head_positions is not None:
            every_head = torch.arange(x.shape[1], device=x.device)
            x = x + self.head_positions(every_head)  # equation 4; read by its forward, for it may be offloaded
        for layer in cast("list[DecoderLayer]", self.auto_embedding):
            x = layer.without_order(x)
        return x.transpose(0, 1)


class AmphistaForCausalLM(DraftHeadPreTrainedModel):
    """A base with Amphista heads; `from_base(base, config=AmphistaConfig.alpha())` for Amphista-alpha."""

    config_class = AmphistaConfig
    drafter_class = AmphistaDrafter
