"""The loop that a server lives on: what waits, ends, is cancelled or fails, and nothing lost or answered twice."""

import asyncio
import itertools
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StaticCache
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.bases.errors import DoesNotFit
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.batching.scheduler import Scheduler
from hf_drafthead.generation import rows
from hf_drafthead.generation.rows import SharedBatch
from tests.bases import VOCABULARY, tiny_base
from tests.batching.requests import TREE, add, alone, final
from tests.batching.test_exact import MEDUSA, Counts, Fails
from tests.generation.agreement import shared_base

LONG = {"max_new_tokens": 200, "eos_token_id": None}
SHORT = {"max_new_tokens": 6, "eos_token_id": None}


class Gate(BaseStreamer):
    """Says when the first tokens are there, and waits until it is opened."""

    def __init__(self):
        self.reached, self.opened, self.puts = threading.Event(), threading.Event(), 0

    def put(self, value):
        self.puts += 1
        if self.puts == 4:
            self.reached.set()
            assert self.opened.wait(60)

    def end(self):
        pass


def standing(manager, prompt=(3, 4, 5)):
    """A request in whose middle the thread of a manager stands, and what lets it go on."""
    gate = Gate()
    name = add(manager, ([*prompt], LONG), streamer=gate)
    assert gate.reached.wait(60)
    return name, gate.opened.set


@pytest.fixture
def held(guessing, managed):
    """A manager whose thread stands in the middle of a request, and what lets it go on."""
    manager = managed(guessing)
    name, go_on = standing(manager)
    yield manager, name, go_on
    go_on()


def test_results_are_those_of_transformers(guessing, managed):
    manager = managed(guessing)
    name = manager.add_request(torch.tensor([[3, 4, 5]]), max_new_tokens=6, eos_token_id=-1, record_timestamps=True)
    result = manager.get_result(name)
    assert type(result) is GenerationOutput and result.request_id == name
    assert result.status == RequestStatus.FINISHED and result.is_finished() and result.error is None
    assert result.created_time <= result.lifespan[0] <= result.timestamps[0] <= result.timestamps[-1]
    assert len(result.timestamps) == 6 and result.timestamps[-1] <= result.lifespan[1]


def test_streaming_gives_a_result_after_every_step(guessing, managed):
    manager = managed(guessing)
    parts = [*manager.request_id_iter(add(manager, ([3, 4, 5], LONG), streaming=True))]
    texts = [part.generated_tokens for part in parts]
    assert len(texts[0]) == 1 and texts[-1] == alone(guessing.base, ([3, 4, 5], LONG))
    assert all(one == other[: len(one)] for one, other in zip(texts, texts[1:]))
    assert 20 < len(texts) < 150, "several tokens come with a step"
    assert [part.is_finished() for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].drafted > parts[-1].accepted == len(texts[-1]) - len(parts), "a step emits one token beside these"


def test_a_request_that_is_cancelled_frees_its_slot_within_a_step(held, guessing):
    manager, name, go_on = held
    waiting = add(manager, ([3, 4], LONG))
    manager.cancel_request(name)
    manager.cancel_request(waiting)
    manager.cancel_request("nobody's")
    go_on()
    result, other = final(manager, name), final(manager, waiting)
    assert result.status == RequestStatus.FAILED and result.error == "the request was cancelled"
    expected = alone(guessing.base, ([3, 4, 5], LONG))
    assert result.generated_tokens == expected[: len(result.generated_tokens)] and len(result.generated_tokens) < 20
    assert other.error == "the request was cancelled" and other.generated_tokens == []
    assert manager.metrics()["running"] == manager.metrics()["waiting"] == 0
    assert (manager.metrics()["cancelled"], manager.metrics()["failed"]) == (2, 0)


def test_the_same_id_twice(held):
    manager, name, go_on = held
    with pytest.raises(ValueError, match=f"the request '{name}' is not finished yet: give another request_id."):
        manager.add_request([3], request_id=name)
    manager.cancel_request(name)
    go_on()
    final(manager, name)
    assert manager.add_request([3], request_id=name, max_new_tokens=2) == name
    assert final(manager, name).error is None


def test_a_number_that_a_user_has_taken_for_an_id_is_left_out(guessing, managed):
    manager = managed(guessing, start=False)
    assert [manager.add_request([3], name) for name in ("req_1", None, None)] == ["req_1", "req_2", "req_3"]


