"""Heads that learn from what they serve, while they serve it."""

from collections.abc import Iterable, Sequence
from typing import Any

from hf_drafthead.learning.learner import Learner
from hf_drafthead.learning.texts import RecentTexts

__all__ = ["Learner", "RecentTexts", "learn_from"]


def learn_from(
    model: Any, prompts: Iterable[Sequence[int]], answers: Iterable[Sequence[int]], **settings: Any
) -> dict[str, float]:
    """See `DraftHeadPreTrainedModel.learn_from`."""
    learner = model.__dict__.get("_learner")
    if learner is None or settings:
        learner = model.__dict__["_learner"] = Learner(model, **settings)
    for prompt, answer in zip(prompts, answers, strict=True):
        learner.offer([int(token) for token in prompt], [int(token) for token in answer])
    modes = [(module, module.training) for module in model.base.modules()]
    try:
        model.base.eval()
        while learner.wants:
            learner.work()
    finally:
        for module, mode in modes:
            module.training = mode
    return learner.counts()  # type: ignore[no-any-return]
