"""DFlash: one pass of a small transformer fills a block of masks behind the newest token (Chen et al., 2026).

    context    c_t = norm(fc(s_1, ..., s_F))             s_i: hidden states of the base at t, without norm
    block      E(x_P), E(mask), ..., E(mask)             at positions P ...; x_P, the anchor, is the tree's root
    layers     queries of the block; keys and values of [context; block], by the same projections, which c_t reaches
               unnormed and unchanged in every layer; the context's are kept, the block's are dropped
    scores     lm_head(norm(slot))                       slot j guesses x_{P+j}, or x_{P+j+1} with sample_from_anchor

The slots do not know of each other's tokens, so that a tree of their guesses is Medusa's. DSpark (Cheng et al., 2026)
adds a bias of the token before, which makes the scores depend on the parent, and a head that foretells acceptance.

Shapes: B rows, A newly verified positions, T positions, M anchors, W slots of a block, K of them that are read, n nodes
of a tree level, F feature layers, H hidden of the drafter, R rank, V vocabulary, D draft vocabulary.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.configuration_utils import PreTrainedConfig

from hf_drafthead.bases.slots import ROOM, SLOTS, SlotCache
from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.block_layers import BlockLayers
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import windows_of
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.modeling.files import shortened
from hf_drafthead.modeling.layers import copy_if_as_wide, copy_layer, is_rms_norm, llama_like

FEATURES = 5  # hidden states of the base that are read, as published
SLOTS_AT_ONCE = 1024  # of blocks that are computed together over a text
TIMES = "scalar_embed_scale"  # by which Gemma's embeddings multiply the rows of their table
MARKOV_HEADS = ("vanilla", "gated", "rnn")
# Chen et al. 2026 and the published trainer: AdamW 6e-4, warm-up 4 %, slot j counts exp(-j / 4) in blocks of 8
DFLASH_RECIPE: dict[str, Any] = {
    "next_token_weight": 1.0,
    "head_decay": 0.7788,
    "learning_rate": 6e-4,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.04,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "num_train_epochs": 6,
}
# Cheng et al. 2026 and the published trainer: 0.1 cross-entropy + 0.9 L1, and the acceptance that is foretold
DSPARK_RECIPE: dict[str, Any] = {
    **DFLASH_RECIPE,
    "next_token_weight": 0.1,
    "distance_weight": 0.9,
    "num_train_epochs": 10,
}


class DFlashConfig(DraftHeadConfig):
    """A block drafter; with a Markov head it is DSpark's.

    Args:
        num_draft_heads: K, tokens that a block guesses: slots that are read.
        feature_layers: hidden states of the base that are read: i is the input of layer i (0: the embeddings), without
            norm. None: five, from the output of the second layer to that of the third last, as published.
        num_layers: decoder layers.
        layer_config: the decoder layers: sizes, rotary positions, `sliding_window` and `layer_types`. Their hidden size
            may differ from the base's. None: Qwen3 layers of the base's sizes.
        sample_from_anchor: the anchor's slot is read too: slot j guesses the token after position j of the block.
        mask_token_id: whose embedding stands in all slots but the anchor's. None: the base's last token.
        causal_layers: numbers of the layers whose slots see only those before them, not the whole block (JetSpec: all).
        window_per_slot: the window of sliding layers counts from every slot (z-lab), not from the anchor (speculators).
        input_embedding_scale: of the block's embeddings, by which rows of the base's table are multiplied; None for
            embeddings as the base makes them.
        output_multiplier: of what the lm_head makes of the slots; None for logits as the base makes them.
        final_logit_softcapping: c, for c tanh(logits / c) of what is multiplied; None for none.
        own_embeddings: embeddings of its own in the place of the base's; needed where the hidden sizes differ.
        share_lm_head: project with the base's lm_head, where the hidden sizes are the same.
        markov_rank: R, of the bias that the token before gives to the scores; 0 for none.
        markov_head_type: "vanilla", "gated" (by the slot's state) or "rnn" (of all tokens of the path).
        confidence_head: foretell how likely a slot's guess is accepted.
        confidence_with_markov: which it does from the token before, too.
        confidence_threshold: below a node where that is less likely nothing is guessed: a dynamic tree grows elsewhere.
    """

    model_type = "drafthead_dflash"

    num_draft_heads: int = 7
    feature_layers: list[int] | tuple[int, ...] | None = None
    num_layers: int = 5
    layer_config: dict[str, Any] | PreTrainedConfig | None = None
    sample_from_anchor: bool = False
    mask_token_id: int | None = None
    causal_layers: list[int] | tuple[int, ...] = ()
    window_per_slot: bool = False
    input_embedding_scale: float | None = None
    output_multiplier: float | None = None
    final_logit_softcapping: float | None = None
    own_embeddings: bool = False
    share_lm_head: bool = True
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    confidence_head: bool = False
    confidence_with_markov: bool = True
    confidence_threshold: float | None = None

    @classmethod
    def dspark(cls, **fields: Any) -> "DFlashConfig":
        """DSpark as published: a Markov head of rank 256, a confidence head, and the anchor's slot is read."""
        return cls(**{"markov_rank": 256, "confidence_head": True, "sample_from_anchor": True, **fields})

    @property
    def family(self) -> str:
        return "dspark" if self.markov_rank else super().family

    @property
    def block_size(self) -> int:
        """W."""
        return self.num_draft_heads + (not self.sample_from_anchor)

    @property
    def windows(self) -> list[int | None]:
        """Of each layer, how far before the anchor its slots see; None for all."""
        return windows_of(self.own_layer, self.num_layers)

    def check(self) -> None:
        """Fill in what is to be as published, once the base is known, and refuse what cannot be built."""
        super().check()
        if self.block_size > SLOTS:
            raise ValueError(
                f"num_draft_heads is {self.num_draft_heads}, a block of {self.block_size}: expected at most {SLOTS}."
            )
        self._check_count("markov_rank", 0)
        if self.markov_head_type not in MARKOV_HEADS:
            kinds = ", ".join(map(repr, MARKOV_HEADS))
            raise ValueError(f"markov_head_type is {shortened.repr(self.markov_head_type)}: expected one of {kinds}.")
        threshold = self.confidence_threshold
        if threshold is not None and not (self.confidence_head and type(threshold) is float and 0 <= threshold <= 1):
            raise ValueError(
                f"confidence_threshold is {shortened.repr(threshold)}: expected a float from 0 to 1, and "
                "confidence_head to be True."
            )
        for name in ("input_embedding_scale", "output_multiplier", "final_logit_softcapping"):
            value = getattr(self, name)
            if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
                raise ValueError(f"{name} is {shortened.repr(value)}: expected a number above 0, or None.")
        causal = self.causal_layers
        layers = range(self.num_layers)
        if not isinstance(causal, (list, tuple)) or not all(type(item) is int and item in layers for item in causal):
            raise ValueError(
                f"causal_layers is {shortened.repr(causal)}: expected a list of layers from 0 to {self.num_layers - 1}."
            )
        self.causal_layers = sorted(set(causal))
        if wrong := [
            window for window in self.windows if window is not None and not (type(window) is int and window > 0)
        ]:
            raise ValueError(
                f"layer_config has sliding_window {shortened.repr(wrong[0])}: expected a whole number of at least 1."
            )
        if isinstance(self.base_config, PreTrainedConfig):
            self._check_on_base()

    def _check_on_base(self) -> None:
        text = self.get_text_config()
        self._check_mask_token()
        if self.layer_config is None:
            self.layer_config = llama_like(text, self.num_layers, self.width, Qwen3Config)
        self._check_layer("a block drafter is made of decoder layers", True, same_width=False)
        self._check_layer_width()
        layers = text.num_hidden_layers
        published = published_features(layers)
        self.feature_layers = self._checked_features("a block drafter", published, layers)


def published_features(layers: int, count: int = FEATURES) -> list[int]:
    """The inputs of which of so many layers are read by default.

    >>> published_features(36)
    [2, 10, 18, 26, 34]
    """
    first, last = (1, layers - 3) if layers > 3 else (0, 0)
    outputs = [layers // 2] if count == 1 else [round(first + i * (last - first) / (count - 1)) for i in range(count)]
    return sorted({min(output + 1, layers - 1) for output in outputs})


class MarkovHead(nn.Module):
    """What the token before says of the next one: a bias W2 f(W1 x) of the scores, of low rank."""

    def __init__(self, kind: str, tokens: int, rank: int, width: int, choices: int) -> None:
        super().__init__()
        self.w1 = nn.Embedding(tokens, rank)
        self.w2 = nn.Linear(rank, choices, bias=False)
        nn.init.zeros_(self.w2.weight)
        self.gate = nn.Linear(width + rank, rank) if kind == "gated" else None
        self.joint = nn.Linear(width + 2 * rank, 3 * rank) if kind == "rnn" else None

    def forward(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What W2 is applied to (..., R) by W1 of the tokens before (..., R), and the memory (..., R) after it."""
        if self.gate is not None:
            return self.gate(torch.cat([hidden, before], -1)).sigmoid() * before, memory
        if self.joint is None:
            return before, memory
        gate, new, out = self.joint(torch.cat([memory, before, hidden], -1)).chunk(3, -1)
        gate = gate.sigmoid()
        return out.tanh(), gate * memory + (1 - gate) * new.tanh()


class DFlashState(NamedTuple):
    """The verified context, and the block behind it once a tree has begun.

    hidden, logits: (B, K, H) and (B, K, D) of the slots that are read; memory: (B, n, R) of the nodes of the last
    level; level: how many were guessed.
    """

    cache: SlotCache
    hidden: Tensor | None = None
    logits: Tensor | None = None
    memory: Tensor | None = None
    level: int = 0


class DFlashDrafter(Drafter):
    """A block in one pass.

    State dict: `fc.weight` (H, F*H of the base), `hidden_norm.weight`, `norm.weight` (H); `body.layers.{i}.*` with
    Qwen3's names; where D is less than V, `draft_tokens` (D,). By variant: `lm_head.weight` (D, H),
    `embed_tokens.weight` (V, H), `markov.{w1,w2,gate,joint}.*` (w1 (V, R), w2 (D, R)), `confidence.{weight,bias}`.
    """

    config: DFlashConfig
    state_class: Any = DFlashState
    keeps_history = True
    starts_at_anchors = True
    needs_range = True

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        text, width, rank = config.get_text_config(), config.own_layer.hidden_size, config.markov_rank
        self.reads = tuple(config.feature_layers or ())
        eps = getattr(config.own_layer, "rms_norm_eps", None) or 1e-6
        self.fc = nn.Linear(len(self.reads) * text.hidden_size, width, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        causal = [layer in config.causal_layers for layer in range(config.num_layers)]
        self.body = BlockLayers(config.own_layer, config.windows, causal, config.window_per_slot)
        if not config.share_lm_head:
            self.lm_head = nn.Linear(width, self.choices, bias=False)
        if config.own_embeddings:
            self.embed_tokens = nn.Embedding(text.vocab_size, width)
        markov = config.markov_head_type, text.vocab_size, rank, width, self.choices
        self.markov = MarkovHead(*markov) if rank else None
        with_token = rank if config.confidence_with_markov else 0
        self.confidence = nn.Linear(width + with_token, 1) if config.confidence_head else None

    def copy_from_base(self) -> None:
        """Start as the base's last layers, behind its last feature alone, as far as they have the same parts and sizes.

        Of norms that multiply by something else than their weight, and of layers with such norms, nothing is copied.
        """
        super().copy_from_base()
        decoder, wider = self.base.get_decoder(), self.fc.in_features - self.fc.out_features
        if is_rms_norm(final := getattr(decoder, "norm", None)):
            copy_if_as_wide(self.norm.weight, final.weight)
        layers = list(getattr(decoder, "layers", ()))[-len(self.body.layers) :]
        copied = [copy_layer(draft_layer, base_layer) for draft_layer, base_layer in zip(self.body.layers, layers)]
        if not any(copied):
            return
        with torch.no_grad():
            self.fc.weight.zero_().diagonal(wider).fill_(1.0)
        if is_rms_norm(first := getattr(layers[-1], "input_layernorm", None)):
            copy_if_as_wide(self.hidden_norm.weight, first.weight)

    def start(self, batch_size: int, capacity: int) -> Any:
        return self.state_class(SlotCache(batch_size, self.config.num_layers, min(capacity, ROOM)))

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        self.body.remember(state.cache, self._context(self.placed(features)), lengths)
        return self.state_class(state.cache)

    def expand(self, state: DFlashState, tokens: Tensor, parents: Tensor) -> tuple[DFlashState, Guesses]:
        config, level = self.config, state.level
        hidden, logits, memory = state.hidden, state.logits, state.memory
        if hidden is None or logits is None:
            hidden = self._slots(state.cache, tokens)
            logits = self._scores(hidden)
        if memory is not None:
            memory = memory.take_along_dim(parents.to(memory.device)[..., None], dim=1)
        slot = hidden[:, level, None].expand(-1, 1 if self.markov is None else tokens.shape[1], -1)
        slot, memory = self._slot(slot, tokens, memory)
        scores = logits[:, level, None] + self._bias(slot)
        if config.confidence_threshold is not None:  # of no number no guess is taken
            sure = slot[..., -1:].sigmoid() >= config.confidence_threshold
            scores = scores.masked_fill(~sure, -torch.inf)
        foretold = None if self.confidence is None else slot[..., -1:]
        guesses = Guesses(scores, self.draft_tokens, sure=foretold)
        return DFlashState(state.cache, hidden, logits, memory, level + 1), guesses

    def _slots(self, cache: SlotCache, roots: Tensor) -> Tensor:
        """States (B, K, H) of the slots that are read, of blocks behind a context."""
        weight = self.fc.weight  # where it is offloaded, what the layers remember is where they compute
        block = self._blocks(roots, like=cache.blocks[0] if weight.is_meta else weight)
        return self.norm(self.body.over_block(cache, block))[:, -self.config.num_draft_heads :]

    def head_states(
        self,
        features: Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        anchors: Tensor | None = None,
    ) -> list[Tensor]:
        """One (B, M, S) per slot, from blocks behind the positions `anchors` (B, M); behind every one by default.

        S is H, and with a Markov head more: R numbers that make the bias, and a last one, the confidence.
        """
        places = torch.arange(input_ids.shape[1], device=features.device).expand(len(input_ids), -1)
        anchors = places if anchors is None else anchors.to(features.device)
        tokens, parts = input_ids.to(features.device), []
        context = self._context(features)
        text = self.body.of_text(context, attention_mask)
        for some in anchors.split(max(SLOTS_AT_ONCE // self.config.block_size, 1), dim=1):
            blocks = self._blocks(tokens.roll(-1, 1).gather(1, some), like=context)
            parts.append(self.body.over_anchors(blocks, *text, some, attention_mask))
        hidden = self.norm(torch.cat(parts, 1)).unflatten(1, (anchors.shape[1], -1))
        states, memory = [], None
        for slot, slot_hidden in enumerate(hidden[:, :, -self.config.num_draft_heads :].unbind(2)):
            state, memory = self._slot(slot_hidden, tokens.roll(-1 - slot, 1).gather(1, anchors), memory)
            states.append(state)
        return states

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        return self._scores(hidden[..., : self.config.own_layer.hidden_size]) + self._bias(hidden)

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        return None if self.confidence is None else hidden[..., -1]

    def _slot(self, hidden: Tensor, tokens: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The state (..., S) of a slot with hidden states (..., H) behind tokens (...), and the path's memory."""
        state = confidence_inputs = [hidden]
        if self.markov is not None:
            before = self.markov.w1(tokens.to(hidden.device))
            bias, memory = self.markov(before, hidden, torch.zeros_like(before) if memory is None else memory)
            state, confidence_inputs = [hidden, bias], [hidden, before]
        if self.confidence is not None:
            joined = torch.cat(confidence_inputs, -1)[..., : self.confidence.in_features]
            state = [*state, self.confidence(joined)]
        return torch.cat(state, -1), memory

    def _bias(self, state: Tensor) -> Tensor | float:
        """What the token before adds to the scores, of states (..., S)."""
        first = self.config.own_layer.hidden_size
        return 0.0 if self.markov is None else self.markov.w2(state[..., first : first + self.config.markov_rank])

    def _context(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features))

    def _blocks(self, roots: Tensor, like: Tensor) -> Tensor:
        """Embeddings (B, M W, H) of blocks that begin with the tokens (B, M)."""
        masks = roots.new_full((*roots.shape, self.config.block_size - 1), self.config.mask_token_id or 0)
        return self.embed(torch.cat([roots[..., None], masks], 2).flatten(1), like=like)

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        embeddings, scale = super().embed(tokens, like), self.config.input_embedding_scale
        if scale is not None and self.embed_tokens is None:
            scale = scale / getattr(self.base.get_input_embeddings(), TIMES, 1.0)
        return embeddings if scale in (None, 1.0) else embeddings * scale

    def _scores(self, hidden: Tensor) -> Tensor:
        multiplier, cap = self.config.output_multiplier, self.config.final_logit_softcapping
        if self.lm_head is not None:
            logits = self.lm_head(hidden)
        else:
            logits = self.base_logits(hidden) if multiplier is None else self.base_products(hidden)
        logits = logits if multiplier in (None, 1.0) else logits * multiplier
        return logits if cap is None else cap * (logits / cap).tanh()


class DFlashForCausalLM(DraftHeadPreTrainedModel):
    """A base with a block drafter; `from_base(base, config=DFlashConfig.dspark())` for DSpark."""

    config_class = DFlashConfig
    drafter_class = DFlashDrafter
