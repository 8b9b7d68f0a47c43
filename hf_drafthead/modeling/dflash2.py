"""DFlash 2: DFlash's block, whose layers look at the slots before, and a choice among the best guesses of each slot.

    layers     out = h + conv_1(f(conv_0(x))), x = norm(h), f attention or MLP; kernels over this and earlier slots of
               the block, a constant part and one that x makes
    selector   of each slot the k best tokens; score(c) = score of the slot + <A(token before) * W h, B(c)>

The score of a token depends on the one before alone, so that the k by k pairs of neighbouring slots are a lattice.
Engines walk one greedy path through it; here its best paths are the draft tree.

Shapes: B rows, M anchors, W slots of a block, K of them that are read, n nodes of a tree level, k candidates, G groups
of channels, H hidden of the drafter, R rank, V vocabulary, D draft vocabulary.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.dflash import DFlashConfig, DFlashDrafter


class DFlash2Config(DFlashConfig):
    """A block drafter with convolutions over its slots, and a selector; what is not named here is as in DFlash.

    Args:
        window_per_slot: as in DFlash; the published ones' windows count from every slot.
        conv_kernel_size: slots that a kernel sees, the slot itself among them.
        conv_group_size: channels that share what a slot adds to the kernels; it divides the hidden size.
        selector_rank: R, of the pairs' scores.
        selector_top_k: k, candidates of a slot.
    """

    model_type = "drafthead_dflash2"

    window_per_slot: bool = True
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    def check(self) -> None:
        """Refuse what cannot be built."""
        super().check()
        for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
            self._check_count(name, 1)
        if self.markov_rank or self.confidence_head:
            raise ValueError(
                f"markov_rank is {self.markov_rank} and confidence_head {self.confidence_head}: DFlash 2 has neither, "
                "its selector says what the token before says; leave them out, or use DFlash."
            )
        if self.known_tokens is None:
            return
        width, tokens = self.own_layer.hidden_size, min(self.draft_vocab_size or self.known_tokens, self.known_tokens)
        if width % self.conv_group_size:
            raise ValueError(
                f"conv_group_size is {self.conv_group_size}, and the layers are {width} wide: give a number that "
                "divides this."
            )
        if self.selector_top_k > tokens:
            raise ValueError(f"selector_top_k is {self.selector_top_k}: the drafter chooses among {tokens} tokens.")


class SlotConvolution(nn.Module):
    """Kernels before and behind a sublayer, over a slot of a block and those before it; the identity at first."""

    def __init__(self, width: int, taps: int, group: int) -> None:
        super().__init__()
        self.group = group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1.0
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, x: Tensor) -> Tensor:
        """(2, taps, B, W, H) of the sublayer's input (B, W, H)."""
        added = self.kernel_projection(x).unflatten(-1, (*self.base_kernel.shape[:2], -1))  # (B, W, 2, taps, G)
        added = added.movedim((-3, -2), (0, 1)).repeat_interleave(self.group, dim=-1)
        return self.base_kernel[:, :, None, None] + added

    @staticmethod
    def over_slots(kernels: Tensor, y: Tensor) -> Tensor:
        """What kernels (taps, B, W, H) make of slots (B, W, H), in front of which there is nothing."""
        return sum((kernel * F.pad(y, (0, 0, tap, 0))[:, : y.shape[1]] for tap, kernel in enumerate(kernels)), 0.0 * y)


class ConvolvedLayer(nn.Module):
    """A decoder layer with convolutions around its attention and its MLP, made of an ordinary one."""

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    def __init__(self, layer: nn.Module, config: DFlash2Config) -> None:
        super().__init__()
        for name, part in layer.named_children():
            setattr(self, name, part)
        how = config.own_layer.hidden_size, config.conv_kernel_size, config.conv_group_size
        self.attention_conv, self.mlp_conv = SlotConvolution(*how), SlotConvolution(*how)
        self.block_size = config.block_size

    def forward(self, x: Tensor, position_ids: Tensor, **attention: Any) -> Tensor:
        """(B, M W, H), blocks one behind the other."""
        x = self._around(self.attention_conv, self.input_layernorm(x), lambda y: self.self_attn(y, **attention)[0], x)
        return self._around(self.mlp_conv, self.post_attention_layernorm(x), self.mlp, x)

    def _around(self, convolution: Any, x: Tensor, sublayer: Any, residual: Tensor) -> Tensor:
        blocks = x.unflatten(1, (-1, self.block_size)).flatten(0, 1)
        before, behind = convolution.kernels(blocks)
        y = sublayer(convolution.over_slots(before, blocks).view_as(x))
        return residual + convolution.over_slots(behind, y.reshape(blocks.shape)).view_as(x)


