"""Draft heads of every family for the zoo's base, all trained alike."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, set_seed

from hf_drafthead.generation.calibration import grow_tree, rank_paths
from hf_drafthead.modeling import (
    AmphistaConfig,
    AmphistaForCausalLM,
    DraftHeadPreTrainedModel,
    EagleForCausalLM,
    HydraConfig,
    HydraForCausalLM,
    MedusaForCausalLM,
)
from hf_drafthead.training.arguments import DraftHeadTrainingArguments
from hf_drafthead.training.trainer import DraftHeadTrainer
from hf_drafthead.zoo.base import last_checkpoint, recent_loss, store_as_bfloat16
from hf_drafthead.zoo.clock import Clock

BATCH = 8  # rows a step
HEADS: dict[str, Any] = {"num_draft_heads": 4}
# Alignment with the base beside the text's own tokens, and weights held small: its layers learn the text by heart.
AMPHISTA = {"teacher_weight": 1.0, "weight_decay": 0.3}
# The base's next hidden state, and a little of its distribution there: the head learns to go on from its own guesses.
EAGLE = {"next_token_weight": 0.0, "teacher_weight": 0.1, "feature_weight": 1.0}

HYDRA_PLUS_PLUS = HydraConfig.plus_plus(dropout=0.0)  # 0.2 is published for ten readings of the text; here are three


@dataclass(frozen=True)
class Recipe:
    """How a family comes to the zoo: fresh heads on a base, and what its training has that others do not."""

    fresh: Callable[[PreTrainedModel], DraftHeadPreTrainedModel]
    arguments: dict[str, Any] = field(default_factory=dict)


# Heads with a vocabulary projection of their own each, so that the figures can be compared; EAGLE has no own one.
FAMILIES: dict[str, Recipe] = {
    "medusa": Recipe(lambda base: MedusaForCausalLM.from_base(base, **HEADS)),
    "hydra": Recipe(lambda base: HydraForCausalLM.from_base(base, **HEADS)),
    "hydra++": Recipe(lambda base: HydraForCausalLM.from_base(base, config=HYDRA_PLUS_PLUS, **HEADS)),
    "amphista": Recipe(lambda base: AmphistaForCausalLM.from_base(base, **HEADS), AMPHISTA),
    "amphista-alpha": Recipe(
        lambda base: AmphistaForCausalLM.from_base(base, config=AmphistaConfig.alpha(), **HEADS), AMPHISTA
    ),
    "eagle": Recipe(lambda base: EagleForCausalLM.from_base(base), EAGLE),
}


def train_heads(
    recipe: Recipe,
    base: PreTrainedModel,
    rows: Dataset,
    held_out: Dataset,
    work: Path,
    *,
    steps: int,
    seed: int,
) -> tuple[DraftHeadPreTrainedModel, dict[str, float | int]]:
    """Train one family's heads on the base, or go on from the last checkpoint under ``work``.

    Args:
        recipe: which heads, and how.
        base: the base, loaded from where the heads will look for it.
        rows: text of the base to learn from.
        held_out: text of the base to evaluate on.
        work: folder of the Trainer's checkpoints.
        steps: optimizer steps of 8 rows each.
        seed: of the heads' initial weights and the order of the rows.

    Returns:
        the model, and its figures: losses summed over heads in nats per token, accuracies, tokens seen, minutes.
    """
    set_seed(seed)
    model = recipe.fresh(base)
    settings: dict[str, Any] = {
        "max_steps": steps,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": 2 * BATCH,
        "learning_rate": 4e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 50,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "logging_steps": min(50, steps),
        "save_steps": 200,
        "save_total_limit": 1,
        "remove_unused_columns": False,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": seed,
    }
    arguments = DraftHeadTrainingArguments(output_dir=str(work), **(settings | recipe.arguments))
    clock = Clock(work / "clock.json")
    trainer = DraftHeadTrainer(
        model,
        arguments,
        train_dataset=rows,
        eval_dataset=held_out,
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
        "tokens": steps * BATCH * rows[0]["input_ids"].numel(),
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
