"""The zoo's base: a deep and narrow LLaMA, whose forward pass over several nodes costs little more than over one."""

import math
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch.utils.data import Dataset
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_drafthead.training.callbacks import Clock
from hf_drafthead.training.record import recent_loss

VOCAB_SIZE = 1024
ROW = 512  # tokens per training row, and the most positions the base holds


class Rows(Dataset):
    """Packed rows as a causal LM reads them: the labels are the row itself."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows  # (rows, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def base_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """16 layers of width 96; as many key/value heads as query heads, since repeating them costs time on a CPU."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=16,
        num_attention_heads=3,
        num_key_value_heads=3,
        max_position_embeddings=ROW,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def train_base(
    tokenizer: PreTrainedTokenizerFast,
    rows: torch.Tensor,
    held_out: torch.Tensor,
    work: Path,
    *,
    steps: int,
    seed: int,
) -> tuple[LlamaForCausalLM, dict[str, float | int]]:
    """Train the base from scratch, or resume from the last checkpoint under ``work``.

    Args:
        tokenizer: its special tokens go into the config.
        rows: (rows, ROW) training tokens.
        held_out: (rows, ROW) tokens of held-out files.
        work: folder of the Trainer's checkpoints.
        steps: optimizer steps of 8 rows each.
        seed: of the initial weights and the order of the rows.

    Returns:
        the model, and its figures: losses in nats per token, tokens seen, minutes.
    """
    set_seed(seed)
    model = LlamaForCausalLM(base_config(tokenizer))
    arguments = TrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=150,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=min(50, steps),
        eval_strategy="steps",
        eval_steps=400,
        save_steps=200,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
    )
    clock = Clock(work / "clock.json")
    trainer = Trainer(model, arguments, train_dataset=Rows(rows), eval_dataset=Rows(held_out), callbacks=[clock])
    trainer.train(resume_from_checkpoint=last_checkpoint(work))
    minutes = round(60 * clock.hours, 1)
    held_out_loss = trainer.evaluate()["eval_loss"]
    return model.eval(), {
        "steps": steps,
        "tokens": steps * 8 * ROW,
        "train_loss": recent_loss(trainer.state.log_history),
        "held_out_loss": round(held_out_loss, 4),
        "held_out_perplexity": round(math.exp(held_out_loss), 3),
        "minutes": minutes,
    }


def last_checkpoint(work: Path) -> str | None:
    """The Trainer's last checkpoint under ``work``; None if there is none."""
    return get_last_checkpoint(work) if work.is_dir() else None


def save_base(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the base with bfloat16 weights on disk; its config says float32, the dtype that it is loaded in."""
    tokenizer_ids = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(do_sample=False, **tokenizer_ids)
    model.save_pretrained(folder)
    store_as_bfloat16(folder / "model.safetensors")


def store_as_bfloat16(file: Path) -> None:
    """Halve a checkpoint file: round its float32 tensors to bfloat16."""
    tensors = {
        name: tensor.to(torch.bfloat16) if tensor.dtype == torch.float32 else tensor
        for name, tensor in load_file(file).items()
    }
    file.write_bytes(save(tensors, metadata={"format": "pt"}))
