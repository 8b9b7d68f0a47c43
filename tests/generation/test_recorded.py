"""Recorded steps, and steps that are launched ahead of the host: as on a GPU, whose graph a second run stands for."""

import contextlib

import pytest
import torch
from torch.utils._pytree import tree_map
from transformers import CompileConfig

from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import batch, programs, runner
from hf_drafthead.generation.state import Rows
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, as_the_base, prompt

CALL = {"max_new_tokens": 24, "eos_token_id": None}
GREEDY, OTHER = 4, 3  # stages that are recorded: of greedy steps the walk too
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
some_families = pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.name in ("medusa", "eagle3")], ids=str
)


class Recording:
    """What stands for a CUDA graph: it does what was recorded, and its outcome lies in one memory."""

    def __init__(self, function, device):
        self.function, self.replays = function, 0
        self.found = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, function())

    def replay(self):
        self.replays += 1
        for place, value in zip(programs.tensors_of(self.found), programs.tensors_of(self.function())):
            place.copy_(value)


@pytest.fixture
def recordings(monkeypatch):
    """All that is recorded."""
    found = []

    def record(function, device):
        # what is recorded is not run, and must leave nothing behind
        found.append(Recording(function, device))
        return found[-1].replay, found[-1].found

    monkeypatch.setattr(runner, "HAVE_GRAPHS", ("cpu",))
    monkeypatch.setattr(programs, "record_kernels", record)
    return found


@pytest.fixture
def warnings(monkeypatch):
    told = []
    monkeypatch.setattr(runner.logger, "warning_once", lambda text: text == runner.COMPILES or told.append(text))
    return told


def check(model, rows=1, **call):
    call = {**prompt(rows), **CALL, **call}
    got = as_the_base(model, call, draft_tree=TREE)
    torch.manual_seed(3)
    plain = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True, disable_compile=True)
    assert torch.equal(got.accepted_lengths, plain.accepted_lengths)


@pytest.mark.few(1)
@pytest.mark.parametrize("choice", [{}, {"do_sample": True, "temperature": 0.8, "repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3.5", "kimi-linear", "falcon-h1", "lfm2"])
def test_states_are_folded_once_in_every_replay(kind, choice, recordings, warnings):
    model = FAMILIES[0].build(tiny_base(kind, dtype=torch.float32, attn_implementation=None))
    for rows in (1, 3, 3):
        check(model, rows, **choice)
    assert sum(each.replays for each in recordings) > 10 and warnings == []


@pytest.mark.few(2)
@pytest.mark.parametrize("rows", [1, 3])
@every_family
def test_exact(family, rows, recordings, warnings):
    model = family.build(tiny_base("llama-gqa"))
    check(model, rows)
    check(model, rows, eos_token_id=list(range(3, 12)), max_new_tokens=40)
    assert [recording.replays > 2 for recording in recordings] == [True] * 2 * GREEDY and warnings == []


@pytest.mark.few(1)
@every_family
def test_what_is_not_greedy_is_recorded_but_for_its_walk(family, recordings, warnings):
    model = family.build(tiny_base("llama-gqa"))
    check(model, 2, do_sample=True, temperature=0.7, top_k=20)
    check(model, 2, do_sample=True, temperature=1.3, max_new_tokens=30)  # the same program
    assert len(recordings) == OTHER
    check(model, 2, repetition_penalty=1.2)
    assert len(recordings) == OTHER + 1 and all(recording.replays > 2 for recording in recordings) and warnings == []


@pytest.mark.slow
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("eagle3", "draft-model")], ids=str)
def test_a_text_that_outgrows_its_memory_is_recorded_again(family, recordings, warnings, monkeypatch):
    monkeypatch.setattr(runner, "AHEAD", 32)
    check(family.build(tiny_base("llama")), 2, max_new_tokens=120)
    assert len(recordings) > 2 * GREEDY and warnings == []


