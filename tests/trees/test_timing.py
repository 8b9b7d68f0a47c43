"""The one clock: calls that take turns."""

import pytest
import torch

from hf_drafthead.trees import timing
from tests.bases import tiny_base


def test_calls_take_turns_and_each_round_begins_with_another_one(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks) ** 2)
    order, around = [], []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results, seconds = timing.time_interleaved(
        runs, 4, torch.device("cpu"), before=lambda: around.append("before"), after=around.append
    )
    assert "".join(order) == "abcbcacababc" and results == {"a": 10, "b": 11, "c": 12}
    assert around == [word for name in order for word in ("before", name)]
    # the n-th call of all takes (2n + 1)^2 - (2n)^2 = 4n + 1
    assert seconds == {name: [4 * at + 1 for at, one in enumerate(order) if one == name] for name in "abc"}


def test_the_first_round_may_begin_with_another_one():
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "abc"}
    timing.time_interleaved(runs, 2, torch.device("cpu"), first=4)
    assert "".join(order) == "bcacab"


def test_the_steps_of_a_call_are_timed_by_its_streamer_or_on_step(monkeypatch):
    ticks = iter([0.0, 5.0, 6.0, 7.0, 17.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    clock = timing.StepClock()
    assert clock.figures() == clock.figures(1) == (0.0, 0, 0)
    for _ in range(5):
        clock.put(None)
    clock.end()
    assert clock.figures() == (3.0, 17.0, 4) and clock.figures(prompts=1) == (1.0, 12.0, 3)


FLOAT, HALF = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype, costs, named", [
    (FLOAT, (4.1, 1.2), "bfloat16"), (FLOAT, (1.4, 1.0), None), (FLOAT, (2.0, 1.9), None),
    (HALF, (1.1, 6.0), "float32"), (HALF, (4.1, 1.2), None), (torch.float64, (9, 1), None),
], ids=str)  # fmt: skip
def test_the_dtype_in_which_a_tree_is_cheap_is_named_where_the_base_s_is_dear(dtype, costs, named, monkeypatch):
    base = tiny_base("llama").to(dtype)
    if dtype != torch.float64:
        assert min(timing.product_seconds(base, (1, 8)).values()) > 0
    of = dict(zip((FLOAT, HALF), costs))
    monkeypatch.setattr(timing, "product_seconds", lambda base, tokens, dtype: {1: 1.0, 8: of[dtype]})
    advice = timing.dtype_advice(base)
    assert advice is None if named is None else advice.endswith(f"trees pay more with --dtype {named}.")


@pytest.mark.parametrize("dtype, seconds, times", [
    (HALF, (0.9, 0.1), "9.0"), (torch.float16, (0.3, 0.1), "3.0"), (HALF, (0.1, 0.1), None), (FLOAT, (9.0, 1.0), None),
], ids=str)  # fmt: skip
def test_a_training_in_a_type_that_the_cpu_multiplies_slowly_is_told(dtype, seconds, times, monkeypatch):
    base = tiny_base("llama").to(dtype)
    timed = dict(zip((dtype, FLOAT), seconds))
    monkeypatch.setattr(timing, "product_seconds", lambda base, tokens, dtype: dict.fromkeys(tokens, timed[dtype]))
    advice, name = timing.training_advice(base), str(dtype).removeprefix("torch.")
    assert advice is None if times is None else f"takes {times} times as long here in {name} as in float32" in advice
