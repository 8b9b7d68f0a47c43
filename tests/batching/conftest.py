"""What the tests of many requests share: models whose guesses are mostly right, and managers that are stopped."""

import copy

import pytest

from hf_drafthead.modeling import DraftModelForCausalLM
from tests.batching.requests import TREE
from tests.generation.agreement import shared_base
from tests.generation.conftest import every_warning_is_shown_anew as every_warning_is_shown_anew
from tests.generation.conftest import untraced as untraced


@pytest.fixture(scope="session")
def guessing():
    """A base whose draft model is nearly the base itself, so that most guesses are right, and some are not."""
    base = shared_base("llama-gqa")
    draft = copy.deepcopy(base)
    weight = draft.lm_head.weight
    weight.data[::7] *= 0.7
    return DraftModelForCausalLM.from_base(base, draft=draft).eval()


@pytest.fixture
def managed():
    """Makes managers, which run until the test ends."""
    managers = []

    def make(model, start=True, slots=3, draft_tree=TREE, **settings):
        manager = model.init_continuous_batching(slots=slots, draft_tree=draft_tree, **settings)
        managers.append(manager)
        if start:
            manager.start()
        return manager

    yield make
    for manager in managers:
        manager.stop(hard_stop=True, timeout=60)
