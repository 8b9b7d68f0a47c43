"""Heads of other projects draft here what they draft there, and generate the base's own text."""

import pytest
import torch
from transformers import AutoModel

from hf_drafthead import convert_checkpoint
from tests.modeling.golden import TREES, Golden, drafted, golden_base


@pytest.fixture(params=["in memory", "on disk"])
def model(request, original, heads, golden_folder):
    """The golden heads, converted by one line or by the command."""
    base = {} if original.names_base else {"base_model": str(golden_folder)}
    if request.param == "in memory":
        return original.model_class.from_pretrained(heads, convert=True, **base)
    convert_checkpoint(heads, heads.parent / "converted", **base)
    return AutoModel.from_pretrained(heads.parent / "converted")


@torch.inference_mode()
def test_trees_are_drafted_with_the_original_tokens(original, model):
    golden = Golden.load(original.golden)
    features = golden.given["hidden_states"]
    if "shifted_input_ids" in golden.given:
        follow = golden.given["shifted_input_ids"]
    else:
        follow = torch.cat([golden.given["input_ids"][:, 1:], golden.out["base_logits"][:, -1:].argmax(-1)], dim=1)
    for tree in TREES:
        state = model.drafter.start(1, 64)
        state = model.drafter.observe(state, features, follow, torch.tensor([follow.shape[1]]))
        published = golden.out[f"{tree}.tree_candidates"][0].tolist()
        assert drafted(model.drafter, state, follow[:, -1:], golden.trees[tree]) == published


def test_greedy_text_is_the_base_s(model):
    ids = torch.randint(3, 120, (3, 9), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    out = model.generate(ids, return_dict_in_generate=True, **settings)
    assert torch.equal(out.sequences, golden_base().generate(ids, **settings))
    assert out.accepted_lengths.shape[1] > 0


def test_the_tree_is_the_one_of_the_heads_own_project(original, model):
    wanted = "eagle_mc_sim_7b_63" if original.golden == "eagle1" else "mc_sim_7b_63"
    assert model.generation_config.draft_tree == wanted
