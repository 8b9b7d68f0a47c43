"""Memory for the interpreter's frames, so that what a step costs does not depend on how deep its caller is.

CPython keeps the frames of Python functions in blocks of 16 KiB. A call whose frame does not fit into the rest of a
block takes a new one from the operating system, and gives it back when it returns. Where a block happens to end between
the loop of decoding and the functions that it calls, each of those calls does so, many times in every step, and waits
for the system and for the first access to a new page.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

FRAME_WORDS = (
    1 << 15
)  # of 8 bytes; a frame of so many gets a block of twice as many: the rest is for the frames below it


def with_room(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function so that it and what it calls have 256 KiB for their frames in one block.

    >>> with_room(max)(1, 2)
    2
    """
    call = types.FunctionType(_apply.__code__.replace(co_stacksize=FRAME_WORDS), globals())

    @functools.wraps(function)
    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        result: T = call(function, args, kwargs)
        return result

    return roomy


def _apply(function, args, kwargs):
    return function(*args, **kwargs)
