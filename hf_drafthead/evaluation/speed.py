"""One call of `generate`, and the time of several calls that alternate.

Every prompt is decoded alternately by the base and by the heads, several times in one process, and counts with its
median time: other load on the machine affects both, and a single slow call affects neither.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hf_drafthead.evaluation.questions import Question, check_template, text_of
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees.timing import time_interleaved

CAPTURED = {"cache_implementation": "static"}  # settings under which the steps of draft heads are compiled


def fastest_tree(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Question],
    trees: Sequence[DraftTree],
    *,
    max_new_tokens: int,
    batch_size: int = 1,
    captured: bool = False,
    progress: Callable[[], object] = lambda: None,
) -> DraftTree:
    """The tree with which the model decodes these prompts fastest on this machine, greedily."""
    settings = {"do_sample": False, "max_new_tokens": max_new_tokens, **(CAPTURED if captured else {})}
    inputs = encode_all(model, tokenizer, batched(prompts, batch_size), max_new_tokens)
    totals = dict.fromkeys(trees, 0.0)
    for tree in trees:
        warm_up(model, tree, inputs[0], settings)
    for given in inputs:
        runs = {tree: lambda tree=tree, given=given: draft(model, tree, given, settings) for tree in trees}
        _, seconds = time_interleaved(runs, 2, model.base.device)
        for tree in trees:
            totals[tree] += statistics.median(seconds[tree])
        progress()
    return min(totals, key=totals.__getitem__)


def draft(
    model: Any, tree: str | DraftTree | None, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> Any:
    """One call of the heads, with what they accepted; None is the model's own tree."""
    chosen = {} if tree is None else {"draft_tree": tree}
    return model.generate(**given, **settings, **chosen, return_dict_in_generate=True)


def drafted(output: Any) -> bool:
    """Whether the heads drafted it; False where the base decoded by itself."""
    return getattr(output, "accepted_lengths", None) is not None


def steps_of(output: Any) -> torch.Tensor:
    """`accepted_lengths` (B, S) of one output; without steps where the base decoded by itself."""
    if not drafted(output):
        return torch.zeros(len(output.sequences), 0, dtype=torch.long)
    return output.accepted_lengths.cpu()


def warm_up(model: Any, tree: DraftTree | None, given: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> None:
    """Do the one-time work of the first call: the probe of the base, allocations, the tree's tensors."""
    model.base.generate(**given, **settings)
    draft(model, tree, given, settings)


def batched(prompts: Sequence[Question], batch_size: int) -> list[list[Question]]:
    """The prompts in batches of one category each.

    Raises:
        ValueError: there is none, or the batch size is below 1.
    """
    if not prompts:
        raise ValueError("there is no prompt to measure on: give at least one.")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: expected at least 1.")
    groups: dict[Any, list[Question]] = {}
    for prompt in prompts:
        groups.setdefault((prompt.category, prompt.chat), []).append(prompt)
    return [group[i : i + batch_size] for group in groups.values() for i in range(0, len(group), batch_size)]


def encode(model: Any, tokenizer: Any, texts: Sequence[str], *, special_tokens: bool = True) -> dict[str, torch.Tensor]:
    """The texts as `input_ids` and `attention_mask` (B, T), padded on the left, on the base's device.

    Args:
        model: says which device.
        tokenizer: the base's.
        texts: what to continue.
        special_tokens: whether the tokenizer adds its own; not where a chat template has written them.

    Raises:
        ValueError: a text is empty, or they need padding that the tokenizer cannot give.
    """
    if not all(texts):
        raise ValueError("the prompt is empty: give the text to continue.")
    if len(texts) > 1 and tokenizer.pad_token is None:
        raise ValueError(
            "the tokenizer has no pad token, which a batch needs: set tokenizer.pad_token, or batch_size=1."
        )
    encoded = tokenizer(
        list(texts),
        return_tensors="pt",
        padding=len(texts) > 1,
        padding_side="left",
        add_special_tokens=special_tokens,
    )
    return {name: encoded[name].to(model.base.device) for name in ("input_ids", "attention_mask")}


def encode_all(
    model: Any, tokenizer: Any, batches: Sequence[Sequence[Question]], max_new_tokens: int
) -> list[dict[str, torch.Tensor]]:
    """The first turn of every question, batch by batch.

    Raises:
        ValueError: a prompt that is empty or leaves the base no room for `max_new_tokens`, or a conversation without
            a chat template.
    """
    check_template(tokenizer, (question for batch in batches for question in batch))
    inputs = []
    for batch in batches:
        inputs.append(encode_turn(model, tokenizer, batch, [()] * len(batch)))
        own = inputs[-1]["attention_mask"].sum(1)
        for question, length in zip(batch, own.tolist()):
            if not has_room(model, length, max_new_tokens):
                raise ValueError(
                    f"{question.where}: a prompt of {length} tokens and {max_new_tokens} new ones exceed the base's "
                    f"{positions_of(model)} positions: shorten the prompt, or ask for fewer tokens."
                )
    return inputs


def encode_turn(
    model: Any, tokenizer: Any, batch: Sequence[Question], answers: Sequence[Sequence[str]]
) -> dict[str, torch.Tensor]:
    """The next turn of each question of a batch, after the answers so far."""
    texts = [text_of(tokenizer, question, so_far) for question, so_far in zip(batch, answers)]
    return encode(model, tokenizer, texts, special_tokens=not batch[0].chat)


def positions_of(model: Any) -> int | None:
    """The positions that the base was made for; None where its config names no limit."""
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None)


def has_room(model: Any, length: int, max_new_tokens: int) -> bool:
    """Whether the base has positions for a prompt of `length` tokens and the new ones."""
    positions = positions_of(model)
    return positions is None or length + max_new_tokens <= positions


def new_tokens(model: Any, given: Mapping[str, torch.Tensor], sequences: torch.Tensor) -> int:
    """How many tokens were generated, each row counted up to and including its own end-of-sequence token."""
    return sum(map(len, new_rows(model, given, sequences)))


def new_rows(
    model: Any, given: Mapping[str, torch.Tensor], sequences: torch.Tensor, settings: Mapping[str, Any] | None = None
) -> list[list[int]]:
    """The tokens that were generated in each row, up to and including its own end-of-sequence token.

    Args:
        model: its base names the token, unless the call did.
        given: the prompts.
        sequences: (B, L) what `generate` returned.
        settings: of the call.
    """
    ends = (settings or {}).get("eos_token_id", model.base.generation_config.eos_token_id)
    ends = torch.tensor(ends if isinstance(ends, list) else [] if ends is None else [ends], device=sequences.device)
    generated = sequences[:, given["input_ids"].shape[1] :]
    is_end = torch.isin(generated, ends)
    counts = (is_end.cumsum(1) - is_end.long() == 0).sum(1)
    return [row[:count].tolist() for row, count in zip(generated, counts.tolist())]


class ForwardCount:
    """Counts the forwards of a base while it is open."""

    def __init__(self, base: Any):
        self._decoder = base.get_decoder()
        self.forwards = 0

    def take(self) -> int:
        """The forwards since the last call of this."""
        taken, self.forwards = self.forwards, 0
        return taken

    def __enter__(self) -> "ForwardCount":
        self._hook = self._decoder.register_forward_hook(self._add)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _add(self, *_: object) -> None:
        self.forwards += 1
