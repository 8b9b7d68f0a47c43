"""Interleaved: two generations at once on one model do not disturb each other."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.bases import tiny_base
from tests.drafters import Drafted
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
ONE = {**prompt(1, seed=1), "max_new_tokens": 18, "eos_token_id": None}
OTHER = {**prompt(3, longest=6, seed=2), "max_new_tokens": 25, "eos_token_id": None}


class Turns:
    """Two calls that wait for each other after every token."""

    def __init__(self):
        self.changed = threading.Condition()
        self.turn, self.running = 0, {0, 1}
        self.order = []

    def streamer(self, me: int) -> BaseStreamer:
        turns = self

        class Streamer(BaseStreamer):
            def put(self, value):
                with turns.changed:
                    turns.order.append(me)
                    turns.turn = 1 - me
                    turns.changed.notify_all()
                    assert turns.changed.wait_for(lambda: turns.turn == me or turns.running == {me}, timeout=60)

            def end(self):
                pass

        return Streamer()

    def finish(self, me: int) -> None:
        with self.changed:
            self.running.discard(me)
            self.turn = 1 - me
            self.changed.notify_all()


@pytest.mark.few(4)
@all_families
def test_two_threads_that_take_turns(family):
    base = shared_base("llama")
    model = family.build(base)
    expected = [base.generate(**call) for call in (ONE, OTHER)]
    model._base_reader()
    turns = Turns()

    def run(me, call):
        try:
            return model.generate(**call, draft_tree=TREE, streamer=turns.streamer(me))
        finally:
            turns.finish(me)

    with ThreadPoolExecutor(2) as pool:
        assert all(map(torch.equal, pool.map(run, (0, 1), (ONE, OTHER)), expected))
    changes = sum(a != b for a, b in zip(turns.order, turns.order[1:]))
    assert changes > 10


class CallsAnother(StoppingCriteria):
    """Runs a whole other generation whenever it is asked."""

    def __init__(self, another):
        self.another = another
        self.got = []

    def __call__(self, input_ids, scores, **kwargs):
        self.got.append(self.another())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.few(4)
@all_families
def test_a_generation_within_every_step_of_another(family):
    base = shared_base("llama")
    model = family.build(base)
    inner = CallsAnother(lambda: model.generate(**OTHER | {"max_new_tokens": 7}, draft_tree=[[0], [0, 0], [1]]))
    criteria = StoppingCriteriaList([inner])
    outer = model.generate(**ONE, draft_tree=TREE, stopping_criteria=criteria, return_dict_in_generate=True)
    assert outer.accepted_lengths is not None
    assert torch.equal(outer.sequences, base.generate(**ONE))
    expected = base.generate(**OTHER | {"max_new_tokens": 7})
    assert len(inner.got) == 18 and all(torch.equal(got, expected) for got in inner.got)


def test_another_base_under_the_same_heads():
    first, second = tiny_base("llama", seed=1), tiny_base("llama", seed=2)
    model = Drafted(first, FAMILIES[0].build(first).drafter)
    assert torch.equal(model.generate(**ONE, draft_tree=TREE), first.generate(**ONE))
    model.base = second
    assert torch.equal(model.generate(**ONE, draft_tree=TREE), second.generate(**ONE))
    model.base = first
    assert model._base_reader().base is first


def test_a_copy_of_the_model_runs_its_own_base():
    model = FAMILIES[0].build(tiny_base("llama", seed=1))
    before = model.generate(**ONE, draft_tree=TREE)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.base.get_output_embeddings().weight.mul_(-1.0)
    assert torch.equal(twin.generate(**ONE, draft_tree=TREE), twin.base.generate(**ONE))
    assert torch.equal(model.generate(**ONE, draft_tree=TREE), before)
    assert not torch.equal(twin.base.generate(**ONE), before)
