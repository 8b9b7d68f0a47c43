"""What a step costs here is measured once and kept in a file; the file and the tokens decide what is drafted."""

import itertools
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM

import hf_drafthead
from hf_drafthead import MedusaForCausalLM
from hf_drafthead.bases import compiling, mixers
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation import programs
from hf_drafthead.generation.batch import Batch
from hf_drafthead.generation.programs import PROGRAMS, Programs
from hf_drafthead.generation.runner import Execution
from hf_drafthead.generation.tree import DraftTree, LookupTree
from hf_drafthead.learning import learner
from hf_drafthead.modeling import base
from hf_drafthead.trees import costs, entries
from hf_drafthead.trees.choice import SMALL_TREE
from hf_drafthead.trees.costs import NodeCosts, Size, StepCosts, _keep, stored
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import prompt
from tests.generation.test_recorded import recordings as recordings

MEASURE, SITUATION = StepCosts.__call__, StepCosts.situation  # before any test replaces them
TRACED = CompileConfig(backend="eager")
EAGER, COMPILED = Execution("eager"), Execution("compiled", TRACED)
TREES = {Size(4, 2): DraftTree([(0,), (0, 0), (1,)]), Size(2, 1): DraftTree([(0,)])}
FIRST = {Size(4, 2): TREES[Size(4, 2)]}
LONG = {"max_new_tokens": 40, "eos_token_id": None, "min_new_tokens": None, "do_sample": False}


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Costs are measured, and kept in a file of the test's own."""
    monkeypatch.setattr(StepCosts, "__call__", MEASURE)
    monkeypatch.setattr(StepCosts, "situation", SITUATION)
    # whatever a busy machine measures is possible
    monkeypatch.setattr(costs, "product_seconds", lambda base, tokens: dict.fromkeys(tokens, 1e9) | {min(tokens): 1.0})
    new_process(monkeypatch, tmp_path / "folder" / "costs.json")
    return costs.FILE


def new_process(monkeypatch, file):
    """Forget what this process knows of a file."""
    monkeypatch.setattr(costs, "FILE", file)
    monkeypatch.setattr(costs, "_KNOWN", {})


def arbitrary(seed):
    """A clock that jumps, backwards too, and now and then stands still."""
    numbers = random.Random(seed)
    return lambda: numbers.choice([0.0, numbers.uniform(-1, 1), numbers.uniform(-1e6, 1e6), numbers.expovariate(1)])


def drafted(model, rows=1, **call):
    """The nodes of each step of a call, and its text."""
    nodes = []
    text = model.generate(
        **prompt(rows), **{**LONG, **call}, on_step=lambda record: nodes.append(record.drafted) if record.step else None
    )
    return nodes, text


def family(name):
    return next(each for each in FAMILIES if each.name == name).build(tiny_base("llama-gqa"))


def costs_of(model, rows=1, execution=EAGER):
    return StepCosts(model, model._base_reader(), rows, execution)


def each(found):
    """The costs in the order in which they were asked for."""
    return found and [*found.measured.values()]


