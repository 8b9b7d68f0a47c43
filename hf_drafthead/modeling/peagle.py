"""P-EAGLE: EAGLE-3 whose guesses of all depths come from one pass (Hui et al., 2026).

    pair            [E(x_{t+1}); fc(s_1, ..., s_F)]      as in EAGLE-3, at position t
    depth d >= 1    [E(mask); fc(m)]                     at position t + d; m, learned, in the place of the states

What is behind a pair sees the pairs up to it and the depths before its own, and nothing of what was guessed: a tree of
such guesses is Medusa's. Accepted tokens enter as pairs of their own; the masks' keys are dropped.

Shapes: B rows, T positions, M anchors, E elements behind them, K depths, n nodes of a tree level, F feature layers, H
hidden of the drafter, D draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.block_layers import ContextKeys
from hf_drafthead.modeling.decoder_layer import ChainKeys
from hf_drafthead.modeling.eagle import EagleState
from hf_drafthead.modeling.eagle3 import EAGLE3_RECIPE, Eagle3Config, Eagle3Drafter

ANCHORS_AT_ONCE = 128  # whose elements are computed together over a text
# of depth d as many of the anchors as r ** d are drawn, and never fewer than the second
RATIO, LEAST = 0.7, 0.2
GOLDEN = 0.6180339887498949  # its multiples lie evenly between whole numbers, however many they are
# speculators' trainer: the base's distribution, over all elements alike
PEAGLE_RECIPE: dict[str, Any] = {**EAGLE3_RECIPE, "head_decay": 1.0, "heads_weight": 1.0, "num_train_epochs": 10}


class PEagleConfig(Eagle3Config):
    """A P-EAGLE head; what is not named here is as in EAGLE-3.

    Args:
        num_draft_heads: K, depths that are guessed in one pass, and the deepest level of a tree.
        num_layers: decoder layers, four in the published ones.
        mask_token_id: whose embedding is read from depth 1 on. None: the base's last token.
    """

    model_type = "drafthead_peagle"
    any_depth = False

    num_draft_heads: int = 7
    num_layers: int = 4
    mask_token_id: int | None = None

    def check(self) -> None:
        """Fill in what is to be as published, once the base is known, and refuse what cannot be built."""
        super().check()
        if self.norm_output:
            raise ValueError("norm_output is True: nothing is gone on from in P-EAGLE, leave it out.")
        self._check_mask_token()


class PEagleDrafter(Eagle3Drafter):
    """All depths in one causal pass, whose logits (B, K, D) are the `level` of its states.

    State dict: EAGLE-3's, and `mask_hidden` (F*H of the base).
    """

    config: PEagleConfig
    starts_at_anchors = True

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(0.02 * torch.randn(self.fc.in_features))

    def expand(self, state: EagleState, tokens: Tensor, parents: Tensor) -> tuple[EagleState, Guesses]:
        logits = state.level
        if logits is None:
            order = torch.arange(self.config.num_draft_heads - 1, device=state.last.device)
            out = state.last[:, None]
            if len(order):
                state.cache.place(len(order))
                x = self._masks(state.last).expand(len(tokens), len(order), -1)
                seen = (order <= order[:, None])[None]
                out = torch.cat([out, self.body._behind(state.cache, x, order[None], seen)], dim=1)
            logits = self.head_logits(0, out)
        guesses = Guesses(logits[:, state.depth, None], self.draft_tokens)
        return EagleState(state.cache, state.last, logits, depth=state.depth + 1), guesses

    def head_states(
        self,
        features: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> list[Tensor]:
        """One (B, M, H) per depth, behind the positions `anchors` (B, M), by default every one.

        In training depth d has those anchors alone that `drawn` names.
        """
        chains, pair = ChainKeys({}), self._joined(self.reduce(features), input_ids.roll(-1, dims=1))
        text = self.body.over_chains(chains, pair, 0, attention_mask)
        keys = ContextKeys([chains.taken[layer, 0] for layer in range(self.layers)])
        everywhere = torch.arange(text.shape[1], device=text.device).expand(len(text), -1)
        drawn = (
            [[*range(text.shape[1])]] * self.config.num_draft_heads if anchors is None else self.drawn(anchors.shape[1])
        )
        anchors = everywhere if anchors is None else anchors.to(text.device)
        states: list[list[Tensor]] = [[text.gather(1, anchors[..., None].expand(-1, -1, text.shape[2]))]]
        states += [[] for _ in drawn[1:]]
        for first in range(0, anchors.shape[1], ANCHORS_AT_ONCE):
            some = [[at for at in which if first <= at < first + ANCHORS_AT_ONCE] for which in drawn[1:]]
            if not any(some):
                continue
            out = self._behind(keys, anchors, some, attention_mask, pair)
            for of_depth, part in zip(states[1:], out.split([len(which) for which in some], dim=1)):
                of_depth.append(part)
        return [torch.cat(parts, dim=1) for parts in states]

    def drawn(self, anchors: int) -> list[list[int]]:
        """Of each depth, which of so many anchors count in training: fewer the deeper, each among those before."""
        order = sorted(range(anchors), key=lambda place: place * GOLDEN % 1)
        counts = [int((anchors - depth) * max(RATIO**depth, LEAST)) for depth in range(self.config.num_draft_heads)]
        return [sorted(order[: max(count, 1)] if self.training else order) for count in counts]

    def _behind(
        self, keys: ContextKeys, anchors: Tensor, some: list[list[int]], attention_mask: Tensor | None, like: Tensor
    ) -> Tensor:
        """Outputs (B, E, H) of depths behind some of the anchors, one depth behind the other."""
        at = torch.tensor(sum(some, []), device=like.device)
        depths = torch.tensor([1 + depth for depth, which in enumerate(some) for _ in which], device=like.device)
        text, ends = torch.arange(like.shape[1], device=like.device), anchors[:, at]  # (B, E)
        real = None if attention_mask is None else attention_mask.to(like.device).bool()
        places = text[None] if real is None else (real.cumsum(1) - 1).clamp(min=0)
        places = places.expand(len(like), -1)
        positions = places.gather(1, ends) + depths
        seen = text <= ends[..., None]
        chain = (at == at[:, None]) & (depths <= depths[:, None])
        if real is not None:
            seen = seen & real[:, None]
        if (window := self.body.window) is not None:
            seen = seen & (positions[..., None] - places[:, None] < window)
            chain = chain & (depths[:, None] - depths < window)
        mask = self.body._additive(torch.cat([seen, chain.expand(len(seen), -1, -1)], dim=2), like)
        return self.body._run(self._masks(like).expand(len(like), len(at), -1), positions, mask, keys)  # type: ignore

    def _masks(self, like: Tensor) -> Tensor:
        """What stands at every depth but the first (1, 1, 2H)."""
        tokens = torch.full((1, 1), self.config.mask_token_id or 0, device=like.device)
        return self._joined(self.reduce(self.mask_hidden[None, None].to(like)), tokens)


class PEagleForCausalLM(DraftHeadPreTrainedModel):
    """A base with a P-EAGLE head."""

    config_class = PEagleConfig
    drafter_class = PEagleDrafter
