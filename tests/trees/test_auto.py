"""`draft_tree="auto"`: the base's own text, with trees while they pay, and without where they do not."""

import copy

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead.generation import programs, runner
from hf_drafthead.generation import step as stepping
from hf_drafthead.generation.acceptance import walk_on_device
from hf_drafthead.generation.state import Candidates, Limits, Rows
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.trees import costs, entries
from hf_drafthead.trees.choice import ALLOWANCE, UNMEASURED, USUAL
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.trees.switch import LONGEST_PAUSE, DraftSwitch
from tests.bases import tiny_base
from tests.drafters import Drafted, Oracle, half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import agree, prompt
from tests.trees.choices import Costs, planned, switched

TRACED = CompileConfig(backend="eager", mode="default")
LONG = {"max_new_tokens": 60, "eos_token_id": None}
PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2], [1, 0], [0, 0, 1]]
KEY = CalibrationKey("a CPU", 2, "float32", 1, "eager", None)
MEASURED = {"step_cost": 1.5, "tokens_per_step": 2.5}


def entry(batch_size=1, captured=False, heads_hash=None, **changed):
    execution, threads = "compiled" if captured else "eager", torch.get_num_threads()
    key = CalibrationKey(entries.cpu_name(), threads, "float64", batch_size, execution, heads_hash)
    return {**key._asdict(), "tree": PATHS, "measured": MEASURED, **changed}


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


def test_a_drafter_that_is_always_right_drafts_in_every_step(without_hash):
    assert set(nodes_of(right)) == {9}


def test_a_drafter_that_is_always_wrong_is_hardly_asked(without_hash):
    nodes = nodes_of(wrong, max_new_tokens=256)
    assert len(nodes) == 255 and set(nodes) == {1, 9}
    drafting = [step for step, n in enumerate(nodes) if n > 1]
    # seven steps until the mean has fallen, then trials after 3, 12, 48 and 128 steps
    assert drafting[:7] == list(range(7))
    pauses = [later - step - 1 for step, later in zip(drafting[6:], drafting[7:])]
    assert pauses == [3, 12, 48, LONGEST_PAUSE]


def asked(switch, emitted):
    """Whether the switch drafts in each of some steps, of which one that drafts emits so many tokens."""
    found = []
    for tokens in emitted:
        found.append(switch.drafts())
        if found[-1]:
            switch.note(tokens)
    return found


def test_pauses_grow_up_to_a_longest_one_and_end_with_a_right_guess():
    switch = switched(1.5, 2.5)
    found = asked(switch, [1] * 2000)
    tried = [step for step, drafts in enumerate(found) if drafts]
    assert tried[-1] - tried[-2] == tried[-2] - tried[-3] == LONGEST_PAUSE + 1
    assert asked(switch, [5] * 2 * LONGEST_PAUSE)[-1]
    assert all(asked(switch, [5] * 20))
    # and a first pause is short again
    found = asked(switch, [1] * 200)
    assert found[found.index(False) :][:4] == [False, False, False, True]


def test_a_wrong_step_tells_more_where_a_step_costs_more():
    assert asked(switched(1.5, 2.5), [1] * 20).index(False) == 7
    assert asked(switched(2.25, 2.5), [1] * 20).index(False) == 1
    assert asked(switched(0.9, 1.0), [1] * 20) == [True] * 20  # a step costs less than one of the base


def test_usual_heads_draft_in_most_steps():
    # a step emits 2.5 tokens in the mean, and only one in two of five steps
    drafted = []
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        emitted = torch.tensor([1, 1, 2, 3, 5.5])[torch.randint(5, (32,), generator=generator)]
        drafted += asked(switched(1.5, 2.5), emitted.tolist())
    assert sum(drafted) > 0.95 * len(drafted)


def test_drafting_comes_back_when_it_pays_again(without_hash):
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


