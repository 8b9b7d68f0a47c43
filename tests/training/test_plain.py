"""A Trainer that knows nothing of draft heads trains these, and leaves the base as it is; or it is refused."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers import DataCollatorForLanguageModeling as Collator

from hf_drafthead import MedusaForCausalLM, MtpForCausalLM, zoo
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.generation.noise import RandomNumbers
from hf_drafthead.modeling.adapters import add_adapter
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.heads_loss import HeadsLoss
from tests.bases import KINDS, tiny_base
from tests.families import FAMILIES
from tests.training.test_trainer import trainer_of

IDS = torch.tensor([[5, 9, 33, 21, 8, 40, 17, 3], [7, 7, 12, 64, 3, 11, 5, 9]])
TEXTS = [{"text": f"def add_{number}(a, b):\n    return a + b + {number}\n"} for number in range(8)]
QUICK = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 1e-2, "logging_steps": 1}

trl_warns = pytest.mark.filterwarnings("ignore:.[a-z_]*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning")
all_families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


@pytest.fixture
def tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(zoo.path("base"))
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture
def model():
    return MedusaForCausalLM.from_base(zoo.path("base"), num_draft_heads=2)


def snapshot(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(model, before: dict[str, torch.Tensor]) -> set[str]:
    """Whether tensors of the base, of the drafter, of both or of none are others than before."""
    state = model.state_dict().items()
    return {name.partition(".")[0] for name, tensor in state if not torch.equal(tensor, before[name])}


@all_families
def test_labels_in_training_mode_give_the_loss_of_the_family_s_recipe(family, tmp_path):
    model = family.build(tiny_base("llama-gqa", dtype=torch.float32)).train()
    arguments = DraftHeadTrainingArguments.for_family(model.config.family, str(tmp_path), use_cpu=True)
    same = {name: getattr(arguments, name) for name in ("head_decay", "feature_noise")}
    objectives = ("next_token", "teacher", "feature", "distance", "confidence")
    same |= {name: getattr(arguments, f"{name}_weight") for name in objectives}
    loss_of = HeadsLoss(**same, reader=BaseReader.of_texts(model.base, model.drafter.reads))
    torch.manual_seed(0)
    expected, _ = loss_of(model, {"input_ids": IDS, "labels": IDS}, heads_weight=arguments.heads_weight)
    torch.manual_seed(0)
    output = model(input_ids=IDS, labels=IDS)
    torch.testing.assert_close(output.loss, expected)
    output.loss.backward()
    assert all(parameter.grad is None for parameter in model.base.parameters())
    assert any(parameter.grad is not None for parameter in model.drafter.parameters())
    model.eval()
    base = model.base(IDS, labels=IDS)
    torch.testing.assert_close(model(IDS, labels=IDS).loss, base.loss)


def test_a_plain_trainer_trains_the_heads_and_saves_them(model, tokenizer, tmp_path):
    before = snapshot(model)
    rows = Dataset.from_list(TEXTS).map(lambda row: tokenizer(row["text"]), remove_columns=["text"])
    steps = {"max_steps": 2, "save_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    trainer = Trainer(
        model,
        TrainingArguments(str(tmp_path), **steps, **QUICK),
        train_dataset=rows,
        data_collator=Collator(tokenizer, mlm=False),
    )
    trainer.train()
    assert changed(model, before) == {"drafter"}
    trainer.save_model(str(tmp_path / "heads"))
    stored = load_file(tmp_path / "heads" / "model.safetensors")
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in stored.items())
    assert not torch.equal(stored["drafter.projections.up.0.weight"], before["drafter.projections.up.0.weight"])
    # the loss is a mean over the batches of a step, not their sum
    first = trainer.state.log_history[0]["loss"]
    fresh = MedusaForCausalLM.from_base(zoo.path("base"), num_draft_heads=2).train()
    batch = trainer.data_collator([rows[row] for row in range(8)])
    assert first == pytest.approx(fresh(**batch).loss.item(), rel=0.25)


@trl_warns
def test_trl_trains_the_heads_where_the_model_computes_the_loss(model, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")

    class HeadsSFTTrainer(trl.SFTTrainer):
        compute_loss = Trainer.compute_loss

    before = snapshot(model)
    settings = trl.SFTConfig(str(tmp_path), max_steps=2, per_device_train_batch_size=2, bf16=False, **QUICK)
    trainer = HeadsSFTTrainer(model, settings, train_dataset=Dataset.from_list(TEXTS), processing_class=tokenizer)
    trainer.train()
    assert changed(model, before) == {"drafter"}
    model.eval()
    ids = tokenizer("import os\n", return_tensors="pt").input_ids
    assert torch.equal(model.generate(ids, max_new_tokens=8), model.base.generate(ids, max_new_tokens=8))


@trl_warns
def test_trl_s_own_loss_is_refused(model, tokenizer, tmp_path):
    trl = pytest.importorskip("trl")
    settings = trl.SFTConfig(str(tmp_path), max_steps=2, per_device_train_batch_size=2, bf16=False, **QUICK)
    trainer = trl.SFTTrainer(model, settings, train_dataset=Dataset.from_list(TEXTS), processing_class=tokenizer)
    with pytest.raises(ValueError, match=r"^the trainer computes a loss of its own from the base's output"):
        trainer.train()


@trl_warns
def test_trl_s_grpo_trains_a_base_whose_heads_draft_the_rollouts(tokenizer, tmp_path):
    """The answers are the base's own, also behind an update of its weights, and the heads stay as they were."""
    trl = pytest.importorskip("trl")
    model = AutoModelForCausalLM.from_pretrained(zoo.path("eagle3"), dtype=torch.float32)
    model.base.requires_grad_(True)
    model.drafter.requires_grad_(False)
    before, generate_batch, numbers = snapshot(model), model.generate_batch, []

    def compared(prompts, generation_config, **named):
        assert generation_config.do_sample
        torch.manual_seed(len(numbers))
        outputs = generate_batch(prompts, generation_config, **named)
        torch.manual_seed(len(numbers))
        for prompt, output in zip(prompts, outputs.values(), strict=True):
            assert output.error is None
            state = torch.get_rng_state()
            expected = model.base.generate(torch.tensor([prompt]), generation_config)[0, len(prompt) :]
            assert output.generated_tokens == expected.tolist()
            torch.set_rng_state(state)
            RandomNumbers.of_request(torch.device("cpu"))  # the generator moves on as for each without a seed
        numbers.append(len(prompts))
        return outputs

    model.generate_batch = compared
    how = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12}
    how |= {"bf16": False, "save_strategy": "no", "use_transformers_continuous_batching": True, **QUICK}
    how["transformers_continuous_batching_config"] = {"max_requests_per_batch": 4}
    prompts = Dataset.from_list([{"prompt": row["text"][:12]} for row in TEXTS])
    trainer = trl.GRPOTrainer(
        model,
        lambda completions, **_: [float(len({*text})) for text in completions],
        args=trl.GRPOConfig(str(tmp_path), **how),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.train()
    assert numbers == [8, 8] and changed(model, before) == {"base"}


@pytest.mark.parametrize(
    "inputs, message",
    [
        ({"inputs_embeds": torch.zeros(1, 8, 32)}, "^heads learn from whole texts: give input_ids, and no inputs_embe"),
        ({"input_ids": IDS, "position_ids": torch.arange(8).remainder(5)[None]}, "^position_ids restart within a row"),
    ],
    ids=["embeddings", "packed"],
)
def test_inputs_that_heads_cannot_learn_from_are_refused(inputs, message):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32)).train()
    with pytest.raises(ValueError, match=message):
        model(**inputs, labels=IDS)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("adapters", [True, False])
