"""Captured steps say what the base says, are made once, and are never wrong for the next call.

Most cases trace the step with dynamo and run the trace as it is (backend "eager"); one compiles it.
"""

import re
import threading

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead import DraftTree
from hf_drafthead.bases.releases import CACHE
from hf_drafthead.generation import programs, runner
from hf_drafthead.generation import tree as trees
from hf_drafthead.generation.step import Stages
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, as_the_base, prompt

TRACED = CompileConfig(backend="eager", mode="default")
STAGES = 3  # draft, verify, commit: each is a program
LONG = {"max_new_tokens": 24, "eos_token_id": None}
every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
VARIANTS = {"medusa-shared", "amphista-alpha", "eagle3-variants"}  # of families that are traced already, which is slow


@pytest.fixture
def made(monkeypatch):
    """The programs that are made and kept."""
    found, compiled = [], runner.Runner._compiled

    def noted(self, program, *rest):
        result = compiled(self, program, *rest)
        found.append(program)
        return result

    monkeypatch.setattr(runner.Runner, "_compiled", noted)
    return found


def both(model, rows=1, **call):
    """The output of a captured call, which is the base's."""
    call = {**prompt(rows), **LONG, **call}
    config = call.pop("compile_config", TRACED)
    return as_the_base(model, call, compile_config=config, draft_tree=TREE)


CALLS = {
    "greedy": {},
    "end of text": {"eos_token_id": list(range(3, 12))},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "scores": {"suppress_tokens": [5, 6, 7]},
}


def test_that_a_step_is_compiled_is_said_once_and_before_it_begins(monkeypatch, notices):
    """What takes minutes is not silent."""
    begun = []
    monkeypatch.setattr(programs, "compiled", lambda stage, config: begun.append([*notices]) or stage)
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    for tree in (TREE, [[0]]):
        model.generate(**prompt(), **LONG, compile_config=TRACED, draft_tree=tree)
    assert begun[0] == [runner.COMPILES] and notices.count(runner.COMPILES) == 1


@pytest.mark.few(len(FAMILIES))
@every_family
def test_what_heads_hand_on_in_a_program_is_what_they_hand_on_without(family, made, monkeypatch):
    """In torch 2.11 a program loses the fields of a tuple that is made by `_replace`."""
    traced = programs.compiled
    monkeypatch.setattr(
        programs, "compiled", lambda stage, *how: traced(stage, *how) if stage is Stages.draft else stage
    )
    both(family.build(tiny_base("llama-gqa")), max_new_tokens=9)
    assert len(made) == STAGES


@pytest.mark.few(1)
@pytest.mark.parametrize("family", [one for one in FAMILIES if one.name not in VARIANTS], ids=lambda one: one.name)
def test_exact(family, made, fallbacks):
    model = family.build(tiny_base("llama-gqa"))
    got = both(model, 3)
    plain = model.generate(**prompt(3), **LONG, draft_tree=TREE, return_dict_in_generate=True)
    assert torch.equal(got.accepted_lengths, plain.accepted_lengths)
    assert len(made) == STAGES and fallbacks == []


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [3, 1])
def test_exact_whatever_the_call_decides_by(rows, made, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    for call in CALLS.values():
        both(model, rows, **call)
    assert len(made) == STAGES + 1 and fallbacks == []  # a draft that knows the noise of sampling


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["mistral-sliding", "gpt2", "qwen3", "gpt-neox", "qwen3.5", "falcon-h1", "lfm2"])
def test_exact_on_other_bases(kind, made, fallbacks):
    both(FAMILIES[0].build(tiny_base(kind)), 3)
    assert len(made) == STAGES and fallbacks == []


def test_a_text_outgrows_its_memory_and_prompts_differ_in_length_without_another_program(made, monkeypatch):
    monkeypatch.setattr(runner, "AHEAD", 4)
    monkeypatch.setattr(runner, "CAPACITY_BUCKET", 1)
    model = next(family for family in FAMILIES if family.name == "eagle").build(tiny_base("llama-gqa"))
    fixed, fix = [], runner.fix
    monkeypatch.setattr(runner, "fix", lambda *given, **named: (fix(*given, **named), fixed.append(given)))
    both(model, max_new_tokens=60)
    assert len(fixed) > 4
    for length in (2, 5, 7):
        both(model, input_ids=prompt()["input_ids"][:, :length], max_new_tokens=20 + length)
    assert len(made) == STAGES


