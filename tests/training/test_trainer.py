"""DraftHeadTrainer trains the drafter and nothing else, on exactly the objectives it was given."""

import copy

import pytest
import torch

from hf_drafthead.modeling.families import find_family
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.heads_loss import RANKS, HeadsLoss, rank_counts
from hf_drafthead.training.trainer import DraftHeadTrainer
from tests.bases import VOCABULARY, tiny_base
from tests.families import FAMILIES
from tests.training.plain_loss import PLAIN, plain_loss

all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
ROWS = torch.randint(3, VOCABULARY, (8, 24), generator=torch.Generator().manual_seed(0))


def trainer_of(model, folder, rows=ROWS, **arguments):
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 2}
    given |= {"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **arguments}
    args = DraftHeadTrainingArguments(output_dir=str(folder), **given)
    examples = [{"input_ids": row, "labels": row} for row in rows]
    return DraftHeadTrainer(model, args, train_dataset=examples, eval_dataset=examples[:3])


def weights(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


@all_families
def test_the_drafter_learns_and_the_base_stays(family, tmp_path):
    model = family.build(tiny_base(dtype=torch.float32))
    base, drafter = weights(model.base), weights(model.drafter)
    trainer = trainer_of(model, tmp_path, max_steps=12, teacher_weight=1.0)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before - 0.1
    assert all(torch.equal(tensor, base[name]) for name, tensor in weights(model.base).items())
    learnt = {name for name, tensor in weights(model.drafter).items() if not torch.equal(tensor, drafter[name])}
    assert learnt == {name for name, _ in model.drafter.named_parameters()}
    optimised = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    assert optimised == {id(parameter) for parameter in model.drafter.parameters()}


@pytest.mark.parametrize("family", PLAIN, ids=lambda family: family.name)
@pytest.mark.parametrize(
    "next_token, teacher, feature, decay", [(1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 1.0), (0.5, 2.0, 0.7, 0.8)]
)
@pytest.mark.parametrize("name", ["llama", "gemma2"])  # gemma2's logits are more than its lm_head's
def test_the_loss_is_the_weighted_sum_over_heads(family, name, next_token, teacher, feature, decay, tmp_path):
    model = family.build(tiny_base(name, dtype=torch.float32))
    # states that are not to be like the base's, or not as wide
    if model.config.own_layer.hidden_size != 32 or model.config.family.startswith("eagle3"):
        feature = 0.0
    weighting = {"next_token_weight": next_token, "teacher_weight": teacher, "feature_weight": feature}
    trainer = trainer_of(model, tmp_path, head_decay=decay, **weighting)
    labels = ROWS.masked_fill(torch.arange(24) < 6, -100)
    loss = trainer.compute_loss(model, {"input_ids": ROWS, "labels": labels})
    how = {"next_token": next_token, "teacher": teacher, "feature": feature, "confidence": 1.0, "decay": decay}
    with torch.no_grad():
        assert loss.item() == pytest.approx(plain_loss(model, ROWS, labels, **how).item(), rel=1e-5)


def test_accumulated_batches_are_one_large_batch(tmp_path):
    large = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    small = copy.deepcopy(large)
    # A step of plain SGD shows the gradient itself; Adam would hide its scale.
    sgd = {"max_steps": 1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    trainer_of(large, tmp_path, per_device_train_batch_size=8, **sgd).train()
    trainer_of(small, tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, **sgd).train()
    for name, tensor in weights(large.drafter).items():
        torch.testing.assert_close(weights(small.drafter)[name], tensor, rtol=1e-5, atol=1e-6)


def test_dropout_of_the_base_is_off_while_its_heads_learn(tmp_path):
    model = FAMILIES[0].build(tiny_base("gpt2", dtype=torch.float32, resid_pdrop=0.5, embd_pdrop=0.5))
    trainer = trainer_of(model, tmp_path)
    model.train()
    losses = {trainer.compute_loss(model, {"input_ids": ROWS, "labels": ROWS}).item() for _ in range(3)}
    assert len(losses) == 1


def test_gradients_are_clipped_by_value_as_eagle_s_recipe_asks(tmp_path):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    seen = []
    trainer = trainer_of(model, tmp_path, max_steps=2, max_grad_value=1e-4, max_grad_norm=0.0, optim="sgd")
    trainer.create_optimizer()
    largest = lambda *_: seen.append(max(p.grad.abs().max().item() for p in model.drafter.parameters()))  # noqa: E731
    trainer.optimizer.register_step_pre_hook(largest)
    trainer.train()
    assert len(seen) == 2 and all(value == pytest.approx(1e-4) for value in seen)
    recipe = find_family("eagle").recipe
    assert recipe["max_grad_value"] == 0.5 and recipe["max_grad_norm"] == 0.0


def test_noise_on_the_hidden_states_is_for_training_alone(tmp_path):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    batch = {"input_ids": ROWS[:2], "labels": ROWS[:2]}
    calm = HeadsLoss(next_token=1.0)
    noisy = HeadsLoss(next_token=1.0, feature_noise=0.5)
    plain = calm(model.eval(), batch)[0]
    assert torch.equal(noisy(model, batch)[0], plain)
    model.train()
    read = []
    states = model.drafter.head_states
    model.drafter.head_states = lambda features, *rest: (read.append(features), states(features, *rest))[1]
    assert not torch.equal(noisy(model, batch)[0], plain)
    calm(model, batch)
    difference = read[0] - read[1]
    assert 0.2 < difference.abs().max() <= 0.25  # a width of 0.5, around 0
    assert difference.mean().abs() < 0.02


def test_an_evaluation_tells_each_heads_accuracy(tmp_path):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32))
    trainer = trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=2)
    trainer.train()
    metrics = trainer.evaluate()
    with torch.no_grad():
        features = model.base(ROWS[:3], output_hidden_states=True).hidden_states[-1]
        hidden = model.drafter.head_states(features, ROWS[:3])
        for head in range(4):
            logits = model.drafter.head_logits(head, hidden[head][:, : -2 - head]).flatten(0, 1)
            ranks = rank_counts(logits, ROWS[:3, 2 + head :].flatten(), RANKS)
            assert metrics[f"eval_head{head}_top1"] == pytest.approx((ranks[0] / ranks.sum()).item())
            assert metrics[f"eval_head{head}_top5"] == pytest.approx((ranks[:5].sum() / ranks.sum()).item())
    trainer.args.dataloader_drop_last, trainer.args.per_device_eval_batch_size = True, 9
    with pytest.raises(ValueError, match="no held-out row was read: hold out as many as make a batch"):
        trainer.evaluate()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"next_token_weight": 0.0}, "next_token_weight, .* and distance_weight are all 0: nothing to learn, set"),
        ({"teacher_weight": -1.0}, "teacher_weight is -1.0: expected 0 or more"),
        ({"head_decay": 0.0}, "head_decay is 0.0: expected a number above 0"),
    ],
    ids=["no objective", "negative weight", "no decay"],
)
def test_weights_that_teach_nothing_are_refused(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DraftHeadTrainingArguments(output_dir=str(tmp_path), **arguments)
