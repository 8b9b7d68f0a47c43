"""Medusa-2: the base learns along, through adapters or with all its weights."""

import pytest
import torch

from hf_drafthead.modeling.adapters import merge_adapters
from hf_drafthead.training.trainer import adapter_layers, add_lora
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.training.test_trainer import ROWS, trainer_of, weights

MEDUSA = FAMILIES[0]


def medusa(**overrides):
    return MEDUSA.build(tiny_base(dtype=torch.float32), **overrides)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_base_s_own_loss_is_what_transformers_says(name, tmp_path):
    model = MEDUSA.build(tiny_base(name, dtype=torch.float32))
    inputs = {"input_ids": ROWS, "labels": ROWS.masked_fill(torch.arange(24) < 6, -100)}
    objective = {"next_token_weight": 1.0, "base_weight": 0.5, "heads_weight": 0.2, "head_decay": 0.8}
    joint = trainer_of(model, tmp_path, **objective).compute_loss(model, inputs)
    alone = trainer_of(model, tmp_path, **{**objective, "base_weight": 0.0}).compute_loss(model, inputs)
    assert (joint - alone).item() == pytest.approx(0.5 * model.base(**inputs).loss.item(), rel=1e-5)


def test_the_distribution_that_heads_learn_from_does_not_learn(tmp_path):
    model, inputs, gradients = medusa(share_lm_head=False), {"input_ids": ROWS, "labels": ROWS}, []
    for teacher in (0.0, 1.0):
        model.zero_grad()
        objective = {"next_token_weight": 1.0, "teacher_weight": teacher, "base_weight": 1.0}
        trainer_of(model, tmp_path, **objective).compute_loss(model, inputs).backward()
        gradients.append(model.base.lm_head.weight.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("rank", [0, 4], ids=["all weights", "adapters"])
def test_base_and_heads_learn_at_rates_of_their_own(rank, tmp_path):
    model = medusa()
    if rank:
        add_lora(model, rank=rank, dropout=0.0)
    before = weights(model)
    sgd = {"max_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer = trainer_of(model, tmp_path, base_weight=1.0, learning_rate=0.5, base_learning_rate=0.0625, **sgd)
    trainer.train()
    changed = {name for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])}
    of_base = {name for name in changed if name.startswith("base.")}
    assert changed - of_base and of_base
    if rank:
        assert all("lora_B" in name for name in of_base)  # A's gradient is zero while B is
    rates = {group["lr"] for group in trainer.optimizer.param_groups if group["params"]}
    assert rates == {0.5, 0.0625}


def test_merged_adapters_are_the_base_from_then_on(tmp_path):
    model = medusa()
    with torch.no_grad():
        before = model.base(ROWS).logits
    add_lora(model, rank=4)
    trainer_of(model, tmp_path, max_steps=6, base_weight=1.0, base_learning_rate=1e-2).train()
    model.eval()
    with torch.no_grad():
        adapted = model.base(ROWS).logits
    merge_adapters(model.base)
    assert not adapter_layers(model.base)
    with torch.no_grad():
        torch.testing.assert_close(model.base(ROWS).logits, adapted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-3)


def test_an_interrupted_joint_training_goes_on_bit_for_bit(tmp_path):
    def model():
        torch.manual_seed(0)
        made = medusa()
        add_lora(made, rank=4, dropout=0.0)
        return made

    settings = {"base_weight": 1.0, "max_steps": 6, "warmup_steps": 2}
    whole = model()
    trainer_of(whole, tmp_path / "whole", **settings).train()
    trainer_of(model(), tmp_path / "parts", **settings, save_strategy="steps", save_steps=3).train()
    resumed = model()
    checkpoint = str(tmp_path / "parts" / "checkpoint-3")
    trainer_of(resumed, tmp_path / "parts", **settings).train(resume_from_checkpoint=checkpoint)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name


def test_bad_input():
    model = medusa()
    with pytest.raises(ValueError, match="rank of the adapters is 0: expected at least 1"):
        add_lora(model, rank=0)
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match="the base has adapters already: merge them first"):
        add_lora(model, rank=2)
