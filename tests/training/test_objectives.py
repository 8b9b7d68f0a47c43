"""Objectives against the scalar losses of the original trainers (Medusa, Medusa 1.0, Hydra)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_drafthead.training.objectives import IGNORED, head_weights, next_token_loss, rank_counts, teacher_loss

GOLDEN = Path(__file__).parents[1] / "golden"
HEADS = range(4)


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "losses.safetensors")


@pytest.fixture(scope="module")
def golden():
    return json.loads((GOLDEN / "losses.json").read_text())


@pytest.mark.parametrize("head", HEADS)
def test_next_token_loss_is_the_original_one(tensors, golden, head):
    loss = next_token_loss(tensors["head_logits"][head], tensors["labels"], shift=2 + head)
    assert loss.item() == pytest.approx(golden["medusa1_legacy_logs"][f"medusa{head}_loss"], abs=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_teacher_loss_is_the_original_one(tensors, golden, head):
    loss = teacher_loss(tensors["head_logits"][head], tensors["base_logits"], tensors["labels"], shift=2 + head)
    assert loss.item() == pytest.approx(golden["hydra_logs_teacher"][f"hydra{head}_teacher_loss"], abs=1e-5)


def test_the_base_has_shift_one(tensors, golden):
    loss = next_token_loss(tensors["base_logits"], tensors["labels"], shift=1)
    assert loss.item() == pytest.approx(golden["hydra_logs_lm"]["orig_lm_loss"], abs=1e-5)


def test_decayed_sum_is_that_of_medusa_1_0(tensors, golden):
    losses = [next_token_loss(tensors["head_logits"][head], tensors["labels"], shift=2 + head) for head in HEADS]
    total = 0.2 * sum(weight * loss for weight, loss in zip(head_weights(4, 0.8), losses, strict=True))
    assert float(total) == pytest.approx(golden["medusa2_axolotl_only_heads_const_h0.2_d0.8"], abs=1e-5)


def test_top1_accuracy_is_the_original_one(tensors, golden):
    for head in HEADS:
        counts = rank_counts(tensors["head_logits"][head], tensors["labels"], shift=2 + head, ranks=5)
        assert counts.sum() == (tensors["labels"][:, 2 + head :] != IGNORED).sum()
        assert (counts[0] / counts.sum()).item() == golden["medusa1_legacy_logs"][f"medusa{head}_top1"]


def test_ranks_count_the_better_guesses():
    logits = torch.tensor([[[0.1, 0.4, 0.3, 0.2]] * 5])  # best first: 1, 2, 3, 0
    labels = torch.tensor([[3, 3, 1, 2, IGNORED]])  # with shift 2 only 1 and 2 are asked for
    assert rank_counts(logits, labels, shift=2, ranks=1).tolist() == [1, 1]
    assert rank_counts(logits, labels, shift=2, ranks=3).tolist() == [1, 1, 0, 0]
    assert rank_counts(logits, labels, shift=1, ranks=2).tolist() == [1, 1, 1]


@pytest.mark.parametrize("ignored", [[], [0, 1, 2, 3]], ids=["one", "all"])
def test_ignored_labels_have_no_gradient(tensors, ignored):
    logits = tensors["head_logits"][0].clone().requires_grad_()
    labels = torch.full_like(tensors["labels"], IGNORED)
    if not ignored:
        labels[0, 6] = 5
    loss = next_token_loss(logits, labels, 2) + teacher_loss(logits, tensors["base_logits"], labels, 2)
    loss.backward()
    touched = logits.grad.abs().sum(-1).nonzero().tolist()
    assert touched == ([[0, 4]] if not ignored else []) and torch.isfinite(loss)


def test_rows_without_a_label_far_enough_ahead_are_refused():
    message = r"rows of 3 tokens have no label 4 tokens ahead: give longer rows, or train fewer heads\."
    with pytest.raises(ValueError, match=message):
        next_token_loss(torch.zeros(1, 3, 7), torch.zeros(1, 3, dtype=torch.long), shift=4)
