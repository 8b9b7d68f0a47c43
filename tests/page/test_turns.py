"""Turns: one run computes at a time, the one that has used less time goes next, and each has its own random numbers."""

import threading
import time

import pytest
import torch

from hf_drafthead.page.turns import Stopped, Turns

CPU = torch.device("cpu")


def in_threads(*runs) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def spend(seconds: float) -> None:
    """Compute, as far as a clock can tell."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.0005)


def test_only_one_run_computes_at_a_time_and_its_clock_counts_its_own_turns():
    turns = Turns(["a", "b"], CPU, seed=0, slice_seconds=0.0)
    inside: list[str] = []
    most, spent = [], dict.fromkeys("ab", 0.0)

    def run(name, seconds):
        with turns.hold(name):
            for _ in range(20):
                inside.append(name)
                most.append(len(inside))
                start = time.perf_counter()
                spend(seconds)
                spent[name] += time.perf_counter() - start
                inside.remove(name)
                turns.pause(name)

    in_threads(lambda: run("a", 0.004), lambda: run("b", 0.008))
    assert len(most) == 40 and max(most) == 1
    assert all(spent[name] <= turns.seconds(name) for name in "ab")
    assert turns.seconds("a") + turns.seconds("b") < 2 * (spent["a"] + spent["b"])


def test_the_run_that_has_used_less_time_goes_next():
    turns = Turns(["slow", "fast"], CPU, seed=0, slice_seconds=0.0)
    order = []

    def run(name, count, seconds):
        with turns.hold(name):
            for _ in range(count):
                order.append(name)
                spend(seconds)
                turns.pause(name)

    in_threads(lambda: run("slow", 4, 0.05), lambda: run("fast", 40, 0.005))
    while_both_ran = order[: len(order) - order[::-1].index("slow")]
    assert while_both_ran.count("fast") > 2 * while_both_ran.count("slow")
    assert order[0] == "slow"


def test_a_slice_is_not_cut_short():
    turns = Turns(["a", "b"], CPU, seed=0, slice_seconds=60.0)
    order = []

    def run(name):
        with turns.hold(name):
            for _ in range(5):
                order.append(name)
                turns.pause(name)

    in_threads(lambda: run("a"), lambda: run("b"))
    assert order == [*"aaaaabbbbb"]


def test_each_run_draws_its_own_random_numbers():
    def alone() -> list[float]:
        torch.manual_seed(7)
        return [float(torch.rand(())) for _ in range(10)]

    expected = alone()
    turns = Turns(["a", "b"], CPU, seed=7, slice_seconds=0.0)
    drawn: dict[str, list[float]] = {"a": [], "b": []}

    def run(name):
        with turns.hold(name):
            for _ in range(10):
                drawn[name].append(float(torch.rand(())))
                turns.pause(name)

    in_threads(lambda: run("a"), lambda: run("b"))
    assert drawn == {"a": expected, "b": expected}


def test_stop_ends_every_run_at_its_next_pause():
    turns = Turns(["a", "b"], CPU, seed=0, slice_seconds=0.0)
    stopped = []

    def run(name):
        with pytest.raises(Stopped), turns.hold(name):
            while True:
                turns.pause(name)
        stopped.append(name)

    in_threads(lambda: run("a"), lambda: run("b"), turns.stop)
    assert sorted(stopped) == ["a", "b"]


def test_a_run_that_fails_gives_its_turn_back():
    turns = Turns(["a", "b"], CPU, seed=0)
    done = []

    def fails():
        with pytest.raises(RuntimeError), turns.hold("a"):
            raise RuntimeError

    def works():
        with turns.hold("b"):
            done.append("b")

    in_threads(fails, works)
    assert done == ["b"]
