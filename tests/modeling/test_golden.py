"""Heads and drafts equal those of the published implementations, read from the files that these write."""

import pytest
import torch

from tests.formats.originals import ORIGINALS
from tests.modeling.golden import TREES, Golden, drafted, golden_base

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}
PREFIX, EAGLE = "hydrapp_prefix_mlp_l1_grounded", "eagle1"
BY_NAME = {original.golden: original for original in ORIGINALS}


@pytest.fixture
def read(tmp_path):
    """A function that gives a golden set, and the model of its heads."""

    def call(name: str):
        original = BY_NAME[name]
        original.write(tmp_path / "heads", tmp_path / "base")
        return Golden.load(name), original.model_class.from_pretrained(
            tmp_path / "heads", convert=True, base_model=golden_base()
        )

    return call


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != EAGLE])
def test_heads_give_the_published_logits_over_a_text(name, read):
    golden, model = read(name)
    with torch.no_grad():
        states = model.drafter.head_states(golden.given["hidden_states"], golden.given["input_ids"])
        assert len(states) == model.config.num_draft_heads == len(golden.out["head_logits"])
        for i, state in enumerate(states):
            valid = golden.given["input_ids"].shape[1] - 1 - i  # behind that, rolled tokens have wrapped around
            logits = model.drafter.head_logits(i, state)
            torch.testing.assert_close(logits[:, :valid], golden.out["head_logits"][i][:, :valid], **TOLERANCE)
            if "head_hidden_states" in golden.out:
                published = golden.out["head_hidden_states"][i][:, :valid]
                torch.testing.assert_close(state[:, :valid], published, **TOLERANCE)


def test_the_prefix_layer_gives_the_published_hidden_states(read):
    golden, model = read(PREFIX)
    with torch.no_grad():
        found = model.drafter.prefix.over_text(golden.given["hidden_states"], None)
    torch.testing.assert_close(found, golden.out["prefix_hidden_states"], **TOLERANCE)


def test_eagle_gives_the_published_hidden_states_and_logits(read):
    golden, model = read(EAGLE)
    ids = golden.given["shifted_input_ids"].roll(1, dims=1)
    with torch.no_grad():
        (states,) = model.drafter.head_states(golden.given["hidden_states"], ids)
        logits = model.drafter.head_logits(0, states)
    torch.testing.assert_close(states, golden.out["draft_hidden_states"], **TOLERANCE)
    torch.testing.assert_close(logits, golden.out["head_logits"], **TOLERANCE)


@pytest.mark.few(5)
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("pieces", [[12], [5, 1, 6]], ids=["prompt", "steps"])
@torch.inference_mode()
def test_trees_are_drafted_with_the_published_tokens(name, pieces, read):
    golden, model = read(name)
    features = golden.given["hidden_states"]
    if name == EAGLE:
        follow = golden.given["shifted_input_ids"]
    else:
        follow = torch.cat([golden.given["input_ids"][:, 1:], golden.out["base_logits"][:, -1:].argmax(-1)], dim=1)
    for tree in (*TREES, *(["eagle_mc_sim_7b_63"] if name == EAGLE else [])):
        state, at = model.drafter.start(1, 64), 0
        for length in pieces:
            piece = slice(at, at + length)
            state = model.drafter.observe(state, features[:, piece], follow[:, piece], torch.tensor([length]))
            at += length
        published = golden.out[f"{tree}.tree_candidates"][0].tolist()
        assert drafted(model.drafter, state, follow[:, -1:], golden.trees[tree]) == published


@pytest.mark.parametrize("name", BY_NAME)
def test_the_tree_is_the_one_of_the_heads_own_project_and_greedy_text_the_base_s(name, read):
    _, model = read(name)
    assert model.generation_config.draft_tree == ("eagle_mc_sim_7b_63" if name == EAGLE else "mc_sim_7b_63")
    ids = torch.randint(3, 120, (3, 9), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    out = model.generate(ids, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, golden_base().generate(ids, **settings))
    assert out.accepted_lengths.shape[1] > 0