@pytest.fixture(scope="module")
def half():
    """A base in bfloat16 whose text depends on how many nodes its steps have."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        eos_token_id=None, pad_token_id=0, initializer_range=0.08,
    )  # fmt: skip
    return MedusaForCausalLM.from_base(LlamaForCausalLM(config).bfloat16().eval())


def test_the_same_call_gives_the_same_text_in_half_precision_whatever_the_clock_says(half, monkeypatch, fresh):
    ids = torch.randint(0, 4096, (1, 12), generator=torch.Generator().manual_seed(1))
    call, nodes = {"max_new_tokens": 20, "do_sample": False}, BaseReader.nodes

    def rounded_otherwise(reader, tokens, *rest):
        logits, features = nodes(reader, tokens, *rest)
        return logits.roll(tokens.shape[1], -1), features

    half._base_reader()
    monkeypatch.setattr(BaseReader, "nodes", rounded_otherwise)
    drafts, alone = (half.generate(ids, **call, draft_tree=tree) for tree in (SMALL_TREE, [[0]]))
    assert not torch.equal(drafts, alone)  # else the test would find nothing
    for seed in range(2):
        new_process(monkeypatch, fresh.with_name(f"{seed}.json"))
        monkeypatch.setattr(costs, "thread_time", arbitrary(seed))
        texts = [half.generate(ids, **call) for _ in range(2)]
        new_process(monkeypatch, costs.FILE)
        texts.append(half.generate(ids, **call))
        assert all(torch.equal(texts[0], text) for text in texts), seed


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_first_call_decides_as_all_later_ones_do_and_these_measure_nothing(name, monkeypatch, fresh):
    model = family(name)
    monkeypatch.setattr(costs, "thread_time", arbitrary(3))
    first = drafted(model)
    stored = fresh.read_text()
    monkeypatch.setattr(StepCosts, "_measured", None)
    monkeypatch.setattr(costs, "thread_time", arbitrary(4))
    later = drafted(model)
    assert first[0] == later[0] and torch.equal(first[1], later[1]) and fresh.read_text() == stored
    assert torch.equal(first[1], model.base.generate(**prompt(), **LONG))


OF = [("medusa", EAGER), ("eagle3", EAGER), ("draft-model", EAGER)]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name, execution", [*OF, pytest.param("medusa", COMPILED, marks=pytest.mark.slow)], ids=str)
def test_costs_are_the_seconds_of_whole_steps_over_those_of_the_root_alone(name, execution, rows, monkeypatch):
    now, taken = [0.0], Batch.step

    def step(self):
        now[0] += self.tree.num_nodes
        return taken(self)

    monkeypatch.setattr(Batch, "step", step)
    monkeypatch.setattr(costs, "thread_time", lambda: now[0])
    monkeypatch.setattr(costs, "product_seconds", lambda base, tokens: dict.fromkeys(tokens, 1e9) | {rows: 1.0})
    model = family(name)
    found = costs_of(model, rows, execution)({**TREES, Size(5, 0): LookupTree(DraftTree([]), 4, 3, 67)})
    assert each(found) == [4.0, 2.0, 5.0]
    (kept,) = stored().values()
    assert {step: (cost, spread) for step, (cost, spread, _) in kept.items()} == {
        "4 nodes in 2 levels": (4.0, 1.0), "2 nodes in 1 levels": (2.0, 1.0), "5 nodes of copies": (5.0, 1.0)
    }  # fmt: skip


def test_measuring_changes_nothing_of_the_model(monkeypatch):
    model, torch_state = family("eagle3"), torch.get_rng_state()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    modules = [*model.modules()]
    costs_of(model)(TREES)
    assert [*model.modules()] == modules and torch.equal(torch.get_rng_state(), torch_state)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_each_situation_has_costs_of_its_own(monkeypatch):
    model = family("medusa")
    names = {costs_of(model, rows).situation for rows in (1, 2)} | {costs_of(family("eagle")).situation}
    model.base.to(torch.bfloat16)
    names.add(costs_of(model).situation)
    with monkeypatch.context() as patch:
        patch.setattr(entries, "cpu_name", lambda: "a CPU")
        names.add(costs_of(model).situation)
    assert len(names) == 5
    with torch.no_grad():
        next(model.drafter.parameters()).mul_(2)  # heads that are trained further cost as much
    assert costs_of(model).situation in names


HUGE = '{"a": {"b": [1%s]}}' % ("0" * 400)


@pytest.mark.parametrize(
    "contents", ["", "{", "[]", '{"a": 1}', '{"a": {"b": 1.5}}', '{"a": {"b": [1, -1, 2]}}', HUGE, "[" * 9999]
)
def test_a_damaged_file_costs_one_line_and_is_written_anew(contents, fresh, notices):
    fresh.parent.mkdir(parents=True)
    fresh.write_text(contents)
    model = family("medusa")
    first, later = drafted(model), drafted(model)
    assert first[0] == later[0]
    assert sum("cannot be read" in line and str(fresh) in line for line in notices) == 1
    assert all("\n" not in line for line in notices)
    assert len(json.loads(fresh.read_text())) == 1


def test_a_file_that_cannot_be_written_costs_one_line_and_the_process_remembers(monkeypatch, fresh, notices):
    fresh.parent.write_text("a file where the folder should be")
    model = family("medusa")
    monkeypatch.setattr(costs, "thread_time", arbitrary(5))
    first = drafted(model)
    monkeypatch.setattr(StepCosts, "_measured", None)
    assert drafted(model)[0] == first[0]
    assert len([line for line in notices if "cannot be written" in line]) == 1


@pytest.mark.parametrize("hours", [-48, 48], ids=["outdated", "of a clock that was wrong"])
def test_what_the_file_cannot_take_counts_more_than_what_it_holds(hours, monkeypatch):
    def refuse(source, target):
        raise PermissionError("read-only")

    rounds = counted_measurements(monkeypatch, [1.5])
    step = costs_of(family("medusa"))
    at(monkeypatch, 3600 * hours)
    step(TREES)
    monkeypatch.setattr(costs, "_KNOWN", {})
    monkeypatch.setattr(costs.os, "replace", refuse)
    at(monkeypatch, 0)
    rounds.clear()
    assert each(step(TREES)) == each(step(TREES)) == [1.5, 1.5] and len(rounds) == 1
    step({Size(2, 0): DraftTree([(0,)])})
    assert each(step(TREES)) == [1.5, 1.5] and len(rounds) == 2


def at(monkeypatch, seconds):
    """It is so many seconds after some day."""
    monkeypatch.setattr(costs.time, "time", lambda: 10.0**9 + seconds)


def test_what_other_processes_have_written_stays_and_what_was_measured_last_counts(fresh, monkeypatch):
    at(monkeypatch, 5)
    day = 10.0**9 + 5
    _keep("here", {"a": [1.5, 1.1]})
    monkeypatch.setattr(costs, "_KNOWN", {})
    _keep("here", {"b": []})
    assert stored() == {"here": {"a": [1.5, 1.1, day], "b": [day]}}
    assert [path.name for path in fresh.parent.iterdir() if path.suffix != ".lock"] == ["costs.json"]
    at(monkeypatch, 9)
    _keep("here", {"a": [2.0, 1.0]})
    assert stored()["here"] == {"a": [2.0, 1.0, day + 4], "b": [day]}
    assert costs.clear() == 1 and not fresh.exists() and stored() == {}


def test_the_oldest_situations_are_dropped(monkeypatch):
    monkeypatch.setattr(costs, "MOST_SITUATIONS", 2)
    for name in "abac":
        _keep(name, {"x": [1.0, 1.0]})
    assert [*stored()] == ["a", "c"]


def counted_measurements(monkeypatch, cost):
    """How often something was measured, where a step costs what `cost` holds."""
    measured = []

    def measure(self, steps):
        measured.append([*steps])
        return dict.fromkeys(map(str, steps), (cost[0], 1.0) if cost[0] else ())

    monkeypatch.setattr(StepCosts, "_measured", measure)
    return measured


def test_costs_are_measured_again_after_a_day_and_where_measuring_failed_sooner(monkeypatch):
    model, cost = family("medusa"), [3.0]
    of, measured = costs_of(model), counted_measurements(monkeypatch, cost)
    at(monkeypatch, 0)
    assert each(of(FIRST)) == each(of(FIRST)) == [3.0] and len(measured) == 1
    cost[0] = None
    at(monkeypatch, 86_401)
    assert each(of(FIRST)) is None and each(of(FIRST)) is None and len(measured) == 2
    cost[0] = 9.0
    at(monkeypatch, 87_002)
    assert each(of(FIRST)) == [9.0] and len(measured) == 3
    at(monkeypatch, 0)  # a clock that was put back
    assert each(of(FIRST)) == [9.0] and len(measured) == 4


def test_a_cost_that_a_call_contradicts_is_measured_again_between_calls_and_one_for_which_nothing_pays(monkeypatch):
    model, cost = family("medusa"), [3.0]
    of, measured = costs_of(model), counted_measurements(monkeypatch, cost)
    at(monkeypatch, 0)
    assert each(of(FIRST)) == [3.0]
    cost[0] = 1.2
    at(monkeypatch, 61)
    of.contradict(1.4)  # is no contradiction
    assert each(of(FIRST)) == [3.0]
    of.contradict(1.6)
    assert each(of(FIRST)) == each(of(FIRST)) == [1.2] and len(measured) == 2
    of.doubt()
    at(monkeypatch, 660)
    assert each(of(FIRST)) == [1.2] and len(measured) == 2
    at(monkeypatch, 662)
    assert each(of(FIRST)) == [1.2] and len(measured) == 3
    of.doubt(0)
    assert each(of(FIRST)) == [1.2] and len(measured) == 4


def forwards_that_take(monkeypatch, seconds):
    """The forward of a step takes what `seconds` says of the nodes, and nothing else takes any time."""
    taken, now = Batch.take, itertools.count()

    def step(self, state, stages, runs):
        outcome = taken(self, state, stages, runs)
        return lambda: replace(outcome(), seconds={"verify": seconds(stages.tree.num_nodes)})

    monkeypatch.setattr(Batch, "take", step)
    monkeypatch.setattr(costs, "thread_time", lambda: next(now) / 100)


@pytest.mark.parametrize("nodes, kept", [(4.0, False), (2.4, True), (float("nan"), True)])
def test_what_no_machine_can_be_is_not_kept(nodes, kept, monkeypatch, notices):
    """A forward over four tokens is no more than twice as long as a product over them, over one."""
    monkeypatch.setattr(costs, "product_seconds", lambda base, tokens: {count: 1.0 + count / 10 for count in tokens})
    forwards_that_take(monkeypatch, {1: 1.0, 4: nodes}.get)
    assert (costs_of(family("medusa"))(FIRST) is not None) == kept
    assert kept or any("a product 1.3: other programs use this machine" in line for line in notices)


def test_a_base_that_compiles_itself_is_compiled_before_it_is_timed(monkeypatch):
    model, now, shapes = family("medusa"), [0.0], set()

    def forward(module, args, kwargs):
        now[0] += 1.0 if kwargs["input_ids"].shape in shapes else 1000.0
        shapes.add(kwargs["input_ids"].shape)

    monkeypatch.setattr(costs, "thread_time", lambda: now[0])
    monkeypatch.setattr(StepCosts, "_check", lambda *given: None)
    model.base.model.register_forward_pre_hook(forward, with_kwargs=True)
    assert each(costs_of(model)(TREES)) == [1.0, 1.0]


def test_a_call_that_drafts_nothing_says_once_what_was_measured_and_what_to_do(monkeypatch, notices, fresh):
    model = family("medusa")
    counted_measurements(monkeypatch, [9.0])
    for rows in (1, 3, 1):
        assert model.generate(**prompt(rows), **LONG, return_dict_in_generate=True).accepted_lengths is None
    (line,) = notices
    assert line.startswith("Calls draft nothing: ") and str(fresh) in line
    assert "with 12 nodes as long as 9.0 of the base's (measured " in line
    assert "no text is expected to save: the base decodes by itself; draft_tree= drafts all the same, " in line
    assert "`hf-drafthead costs --clear` has steps measured anew, `hf-drafthead calibrate PATH" in line


def test_processes_that_stay_in_step_do_not_ask_the_clock(monkeypatch):
    """Each would run another number of forwards, of a base that is divided among them, and wait for ever."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(StepCosts, "_measured", lambda *given: pytest.fail("a forward"))
    assert costs_of(family("medusa"))(TREES) is None and not stored()


