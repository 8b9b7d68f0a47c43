"""Over a long text memory grows by the caches and the tokens only."""

import gc
import os

import pytest
import torch

from hf_drafthead.bases.slots import SlotCache
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.generation.agreement import TREE, prompt

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
