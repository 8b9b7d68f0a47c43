"""The losses of DFlash and DSpark are those of DeepSpec's trainer: labels, weights and every term."""

import math

import pytest
import torch

from hf_drafthead.bases.reader import Reading
from hf_drafthead.training.heads_loss import IGNORED, HeadsLoss, anchored, sample_anchors
from tests.modeling.block_golden import TOLERANCE, load

CASES = [("loss_dflash_d", 0), ("loss_dflash_d", 1), *(("loss_dspark_vanilla", number) for number in range(3))]


@pytest.fixture
def case(request, tmp_path):
    return load(request.param), load(request.param).model(tmp_path)


def batch_of(case) -> tuple[dict[str, torch.Tensor], Reading]:
    """Labels, anchors (the position before the anchor's token) and states as DeepSpec's forward was given them."""
    given = case.tensors
    labels = given["in.input_ids"].where(given["in.loss_mask"] > 0, IGNORED)
    anchors = (given["in.anchor_positions"] - 1).where(given["in.block_keep_mask"], -1)
    last = given["in.target_last_hidden"]
    inputs = {"input_ids": given["in.input_ids"], "labels": labels, "anchors": anchors}
    return inputs, Reading(given["in.target_hidden"], last, last)


@pytest.mark.parametrize("case", ["loss_dflash_d", "loss_dspark_vanilla"], indirect=True)
def test_labels_and_logits_behind_sampled_anchors(case):
    case, model = case
    inputs, reading = batch_of(case)
    pairs = anchored(inputs["labels"], inputs["anchors"], model.config.num_draft_heads)
    targets = torch.stack([there for there, _ in pairs], dim=2)
    counted = case.tensors["out.eval_mask"]
    assert torch.equal(targets != IGNORED, counted)
    assert torch.equal(targets[counted], case.tensors["out.target_ids"][counted])
    with torch.no_grad():
        states = model.drafter.head_states(reading.features, inputs["input_ids"], None, inputs["anchors"])
        logits = torch.stack([model.drafter.head_logits(head, one) for head, one in enumerate(states)], dim=2)
        base = model.base.lm_head(reading.scores).flatten(0, 1)
        aligned = torch.stack([base[places] for _, places in pairs], dim=2)
    torch.testing.assert_close(logits[counted], case.tensors["out.draft_logits"][counted], **TOLERANCE)
    torch.testing.assert_close(aligned[counted], case.tensors["out.aligned_target_logits"][counted], **TOLERANCE)


@pytest.mark.parametrize("case, number", CASES, indirect=["case"])
def test_the_loss_of_the_original_trainer(case, number):
    case, model = case
    result = case.facts["results"][number]
    settings, terms = result["settings"], result["terms"]
    gamma = settings["loss_decay_gamma"]
    inputs, reading = batch_of(case)

    def loss(**weights: float) -> float:
        one = HeadsLoss(**weights, head_decay=math.exp(-1 / gamma) if gamma else 1.0)
        return float(one(model, inputs, reading=reading)[0])

    names = {"next_token": "ce_loss", "distance": "l1_loss", "confidence": "confidence_loss"}
    for ours, theirs in names.items():
        if terms[f"{theirs}_den"]:
            assert loss(**{ours: 1.0}) == pytest.approx(terms[f"{theirs}_num"] / terms[f"{theirs}_den"], abs=2e-6)
    alphas = {ours: f"{theirs}_alpha".replace("confidence_loss", "confidence_head") for ours, theirs in names.items()}
    together = {ours: settings[alpha] for ours, alpha in alphas.items()}
    assert loss(**together) == pytest.approx(result["loss"], abs=2e-6)


def test_anchors_are_places_with_a_label_behind_them_and_other_ones_every_time():
    labels = torch.full((2, 40), IGNORED)
    labels[0, 10:30], labels[1, 35:] = 1, 1
    first, second = sample_anchors(labels, 6), sample_anchors(labels, 6)
    assert first.shape == (2, 6) and not torch.equal(first, second)
    for anchors in (first, second):
        assert set(anchors[0].tolist()) <= set(range(8, 28)) and len(set(anchors[0].tolist())) == 6
        assert anchors[1].tolist() == [33, 34, 35, 36, 37, -1]
    same = [sample_anchors(labels, 6, torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(*same)


def test_a_missing_label_ends_the_guesses_behind_an_anchor():
    labels = torch.arange(10)[None].clone()
    labels[0, 5] = IGNORED
    targets = [there.tolist() for there, _ in anchored(labels, torch.tensor([[1, 2, 7, -1]]), 3)]
    assert targets == [[[3, 4, 9, IGNORED]], [[4, IGNORED, IGNORED, IGNORED]], [[IGNORED] * 4]]
