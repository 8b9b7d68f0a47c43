"""Texts: where one is cut into a beginning that is given and a rest; which are fit to be asked as questions."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

SHORTEST = 12  # characters of a question
REPEATED = (4, 3)  # a question repeats itself if it has so many words in a row so many times


def beginning_of(tokenizer: Any, text: str, tokens: int) -> str:
    """The first tokens of a text, whole characters only; all of it if it has no more. The tokenizer is a fast one."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoded["offset_mapping"]
    last = min(tokens, len(offsets))
    while 1 < last < len(offsets) and offsets[last][0] < offsets[last - 1][1]:
        last -= 1
    return text[: offsets[last - 1][1]] if last < len(offsets) else text


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What a tokenizer puts in front of every text, and behind it: special tokens, or nothing."""
    inner = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    at = next(at for at in range(len(whole)) if whole[at : at + len(inner)] == inner)
    return whole[:at], whole[at + len(inner) :]


def why_no_question(words: str) -> str | None:
    """Why a text that a model wrote in a user's place is not fit to be asked; None if it is.

    >>> why_no_question("How do birds find their way?"), why_no_question("hm"), why_no_question("I see, " * 30)
    (None, 'too short', 'repeats itself')
    """
    if len(words) < SHORTEST or len(re.findall(r"[^\W\d_]{2,}", words)) < 2:
        return "too short"
    if "\N{REPLACEMENT CHARACTER}" in words:
        return "broken characters"
    length, times = REPEATED
    parts = words.lower().split()
    grams = [tuple(parts[at : at + length]) for at in range(len(parts) - length + 1)]
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    often = any(grams.count(gram) >= times for gram in set(grams))
    return "repeats itself" if often or (len(lines) > 3 and 2 * len(set(lines)) <= len(lines)) else None


def one_line(error: BaseException) -> str:
    """The first paragraph of an error's text, on one line, without the full stop."""
    return " ".join(str(error).split("\n\n")[0].split()).rstrip(".")


UTF_8 = "utf-8-sig"  # without the byte order mark that editors on Windows write


def read_text(path: str | os.PathLike) -> str:
    """A user's text file, without its byte order mark; ValueError where it is no text."""
    try:
        return Path(path).read_text(encoding=UTF_8)
    except UnicodeError as error:
        raise ValueError(f"{os.fspath(path)!r} is not UTF-8 text ({error}): convert it.") from None


def same_words(words: str) -> int:
    """A number that texts with the same words share, whatever their case and punctuation."""
    normalized = " ".join(re.findall(r"\w+", words.lower()))
    return int.from_bytes(hashlib.blake2b(normalized.encode(), digest_size=8).digest(), "big")
