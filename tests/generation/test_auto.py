"""`draft_tree="auto"`: the base's own text, with trees while they pay, and without where they do not."""

import copy

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead.generation import auto, capture, entries
from hf_drafthead.generation.acceptance import walk_on_device
from hf_drafthead.generation.entries import Situation
from hf_drafthead.generation.ladder import Ladder
from hf_drafthead.generation.state import Candidates, Limits, Rows
from hf_drafthead.generation.tree import DraftTree
from tests.bases import VOCABULARY, tiny_base
from tests.drafters import Drafted, Oracle, half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import agree, prompt

TRACED = CompileConfig(backend="eager", mode="default")
LONG = {"max_new_tokens": 60, "eos_token_id": None}
PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2], [1, 0], [0, 0, 1]]
MEASURED = {
    "step_seconds": [[1, 1.0], [3, 1.2], [9, 1.5]],
    "tokens_per_step_by_nodes": [[2, 1.5], [3, 1.8], [9, 2.5]],
}


def entry(batch_size=1, captured=False, heads_hash=None, **changed):
    situation = Situation("cpu", "float64", batch_size, captured, heads_hash)
    return {**situation._asdict(), "tree": PATHS, "measured": MEASURED, **changed}


@pytest.fixture
def without_hash(monkeypatch):
    """Oracles have no weights."""
    monkeypatch.setattr(entries, "drafter_hash", lambda drafter: None)


def configured(base, *found):
    config = copy.deepcopy(base.generation_config)
    config._from_model_config = False
    config.calibration = list(found)
    return config


def nodes_of(guess, rows=1, **call):
    """Nodes of each step of a call, and its text, which is the base's own."""
    base = tiny_base("llama-gqa")
    call = {**prompt(rows), **LONG, **call}
    text = base.generate(**call)
    model = Drafted(base, Oracle(base, text.tolist(), guess))
    model.generation_config = configured(base, entry(rows))
    nodes = []
    found = model.generate(
        **call, draft_tree="auto", on_step=lambda record: nodes.append(record.drafted) if record.step else None
    )
    assert torch.equal(found, text)
    return nodes


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("guess", [right, wrong, half_right])
def test_exact(guess, rows, without_hash):
    base = tiny_base("llama-gqa")
    agree(base, prompt(rows), guess, call=LONG, tree="auto", generation_config=configured(base, entry(rows)))


def test_exact_under_sampling(without_hash):
    base = tiny_base("llama-gqa")
    call = {**LONG, "do_sample": True, "temperature": 0.7}
    agree(base, prompt(2), half_right, call=call, tree="auto", generation_config=configured(base, entry(2)))


def test_a_drafter_that_is_always_right_keeps_the_largest_tree(without_hash):
    assert set(nodes_of(right)) == {9}


def test_a_drafter_that_is_always_wrong_is_hardly_asked(without_hash):
    nodes = nodes_of(wrong, max_new_tokens=150)
    assert len(nodes) == 149 and nodes[0] == 9
    drafting = [n for n in nodes if n > 1]
    assert len(drafting) < 20 and set(nodes) == {1, 3, 9}
    # in units of the base's step
    assert sum({1: 1.0, 3: 1.2, 9: 1.5}[n] for n in nodes) < 1.05 * len(nodes)
    trials = [step for step, n in enumerate(nodes) if n == 3][-3:]
    assert trials[2] - trials[1] > trials[1] - trials[0] > auto.FIRST_PAUSE  # more and more rarely


def test_trees_come_back_when_they_pay_again(without_hash):
    nodes = nodes_of(lambda row, position: None if position < 60 else 0, max_new_tokens=150)
    assert 1 in nodes and nodes[-1] == 9 and nodes.index(1) < len(nodes) - 10
    assert len(nodes) < 120


def test_in_a_batch_the_row_that_is_the_furthest_behind_decides(without_hash):
    call = {**prompt(2, longest=9), "max_new_tokens": 150}
    one_is_wrong = nodes_of(lambda row, position: None if row == 1 else 0, rows=2, **call)
    assert one_is_wrong[0] == 9 and one_is_wrong.count(1) > 100
    late = nodes_of(lambda row, position: None if row == 1 and position < 20 else 0, rows=2, **call)
    assert late[-1] == 9 and len(late) < 100  # the row catches up, and drafting comes back


def test_the_text_and_not_the_last_step_decides(without_hash):
    nodes = nodes_of(lambda row, position: None if position % 4 == 0 else 0)
    assert set(nodes) == {9}


