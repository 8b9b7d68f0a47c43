"""What a measurement says of exactness: how many texts are the base's own, and what changed the others."""

from collections.abc import Mapping
from typing import Any

FULL_PRECISION = ("float32", "float64")  # the types in which the text has to be the base's own


def counts_in_words(counts: Mapping[str, Any]) -> str:
    """Counts of texts as a sentence without its full stop.

    >>> counts_in_words({"texts": 3, "rounding": 0, "faults": 0})
    'all 3 texts are the same'
    >>> margins = {"largest_margin": 0.125, "largest_probability_margin": 0.01}
    >>> counts_in_words({"texts": 3, "rounding": 1, "faults": 1, **margins})
    '1 of 3 texts is the same, 1 differs from a near tie on (largest margin 0.125 in the logits, 0.01 in probability), \
1 differs by more than rounding explains'
    """
    texts, rounding, faults = counts["texts"], counts["rounding"], counts["faults"]
    same = texts - rounding - faults
    if same == texts:
        return f"all {texts} texts are the same" if texts != 1 else "the text is the same"
    parts = [f"{same} of {texts} texts {'is' if same == 1 else 'are'} the same"]
    if rounding:
        margins = {"the logits": counts.get("largest_margin"), "probability": counts.get("largest_probability_margin")}
        apart = ", ".join(f"{margin:.3g} in {name}" for name, margin in margins.items() if margin is not None)
        parts.append(f"{_differ(rounding)} from a near tie on (largest margin {apart or 'not recorded'})")
    if faults:
        parts.append(f"{_differ(faults)} by more than rounding explains")
    return ", ".join(parts)


def _differ(count: int) -> str:
    return f"{count} {'differs' if count == 1 else 'differ'}"
