"""The entry of a calibration that fits a call, and what is drafted where there is none."""

import pytest
import torch

from hf_drafthead.generation import batch, runner
from hf_drafthead.generation import grammar as stepping
from hf_drafthead.generation.step import Stages
from hf_drafthead.generation.tree import DraftTree, resolve
from hf_drafthead.trees import entries
from hf_drafthead.trees.entries import CalibrationKey, matching, merged
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import prompt
from tests.trees.choices import Costs, planned

KEY = CalibrationKey("CPU A", 2, "float32", 1, "eager", "a")
GPU = KEY._replace(device="GPU A", threads=None, execution="recorded")
EXECUTIONS = ("eager", "compiled", "recorded")
CHAIN = [[0], [0, 0], [0, 0, 0], [1], [0, 1]]


def entry(key=KEY, tree=CHAIN, **changed):
    return {**key._replace(**changed)._asdict(), "tree": tree, "measured": {}}


def drafted(model, rows=1, draft_tree=None, **call):
    """Nodes of every step of a call, none where the base decodes by itself; its text is the base's own."""
    nodes = set()
    call = {**prompt(rows), "max_new_tokens": 12, "eos_token_id": None, **call}
    text = model.generate(
        **call, draft_tree=draft_tree, on_step=lambda record: nodes.add(record.drafted) if record.step else None
    )
    assert torch.equal(text, model.base.generate(**call))
    return nodes


@pytest.fixture
def model():
    return FAMILIES[0].build(tiny_base("llama-gqa"))


def test_a_key_names_the_machine_and_the_execution(model):
    key = CalibrationKey.of(model.base, model.drafter, 3, "eager")
    assert key == (entries.cpu_name(), torch.get_num_threads(), "float64", 3, "eager", key.heads_hash)
    assert key.device != "cpu" and len(key.heads_hash) == 16
    assert matching([entry(key)], key) and matching([entry(key, threads=key.threads + 1)], key) is None
    assert matching([entry(key, execution="compiled")], key) is None
    assert matching([entry(key, device="another CPU")], key) is None
    for weight in model.drafter.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.AdamW(model.drafter.parameters(), fused=True).step()  # which torch counts as no write
    assert CalibrationKey.of(model.base, model.drafter, 3, "eager").heads_hash != key.heads_hash


@pytest.mark.parametrize("execution, call", [
    ("eager", {"disable_compile": True}), ("recorded", {}), ("compiled", {"cache_implementation": "static"}),
])  # fmt: skip
def test_a_call_is_looked_up_as_it_is_run(execution, call, model, monkeypatch, notices):
    """Where there are CUDA graphs a call that asks for nothing is recorded."""
    monkeypatch.setattr(runner, "HAVE_GRAPHS", ("cpu",))
    monkeypatch.setattr(runner.Runner, "_first_run", lambda self, name, arguments: getattr(Stages, name)(*arguments))
    key = CalibrationKey.of(model.base, model.drafter, 1, execution)
    others = [entry(key, [[0]], execution=one) for one in EXECUTIONS if one != execution]
    model.generation_config.calibration = [*others, entry(key)]
    assert drafted(model, **call) == {6} and notices == []


@pytest.fixture
def copied(monkeypatch):
    """How many tokens each step was to copy."""
    counts, right = set(), stepping.suggested

    def noted(tree, *given):
        counts.add(tree.copies)
        return right(tree, *given)

    monkeypatch.setattr(stepping, "suggested", noted)
    return counts


