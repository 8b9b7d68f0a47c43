import inspect
import resource
import sys

import pytest
import torch

from hf_drafthead.generation.batch import with_room
from tests.bases import tiny_base
from tests.families import FAMILIES

CALLS, DEPTHS = 1000, 400  # frames of so many calls within each other fill a block of 16 KiB more than once
BLOCKS = pytest.mark.skipif(sys.version_info < (3, 11), reason="before Python 3.11 frames have no blocks")


def frame(depth, function):
    return frame(depth - 1, function) if depth else function()


def calls():
    """Page faults of many calls of a function."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        len(str(frame(3, int)))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults(function, depths=range(DEPTHS)):
    return max(frame(depth, function) for depth in depths)


@pytest.fixture
def blocks():
    if most_faults(calls) < CALLS / 2:
        pytest.skip("this interpreter keeps the blocks of its frames")


@pytest.mark.few(1)
@BLOCKS
@pytest.mark.parametrize("drafts", [True, False], ids=["drafted", "base"])
def test_generate_makes_room_for_its_steps(drafts, blocks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    found = []

    class Faults:
        def put(self, tokens):
            found.append(calls())

        def end(self): ...

    call = {"draft_tree": [[0]], "max_new_tokens": 3, "eos_token_id": None, "streamer": Faults(), "use_cache": drafts}

    def faults():
        found.clear()
        model.generate(torch.tensor([[5, 6, 7]]), **call)
        return max(found)

    assert most_faults(faults, range(0, 160, 2)) < CALLS / 10


def test_arguments_results_errors_and_the_signature_go_through():
    @with_room
    def divided(number: int, by: int = 2) -> float:
        """Says what it does."""
        return number / by

    assert (divided(6), divided(6, by=3), divided.__doc__) == (3, 2, "Says what it does.")
    assert [*inspect.signature(divided).parameters] == ["number", "by"]
    with pytest.raises(ZeroDivisionError):
        divided(1, 0)
