"""Chunks of labelled positions give the loss and gradients of the plain way, in less memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_drafthead.training import heads_loss
from hf_drafthead.training.heads_loss import HeadsLoss
from tests.bases import tiny_base
from tests.training.plain_loss import PLAIN, plain_loss
from tests.training.test_trainer import ROWS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "training_memory.py"


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.drafter.named_parameters()}


@pytest.mark.parametrize("chunk", [1, 700, 1 << 22], ids=["one position", "some", "all"])
@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
def test_loss_and_gradients_are_those_of_the_plain_way(family, chunk, monkeypatch):
    monkeypatch.setattr(heads_loss, "CHUNK", chunk)
    model = family.build(tiny_base(dtype=torch.float32))
    model.base.requires_grad_(False)
    labels = ROWS.masked_fill(torch.rand(ROWS.shape, generator=torch.Generator().manual_seed(1)) < 0.4, -100)
    plain = plain_loss(model, ROWS, labels, next_token=0.7, teacher=0.4, decay=0.8)
    ours, _ = HeadsLoss(next_token=0.7, teacher=0.4, head_decay=0.8)(model, {"input_ids": ROWS, "labels": labels})
    assert ours.item() == pytest.approx(plain.item(), rel=1e-6)
    expected = gradients(model, plain)
    for name, gradient in gradients(model, ours).items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_a_step_needs_at_most_half_the_memory():
    sizes = ["--batch", "4", "--length", "256", "--vocabulary", "16000", "--hidden", "32"]
    found = {}
    for kind in ("plain", "chunks"):
        run = subprocess.run(
            [sys.executable, str(SCRIPT), "--kind", kind, *sizes], capture_output=True, text=True, check=True
        )
        found[kind] = json.loads(run.stdout.splitlines()[-1])
    assert found["chunks"]["loss"] == pytest.approx(found["plain"]["loss"], abs=1e-5 * found["plain"]["loss"])
    assert found["chunks"]["gradient_norm"] == pytest.approx(found["plain"]["gradient_norm"], rel=1e-5)
    assert found["chunks"]["mib"] <= 0.5 * found["plain"]["mib"]