def test_a_result_that_never_comes_is_not_waited_for(guessing, managed):
    """Of an id that nobody has, or whose last result was taken."""
    manager = managed(guessing)
    name = add(manager, ([3], SHORT))
    assert final(manager, name).error is None
    assert manager.get_result(name) is None and manager.get_result("nobody's") is None
    assert [*manager.request_id_iter(name)] == []


def test_a_long_prompt_is_given_up_within_a_piece_once_its_request_is_cancelled(guessing, managed, monkeypatch):
    manager, pieces, go_on = managed(guessing, start=False, longest_pause=0.0), [], Scheduler._between

    def between(self, batch, request):
        pieces.append(request)
        if len(pieces) == 2:
            manager.cancel_request(request.request_id)
        go_on(self, batch, request)

    monkeypatch.setattr(Scheduler, "_between", between)
    other = add(manager, ([3, 4, 5], LONG))
    name = add(manager, ([5, 6] * 1000, SHORT))
    manager.start()
    result = final(manager, name)
    assert result.error == "the request was cancelled" and result.generated_tokens == [] and len(pieces) == 2
    assert final(manager, other).generated_tokens == alone(guessing.base, ([3, 4, 5], LONG))


def test_memory_that_is_short_while_a_prompt_is_read_loses_nobody(guessing, managed, monkeypatch):
    """The step between two pieces leaves fewer slots than there were when the request was begun."""
    manager, between = managed(guessing, start=False, longest_pause=0.0), Scheduler._between
    short, step = threading.Event(), SharedBatch.take

    def steps(self, state, *stages):
        if short.is_set() and len(state.lengths) > 1:
            raise DoesNotFit("no memory")
        return step(self, state, *stages)

    monkeypatch.setattr(SharedBatch, "take", steps)
    monkeypatch.setattr(Scheduler, "_between", lambda *given: (short.set(), between(*given)))
    requests = [([3, 4], LONG), ([5, 6], LONG), ([7, 8] * 100, SHORT)]
    names = [add(manager, each) for each in requests]
    manager.start()
    results = [final(manager, name) for name in names]
    assert [result.error for result in results] == [None] * 3 and manager.slots == 1
    assert [result.generated_tokens for result in results] == [alone(guessing.base, each) for each in requests]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("what", ["logits_processor", "streamer"])
def test_an_object_that_would_end_the_process_ends_its_request(what, call, error, guessing, managed):
    class Leaves(Counts, BaseStreamer):
        def put(self, value):
            self.seen.append(value)
            if len(self.seen) == call:
                raise error("the object's own")

        def end(self):
            pass

        def __call__(self, input_ids, scores):
            self.put(input_ids)
            return scores

    manager = managed(guessing)
    good = add(manager, ([5, 6], SHORT))
    bad = add(manager, ([5, 6], SHORT), **{what: [Leaves()] if what == "logits_processor" else Leaves()})
    assert final(manager, bad).error == f"{error.__name__}: the object's own"
    assert final(manager, good).generated_tokens == alone(guessing.base, ([5, 6], SHORT)) and manager.is_running()


def test_results_that_were_there_before_their_handler_come_first(guessing, managed, monkeypatch):
    manager, seen = managed(guessing, start=False), []
    name = add(manager, ([3, 4], SHORT), streaming=True)
    request = manager._known[name]

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        request.tokens = [1]
        manager._deliver(request)
        later, call_soon = threading.Thread(target=manager._deliver, args=(request,)), loop.call_soon

        def slow(*given, **named):
            monkeypatch.setattr(loop, "call_soon", call_soon)
            request.tokens = [1, 2]
            later.start()
            later.join(0.2)
            return call_soon(*given, **named)

        monkeypatch.setattr(loop, "call_soon", slow)
        manager.register_result_handler(name, lambda result: seen.append(result.generated_tokens))
        await asyncio.to_thread(later.join)
        await asyncio.sleep(0)

    asyncio.run(ask())
    assert seen == [[1], [1, 2]]


def test_stop_finishes_what_waits_and_runs(held, guessing):
    manager, name, go_on = held
    names = [add(manager, ([5 + number], SHORT)) for number in range(8)]
    manager.stop(block=False)
    with pytest.raises(RuntimeError, match="the manager was stopped: start"):
        manager.add_request([3])
    go_on()
    manager.join(timeout=60)
    results = {result.request_id: result for result in manager}
    assert set(results) == {name, *names} and all(result.error is None for result in results.values())
    assert not manager.is_running() and manager.get_result() is None


