"""Draft heads of every family for the zoo's base, all trained alike, by what `hf-drafthead train` calls."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_drafthead.modeling import DraftHeadPreTrainedModel, families
from hf_drafthead.training import run
from hf_drafthead.training.record import whole_checkpoint
from hf_drafthead.trees.rank_paths import grow_tree, rank_paths

from .base import store_as_bfloat16

BATCH = 8  # rows a step
HEADS = {"num_draft_heads": 4}
# The base's distribution as a second objective, and weight decay: without them its layers overfit.
AMPHISTA = {"teacher_weight": 1.0, "weight_decay": 0.3}
# The base's next hidden state, and its distribution with a small weight: the head reads its own output one level below.
EAGLE = {"next_token_weight": 0.0, "teacher_weight": 0.1, "feature_weight": 1.0}
# Trees of the zoo are up to five levels deep, so the training-time test has five steps; the loss is the published one.
# 768 of the 1024 tokens are 99.97% of what the base writes.
EAGLE3_FIELDS = {"num_draft_heads": 5, "draft_vocab_size": 768}
EAGLE3 = {"next_token_weight": 0.0, "teacher_weight": 1.0, "head_decay": 0.8, "heads_weight": 1.25}
# As a trainer of small models does: towards the base's distribution.
DRAFT_MODEL = {"next_token_weight": 0.0, "teacher_weight": 1.0}
NO_DROPOUT = {"dropout": 0.0}  # 0.2 is published for ten epochs; here there are three

# The same for every family, instead of the recipes of the papers for much larger bases, so that they can be compared.
ALIKE: dict[str, Any] = {
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": 2 * BATCH,
    "next_token_weight": 1.0,
    "teacher_weight": 0.0,
    "feature_weight": 0.0,
    "feature_noise": 0.0,
    "head_decay": 1.0,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {},
    "warmup_steps": 50,
    "weight_decay": 0.0,
    "adam_beta2": 0.999,
    "max_grad_norm": 1.0,
    "max_grad_value": None,
    "eval_strategy": "no",
    "logging_steps": 50,
    "save_steps": 200,
    "save_total_limit": 1,
    "report_to": "none",
    "use_cpu": True,
    "disable_tqdm": True,
}


@dataclass(frozen=True)
class Recipe:
    """How a family is trained for the zoo: config fields of its heads, and training arguments of its own."""

    family: str
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)


FIELDS: dict[str, dict[str, Any]] = {"hydra++": NO_DROPOUT, "eagle3": EAGLE3_FIELDS, "eagle3.1": EAGLE3_FIELDS}
FIELDS["mtp"] = {"num_draft_heads": EAGLE3_FIELDS["num_draft_heads"]}
FIELDS["peagle"] = {**EAGLE3_FIELDS, "num_layers": 2}
BLOCKS = {"num_draft_heads": 5, "num_layers": 2, "sample_from_anchor": True}  # five levels deep, as EAGLE-3's trees are
FIELDS |= {"dflash": BLOCKS, "dflash2": {**BLOCKS, "selector_rank": 32}, "dspark": {**BLOCKS, "markov_rank": 32}}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "amphista": AMPHISTA,
    "amphista-alpha": AMPHISTA,
    "eagle": EAGLE,
    "eagle3": EAGLE3,
    "eagle3.1": EAGLE3,
    "mtp": EAGLE3,
    "peagle": {**EAGLE3, "head_decay": 1.0, "heads_weight": 1.0},
    **dict.fromkeys(("draft-model", "dflash", "dflash2", "dspark"), DRAFT_MODEL),
}
# As many heads each where there are several, with a vocabulary projection of their own, so that the figures compare.
FAMILIES: dict[str, Recipe] = {
    name: Recipe(
        name,
        {**({} if family.config().max_depth is None else HEADS), **FIELDS.get(name, {})},
        ARGUMENTS.get(name, {}),
    )
    for name, family in families.TRAINED.items()
}


def train_heads(
    recipe: Recipe,
    base: Path,
    data: run.PreparedData,
    work: Path,
    *,
    steps: int,
    seed: int,
) -> run.Trained:
    """Train one family's heads on the base, or resume from the last checkpoint under ``work``.

    Args:
        recipe: which heads, and how.
        base: folder of the base.
        data: text of the base.
        work: folder of checkpoints, and of the heads in float32.
        steps: optimizer steps of 8 rows each.
        seed: of the heads' initial weights and the order of the rows.
    """
    return run.train_heads(
        str(base),
        recipe.family,
        data,
        work,
        fields=recipe.fields,
        resume=whole_checkpoint(work) is not None,
        **{**ALIKE, **recipe.arguments, "max_steps": steps, "seed": seed},
    )


def store_tree(model: DraftHeadPreTrainedModel, texts: torch.Tensor, given: int, nodes: int = 48) -> None:
    """Grow a tree on texts of the base (rows, length) and store it in the generation config, most valuable node first.

    The first n nodes of the list are the best tree of that size, so that a smaller tree can be used where it is faster.
    """
    paths = grow_tree(rank_paths(model, texts, given), nodes)
    model.generation_config.draft_tree = [list(path) for path in paths]


def save_heads(model: DraftHeadPreTrainedModel, folder: Path) -> None:
    """Save a heads-only checkpoint with bfloat16 weights on disk; heads are loaded in the dtype of their base."""
    model.save_pretrained(folder)
    store_as_bfloat16(folder / "model.safetensors")
