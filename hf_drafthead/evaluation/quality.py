"""How close an answer is to a reference: the F-measure of ROUGE-L, by the package `rouge-score`."""

import functools
from collections.abc import Sequence
from typing import Any

METRIC = "rougeL"


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    return RougeScorer([METRIC], use_stemmer=True)


def quality(answer: str, references: Sequence[str]) -> float:
    """From 0 (no common word) to 1: the score against the best matching reference.

    >>> quality("in second place", ["the first", "second place"])
    0.8
    """
    return _scorer().score_multi(references, answer)[METRIC].fmeasure
