"""Memory of a manager that goes on for long."""

import gc
import os
import random
from pathlib import Path

import pytest

from tests.batching.requests import add, final, prompt

FIRST, LATER = 1000, int(os.environ.get("LATER_REQUESTS", "500"))  # 19,000 take minutes
STATUS = Path("/proc/self/statm")


def resident() -> int:
    """Bytes of memory that this process takes."""
    gc.collect()
    return int(STATUS.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not STATUS.exists(), reason="there is no /proc here")
def test_requests_that_join_and_leave_leave_no_memory_behind(guessing, managed):
    dice, manager = random.Random(15), managed(guessing, slots=8, lookup_answers=True)

    def answer(count: int) -> None:
        for first in range(0, count, 50):
            names = []
            for number in range(first, min(first + 50, count)):
                settings = {"max_new_tokens": dice.randint(1, 8), "eos_token_id": None}
                settings |= {"do_sample": True, "seed": number} if number % 2 else {}
                names.append(add(manager, (prompt(dice), settings), streaming=number % 5 == 0))
                if number % 20 == 0:
                    manager.cancel_request(names[-1])
            for name in names:
                assert final(manager, name).error in (None, "the request was cancelled")

    answer(FIRST)
    before = resident()
    answer(LATER)
    after = resident()
    print(f"{before:,} bytes behind {FIRST:,} requests, {after:,} behind {LATER:,} more: {after / before - 1:+.2%}")
    assert after <= 1.02 * before
    tracker = manager
    assert not (tracker._known or tracker._results or tracker._handlers or tracker._waiting)
