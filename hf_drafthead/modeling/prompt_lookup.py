"""Prompt lookup: guesses copied from the text itself, with nothing trained and nothing stored (Yang et al., 2023).

Where the last tokens of a row occurred before, what followed them there is what it guesses (`generation.lookup`). What
transformers does for one row (`prompt_lookup_num_tokens`) is here done in every row of a batch, in sampling too, with
all runners, and on every base that can verify a path of guesses, those that keep a state included.
"""

from typing import Any, NoReturn

from torch import Tensor

from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.config import DraftHeadConfig
from hf_drafthead.modeling.drafter import Drafter


class LookupConfig(DraftHeadConfig):
    """Copies from the text: `num_draft_heads` tokens of each step, which transformers' prompt lookup copies as well."""

    model_type = "drafthead_lookup"

    num_draft_heads: int = 10

    def check(self) -> None:
        super().check()
        if self.draft_vocab_size is not None:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}, but copies are of all tokens that a text has: leave it "
                "out."
            )


class LookupDrafter(Drafter):
    """Nothing: a step copies from the text by itself, and asks no drafter where it copies alone."""

    config: LookupConfig
    reads = ()

    def __init__(self, config: LookupConfig) -> None:
        super().__init__(config)
        self.copies = config.num_draft_heads

    def prepare(self) -> None:
        """There is nothing to prepare: no lm_head is read."""

    def follow_vocabulary(self) -> None:
        """Any token is copied."""

    def start(self, batch_size: int, capacity: int) -> Any:
        return ()

    def observe(self, state: Any, features: Tensor, tokens: Tensor, lengths: Tensor) -> Any:
        return state

    def head_states(self, features: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None) -> NoReturn:
        raise ValueError("copies from the text have no head to train or to count guesses of: give a model with heads.")


class LookupForCausalLM(DraftHeadPreTrainedModel):
    """A base whose text is guessed by copies of the text alone; a checkpoint names the base, and has no tensors."""

    config_class = LookupConfig
    drafter_class = LookupDrafter
