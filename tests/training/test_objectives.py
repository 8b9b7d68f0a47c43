"""Objectives against the scalar losses of the original trainers (Medusa, Medusa 1.0, Hydra)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_drafthead.training.heads_loss import IGNORED, feature_loss, labelled, rank_counts
from tests.training.plain_loss import next_token_loss, teacher_loss

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS = range(4)


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "losses.safetensors")


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "losses.json").read_text())


def at_labels(given, labels, shift):
    """What stands at the labelled positions (M, ...), and the labels (M,) that lie `shift` ahead of them."""
    kept = labelled(labels, shift)
    return given[kept], labels.roll(-shift, dims=1)[kept]


def teachers_of(tensors, shift):
    """The base's logits for the labels: they stand one position before them."""
    return tensors["base_logits"][labelled(tensors["labels"], shift).roll(shift - 1, dims=1)]


@pytest.mark.parametrize("head", HEADS)
def test_the_loss_of_a_head_is_the_original_one(tensors, golden, head):
    logits, targets = at_labels(tensors["head_logits"][head], tensors["labels"], 2 + head)
    at = labelled(tensors["labels"], 1 + head)  # Hydra asks for a label where the hidden state stands
    states, theirs = tensors["head_hidden_states"][head][at], tensors["base_hidden_states"][at.roll(1 + head, dims=1)]
    for loss, (trainer, name) in (
        (next_token_loss(logits, targets), ("medusa1_legacy_logs", f"medusa{head}_loss")),
        (teacher_loss(logits, teachers_of(tensors, 2 + head)), ("hydra_logs_teacher", f"hydra{head}_teacher_loss")),
        (feature_loss(states, theirs), ("hydra_logs_recon", f"hydra{head}_reconstruct_loss")),
    ):
        assert loss.mean().item() == pytest.approx(golden[trainer][name], abs=1e-5), name


def test_eagle_s_loss_is_the_original_one(tensors, golden):
    kept = tensors["eagle.loss_mask"] != 0
    guessed, target = tensors["eagle.predict"][kept], tensors["eagle.target"][kept]
    lm_head = tensors["eagle.lm_head.weight"]
    feature = feature_loss(guessed, target).mean()
    teacher = teacher_loss(guessed @ lm_head.T, target @ lm_head.T).mean()
    assert feature.item() == pytest.approx(golden["eagle_vloss"], abs=1e-4)
    assert teacher.item() == pytest.approx(golden["eagle_ploss"], abs=1e-4)
    assert (feature + 0.1 * teacher).item() == pytest.approx(golden["eagle_total_v1.0_p0.1"], abs=1e-4)


def test_weighted_sums_of_base_and_heads_are_those_of_medusa_2(tensors, golden):
    means = [next_token_loss(*at_labels(logits, tensors["labels"], shift)).mean() for shift, logits in enumerate(
        [tensors["base_logits"], *tensors["head_logits"]], start=1
    )]  # fmt: skip
    heads = 0.2 * sum(0.8 ** (1 + head) * means[1 + head] for head in HEADS)
    assert float(means[0]) == pytest.approx(golden["hydra_logs_lm"]["orig_lm_loss"], abs=1e-5)
    assert float(heads) == pytest.approx(golden["medusa2_axolotl_only_heads_const_h0.2_d0.8"], abs=1e-5)
    assert float(means[0] + heads) == pytest.approx(golden["medusa2_axolotl_joint_const_h0.2_d0.8"], abs=1e-5)


def test_top1_accuracy_is_the_original_one(tensors, golden):
    for head in HEADS:
        counts = rank_counts(*at_labels(tensors["head_logits"][head], tensors["labels"], 2 + head), ranks=5)
        assert counts.sum() == (tensors["labels"][:, 2 + head :] != IGNORED).sum()
        assert (counts[0] / counts.sum()).item() == golden["medusa1_legacy_logs"][f"medusa{head}_top1"]


def test_ranks_count_the_better_guesses():
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 3)  # best first: 1, 2, 3, 0
    targets = torch.tensor([1, 2, 0])
    assert rank_counts(logits, targets, ranks=1).tolist() == [1, 2]
    assert rank_counts(logits, targets, ranks=3).tolist() == [1, 1, 0, 1]
    logits = torch.tensor([[float("nan"), 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, float("nan"), 2.0]])  # no guess
    assert rank_counts(logits, torch.tensor([0, 2, 2]), 2).tolist() == [1, 1, 1]


def test_ignored_labels_are_not_among_the_labelled():
    labels = torch.tensor([[5, 6, IGNORED, 8], [IGNORED] * 4])
    assert labelled(labels, 1).tolist() == [[True, False, True, False], [False] * 4]
    assert labelled(labels, 3).tolist() == [[True, False, False, False], [False] * 4]
    assert not labelled(labels, 4).any() and not labelled(labels, 9).any()  # short rows have none far ahead