def test_threads_measure_once(monkeypatch):
    model, counted = family("medusa"), []
    reader, measured = model._base_reader(), StepCosts._measured
    monkeypatch.setattr(StepCosts, "_measured", lambda *given: counted.append(1) or measured(*given))
    with ThreadPoolExecutor(6) as pool:
        found = [*pool.map(lambda _: StepCosts(model, reader, 1, EAGER)(TREES), range(6))]
    assert len(counted) == 1 and len(found) == 6 and all(each(one) == each(found[0]) for one in found)


LOCKS = [costs._MEASURING, programs._RECORDING, Programs().lock, Programs().compiles, hf_drafthead.TextIndex().lock]
LOCKS += [mixers._EXTENDING, compiling._COMPILES, learner._WRITING, base.SAVING, hf_drafthead.learning._IN_TURN]


@pytest.mark.parametrize("lock", LOCKS)
def test_a_process_that_is_forked_while_a_lock_is_held_does_not_wait_for_that(lock):
    with ThreadPoolExecutor(1) as another:  # an RLock is free for the thread that holds it
        another.submit(lock.acquire).result()
        if not (child := os.fork()):
            os._exit(not lock.acquire(timeout=5))
        another.submit(lock.release).result()
    assert os.waitpid(child, 0)[1] == 0