@pytest.mark.parametrize("name", ["eagle", "draft-model", "hydra++"])
def test_what_the_root_alone_verified_is_observed_before_the_next_guess(name, monkeypatch):
    model = next(one for one in FAMILIES if one.name == name).build(tiny_base("llama-gqa"))
    heads = entries.drafter_hash(model.drafter)
    model.generation_config.calibration = [entry(2, heads_hash=heads)]
    turns = [True, True, *[False] * 40, True, False, True, *[False] * 90]  # whether each step drafts
    call = {**prompt(2, longest=9), **LONG, "max_new_tokens": 50}
    drafter, draft, observe = type(model.drafter), stepping.Stages.draft, type(model.drafter).observe

    def run():
        """The tokens of all nodes of each step, and how many positions were observed at once."""
        guessed, observed, left = [], [], iter(turns)

        def noted_draft(*args, **kwargs):
            state, candidates = draft(*args, **kwargs)
            guessed.append(candidates.tokens)
            return state, candidates

        def noted_observe(self, state, features, tokens, lengths):
            observed.append(tokens.shape[1])
            return observe(self, state, features, tokens, lengths)

        monkeypatch.setattr(stepping.Stages, "draft", noted_draft)
        monkeypatch.setattr(drafter, "observe", noted_observe)
        monkeypatch.setattr(DraftSwitch, "drafts", lambda self: next(left))
        assert torch.equal(model.generate(**call, draft_tree="auto"), model.base.generate(**call))
        return guessed, observed

    monkeypatch.setattr(runner, "MOST_PENDING", 32)
    waited, observed = run()
    assert observed[3:5] == [32, 40 - 32] and len(observed) < 9
    monkeypatch.setattr(runner, "MOST_PENDING", 1)
    at_once, observed = run()
    assert len(waited) == len(at_once) == len(observed) > 44
    assert all(map(torch.equal, waited, at_once))


@pytest.mark.slow
def test_captured_steps_of_both_trees_share_the_caches(monkeypatch, fallbacks):
    monkeypatch.setattr(runner, "AHEAD", 8)
    monkeypatch.setattr(runner, "CAPACITY_BUCKET", 1)
    model = next(one for one in FAMILIES if one.name == "eagle").build(tiny_base("llama-gqa"))
    heads = entries.drafter_hash(model.drafter)
    model.generation_config.calibration = [entry(2, True, heads, measured={"step_cost": 2.0, "tokens_per_step": 2.0})]
    call = {**prompt(2), **LONG, "max_new_tokens": 24}
    nodes = []
    text = model.generate(
        **call, draft_tree="auto", compile_config=TRACED, on_step=lambda record: nodes.append(record.drafted)
    )
    assert torch.equal(text, model.base.generate(**call))
    assert set(nodes[1:]) == {1, 9} and fallbacks == []
    made = set(map(id, programs.PROGRAMS[model].compiled))
    assert len(made) == 2 * 3
    model.generate(**call, draft_tree=PATHS, compile_config=TRACED)  # a call that names the tree has its program
    assert set(map(id, programs.PROGRAMS[model].compiled)) == made


