"""Heads of every family can guess among some tokens of their base only."""

import pytest
import torch
from safetensors.torch import load_file

from hf_drafthead import export_checkpoint
from hf_drafthead.modeling import families
from tests.bases import tiny_base
from tests.families import VARIED, Family, features_of, own_fields

SIZE = 23
IDS = torch.arange(24).view(2, 12) % 60 + 3
ALL = [
    Family(name, family.model_class, {**own_fields(family.config()), **VARIED.get(name, {}), "draft_vocab_size": SIZE})
    for name, family in families.TRAINED.items()
]
SHARED = [
    Family(family.name, family.model_class, {**family.fields, "share_lm_head": True})
    for family in ALL
    if family.name in ("medusa", "hydra", "hydra++", "amphista", "amphista-alpha")
]
SHARED.append(next(family for family in ALL if family.name == "eagle"))


def named(families):
    return pytest.mark.parametrize("family", families, ids=lambda family: family.name)


def logits_of(model):
    return [
        model.drafter.head_logits(head, states)
        for head, states in enumerate(model.drafter.head_states(features_of(model, IDS), IDS))
    ]


@pytest.mark.few(1)
@named(ALL)
def test_saved_and_loaded_it_guesses_the_same_tokens(family, tmp_path):
    base = tiny_base(dtype=torch.float32)
    model = family.build(base)
    model.save_pretrained(tmp_path)
    loaded = family.model_class.from_pretrained(tmp_path, base_model=base)
    assert torch.equal(loaded.drafter.draft_tokens, model.drafter.draft_tokens)
    for found, expected in zip(logits_of(loaded), logits_of(model), strict=True):
        assert found.shape[-1] == SIZE
        torch.testing.assert_close(found, expected)


@named(ALL)
def test_guesses_are_tokens_of_the_vocabulary(family):
    model = family.build(tiny_base())
    drafter = model.drafter
    features = features_of(model, IDS)
    state = drafter.observe(drafter.start(2, 64), features, IDS.roll(-1, dims=1), torch.tensor([12, 12]))
    _, guesses = drafter.expand(state, IDS[:, :1], torch.zeros(2, 1, dtype=torch.long))
    tokens, _ = guesses.top(SIZE)
    assert set(tokens[0, 0].tolist()) == set(drafter.draft_tokens.tolist())


@named(SHARED)
def test_a_shared_projection_has_rows_of_the_base_and_stores_the_tokens_alone(family, tmp_path):
    base = tiny_base()
    model = family.build(base)
    drafter = model.drafter
    hidden = torch.randn(3, base.config.hidden_size, dtype=base.dtype)
    expected = base.lm_head(hidden)[:, drafter.draft_tokens]
    torch.testing.assert_close(drafter.base_logits(hidden), expected)
    model.save_pretrained(tmp_path)
    sizes = {name: tensor.shape for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    assert sizes["drafter.draft_tokens"] == (SIZE,)
    assert not any("projections" in name or "rows" in name for name in sizes)


def test_rows_follow_the_base():
    base = tiny_base()
    model = SHARED[0].build(base)
    hidden = torch.randn(3, base.config.hidden_size, dtype=base.dtype)
    before = model.drafter.base_logits(hidden)
    with torch.no_grad():
        base.lm_head.weight.mul_(2)
    torch.testing.assert_close(model.drafter.base_logits(hidden), 2 * before)
    model.drafter.choose_vocabulary(model.drafter.draft_tokens.flip(0))
    torch.testing.assert_close(model.drafter.base_logits(hidden), 2 * before.flip(-1))
    model.to(torch.float32)
    assert model.drafter.base_logits(hidden.float()).dtype == torch.float32


def test_an_engine_gets_the_whole_projection_or_a_refusal(tmp_path):
    base = tiny_base(dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    base.config._name_or_path = str(tmp_path / "base")
    shared, own = (Family("medusa", ALL[0].model_class, fields) for fields in (SHARED[0].fields, ALL[0].fields))
    export = export_checkpoint(shared.build(base), tmp_path / "theirs", "tgi")
    assert export.notes[-1] == (
        f"the draft vocabulary of {SIZE} tokens is left out: there the heads guess among all tokens."
    )
    with pytest.raises(ValueError, match="its reduced_projections is True"):
        export_checkpoint(own.build(base), tmp_path / "refused", "tgi")
