"""Recorded steps, and steps that are launched ahead of the host: as on a GPU, whose graph a second run stands for."""

import contextlib

import pytest
import torch

from hf_drafthead.generation import capture, graphs
from hf_drafthead.generation.state import Walk
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt

CALL = {"max_new_tokens": 24, "eos_token_id": None}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


class Recording:
    """What stands for a CUDA graph: it does what was recorded, and its outcome lies in one memory."""

    def __init__(self, step, device=None):
        self.step, self.walk, self.replays = step, None, 0

    def __call__(self):
        self.replays += 1
        walk = self.step()
        if self.walk is None:
            self.walk = Walk(walk.packed.clone())
        self.walk.packed.copy_(walk.packed)
        return self.walk


@pytest.fixture
def recordings(monkeypatch):
    """All that is recorded."""
    found = []

    def record(step, device):
        found.append(Recording(step))
        return found[-1]

    monkeypatch.setattr(capture, "has_graphs", lambda device: True)
    monkeypatch.setattr(graphs, "recorded_kernels", record)
    return found


@pytest.fixture
def warnings(monkeypatch):
    told = []
    monkeypatch.setattr(capture.logger, "warning_once", told.append)
    return told


def check(model, rows=1, **call):
    call = {**prompt(rows), **CALL, **call}
    expected = model.base.generate(**call)
    got = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected)
    plain = model.generate(**call, draft_tree=TREE, return_dict_in_generate=True, disable_compile=True)
    assert torch.equal(got.accepted_lengths, plain.accepted_lengths)


@pytest.mark.few(6)
@pytest.mark.parametrize("rows", [1, 3])
@every_family
def test_exact(family, rows, recordings, warnings):
    model = family.build(tiny_base("llama-gqa"))
    check(model, rows)
    check(model, rows, eos_token_id=list(range(3, 12)), max_new_tokens=40)
    assert [recording.replays > 2 for recording in recordings] == [True] * 2 and warnings == []


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("eagle3", "draft-model")], ids=str)
def test_a_text_that_outgrows_its_memory_is_recorded_again(family, recordings, warnings, monkeypatch):
    monkeypatch.setattr(capture, "AHEAD", 4)
    monkeypatch.setattr(capture, "BUCKET", 16)
    check(family.build(tiny_base("llama")), 2, max_new_tokens=60)
    assert len(recordings) > 2 and warnings == []


def test_calls_that_ask_the_host_are_not_recorded(recordings, warnings):
    model = FAMILIES[0].build(tiny_base("llama"))
    check(model, 2, repetition_penalty=1.2)
    torch.manual_seed(1)
    model.generate(**prompt(), **CALL, do_sample=True)
    assert recordings == [] and warnings == []


def test_the_end_is_found_a_step_late_and_what_ran_past_it_is_dropped(recordings, monkeypatch):
    model = FAMILIES[0].build(tiny_base("llama"))
    taken, call = [], capture.CapturedStep.__call__
    monkeypatch.setattr(capture.CapturedStep, "__call__", lambda self, state: (taken.append(1), call(self, state))[1])
    output = model.generate(**prompt(2), **CALL, draft_tree=TREE, return_dict_in_generate=True)
    assert len(taken) == output.accepted_lengths.shape[1] + 1


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("medusa", "eagle3")], ids=str)
def test_what_cannot_be_recorded_runs_as_before_and_is_not_tried_again(family, recordings, warnings, monkeypatch):
    tried = []

    def refused(step, device):
        tried.append(step)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graphs, "recorded_kernels", refused)
    model = family.build(tiny_base("llama"))
    for _ in range(2):
        check(model, 2, max_new_tokens=40)
    assert len(tried) == 1 and len(warnings) == 1
    assert warnings[0].endswith("RuntimeError: operation not permitted when stream is capturing")


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name in ("medusa", "eagle3")], ids=str)
def test_a_replay_that_does_something_else_is_found_out(family, recordings, warnings, monkeypatch):
    class Wrong(Recording):
        def __call__(self):
            super().__call__().tokens.add_(1)
            return self.walk

    monkeypatch.setattr(graphs, "recorded_kernels", Wrong)
    model = family.build(tiny_base("llama"))
    check(model, 2, max_new_tokens=40)
    (warning,) = warnings
    assert "a replay of the recorded step gives something else" in warning


def test_new_memory_takes_a_step_without_a_graph_first(recordings, warnings, monkeypatch):
    taken, whole = [], capture.Captured.__init__

    def noted(self, step, make):
        whole(self, step, lambda function: make(lambda *given: (taken.append(len(recordings)), function(*given))[1]))

    monkeypatch.setattr(capture.Captured, "__init__", noted)
    monkeypatch.setattr(capture, "AHEAD", 4)
    monkeypatch.setattr(capture, "BUCKET", 16)
    model = FAMILIES[0].build(tiny_base("llama"))
    model.generate(**prompt(), max_new_tokens=60, eos_token_id=None, draft_tree=TREE)
    before_each = [taken.index(count) for count in range(len(recordings))]  # the first step after the last recording
    assert len(recordings) > 2 and len(set(before_each)) == len(recordings)


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
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            raise RuntimeError("the capture was invalidated")
        self.stream = before


def test_a_recording_that_fails_leaves_the_stream_and_tells_the_cause(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)

    def step():
        raise ValueError("no copies\nmore")

    with pytest.raises(RuntimeError) as caught:
        graphs.recorded_kernels(step, torch.device("cpu"))
    assert cuda.stream == "before" and not graphs._RECORDING.locked()
    assert graphs.cause_of(caught.value) == "ValueError: no copies"


def test_rounding_is_no_difference():
    values = torch.randn(9)
    assert graphs.alike(values, values * (1 + 1e-6)) and not graphs.alike(values, values + 0.1)
    assert not graphs.alike(torch.tensor([1, 2]), torch.tensor([1, 3]))


def test_a_changed_base_is_compared_anew(recordings):
    model = FAMILIES[0].build(tiny_base("llama"))
    programs = capture._PROGRAMS.setdefault(model, capture.Programs())
    check(model)
    assert len(programs.compared) == 1
    model.base.get_decoder().layers[0].mlp.register_forward_hook(lambda module, given, output: output * -3)
    check(model)
    assert len(programs.compared) == 1 and len(recordings) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@every_family
def test_exact_on_a_gpu(family, warnings):
    model = family.build(tiny_base("llama-gqa")).to("cuda")
    call = {name: value.to("cuda") for name, value in prompt(3).items()}
    expected = model.base.generate(**call, **CALL)
    assert torch.equal(model.generate(**call, **CALL, draft_tree=TREE), expected)
    assert warnings == [] and len(capture._PROGRAMS[model].compared) == 1
