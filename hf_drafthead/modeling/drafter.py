"""The drafter contract: how a family's heads guess.

Shapes: B rows, A newly verified positions, T positions, n nodes of a tree level, K heads, V vocabulary, H hidden,
F feature layers.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from hf_drafthead.generation.drafting import Guesses
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.decoder_layer import DecoderLayer


class Drafter(nn.Module):
    """A family's heads, and how they guess.

    `generation` calls `start` once, `observe` with the prompt, then in every step `expand` once per tree level and
    `observe` with what was verified; training calls `head_states` and `head_logits`. What a generation needs to
    remember is in the state that these pass on, never on the module. A state is made of tensors and `SlotCache`s alone
    and has the same shapes after every `observe` of a step, so that a step can be compiled.

    Attributes:
        reads: which hidden states of the base are read; -1 is the last one, after the base's final norm.
        keeps_history: True if `observe` needs every verified position, False if only each row's last one counts: of the
            prompt it is then given no other.
        draft_tokens: (D,) the base's ids of the tokens that it chooses among; None for all of them.
        base: the base model: a plain reference, so that it is neither saved nor moved with the drafter.
    """

    reads: tuple[int, ...] = (-1,)
    keeps_history: bool = False
    draft_tokens: Tensor | None
    base: Any

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("draft_tokens", None)

    @property
    def max_depth(self) -> int | None:
        """Deepest tree level that can be guessed; None if there is no limit."""
        return self.config.max_depth

    def attach(self, base: nn.Module) -> None:
        """Read embeddings and lm_head from this base from now on."""
        self.__dict__["base"] = base  # past nn.Module's bookkeeping: not a submodule
        self.follow_base()

    def follow_base(self) -> None:
        """Compute attention and experts in the same way as the base."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.follow(self.base.config.get_text_config())

    def copy_from_base(self) -> None:
        """Give fresh heads what they start from: weights of the base."""
        raise NotImplementedError

    def check_values(self, path: str) -> None:
        """Refuse what was loaded from a path if its values cannot be used, though its shapes fit.

        Raises:
            ValueError: naming the tensor.
        """

    def start(self, batch_size: int, capacity: int) -> Any:
        """A fresh state.

        Args:
            batch_size: rows.
            capacity: most positions that a row can ever hold.
        """
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
            The state to go on with, and scores (B, n, V), or (B, 1, V) if the guesses are the same for all nodes.
        """
        raise NotImplementedError

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> list[Tensor]:
        """What each head's output projection is applied to, with the true tokens in the place of guesses.

        Args:
            features: (B, T, F*H).
            input_ids: (B, T) the text itself.
            attention_mask: (B, T) 1 where the text is real.

        Returns:
            One (B, T, H) per head. Entry i at position t guesses token t + 2 + i; where a family reads the tokens
            t + 1 ... t + 1 + i these wrap around at the end of the text, and what is there has no meaning.
        """
        raise NotImplementedError

    def head_logits(self, head: int, hidden: Tensor) -> Tensor:
        """Logits (..., V) of one head from its state (..., H); (..., D) where it chooses among some tokens only."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Drafter":
        """Move or convert; what is computed and not stored keeps its type: rounded rotary frequencies turn far
        positions wrongly."""
        exact = {
            (module, name): getattr(module, name)
            for module in self.modules()
            for name in module._non_persistent_buffers_set
        }
        super()._apply(fn, recurse)
        for (module, name), before in exact.items():
            now = getattr(module, name)
            if now is not None and now.dtype != before.dtype:
                setattr(module, name, before.to(now.device))
        return self

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor where the drafter is, and in its dtype."""
        like = next(self.parameters())
        return tensor.to(like.dtype) if like.is_meta else tensor.to(like)  # hooks move what an offloaded drafter needs

    def embed(self, tokens: Tensor, like: Tensor) -> Tensor:
        """The base's input embeddings (..., H) of tokens, where and in the type that `like` has."""
        embedding = self.base.get_input_embeddings()
        weight = embedding.weight
        return embedding(tokens if weight.is_meta else tokens.to(weight.device)).to(like)  # meta: offloaded, as above