def test_a_hard_stop_ends_everything_with_an_error(held):
    manager, name, go_on = held
    names = [add(manager, ([5 + number], SHORT)) for number in range(8)]
    manager.stop(block=False, hard_stop=True)
    go_on()
    manager.join(timeout=60)
    results = [*manager]
    assert sorted(result.request_id for result in results) == sorted([name, *names]), "each is told once"
    errors = {result.error for result in results}
    assert errors == {"RuntimeError: the manager was stopped before this request was finished"}


def test_a_manager_that_is_started_while_it_drains_goes_on(held, guessing):
    """Those who wait for its end do not wait for ever; what was asked before is finished as well."""
    manager, name, go_on = held
    manager.stop(block=False)
    waiter = threading.Thread(target=manager.join)
    waiter.start()
    while not manager._changed._waiters:
        waiter.join(0.01)
    manager.start()
    later = add(manager, ([5], SHORT))
    waiter.join(60)
    go_on()
    assert final(manager, later).generated_tokens == alone(guessing.base, ([5], SHORT))
    assert final(manager, name).generated_tokens == alone(guessing.base, ([3, 4, 5], LONG))
    assert manager.is_running() and not waiter.is_alive()
    assert final(manager, add(manager, ([6], SHORT))).error is None


def test_a_manager_that_is_started_behind_a_hard_stop_starts_anew(held, guessing):
    manager, name, go_on = held
    manager.stop(block=False, hard_stop=True)
    starter = threading.Thread(target=manager.start)
    starter.start()
    go_on()
    starter.join(60)
    assert final(manager, name).error == "RuntimeError: the manager was stopped before this request was finished"
    assert final(manager, add(manager, ([5], SHORT))).generated_tokens == alone(guessing.base, ([5], SHORT))


