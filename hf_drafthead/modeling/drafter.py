"""The drafter contract: how a family's heads guess.

Shapes: B rows, A newly verified positions, T positions, n nodes of a tree level, K heads, V vocabulary, H hidden,
F feature layers, D draft vocabulary.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import logging

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.output_layer import OutputLayer
from hf_drafthead.generation.state import Guesses
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer
from hf_drafthead.modeling.layers import VocabularyRows, copy_if_as_wide, weight_of

logger = logging.get_logger(__name__)


class Drafter(nn.Module):
    """A family's heads, and how they guess.

    `generation` calls `start` once, `observe` with the prompt, then in every step `expand` once per tree level and
    `observe` with what was verified; training calls `head_states` and `head_logits`. What a generation needs to
    remember is in the state that these pass on, never on the module. A state is made of tensors and `SlotCache`s alone
    and has the same shapes after every `observe` of a step, so that a step can be compiled.

    Attributes:
        reads: which hidden states of the base are read, -1 being the last one, after the base's final norm; and types
            of attention, of each of which the last layer's keys and values lie behind these in the features.
        key_width: numbers of these keys and values at a position.
        needs_range: its states overflow in float16: it computes in bfloat16 where it was loaded in that.
        keeps_history: True if `observe` needs every verified position, False if only each row's last one counts: of the
            prompt it is then given no other.
        asked_by: a setting of transformers' `generate` that asks for what this drafter does; None if there is none.
        copies: how many tokens each step copies from the text, where that is all that this drafter guesses; else None.
        loaded: the heads were trained already where they were made: what builds them anew has to keep their weights.
        starts_at_anchors: True if `head_states` takes `anchors`, the positions (B, M) at which guesses begin, each of
            which costs a pass of its own: training then samples some of a text.
        max_depth: the deepest tree level that can be guessed; None if there is no limit.
        lm_head, embed_tokens: projection and embeddings of its own, where it has them; else None.
        draft_tokens: (D,) the base's ids of the tokens that it chooses among; None for all of them.
        base: the base model: a plain reference, so that it is neither saved nor moved with the drafter.
    """

    reads: tuple[int | str, ...] = (-1,)
    key_width: int = 0
    needs_range: bool = False
    keeps_history: bool = False
    asked_by: str | None = None
    copies: int | None = None
    loaded: bool = False
    starts_at_anchors: bool = False
    draft_tokens: Tensor | None
    base: Any

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config, self.max_depth = config, config.max_depth
        size, known_tokens = config.draft_vocab_size, config.known_tokens
        reduced = size and known_tokens and size < known_tokens
        self.register_buffer("draft_tokens", torch.arange(size or 0) if reduced else None)
        self._rows = VocabularyRows()  # of a shared output projection
        self.lm_head: nn.Linear | None = None
        self.embed_tokens: nn.Embedding | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What is copied and pickled: all but what was found out by running the base, or gathered from it."""
        return {**self.__dict__, "_output": None, "_rows": VocabularyRows()}

    @property
    def choices(self) -> int:
        """Among how many tokens is chosen: D, or V."""
        return cast(int, self.config.known_tokens) if self.draft_tokens is None else len(self.draft_tokens)

    def attach(self, base: nn.Module) -> None:
        """Read embeddings and lm_head from this base from now on."""
        self.__dict__["base"] = base  # past nn.Module's bookkeeping: not a submodule
        self.base_tokens = self.base.config.get_text_config(decoder=True).vocab_size
        self.follow_base()

    @property
    def output(self) -> OutputLayer:
        """How the base makes logits of its last hidden state: found out by running it, once for each lm_head."""
        layer = self.__dict__.get("_output")
        if layer is None or layer.base is not self.base or layer.head is not self.base.get_output_embeddings():
            layer = self.__dict__["_output"] = OutputLayer(self.base)
        return layer

    def prepare(self) -> None:
        """Find out what is found out by running, before a step is compiled; Unsupported if the heads cannot guess."""
        if self.needs_range and next(self.parameters()).dtype == torch.float16:
            logger.warning_once(
                f"the {self.config.family} drafter computes in bfloat16: its states overflow in float16, in which it "
                "was loaded."
            )
            self.to(torch.bfloat16)
        head = self.output.head
        if not isinstance(head.weight, Tensor):  # torch's quantized layers have a function there
            raise Unsupported(f"the base's lm_head is a {type(head).__name__}, whose weight cannot be read")
        if self.base.config.get_text_config(decoder=True).vocab_size != self.base_tokens:
            self.follow_vocabulary()
        if self.draft_tokens is not None and self._rows.gathered:  # a compiled step reads what was gathered before it
            like = next(self.parameters())
            if not like.is_meta:
                self._rows(self._scored_by(), self.draft_tokens, like)

    def follow_vocabulary(self) -> None:
        """Go on guessing among the same tokens where the base has got more of them; Unsupported if that cannot be."""
        before, now = self.base_tokens, self.base.config.get_text_config(decoder=True).vocab_size
        if now == before:
            return
        if now < before or getattr(self.config, "num_centroids", 0):  # clusters of all tokens
            raise Unsupported(
                f"the base was resized from {before} to {now} tokens under heads that guess over the former: train "
                "heads for it (from_base)"
            )
        if self.draft_tokens is None:
            self.draft_tokens = torch.arange(before, device=next(self.parameters()).device)
        self.config.draft_vocab_size = len(self.draft_tokens)
        for table in self.tables():  # new tokens are read as what the others are on average
            more = table.weight.mean(0, keepdim=True).expand(now - before, -1)
            table.weight, table.num_embeddings = nn.Parameter(torch.cat([table.weight.detach(), more])), now
        self.base_tokens = now

    def tables(self) -> list[nn.Embedding]:
        """Of modules with a row for each of the base's tokens, those of the heads' own."""
        embeddings = [module for module in self.modules() if isinstance(module, nn.Embedding)]
        return [module for module in embeddings if module.num_embeddings == self.base_tokens]

    def _scored_by(self) -> Any:
        """The output projection of which the rows of the draft vocabulary are used."""
        return self.output.head

    def follow_base(self) -> None:
        """Compute attention and experts in the same way as the base."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.follow(self.base.config.get_text_config())

    def copy_from_base(self) -> None:
        """Give fresh heads what they start from: weights of the base, where they are as wide."""
        if self.embed_tokens is not None:
            copy_if_as_wide(self.embed_tokens.weight, self.base.get_input_embeddings().weight)
        self.copy_projections()

    def choose_vocabulary(self, tokens: Tensor) -> None:
        """Draft among these tokens (D,) of the base from now on, with projections that start as the base's.

        Raises:
            ValueError: these are not D different tokens of the base, or the heads draft among all of them anyway.
        """
        if self.draft_tokens is None:
            raise ValueError(
                f"the heads draft among all {self.config.known_tokens} tokens of the base: set draft_vocab_size to "
                "choose among them."
            )
        self._check_map(tokens, "the draft vocabulary")
        self.draft_tokens.copy_(tokens)
        self.copy_projections()

    def copy_projections(self) -> None:
        """Start own output projections from the base's, of the draft vocabulary where there is one."""
        for lm_head in self.lm_heads():
            rows = weight_of(self.output.head, like=lm_head.weight)
            if not rows.is_meta:
                rows = rows if self.draft_tokens is None else rows[self.draft_tokens.to(rows.device)]
                copy_if_as_wide(lm_head.weight, rows * self.output.scale())

    def lm_heads(self) -> list[nn.Linear]:
        """Those whose logits are of the draft vocabulary, or of all tokens."""
        projections: Any = getattr(self, "projections", None)
        return [*projections.up] if projections is not None else [] if self.lm_head is None else [self.lm_head]

    def check_values(self, path: str) -> None:
        """Refuse what was loaded from a path if its values cannot be used, though its shapes fit, by a ValueError."""
        if self.draft_tokens is not None:
            self._check_map(self.draft_tokens, f"'drafter.draft_tokens' in {path!r}")

    def _check_map(self, tokens: Tensor, what: str) -> None:
        known_tokens = self.config.known_tokens or 0
        size = self.config.draft_vocab_size or known_tokens
        outside = tokens[(tokens < 0) | (tokens >= known_tokens)]
        if len(tokens) != size:
            raise ValueError(f"{what} has {len(tokens)} tokens, but draft_vocab_size is {size}: give as many.")
        if len(outside):
            raise ValueError(
                f"{what} has the token {int(outside[0])}, but the base has {known_tokens} tokens, numbered from 0: "
                "give ids of the base."
            )
        different, counts = tokens.unique(return_counts=True)
        if len(different) < len(tokens):
            raise ValueError(
                f"{what} has the token {int(different[counts > 1][0])} more than once: give every token one place."
            )

    def start(self, batch_size: int, capacity: int) -> Any:
        """A fresh state of so many rows, each of which can hold `capacity` positions at most."""
        raise NotImplementedError

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        """Take in newly verified positions.

        Args:
            state: from `start` or the last `observe` or `expand`.
            features: (B, A, F*H) the base's hidden states there.
            tokens: (B, A) the token that follows each position; the last valid one is the next root.
            lengths: (B,) how many of the A positions are valid, first ones first. A row with 0 stands still.

        Returns:
            The state to go on with.
        """
        raise NotImplementedError

    def expand(self, state: Any, tokens: Tensor, parents: Tensor) -> tuple[Any, Guesses]:
        """Guess the children of the nodes of a tree level; the d-th call since `observe` asks head d.

        Args:
            state: from `observe` or the last `expand`.
            tokens: (B, n) tokens of the nodes; n = 1 and the root on the first call.
            parents: (B, n) where each node hangs: index of its parent among the nodes of the previous call.

        Returns:
            The state to go on with, and scores (B, n, V), or (B, 1, V) if the guesses are the same for all nodes; D
            in the place of V where the heads choose among some tokens only.
        """
        raise NotImplementedError

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What each head's output projection is applied to, with the true tokens in the place of guesses.

        Args:
            features: (B, T, F*H).
            input_ids: (B, T) the text itself.
            attention_mask: (B, T) 1 where the text is real.

        Returns:
            One (B, T, S) per head, S being H or whatever its projection reads. Entry i at position t guesses token
            t + 2 + i; where a family reads the tokens t + 1 ... t + 1 + i these wrap around at the end of the text, and
            what is there has no meaning.
        """
        raise NotImplementedError

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., S); (..., D) where it chooses among some tokens only."""
        raise NotImplementedError

    def drawn(self, anchors: int) -> list[list[int]] | None:
        """Of each head, which of so many anchors it guesses behind in training; None for all of them."""
        return None

    def unary_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits, as of `head_logits`, that the losses are of."""
        return self.head_logits(head, hidden)

    def choice_loss(self, hidden: Tensor, logits: Tensor, targets: Tensor) -> Tensor | None:
        """A loss (M,) of states (M, S), unary logits (M, D) and targets (M,), beside the others; None for none."""
        return None

    def confidence_logits(self, hidden: Tensor) -> Tensor | None:
        """How likely guesses from states (..., S) are accepted, as logits (...); None where nothing foretells it."""
        return None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        """Move or convert; what is computed and not stored keeps its type: rounded rotary frequencies turn far
        positions wrongly."""
        exact = {
            (module, name): getattr(module, name)
            for module in self.modules()
            for name in module._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        self._rows.apply(fn)
        for (module, name), before in exact.items():
            now = getattr(module, name)
            if now is not None and now.dtype != before.dtype:
                setattr(module, name, before.to(now.device))
        return self

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor where the drafter is, and in its dtype."""
        like = next(self.parameters())
        return tensor.to(like.dtype) if like.is_meta else tensor.to(like)  # hooks move what an offloaded drafter needs

    def base_logits(self, hidden: Tensor) -> Tensor:
        """What the base makes of states (..., H): logits (..., V), or (..., D) of the draft vocabulary."""
        output = self.output
        if self.draft_tokens is None:
            dtype = output.head.weight.dtype  # heads in training have another
            return output.logits(hidden.to(dtype) if dtype.is_floating_point else hidden)
        return output.behind(self.base_products(hidden))

    def base_products(self, hidden: Tensor) -> Tensor:
        """As `base_logits`, what the lm_head alone makes of states."""
        head = self.output.head
        if self.draft_tokens is None:
            return head(hidden.to(head.weight.dtype) if head.weight.dtype.is_floating_point else hidden)
        parameter: Tensor = next(self.parameters())
        like = hidden if parameter.is_meta else parameter  # offloaded: where hooks bring the heads to, their states are
        weight, bias = self._rows(head, self.draft_tokens, like)
        return F.linear(hidden.to(weight.dtype), weight, bias)

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The input embeddings (..., H) of tokens, where and in the type that `like` has: own ones, or the base's."""
        if self.embed_tokens is not None:
            return self.embed_tokens(tokens.to(like.device))
        embedding = self.base.get_input_embeddings()
        weight = embedding.weight
        return embedding(tokens if weight.is_meta else tokens.to(weight.device)).to(like)  # meta: offloaded, as above
