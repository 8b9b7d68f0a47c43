"""Heads and drafts equal those of the published implementations."""

import pytest
import torch
from torch import Tensor

from hf_drafthead.modeling import EagleForCausalLM, HydraForCausalLM, MedusaForCausalLM
from tests.modeling.golden import TREES, Golden, drafted, golden_model

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


def medusa_weights(heads: dict[str, Tensor], number: int, own: bool) -> dict[str, Tensor]:
    weights = {
        "blocks.0.weight": torch.stack([heads[f"{i}.0.linear.weight"] for i in range(number)]),
        "blocks.0.bias": torch.stack([heads[f"{i}.0.linear.bias"] for i in range(number)]),
    }
    if own:
        weights |= {f"projections.up.{i}.weight": heads[f"{i}.1.weight"] for i in range(number)}
    return weights


def hydra_weights(heads: dict[str, Tensor], block: str, projection: str, number: int = 4) -> dict[str, Tensor]:
    weights = {}
    for i in range(number):
        for kind in ("weight", "bias"):
            parts = [heads[f"hydra_mlp.{i}.{block}.{name}.{kind}"] for name in ("res_connection", "linear")]
            weights[f"heads.{i}.path.{kind}"] = torch.cat(parts)
            weights[f"projections.up.{i}.{kind}"] = heads[f"hydra_lm_head.{i}{projection}.{kind}"]
    return weights


def medusa_own():
    golden = Golden.load("medusa_v1_own_lmhead_l1")
    return golden, golden_model(MedusaForCausalLM, medusa_weights(golden.heads, 5, own=True), num_draft_heads=5)


def medusa_shared():
    golden = Golden.load("medusa_v2_shared_lmhead_l1")
    weights = medusa_weights(golden.heads, 4, own=False)
    return golden, golden_model(MedusaForCausalLM, weights, num_draft_heads=4, share_lm_head=True)


def hydra():
    golden = Golden.load("hydra_mlp_l1_grounded")
    return golden, golden_model(HydraForCausalLM, hydra_weights(golden.heads, "0", ""), num_draft_heads=4)


def hydra_plus_plus():
    golden = Golden.load("hydrapp_prefix_mlp_l1_grounded")
    weights = hydra_weights(golden.heads, "1", ".1")
    for name, tensor in golden.heads.items():
        _, found, part = name.partition("prefix_embeding_layer.")
        if found and "embed_tokens" not in part and "inv_freq" not in part:
            weights[f"prefix.{part.replace('layers.0.', 'layer.')}"] = tensor
    return golden, golden_model(HydraForCausalLM, weights, num_draft_heads=4, prefix_layer=True)


def eagle():
    golden = Golden.load("eagle1")
    weights = {name.replace("layers.0.", "body.layer."): tensor for name, tensor in golden.heads.items()}
    del weights["embed_tokens.weight"]  # the base's
    return golden, golden_model(EagleForCausalLM, weights, fc_bias=True)


SETS = [pytest.param(build, id=build.__name__) for build in (medusa_own, medusa_shared, hydra, hydra_plus_plus)]


@pytest.mark.parametrize("build", SETS)
def test_heads_give_the_published_logits_over_a_text(build):
    golden, model = build()
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


def test_the_prefix_layer_gives_the_published_hidden_states():
    golden, model = hydra_plus_plus()
    with torch.no_grad():
        found = model.drafter.prefix.over_text(golden.given["hidden_states"], None)
    torch.testing.assert_close(found, golden.out["prefix_hidden_states"], **TOLERANCE)


def test_eagle_gives_the_published_hidden_states_and_logits():
    golden, model = eagle()
    ids = golden.given["shifted_input_ids"].roll(1, dims=1)
    with torch.no_grad():
        (states,) = model.drafter.head_states(golden.given["hidden_states"], ids)
        logits = model.drafter.head_logits(0, states)
    torch.testing.assert_close(states, golden.out["draft_hidden_states"], **TOLERANCE)
    torch.testing.assert_close(logits, golden.out["head_logits"], **TOLERANCE)


@pytest.mark.parametrize("tree", [*TREES, "eagle_mc_sim_7b_63"])
@pytest.mark.parametrize("pieces", [[12], [5, 1, 6]], ids=["prompt", "steps"])
@torch.inference_mode()
def test_eagle_drafts_the_published_tree(pieces, tree):
    golden, model = eagle()
    follow, at = golden.given["shifted_input_ids"], 0
    state = model.drafter.start(1, 64)
    for length in pieces:
        piece = slice(at, at + length)
        features = golden.given["hidden_states"][:, piece]
        state = model.drafter.observe(state, features, follow[:, piece], torch.tensor([length]))
        at += length
    published = golden.out[f"{tree}.tree_candidates"][0].tolist()
    assert drafted(model.drafter, state, follow[:, -1:], golden.trees[tree]) == published


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("pieces", [[12], [5, 1, 6]], ids=["prompt", "steps"])
@pytest.mark.parametrize("build", SETS)
@torch.inference_mode()
def test_a_tree_is_drafted_with_the_published_tokens(build, pieces, tree):
    golden, model = build()
    features, ids = golden.given["hidden_states"], golden.given["input_ids"]
    root = golden.out["base_logits"][:, -1:].argmax(-1)
    follow = torch.cat([ids[:, 1:], root], dim=1)
    state, at = model.drafter.start(1, 64), 0
    for length in pieces:
        piece = slice(at, at + length)
        state = model.drafter.observe(state, features[:, piece], follow[:, piece], torch.tensor([length]))
        at += length
    published = golden.out[f"{tree}.tree_candidates"][0].tolist()
    assert drafted(model.drafter, state, root, golden.trees[tree]) == published
