"""What surrounds a call: changes between two calls, callbacks that raise, other threads. Each equals the base.

Over all families, and over eager, compiled and recorded steps; a graph is stood for by what it was made of, which goes
on with the numbers that it has seen.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from peft import LoraConfig
from transformers import CompileConfig, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_drafthead.bases import generators
from hf_drafthead.generation import noise, programs
from hf_drafthead.modeling.adapters import add_adapter
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt
from tests.generation.test_recorded import recordings  # noqa: F401

TRACED = CompileConfig(backend="eager", mode="default")
CALL = {"max_new_tokens": 12, "eos_token_id": None}
RUNNERS = {"eager": {"disable_compile": True}, "compiled": {"compile_config": TRACED}, "recorded": {}}
# a program takes seconds to make, and its guards are those of the base: a family of each class
ONE_OF_A_CLASS = {family.model_class: family for family in reversed(FAMILIES)}.values()
every_family_and_runner = pytest.mark.parametrize(
    ("family", "how"),
    [(family, how) for family in FAMILIES for how in RUNNERS if how != "compiled" or family in ONE_OF_A_CLASS],
    ids=lambda value: value if isinstance(value, str) else value.name,
)


@pytest.fixture
def settings(how, request):
    """The settings of a call that is run so."""
    if how == "recorded":
        request.getfixturevalue("recordings")
    return {**RUNNERS[how], "draft_tree": TREE}


def same(model, settings, **call) -> bool:
    """Whether a call equals the base's."""
    call = {**prompt(), **CALL, **call}
    return torch.equal(model.generate(**call, **settings), model.base.generate(**call))


def strength(base):
    now = {"strength": 0.0}
    size = base.config.hidden_size
    layer = base.get_decoder().layers[-1]
    layer.register_forward_hook(lambda module, given, output: output + now["strength"] * torch.arange(size))
    return lambda: now.update(strength=2.0)


def scaling(base):
    def change():
        base.get_decoder().layers[-1].self_attn.scaling *= 5

    return change


def every_scaling(base):
    def change():
        for layer in base.get_decoder().layers:
            layer.self_attn.scaling *= 5

    return change


def hook(base):
    return lambda: base.get_decoder().layers[-1].mlp.down_proj.register_forward_hook(lambda m, given, out: out * -3)


def positional(base):
    def last_only(module, given, output):
        output = output.clone()
        output[:, -1] *= -3
        return output

    return lambda: base.get_decoder().layers[-1].register_forward_hook(last_only)


def forward(base):
    mlp = base.get_decoder().layers[-1].mlp
    return lambda: setattr(mlp, "forward", lambda x: type(mlp).forward(mlp, x) * -2)


def ten_alone(module, given, output):
    output.logits[..., 10] += 500
    return output


def hook_of_the_base(base):
    return lambda: base.register_forward_hook(ten_alone)


def forward_of_the_base(base):
    return lambda: setattr(base, "forward", lambda **given: ten_alone(base, (), type(base).forward(base, **given)))


def dtype(base):
    return lambda: base.float()


def threads(base):
    return lambda: torch.set_num_threads(torch.get_num_threads() % 2 + 1)


def module_of_another_kind(base):
    def change():
        base.get_decoder().layers[1].mlp.act_fn = torch.nn.Tanh()

    return change


