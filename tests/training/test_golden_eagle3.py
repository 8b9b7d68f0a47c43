"""EAGLE-3's training-time test has the losses and gradients of the published trainer."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_drafthead.bases.reader import BaseReader, Reading
from hf_drafthead.modeling.eagle3 import EAGLE3_RECIPE
from hf_drafthead.training.heads_loss import HeadsLoss
from tests.modeling.test_golden_eagle3 import TOLERANCE, facts, golden_model, tensors

STEPS, ROWS, LENGTH = 7, 2, 16
PADDING = STEPS + 2  # the published code fills up with zeros what is behind the end: token 0, logits 0


def padded(tensor: Tensor) -> Tensor:
    return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, PADDING))


@pytest.fixture(scope="module")
def batch() -> tuple[dict[str, Tensor], Reading]:
    """The published batch as a training sees it: a label where the published mask, two positions before it, is 1.

    The published code leaves out where the base's own choice is no draft token: labels are these choices.
    """
    given = tensors("ttt_safeailab")
    mask = padded(given["in.loss_mask"]).roll(2, dims=1).bool()
    ids = padded(given["in.input_ids"])
    logits = padded(given["in.base_logits_shifted"]).roll(1, dims=1)
    inputs = {
        "input_ids": ids,
        "labels": logits.argmax(-1).roll(1, dims=1).where(mask, -100),
        "attention_mask": padded(given["in.attention_mask"]),
    }
    features = padded(given["in.features"])
    return inputs, Reading(features, features, logits)


@pytest.fixture
def model():
    model = golden_model(num_draft_heads=STEPS)
    model.base.requires_grad_(False)
    return model


def published_loss(model, batch, step: int | None = None) -> Tensor:
    """Of all steps as published, or of one of them by itself."""
    decay, weight = EAGLE3_RECIPE["head_decay"], EAGLE3_RECIPE["heads_weight"]
    totals = torch.full((1 + STEPS,), ROWS * LENGTH)  # the published mean is over all positions
    if step is not None:
        totals = totals.where(torch.arange(1 + STEPS) == 1 + step, 10**12)
    loss = HeadsLoss(
        next_token=EAGLE3_RECIPE["next_token_weight"],
        teacher=EAGLE3_RECIPE["teacher_weight"],
        head_decay=decay,
        reader=BaseReader(model.base, {}, False, model.drafter.reads, model.drafter.output),
    )
    inputs, reading = batch
    return loss(model, inputs, totals, weight, reading=reading)[0]


def test_the_loss_of_every_step(model, batch):
    with torch.no_grad():
        found = torch.stack([published_loss(model, batch, step) / 0.8**step for step in range(STEPS)])
        torch.testing.assert_close(found, tensors("ttt_safeailab")["out.losses"], **TOLERANCE)
        torch.testing.assert_close(published_loss(model, batch), tensors("ttt_safeailab")["out.total"], **TOLERANCE)


def test_the_logits_of_the_steps(model, batch):
    inputs, reading = batch
    with torch.no_grad():
        states = model.drafter.head_states(reading.features, inputs["input_ids"], inputs["attention_mask"])
        for step in (0, 1, 2, 6):
            logits = model.drafter.head_logits(step, states[step])[:, :LENGTH]
            real = tensors("ttt_safeailab")["in.attention_mask"].bool()
            expected = tensors("ttt_safeailab")[f"out.step{step}.logits"]
            torch.testing.assert_close(logits[real], expected[real], **TOLERANCE)


def test_the_gradients(model, batch):
    published_loss(model, batch).backward()
    gradients = {name.replace("body.layer.", "midlayer."): p.grad for name, p in model.drafter.named_parameters()}
    norms = facts("ttt_safeailab")["grad_norms"]
    assert set(gradients) == set(norms)
    for name, norm in norms.items():
        assert gradients[name].norm().item() == pytest.approx(norm, rel=1e-5, abs=1e-5)
    for name, expected in tensors("ttt_safeailab").items():
        if name.startswith("grad."):
            torch.testing.assert_close(gradients[name.removeprefix("grad.")], expected, **TOLERANCE)
    assert all(parameter.grad is None for parameter in model.base.parameters())