def test_where_costs_cannot_be_measured_a_call_drafts_all_the_same(monkeypatch, notices):
    model = family("medusa")

    def fails(*given):
        raise RuntimeError("no")

    monkeypatch.setattr(costs, "_begun", fails)
    nodes, text = drafted(model)
    assert max(nodes) > 1 and torch.equal(text, model.base.generate(**prompt(), **LONG))
    assert [len(times) for steps in stored().values() for times in steps.values()] == [1] * 5
    monkeypatch.setattr(StepCosts, "_measured", None)  # nor does the next call try again
    assert drafted(model)[0] == nodes and any("could not be measured: RuntimeError: no" in line for line in notices)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["medusa", "eagle3", "copies"])
def test_a_compiled_call_is_judged_by_steps_of_the_programs_that_it_takes(name, monkeypatch):
    model = hf_drafthead.from_base(tiny_base("llama-gqa")) if name == "copies" else family(name)
    monkeypatch.setattr(costs, "thread_time", itertools.count().__next__)  # nothing costs more than the root alone
    monkeypatch.setattr(costs, "product_seconds", lambda base, tokens: dict.fromkeys(tokens, 1.0))
    found = drafted(model, compile_config=TRACED)
    made = len(PROGRAMS[model].compiled)
    assert any("compiled steps" in situation for situation in stored()) and set(found[0]) != {1}
    monkeypatch.setattr(StepCosts, "_measured", None)
    later = drafted(model, compile_config=TRACED)
    assert found[0] == later[0] and made == len(PROGRAMS[model].compiled)
    assert torch.equal(found[1], later[1]) and torch.equal(found[1], model.base.generate(**prompt(), **LONG))


