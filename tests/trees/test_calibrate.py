"""Calibration: trees and the base take turns on the same calls, and the fastest one is kept."""

import json

import pytest
import torch

from hf_drafthead.trees import calibrate as calibrating
from hf_drafthead.trees.calibrate import Comparison, Timed, calibrate, count_trees, interval_of
from hf_drafthead.trees.entries import cpu_name
from hf_drafthead.trees.grow import ALONE, Size, TreeStatistics
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.trees.test_grow import planted

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
QUICK = {"new_tokens": 24, "max_nodes": 6}
GREEDY = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}
QUICKLY = {"FIRST_ROUNDS": 1, "ROUNDS": (1,), "PAIRS": 2, "FEW_PAIRS": 1, "TIMED_TOKENS": 6, "HOPELESS": 0.0}


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
        about = {"prompts_sha256": "x"}
        entries = calibrate(model, PROMPTS, batch_sizes=(1, 2), about=about, keep=kept.append, **QUICK)
    assert entries == kept == model.generation_config.calibration
    for entry, paths in zip(entries, ([[0], [0, 0]], [[0], [1], [2]])):
        entry |= {"tree": paths, "lookup": 0}
        entry["measured"] |= {"candidates": [[2, 1, 1.5, 1.0]], "tokens_per_step": 2.0, "step_cost": 1.0}
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
    assert measured["identical"] is True and measured["prompts_sha256"] == "x"
    assert (measured["temperature"], measured["prompts"]) == (0.0, 6)
    assert 1 <= measured["tokens_per_step"] < 5 and measured["step_cost"] > 0 and measured["tokens_per_second"] > 0
    assert {nodes for nodes, *_ in measured["candidates"]} <= {2, 4, 6}
    assert measured["copies"][0] == [0, 1.0, 1.0] and len(measured["copies"]) in (2, 3)
    assert measured["held_out"] == 2 and (measured["interval"] is None) == (first["measured"]["speedup"] == 1.0)
    json.dumps(first)


def test_calls_take_their_entries_also_after_saving_and_while_the_heads_are_the_same(calibrated, tmp_path):
    assert drafted(calibrated, 1) == {3} and drafted(calibrated, 2) == {4} and drafted(calibrated, 3) == {2}
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


def test_what_is_there_is_not_measured_again(calibrated, monkeypatch):
    monkeypatch.setattr(calibrating, "count_trees", None)
    stored = calibrated.generation_config.calibration
    assert calibrate(calibrated, PROMPTS, batch_sizes=(2, 1), resume=True) == [stored[1], stored[0]]


def test_captured_steps_have_entries_of_their_own(monkeypatch):
    model = family("medusa")
    asked, generate = [], type(model).generate

    def noted(self, *args, **call):
        asked.append(call.pop("cache_implementation", None))
        return generate(self, *args, **call)

    monkeypatch.setattr(type(model), "generate", noted)
    (entry,) = calibrate(model, PROMPTS, captured=True, **QUICK)
    assert entry["execution"] == "compiled" and asked[0] is None and set(asked[1:]) == {"static"}
    assert [nodes for nodes, *_ in entry["measured"]["candidates"]] == [4, 6]  # each is compiled: few, the deepest


def compare(monkeypatch, step, counted=None, rows=1, captured=False, copies=None):
    """A comparison where a tree's step costs what `step` says of its size, of 0.5 s; and the sizes of each round.

    copies: by tokens copied, the steps of a call and what each costs; by default they are worth nothing.
    """
    counted = counted or TreeStatistics.of(planted(), 40, 64)
    asked = []

    def clock(runs, repeats, device, first, after):
        assert repeats == 1
        for name in runs:
            after(name)
        text = torch.zeros(rows, 20)
        if -1 in runs:  # of the base, and with the best tree, with copies and without
            best = comparison._best()
            cost, fewer = (1.0, 1.0) if best == ALONE else (step(best), counted.fewer_steps(best, rows))
            timed = {-1: Timed(text, 0.5, 12.0, 24)}
            for count in runs.keys() - {-1}:
                times, steps = (copies or {}).get(count, (1.0, 12))
                timed[count] = Timed(text.clone(), 0.5, cost * times * steps / fewer, 2 * steps / fewer)
            return timed, {}
        asked.append([*runs][first % len(runs) :] + [*runs][: first % len(runs)])
        costs = {size: 0.5 * (1.0 if size == ALONE else step(size)) for size in runs}
        return {size: Timed(torch.zeros(rows, 20), cost, 19 * cost, 19) for size, cost in costs.items()}, {}

    monkeypatch.setattr(calibrating, "time_interleaved", clock)
    calls = [{"input_ids": torch.zeros(rows, 7), "max_new_tokens": 13}] * 3
    comparison = Comparison(family("medusa"), counted, calls, calls[:2], captured)
    return comparison, counted, asked


