"""What fails in the middle of a call leaves nothing behind: the next call is right. What is no number ends too."""

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead.generation.step import Stages
from hf_drafthead.trees.sizes import Sizes
from tests.base_table import SEEING, tiny
from tests.bases import HYBRID, tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt

TRACED = {"compile_config": CompileConfig(backend="eager", mode="default")}
LONG = {"max_new_tokens": 16, "eos_token_id": None, "draft_tree": TREE}
families = pytest.mark.parametrize(
    "family", [one for one in FAMILIES if one.name in ("medusa", "eagle")], ids=lambda family: family.name
)


def same(model, rows=1, **call):
    """The model's next call gives the base's text."""
    own = {name: call.pop(name) for name in ("draft_tree", "compile_config") if name in call}
    torch.manual_seed(2)
    expected = model.base.generate(**prompt(rows), **call)
    torch.manual_seed(2)
    got = model.generate(**prompt(rows), **call, **own, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and got.accepted_lengths is not None
    return got


class FailingHook:
    """A hook that raises once, at some forward of a module."""

    def __init__(self, error, at):
        self.error, self.left = error, at

    def __call__(self, *given):
        self.left -= 1
        if not self.left:
            raise self.error


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "kind, place",
    [
        ("llama-gqa", ""),
        ("llama-gqa", "model"),
        ("llama-gqa", "model.layers.1"),
        ("qwen3.5", "model.layers.1"),
        ("llama-gqa", "lm_head"),
        ("gpt2", ""),
        ("qwen2_5_vl", ""),
    ],
    ids=["the base", "its decoder", "a layer", "a layer with a state", "its output", "unusual inputs", "of images"],
)
def test_what_a_hook_raises_reaches_the_caller_also_while_the_base_is_tried(kind, place, fallbacks):
    fields = {"dtype": torch.float32, "attn_implementation": None} if kind in HYBRID else {}
    model = FAMILIES[0].build(tiny(kind) if kind in SEEING else tiny_base(kind, **fields))
    call = {**LONG, "max_new_tokens": 4}
    if kind == "gpt2":
        call["token_type_ids"] = torch.full((1, 9), 3)
    for at in range(1, 100):
        failing = FailingHook(ValueError("of the user's own"), at)
        hook = model.base.get_submodule(place).register_forward_hook(failing)
        try:
            model.generate(**prompt(), **call)
        except ValueError as error:
            assert error is failing.error
        else:
            break
        same(model, **call)  # the hook is still there
        hook.remove()
    assert 8 < at < 99 and failing.left > 0 and not fallbacks


def test_a_hook_that_raises_in_every_forward_is_no_reason_to_draft_no_more_once_it_raises_no_more():
    model, raises = FAMILIES[0].build(tiny_base("llama-gqa")), [ValueError("of the user's own")]

    def hook(*given):
        if raises:
            raise raises[0]

    model.base.register_forward_pre_hook(hook)
    with pytest.raises(ValueError, match="of the user's own"):
        model.generate(**prompt(), **LONG)
    raises.clear()
    same(model, **LONG)


def test_a_hook_that_cannot_read_what_a_tree_is_given_leaves_the_text_to_the_base(fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))

    def hook(module, given, named):
        mask = named.get("attention_mask")
        assert mask is None or mask.dim() == 2, "a mask of tokens"

    model.base.get_decoder().register_forward_pre_hook(hook, with_kwargs=True)
    call = {"max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(model.generate(**prompt(2), **call), model.base.generate(**prompt(2), **call))
    assert len(fallbacks) == 1 and "a mask of tokens" in fallbacks[0]


def guesses_from_now_on(patch) -> set[int]:
    verify, guessed = Stages.verify, set()

    def watched(stages, rows, limits, candidates):
        guessed.update(candidates.tokens[:, 1:].flatten().tolist())
        return verify(stages, rows, limits, candidates)

    patch.setattr(Stages, "verify", watched)
    return guessed


@families
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("tree", [TREE, {"dynamic": {"nodes": 8, "width": 3}}], ids=["static", "dynamic"])
def test_heads_that_are_no_numbers_change_no_text(tree, value, family):
    model = family.build(tiny_base("llama-gqa"))
    with torch.no_grad():
        for parameter in model.drafter.parameters():
            parameter.fill_(value)
    same(model, **{**LONG, "draft_tree": tree})
    same(model, **{**LONG, "draft_tree": tree}, do_sample=True)


@pytest.mark.few(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("captured", [{}, pytest.param(TRACED, marks=pytest.mark.slow)], ids=["uncaptured", "captured"])
@pytest.mark.parametrize("kind", ["llama-gqa", "qwen3.5", "granite-hybrid", "lfm2"])
@families
def test_a_guess_of_which_the_base_makes_no_number_changes_no_text(family, kind, captured, value, monkeypatch):
    fields = {"dtype": torch.float32, "attn_implementation": None} if kind in HYBRID else {}
    model = family.build(tiny_base(kind, tie_word_embeddings=False, **fields))
    calls = [{}, {"do_sample": True}, {"do_sample": True, "repetition_penalty": 1.2}]
    with monkeypatch.context() as patch:
        guessed = guesses_from_now_on(patch)
        said = [same(model, 3, **LONG, **call).sequences.flatten().tolist() for call in calls]
    never = sorted(guessed.difference(*said))
    assert never
    with torch.no_grad():
        model.base.get_input_embeddings().weight[never] = value
    for call in calls:
        same(model, 3, **LONG, **captured, **call)


def test_what_is_known_of_steps_goes_on_behind_a_guess_of_which_the_base_makes_no_number(monkeypatch):
    """The row stands still, and the next step is one of the root alone: each is noted as what it was."""
    model = FAMILIES[0].build(tiny_base("llama-gqa", tie_word_embeddings=False))
    call, noted, note = {**LONG, "draft_tree": None}, [], Sizes._note

    def listed(self, step, state):
        noted.append((step.levels > 0, state.counted[0]))
        return note(self, step, state)

    with monkeypatch.context() as patch:
        guessed = guesses_from_now_on(patch)
        said = same(model, **call).sequences.flatten().tolist()
    with torch.no_grad():
        model.base.get_input_embeddings().weight[sorted(guessed.difference(said))] = float("nan")
    monkeypatch.setattr(Sizes, "_note", listed)
    same(model, **call)
    stuck = [place for place, each in enumerate(noted) if each == (True, 0)]
    assert stuck and all(noted[place + 1] == (False, 1) for place in stuck if place + 1 < len(noted))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("probed", [False, True], ids=["before the probe", "after it"])
def test_a_base_that_is_no_number_ends_as_by_itself_and_drafts_once_it_is_repaired(probed, value, fallbacks):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    weight = model.base.get_decoder().layers[0].mlp.down_proj.weight
    good = weight.detach().clone()
    if not probed:
        del model.__dict__["_readers"]  # what was found when the heads were made
    with torch.no_grad():
        weight.fill_(value)
    call = {**prompt(2), "max_new_tokens": 12, "eos_token_id": None}
    assert torch.equal(model.generate(**call, draft_tree=TREE), model.base.generate(**call))
    for one in (model.base, model):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            one.generate(**call, do_sample=True)
    assert bool(fallbacks) != probed
    with torch.no_grad():
        weight.copy_(good)
    same(model, **LONG)