class Selector(nn.Module):
    """What a token says of the one behind it, by the state of the slot: pairs' scores of low rank, none at first."""

    def __init__(self, tokens: int, rank: int, width: int) -> None:
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = nn.Embedding(tokens, rank), nn.Embedding(tokens, rank)
        self.hidden_projection = nn.Linear(width, rank, bias=False)
        for weight in (self.predecessor_codebook.weight, self.hidden_projection.weight):
            nn.init.normal_(weight, std=0.02)
        nn.init.zeros_(self.successor_codebook.weight)

    def forward(self, before: Tensor, hidden: Tensor) -> Tensor:
        """What scores are made of (..., R) behind tokens (...) in slots with states (..., H)."""
        return self.predecessor_codebook(before.to(hidden.device)) * self.hidden_projection(hidden)


class DFlash2State(NamedTuple):
    """The verified context, and the block behind it once a tree has begun.

    hidden: (B, K, H) of the slots that are read; scores, candidates: (B, K, k) of the best tokens, and which they are
    among the D; inside: (B, K, 1) the log-probability that the slot has one of these; level: how many were guessed.
    """

    cache: SlotCache
    hidden: Tensor | None = None
    scores: Tensor | None = None
    candidates: Tensor | None = None
    inside: Tensor | None = None
    level: int = 0


class DFlash2Drafter(DFlashDrafter):
    """A block in one pass, and a lattice of its candidates.

    State dict: DFlash's, with `body.layers.{i}.{attention_conv,mlp_conv}.base_kernel` (2, taps, H) and
    `.kernel_projection.weight` (2 taps G, H), `selector.{predecessor,successor}_codebook.weight` (V, R) and
    `selector.hidden_projection.weight` (R, H).
    """

    config: DFlash2Config
    state_class = DFlash2State

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__(config)
        self.body.layers = nn.ModuleList(ConvolvedLayer(layer, config) for layer in self.body.layers)
        tokens = config.get_text_config().vocab_size
        self.selector = Selector(tokens, config.selector_rank, config.own_layer.hidden_size)

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Any, Guesses]:
        """Scores of the candidates alone: other tokens are never guessed."""
        if state.hidden is None:
            hidden = self._slots(state.cache, tokens)
            logits = self._scores(hidden)
            scores, candidates = logits.topk(self.config.selector_top_k)
            inside = scores.logsumexp(-1, keepdim=True) - logits.logsumexp(-1, keepdim=True)
            state = DFlash2State(state.cache, hidden, scores, candidates, inside)
        level, count = state.level, tokens.shape[1]
        pair = self.selector(tokens, state.hidden[:, level, None].expand(-1, count, -1))
        candidates = state.candidates[:, level, None].expand(-1, count, -1)
        scores = state.scores[:, level, None] + self._of_pairs(pair, candidates)
        guesses = Guesses(self._among_all(scores, candidates), self.draft_tokens, state.inside[:, level, None])
        after = DFlash2State(state.cache, state.hidden, state.scores, state.candidates, state.inside, level + 1)
        return after, guesses  # made anew: see `generation.step.Stages`

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        scores, candidates = self.unary_logits(head, hidden).topk(self.config.selector_top_k)
        return self._among_all(scores + self._of_pairs(self._pair(hidden), candidates), candidates)

    def unary_logits(self, head: int, hidden: Tensor) -> Tensor:
        return self._scores(hidden[..., : self.config.own_layer.hidden_size])

    def choice_loss(self, hidden: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (M,) of the choice among the candidates, the target taking the weakest one's place."""
        candidates = logits.detach().topk(self.config.selector_top_k).indices
        places = targets.clamp(min=0)[:, None]
        missing = ~(candidates == places).any(1, keepdim=True)
        candidates = torch.cat([candidates[:, :-1], places.where(missing, candidates[:, -1:])], dim=1)
        scores = logits.gather(1, candidates) + self._of_pairs(self._pair(hidden), candidates)
        right = (candidates == places).int().argmax(1)
        return F.cross_entropy(scores.float(), right, reduction="none") * (targets >= 0)

    def _slot(self, hidden: Tensor, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The state (..., H + R) of a slot behind tokens (...)."""
        return torch.cat([hidden, self.selector(tokens, hidden)], -1), memory

    def _pair(self, state: Tensor) -> Tensor:
        return state[..., self.config.own_layer.hidden_size :]

    def _of_pairs(self, pair: Tensor, candidates: Tensor) -> Tensor:
        """What the token before adds (..., k) to the scores of candidates (..., k) among the D."""
        tokens = candidates if self.draft_tokens is None else self.draft_tokens.to(candidates.device)[candidates]
        return (self.selector.successor_codebook(tokens) @ pair[..., None])[..., 0]

    def _among_all(self, scores: Tensor, candidates: Tensor) -> Tensor:
        """Scores (..., D) of all tokens, -inf where one is no candidate."""
        return scores.new_full((*scores.shape[:-1], self.choices), -torch.inf).scatter(-1, candidates, scores)


class DFlash2ForCausalLM(DraftHeadPreTrainedModel):
    """A base with a DFlash 2 drafter."""

    config_class = DFlash2Config
    drafter_class = DFlash2Drafter