@pytest.mark.parametrize("tree", [None, "auto"])
def test_a_call_copies_what_its_entry_says_and_no_tree_is_needed_for_that(tree, model, copied, monkeypatch):
    monkeypatch.setattr(batch, "matches", lambda *given: True)  # copies alone are made only then
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    measured = {"step_cost": 1.0, "tokens_per_step": 2.0}
    for more, counts, nodes in [
        ({}, set(), {6}),
        ({"lookup": 0}, set(), {6}),
        ({"lookup": 3}, {3}, {6}),
        ({"lookup": 9}, {5}, {6}),  # as many as the tree has nodes
        ({"lookup": 4, "tree": []}, {4}, {5}),
    ]:
        copied.clear()
        model.generation_config.calibration = [{**entry(key), "measured": measured, **more}]
        assert drafted(model, draft_tree=tree) - {1} == nodes and copied == counts
        text = model.generate(**prompt(1), max_new_tokens=9, draft_tree=tree, on_step=None)  # where no tree pays
        assert torch.equal(text, model.base.generate(**prompt(1), max_new_tokens=9)) and copied == counts


def test_what_a_call_or_the_generation_config_says_of_copies_comes_before_the_entry(model, copied):
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    model.generation_config.calibration = [{**entry(key), "lookup": 3}]
    call = {**prompt(1), "max_new_tokens": 9}
    model.generate(**call, prompt_lookup_num_tokens=2)
    assert copied == {2}
    copied.clear()
    model.generate(**call, draft_tree=[[0]])  # a tree of its own
    assert copied == set()
    model.generation_config.prompt_lookup_num_tokens = 1
    model.generate(**call)
    assert copied == {1}


def test_an_entry_of_another_machine_is_none_of_this_one(model, notices):
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    model.generation_config.calibration = [entry(key, device="some other CPU"), entry(key, threads=64)]
    assert drafted(model) == drafted(model) == {12}
    assert len(notices) == 1 and f"these heads were not calibrated for this call ({key})" in notices[0]
    assert "`hf-drafthead calibrate PATH --batch-size 1` measures here" in notices[0]
    assert drafted(model, 3) == {5} and len(notices) == 1  # for all numbers of rows


DAMAGED = [
    None, {"step_cost": float("nan")}, {"step_cost": 0.0}, {"step_cost": "much"}, {"step_cost": True},
    {"step_cost": 1.5, "costs": 3}, {"step_cost": 1.5, "costs": [[2, 1, -1]]}, {"step_cost": 1.5, "costs": [[2, 1]]},
    {"costs": [[2.5, 1, 1.1]]}, {"costs": [[2, True, 1.1]]}, {"costs": [["2", 1, 1.1]]}, {"costs": [[2, 2, 1.1]]},
    {"costs": [7]},
]  # fmt: skip


