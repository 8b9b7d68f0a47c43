import resource
import sys

import pytest

from hf_drafthead.generation.frames import with_room

CALLS, DEPTHS = 1000, 400  # frames of so many calls within each other fill a block of 16 KiB more than once


def frame(depth, function):
    return frame(depth - 1, function) if depth else function()


def calls():
    """Page faults of many calls of a function."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        len(str(frame(3, int)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults(function):
    return max(frame(depth, function) for depth in range(DEPTHS))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames of Python functions have no blocks before Python 3.11")
def test_what_a_call_costs_does_not_depend_on_how_deep_its_caller_is():
    if most_faults(calls) < CALLS / 2:
        pytest.skip("this interpreter keeps the blocks of its frames")
    assert most_faults(with_room(calls)) < CALLS / 10


def test_arguments_results_errors_and_the_signature_go_through():
    @with_room
    def divided(number: int, by: int = 2) -> float:
        """Says what it does."""
        return number / by

    assert (divided(6), divided(6, by=3), divided.__doc__) == (3, 2, "Says what it does.")
    with pytest.raises(ZeroDivisionError):
        divided(1, 0)
