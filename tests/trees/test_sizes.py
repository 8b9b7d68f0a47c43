"""As many nodes as pay: the base's own text, with all of them while they pay, with fewer or none where they do not."""

import copy
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import CompileConfig, GenerationConfig

from hf_drafthead.bases.topology import Topology
from hf_drafthead.generation import batch, programs, runner
from hf_drafthead.generation import step as stepping
from hf_drafthead.generation.settings import DraftSettings
from hf_drafthead.generation.tree import ROOT_ALONE, DraftTree
from hf_drafthead.trees import costs, entries
from hf_drafthead.trees import sizes as sizing
from hf_drafthead.trees.choice import UNMEASURED, of_entry
from hf_drafthead.trees.costs import NodeCosts, Size
from hf_drafthead.trees.entries import CalibrationKey
from hf_drafthead.trees.sizes import ALLOWANCE, LOSS_SHARE, MOST_LEFT, SizeRule, Sizes, Weighed
from tests.bases import tiny_base
from tests.drafters import SURE, Drafted, Oracle, half_right, right, wrong
from tests.families import FAMILIES
from tests.generation.agreement import agree, prompt
from tests.trees.choices import Costs, planned

TRACED = CompileConfig(backend="eager", mode="default")
LONG = {"max_new_tokens": 60, "eos_token_id": None}
PATHS = [[0], [0, 0], [1], [0, 0, 0], [0, 1], [2], [1, 0], [0, 0, 1]]
KEY = CalibrationKey("a CPU", 2, "float32", 1, "eager", None)
STEPS = {Size(2, 1): 1.1, Size(4, 2): 1.25, Size(9, 1): 1.4, Size(9, 3): 1.5}
MEASURED = {"step_cost": 1.5, "costs": [[*size, cost] for size, cost in STEPS.items()]}


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


def taken(guess, rows=1, oracle=Oracle, **call):
    """Nodes of each step of a call, and how many tokens it emitted in each row; the text is the base's own."""
    base = tiny_base("llama-gqa")
    call = {**prompt(rows), **LONG, **call}
    text = base.generate(**call)
    model = Drafted(base, oracle(base, text.tolist(), guess))
    model.generation_config = configured(base, entry(rows))
    steps = []
    found = model.generate(
        **call, draft_tree="auto", on_step=lambda each: steps.append((each.drafted, each.counts)) if each.step else None
    )
    assert torch.equal(found, text)
    return steps