class Hint(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores

    def certain_path(self, prefix, most):
        return [5.0]


def more_scores(input_ids, scores):
    """One that has a token of its own, some tokens on."""
    return torch.cat([scores, scores.new_full((1, 1), 99.0)], dim=1) if input_ids.shape[1] > 4 else scores


def test_a_request_that_fails_ends_alone(held, guessing):
    manager, name, go_on = held
    good = [add(manager, ([5 + number], SHORT)) for number in range(4)]
    bad = {
        add(manager, ([5, 6], SHORT), logits_processor=[more_scores]): "IndexError: a logits processor chose a token",
        add(manager, ([5, 6], SHORT), logits_processor=[Hint()]): "TypeError: 'float' object",
        add(manager, ([5, 6], SHORT), logits_processor=[Fails(3)]): "ZeroDivisionError: the processor's own",
        add(manager, ([5, 6], SHORT), logits_processor=[Fails(1)]): "ZeroDivisionError: the processor's own",
        add(manager, ([5, 6], SHORT), temperature=-1.0, do_sample=True): "ValueError: `temperature`",
        add(manager, ([5], SHORT), nothing_like_it=1): "ValueError: The following `model_kwargs` are not used",
        add(manager, ([5], SHORT), stop_strings=["a"]): "ValueError: There are one or more stop strings",
    }
    go_on()
    for request, start in bad.items():
        result = final(manager, request)
        assert result.error.startswith(start) and result.status == RequestStatus.FAILED
    assert final(manager, name).generated_tokens == alone(guessing.base, ([3, 4, 5], LONG))
    for number, request in enumerate(good):
        assert final(manager, request).generated_tokens == alone(guessing.base, ([5 + number], SHORT))


def test_requests_that_choose_of_fewer_or_more_scores_run_beside_others(guessing, managed):
    settings = [{**SHORT, "do_sample": True, "seed": seed, "logits_processor": []} for seed in range(5)]
    settings[1]["logits_processor"] = [lambda input_ids, scores: scores[:, :40]]
    settings[3]["logits_processor"] = [lambda input_ids, scores: torch.nn.functional.pad(scores, (0, 3), value=-1e9)]
    settings[4] |= {"do_sample": False, "logits_processor": [more_scores], "eos_token_id": [1, VOCABULARY]}
    manager = managed(guessing, start=False)
    names = [add(manager, ([5, 6], each)) for each in settings]
    manager.start()
    for name, each in zip(names, settings):
        assert final(manager, name).generated_tokens == alone(guessing.base, ([5, 6], each))


def test_an_error_of_the_base_ends_those_that_run_and_no_more(held, guessing, monkeypatch):
    manager, name, go_on = held
    broken, walk = threading.Event(), SharedBatch.walk

    def breaks(self, *given):
        if not broken.is_set():
            broken.set()
            raise ArithmeticError("the base's own")
        return walk(self, *given)

    monkeypatch.setattr(SharedBatch, "walk", breaks)
    go_on()
    assert final(manager, name).error == "ArithmeticError: the base's own"
    assert final(manager, add(manager, ([5], SHORT))).generated_tokens == alone(guessing.base, ([5], SHORT))


@pytest.mark.parametrize("where", ["_base_reader", "leave", "pack", "vacate"])
def test_an_error_of_what_all_share_ends_requests_and_not_the_manager(where, guessing, managed, monkeypatch):
    """Wherever it comes from, nobody waits for ever, and who asks later is answered."""
    manager, failing = managed(guessing, start=False, slots=2), [1, 1]
    place = rows if where == "vacate" else type(guessing) if where == "_base_reader" else SharedBatch
    works = getattr(place, where)

    def fails(*given):
        if failing:
            failing.pop()
            raise MemoryError("not even for this")
        return works(*given)

    monkeypatch.setattr(place, where, fails)
    names = [add(manager, ([5 + number], SHORT)) for number in range(6)]
    manager.start()
    results = [manager.get_result(name, timeout=60) for name in names]
    errors = [result.error for result in results]
    assert "MemoryError: not even for this" in errors and None in errors and len({*errors}) == 2
    for number, result in enumerate(results):
        expected = alone(guessing.base, ([5 + number], SHORT))
        assert result.generated_tokens == (
            expected if result.error is None else expected[: len(result.generated_tokens)]
        )
    assert final(manager, add(manager, ([5], SHORT))).error is None and not manager._known


def test_calls_that_would_wait_for_their_own_thread_are_refused(guessing, managed):
    manager, said = managed(guessing), []

    def asks(row, tokens):
        for call in (lambda: manager.pause().__enter__(), lambda: manager.get_result("other"), manager.join):
            try:
                call()
            except RuntimeError as error:
                said.append(str(error))
        manager.stop()
        return [*range(3, 60)]

    name = add(manager, ([5], {"max_new_tokens": 1, "eos_token_id": None}), prefix_allowed_tokens_fn=asks)
    assert final(manager, name).error is None
    assert said[:2] == [
        f"{call}() in the thread that decodes would wait for itself: call it in another thread."
        for call in ("pause", "get_result")
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed shapes"])
def test_where_memory_is_short_fewer_rows_go_on(fixed, guessing, managed, monkeypatch, caplog, request):
    """Those that have to leave join again later, with the state that they had."""
    if fixed:
        request.getfixturevalue("untraced")
    config = GenerationConfig(cache_implementation="static") if fixed else None
    manager, noise = managed(guessing, start=False, slots=4, generation_config=config), SharedBatch.tilts
    requests = [([5 + number], {"max_new_tokens": 40, "eos_token_id": None, "do_sample": True, "seed": number})
                for number in range(6)]  # fmt: skip
    names = [add(manager, each) for each in requests]
    steps = 0

    def short(self, *given):
        nonlocal steps
        steps += 1
        if steps >= 4 and sum(member is not None for member in self.members) > 1:
            raise DoesNotFit("out of memory")
        return noise(self, *given)

    monkeypatch.setattr(SharedBatch, "tilts", short)
    manager.start()
    assert [final(manager, name).generated_tokens for name in names] == [
        alone(guessing.base, each) for each in requests
    ]
    assert manager.slots == 1
    said = [line for line in caplog.messages if line.startswith("Memory does not hold a step of")]
    assert said == [
        "Memory does not hold a step of 4 rows: 2 request(s) at once are decoded from now on.",
        "Memory does not hold a step of 2 rows: 1 request(s) at once are decoded from now on.",
    ]


def test_the_queue_is_bounded(guessing, managed, monkeypatch):
    monkeypatch.setattr("hf_drafthead.batching.tracker.WAIT", 0.0)
    manager = managed(guessing, start=False, continuous_batching_config=SimpleNamespace(max_queue_size=2))
    names = [add(manager, ([5], SHORT)) for _ in range(2)]
    with pytest.raises(queue.Full, match="2 requests wait, and max_queue_size is 2: ask again later."):
        add(manager, ([5], SHORT))
    manager.start()
    assert [final(manager, name).error for name in names] == [None, None]


def test_an_event_loop_does_not_wait_for_the_queue(guessing, managed, monkeypatch):
    """Its other clients would wait as well: the request is refused at once, and its handler forgotten."""
    monkeypatch.setattr("hf_drafthead.batching.tracker.WAIT", 1000.0)
    manager = managed(guessing, start=False, max_queue_size=1)

    async def ask(name: str, tokens: list[int]) -> None:
        manager.register_result_handler(name, print)
        add(manager, (tokens, SHORT), request_id=name)

    asyncio.run(ask("first", [5]))
    with pytest.raises(queue.Full, match="1 requests wait, and max_queue_size is 1: ask again later."):
        asyncio.run(ask("second", [5]))
    with pytest.raises(ValueError, match="the prompt is"):
        asyncio.run(ask("third", []))
    with pytest.raises(ValueError, match="'first' has a handler, and is not finished yet: give another"):
        asyncio.run(ask("first", [6]))
    assert [*manager._handlers] == ["first"]


def test_several_threads_ask_at_once(guessing, managed):
    manager, requests = managed(guessing), []
    for start, number in itertools.product(range(3, 9), range(5)):
        settings = {"max_new_tokens": 10 + number, "eos_token_id": None, "do_sample": start % 2 == 1, "seed": number}
        requests.append(([start, 5 + number], settings))
    with ThreadPoolExecutor(6) as pool:
        results = pool.map(lambda request: final(manager, add(manager, request)), requests)
        assert [each.generated_tokens for each in results] == [alone(guessing.base, request) for request in requests]


def test_nothing_is_decoded_while_it_is_paused(guessing, managed):
    manager = managed(guessing)
    with manager.pause(), pytest.raises(RuntimeError, match="leave `pause` first"):
        manager.stop()
    with manager.pause():
        name = add(manager, ([5], SHORT))
        assert manager.get_result(timeout=0.3) is None and manager.metrics()["waiting"] == 1
    assert final(manager, name).error is None


def test_results_go_to_a_handler_on_the_event_loop(guessing, managed):
    manager = managed(guessing)

    async def ask(start: int) -> list[int]:
        done = asyncio.get_running_loop().create_future()
        manager.register_result_handler(str(start), lambda result: result.is_finished() and done.set_result(result))
        add(manager, ([start], SHORT), request_id=str(start))
        return (await done).generated_tokens

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*map(ask, range(3, 9)))

    assert asyncio.run(ask_all()) == [alone(guessing.base, ([start], SHORT)) for start in range(3, 9)]
    assert not manager._handlers and not manager._results


def test_what_cannot_share_a_batch_runs_between_two_steps_and_can_be_cancelled(held, guessing):
    manager, name, go_on = held
    beams = add(manager, ([5, 6], {**SHORT, "num_beams": 3}))
    processor = Counts()
    cancelled = add(manager, ([5, 6], {**LONG, "num_beams": 3, "logits_processor": [processor]}))
    go_on()
    assert final(manager, beams).generated_tokens == alone(guessing.base, ([5, 6], {**SHORT, "num_beams": 3}))
    manager.cancel_request(cancelled)
    result = final(manager, cancelled)
    assert result.error == "the request was cancelled" and len(processor.seen) < 200
    assert final(manager, name).generated_tokens == alone(guessing.base, ([3, 4, 5], LONG))


def test_a_model_that_changes_while_it_serves(held, guessing):
    """Requests that run end first; the next batch reads the model as it is."""
    manager, name, go_on = held
    seen = []
    hook = guessing.base.lm_head.register_forward_hook(lambda *given: seen.append(1) or given[2] * 0.5)
    later = add(manager, ([5], SHORT))
    go_on()
    expected = alone(guessing.base, ([5], SHORT))
    assert final(manager, later).generated_tokens == expected
    hook.remove()
    assert seen and final(manager, name).error is None


def test_a_model_in_training_decodes_by_the_base(managed):
    """From then on; a manager that is made puts its model into eval mode, as transformers does."""
    model = MEDUSA.build(shared_base("llama-gqa")).train()
    manager = managed(model)
    assert not model.training and not model.base.training and not model.drafter.training
    model.drafter.train()
    assert final(manager, add(manager, ([5], SHORT))).generated_tokens == alone(model.base, ([5], SHORT))


@pytest.mark.parametrize(
    "prompt, settings, line",
    [
        ([], {}, "the prompt is []: expected the token ids of one text, at least one."),
        ([[3, 4]], {}, "the prompt is [[3, 4]]: expected the token ids of one text"),
        (["3"], {}, "the prompt is ['3']: expected the token ids of one text"),
        ([5, 600], {}, "the prompt holds the token 600: expected ids from 0 to 66, which the base has."),
        ([5, -1], {}, "the prompt holds the token -1: expected ids from 0 to 66, which the base has."),
        ([3], {"num_return_sequences": 2}, "num_return_sequences: a request is one text; give it to generate_batch"),
        (
            [3],
            {"generation_config": GenerationConfig(num_return_sequences=2, do_sample=True)},
            "num_return_sequences: a request is one text; give it to generate_batch",
        ),
        ([3], {"seed": 1.5}, "seed is 1.5: expected a whole number, of 64 bits."),
        ([3], {"seed": True}, "seed is True: expected a whole number, of 64 bits."),
        ([3], {"draft_tree": [[0]]}, "draft_tree: steps are shared, give it to init_continuous_batching."),
        ([3], {"lookup_texts": [[3]]}, "lookup_texts: steps are shared, give it to init_continuous_batching."),
        ([3], {"acceptance": "typical"}, "acceptance: steps are shared, give it to init_continuous_batching."),
    ],
)
def test_bad_requests_are_refused_in_one_line(prompt, settings, line, guessing, managed):
    with pytest.raises(ValueError) as refused:
        managed(guessing, start=False).add_request(prompt, **settings)
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_a_prompt_that_is_longer_than_the_base_s_table_of_positions(managed):
    """Others go on behind their window, as alone."""
    base = tiny_base("gpt2", dtype=torch.float32)
    manager, most = managed(MEDUSA.build(base), draft_tree=[[0]]), base.config.max_position_embeddings
    with pytest.raises(ValueError) as refused:
        manager.add_request([5] * (most + 1), max_new_tokens=2)
    assert str(refused.value) == (
        f"the prompt has {most + 1} tokens, and the base {most} positions: give a shorter one."
    )
    fits = [5] * (most - 2), {"max_new_tokens": 2, "eos_token_id": None}
    assert final(manager, add(manager, fits)).generated_tokens == alone(base, fits)
    rotary = tiny_base("llama-gqa", dtype=torch.float32)
    longer = [5] * (rotary.config.max_position_embeddings + 3), {"max_new_tokens": 4, "eos_token_id": None}
    other = managed(MEDUSA.build(rotary), draft_tree=[[0]])
    assert final(other, add(other, longer)).generated_tokens == alone(rotary, longer)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["a cache", "a static cache", "an assistant", "a loop"])