def test_what_is_printed_is_measured_on_prompts_that_the_tree_was_not_grown_on(monkeypatch):
    model, grown, compared = family("medusa"), [], []
    counting, comparing = calibrating.ranks_by_text, Comparison._compared
    monkeypatch.setattr(calibrating, "ranks_by_text", lambda *given: grown.extend(given[1]) or counting(*given))
    monkeypatch.setattr(
        Comparison, "_compared", lambda self, call: compared.append(call["input_ids"]) or comparing(self, call)
    )
    calibrate(model, PROMPTS, **QUICK)
    held_out = {tuple(prompt.tolist()) for prompt in PROMPTS[2::3]}
    assert {tuple(prompt.tolist()) for prompt in grown}.isdisjoint(held_out) and len(grown) == 4
    assert {tuple(row.tolist()) for ids in compared for row in ids} == held_out


def test_the_interval_is_that_of_texts_and_there_is_none_of_one():
    assert interval_of([0.2] * 12, 1) is None and interval_of([0.2], 3) is None
    low, high = interval_of([0.0, 0.4] * 6, 2)
    assert low < 1.0 < 1.5 < high and interval_of([0.0, 0.4, 0.0, 0.4], 4)[1] < high


def test_how_much_is_done_is_told_in_small_parts_and_how_long_it_takes_before_most_of_it(monkeypatch):
    comparison, *_ = compare(monkeypatch, lambda size: 1.0 + size.nodes / 24)
    shares, estimates = [], []
    comparison.advance = shares.append
    comparison.estimate = lambda calls, seconds: estimates.append((comparison.made, calls, seconds))
    comparison.fastest()
    ((made, calls, seconds),) = estimates
    assert made < calls / 4 and comparison.made <= calls and seconds > 0
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert all(later - share <= 0.1 for share, later in zip(shares[:-1], shares[1:-1]))


def test_an_interruption_keeps_the_fastest_tree_so_far(monkeypatch):
    model, kept = family("medusa"), []
    made, timed = [], Comparison._timed

    def interrupted(self, *given):
        made.append(given)
        if len(made) == 12:
            raise KeyboardInterrupt
        return timed(self, *given)

    monkeypatch.setattr(Comparison, "_timed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, PROMPTS, batch_sizes=(1, 2), keep=kept.append, **QUICK)
    (entry,) = kept
    assert model.generation_config.calibration == kept and entry["batch_size"] == 1
    assert entry["measured"]["stopped"] == "interrupted" and entry["measured"]["candidates"]
    made.clear()
    monkeypatch.setattr(Comparison, "_timed", lambda self, *given: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):  # before any tree was timed there is nothing to keep
        calibrate(model, PROMPTS, batch_sizes=(3,), keep=kept.append, **QUICK)
    assert len(kept) == 1


def test_no_round_is_begun_after_the_minutes_that_it_may_take(monkeypatch):
    monkeypatch.setattr(calibrating, "ROUNDS", (50,))
    model = family("medusa")
    (entry,) = calibrate(model, PROMPTS, minutes=1e-9, **QUICK)
    measured = entry["measured"]
    assert measured["stopped"] == "out of time" and measured["candidates"] and measured["copies"][0] == [0, 1.0, 1.0]
    for minutes in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="minutes is .*: expected a number above 0"):
            calibrate(model, PROMPTS, minutes=minutes, **QUICK)


@pytest.mark.parametrize("level, depth", [(0.0, 3), (0.02, 3), (0.5, 1)], ids=["free", "cheap", "dear"])
def test_the_fastest_tree_is_kept_and_where_levels_are_dear_a_shallow_one(level, depth, monkeypatch):
    comparison, counted, _ = compare(monkeypatch, lambda size: 1.0 + size.nodes / 24 + level * (size.depth - 1))
    entry, figures = comparison.fastest()
    paths = entry["tree"]
    best = Size(len(paths) + 1, max(map(len, paths)))
    assert best.depth == depth and paths == [list(path) for path in counted.paths[best]]
    cost = 1.0 + best.nodes / 24 + level * (depth - 1)
    assert figures["step_cost"] == pytest.approx(cost, abs=1e-3)
    assert figures["speedup"] == pytest.approx(counted.fewer_steps(best, 1) / cost, rel=1e-3)
    assert figures["tokens_per_step"] == pytest.approx(counted.fewer_steps(best, 1), abs=1e-3)
    assert figures["base_tokens_per_second"] == 2.0
    assert figures["speedup"] == pytest.approx(max(faster for *_, faster in figures["candidates"]), abs=1e-3)
    assert figures["interval"] == pytest.approx([figures["speedup"]] * 2, abs=1e-3)  # every text gains as much


