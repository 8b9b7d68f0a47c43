"""The process's generator belongs to whoever calls: a call leaves it where the base would, whatever raises or draws."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.bases import probe
from hf_drafthead.bases.generators import GENERATORS, refusing_draws, same_states
from hf_drafthead.generation.noise import RandomNumbers
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base
from tests.generation.test_sampling import TRACED

CPU = torch.device("cpu")
CALL = {"max_new_tokens": 14, "eos_token_id": None}


class Raised(Exception):
    """Of an object of the user's."""


class Acts(BaseStreamer):
    """In each of its roles it does something at each call from one on, and raises at another."""

    def __init__(self, act=lambda: None, first=0, raises=None):
        self.act, self.first, self.raises, self.calls = act, first, raises, 0

    def called(self):
        self.calls += 1
        if self.calls > self.first:
            self.act()
        if self.calls == self.raises:
            raise Raised

    def put(self, value):
        self.called()

    end = called


class Processes(Acts, LogitsProcessor):
    def __call__(self, input_ids, scores):
        self.called()
        return scores


class Fires(Acts, StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        self.called()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def prefixes(*given, **how):
    made = Acts(*given, **how)
    return {"prefix_allowed_tokens_fn": lambda row, ids: made.called() or [*range(5, 60)]}


ROLES = {
    "streamer": lambda *given, **how: {"streamer": Acts(*given, **how)},
    "processor": lambda *given, **how: {"logits_processor": LogitsProcessorList([Processes(*given, **how)])},
    "criterion": lambda *given, **how: {"stopping_criteria": StoppingCriteriaList([Fires(*given, **how)])},
    "prefix": prefixes,
}


def outcome(generate, seed=5, **call):
    """The text, or what was raised, and where the generator stands behind it."""
    torch.manual_seed(seed)
    try:
        text = generate(**call).tolist()
    except Raised:
        text = "raised"
    return text, torch.get_rng_state().tolist()


def both(model, call, ours=None):
    """What the base and the model do, each with calls of its own."""
    return outcome(model.base.generate, **call()), outcome(model.generate, **call(), draft_tree=TREE, **(ours or {}))


def by_thread(act):
    def run():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    return run


ACTS = {
    "draws": lambda: torch.rand(3),
    "sets a seed": lambda: torch.manual_seed(3),
    "a thread sets a seed": by_thread(lambda: torch.manual_seed(3)),
    "does nothing": lambda: None,
}


@pytest.mark.few(8)
@pytest.mark.parametrize("captured", [{}, {"compile_config": TRACED}], ids=["eager", "captured"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("rows", [1, 3])
def test_objects_that_draw_or_set_a_seed_are_followed_as_by_the_base(rows, role, act, sample, captured):
    model = FAMILIES[0].build(shared_base("llama-gqa"))

    def call():
        return {**prompt(rows), **CALL, "do_sample": sample, **role(act, first=4)}

    expected, got = both(model, call, captured)
    assert got == expected


@pytest.mark.few(6)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("raises", [1, 2, 6])
@pytest.mark.parametrize("role", ROLES.values(), ids=ROLES)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_exception_leaves_the_generator_where_the_base_leaves_it(rows, role, raises, sample, draws):
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    act = (lambda: torch.rand(2)) if draws else lambda: None

    def call():
        return {**prompt(rows), **CALL, "do_sample": sample, **role(act, raises=raises)}

    expected, got = both(model, call)
    assert expected[0] == "raised" and got == expected


def test_a_callback_that_raises_leaves_the_generator_of_a_greedy_call_alone():
    model = FAMILIES[0].build(shared_base("llama-gqa"))
    at_seed = outcome(lambda: torch.zeros(1))[1]

    def fails(record):
        raise Raised

    assert outcome(model.generate, **prompt(), **CALL, draft_tree=TREE, on_step=fails) == ("raised", at_seed)


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("where", ["a part in training", "a hook"])
def test_a_base_that_draws_decodes_by_itself_as_if_nothing_was_tried(where, sample):
    base = tiny_base("gpt2")
    model = FAMILIES[0].build(base)

    def call():
        return {**prompt(), **CALL, "do_sample": sample}

    expected, got = both(model, call)
    assert got == expected
    if where == "a hook":
        base.lm_head.register_forward_hook(lambda *given: torch.rand(1) and None)
    else:
        base.transformer.drop.p = 0.4
        base.transformer.drop.train()
    for _ in range(2):
        expected, got = both(model, call)
        assert got == expected


def test_that_a_trial_draws_is_noticed(monkeypatch):
    model = FAMILIES[0].build(tiny_base("gpt2"))
    model.base.lm_head.register_forward_hook(lambda *given: torch.rand(1) and None)
    monkeypatch.setattr(probe, "refusing_draws", lambda device: torch.no_grad())
    expected, got = both(model, lambda: {**prompt(), **CALL, "do_sample": True})
    assert got != expected


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize("use", ["a trial", "a lent generator", "an object that does not draw"])
def test_a_request_that_begins_in_another_thread_is_no_draw_of_this_one(use):
    """It begins where the process's generators stood, and these go on from where it has left them."""
    torch.manual_seed(3)
    alone = RandomNumbers.of_request(CPU).states
    left = torch.get_rng_state()
    torch.manual_seed(3)
    mine = RandomNumbers.of_request(CPU, seed=5)
    drawn = torch.rand(4, generator=torch.Generator().manual_seed(5))
    with refusing_draws(CPU) if use == "a trial" else mine.lent(at_once=use == "a lent generator"):
        other = in_a_thread(lambda: RandomNumbers.of_request(CPU).states)
        if use == "a lent generator":
            assert torch.equal(torch.rand(4), drawn)
    assert same_states(other, alone) and torch.equal(torch.get_rng_state(), left)
    assert mine.moved == (use == "a lent generator")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_is_forked_while_another_thread_draws_goes_on_from_where_calls_begin():
    """And while that thread has the lock, for which it waits nowhere."""
    torch.manual_seed(3)
    left, drawing, forked = torch.get_rng_state(), threading.Event(), threading.Event()

    def draws():
        with RandomNumbers.of_request(CPU, seed=5).lent(at_once=True), GENERATORS:
            torch.rand(4)
            drawing.set()
            time.sleep(0.2)
        forked.wait()

    thread = threading.Thread(target=draws)
    thread.start()
    assert drawing.wait(60)
    child = os.fork()
    if not child:
        failed = 1
        try:
            signal.alarm(60)
            states = in_a_thread(lambda: RandomNumbers.of_request(CPU).states)
            failed = int(not torch.equal(states[-1], left))
        finally:
            os._exit(failed)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
