"""How near an answer comes to a reference: ROUGE-L, the F-measure, by the package `rouge-score`."""

import functools
from collections.abc import Sequence
from typing import Any

METRIC = "rougeL"


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    return RougeScorer([METRIC], use_stemmer=True)


def quality(answer: str, references: Sequence[str]) -> float:
    """From 0, no word in common, to 1: against the reference that the answer comes nearest to.

    >>> quality("in second place", ["the first", "second place"])
    0.8
    """
    return _scorer().score_multi(references, answer)[METRIC].fmeasure