def adapters(base):
    add_adapter(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    base.eval()

    def switched_off():
        for module in base.modules():
            if hasattr(module, "enable_adapters"):
                module.enable_adapters(False)

    return switched_off


CHANGES = [
    strength,
    scaling,
    every_scaling,
    hook,
    positional,
    forward,
    hook_of_the_base,
    forward_of_the_base,
    dtype,
    threads,
    module_of_another_kind,
    adapters,
]


@pytest.mark.few(2)
@pytest.mark.parametrize("prepare", CHANGES, ids=lambda prepare: prepare.__name__)
@every_family_and_runner
def test_whatever_changes_between_two_calls(family, prepare, how, settings):
    before = torch.get_num_threads()
    model = family.build(tiny_base("llama"))
    change = prepare(model.base)
    try:
        assert same(model, settings)
        change()
        if prepare is dtype:
            model.drafter.float()
        assert same(model, settings) and same(model, settings)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_autocast_entered_and_left_between_two_calls():
    model = FAMILIES[0].build(tiny_base("llama", dtype=torch.float32))
    # traced down to the operations of which autocast has changed the types
    captured = {"compile_config": CompileConfig(backend="aot_eager", mode="default"), "draft_tree": TREE}
    output = {"return_dict_in_generate": True, "output_logits": True}

    def in_half_precision():
        logits = model.generate(**prompt(), **CALL | {"max_new_tokens": 4}, **captured, **output).logits
        return all(torch.equal(each, each.bfloat16().float()) for each in logits)

    found = [in_half_precision()]
    with torch.autocast("cpu", torch.bfloat16):
        found.append(in_half_precision())
        assert same(model, captured)
    assert [*found, in_half_precision()] == [False, True, False] and same(model, captured)


def test_a_program_that_is_trusted_without_its_guards_is_found_out(monkeypatch):
    monkeypatch.setattr(programs.Program, "fits", lambda *_: True)
    model = FAMILIES[0].build(tiny_base("llama"))
    change, settings = every_scaling(model.base), {**RUNNERS["compiled"], "draft_tree": TREE}
    assert same(model, settings)
    change()
    assert not same(model, settings)


class GoneError(BaseException):
    """Of the user, as Ctrl-C is."""


class Callback(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Raises when it is called for the n-th time; notes what it is given."""

    def __init__(self, left):
        self.left, self.seen = left, []

    def note(self, value):
        self.seen.append(value)
        self.left -= 1
        if not self.left:
            raise GoneError

    def __call__(self, input_ids, scores):
        self.note(input_ids.tolist())
        return scores

    def put(self, value):
        self.note(value.tolist())

    def end(self):
        self.note("end")


class Criterion(Callback):
    """The same as a criterion."""

    def __call__(self, input_ids, scores, **kwargs):
        self.note(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Moving(Callback):
    """Moves a base away when it is called for the n-th time."""

    def __init__(self, left, base):
        super().__init__(left)
        self.base = base

    def note(self, value):
        with contextlib.suppress(GoneError):
            super().note(value)
        if not self.left:
            self.base.to("meta")


@pytest.mark.parametrize("how", ["compiled", "recorded"])
def test_a_base_that_is_moved_within_a_call_is_not_read_where_it_was(how, settings):
    model = FAMILIES[0].build(tiny_base("llama"))
    call = {**prompt(), **CALL, **settings}
    model.generate(**call)
    with pytest.raises(RuntimeError, match="the base was moved from cpu while it generated: move it"):
        model.generate(**call, logits_processor=[Moving(4, model.base)])


PLACES = {
    "processor": lambda left: ("logits_processor", Callback(left)),
    "criterion": lambda left: ("stopping_criteria", Criterion(left)),
    "streamer": lambda left: ("streamer", Callback(left)),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("left", [1, 2, 5])
@every_family_and_runner
def test_a_callback_that_raises_ends_the_call_as_the_base_s_and_is_called_as_often(family, left, place, how, settings):
    model = family.build(tiny_base("llama"))
    found = []
    for generate, ours in ((model.base.generate, {}), (model.generate, settings)):
        name, callback = PLACES[place](left)
        torch.manual_seed(3)
        with pytest.raises(GoneError):
            given = callback if name == "streamer" else [callback]
            generate(**prompt(), **CALL, do_sample=True, **{name: given}, **ours)
        found.append((callback.seen, torch.get_rng_state().tolist()))
    assert found[0] == found[1]
    assert same(model, settings)


def together(model, settings, count=3):
    """Texts of sampled calls of several lengths at the same time, in threads that also drop programs and end calls."""
    begin = threading.Barrier(count)

    def request(number):
        begin.wait()
        with contextlib.suppress(GoneError):
            model.generate(**prompt(), **CALL, streamer=Callback(3 + number), **settings)
        given = {**prompt(1 + number), **CALL}
        greedy = model.generate(**given, **settings)
        assert torch.equal(greedy, model.base.generate(**given))
        return model.generate(**prompt(), **CALL, do_sample=True, temperature=3.0, **settings)[0, 9:]

    with ThreadPoolExecutor(count) as pool:
        texts = [*pool.map(request, range(count))]
    return max(int((one == other).sum()) for number, one in enumerate(texts) for other in texts[:number])


@pytest.mark.few(2)
@every_family_and_runner
def test_threads_that_sample_compile_evict_and_end(family, how, settings, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 2)
    model = family.build(tiny_base("llama"))
    model._base_reader()
    assert together(model, settings) < 6  # of 12


@pytest.mark.parametrize("compiles", [True, False], ids=["while a program is compiled", "otherwise"])
def test_a_generator_that_a_compilation_puts_back_is_where_calls_have_left_it(compiles):
    """As dynamo does it, in the thread that compiles; a user who does it means it."""
    model = FAMILIES[0].build(tiny_base("llama"))
    call = {**prompt(), **CALL, "do_sample": True, "temperature": 3.0, "draft_tree": TREE}
    torch.manual_seed(3)
    model.generate(**call)
    second = model.generate(**call)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    with generators.not_put_back(model.base.device) if compiles else contextlib.nullcontext():
        first = model.generate(**call)
        torch.set_rng_state(before)
        assert torch.equal(model.generate(**call), second if compiles else first)
        torch.set_rng_state(before)
    assert torch.equal(torch.get_rng_state(), before) != compiles
    assert not generators.LEFT


def test_threads_that_share_their_noise_are_found_out(monkeypatch):
    monkeypatch.setattr(noise, "elsewhere", lambda generator, state: state)
    model = FAMILIES[0].build(tiny_base("llama"))
    model._base_reader()
    call = {**prompt(), **CALL, "do_sample": True, "temperature": 3.0, "draft_tree": TREE}
    inner = []

    def meanwhile(record):
        if record.step == 1:
            other = threading.Thread(target=lambda: inner.append(model.generate(**call)))
            other.start()
            other.join()

    torch.manual_seed(3)
    assert torch.equal(model.generate(**call, on_step=meanwhile), inner[0])
