"""Every training argument of transformers is honoured by the Trainer of heads, or refused in one line."""

import dataclasses

import pytest
import torch
from transformers import TrainingArguments

from hf_drafthead.modeling import MedusaForCausalLM
from hf_drafthead.training import arguments as room
from hf_drafthead.training.arguments import NEEDED, WITHOUT_EFFECT, DraftHeadTrainingArguments
from hf_drafthead.training.run import train_heads
from tests.bases import tiny_base
from tests.training.test_trainer import trainer_of, weights

# What the Trainer of transformers does, whatever the model: its loop, optimizer, logs, checkpoints and loaders.
HONOURED = {
    *("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    *("output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "max_steps"),
    *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay"),
    *("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon", "gradient_accumulation_steps"),
    *("max_grad_norm", "bf16", "fp16", "tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    *("torch_empty_cache_steps", "auto_find_batch_size", "logging_strategy", "logging_steps", "logging_first_step"),
    *("log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "log_level", "disable_tqdm"),
    *("log_level_replica", "run_name", "eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
    *("save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit"),
    *("enable_jit_checkpoint", "load_best_model_at_end", "greater_is_better", "ignore_data_skip"),
    *("restore_callback_states_from_checkpoint", "full_determinism", "seed", "data_seed", "use_cpu"),
    *("accelerator_config", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
    *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
    *("dataloader_in_order", "train_sampling_strategy", "ddp_find_unused_parameters", "ddp_bucket_cap_mb"),
    *("ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp", "fsdp_config"),
    *("deepspeed", "debug", "skip_memory_metrics", "logging_dir"),
}
CHECKED = {  # honoured where they can be, refused elsewhere: the tests below
    *("gradient_checkpointing", "activation_checkpointing", "optim_target_modules", "metric_for_best_model"),
    "report_to",
}
REFUSED = {
    "label_smoothing_factor": 0.5,
    "average_tokens_across_devices": False,
    "liger_kernel_config": {"rope": True},
    "remove_unused_columns": False,
    "eval_do_concat_batches": False,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["loss"],
    "label_names": ["labels"],
    "length_column_name": "size",
    "parallelism_config": object(),
    "local_rank": 0,
    "hub_strategy": "end",
    **dict.fromkeys(("resume_from_checkpoint", "hub_token", "hub_model_id", "hub_revision"), "x"),
    "neftune_noise_alpha": 5.0,
    "base_learning_rate": 1e-3,
    **dict.fromkeys(("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"), {"use_reentrant": False}),
}


def medusa():
    return MedusaForCausalLM.from_base(tiny_base(dtype=torch.float32), num_draft_heads=2)


def test_every_argument_is_in_one_of_the_tables():
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    tables = [HONOURED, CHECKED, {*WITHOUT_EFFECT}, {*NEEDED}]
    assert not fields - set.union(*tables)
    assert sum(map(len, tables)) == len(set.union(*tables))


@pytest.mark.parametrize("name", sorted({*WITHOUT_EFFECT, *NEEDED}))
def test_an_argument_without_effect_is_refused_in_one_line(name, tmp_path):
    fields = {field.name: field for field in dataclasses.fields(DraftHeadTrainingArguments)}
    if name not in fields:
        pytest.skip("not an argument of this release")
    value = REFUSED.get(name, True)
    with pytest.raises(ValueError) as error:
        DraftHeadTrainingArguments.for_family("medusa", str(tmp_path), use_cpu=True, **{name: value})
    said = str(error.value)
    assert said.startswith(name) and "no effect" in said and "leave it out" in said and "\n" not in said
    default = fields[name].default if fields[name].default is not dataclasses.MISSING else []
    DraftHeadTrainingArguments.for_family("medusa", str(tmp_path), use_cpu=True, **{name: default})


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing:FutureWarning")
def test_noise_on_the_embeddings_is_for_a_base_that_is_trained(tmp_path):
    losses = []
    for alpha in (None, 50.0):
        arguments = {"base_weight": 1.0, "neftune_noise_alpha": alpha, "max_steps": 1, "logging_steps": 1}
        trainer = trainer_of(medusa(), tmp_path / str(alpha), **arguments)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] != losses[1]


def test_recomputing_is_for_heads_with_layers(tmp_path):
    with pytest.raises(ValueError, match="has no effect on medusa heads, which have no decoder layers: leave"):
        trainer_of(medusa(), tmp_path, activation_checkpointing=True)


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"report_to": "wandb"}, r"report_to is 'wandb' \(.*\): install it, or leave it out."),
        ({"report_to": ["none", "nowhere"]}, "report_to is 'none': expected none, all, or one of .*tensorboard"),
        ({"metric_for_best_model": "accuracy"}, "metric_for_best_model is 'accuracy': expected loss, tokens_per_step"),
        ({"lora_rank": 4}, "lora_rank is for a base that is trained along"),
        ({"output_dir": "elsewhere"}, "output_dir is the folder of the heads: give it as output"),
        ({"split": "test"}, "split is 'test', but the data has no splits: leave --split out."),
        ({"joint": True}, r"a base that is sharded \(FSDP\) cannot be trained along with its heads"),
        ({"base_weight": 1.0}, "base_weight is for a base that is trained along with its heads: add --joint, or drop"),
        ({"joint": True, "load": {"quantization_config": {}}}, "a quantized base cannot be trained with its heads"),
    ],
)
def test_what_cannot_be_honoured_is_said_before_anything_is_loaded(arguments, line, tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", str(arguments == {"joint": True}))
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match=line):
        train_heads("nowhere", "medusa", tmp_path / "texts.jsonl", tmp_path / "heads", **arguments)
    assert not (tmp_path / "heads").exists()


@pytest.mark.few(20)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of one that transformers is about to drop
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")  # of what ends half made
@pytest.mark.parametrize("name", sorted(room.INTEGRATION_TO_CALLBACK))
def test_what_is_not_installed_to_report_to_is_refused_in_one_line(name):
    try:
        room.refuse_missing_reporters([name])
    except ValueError as error:
        assert "install it, or leave it out" in str(error) and "\n" not in str(error)


def test_the_best_of_a_base_that_is_trained_is_loaded_too(tmp_path):
    """At the end heads and base are those of one step."""
    arguments = {"base_weight": 1.0, "base_learning_rate": 0.05, "save_steps": 1, "save_strategy": "steps"}
    arguments |= {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 3, "metric_for_best_model": "runtime"}
    arguments["load_best_model_at_end"] = True
    trainer = trainer_of(medusa(), tmp_path, **arguments)
    base, saved = trainer.model.base, []
    save = trainer._save_checkpoint
    trainer._save_checkpoint = lambda *given: (saved.append(weights(base)), save(*given))
    trainer.train()
    step = int(trainer.state.best_model_checkpoint.rpartition("-")[2])
    for name, tensor in weights(base).items():
        assert torch.equal(tensor, saved[step - 1][name])