def test_where_no_tree_pays_compiled_steps_go_on_without_guesses(monkeypatch, notices):
    model = family("medusa")
    monkeypatch.setattr(StepCosts, "__call__", lambda self, trees: NodeCosts(dict.fromkeys(trees, 9.0)))
    output = model.generate(**prompt(), **LONG, compile_config=TRACED, return_dict_in_generate=True)
    assert torch.equal(output.sequences, model.base.generate(**prompt(), **LONG))
    assert set(output.accepted_lengths[0].tolist()) == {1} and len(PROGRAMS[model].compiled) == 3
    assert any("no text is expected to save: steps are compiled all the same; " in line for line in notices)


def test_where_steps_cannot_be_compiled_those_that_are_taken_are_judged(monkeypatch, fallbacks):
    model, ticks = family("medusa"), iter(range(10**6))
    monkeypatch.setattr(programs, "compiled", None)  # which raises
    monkeypatch.setattr(costs, "thread_time", lambda: float(next(ticks)))
    assert each(costs_of(model, execution=COMPILED)(TREES)) == each(costs_of(model)(TREES))


@pytest.mark.slow
def test_while_another_call_compiles_nothing_is_kept_of_compiled_steps(fresh, notices):
    """Steps of such a call are eager, and what these cost is not what steps of later calls cost."""
    model = family("medusa")
    PROGRAMS.setdefault(model, Programs()).compiles.acquire()
    assert costs_of(model, execution=COMPILED)(TREES) is None and not fresh.exists() and notices == []
    nodes, text = drafted(model, compile_config=TRACED)
    assert 8 in nodes and torch.equal(text, model.base.generate(**prompt(), **LONG)) and not fresh.exists()
    PROGRAMS[model].compiles.release()
    assert len(each(costs_of(model, execution=COMPILED)(TREES))) == 2 and len(stored()) == 1


def test_steps_of_a_base_with_hooks_are_judged_as_they_run():
    model = family("medusa")
    model.base.register_forward_hook(lambda module, inputs, output: None)
    costs_of(model, execution=COMPILED)(TREES)
    (situation,) = stored()
    assert "eager steps" in situation and not PROGRAMS.get(model, Programs()).compiled


@pytest.mark.parametrize("execution", [{}, {"cache_implementation": "static"}], ids=["recorded", "compiled"])
def test_on_a_gpu_recorded_steps_are_measured_and_of_all_nodes_too(execution, recordings, monkeypatch):
    """Stand-ins for graphs record on a CPU, which is said to be a GPU; what is compiled is judged by them too."""
    monkeypatch.setattr(programs, "compiled", lambda function, config: function)
    monkeypatch.setattr(entries, "cpu_name", lambda: "a GPU")
    monkeypatch.setattr(entries.CalibrationKey, "on_cpu", False)
    ticks = itertools.count()
    monkeypatch.setattr(costs, "thread_time", lambda: float(next(ticks)))  # nothing costs more than the root alone
    model = family("medusa")
    nodes, text = drafted(model, **execution)
    assert torch.equal(text, model.base.generate(**prompt(), **LONG)) and set(nodes) == {64}
    (situation,) = stored()
    assert "recorded steps" in situation and len(stored()[situation]) == 2 and len(recordings) > 8