def test_the_better_half_goes_on_and_larger_trees_than_pay_are_not_timed(monkeypatch):
    monkeypatch.setattr(calibrating, "ROUNDS", (2, 4, 8))
    monkeypatch.setattr(calibrating, "FIRST_ROUNDS", 1)
    monkeypatch.setattr(calibrating, "HOPELESS", 0.7)
    comparison, _, asked = compare(monkeypatch, lambda size: 1.0 + size.nodes / 4)
    comparison.fastest()
    sizes = [[size for size in names if size != ALONE] for names in asked]
    first, later = sizes[:-14], sizes[-14:]
    assert all(ALONE in names for names in asked) and max(size.nodes for size in first[-1]) < 40
    timed = {size for round in first for size in round}
    half, quarter, last = len(timed) // 2, len(timed) // 4, 2  # the last two to the end
    assert [len(round) for round in later] == [half] * 2 + [quarter] * 4 + [last] * 8
    assert {tuple(names).index(ALONE) for names in asked} != {0}  # another one begins
    assert len(comparison.costs[max(later[-1])]) == 1 + 2 + 4 + 8


@pytest.mark.parametrize("step, pays", [(1.0, True), (1.8, False), (5.0, False)])
def test_no_tree_is_kept_where_none_pays(step, pays, monkeypatch):
    counted = TreeStatistics({ALONE: [], Size(2, 1): [(0,)]}, {ALONE: [[1] * 8], Size(2, 1): [[2] * 4]}, 8)
    comparison, _, _ = compare(monkeypatch, lambda size: step * 1.12, counted)
    entry, figures = comparison.fastest()
    assert entry == {"tree": [[0]] if pays else [], "lookup": 0}
    assert figures["candidates"] == [[2, 1, 2.0, round(2 / step / 1.12, 4)]]
    if not pays:
        assert (figures["speedup"], figures["step_cost"], figures["tokens_per_step"]) == (1.0, 1.0, 1.0)
        assert figures["tokens_per_second"] == figures["base_tokens_per_second"]


@pytest.mark.parametrize("other", [Size(12, 3), 4], ids=["tree", "copies"])
def test_a_text_that_differs_is_told(other, monkeypatch):
    comparison, _, _ = compare(monkeypatch, lambda size: 1.0)
    clock = calibrating.time_interleaved

    def other_text(runs, repeats, device, first, **how):
        outputs, seconds = clock(runs, repeats, device, first, **how)
        if other in outputs:
            outputs[other][0].add_(1)
        return outputs, seconds

    monkeypatch.setattr(calibrating, "time_interleaved", other_text)
    assert comparison.fastest()[1]["identical"] is False


@pytest.mark.parametrize(
    "copies, kept",
    [
        ({}, 0),
        ({4: (1.0, 6), 8: (1.1, 5)}, 8),
        ({4: (1.0, 6), 8: (1.3, 5)}, 4),
        ({4: (1.1, 11), 8: (1.01, 12)}, 0),
        ({8: (1.0, 11.9)}, 0),  # less than PAYS
    ],
)
def test_copies_are_stored_where_they_pay(copies, kept, monkeypatch):
    comparison, counted, _ = compare(monkeypatch, lambda size: 1.0 + size.nodes / 200, copies=copies)
    entry, figures = comparison.fastest()
    without = Size(len(entry["tree"]) + 1, max(map(len, entry["tree"])))
    cost, steps = copies.get(kept, (1.0, 12))
    assert entry["lookup"] == kept and [count for count, *_ in figures["copies"]] == [0, 4, 8]
    assert figures["tokens_per_step"] == pytest.approx(counted.fewer_steps(without, 1) * 12 / steps, rel=1e-3)
    assert figures["step_cost"] == pytest.approx((1.0 + without.nodes / 200) * cost, rel=1e-3)
    assert figures["speedup"] == pytest.approx(comparison.speedup(without) * 12 / steps / cost, rel=1e-3)


def test_copies_are_tried_where_no_tree_pays_and_no_more_than_a_tree_has_nodes(monkeypatch):
    counted = TreeStatistics({ALONE: [], Size(2, 1): [(0,)]}, {ALONE: [[1] * 8], Size(2, 1): [[2] * 4]}, 8)
    comparison, _, _ = compare(monkeypatch, lambda size: 9.0, counted, copies={8: (1.2, 6)})
    entry, figures = comparison.fastest()
    assert entry == {"tree": [], "lookup": 8}
    assert (figures["tokens_per_step"], figures["step_cost"]) == (2.0, 1.2) and figures["speedup"] == 1.6667
    comparison, _, _ = compare(monkeypatch, lambda size: 1.0, counted)
    assert [count for count, *_ in comparison.fastest()[1]["copies"]] == [0, 1]


@pytest.mark.parametrize("given, line", [
    ({"prompts": []}, "there is no prompt to calibrate on"),
    ({"prompts": [PROMPTS[0], PROMPTS[1][:0]]}, "prompt 2 is empty: give at least one token"),
    ({"prompts": PROMPTS[:1]}, "the answers to 1 prompts are too few: they have 20 positions"),
    ({"prompts": PROMPTS[:3]}, "the answers to 2 prompts are too few: they have 40 positions"),
    ({"new_tokens": 4000}, "prompt 1 has 7 tokens, which with 4000 new ones exceed the base's"),
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