def test_memory_is_free_once_a_call_has_ended_whoever_holds_what_it_knew(recordings, monkeypatch):
    model, held, step = FAMILIES[0].build(tiny_base("llama")), [], batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self: (held.append(self.state), step(self))[1])
    with pytest.raises(ZeroDivisionError):
        model.generate(**prompt(), **CALL, draft_tree=TREE, on_step=lambda record: 1 // (4 - record.step))
    for _ in range(2):
        check(model)
    assert len(recordings) == GREEDY and len(set(map(id, held))) > 2


@pytest.mark.few(1)
@every_family
def test_later_calls_take_the_program_and_its_memory(family, recordings, warnings):
    model = family.build(tiny_base("llama-gqa"))
    check(model, 2)
    for length in (3, 5, 9):
        given = prompt(2, longest=length, seed=length)
        check(model, 2, **given | {"attention_mask": given["attention_mask"]}, max_new_tokens=20 + length)
    check(model, 2, pad_token_id=5, eos_token_id=list(range(3, 20)))
    padded = {"attention_mask": torch.tensor([[1] * 9, [0] * 2 + [1] * 7])}
    check(model, 2, **padded)
    check(model, 2, attention_mask=torch.ones(2, 9, dtype=torch.long))
    assert len(recordings) <= 3 * GREEDY and warnings == []  # with and without padding, and with more ends of text


def test_a_call_while_another_is_in_the_memory_has_memory_of_its_own(recordings, warnings):
    model = FAMILIES[0].build(tiny_base("llama"))
    check(model)
    before = model.base.generate(**prompt(), **CALL)
    inner = []

    def meanwhile(record):
        if record.step == 4:
            inner.append(model.generate(**prompt(seed=7), **CALL, draft_tree=TREE))

    outer = model.generate(**prompt(), **CALL, draft_tree=TREE, on_step=meanwhile)
    assert torch.equal(outer, before)
    assert torch.equal(inner[0], model.base.generate(**prompt(seed=7), **CALL))
    assert len(recordings) == 2 * GREEDY and warnings == []


@pytest.mark.few(1)
@some_families
def test_memory_that_a_call_has_left_for_more_is_no_part_of_it(family, recordings, warnings, monkeypatch):
    monkeypatch.setattr(runner, "AHEAD", 32)
    model = family.build(tiny_base("llama"))
    check(model, max_new_tokens=60)  # in two memories, one after the other
    long = {**prompt(longest=40, seed=2), **CALL}
    expected = model.base.generate(**long)
    inner = []

    def meanwhile(record):  # in the first memory, while the outer call is in the second
        if record.step in (3, 5):
            inner.append(model.generate(**prompt(seed=record.step), **CALL, draft_tree=TREE))

    assert torch.equal(model.generate(**long, draft_tree=TREE, on_step=meanwhile), expected)
    for seed, text in zip((3, 5), inner, strict=True):
        assert torch.equal(text, model.base.generate(**prompt(seed=seed), **CALL))
    assert warnings == []


def test_a_draft_model_that_a_prompt_is_too_long_for_has_a_program_of_its_own(recordings, warnings):
    model = next(one for one in FAMILIES if one.name == "draft-model").build(tiny_base("llama"))
    check(model)
    model.drafter.limit = 4
    for _ in range(2):
        check(model)
    model.drafter.limit = None
    check(model)
    assert len(recordings) == 2 * GREEDY and warnings == []


def test_weights_in_other_memory_are_recorded_anew_and_values_are_read(recordings):
    model = FAMILIES[0].build(tiny_base("llama"))
    check(model)
    with torch.no_grad():
        for parameter in model.base.parameters():
            parameter.copy_(parameter.flip(-1))
    check(model)
    assert len(recordings) == GREEDY
    with torch.no_grad():
        for parameter in model.base.parameters():
            parameter.data = parameter.flip(-1).clone()
    check(model)
    assert len(recordings) == 2 * GREEDY


def test_memory_that_is_kept_is_bounded(recordings, monkeypatch):
    model = FAMILIES[0].build(tiny_base("llama"))
    monkeypatch.setattr(runner, "AHEAD", 16)
    for length in (20, 50, 80, 110):
        check(model, max_new_tokens=length)
    arenas = programs.PROGRAMS[model].arenas
    assert len(arenas) == programs.MOST_ARENAS
    monkeypatch.setattr(programs, "ARENA_BYTES", 1)
    check(model, max_new_tokens=20)
    assert not arenas


def test_trees_of_one_call_share_its_memory(recordings, warnings):
    model = next(one for one in FAMILIES if one.name == "eagle").build(tiny_base("llama"))
    for tree in (TREE, [[0]], TREE):
        model.generate(**prompt(), **CALL, draft_tree=tree)
    assert len(recordings) == 2 * GREEDY and len(programs.PROGRAMS[model].arenas) == 1 and warnings == []


@pytest.mark.few(1)
@some_families
def test_compiled_and_recorded(family, recordings, warnings):
    model = family.build(tiny_base("llama-gqa"))
    for new_tokens in (24, 30):  # the second call goes on in the memory of the first
        check(
            model, 2, compile_config=CompileConfig(backend="eager", mode="reduce-overhead"), max_new_tokens=new_tokens
        )
    assert len(recordings) == GREEDY and len(programs.PROGRAMS[model].compiled) == GREEDY and warnings == []


@pytest.mark.parametrize(
    "call, graphs, name, records",
    [
        ({}, True, "recorded", True),
        ({}, False, "eager", False),
        ({"disable_compile": True, "cache_implementation": "static"}, True, "eager", False),
        ({"cache_implementation": "static"}, True, "compiled", True),
        ({"cache_implementation": "static"}, False, "compiled", False),
        ({"compile_config": CompileConfig()}, True, "compiled", True),
        ({"compile_config": CompileConfig(mode="default")}, True, "compiled", False),
        ({"compile_config": CompileConfig(mode="max-autotune-no-cudagraphs")}, True, "compiled", False),
        ({"compile_config": CompileConfig()}, False, "compiled", False),
    ],
    ids=str,
)
def test_how_a_call_runs(call, graphs, name, records, monkeypatch):
    monkeypatch.setattr(runner, "HAVE_GRAPHS", ("cpu",) * graphs)
    model = FAMILIES[0].build(tiny_base("llama"))
    config, *_ = model._merged_config(None, dict(call))
    execution = runner.Execution.wanted(model, config)
    assert (execution.name, execution.records) == (name, records)


def test_the_end_is_found_a_step_late_and_what_ran_past_it_is_dropped(recordings, monkeypatch):
    model = FAMILIES[0].build(tiny_base("llama"))
    taken, step = [], batch.Batch.step
    monkeypatch.setattr(batch.Batch, "step", lambda self: (taken.append(1), step(self))[1])
    output = model.generate(**prompt(2), **CALL, draft_tree=TREE, return_dict_in_generate=True)
    assert len(taken) == output.accepted_lengths.shape[1] + 1


@pytest.mark.few(1)
@some_families
def test_what_cannot_be_recorded_runs_as_before_and_is_not_tried_again(family, recordings, warnings, monkeypatch):
    tried = []

    def refused(function, device):
        tried.append(function)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(programs, "record_kernels", refused)
    model = family.build(tiny_base("llama"))
    for _ in range(2):
        check(model, 2, max_new_tokens=40)
    assert len(tried) == 1 and len(warnings) == 1
    assert warnings[0].endswith("RuntimeError: operation not permitted when stream is capturing")


@some_families
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_a_replay_that_does_something_else_is_found_out(family, choice, recordings, warnings, monkeypatch):
    def wrong(function, device):
        recording = Recording(function, device)

        def replay():
            recording.replay()
            programs.tensors_of(recording.found)[0].add_(1)

        return replay, recording.found

    monkeypatch.setattr(programs, "record_kernels", wrong)
    model = family.build(tiny_base("llama"))
    check(model, 2, max_new_tokens=40, **choice)
    (warning,) = warnings
    assert "a replay of the recorded step gives something else" in warning


class Cuda:
    """What stands for `torch.cuda`: a recording that ends badly leaves the stream as it is, as the real one does."""

    def __init__(self):
        self.stream = "before"

    def device(self, device):
        return contextlib.nullcontext()

    def current_stream(self):
        return self.stream

    def set_stream(self, stream):
        self.stream = stream

    def Stream(self):
        return "aside"

    def CUDAGraph(self):
        return None

    @contextlib.contextmanager
    def graph(self, graph, stream, capture_error_mode):
        self.stream = stream
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")


def test_a_recording_that_fails_leaves_the_stream_and_tells_the_cause(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)

    def step(*_):
        raise ValueError("no copies\nmore")

    rows = Rows(*torch.zeros(5, 1, dtype=torch.long), None, SlotCache(1, 1, 1))
    with pytest.raises(runner.NotCaptured, match="^ValueError: no copies$"):
        programs.Recorded(step)._record((rows,))
    assert cuda.stream == "before" and not programs._RECORDING.locked() and torch.is_autocast_cache_enabled()


def test_rounding_is_no_difference():
    values = torch.randn(9)
    assert programs.alike(values, values * (1 + 1e-6)) and not programs.alike(values, values + 0.1)
    assert not programs.alike(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_a_base_with_hooks_of_the_user_s_own_is_not_recorded(recordings, warnings):
    model = FAMILIES[0].build(tiny_base("llama"))
    model.base.get_decoder().layers[0].mlp.register_forward_hook(lambda module, given, output: output * -3)
    check(model)
    (warning,) = set(warnings)
    assert recordings == [] and "has hooks or forwards of the user's own" in warning