@pytest.mark.slow
def test_captured_steps_of_several_sizes_share_the_caches(monkeypatch, fallbacks):
    monkeypatch.setattr(capture, "AHEAD", 8)
    monkeypatch.setattr(capture, "BUCKET", 8)
    model = next(one for one in FAMILIES if one.name == "eagle").build(tiny_base("llama-gqa"))
    heads = entries.drafter_hash(model.drafter)
    found = entry(2, True, heads, measured={**MEASURED, "tokens_per_step_by_nodes": [[2, 1.2], [3, 1.3], [9, 1.6]]})
    model.generation_config.calibration = [found]
    call = {**prompt(2), **LONG, "max_new_tokens": 24}
    nodes = []
    text = model.generate(
        **call, draft_tree="auto", compile_config=TRACED, on_step=lambda record: nodes.append(record.drafted)
    )
    assert torch.equal(text, model.base.generate(**call))
    assert len(set(nodes[1:])) > 1 and fallbacks == []
    assert len(capture._PROGRAMS[model].made) == len(set(nodes[1:]))


def test_where_one_size_cannot_be_captured_none_is(monkeypatch, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    model.generation_config.calibration = [entry(1, True, entries.drafter_hash(model.drafter))]
    made, captured = [], capture.Captured

    def only_once(step, config):
        made.append(step.tree.num_nodes)
        if len(made) > 1:
            raise RuntimeError("this one cannot be compiled")
        return captured(step, config)

    monkeypatch.setattr(capture, "Captured", only_once)
    call = {**prompt(), **LONG}
    text = model.generate(**call, draft_tree="auto", compile_config=TRACED)
    assert torch.equal(text, model.base.generate(**call))
    assert len(made) == 2


def test_without_an_entry_the_default_tree_is_used(caplog):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    model.generation_config.draft_tree = "auto"
    nodes = set()
    model.generate(**prompt(), **LONG, on_step=lambda record: nodes.add(record.drafted) if record.step else None)
    assert nodes == {DraftTree.resolve("mc_sim_7b_63", model.drafter.max_depth, VOCABULARY).num_nodes}


def test_a_step_of_the_root_alone_walks_as_with_a_guess_that_is_wrong():
    # rows: goes on, stops at EOS, reaches the longest length, both, has ended, has ended at an EOS
    choice = torch.tensor([5, 2, 5, 3, 5, 2])[:, None]
    lengths, ends = torch.tensor([4, 4, 9, 9, 10, 6]), torch.tensor([0, 0, 0, 0, 10, 5])
    rows = Rows(torch.zeros(6, 12), lengths, ends, torch.zeros(6, 1), None, None)
    limits = Limits(torch.tensor(10), torch.tensor([2, 3]), torch.zeros(6, 1), torch.tensor(0), torch.tensor(True))
    walks = []
    for tree, guess in ((DraftTree.root_alone(), []), (DraftTree([(0,)]), [7])):
        tokens = torch.tensor([[1, *guess]]).expand(6, -1)
        everywhere = choice.expand(-1, tree.num_nodes)
        valid = torch.tensor([True, True, False, True, False, True])[:, None].expand_as(everywhere)
        candidates = Candidates(tokens, tree.topology())
        walks.append(walk_on_device(everywhere, valid, candidates, rows, limits, torch.full((6,), 9)))
    alone, wrongly = walks
    assert alone.counts.tolist() == [1, 1, 1, 1, 0, 0] and alone.ends.tolist() == [0, 5, 10, 10, 10, 5]
    assert torch.equal(alone.counts, wrongly.counts) and torch.equal(alone.ends, wrongly.ends)
    assert torch.equal(alone.valid, wrongly.valid) and alone.valid.tolist() == [True, True, False, True, True, True]
    for one, other in ((alone.tokens, wrongly.tokens), (alone.nodes, wrongly.nodes)):
        assert one.shape == (6, 1) and torch.equal(one, other[:, :1])


def test_the_sizes_of_an_entry_go_down_to_the_root_alone():
    ladder = Ladder.of(entry(), None, VOCABULARY)
    assert [tree.num_nodes for tree in ladder.trees] == [1, 3, 9]
    assert ladder.seconds == (1.0, 1.2, 1.5) and ladder.tokens_per_step == (1.0, 1.8, 2.5)
    assert [ladder.best(gain) for gain in (0.0, 0.1, 0.3, 1.0)] == [0, 0, 1, 2]
    assert [tree.paths for tree in ladder.trees[:2]] == [(), ((0,), (0, 0))]


@pytest.mark.parametrize(
    "changed",
    [
        {"measured": None},
        {"measured": {}},
        {"measured": {**MEASURED, "step_seconds": []}},
        {"measured": {**MEASURED, "step_seconds": [[1, float("nan")]]}},
        {"measured": {**MEASURED, "step_seconds": [[1, -1.0]]}},
        {"measured": {**MEASURED, "tokens_per_step_by_nodes": "many"}},
        {"tree": [[0]] * 10**6},
        {"tree": [[0], ["a"]]},
    ],
    ids=["none", "nothing", "no cost", "nan", "negative", "text", "nodes", "ranks"],
)
def test_a_damaged_entry_is_refused_in_one_line(changed):
    with pytest.raises(
        ValueError, match=r"the calibration entry for cpu, batch size 1, is damaged \(.+\): run"
    ) as refused:
        Ladder.of(entry(**changed), 4, VOCABULARY)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
