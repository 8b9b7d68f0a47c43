"""Calibration: the tree that promises most and the base take turns on the same calls, and what pays is kept."""

import json

import pytest
import torch

from hf_drafthead.generation import programs
from hf_drafthead.trees import calibrate as calibrating
from hf_drafthead.trees.calibrate import (
    Timed,
    calibrate,
    costs_of_trees,
    count_trees,
    fastest_of,
    figures_of,
    interval_of,
    timed_in_turn,
)
from hf_drafthead.trees.costs import ALONE, NodeCosts, Size, StepCosts
from hf_drafthead.trees.entries import cpu_name
from hf_drafthead.trees.rank_paths import TreeStatistics
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.trees.test_rank_paths import planted

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
QUICK = {"new_tokens": 24, "max_nodes": 6}
GREEDY = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
QUICKLY = {"PAIRS": 2, "FEW_PAIRS": 1, "TIMED_TOKENS": 6}


def family(name):
    model = next(one for one in FAMILIES if one.name == name).build(tiny_base("llama-gqa"))
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    for name, value in QUICKLY.items():
        monkeypatch.setattr(calibrating, name, value)


@pytest.fixture(scope="module")
def calibrated():
    """Hydra heads with entries for one row and for two, whose trees differ from each other and from `draft_tree`."""
    model = family("hydra")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in QUICKLY.items():
            patched.setattr(calibrating, name, value)
        kept = []
        entries = calibrate(model, PROMPTS, batch_sizes=(1, 2), keep=kept.append, **QUICK)
    assert entries == kept == model.generation_config.calibration
    for entry, paths in zip(entries, ([[0], [0, 0]], [[0], [1], [2]])):
        entry |= {"tree": paths, "lookup": 0}
        entry["measured"] |= {"costs": [[2, 1, 1.0]], "tokens_per_step": 2.0, "step_cost": 1.0}
    model.generation_config.draft_tree = [[0], [0, 0], [0, 0, 0], [1]]
    return model


def drafted(model, rows, **call):
    """Nodes of every step of a call whose text is the base's own."""
    prompts, nodes = torch.stack(PROMPTS[:rows]), set()
    text = model.generate(
        prompts, **{**GREEDY, **call}, on_step=lambda record: nodes.add(record.drafted) if record.step else None
    )
    assert torch.equal(text, model.base.generate(prompts, **GREEDY))
    return nodes


def test_an_entry_says_for_what_and_how_it_was_measured(calibrated):
    first = calibrated.generation_config.calibration[0]
    assert (first["device"], first["threads"]) == (cpu_name(), torch.get_num_threads())
    assert (first["dtype"], first["batch_size"], first["execution"]) == ("float64", 1, "eager")
    assert len(first["heads_hash"]) == 16
    measured = first["measured"]
    assert measured["identical"] is True
    assert (measured["temperature"], measured["prompts"]) == (0.0, 6)
    assert 1 <= measured["tokens_per_step"] < 5 and measured["step_cost"] > 0 and measured["tokens_per_second"] > 0
    assert {nodes for nodes, *_ in measured["candidates"]} <= {2, 4, 6}
    assert measured["copies"][0] == [0, 1.0, 1.0] and len(measured["copies"]) in (2, 3)
    assert measured["held_out"] == 2 and (measured["interval"] is None) == (first["measured"]["speedup"] == 1.0)
    json.dumps(first)


def test_calls_take_their_entries_also_after_saving_and_while_the_heads_are_the_same(calibrated, tmp_path):
    assert drafted(calibrated, 1) <= {2, 3} and drafted(calibrated, 2) <= {2, 4} and drafted(calibrated, 3) == {5}
    assert drafted(calibrated, 1, draft_tree=[[0]]) == {2} and drafted(calibrated, 1, draft_tree="auto")
    calibrated.save_pretrained(tmp_path)
    loaded = type(calibrated).from_pretrained(tmp_path, base_model=calibrated.base)
    assert drafted(loaded, 1) == {3}
    with torch.no_grad():
        next(loaded.drafter.parameters()).mul_(2)
    assert drafted(loaded, 1) == {5}


class Entries(list):
    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_a_call_does_not_copy_the_entries_which_are_long(calibrated, monkeypatch):
    stored = calibrated.generation_config.calibration
    monkeypatch.setattr(calibrated.generation_config, "calibration", Entries(stored))
    assert drafted(calibrated, 1) == {3} and drafted(calibrated, 1, draft_tree="auto")
    assert calibrated.generation_config.calibration == stored