def test_what_others_cannot_share_is_decoded_alone_with_one_warning(kind, held, guessing, caplog, monkeypatch):
    if kind == "an assistant":  # transformers calls it in a way that it deprecates
        monkeypatch.setattr(transformers.generation.utils.logger, "warning_once", lambda *given: None)
    manager, name, go_on = held
    base, drafter = guessing.base, guessing.drafter.model
    settings = {
        "a cache": lambda: {CACHE: DynamicCache()},
        "a static cache": lambda: {CACHE: StaticCache(config=base.config, max_cache_len=64)},
        "a loop": lambda: {"custom_generate": lambda model, input_ids, **named: input_ids.repeat(1, 2)},
        "an assistant": lambda: {"assistant_model": drafter},
    }[kind]
    request = add(manager, ([5, 6], {**SHORT, **settings()}))
    go_on()
    result = final(manager, request)
    assert result.error is None and result.generated_tokens == alone(base, ([5, 6], {**SHORT, **settings()}))
    assert final(manager, name).generated_tokens == alone(base, ([3, 4, 5], LONG))
    assert sum(line.startswith("A request is decoded alone, and others wait for it:") for line in caplog.messages) == 1


def test_a_model_that_is_moved_while_it_serves(managed):
    """Those that run end with one line; later ones have the text of the model as it is."""
    model = MEDUSA.build(tiny_base("llama-gqa", dtype=torch.float32))
    manager = managed(model, draft_tree=[[0]])
    name, go_on = standing(manager)
    model.double()
    later = add(manager, ([5, 6], SHORT))
    go_on()
    assert final(manager, name).error == (
        "RuntimeError: the model was moved from float32 on cpu to float64 on cpu while it served: requests that ran "
        "are lost; stop() the manager before, and start() it behind that."
    )
    assert final(manager, later).generated_tokens == alone(model.base, ([5, 6], SHORT))


