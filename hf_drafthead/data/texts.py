"""Where a plain text is cut into a beginning that is given and a rest that the model writes."""

from typing import Any


def beginning_of(tokenizer: Any, text: str, tokens: int) -> str:
    """The first tokens of a text, whole characters only; all of it if it has no more.

    Args:
        tokenizer: a fast one, which knows the characters of every token.
        text: any.
        tokens: how many, at least 1.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    last = min(tokens, len(offsets))
    while 1 < last < len(offsets) and offsets[last][0] < offsets[last - 1][1]:
        last -= 1
    return text[: offsets[last - 1][1]] if last < len(offsets) else text