def test_captured_steps_have_entries_of_their_own(monkeypatch):
    model = family("medusa")
    asked, generate = [], type(model).generate

    def noted(self, *args, **call):
        asked.append(call.pop("cache_implementation", None))
        return generate(self, *args, **call)

    monkeypatch.setattr(type(model), "generate", noted)
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)  # which takes long
    (entry,) = calibrate(model, PROMPTS, captured=True, **QUICK)
    assert entry["execution"] == "compiled" and asked[0] is None and set(asked[1:]) <= {"static"}
    assert [nodes for nodes, *_ in entry["measured"]["costs"]] == [4, 6]  # each is compiled: few


def costing(monkeypatch, step):
    """A step costs what `step` says of its tree's size; the sizes that were timed together."""
    asked, doubted = [], []

    def costs(self, trees):
        assert doubted == [0], "an entry, which is kept for long, is made of what is measured now"
        asked.append([*trees])
        return NodeCosts({size: step(size) for size in trees})

    monkeypatch.setattr(StepCosts, "__call__", costs)
    monkeypatch.setattr(StepCosts, "doubt", lambda self, seconds: doubted.append(seconds))
    return asked


def compared(monkeypatch, paths, faster, copies=None, rows=1):
    """A comparison where calls with a tree are as many times as fast as the base, and take half as many steps.

    copies: by tokens copied, as many times as fast as without, and as many times fewer steps.
    """

    def timed(model, call, captured, how):
        if how is None:
            return Timed(torch.zeros(rows, 20), 12.0, 24)
        count = how["prompt_lookup_num_tokens"]
        gain, fewer = (copies or {}).get(count, (0.5, 1.0)) if count else (1.0, 1.0)
        return Timed(torch.zeros(rows, 20), 12.0 / faster / gain, 24 // (2 if paths else 1) / fewer)

    monkeypatch.setattr(calibrating, "timed", timed)
    pairs = timed_in_turn(family("medusa"), paths, [{"input_ids": torch.zeros(rows, 7)}] * 2, False, int)
    return figures_of(pairs, paths, 2)


COUNTED = TreeStatistics.of(planted(), 40, 64)


def test_what_is_printed_is_measured_on_prompts_that_the_tree_was_not_grown_on(monkeypatch):
    model, grown, compared = family("medusa"), [], []
    counting, timing = calibrating.ranks_by_text, calibrating.timed
    monkeypatch.setattr(calibrating, "ranks_by_text", lambda *given: grown.extend(given[1]) or counting(*given))
    monkeypatch.setattr(
        calibrating, "timed", lambda model, call, *how: compared.append(call["input_ids"]) or timing(model, call, *how)
    )
    calibrate(model, PROMPTS, **QUICK)
    held_out = {tuple(prompt.tolist()) for prompt in PROMPTS[2::3]}
    assert {tuple(prompt.tolist()) for prompt in grown}.isdisjoint(held_out) and len(grown) == 4
    assert {tuple(row.tolist()) for ids in compared for row in ids} == held_out


def test_the_interval_is_that_of_texts_and_there_is_none_of_one():
    assert interval_of([0.2] * 12, 1) is None and interval_of([0.2], 3) is None
    low, high = interval_of([0.0, 0.4] * 6, 2)
    assert low < 1.0 < 1.5 < high and interval_of([0.0, 0.4, 0.0, 0.4], 4)[1] < high


def test_no_round_is_begun_after_the_time_that_they_may_take(monkeypatch):
    monkeypatch.setattr(calibrating, "PAIRS", 50)
    monkeypatch.setattr(calibrating, "LONG", 0.0)
    made, timed = [], calibrating.timed
    monkeypatch.setattr(calibrating, "timed", lambda *given: made.append(given) or timed(*given))
    (entry,) = calibrate(family("medusa"), PROMPTS, **QUICK)
    assert entry["measured"]["copies"][0] == [0, 1.0, 1.0] and len(made) <= 4


@pytest.mark.parametrize("level, depth", [(0.0, 3), (0.02, 3), (0.5, 1)], ids=["free", "cheap", "dear"])
def test_the_tree_that_promises_most_goes_on_and_where_levels_are_dear_a_shallow_one(level, depth, monkeypatch):
    def step(size):
        return 1.0 + size.nodes / 24 + level * (size.depth - 1)

    asked = costing(monkeypatch, step)
    costs = costs_of_trees(family("medusa"), COUNTED, 1, False)
    assert len(asked) == 1 and len(asked[0]) < len(COUNTED.steps)  # those of others follow
    assert costs.measured == {size: step(size) for size in costs.measured}
    speedups = {size: COUNTED.fewer_steps(size, 1) / costs(*size) for size in COUNTED.steps if size != ALONE}
    best = fastest_of(speedups)
    assert best.depth == depth and speedups[best] == max(speedups.values()) > 1.02
    assert fastest_of({best: 1.01}) == ALONE  # does not pay


@pytest.mark.parametrize("copies, kept", [
    ({}, 0), ({4: (1.5, 1.6), 8: (1.6, 1.9)}, 8), ({4: (1.5, 1.6), 8: (1.3, 1.9)}, 4),
    ({8: (1.01, 1.02)}, 0),  # less than PAYS
], ids=str)  # fmt: skip
@pytest.mark.parametrize("faster", [1.4, 1.01])
def test_a_tree_and_copies_are_stored_where_they_pay_on_held_out_prompts(faster, copies, kept, monkeypatch):
    paths = COUNTED.paths[Size(12, 3)]
    entry, figures = compared(monkeypatch, paths, faster, copies)
    gain, fewer = copies.get(kept, (1.0, 1.0))
    if faster * gain < 1.02:  # then the base decodes
        assert entry == {"tree": [], "lookup": 0} and figures["interval"] is None
        assert (figures["speedup"], figures["step_cost"], figures["tokens_per_step"]) == (1.0, 1.0, 1.0)
        assert figures["tokens_per_second"] == figures["base_tokens_per_second"] == 2.0
        return
    assert entry == {"tree": [*map(list, paths)], "lookup": kept}
    assert [count for count, *_ in figures["copies"]] == [0, 4, 8] and figures["identical"] is True
    assert figures["speedup"] == pytest.approx(faster * gain, rel=1e-3)
    assert figures["interval"] == pytest.approx([figures["speedup"]] * 2, rel=1e-3)  # every text gains as much
    assert figures["tokens_per_step"] == pytest.approx(2 * fewer, rel=1e-3)
    assert figures["step_cost"] == pytest.approx(2 * fewer / faster / gain, rel=1e-3)


def test_copies_are_tried_where_no_tree_pays_and_no_more_than_a_tree_has_nodes(monkeypatch):
    entry, figures = compared(monkeypatch, [], 1.0, {8: (1.5, 1.6)})
    assert entry == {"tree": [], "lookup": 8} and (figures["tokens_per_step"], figures["speedup"]) == (1.6, 1.5)
    assert [count for count, *_ in compared(monkeypatch, [(0,)], 1.5)[1]["copies"]] == [0, 1]


@pytest.mark.parametrize("other", [0, 4], ids=["tree", "copies"])
def test_a_text_that_differs_is_told(other):
    pairs = [{count: Timed(torch.zeros(1, 9) + (count == other), 1.0, 9) for count in (-1, 0, 4, 8)}]
    assert figures_of(pairs, [(0,)], 1)[1]["identical"] is False


@pytest.mark.parametrize("given, line", [
    ({"prompts": []}, "there is no prompt to calibrate on"),
    ({"prompts": [PROMPTS[0], PROMPTS[1][:0]]}, "prompt 2 is empty: give at least one token"),
    ({"prompts": PROMPTS[:1]}, "the answers to 1 prompts are too few: they have 20 positions"),
    ({"prompts": PROMPTS[:3]}, "the answers to 2 prompts are too few: they have 40 positions"),
    ({"max_nodes": 1}, "max_nodes is 1: expected 2"), ({"max_nodes": 5000}, "max_nodes is 5000: expected 2"),
    ({"batch_sizes": ()}, "batch_sizes is []"), ({"batch_sizes": (2, 0)}, "batch_sizes is [2, 0]"),
    ({"temperature": -1.0}, "temperature is -1.0"), ({"temperature": float("nan")}, "temperature is nan"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_bad_input_is_one_line(given, line):
    model = family("medusa")
    with pytest.raises(ValueError) as refused:
        calibrate(model, given.pop("prompts", PROMPTS), **{**QUICK, **given})
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert not getattr(model.generation_config, "calibration", None)


def test_heads_that_are_never_right_are_refused(monkeypatch):
    monkeypatch.setattr(calibrating, "ranks_by_text", lambda *args, **how: [torch.full((60, 3), 99)] * 4)
    with pytest.raises(ValueError, match="no guess of these heads is right at any of 240 positions: train them first"):
        count_trees(family("medusa"), PROMPTS, 24, 8)


def test_a_calibration_at_a_temperature(monkeypatch):
    model = family("medusa")
    torch.manual_seed(1)
    state = torch.get_rng_state()
    (entry,) = calibrate(model, PROMPTS, temperature=0.8, **QUICK)
    assert torch.equal(torch.get_rng_state(), state)
    assert entry["measured"]["temperature"] == 0.8 and entry["measured"]["identical"]
