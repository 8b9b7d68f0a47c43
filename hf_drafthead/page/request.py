"""What a visitor asks for, checked and turned into a comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hf_drafthead.evaluation.calls import encode, has_room, positions_of
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.page.comparison import SideBySide

Message = dict[str, str]  # role and content, as chat templates take them
OWN_TREE = "the model's own"


@dataclass(frozen=True)
class Asked:
    """The fields of the page.

    written: the prompt, or the next message; chat: whether the chat template applies; messages: the conversation so
    far; tree: `OWN_TREE`, a name that `draft_tree` takes, or rank paths as JSON; temperature: 0 is greedy; acceptance,
    max_new_tokens: see `generate`; copies: tokens copied from the text in each step; seed: of the sampling; with_base:
    whether the base writes too.
    """

    written: str
    chat: bool
    messages: list[Message]
    tree: str
    temperature: float
    acceptance: str
    max_new_tokens: int
    copies: int
    seed: int
    with_base: bool

    @property
    def conversation(self) -> list[Message]:
        """The messages with the new one."""
        return [*self.messages, {"role": "user", "content": self.written}]

    def comparison(self, model: Any, tokenizer: Any) -> SideBySide:
        """The two generations, ready to run.

        Raises:
            TypeError, ValueError: an empty prompt, one that leaves no room for the answer, or a setting that does
                not fit.
        """
        settings: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            settings["temperature"] = self.temperature
        return SideBySide(
            model,
            self._encoded(model, tokenizer),
            settings,
            self._drafting(model),
            copies=self.copies,
            seed=self.seed,
            with_base=self.with_base,
        )

    def _drafting(self, model: Any) -> DraftSettings:
        """How the heads draft: as asked, else as their generation config says."""
        name = self.tree.strip()
        tree: Any = None if name in ("", OWN_TREE) else DraftTree.from_json(name) if name.startswith("[") else name
        settings = DraftSettings.from_config(model.generation_config, draft_tree=tree, acceptance=self.acceptance)
        return settings.resolved(model.drafter.max_depth, draft_vocabulary(model.base, model.drafter))

    def _encoded(self, model: Any, tokenizer: Any) -> dict[str, torch.Tensor]:
        """`input_ids` and `attention_mask` (1, T)."""
        if not self.written.strip():
            raise ValueError("the prompt is empty: write the text that the model shall continue.")
        text = self.written
        if self.chat:
            text = tokenizer.apply_chat_template(self.conversation, tokenize=False, add_generation_prompt=True)
        inputs = encode(model, tokenizer, [text], special_tokens=not self.chat)
        length = inputs["input_ids"].shape[1]
        if not has_room(model, length, self.max_new_tokens):
            raise ValueError(
                f"a prompt of {length} tokens and {self.max_new_tokens} new ones exceed the base's "
                f"{positions_of(model)} positions: shorten the prompt, or ask for fewer tokens."
            )
        return inputs