def test_a_model_that_is_given_other_heads_while_it_serves(managed):
    """Those that run go on with the heads that they began with; others wait for them, and begin with the new ones."""
    base = tiny_base("llama-gqa", dtype=torch.float32)
    model, other = MEDUSA.build(base), MEDUSA.build(base)
    manager, asked = managed(model, draft_tree=[[0]]), []
    name, go_on = standing(manager)
    model.drafter = other.drafter
    expand = other.drafter.expand
    other.drafter.expand = lambda *given: asked.append(manager.metrics()["running"]) or expand(*given)
    later = [add(manager, ([5, number], SHORT)) for number in range(3, 6)]
    go_on()
    assert final(manager, name).generated_tokens == alone(base, ([3, 4, 5], LONG))
    for number, request in zip(range(3, 6), later):
        assert final(manager, request).generated_tokens == alone(base, ([5, number], SHORT))
    assert asked


def test_bad_managers_are_refused_in_one_line(guessing):
    with pytest.raises(ValueError, match="slots is 0: expected the number of requests that are decoded at once, from"):
        guessing.init_continuous_batching(slots=0)
    with pytest.raises(ValueError, match="max_queue_size is -1: expected the number of requests that wait, 0 for any"):
        guessing.init_continuous_batching(max_queue_size=-1)
    with pytest.raises((TypeError, ValueError), match="draft_tree"):
        guessing.init_continuous_batching(draft_tree="no such tree")


