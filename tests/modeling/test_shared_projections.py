"""Fresh heads share the base's lm_head where projections of their own would be large beside the base."""

import pytest
import torch

from hf_drafthead.modeling import Eagle3Config, MedusaConfig, MedusaForCausalLM, loading
from hf_drafthead.modeling.families import TRAINED, fresh_heads
from tests.bases import tiny_base

WITH_PROJECTIONS = ["medusa", "hydra", "hydra++", "amphista", "amphista-alpha"]


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr(loading, "LARGE_PROJECTIONS", 1)


def made(family: str, by: str, base, **fields):
    """By the function that `train` calls, or by the class."""
    if by == "fresh_heads":
        return fresh_heads(family, base, **fields)
    return TRAINED[family].model_class.from_base(base, **fields)


@pytest.mark.parametrize("by", ["fresh_heads", "from_base"])
@pytest.mark.parametrize("family", WITH_PROJECTIONS)
def test_projections_that_exceed_a_third_of_the_base_are_shared(family, by, caplog):
    model = made(family, by, tiny_base(vocab_size=2000))
    assert model.config.share_lm_head is True and not list(model.drafter.projections.parameters())
    assert "The heads share the base's lm_head: projections of their own would have" in caplog.text
    ids = torch.arange(3, 15)[None]
    hidden = torch.zeros(1, 12, model.base.config.hidden_size, dtype=model.base.dtype)
    assert model.drafter.head_logits(0, model.drafter.head_states(hidden, ids)[0]).shape[-1] == 2000


@pytest.mark.parametrize("by", ["fresh_heads", "from_base"])
@pytest.mark.parametrize("fields", [{"share_lm_head": False}, {"num_draft_heads": 2, "draft_vocab_size": 10}])
def test_others_are_the_heads_own(fields, by, caplog):
    model = made("medusa", by, tiny_base(vocab_size=2000), **fields)
    assert model.config.share_lm_head is False and list(model.drafter.projections.parameters())
    assert "share the base" not in caplog.text


def test_a_config_says_it_itself():
    model = MedusaForCausalLM.from_base(tiny_base(vocab_size=2000), config=MedusaConfig())
    assert model.config.share_lm_head is False


def test_small_projections_are_never_shared(monkeypatch):
    monkeypatch.setattr(loading, "LARGE_PROJECTIONS", 1 << 24)
    assert MedusaForCausalLM.from_base(tiny_base(vocab_size=2000)).config.share_lm_head is False


def test_families_without_such_projections_are_as_they_are():
    shared_by_default = {"dflash", "dspark", "dflash2"}
    for family in TRAINED.keys() - set(WITH_PROJECTIONS) - shared_by_default:
        fields = {"feature_layers": [0, 1]} if family.endswith(("eagle3", "eagle3.1", "peagle")) else {}
        model = fresh_heads(family, tiny_base(vocab_size=2000), **fields)
        assert not getattr(model.config, "share_lm_head", False)
    assert Eagle3Config().share_lm_head is False