@pytest.mark.parametrize("changed, line", [
    *(({"measured": measured}, "is damaged (") for measured in DAMAGED),
    ({"device": 3}, "'device' is '3'"), ({"device": None}, "'device' is 'None'"), ({"dtype": ["x"]}, "'dtype' is"),
    ({"batch_size": "1" * 10**6}, "'batch_size' is '1111"), ({"batch_size": 0}, "field 'batch_size' is '0'"),
    ({"execution": None}, "field 'execution' is 'None'"), ({"threads": "2"}, "field 'threads' is '2'"),
    ({"heads_hash": {}}, "field 'heads_hash' is '{}'"), ({"tree": [[0]] * 10**6}, "more than 4,096 nodes"),
    ({"tree": [[0, 0]]}, "has no parent"), ({"tree": [[VOCABULARY]]}, "has ranks 0 to"),
    ({"lookup": -1}, "its lookup is '-1'"), ({"lookup": True}, "its lookup is 'True'"),
    ({"tree": "mc_sim_7b_63"}, "a tree was given as 'mc_sim_7b_63' (str)"), ({"tree": {}}, "was given as {} (dict"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_damaged_entry_is_refused_in_one_line(changed, line, model):
    key = CalibrationKey.of(model.base, model.drafter, 1, "eager")
    model.generation_config.calibration = [{**entry(key), **changed}]
    with pytest.raises(ValueError, match="the calibration entry for .*, is damaged") as refused:
        drafted(model)
    assert line in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert drafted(model, draft_tree=[[0]]) == {2}


def test_a_new_entry_replaces_the_one_of_its_key_and_those_of_other_heads():
    other_dtype, other_rows, gpu = entry(dtype="float16", heads_hash="b"), entry(batch_size=2), entry(GPU)
    old = [entry(heads_hash="b"), entry(), other_rows, other_dtype, gpu, {"device": 3}]
    assert merged(old, entry(tree=[])) == [other_rows, other_dtype, gpu, entry(tree=[])]


@pytest.mark.parametrize("stored, nodes", [
    (None, 12), ("mc_sim_7b_63", 12), ("auto", 12), ([[0], [1], [2]], 4), ([[one] for one in range(20)], 12),
    ("dynamic", 32), ({"dynamic": {"nodes": 9}}, 9),
], ids=str)  # fmt: skip
def test_without_entries_a_cpu_drafts_few_nodes_with_one_notice(stored, nodes, model, notices):
    model.generation_config.draft_tree = stored
    both = drafted(model) | drafted(model)
    assert both == {nodes}
    told = [one for one in notices if "were not calibrated for this call" in one]
    assert len(told) == (nodes == 12)
    advice = "`hf-drafthead calibrate PATH --batch-size 1` measures here."
    begin = f"Calls draft {nodes} nodes, as many as pay on the text: "
    assert all(one.startswith(begin) and one.endswith(advice) for one in told)
    notices.clear()
    published = resolve("mc_sim_7b_63", model.drafter.max_depth, VOCABULARY)
    assert drafted(model, draft_tree="mc_sim_7b_63") == {published.num_nodes} and notices == []


@pytest.mark.parametrize("cost, nodes", [
    ({8: 1.1, 64: 1.3}, 64), ({8: 1.1, 64: 1.5}, 8), ({8: 2.6, 64: 2.8}, 1), (None, 8)
], ids=str)  # fmt: skip
def test_without_entries_a_gpu_drafts_the_whole_tree_where_that_costs_little_more(cost, nodes):
    assert planned(GPU, Costs(cost)).tree.num_nodes == nodes and planned(GPU, Costs(cost)).sizes is None
    assert planned(GPU, Costs(cost), draft_tree="auto").tree.num_nodes == min(nodes, 8)
    assert planned(GPU, None, draft_tree=[[0]]).tree.num_nodes == 2


def test_a_stored_tree_is_cut_to_its_first_nodes_whose_parents_are_there():
    paths = [[0], [1, 0], [1], [0, 0], [2], [0, 0, 0], [0, 1], [1, 1], [3], [4], [5], [6], [7], [8]]
    cut = planned(KEY._replace(batch_size=2), draft_tree=paths).tree
    assert cut == DraftTree([[0], [1], [0, 0], [2], [0, 0, 0], [0, 1], [1, 1]])
    given = DraftTree([[one] for one in range(20)])  # a tree that was made is no list of the most valuable first
    assert planned(KEY, draft_tree=given).tree == given


def test_where_no_tree_paid_the_base_decodes_with_auto_too(model):
    model.generation_config.calibration = [entry(CalibrationKey.of(model.base, model.drafter, 1, "eager"), [])]
    for draft_tree in (None, "auto"):
        output = model.generate(
            **prompt(), max_new_tokens=9, draft_tree=draft_tree, return_dict_in_generate=True, eos_token_id=None
        )
        assert output.accepted_lengths is None
    assert drafted(model, draft_tree=[[0]]) == {2}


def test_more_rows_get_fewer_nodes_without_an_entry_too():
    def nodes(rows, **settings):
        return planned(KEY._replace(batch_size=rows), **settings).tree.num_nodes

    assert [nodes(rows) for rows in (1, 2, 3, 4, 8, 99)] == [12, 8, 5, 4, 2, 2]
    assert nodes(4, draft_tree=[[0], [0, 0], [1], [2]]) == 4 and nodes(4, draft_tree=[[0], [1]]) == 3


def test_heads_of_one_level_get_the_paths_that_they_can_guess():
    assert planned(KEY, depth=1, vocabulary=2).tree.paths == ((0,), (1,))