def test_sampling_settings_need_no_other_program(made, untraced):
    model = FAMILIES[0].build(tiny_base("llama"))
    for temperature in (0.5, 0.9, 1.3):
        both(model, do_sample=True, temperature=temperature, top_p=0.9)
    both(model, do_sample=True, top_k=3)
    assert len(made) == STAGES


def test_no_more_programs_are_kept_than_the_limit(made, untraced, monkeypatch):
    monkeypatch.setattr(programs, "MOST_PROGRAMS", 3)
    monkeypatch.setattr(programs.Program, "fits", lambda *_: False)
    model = FAMILIES[0].build(tiny_base("llama"))
    for rows in (1, 2, 1):
        both(model, rows)
    assert len(made) == 3 * STAGES and len(programs.PROGRAMS[model].compiled) == 3


def test_a_static_cache_by_name_is_captured_and_returned(made, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    call = {**prompt(2), **LONG, "cache_implementation": "static", "return_dict_in_generate": True}
    expected = model.base.generate(**call)
    theirs = [layer.keys.clone() for layer in expected[CACHE].layers]
    got = model.generate(**call, compile_config=TRACED, draft_tree=TREE)
    assert torch.equal(got.sequences, expected.sequences)
    assert type(got[CACHE]) is type(expected[CACHE])
    length = got.sequences.shape[1] - 1
    for keys, layer in zip(theirs, got[CACHE].layers):
        torch.testing.assert_close(layer.keys[0, :, :length], keys[0, :, :length])
    assert len(made) == STAGES and fallbacks == []


def test_weights_that_change_between_two_calls(made):
    model = FAMILIES[0].build(tiny_base("llama"))
    before = both(model).sequences
    with torch.no_grad():
        for parameter in model.base.parameters():
            parameter.data = parameter.flip(-1).clone()
    assert not torch.equal(both(model).sequences, before)
    assert len(made) == STAGES


def test_what_dynamo_has_forgotten_is_made_anew(made):
    """Also what it frees of programs that are kept."""
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    both(model)
    torch._dynamo.reset()
    both(model)
    assert len(made) == 2 * STAGES


def test_what_a_hook_reads_may_change_within_a_call_and_a_hook_that_counts_compiles_nothing(made):
    model, state = FAMILIES[0].build(tiny_base("llama")), {"strength": 0.0, "calls": 0}

    def steer(module, args, output):
        state["calls"] += 1
        return output + state["strength"] * torch.arange(output.shape[-1]).to(output)

    def raise_strength(input_ids, scores):
        state["strength"] = 3.0 * (input_ids.shape[1] > 12)
        return scores

    plain = both(model).sequences
    programs = len(made)
    model.base.get_decoder().layers[0].mlp.register_forward_hook(steer)

    def steered(generate, **settings):
        state["strength"] = 0.0
        return generate(**prompt(1), **LONG, logits_processor=[raise_strength], **settings)

    expected = steered(model.base.generate)
    assert not torch.equal(expected, plain)
    for _ in range(2):
        assert torch.equal(steered(model.generate, draft_tree=TREE, compile_config=TRACED), expected)
    assert len(made) == programs


def refusing(error):
    def backend(graph, inputs):
        raise error

    return CompileConfig(backend=backend, mode="default")


def test_what_the_compiler_refuses_runs_uncaptured_with_one_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(runner.logger, "warning_once", warnings.append)
    model = FAMILIES[0].build(tiny_base("llama"))
    both(model, compile_config=refusing(ValueError("no such kernel")))
    begins, warning = warnings
    assert begins == runner.COMPILES
    assert warning.startswith("Steps are not captured, they run operation by operation: ") and "\n" not in warning
    assert "no such kernel" in warning


@pytest.mark.few(1)
@pytest.mark.parametrize("family, most", [("medusa", 20), ("eagle", 90)], ids=["at first", "later"])
def test_without_memory_for_the_fixed_shapes_the_text_goes_on_uncaptured(family, most, untraced, monkeypatch):
    monkeypatch.setattr(runner, "AHEAD", 4)
    monkeypatch.setattr(runner, "CAPACITY_BUCKET", 32)
    warnings, new_zeros, taken = [], torch.Tensor.new_zeros, []

    def scarce(part, *shape, **options):
        if len(shape) == 4 and shape[2] > most:
            taken.append(shape)
            if len(taken) % 3 == 0:  # after some layers have got theirs
                raise RuntimeError("[enforce fail at alloc_cpu.cpp:134] DefaultCPUAllocator: can't allocate memory")
        return new_zeros(part, *shape, **options)

    def fix_scarce(*arguments):
        with monkeypatch.context() as patch:
            if arguments[-2]:  # shapes for programs
                patch.setattr(torch.Tensor, "new_zeros", scarce)
            fix(*arguments)

    model = next(one for one in FAMILIES if one.name == family).build(tiny_base("llama"))
    monkeypatch.setattr(runner.logger, "warning_once", lambda text: text == runner.COMPILES or warnings.append(text))
    fix = runner.fix
    with monkeypatch.context() as patch:
        patch.setattr(runner, "fix", fix_scarce)
        both(model, 2, max_new_tokens=60)
    assert warnings[0].startswith("Steps are not captured, they run operation by operation: there is no memory for ")
    assert re.search(r"a cache of \d+\.\d GiB: \d+ positions, 2 row\(s\)", warnings[0])
    warnings.clear()
    both(model, 2, max_new_tokens=60)
    assert warnings == []


def test_an_interrupted_capture_leaves_nothing_behind(made):
    model = FAMILIES[0].build(tiny_base("llama"))
    with pytest.raises(KeyboardInterrupt):
        both(model, compile_config=refusing(KeyboardInterrupt()))
    both(model)
    assert len(made) == STAGES


def test_a_second_call_while_a_step_is_being_captured(made):
    model = FAMILIES[0].build(tiny_base("llama"))
    meanwhile = []

    def backend(graph, inputs):
        other = threading.Thread(target=lambda: meanwhile.append(both(model, 2, max_new_tokens=9)))
        other.start()
        other.join()
        return graph.forward

    both(model, compile_config=CompileConfig(backend=backend, mode="default"))
    assert len(meanwhile) == STAGES and len(made) == STAGES


@pytest.mark.parametrize("given", ["max-autotune", {"backend": "inductor"}], ids=str)
def test_a_compile_config_of_another_type_is_refused_as_the_base_refuses_it(given):
    model = FAMILIES[0].build(tiny_base("llama"))
    with pytest.raises(ValueError, match="^You provided `compile_config` as an instance of .*`CompileConfig`.$"):
        model.generate(**prompt(), compile_config=given)


def test_the_tensors_of_a_tree_are_made_before_it_is_captured(monkeypatch):
    made = []
    for place, name in ((trees.Topology, "of"), (trees, "Level")):
        real = getattr(place, name)

        def noted(*args, real=real, **given):
            made.append(torch.compiler.is_compiling())
            return real(*args, **given)

        monkeypatch.setattr(place, name, noted)
    model = FAMILIES[0].build(tiny_base("llama"))
    tree = DraftTree([(0,), (1,), (0, 0), (0, 0, 0), (2,)])
    model.generate(**prompt(), **LONG, compile_config=TRACED, draft_tree=tree)
    assert len(made) >= 4 and not any(made)


def test_a_compiled_step(made, fallbacks, monkeypatch):
    monkeypatch.setattr(runner.logger, "warning_once", lambda text: text == runner.COMPILES or pytest.fail(text))
    # Left padding and drafter layers with a cache of their own: a mask whose size differs from theirs by a constant is
    # what the compiler cannot write code for.
    model = next(family for family in FAMILIES if family.name == "amphista").build(tiny_base("llama"))
    both(model, 8, compile_config=CompileConfig(mode="default"))
    assert len(made) == STAGES and fallbacks == []
