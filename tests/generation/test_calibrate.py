"""Calibration: the entry that fits a call names its tree, and the text stays the base's own."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers.utils import logging

from hf_drafthead.generation import calibrate as calibrating
from hf_drafthead.generation import costs, worth
from hf_drafthead.generation.calibrate import calibrate
from hf_drafthead.generation.entries import cpu_name
from hf_drafthead.generation.ladder import ALONE, CostCurve, Ladder, Size, TreesInTurn
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.generation.worth import worth_of_trees
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES

PROMPTS = list(torch.randint(3, VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(3)))
QUICK = {"new_tokens": 24, "max_nodes": 12}
FEW = {"COST_TOKENS": 6, "COST_ROUNDS": 1, "COST_TURNS": 2}
GREEDY = {"max_new_tokens": 12, "eos_token_id": None, "do_sample": False}


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    for name, value in FEW.items():
        monkeypatch.setattr(costs, name, value)
    monkeypatch.setattr(calibrating, "FEW_TURNS", 2)
    monkeypatch.setattr(calibrating, "CHECK_TURNS", 2)
    monkeypatch.setattr(worth, "PRECISION", 0.2)


def family(name):
    return next(one for one in FAMILIES if one.name == name)


@pytest.fixture(scope="module")
def calibrated():
    """Hydra heads with entries for one row and for two, whose trees differ from each other and from `draft_tree`."""
    model = family("hydra").build(tiny_base("llama-gqa"))
    with pytest.MonkeyPatch.context() as patched:
        for name, value in FEW.items():
            patched.setattr(costs, name, value)
        patched.setattr(calibrating, "FEW_TURNS", 2)
        patched.setattr(calibrating, "CHECK_TURNS", 2)
        patched.setattr(worth, "PRECISION", 0.2)
        kept = []
        entries = calibrate(model, PROMPTS, batch_sizes=(1, 2), keep=kept.append, **QUICK)
    assert entries == kept == model.generation_config.calibration
    for entry, paths in zip(entries, ([[0], [0, 0]], [[0], [1], [2]])):
        entry["tree"] = paths
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


@pytest.fixture
def notices():
    told = []

    class Handler(logging.logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())

    handler = Handler()
    logger = logging.logging.getLogger("hf_drafthead")
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def test_an_entry_says_what_was_measured(calibrated):
    first = calibrated.generation_config.calibration[0]
    assert (first["device"], first["threads"]) == (cpu_name(), torch.get_num_threads())
    assert (first["dtype"], first["batch_size"], first["execution"]) == ("float64", 1, "eager")
    assert len(first["heads_hash"]) == 16
    measured = first["measured"]
    assert measured["identical"] and measured["method"] == "paths" and measured["prompts"] == 6
    assert 1 <= measured["tokens_per_step"] < 5 and 1 <= measured["predicted_tokens_per_step"] < 5
    assert all(seconds > 0 for _, seconds in measured["step_seconds"])
    sizes = [nodes for nodes, _ in measured["tokens_per_step_by_nodes"]]
    assert sizes == [size for size in (1, 2, 3, 4, 5, 6, 8, 10, 12) if size <= measured["step_seconds"][-1][0]]
    assert sizes == [nodes for nodes, _ in measured["tokens_per_second_by_nodes"]]


def test_a_call_takes_the_entry_that_fits_and_else_the_nearest_with_one_notice(calibrated, notices):
    assert drafted(calibrated, 1) == {3} and drafted(calibrated, 2) == {4}
    assert notices == []
    assert drafted(calibrated, 3) == {2} and drafted(calibrated, 3) == {2}
    assert len(notices) == 1 and "batch size 3" in notices[0] and "is a first choice" in notices[0]
    assert drafted(calibrated, 1, draft_tree=[[0]]) == {2}


class Entries(list):
    def __deepcopy__(self, memo):
        raise AssertionError("copied")


def test_a_call_does_not_copy_the_entries_which_are_long(calibrated, monkeypatch):
    stored = calibrated.generation_config.calibration
    monkeypatch.setattr(calibrated.generation_config, "calibration", Entries(stored))
    assert drafted(calibrated, 1) == {3} and drafted(calibrated, 1, draft_tree="auto")
    assert drafted(calibrated, 1, draft_tree=[[0]]) == {2}
    assert calibrated.generation_config.calibration == stored


def test_entries_are_saved_and_loaded_and_belong_to_their_heads(calibrated, tmp_path, notices):
    calibrated.save_pretrained(tmp_path)
    loaded = type(calibrated).from_pretrained(tmp_path, base_model=calibrated.base)
    assert drafted(loaded, 1) == {3} and notices == []
    with torch.no_grad():
        next(loaded.drafter.parameters()).mul_(2)
    assert drafted(loaded, 1) == {5}
    assert len(notices) == 1


def test_what_is_there_is_not_measured_again(calibrated, monkeypatch):
    monkeypatch.setattr(worth, "own_texts", None)
    stored = calibrated.generation_config.calibration
    assert calibrate(calibrated, PROMPTS, batch_sizes=(2, 1), resume=True) == [stored[1], stored[0]]


def test_captured_steps_have_entries_of_their_own(monkeypatch):
    model = family("medusa").build(tiny_base("llama-gqa"))
    asked = []

    def noted(self, *args, **call):
        asked.append(call.pop("cache_implementation", None))
        return generate(self, *args, **call)

    generate = type(model).generate
    monkeypatch.setattr(type(model), "generate", noted)
    monkeypatch.setattr(costs, "COMPILED_STEPS", ())
    (entry,) = calibrate(model, PROMPTS, captured=True, new_tokens=24, max_nodes=3)
    assert entry["execution"] == "compiled" and set(asked[1:]) == {"static"} and asked[0] is None


def test_in_a_batch_the_row_that_takes_most_steps_counts():
    # of three texts: 6 tokens each after the first, in 2, 3 and 6 steps
    steps = [[3, 3], [2, 2, 2], [1] * 6]
    one_guess = Size(2, 1)
    found = worth.Worth({one_guess: [(0,)]}, {ALONE: [[1] * 6] * 3, one_guess: steps}, 18)
    assert [call.steps for call in found.calls(one_guess, 1, 99)] == [2, 3, 6]
    assert [call.steps for call in found.calls(one_guess, 2, 99)] == [3, 6, 6]  # the last text is followed by the first
    assert [(call.steps, call.base_steps) for call in found.calls(one_guess, 3, 99)] == [(6, 6)] * 3
    assert {call.tokens for call in found.calls(one_guess, 2, 99)} == {14}
    assert found.tokens_per_step(one_guess) == 18 / 11
    assert [costs.gain(found, one_guess, rows) for rows in (1, 2, 3)] == [18 / 11, 18 / 15, 1.0]
    # of 5 tokens the first needs no step, and the others may end within one
    assert found.calls(one_guess, 1, 5) == [(5, 4, 2), (5, 4, 2), (5, 4, 4)]
    one = costs.Costs(CostCurve([(1, 1.0), (2, 1.5)]), start=2.0, base_step=1.0, base_start=1.0)
    rate, speedup = one.predicted(found, one_guess, 2, 99)
    assert rate == 3 * 14 / (3 * 2.0 + 15 * 1.5) and speedup == (3 * 1.0 + 18 * 1.0) / (3 * 2.0 + 15 * 1.5)


def timed_by_size(monkeypatch, step):
    """Steps that take as long as `step` says of nodes and levels, of the base 1.0; which trees were timed."""
    asked = []

    def timed(model, tree, call, captured=False):
        if isinstance(tree, TreesInTurn):
            turns = [tree.trees[place] for place in tree.order[: call["max_new_tokens"] - 1]]
            asked.extend(Size(one.num_nodes, one.max_depth) for one in turns)
            return costs.Timed(0.0, 0.5, 0.0, each=[step(one.num_nodes, one.max_depth) for one in turns])
        asked.append(Size(tree.num_nodes, tree.max_depth) if tree else None)
        return costs.Timed(step(tree.num_nodes, tree.max_depth) if tree else 1.0, rest=0.5, seconds=0.0)

    monkeypatch.setattr(costs, "timed", timed)
    return asked


def test_sizes_that_cannot_pay_are_not_timed(monkeypatch):
    taken = {ALONE: [1] * 8, Size(2, 1): [2] * 4, Size(8, 1): [2] * 4, Size(16, 1): [4] * 2}
    taken |= {Size(32, 1): [4] * 2, Size(41, 1): [4] * 2}
    paths = {size: [(rank,) for rank in range(size.nodes - 1)] for size in taken}
    found = worth.Worth(paths, {size: [steps] * 4 for size, steps in taken.items()}, 32)
    model = family("medusa").build(tiny_base("llama-gqa"))
    given = {"input_ids": torch.stack(PROMPTS[:1]), "max_new_tokens": 41}
    asked = timed_by_size(monkeypatch, lambda nodes, depth: 1.0 + nodes / 8)
    curve = costs.measured_costs(model, found, given).curve
    # 41 nodes give 4 tokens, which in the seconds of 32 nodes are 0.8 a second, and 2 nodes give 1.6
    assert [nodes for nodes, _ in curve.points] == [1, 2, 8, 16, 32] and Size(41, 1) not in asked
    assert curve.at(8) == 2.0 and curve.level == 0.0


def planted(monkeypatch, texts=24, positions=40, max_nodes=40):
    """The worth of trees on texts whose next tokens have these ranks, whatever level the guess is of."""
    generator = torch.Generator().manual_seed(1)
    shares = torch.tensor([0.6, 0.15, 0.1, 0.05, 0.04, 0.03, 0.02, 0.01])
    ranks = [torch.multinomial(shares, positions * 3, True, generator=generator).view(-1, 3) for _ in range(texts)]
    monkeypatch.setattr(worth, "_ranks_by_text", lambda *args: ranks.copy() if ranks else [])
    monkeypatch.setattr(worth, "TEXTS_AT_ONCE", texts)
    model = family("medusa").build(tiny_base("llama-gqa"))
    return model, worth_of_trees(model, [PROMPTS[0]] * texts, positions + 1, max_nodes)


def test_the_best_trees_of_every_depth_are_tried(monkeypatch):
    _, found = planted(monkeypatch)
    assert {size.depth for size in found.steps} == {0, 1, 2, 3}
    for size in found.steps:
        tree = found.tree(size)
        assert (tree.num_nodes, tree.max_depth) == size
        for nodes in range(2, size.nodes):
            assert DraftTree(found.paths[size][: nodes - 1]).num_nodes == nodes
    assert found.depths(8) == [Size(8, 1), Size(8, 2), Size(8, 3)] and max(found.steps) == Size(40, 3)
    taus = [found.tokens_per_step(size) for size in found.depths(8)]
    assert taus[0] < taus[1] < taus[2]
    assert found.depths(16) == [Size(16, 2), Size(16, 3)]  # there are 8 paths of one rank


def test_two_trees_of_as_many_nodes_tell_what_a_level_costs(monkeypatch):
    model, found = planted(monkeypatch)
    given = {"input_ids": torch.stack(PROMPTS[:1]), "max_new_tokens": 41}
    asked = timed_by_size(monkeypatch, lambda nodes, depth: 1.0 + nodes / 64 + 0.25 * max(depth - 1, 0))
    curve = costs.measured_costs(model, found, given).curve
    assert curve.level == pytest.approx(0.25)
    assert curve.at(1, 0) == curve.at(1) == 1.0 + 1 / 64
    for nodes, depth in found.steps:
        assert curve.at(nodes, depth) == pytest.approx(1.0 + nodes / 64 + 0.25 * max(depth - 1, 0))
    assert {size for size in asked if size and size.nodes == 8} == {Size(8, 1), Size(8, 3)}
    # of compiled steps as many sizes as there are programs: no more than these
    asked = timed_by_size(monkeypatch, lambda nodes, depth: 1.0)
    costs.measured_costs(model, found, given, captured=True)
    assert set(asked) == {None, ALONE, Size(2, 1), Size(8, 1), Size(8, 3), Size(32, 3), Size(40, 3)}


def test_captured_trees_are_compared_with_those_whose_caches_have_as_many_slots(monkeypatch):
    model, found = planted(monkeypatch)
    timed_by_size(monkeypatch, lambda nodes, depth: 1.0 + nodes / 64)
    monkeypatch.setattr(costs, "fixed_slots", lambda nodes: 8 if nodes <= 8 else 40)
    compared, real = [], costs.in_turn
    monkeypatch.setattr(
        costs, "in_turn", lambda model, trees, *args: compared.append([*trees]) or real(model, trees, *args)
    )
    given = {"input_ids": torch.stack(PROMPTS[:1]), "max_new_tokens": 41}
    curve = costs.measured_costs(model, found, given, captured=True).curve
    deep = Size(8, 3)  # in each comparison, so that all steps are told as shares of one
    assert sorted(map(sorted, compared)) == [[Size(2, 1), Size(8, 1), deep], [deep, Size(32, 3), Size(40, 3)]]
    assert [seconds for _, seconds in curve.points] == pytest.approx([1.0 + nodes / 64 for nodes, _ in curve.points])
    compared.clear()
    costs.measured_costs(model, found, given)
    assert len(compared) == 1


@pytest.mark.parametrize("level, depth", [(0.0, 3), (0.02, 3), (0.4, 1)], ids=["free", "cheap", "dear"])
def test_a_shallow_tree_is_kept_where_levels_are_dear(level, depth, monkeypatch):
    model, found = planted(monkeypatch)
    monkeypatch.setattr(calibrating, "worth_of_trees", lambda *args: found)
    timed_by_size(monkeypatch, lambda nodes, deep: 1.0 + nodes / 24 + level * max(deep - 1, 0))
    monkeypatch.setattr(calibrating, "_check_end_to_end", lambda model, worth, costs, best, *args: (best, {}))
    (entry,) = calibrate(model, PROMPTS, new_tokens=41, max_nodes=40)
    measured = entry["measured"]
    assert max(map(len, entry["tree"])) == depth and measured["level_seconds"] == pytest.approx(level)
    size = Size(len(entry["tree"]) + 1, depth)
    assert entry["tree"] == [list(path) for path in found.paths[size]]
    assert measured["predicted_tokens_per_step"] == found.tokens_per_step(size)
    # the curves are those of trees that are no deeper, of which "auto" takes the beginnings
    timed = [one for one in sorted(found.steps) if one.nodes <= measured["step_seconds"][-1][0]]
    as_deep = {one.nodes: one for one in timed if one.depth <= depth}
    assert measured["tokens_per_step_by_nodes"] == [[n, costs.gain(found, one, 1)] for n, one in as_deep.items()]
    rates = dict(measured["tokens_per_second_by_nodes"])
    assert list(rates) == list(as_deep) and max(rates, key=rates.get) == size.nodes
    ladder = Ladder.of(entry, None, VOCABULARY)
    assert ladder.seconds[-1] == pytest.approx(1.0 + size.nodes / 24 + level * (depth - 1))


@pytest.mark.parametrize("captured, slower, nodes", [(False, 1.01, 16), (True, 1.01, 8), (True, 1.03, 16)])
def test_of_captured_trees_about_as_fast_the_smallest_is_kept(captured, slower, nodes, monkeypatch):
    sizes = [Size(16, 2), Size(8, 2), Size(32, 2)]  # the fastest first
    speeds = dict(zip(sizes, [1.0, slower, 1.2]))
    monkeypatch.setattr(calibrating, "in_turn", lambda *args: speeds)

    class EqualSteps:
        curve = costs.CostCurve([(1, 1.0)])

        def predicted(self, worth, size, rows, new_tokens, step):
            return costs.Predicted(1 / step, 1 / step)

    found = SimpleNamespace(tree=lambda size: size)
    calls = [{"input_ids": [[1]], "max_new_tokens": 1}]
    assert calibrating._fastest(None, found, EqualSteps(), sizes, calls, captured) == Size(nodes, 2)


def test_a_few_sizes_are_compared_that_fill_blocks_of_nodes_and_of_captured_steps_fewer(monkeypatch):
    model, found = planted(monkeypatch)
    monkeypatch.setattr(calibrating, "worth_of_trees", lambda *args: found)
    monkeypatch.setattr(calibrating, "_check_end_to_end", lambda model, worth, costs, best, *args: (best, {}))
    compared: list[list[tuple[int, int]]] = []

    def in_turn(model, trees, *args):
        compared.append([(tree.num_nodes, tree.max_depth) for tree in trees.values()])
        return dict.fromkeys(trees, 1.0)

    monkeypatch.setattr(calibrating, "in_turn", in_turn)
    for cost in (0.0, 0.1):  # of a node
        timed_by_size(monkeypatch, lambda nodes, depth, cost=cost: 1.0 + cost * nodes)
        for captured, rows in ((False, 1), (False, 4), (True, 1), (True, 4)):
            calibrate(model, PROMPTS, batch_sizes=(rows,), captured=captured, new_tokens=41, max_nodes=40)
    assert all(len(few) <= 3 and set(few) <= set(every) for every, few in zip(compared[::2], compared[1::2]))
    assert compared[::2] == [
        [(40, 3), (24, 3), (40, 2), (16, 3), (24, 2), (16, 2)],
        [(40, 3), (28, 3), (40, 2), (28, 2), (20, 3), (20, 2), (14, 3), (14, 2)],
        [(40, 3), (40, 2), (16, 3), (16, 2)],
        [(40, 3), (40, 2), (20, 3), (20, 2)],
        [(4, 3), (3, 2), (6, 3), (4, 2), (6, 2), (8, 3), (3, 1), (4, 1), (8, 2)],
        [(3, 2), (4, 3), (6, 3), (4, 2), (6, 2), (8, 3), (3, 1), (4, 1), (8, 2), (6, 1)],
        [(8, 3), (2, 1), (8, 2)],
        [(4, 3), (4, 2), (8, 3), (4, 1), (8, 2)],
    ]


@pytest.mark.parametrize("dear", [1.0, 1.2, 4.0])
def test_of_the_sizes_that_are_compared_the_one_with_most_tokens_per_second_is_run(dear, monkeypatch):
    model, found = planted(monkeypatch)
    monkeypatch.setattr(calibrating, "worth_of_trees", lambda *args: found)
    monkeypatch.setattr(calibrating, "_check_end_to_end", lambda model, worth, costs, best, *args: (best, {}))
    timed_by_size(monkeypatch, lambda nodes, depth: 1.0)
    # compared step by step, deep trees cost more than the curve says
    monkeypatch.setattr(
        calibrating, "in_turn", lambda model, trees, *args: {size: dear if size.depth == 3 else 1.0 for size in trees}
    )
    (entry,) = calibrate(model, PROMPTS, new_tokens=41, max_nodes=40)
    assert max(map(len, entry["tree"])) == (3 if dear < 1.2 else 2)


def test_a_ladder_knows_the_costs_of_an_entry_and_entries_of_earlier_versions_know_no_levels(calibrated):
    entry = dict(calibrated.generation_config.calibration[0])
    costs = {"step_seconds": [[1, 1.0], [3, 1.5]], "level_seconds": 0.25, "tree_seconds": 1.75}
    entry["measured"] = {**entry["measured"], **costs}
    assert Ladder.of(entry, None, VOCABULARY).seconds == (1.0, 1.75)
    # the check found that the tree costs twice as much: then smaller ones do, but not the root alone
    entry["measured"] |= {"step_seconds": [[1, 1.0], [2, 1.25], [6, 1.75]], "tree_seconds": 4.0}
    entry["tree"] = [[0], [0, 0], [1], [2], [3]]
    assert Ladder.of(entry, None, VOCABULARY).seconds == (1.0, 2.5, 4.0)
    del entry["measured"]["level_seconds"], entry["measured"]["tree_seconds"]
    assert Ladder.of(entry, None, VOCABULARY).seconds == (1.0, 1.25, 1.75)


def test_the_sizes_that_are_compared_differ_in_nodes_or_levels_and_are_close_to_the_best():
    rates = {ALONE: 1.2, Size(4, 1): 1.0, Size(4, 2): 1.1, Size(5, 2): 1.05, Size(6, 2): 0.99, Size(12, 3): 0.5}
    # 12 nodes are not close, and 5 not apart from 4
    assert calibrating._candidates(rates, 4, 1.3) == [Size(4, 2), Size(4, 1), Size(6, 2)]
    assert calibrating._candidates({Size(2, 1): 1.0}, 4, 1.3) == [Size(2, 1)]
    rates |= {Size(8, 3): 1.02, Size(4, 3): 0.995, Size(4, 4): 0.99, Size(16, 3): 0.9, Size(32, 3): 0.89}
    # four numbers of nodes, and of each the fastest three depths
    assert calibrating._candidates(rates, 4, 1.3) == [
        Size(4, 2), Size(8, 3), Size(4, 1), Size(4, 3), Size(6, 2), Size(16, 3)
    ]  # fmt: skip
    assert calibrating._candidates(rates, 2, 1.3) == [Size(4, 2), Size(8, 3), Size(4, 1), Size(4, 3)]
    assert calibrating._candidates(rates, 2, 3.0) == [Size(4, 2), Size(4, 1), Size(4, 3), Size(16, 3)]


def test_the_trees_of_a_comparison_take_the_steps_of_the_same_calls_in_turn(monkeypatch):
    trees = {"small": DraftTree([(0,)]), "large": DraftTree([(0,), (1,)]), "deep": DraftTree([(0,), (0, 0)])}
    asked: list[tuple[int, ...]] = []
    pace = 1.0

    def timed(model, tree, call, captured):
        nonlocal pace
        most = call["max_new_tokens"] - 1
        asked.append(tree.order[:most])
        each = []
        for place in tree.order[: min(most, 7)]:
            pace = 5.0 - pace if len(each) == 4 else pace  # the machine changes its speed in the middle of a call
            each.append(pace * (1.0, 1.1, 1.3)[place])
        return costs.Timed(0.0, 0.0, 0.0, len(each), each=each)

    monkeypatch.setattr(costs, "timed", timed)
    model = SimpleNamespace(base=SimpleNamespace(device=torch.device("cpu")))
    shares = costs.in_turn(model, trees, [{"max_new_tokens": 9}], 40)
    assert shares["large"] / shares["small"] == pytest.approx(1.1)
    assert shares["deep"] / shares["small"] == pytest.approx(1.3)
    assert shares["small"] == pytest.approx(1 / (1.0 * 1.1 * 1.3) ** (1 / 3))
    assert asked[:3] == [(0,), (1,), (2,)]  # they warm up
    taken = [place for call in asked[3:-1] for place in call[:7]] + list(asked[-1])
    assert len(taken) == 120 and all(sorted(taken[at : at + 3]) == [0, 1, 2] for at in range(0, 120, 3))
    assert len({tuple(taken[at : at + 3]) for at in range(0, 120, 3)}) == 6  # in every order

    asked.clear()
    monkeypatch.setattr(costs, "TURN_SECONDS", 0.0)
    monkeypatch.setattr(costs, "LEAST_TURNS", 5)
    costs.in_turn(model, trees, [{"max_new_tokens": 9}], 40)
    assert len(asked) == 3 + 3  # 15 steps, of which a call makes 7
    monkeypatch.setattr(costs, "timed", lambda *args: costs.Timed(math.nan, 0.0, 0.0))
    assert costs.in_turn(model, trees, [{"max_new_tokens": 9}], 40) == dict.fromkeys(trees, 1.0)


def test_a_size_is_kept_where_it_pays(monkeypatch):
    steps = {ALONE: [[1] * 8], Size(2, 1): [[2] * 4], Size(4, 2): [[2] * 4]}
    found = worth.Worth({Size(2, 1): [(0,)], Size(4, 2): [(0,), (0, 0), (1,)]}, steps, 8)
    seconds = {None: 1.0, 2: 0.75, 4: 1.5}  # of a step
    paces, text = [5.0, 1.0, 4.0, 2.0], torch.tensor([[5, 6, 7, 8, 9]])  # the first call of all warms up

    def timed(model, tree, call, captured):
        nodes = tree.num_nodes if tree else None
        checked = call["max_new_tokens"] == calibrating.CHECKED_TOKENS
        pace = paces[int(call["input_ids"])] if checked else 1000.0 * (nodes or 1)
        step, number = seconds[nodes] * pace, 2 if nodes else 4
        return costs.Timed(step, 0.0, step * number, number, text + (nodes == 4), (1, 3) if nodes else ())

    monkeypatch.setattr(calibrating, "timed", timed)
    monkeypatch.setattr(calibrating, "in_rounds", lambda model, trees, *args: [[]] * len(trees))
    model = SimpleNamespace(
        base=SimpleNamespace(device=torch.device("cpu")), generation_config=SimpleNamespace(eos_token_id=None)
    )
    cost = costs.Costs(CostCurve([(1, 1.0)]), start=0.0, base_step=10.0, base_start=0.0)
    given = [{"input_ids": torch.tensor([[turn]]), "max_new_tokens": 64} for turn in (1, 2, 3)]

    def check(size, worth=found, cost=cost):
        return calibrating._check_end_to_end(model, worth, cost, size, given, False)

    best, figures = check(Size(2, 1))
    # a text of five tokens a batch, in steps that take 1, 4 and 2 times as long
    assert best == Size(2, 1) and figures == {
        "tokens_per_step": 2.0, "tokens_per_second": 15 / 10.5, "base_tokens_per_second": 15 / 28.0,
        "speedup": 4 / 1.5, "predicted_check_speedup": 80 / 30.0, "identical": True,
        # 8 tokens after the first in 4 steps of 7.5 seconds, or 8 of 10
        "predicted_tokens_per_second": 9 / 30.0, "predicted_speedup": 80 / 30.0, "tree_seconds": 7.5,
    }  # fmt: skip
    best, figures = check(Size(4, 2))
    assert best == Size(4, 2) and not figures["identical"]
    # how many steps it takes is what all texts say, and not these batches
    more = worth.Worth(found.paths, {**steps, Size(2, 1): [[1, 2, 1, 1, 1, 1, 1]], Size(4, 2): [[4] * 2]}, 8)
    assert check(Size(2, 1), more)[1]["predicted_speedup"] == 80 / 52.5
    assert check(Size(4, 2), more)[1]["speedup"] == 4 / 3
    # the start of a call, which takes as long with every tree, leaves less to gain by fewer steps
    for start, expected in ((0.0, Size(4, 2)), (40.0, Size(4, 2)), (60.0, ALONE)):
        assert check(Size(4, 2), more, replace(cost, start=start))[0] == expected
    # not faster than the base by enough, so it decodes by itself
    seconds.update({2: 1.99, 4: 2.1})
    best, figures = check(Size(2, 1))
    assert best == ALONE and figures == {
        "tokens_per_step": 1.0, "tokens_per_second": 15 / 28.0, "base_tokens_per_second": 15 / 28.0, "speedup": 1.0,
        "predicted_check_speedup": 1.0, "identical": True,
        "predicted_tokens_per_second": 9 / 80.0, "predicted_speedup": 1.0,
    }  # fmt: skip
    # slower than the base on these texts: what all texts promise is not believed
    assert check(Size(4, 2), more)[0] == ALONE
    # short calls in turn with the base tell what a step costs, beside those of the check
    seconds.update({2: 0.75})
    rounds = [[costs.Timed(step, 0.0, 0.0)] * 4 for step in (3.0, 2.0)]
    monkeypatch.setattr(calibrating, "in_rounds", lambda model, trees, *args: rounds if trees[1] is None else None)
    assert check(Size(2, 1))[1]["tree_seconds"] == 15.0  # 0.75 of the base's in three batches, and 1.5 in four rounds


@pytest.mark.parametrize("rest, kept", [(0.0, Size(2, 1)), (0.5, Size(2, 1)), (5.0, ALONE)])
def test_short_calls_are_compared_with_what_is_expected_of_them(rest, kept, monkeypatch):
    """A text whose first steps give little is slower than the base at first, and faster as a whole."""
    found = worth.Worth({Size(2, 1): [(0,)]}, {ALONE: [[1] * 9], Size(2, 1): [[1, 1, 1, 3, 3]]}, 9)

    def timed(model, tree, call, captured):
        text = torch.tensor([[5, 6, 7, 8]])
        return costs.Timed(1.5, rest, 4.5 + rest, 3, text, (1, 1, 1)) if tree else costs.Timed(1.0, 0.0, 3.0, 3, text)

    monkeypatch.setattr(calibrating, "timed", timed)
    monkeypatch.setattr(calibrating, "in_rounds", lambda model, trees, *args: [[]] * len(trees))
    monkeypatch.setattr(calibrating, "CHECKED_TOKENS", 4)
    model = SimpleNamespace(
        base=SimpleNamespace(device=torch.device("cpu")), generation_config=SimpleNamespace(eos_token_id=None)
    )
    cost = costs.Costs(CostCurve([(2, 1.5)]), start=0.0, base_step=1.0, base_start=0.0)
    given = [{"input_ids": torch.tensor([[turn]]), "max_new_tokens": 64} for turn in (1, 2, 3)]
    best, figures = calibrating._check_end_to_end(model, found, cost, Size(2, 1), given, False)
    assert best == kept
    if best != ALONE:
        assert figures["speedup"] == 3.0 / (4.5 + rest) and figures["predicted_check_speedup"] == 3.0 / 4.5
        assert figures["predicted_speedup"] == 9.0 / 7.5


def test_a_call_without_a_step_tells_no_cost_of_one(monkeypatch):
    found = worth.Worth({Size(2, 1): [(0,)]}, {ALONE: [[1] * 8], Size(2, 1): [[2] * 4]}, 8)

    def timed(model, tree, call, captured):
        return costs.Timed(math.nan, 1.0, 0.5 if tree else 1.0, 0, torch.tensor([[5, 6]]))

    monkeypatch.setattr(calibrating, "timed", timed)
    monkeypatch.setattr(costs, "timed", timed)
    model = SimpleNamespace(
        base=SimpleNamespace(device=torch.device("cpu")), generation_config=SimpleNamespace(eos_token_id=None)
    )
    cost = costs.Costs(CostCurve([(2, 1.25)]), start=0.0, base_step=1.0, base_start=0.0)
    given = [{"input_ids": torch.tensor([[turn]]), "max_new_tokens": 64} for turn in (1, 2, 3)]
    best, figures = calibrating._check_end_to_end(model, found, cost, Size(2, 1), given, False)
    assert best == Size(2, 1) and figures["speedup"] == 2.0 and figures["tokens_per_step"] == 1.0
    dear = replace(cost, curve=CostCurve([(2, 2.5)]))  # of the curve then
    assert calibrating._check_end_to_end(model, found, dear, Size(2, 1), given, False)[0] == ALONE


def test_the_seconds_of_a_step_are_those_of_the_round_over_the_base(monkeypatch):
    pair = Size(4, 1), Size(4, 2)
    paths = {Size(2, 1): [(0,)], pair[0]: [(0,), (1,), (2,)], pair[1]: [(0,), (0, 0), (1,)]}
    steps = {ALONE: [[1] * 8]} | {size: [[2] * 4] for size in paths}
    found = worth.Worth(paths, steps, 8)
    model = family("medusa").build(tiny_base("llama-gqa"))
    monkeypatch.setattr(costs, "COST_ROUNDS", 3)
    shares = {Size(2, 1): 0.5, pair[0]: 1.0, pair[1]: 1.25}
    monkeypatch.setattr(costs, "in_turn", lambda model, trees, *args: {size: shares[size] for size in trees})
    # a warm-up, and three rounds at different paces of the machine, in the last of which the tree is disturbed
    rounds = [(9.0, 1.0, 1.0), (1.0, 1.0, 1.5), (4.0, 4.0, 6.0), (2.0, 2.0, 6.0)]
    asked: list[int] = []

    def timed(model, tree, call, captured=False):
        if call["max_new_tokens"] != costs.COST_TOKENS or len(asked) < len(steps):  # the first call of each size
            asked.append(0)
            return costs.Timed(1.0, rest=0.5, seconds=0.0)
        now = rounds[(len(asked) - len(steps)) // 3]
        asked.append(0)
        step = now[0 if tree is None else 1 if tree.num_nodes == 1 else 2]
        return costs.Timed(step, rest=0.5 * now[0], seconds=0.0)

    monkeypatch.setattr(costs, "timed", timed)
    measured = costs.measured_costs(model, found, {"input_ids": torch.stack(PROMPTS[:1]), "max_new_tokens": 41})
    # the deepest tree takes 1.5 steps of the base, the others as much less as in turn, and the root alone one: the mean
    # of it and of two nodes, since a curve never falls
    assert measured.base_step == 2.0 and measured.curve.level == pytest.approx(0.6)
    assert measured.curve.points == [(1, pytest.approx(1.6)), (2, pytest.approx(1.6)), (4, pytest.approx(2.4))]
    assert measured.start == measured.base_start == 1.0


def test_where_no_tree_pays_the_entry_has_the_root_alone(monkeypatch, notices):
    model = family("hydra").build(tiny_base("llama-gqa"))
    timed_by_size(monkeypatch, lambda nodes, depth: 1.0 if nodes == 1 else 100.0)
    (entry,) = calibrate(model, PROMPTS, **QUICK)
    assert entry["tree"] == [] and entry["measured"]["tokens_per_step"] == entry["measured"]["predicted_speedup"] == 1
    assert drafted(model, 1) == drafted(model, 1, draft_tree="auto") == {1} and notices == []  # steps are asked for
    assert drafted(model, 1, acceptance="rejection") == {1}
    call = {"inputs": PROMPTS[0][None], **GREEDY, "return_dict_in_generate": True}
    for asked in ({}, {"draft_tree": "auto"}):
        found = model.generate(**call, **asked)
        assert torch.equal(found.sequences, model.base.generate(**call).sequences) and found.accepted_lengths is None
    assert notices == [
        "Draft heads are not used, the base decodes by itself: no tree paid when this call was calibrated "
        "(draft_tree= drafts all the same)."
    ]
    assert model.generate(**call, draft_tree=[[0]]).accepted_lengths is not None


def test_no_call_is_longer_than_the_answers_that_are_asked_for(monkeypatch):
    model, asked, timed = family("medusa").build(tiny_base("llama-gqa")), [], costs.timed

    def noted(model, tree, call, *args):
        asked.append(call["max_new_tokens"])
        return timed(model, tree, call, *args)

    monkeypatch.setattr(costs, "timed", noted)
    monkeypatch.setattr(calibrating, "timed", noted)
    monkeypatch.setattr(costs, "COST_TOKENS", 16)
    monkeypatch.setattr(worth, "PRECISION", 9.0)
    calibrate(model, PROMPTS, new_tokens=7, max_nodes=6)
    assert max(asked) == 7


def test_the_caller_s_random_generator_stays_as_it_is():
    model = family("medusa").build(tiny_base("llama-gqa"))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    calibrate(model, PROMPTS, temperature=0.8, **QUICK)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_curve_never_falls():
    curve = CostCurve.through({Size(16, 1): 3.0, Size(2, 1): 2.0, Size(8, 1): 1.0, Size(4, 1): 3.0})
    assert curve.points == [(2, 2.0), (4, 2.0), (8, 2.0), (16, 3.0)]
    assert [curve.at(nodes) for nodes in (1, 6, 12, 64)] == [2.0, 2.0, 2.5, 3.0]


@pytest.mark.parametrize(
    "prompts, call, line",
    [
        ([], {}, "there is no prompt to calibrate on"),
        ([torch.tensor([], dtype=torch.long)], {}, "prompt 1 is empty"),
        ([PROMPTS[0], torch.ones(100_000, dtype=torch.long)], {}, "prompt 2 has 100000 tokens, which with 24 new ones"),
        (PROMPTS[:1], {"new_tokens": 3}, "1 prompts are too few: their 0 steps tell"),
        (PROMPTS, {"max_nodes": 1}, "max_nodes is 1: expected 2"),
        (PROMPTS, {"max_nodes": 10**6}, "max_nodes is 1000000: expected 2 (the root and one guess) to 4,096"),
        (PROMPTS, {"batch_sizes": (0,)}, "batch_sizes is [0]"),
        (PROMPTS, {"temperature": -1.0}, "temperature is -1.0: expected a number above 0, or 0 for greedy decoding"),
        (PROMPTS, {"method": "luck"}, "method is 'luck': expected one of paths, product"),
    ],
    ids=["none", "empty", "long", "few", "small", "large", "rows", "temperature", "method"],
)
def test_bad_input_is_refused_in_one_line(prompts, call, line):
    model = family("medusa").build(tiny_base("llama-gqa"))
    with pytest.raises(ValueError) as refused:
        calibrate(model, prompts, **{**QUICK, **call})
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_too_few_prompts_are_told_how_many_are_needed(monkeypatch):
    monkeypatch.setattr(worth, "PRECISION", 0.001)
    model = family("eagle").build(tiny_base("llama-gqa"))
    with pytest.raises(ValueError, match=r"6 prompts are too few: their \d+ steps .* needs about \d{2,} prompts"):
        calibrate(model, PROMPTS, **QUICK)