def test_generate_batch_as_transformers_calls_it(guessing):
    prompts = [[3, 4, 5], [6], [7, 8]]
    config = GenerationConfig(max_new_tokens=6, num_return_sequences=2, do_sample=True, top_k=5)
    config.eos_token_id = -1
    cb_config = SimpleNamespace(max_requests_per_batch=2, return_logprobs=True, seed=4, max_queue_size=0)
    one, two = (
        guessing.generate_batch(prompts, config, cb_config, record_timestamps=True, draft_tree=TREE) for _ in range(2)
    )
    assert [*one] == [f"req_{number}{child}" for number in (0, 2, 4) for child in ("__child#0", "")]
    assert [result.generated_tokens for result in one.values()] == [each.generated_tokens for each in two.values()]
    assert all(len(result.generated_tokens) == len(result.logprobs) == 6 for result in one.values())
    assert all(log <= 0 for result in one.values() for log in result.logprobs)
    assert len({tuple(result.generated_tokens) for result in one.values()}) > 3
    assert guessing.generate_batch([]) == {}


@pytest.mark.parametrize("fault", ["never joined", "delivered twice", "a slot that is not freed"])
def test_the_laws_of_the_loop_can_fail(fault, guessing, managed, monkeypatch):
    manager = managed(guessing, start=False, slots=2)
    if fault == "never joined":
        monkeypatch.setattr(SharedBatch, "join", lambda *given: None)
    elif fault == "delivered twice":
        deliver = manager._deliver
        monkeypatch.setattr(manager, "_deliver", lambda request: (deliver(request), deliver(request)))
    else:
        monkeypatch.setattr(rows, "vacate", lambda state, row: None)
        monkeypatch.setattr(SharedBatch, "leave", lambda self, rows: None)
    names = [add(manager, ([5 + number], SHORT)) for number in range(4)]
    manager.start()
    manager.stop(timeout=2.0)
    results = [manager.get_result(timeout=0) for _ in range(8)]
    good = [result.request_id for result in results if result is not None and result.error is None]
    assert sorted(good) != sorted(names) or manager.is_running()
    manager.stop(hard_stop=True, block=False)