@pytest.mark.slow
def test_where_one_size_cannot_be_captured_none_is(monkeypatch, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    model.generation_config.calibration = [entry(1, True, entries.drafter_hash(model.drafter))]
    made, compiled = [], programs.compiled

    def only_once(function, config):
        made.append(function)
        if len(made) > 3:  # the functions of the first size
            raise RuntimeError("this one cannot be compiled")
        return compiled(function, config)

    monkeypatch.setattr(programs, "compiled", only_once)
    call = {**prompt(), **LONG}
    text = model.generate(**call, draft_tree="auto", compile_config=TRACED)
    assert torch.equal(text, model.base.generate(**call))
    assert len(made) == 4


def test_without_an_entry_a_small_tree_is_drafted():
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    model.generation_config.draft_tree = "auto"
    nodes = []
    model.generate(**prompt(), **LONG, on_step=lambda record: nodes.append(record.drafted) if record.step else None)
    assert nodes[0] == 8 and set(nodes) <= {1, 8}


@pytest.mark.parametrize("guess, cost, drafted", [(right, 1.9, True), (right, 9, False), (wrong, 1.6, False)])
@pytest.mark.parametrize("rows", [1, 2])
def test_without_an_entry_a_cpu_drafts_where_that_pays(guess, cost, drafted, rows, monkeypatch):
    base = tiny_base("llama-gqa")
    call = {**prompt(rows, longest=9), **LONG}
    text = base.generate(**call)
    model, nodes = Drafted(base, Oracle(base, text.tolist(), guess)), []
    monkeypatch.setattr(costs.StepCosts, "__call__", lambda self, trees, *_: [cost] * len(trees))
    found = model.generate(**call, on_step=lambda record: nodes.append(record.drafted) if record.step else None)
    assert torch.equal(found, text)
    assert nodes.count(1) == 0 if drafted else len(nodes) - nodes.count(1) < 3, nodes


def test_what_the_cost_does_not_decide_is_not_measured():
    for asked in ({"acceptance": "typical"}, {"draft_tree": [[0]]}, {"draft_tree": "dynamic"}):
        assert planned(KEY, None, depth=4, **asked).switch is None
    for key in (KEY, KEY._replace(execution="compiled")):
        assert planned(key, Costs(1.25), depth=4).switch[:3] == (1.25, USUAL, ALLOWANCE)
    assert planned(KEY, Costs(None), depth=4).switch == (UNMEASURED, USUAL, ALLOWANCE, None)
    assert planned(KEY, None, depth=4, draft_tree="auto", acceptance="typical").switch.cost == UNMEASURED


def test_a_step_of_the_root_alone_walks_as_with_a_guess_that_is_wrong():
    # rows: goes on, stops at EOS, reaches the longest length, both, has ended, has ended at an EOS
    choice = torch.tensor([5, 2, 5, 3, 5, 2])[:, None]
    lengths, ends = torch.tensor([4, 4, 9, 9, 10, 6]), torch.tensor([0, 0, 0, 0, 10, 5])
    rows = Rows(torch.zeros(6, 12), lengths, ends, torch.zeros(6, 1), None, None, None)
    limits = Limits(torch.tensor(10), torch.tensor([2, 3]), torch.zeros(6, 1), torch.tensor(0), torch.tensor(True))
    walks = []
    for tree, guess in ((DraftTree.root_alone(), []), (DraftTree([(0,)]), [7])):
        tokens = torch.tensor([[1, *guess]]).expand(6, -1)
        everywhere = choice.expand(-1, tree.num_nodes)
        valid = torch.tensor([True, True, True, True, False, True])[:, None].expand_as(everywhere)
        candidates = Candidates(tokens, tree.topology())
        walks.append(walk_on_device(everywhere, valid, candidates, rows, limits, torch.full((6,), 9)))
    alone, wrongly = walks
    assert alone.counts.tolist() == [1, 1, 1, 1, 0, 0] and alone.ends.tolist() == [0, 5, 10, 10, 10, 5]
    assert torch.equal(alone.counts, wrongly.counts) and torch.equal(alone.ends, wrongly.ends)
    assert torch.equal(alone.valid, wrongly.valid) and alone.valid.tolist() == [True] * 6
    for one, other in ((alone.tokens, wrongly.tokens), (alone.nodes, wrongly.nodes)):
        assert one.shape == (6, 1) and torch.equal(one, other[:, :1])


@pytest.mark.parametrize(
    "measured",
    [None, {}, {"step_cost": float("nan"), "tokens_per_step": 2.0}, {"step_cost": 0.0, "tokens_per_step": 2.0},
     {"step_cost": "much", "tokens_per_step": 2.0}, {"step_cost": 1.5, "tokens_per_step": [1]}],
    ids=["none", "nothing", "nan", "zero", "text", "list"],
)  # fmt: skip
def test_a_damaged_entry_is_refused_in_one_line(measured):
    with pytest.raises(
        ValueError, match=r"the calibration entry for .+, batch size 1, is damaged \(.+\): run"
    ) as refused:
        entries.expected_of(entry(measured=measured))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