def test_a_base_that_is_to_be_trained_is_refused(adapters):
    model = FAMILIES[0].build(tiny_base(dtype=torch.float32)).train()
    if adapters:
        add_adapter(model.base, LoraConfig(r=2, target_modules=["q_proj"]))
    else:
        model.base.requires_grad_(True)
    with pytest.raises(ValueError, match="^the base has weights or adapters that are to be trained, but"):
        model(IDS, labels=IDS)
    model.base.requires_grad_(False)
    assert model(IDS, labels=IDS).loss.requires_grad


def test_heads_in_half_precision_are_warned_about(caplog):
    model = FAMILIES[0].build(tiny_base(dtype=torch.bfloat16)).train()
    assert model(IDS, labels=IDS).loss.isfinite()
    assert "the heads are in half precision, in which small updates are lost" in caplog.text


def padded(side: str) -> dict[str, torch.Tensor]:
    """Two rows, the first of them shorter by three."""
    rows, at = [IDS[0, :5], IDS[1]], slice(3, None) if side == "left" else slice(0, 5)
    batch = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.full((2, 8), -100)}
    batch["attention_mask"] = torch.zeros(2, 8, dtype=torch.long)
    for row, (ids, where) in enumerate(zip(rows, (at, slice(None)))):
        batch["input_ids"][row, where], batch["labels"][row, where] = ids, ids
        batch["attention_mask"][row, where] = 1
    return batch


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_loss_does_not_depend_on_the_side_of_the_padding(kind):
    """GPT-2 counts positions from the first column, whatever the mask says."""
    model = MedusaForCausalLM.from_base(tiny_base(kind), num_draft_heads=3).train()
    left, right = (model(**padded(side)).loss for side in ("left", "right"))
    torch.testing.assert_close(left, right)


def test_a_step_counts_the_labels_of_rows_that_are_padded_on_the_left_as_of_others(tmp_path):
    model = MedusaForCausalLM.from_base(tiny_base("gpt2", dtype=torch.float32), num_draft_heads=3)
    trainer = trainer_of(model, tmp_path)
    counted = [trainer.get_batch_samples(iter([padded(side)]), 1, torch.device("cpu"))[1] for side in ("left", "right")]
    assert torch.equal(*counted) and counted[0].tolist() == [4 + 7, 3 + 6, 2 + 5, 1 + 4]


@pytest.mark.parametrize("kind", ["bamba", "mamba2", "gpt-neox"])  # the last calls its attention otherwise
def test_modules_of_multi_token_prediction_learn_on_bases_whose_layers_are_otherwise(kind):
    choice = {"attn_implementation": "eager"} if kind == "mamba2" else {}
    model = MtpForCausalLM.from_base(tiny_base(kind, **choice), num_draft_heads=3)
    model.train()(IDS, labels=IDS).loss.backward()
    assert all(torch.isfinite(weight.grad).all() for weight in model.drafter.parameters() if weight.requires_grad)
