"""Where memory does not hold the nodes of a step: smaller trees, one warning, the same text; and how it grows."""

import gc
import os

import pytest
import torch
from transformers import CompileConfig

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.slots import SlotCache
from hf_drafthead.generation import batch, runner
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt, shared_base

TRACED = CompileConfig(backend="eager", mode="default")
LONG = {"max_new_tokens": 16, "eos_token_id": None}
SHORT = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
eagle = next(family for family in FAMILIES if family.name == "eagle")


@pytest.fixture
def warnings(monkeypatch):
    found = []
    for module in (batch, runner):  # `warning_once` calls this
        monkeypatch.setattr(module.logger, "warning", lambda text: "compiled" in text or found.append(text))
    return found


def narrow(monkeypatch, most: int, error: Exception, once: bool = False):
    """Let every step of more than `most` nodes fail; returns the sizes that were tried."""
    nodes, tried = BaseReader.nodes, []

    def limited(self, tokens, *rest):
        tried.append(tokens.shape[1])
        if tokens.shape[1] > most and not (once and len(tried) > 1):
            raise error
        return nodes(self, tokens, *rest)

    monkeypatch.setattr(BaseReader, "nodes", limited)
    return tried


DYNAMIC = {"dynamic": {"nodes": 12, "depth": 3, "width": 4}}


@pytest.mark.parametrize("error", SHORT, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "choice, tree", [({}, TREE), ({"do_sample": True}, DYNAMIC), ({"repetition_penalty": 1.3}, TREE)], ids=str
)
def test_smaller_trees_give_the_same_text(choice, tree, error, warnings, monkeypatch):
    model = eagle.build(shared_base("llama-gqa"))
    call = {**prompt(3), **LONG, **choice}
    torch.manual_seed(1)
    expected = model.base.generate(**call)
    left_at = torch.get_rng_state()
    model._base_reader()
    tried = narrow(monkeypatch, 4, error)
    torch.manual_seed(1)
    got = model.generate(**call, draft_tree=tree, return_dict_in_generate=True)
    assert torch.equal(got.sequences, expected) and torch.equal(torch.get_rng_state(), left_at)
    assert got.accepted_lengths is not None
    first = 14 if tree is TREE else 12
    assert tried[:3] == [first, first // 2, first // 2 // 2] and set(tried[3:]) == {tried[2]}
    assert warnings == ["Memory does not hold the nodes of a step: this call goes on with smaller trees."]


@pytest.mark.parametrize("once", [False, True], ids=["in every step", "in the first"])
@pytest.mark.parametrize("choice", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
def test_captured_steps_go_on_uncaptured(choice, once, warnings, untraced, monkeypatch):
    model = FAMILIES[0].build(tiny_base("llama-gqa"))
    call = {**prompt(2), **LONG, **choice}
    torch.manual_seed(1)
    expected = model.base.generate(**call)
    model._base_reader()
    with monkeypatch.context() as patch:
        narrow(patch, 7, SHORT[0], once)
        torch.manual_seed(1)
        got = model.generate(**call, draft_tree=TREE, compile_config=TRACED)
    assert torch.equal(got, expected) and len(warnings) == (1 if once else 2)


def test_the_root_alone_that_does_not_fit_is_the_device_s_error(monkeypatch):
    model = FAMILIES[0].build(shared_base("llama"))
    model._base_reader()
    tried = narrow(monkeypatch, 0, SHORT[0])
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        model.generate(**prompt(), **LONG, draft_tree=TREE)
    assert tried == [14, 7, 3, 1]


def test_no_other_error_is_taken_for_it(warnings, monkeypatch):
    model = FAMILIES[0].build(shared_base("llama"))
    model._base_reader()
    tried = narrow(monkeypatch, 4, RuntimeError("The size of tensor a must match the size of tensor b"))
    with pytest.raises(RuntimeError, match="must match"):
        model.generate(**prompt(), **LONG, draft_tree=TREE)
    assert tried == [14] and warnings == []


NEW_TOKENS = int(os.environ.get("LONG_TEXT", 180))  # of a text; 10,000 take minutes
CALLS = {"greedy": {}, "sampled": {"do_sample": True, "temperature": 0.9}, "host": {"repetition_penalty": 1.1}}


def alive() -> dict[int, int]:
    """Bytes of every memory that a tensor lies in."""
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):  # not those of a compiler, which have no memory
            memory = thing.untyped_storage()
            found[memory.data_ptr()] = memory.nbytes()
    return found


def in_caches() -> int:
    """Bytes of the caches."""
    caches = (thing for thing in gc.get_objects() if type(thing) is SlotCache)
    blocks = {id(part): part.nbytes for cache in caches for part in cache.blocks}
    return sum(blocks.values())


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=pytest.mark.slow if one.name == "draft-model" else ())
        for one in FAMILIES
        if one.name in ("medusa", "draft-model")
    ],
    ids=lambda one: one.name,
)
def test_only_caches_and_tokens_grow(family, call):
    model = family.build(tiny_base("llama", max_position_embeddings=NEW_TOKENS + 64))
    found = []

    def watch(record):
        if record.step in (20, 21, 22) or record.step % 50 == 0 and record.step:
            gc.collect()
            found.append(sum(alive().values()) - in_caches())

    given = {**prompt(2), **call, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    sequences = model.generate(**given, draft_tree=TREE, on_step=watch)
    tokens = 8 * sequences.numel()
    assert sequences.shape[1] > NEW_TOKENS and len(found) > 4
    # room for tokens is taken ahead; rows that advance at their own pace need states of the generator in between
    between = 64 * torch.get_rng_state().nbytes
    assert max(found[3:]) - max(found[:3]) <= 4 * tokens + between, found
