"""The one clock: calls that take turns."""

import time

import torch

from hf_drafthead.trees import timing


def test_calls_take_turns_and_each_round_begins_with_another_one(monkeypatch):
    ticks = iter(range(100))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks) ** 2)
    order, before = [], []
    runs = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results, seconds = timing.time_interleaved(
        runs,
        9,
        torch.device("cpu"),
        first=4,
        before=lambda: before.append(len(order)),
        enough=lambda seconds: len(seconds["a"]) == 4,
    )
    assert "".join(order) == "bcacababcbca" and results == {"a": 12, "b": 10, "c": 11}
    assert before == [*range(12)]
    # the n-th call of all takes (2n + 1)^2 - (2n)^2 = 4n + 1
    assert seconds == {name: [4 * at + 1 for at, one in enumerate(order) if one == name] for name in "abc"}