def nodes_of(guess, rows=1, **call):
    return [nodes for nodes, _ in taken(guess, rows, **call)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("guess", [right, wrong, half_right])
def test_exact(guess, rows, without_hash):
    base = tiny_base("llama-gqa")
    agree(base, prompt(rows), guess, call=LONG, tree="auto", generation_config=configured(base, entry(rows)))


def test_exact_under_sampling(without_hash):
    base = tiny_base("llama-gqa")
    call = {**LONG, "do_sample": True, "temperature": 0.7}
    agree(base, prompt(2), half_right, call=call, tree="auto", generation_config=configured(base, entry(2)))


def test_a_drafter_that_is_always_right_drafts_all_levels_in_every_step(without_hash):
    nodes = nodes_of(right)
    assert set(nodes[:-1]) == {4} and len(nodes) <= LONG["max_new_tokens"] / 4  # one guess on each of three levels


def test_a_drafter_that_is_always_wrong_and_sure_of_itself_is_hardly_asked(without_hash):
    nodes = nodes_of(wrong, max_new_tokens=256)
    assert len(nodes) == 255 and nodes[0] == 4
    assert sum(count > 2 for count in nodes) < 9 and set(nodes[60:]) == {1, 2}  # trying again is cheap
    lost = 0.1 * sum(count == 2 for count in nodes[60:])
    assert 1 < lost < 256 * LOSS_SHARE
    assert nodes == nodes_of(wrong, max_new_tokens=256)


@dataclass
class Knowing(Oracle):
    """Sure where it is right, and else it says that any token may follow."""

    per_node: bool = True

    def _guesses(self, row, position):
        logits = super()._guesses(row, position)
        return logits if self.guess(row, position) == 0 else logits / SURE / 1e3


@pytest.mark.parametrize("rows", [1, 2])
def test_a_drafter_that_knows_where_it_is_right_guesses_there_and_hardly_elsewhere(rows, without_hash):
    def easy(row, position):
        return 0 if position // 20 % 2 else None

    steps = taken(easy, rows, Knowing, **{**prompt(rows), "max_new_tokens": 140})
    emitted = [(nodes, max(counts)) for nodes, counts in steps]
    assert {nodes for nodes, count in emitted if count > 2} == {4} and len(steps) < 100
    assert {nodes for nodes, count in emitted[:-1] if count == 1} <= {1, 2, 4}
    assert sum(nodes == 4 for nodes, count in emitted if count == 1) < 6


def test_guesses_that_are_right_again_are_noticed(without_hash):
    nodes = nodes_of(lambda row, position: None if position < 60 else 0, max_new_tokens=150)
    assert 1 in nodes and set(nodes[-9:-1]) == {4} and len(nodes) < 110


def test_the_row_that_is_the_furthest_behind_counts_and_rows_share_one_size(without_hash):
    call = {**prompt(2, longest=9), "max_new_tokens": 150}
    one_is_wrong = nodes_of(lambda row, position: None if row == 1 else 0, rows=2, **call)
    assert one_is_wrong[0] == 4 and sum(count < 3 for count in one_is_wrong) > 100
    late = nodes_of(lambda row, position: None if row == 1 and position < 20 else 0, rows=2, **call)
    assert late[-2] == 4 and len(late) < 100


def weighed(correction=1.0, left=9.0, rows=1):
    sizes = Sizes(left)
    sizes.hits *= correction
    tree = DraftTree(PATHS)
    rule = SizeRule(tree, NodeCosts(STEPS), True)
    return Weighed(sizes, rule, [*range(rows)]), tree.levels()


def test_levels_are_guessed_as_long_as_what_they_are_expected_to_give_is_more_than_they_cost():
    likely, unlikely = (torch.tensor([[[chance, 0.05, 0.02]]]).log() for chance in (0.7, 0.1))
    step, levels = weighed()
    assert step.goes_on(levels[0], likely, levels[1]) and not step.goes_on(levels[1], unlikely, levels[2])
    assert not weighed()[0].goes_on(levels[0], unlikely, levels[1])
    assert not weighed(left=0.1)[0].goes_on(levels[0], likely, levels[1])  # which could not be lost
    assert not weighed(correction=0.1)[0].goes_on(levels[0], likely, levels[1])  # guesses were wrong in this call
    both = torch.cat([likely, unlikely]), weighed(rows=2)[0]
    assert both[1].goes_on(levels[0], both[0], levels[1])  # the mean of the rows decides


def test_guesses_of_a_node_are_at_most_certain_together():
    step, levels = weighed(correction=3.0)
    step.goes_on(levels[0], torch.tensor([[[0.6, 0.2, 0.1]]]).log())
    assert step.value.exp()[0].tolist() == pytest.approx([1.0, 0.6 / 0.9, 0.2 / 0.9, 0.1 / 0.9])


def test_rounding_makes_no_guess_likelier_than_the_node_that_it_hangs_below():
    """Else a tree may be cut down to a guess without its root, of which the base says something else."""
    step, levels = weighed(correction=3.0, rows=1000)
    alone = torch.full((1000, 1, 3), -torch.inf)
    alone[..., 0] = torch.empty(1000, 1).uniform_(-1, 0, generator=torch.Generator().manual_seed(0))
    step.goes_on(levels[0], alone)
    shape = DraftTree(PATHS).topology()
    of_all = (each[:, :4].expand(1000, -1) for each in (torch.arange(9)[None], shape.parents, shape.depths))
    tokens, topology, _ = Topology.of_best(*of_all, step.value, 1, 3)
    assert (step.value <= 0).all() and not tokens.any() and not topology.depths.any()


def test_the_nodes_that_give_most_for_their_cost_are_kept_and_hang_below_their_parents():
    step, levels = weighed()
    for level, chances in zip(levels, ([0.7, 0.05, 0.02], [0.8, 0.02], [0.9, 0.01])):
        step.goes_on(level, torch.tensor([[chances]]).log())
    shape = DraftTree(PATHS).topology()
    of_all = torch.arange(9)[None], shape.parents, shape.depths, step.value
    tokens, topology, value = Topology.of_best(*of_all, step.size(step.value, 9), 3)
    step.keep(topology.parents, value)
    kept = [((), *DraftTree(PATHS).paths)[node] for node in tokens[0].tolist()]
    assert kept == [(), (0,), (0, 0), (0, 0, 0)] and topology.parents.tolist() == [[0, 0, 1, 2]]
    assert step.cost == pytest.approx(NodeCosts(STEPS)(4, 3))
    # two guesses were right, below two of three nodes; of a row that went another way none
    assert step.found(0, [0, 1, 2]) == (2.0, pytest.approx(0.7 + 0.8 + 0.9), 3)
    assert step.found(0, [0]) == (0.0, pytest.approx(0.7), 1)


@pytest.mark.parametrize("cost", [1.01, 1.3, 1.9, 2.4])
@pytest.mark.parametrize("reads", [True, False], ids=["eager", "programs"])
@pytest.mark.parametrize("seed", range(3))
def test_drafting_never_loses_more_than_it_may(cost, reads, seed):
    """One step and 1 %, whatever the drafter says of itself, and it is never given up."""
    numbers, tree = random.Random(seed), DraftTree(PATHS)
    rule = SizeRule(tree, NodeCosts({Size(9, 3): cost}), reads)
    sizes, gained, tried = rule.begin(False), 0.0, 0
    state = SimpleNamespace(steps=0, lengths=[5], ends=[None], counted=[], walked=[], pays=None)
    for steps in range(1, 400):
        state.pays = None
        chosen = sizes.tree(rule, state)
        emitted, step = 1, sizes.steps[-1]
        if state.pays:
            for level, below in zip(tree.levels(), (*tree.levels()[1:], None)):
                chances = torch.full((1, 1, level.width), numbers.choice([0.1, 0.3])).log()
                if not step.goes_on(level, chances, below):
                    break
            parents = tree.topology().parents[:, : step.size(step.value, 9)]  # nodes in order, their values alike
            step.keep(parents, step.value[:, : parents.shape[1]])
        if chosen.num_nodes > 1:
            guesses = not step.said or len(step.said[0]) > 1
            emitted = numbers.choice([1, 1, 1, 2]) if guesses and steps >= 300 else 1
            tried += guesses
            gained += emitted - step.cost
        state.steps, state.counted, state.walked = steps, [emitted], [[*range(emitted)]]
        state.lengths[0] += emitted
        assert gained >= -(ALLOWANCE + LOSS_SHARE * steps) - 1e-9
    assert tried > 1


@pytest.mark.parametrize("reads", [True, False], ids=["eager", "programs"])
def test_a_call_tells_once_what_its_steps_have_cost(reads, monkeypatch):
    """Half of what is known, which a bad minute has measured."""
    now, told, tree = [0.0], [], DraftTree(PATHS)
    monkeypatch.setattr(sizing, "perf_counter", lambda: now[0])
    sizes = (rule := SizeRule(tree, NodeCosts({Size(9, 3): 1.5}), reads, watch=told.append)).begin(False)
    state = SimpleNamespace(steps=0, lengths=[5], ends=[None], counted=[], walked=[], pays=None)
    for steps in range(1, 400):
        state.pays = None
        sizes.tree(rule, state)
        step = sizes.steps[-1]
        if state.pays:
            step.goes_on(tree.levels()[0], torch.full((1, 1, tree.levels()[0].width), 0.3).log())
            parents = tree.topology().parents[:, : step.size(step.value, 4)]
            step.keep(parents, step.value[:, : parents.shape[1]])
        now[0] += step.cost / 2 if step.drafts else 1.0
        state.steps, state.counted, state.walked = steps, [1], [[0]]
        state.lengths[0] += 1
    assert told == [pytest.approx(0.5)]


def test_of_programs_all_nodes_or_none_are_chosen_by_what_was_accepted():
    rule = SizeRule(DraftTree(PATHS), NodeCosts(STEPS), False, MOST_LEFT)
    sizes, chosen = rule.begin(False), []
    state = SimpleNamespace(steps=0, lengths=[5], ends=[None], counted=[], walked=[], pays=None)
    for right_ones in [3] * 9 + [0] * 60 + [3] * 90:
        nodes = sizes.tree(rule, state).num_nodes
        chosen.append(nodes)
        state.steps, emitted = state.steps + 1, (right_ones if nodes > 1 else 0) + 1
        state.counted, state.walked, state.lengths = [emitted], [[*range(emitted)]], [state.lengths[0] + emitted]
    assert set(chosen) == {1, 9} and set(chosen[:9]) == set(chosen[-20:]) == {9} and chosen[20:69].count(9) < 5


def test_requests_of_a_manager_choose_together(monkeypatch):
    def by_nodes(self, trees):
        return NodeCosts({size: 1 + size.nodes / 9 for size in trees})

    monkeypatch.setattr(costs.StepCosts, "__call__", by_nodes)
    model, sizes, size = FAMILIES[3].build(tiny_base("llama-gqa")), set(), Weighed.size

    def noted(self, *given):
        found = size(self, *given)
        sizes.add(found)
        return found

    monkeypatch.setattr(Weighed, "size", noted)
    prompts = [[3 + number, 5, 7][: 1 + number % 3] for number in range(7)]
    config = GenerationConfig(max_new_tokens=12, eos_token_id=None, do_sample=False)
    outputs = model.generate_batch(prompts, generation_config=config)
    texts = [output.generated_tokens for output in outputs.values()]
    for ids, text in zip(prompts, texts, strict=True):
        alone = model.base.generate(torch.tensor([ids]), max_new_tokens=12, eos_token_id=None, do_sample=False)
        assert alone[0, len(ids) :].tolist() == text
    assert len(sizes) > 1


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
        monkeypatch.setattr(Sizes, "tree", lambda self, rule, *_: rule.tree if next(left) else ROOT_ALONE)
        assert torch.equal(model.generate(**call, draft_tree="auto"), model.base.generate(**call))
        return guessed, observed

    monkeypatch.setattr(batch, "MOST_PENDING", 32)
    waited, observed = run()
    assert observed[3:5] == [32, 40 - 32] and len(observed) < 9
    monkeypatch.setattr(batch, "MOST_PENDING", 1)
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
    assert set(nodes) == {12}


@pytest.mark.parametrize("guess, cost, drafted", [(right, 1.9, True), (right, 9, False), (wrong, 1.6, False)])
@pytest.mark.parametrize("rows", [1, 2])
def test_without_an_entry_a_cpu_drafts_where_that_pays(guess, cost, drafted, rows, monkeypatch):
    base = tiny_base("llama-gqa")
    call = {**prompt(rows, longest=9), **LONG}
    text = base.generate(**call)
    model, nodes = Drafted(base, Oracle(base, text.tolist(), guess)), []
    monkeypatch.setattr(costs.StepCosts, "__call__", lambda self, trees: NodeCosts(dict.fromkeys(trees, cost)))
    found = model.generate(**call, on_step=lambda record: nodes.append(record.drafted) if record.step else None)
    assert torch.equal(found, text)
    assert nodes.count(1) == 0 if drafted else len(nodes) - nodes.count(1) < 3, nodes


def test_what_the_cost_does_not_decide_is_not_measured():
    typical = {"acceptance": "typical"}
    for asked in (typical, {**typical, "draft_tree": "auto"}, {"draft_tree": [[0]]}, {"draft_tree": "dynamic"}):
        assert planned(KEY, None, depth=4, **asked).sizes is None
    for key in (KEY, KEY._replace(execution="compiled")):
        rule = planned(key, Costs(1.25), depth=4).sizes
        assert rule.costs.whole == 1.25 and rule.allowance == ALLOWANCE and rule.reads == (key == KEY)
    assert planned(KEY, Costs(None), depth=4).sizes.costs.whole == UNMEASURED


@pytest.mark.parametrize(
    "costs, paid", [({2: 1.9, 12: 9.0}, True), ({2: 2.1, 12: 2.4}, True), ({2: 2.6, 12: 9.0}, False)]
)
def test_a_tree_is_drafted_where_some_of_its_nodes_may_pay(costs, paid):
    assert (planned(KEY, Costs(costs), depth=4).tree.num_nodes > 1) == paid


def test_the_nodes_of_an_entry_are_chosen_among_where_it_says_what_they_cost(without_hash):
    """Whether the call says "auto" or nothing; not where the text depends on what is drafted."""
    settings = DraftSettings(calibration=[entry()])
    auto, typical = {"draft_tree": "auto"}, {"acceptance": "typical"}
    for asked, measured, on_cpu, chosen in [
        ({}, MEASURED, True, True), (auto, MEASURED, True, True), ({}, {}, True, False),
        (typical, MEASURED, True, False), ({}, MEASURED, False, False), (auto, MEASURED, False, True),
    ]:  # fmt: skip
        key = KEY if on_cpu else KEY._replace(threads=None, execution="recorded")
        plan, _ = of_entry(entry(measured=measured), replace(settings, **asked), key, (3, 67))
        assert (plan.sizes is not None) == chosen and plan.tree == DraftTree(PATHS)
        assert not chosen or (plan.sizes.costs.measured == STEPS and plan.sizes.allowance == MOST_LEFT)
