"""What one request of many does, or what is done to the model meanwhile, is of no harm to others, and is not lost."""

import asyncio
import os
import threading

import pytest
import torch
from transformers import ContinuousBatchingConfig
from transformers.generation.streamers import BaseStreamer

from tests.bases import tiny_base
from tests.batching.requests import add, alone, final
from tests.batching.test_manager import LONG, SHORT, standing
from tests.families import FAMILIES

PROMPT = [3 + place % 50 for place in range(48)]


@pytest.fixture
def own():
    """A model of the test's own, whose base may be changed."""
    return FAMILIES[0].build(tiny_base("llama-gqa"))


def changed(base) -> None:
    with torch.no_grad():
        for layer in base.model.layers:
            layer.self_attn.v_proj.weight.mul_(-1.5)


def changed_unseen(base) -> None:
    """Through `.data`, which no version counts."""
    for layer in base.model.layers:
        layer.self_attn.v_proj.weight.data.mul_(-1.5)


@pytest.mark.parametrize("change, paused", [(changed, True), (changed_unseen, True), (changed, False)])
def test_new_weights_read_a_prompt_anew(change, paused, own, managed):
    manager = managed(own)
    _, go_on = standing(manager, PROMPT)
    if paused:
        threading.Timer(0.2, go_on).start()
        with manager.pause():
            change(own.base)
    else:
        change(own.base)
        go_on()
    request = [*PROMPT, 5], SHORT
    assert final(manager, add(manager, request)).generated_tokens == alone(own.base, request)


def test_a_beginning_is_still_copied_where_nothing_has_changed(own, managed, monkeypatch):
    manager, copied = managed(own), []
    _, go_on = standing(manager, PROMPT)
    beginning = manager._batch.beginning
    monkeypatch.setattr(manager._batch, "beginning", lambda *of: copied.append(beginning(*of)) or copied[-1])
    go_on()
    request = [*PROMPT, 5], SHORT
    assert final(manager, add(manager, request)).generated_tokens == alone(own.base, request)
    assert copied[-1] is not None


def test_who_comes_to_the_end_of_the_table_of_positions_ends_alone(managed):
    base = tiny_base("gpt2")
    positions = base.config.max_position_embeddings
    model = FAMILIES[0].build(base)
    manager, fits = managed(model), ([3, 4, 5], {"max_new_tokens": 60, "eos_token_id": None})
    first = add(manager, fits)
    longest = [5] * (positions - 9)
    other = add(manager, (longest, LONG))
    ended = final(manager, other)
    assert final(manager, first).generated_tokens == alone(base, fits)
    assert ended.error.startswith(f"IndexError: the text has reached the end of the base's {positions} positions")
    settings = {"max_new_tokens": len(ended.generated_tokens), "eos_token_id": None}
    assert len(ended.generated_tokens) > 8 and ended.generated_tokens == alone(base, (longest, settings))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_process_refuses_requests_until_it_starts_a_thread_of_its_own(guessing, managed):
    manager, request = managed(guessing), ([3, 4, 5], SHORT)
    expected = alone(guessing.base, request)
    assert final(manager, add(manager, request)).generated_tokens == expected
    child = os.fork()
    if not child:
        said = 1
        try:
            try:
                add(manager, request)
            except RuntimeError as error:
                manager.start()
                result = manager.get_result(add(manager, request), timeout=60)
                said = int("was forked" not in str(error) or result.generated_tokens != expected)
        finally:
            os._exit(said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert final(manager, add(manager, request)).generated_tokens == expected


@pytest.mark.parametrize("settings", [{"num_beams": 2}, {"do_sample": True, "seed": 3, "use_cache": False}], ids=str)
def test_what_decodes_by_itself_has_log_probabilities_and_streams(settings, guessing, managed):
    config = ContinuousBatchingConfig(return_logprobs=True)
    manager, request = managed(guessing, continuous_batching_config=config), ([3, 4, 5], {**SHORT, **settings})
    results = [*manager.request_id_iter(add(manager, request, streaming=True))]
    tokens, logprobs = results[-1].generated_tokens, results[-1].logprobs
    assert tokens == alone(guessing.base, request) and len(logprobs) == len(tokens)
    assert len(results) == (1 if "num_beams" in settings else len(tokens) + 1)
    logits = guessing.base(torch.tensor([[3, 4, 5, *tokens]])).logits[0, 2:-1].float()
    if "num_beams" in settings:
        expected = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), expected, atol=1e-4)


def test_a_handler_is_not_given_what_an_older_request_of_its_id_has_left(guessing, managed):
    manager, older, newer = managed(guessing), ([3, 4, 5], SHORT), ([6, 7], SHORT)
    add(manager, older, request_id="same")
    while not manager._results:
        manager.get_result("none", timeout=0.01)

    async def ask():
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler("same", lambda result: result.is_finished() and done.set_result(result))
        add(manager, newer, request_id="same")
        return await asyncio.wait_for(done, 60)

    assert asyncio.run(ask()).generated_tokens == alone(guessing.base, newer)
    add(manager, newer, request_id="same")
    assert manager.get_result("same").generated_tokens == alone(guessing.base, newer)
    assert manager.get_result(timeout=0).generated_tokens == alone(guessing.base, older)


def test_a_handler_that_raises_is_given_the_rest_of_what_came_before_it(guessing, managed):
    manager, given = managed(guessing), []
    add(manager, ([3, 4, 5], SHORT), request_id="early", streaming=True)
    while "early" in manager._known:
        manager.get_result("none", timeout=0.01)

    def handler(result):
        given.append(result)
        raise ValueError("of the user")

    async def ask():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        manager.register_result_handler("early", handler)
        await asyncio.sleep(0.1)

    waiting = len(manager._results)
    asyncio.run(ask())
    assert waiting == len(given) > 1 and given[-1].is_finished() and not given[0].is_finished()


class Seeds(BaseStreamer):
    """Lets another thread set the seed of the process while it is given a token."""

    def put(self, value):
        thread = threading.Thread(target=torch.manual_seed, args=(7,))
        thread.start()
        thread.join()

    def end(self):
        pass


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_a_seed_that_is_set_while_a_streamer_runs_stays(sample, guessing, managed):
    manager, request = managed(guessing), ([3, 4, 5], {**SHORT, "do_sample": sample, "seed": 5})
    result = final(manager, add(manager, request, streamer=Seeds()))
    state = torch.get_rng_state()
    torch.manual_seed(7)
    assert torch.equal(torch.get_rng_state(), state)
    assert result.generated_tokens == alone(guessing.base, request)
