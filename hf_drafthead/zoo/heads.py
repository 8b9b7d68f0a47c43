"""Draft heads of every family for the zoo's base, all trained alike."""

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, set_seed

from hf_drafthead.generation.calibration import grow_tree, rank_paths
from hf_drafthead.modeling import DraftHeadPreTrainedModel, HydraForCausalLM, MedusaForCausalLM
from hf_drafthead.training.trainer import DraftHeadTrainer, DraftHeadTrainingArguments
from hf_drafthead.zoo.base import last_checkpoint, recent_loss, store_as_bfloat16
from hf_drafthead.zoo.clock import Clock
from hf_drafthead.zoo.own_text import OwnRows

# Four heads with a vocabulary projection of their own each, whatever the family, so that the figures can be compared.
FAMILIES: dict[str, Callable[[PreTrainedModel], DraftHeadPreTrainedModel]] = {
    "medusa": lambda base: MedusaForCausalLM.from_base(base, num_draft_heads=4),
    "hydra": lambda base: HydraForCausalLM.from_base(base, num_draft_heads=4),
}


def train_heads(
    family: str,
    base: PreTrainedModel,
    rows: torch.Tensor,
    held_out: torch.Tensor,
    work: Path,
    *,
    given: int,
    steps: int,
    seed: int,
) -> tuple[DraftHeadPreTrainedModel, dict[str, float | int]]:
    """Train one family's heads on the base, or go on from the last checkpoint under ``work``.

    Args:
        family: a key of ``FAMILIES``.
        base: the base, loaded from where the heads will look for it.
        rows: (rows, length) text of the base to learn from.
        held_out: (rows, length) text of the base to evaluate on.
        given: tokens at the beginning of each row that the base did not write, and which are not learnt.
        work: folder of the Trainer's checkpoints.
        steps: optimizer steps of 8 rows each.
        seed: of the heads' initial weights and the order of the rows.

    Returns:
        the model, and its figures: losses summed over heads in nats per token, accuracies, tokens seen, minutes.
    """
    set_seed(seed)
    model = FAMILIES[family](base)
    arguments = DraftHeadTrainingArguments(
        output_dir=str(work),
        max_steps=steps,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=16,
        learning_rate=4e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.0,
        max_grad_norm=1.0,
        next_token_weight=1.0,
        teacher_weight=0.0,
        logging_steps=min(50, steps),
        save_steps=200,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=seed,
    )
    clock = Clock(work / "clock.json")
    trainer = DraftHeadTrainer(
        model,
        arguments,
        train_dataset=OwnRows(rows, given),
        eval_dataset=OwnRows(held_out, given),
        callbacks=[clock],
    )
    trainer.train(resume_from_checkpoint=last_checkpoint(work))
    minutes = round(clock.minutes, 1)
    metrics = trainer.evaluate()
    accuracies = {
        name.removeprefix("eval_"): round(value, 4) for name, value in metrics.items() if name.startswith("eval_head")
    }
    return model.eval(), {
        "steps": steps,
        "tokens": steps * 8 * rows.shape[1],
        "train_loss": recent_loss(trainer),
        "held_out_loss": round(metrics["eval_loss"], 4),
        **accuracies,
        "minutes": minutes,
    }


def store_tree(model: DraftHeadPreTrainedModel, texts: torch.Tensor, given: int, nodes: int = 48) -> None:
    """Grow a tree on texts of the base (rows, length) and put it into the generation config, most valuable node first.

    Every beginning of the list is the best tree of its size, so that a machine can take as much of it as pays there.
    """
    paths = grow_tree(rank_paths(model, texts, given), nodes)
    model.generation_config.draft_tree = [list(path) for path in paths]


def save_heads(model: DraftHeadPreTrainedModel, folder: Path) -> None:
    """Save a heads-only checkpoint with bfloat16 weights on disk; heads are loaded in the dtype of their base."""
    model.save_pretrained(folder)
    store_as_bfloat16(folder / "model.safetensors")
