"""Medusa-2: the base learns along, through adapters or with all its weights."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.heads_loss import HeadsLoss, heads_share, labelled
from hf_drafthead.training.trainer import adapter_layers, adapters_off, add_lora, merge_lora
from tests.bases import tiny_base
from tests.families import FAMILIES
from tests.training.plain_loss import next_token_loss
from tests.training.test_trainer import ROWS, trainer_of, weights

GOLDEN = Path(__file__).parents[1] / "golden"
MEDUSA = FAMILIES[0]


def medusa(**overrides):
    return MEDUSA.build(tiny_base(dtype=torch.float32), **overrides)


@pytest.mark.parametrize(
    "name, weight, share",
    [
        ("medusa2_axolotl_joint_const_h0.2_d0.8", 0.2, heads_share("constant", 25, 100)),
        ("medusa2_axolotl_joint_sine_h0.01_d0.8_step25of100", 0.01, heads_share("sine", 25, 100)),
    ],
    ids=["constant", "sine"],
)
def test_the_joint_loss_is_the_original_one(name, weight, share):
    tensors, golden = load_file(GOLDEN / "losses.safetensors"), json.loads((GOLDEN / "losses.json").read_text())
    labels = tensors["labels"]

    def mean(logits, shift):
        return next_token_loss(logits[labelled(labels, shift)], labels.roll(-shift, 1)[labelled(labels, shift)]).mean()

    heads = sum(0.8 ** (1 + head) * mean(tensors["head_logits"][head], 2 + head) for head in range(4))
    assert (mean(tensors["base_logits"], 1) + weight * share * heads).item() == pytest.approx(golden[name], abs=1e-5)


def test_the_heads_weight_rises_to_its_own():
    for schedule in ("constant", "linear", "sine"):
        assert heads_share(schedule, 100, 100) == pytest.approx(1.0)
    assert heads_share("linear", 25, 100) == 0.25
    assert heads_share("sine", 0, 100) == 0.0


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_base_s_own_loss_is_what_transformers_says(name, tmp_path):
    model = MEDUSA.build(tiny_base(name, dtype=torch.float32))
    inputs = {"input_ids": ROWS, "labels": ROWS.masked_fill(torch.arange(24) < 6, -100)}
    objective = {"next_token_weight": 1.0, "base_weight": 0.5, "heads_weight": 0.2, "head_decay": 0.8}
    joint = trainer_of(model, tmp_path, **objective).compute_loss(model, inputs)
    alone = trainer_of(model, tmp_path, **{**objective, "base_weight": 0.0}).compute_loss(model, inputs)
    assert (joint - alone).item() == pytest.approx(0.5 * model.base(**inputs).loss.item(), rel=1e-5)


def test_a_base_that_learns_from_itself_has_nothing_to_learn_yet():
    model = medusa()
    add_lora(model, rank=4, dropout=0.0)
    heads = HeadsLoss(next_token=1.0)
    joint = HeadsLoss(next_token=1.0, base=1.0, adapters_off=lambda: adapters_off(model.base))
    inputs = {"input_ids": ROWS, "labels": ROWS}
    assert joint(model, inputs)[0].item() == pytest.approx(heads(model, inputs)[0].item(), abs=1e-5)
    with torch.no_grad():
        for layer in adapter_layers(model.base):
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.3)
    plain = copy.deepcopy(model)
    merge_lora(plain)
    with torch.no_grad(), adapters_off(model.base):
        teacher = model.base(ROWS).logits[:, :-1].log_softmax(-1)
    with torch.no_grad():
        student = plain.base(ROWS).logits[:, :-1].log_softmax(-1)
    divergence = torch.nn.functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1).mean()
    found = joint(model, inputs)[0] - heads(model, inputs)[0]
    assert divergence > 0.01 and found.item() == pytest.approx(divergence.item(), rel=1e-3)


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
    tiny_base(dtype=torch.float32).save_pretrained(tmp_path / "base")
    model = MEDUSA.model_class.from_base(str(tmp_path / "base"))
    add_lora(model, rank=4)
    trainer_of(model, tmp_path / "run", max_steps=6, base_weight=1.0, base_learning_rate=1e-2).train()
    model.eval()
    with torch.no_grad():
        adapted = model.base(ROWS).logits
    merge_lora(model)
    assert not adapter_layers(model.base)
    with torch.no_grad():
        torch.testing.assert_close(model.base(ROWS).logits, adapted, atol=1e-5, rtol=1e-4)
    model.save_pretrained(tmp_path / "whole", include_base=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    settings = {"max_new_tokens": 20, "do_sample": False}
    expected = model.base.generate(ROWS[:1, :5], **settings)
    assert torch.equal(loaded.generate(ROWS[:1, :5], **settings), expected)
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        assert not torch.allclose(original(ROWS).logits, loaded.base(ROWS).logits, atol=1e-3)


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


def test_bad_input(tmp_path):
    model = medusa()
    with pytest.raises(ValueError, match="base_objective is 'itself', but the base has no adapters"):
        trainer_of(model, tmp_path, base_weight=1.0, base_objective="itself")
    with pytest.raises(ValueError, match="rank of the adapters is 0: expected at least 1"):
        add_lora(model, rank=0)
    add_lora(model, rank=2)
    with pytest.raises(ValueError, match="the base has adapters already: merge them first"):
        add_lora(model, rank=2)
    with pytest.raises(ValueError, match="heads_schedule is 'steep': expected one of 'constant', 'linear', 'sine'"):
        DraftHeadTrainingArguments(output_dir=str(tmp_path), heads_schedule="steep")
