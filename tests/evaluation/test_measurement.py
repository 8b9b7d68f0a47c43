"""Every figure of a measurement against a calculation by hand, from rounds whose seconds and tokens are known."""

import types

import pytest
import torch

from hf_drafthead.evaluation.measurement import Round, Run, drafting_steps, summed_up
from hf_drafthead.generation import StepRecord
from hf_drafthead.trees.entries import heads_hash


def model_of(weights=None):
    """What a measurement asks of a model: names, types, the weights of the heads."""
    drafter = torch.nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        drafter.weight.copy_(torch.eye(2) if weights is None else weights)
    base = types.SimpleNamespace(name_or_path="base", device=torch.device("cpu"), dtype=torch.float32)
    base.config = types.SimpleNamespace(_commit_hash=None)
    config = types.SimpleNamespace(family="medusa", base_model_revision="c0ffee")
    return types.SimpleNamespace(name_or_path="heads", base=base, config=config, drafter=drafter)


def steps_of(count, nodes, seconds):
    return [StepRecord(1 + number, [[5]], [[0]], [1], nodes, seconds) for number in range(count)]


def rounds():
    """Two rounds of 3 repeats: medians of 4 and 2 seconds for the base, of 1 and 2 for the heads, of 3 for another."""
    first = Round(
        category="x",
        rows=2,
        runs={
            "base": Run([4.0, 8.0, 2.0], tokens=20),
            "heads": Run([1.0, 5.0, 1.0], tokens=20),
            "other": Run([3.0, 3.0, 6.0], tokens=20, identical=False),
        },
        accepted=torch.tensor([[4, 3, 2], [5, 4, 0]]),
        steps=steps_of(2, 9, {"draft": 0.5, "verify": 1.0, "walk": 2.0, "commit": 4.0, "step": 8.5}),
    )
    second = Round(
        category="y",
        rows=1,
        runs={"base": Run([2.0, 2.0, 6.0], tokens=10), "heads": Run([2.0, 2.0, 1.0], tokens=10)},
        accepted=torch.tensor([[3, 2, 2, 2]]),
        steps=steps_of(3, 5, {"draft": 0.5 / 3, "verify": 1.0 / 3, "walk": 0.0, "commit": 0.5 / 3, "step": 1.0}),
    )
    return [first, second]


@pytest.fixture
def found():
    return summed_up(model_of(), rounds(), batch_size=2, repeats=3, compared=["other", "absent"])


def test_speeds_are_medians_of_the_repeats_between_the_lowest_and_the_highest(found):
    assert (found.base_tokens_per_second, found.tokens_per_second) == (30 / 8.0, 30 / 3.0)
    assert (found.prompts, found.new_tokens, found.tokens_per_step, found.efficiency) == (3, 30, 27 / 9, 2.0 / 3.0)
    base = [30 / 6.0, 30 / 10.0, 30 / 8.0]  # of the three repeats
    speedups = [heads / own for heads, own in zip([30 / 3.0, 30 / 7.0, 30 / 2.0], base)]
    assert [found.speedup, *found.speedup_spread] == pytest.approx([2.0, min(speedups), max(speedups)])
    x, y = found.per_category["x"], found.per_category["y"]
    assert (x["prompts"], x["base_tokens_per_second"], x["tokens_per_second"], x["speedup"]) == (2, 5.0, 20.0, 2.0)
    assert (y["prompts"], y["base_tokens_per_second"], y["tokens_per_second"], y["speedup"]) == (1, 5.0, 5.0, 1.0)
    assert (x["tokens_per_step"], y["tokens_per_step"]) == (18 / 5, 9 / 4)


def test_another_is_set_against_base_and_heads_over_its_own_rounds(found):
    other = found.compared["other"]
    assert other["tokens_per_second"] == 20 / 3.0
    assert other["speedup"] == pytest.approx((20 / 3.0) / 5.0)
    assert other["speedup_of_heads"] == pytest.approx(20.0 / (20 / 3.0))
    assert other["identical"] is False
    assert found.compared["absent"] is None


def test_the_time_split_names_each_stage_in_milliseconds_per_step(found):
    expected = {"draft": 300.0, "verify": 600.0, "walk": 800.0, "commit": 1700.0, "rest": 600.0, "step": 4000.0}
    assert found.time_split == pytest.approx(expected)
    assert found.tree_nodes == 9


def test_the_figures_name_the_weights_that_gave_them(found):
    weight = torch.eye(2)
    assert found.heads_hash == heads_hash([("drafter.weight", weight)])
    half = model_of()
    half.drafter.bfloat16()
    assert summed_up(half, rounds(), batch_size=2, repeats=3).heads_hash == found.heads_hash
    assert summed_up(model_of(2 * weight), rounds(), batch_size=2, repeats=3).heads_hash != found.heads_hash
    assert found.base_revision == "c0ffee"
    loaded = model_of()
    loaded.base.config._commit_hash = "beef"
    assert summed_up(loaded, rounds(), batch_size=2, repeats=3).base_revision == "beef"
    loaded.drafter.to("meta")  # weights that lie elsewhere have no hash
    assert summed_up(loaded, rounds(), batch_size=2, repeats=3).heads_hash is None


def test_the_steps_that_drafted_have_figures_of_their_own():
    steps = [StepRecord(number, [], [], counts, nodes, {}) for number, (nodes, counts) in enumerate(
        [(8, [3, 1]), (1, [1, 1]), (1, [1, 0]), (8, [2, 0])]
    )]  # fmt: skip
    assert drafting_steps(steps) == {"drafting_share": 0.5, "tokens_per_drafting_step": 2.0}
    assert drafting_steps(steps[1:2]) == {"drafting_share": 0.0, "tokens_per_drafting_step": None}
    assert drafting_steps([]) == {"drafting_share": None, "tokens_per_drafting_step": None}
