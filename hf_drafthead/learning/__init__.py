"""Heads that learn from what they serve, while they serve it."""

from collections.abc import Iterable, Sequence
from threading import RLock
from typing import Any

from hf_drafthead.bases.generators import new_lock
from hf_drafthead.generation.lookup import ids_of
from hf_drafthead.learning.learner import Learner
from hf_drafthead.learning.texts import RecentTexts

__all__ = ["Learner", "RecentTexts", "learn_from"]
_IN_TURN = new_lock(RLock)


def learn_from(
    model: Any, prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]], **settings: Any
) -> dict[str, float]:
    """See `DraftHeadPreTrainedModel.learn_from`."""
    given = ("a prompt", prompts), ("an answer", answers)
    all_prompts, all_answers = ([ids_of(text, what, -1 << 31) for text in texts] for what, texts in given)
    if len(all_prompts) != len(all_answers):
        raise ValueError(f"{len(all_prompts)} prompts and {len(all_answers)} answers: expected one answer to each.")
    texts = [*zip(all_prompts, all_answers)]
    most = model.get_input_embeddings().weight.shape[0]
    for token in (token for pair in texts for ids in pair for token in ids):
        if not 0 <= token < most:
            raise ValueError(f"token {token} is none of the base's {most}: give prompts and answers without padding.")
    with _IN_TURN:
        learner = model.__dict__.get("_learner")
        if learner is None or settings not in ({}, learner.given):
            learner = model.__dict__["_learner"] = Learner(model, **settings)
            learner.given = settings
        for prompt, answer in texts:
            learner.offer(prompt, answer)
        modes = [(module, module.training) for module in model.modules()]
        try:
            model.eval()  # of the heads, too: they are measured as they guess
            while learner.wants:
                learner.work()
        finally:
            for module, mode in modes:
                module.training = mode
        return learner.counts()  # type: ignore[no-any-return]
