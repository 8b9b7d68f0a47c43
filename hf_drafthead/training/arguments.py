"""Training arguments for draft heads, and the values in each family's paper."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from transformers import TrainingArguments

from hf_drafthead.modeling.families import find_family
from hf_drafthead.training.heads_loss import SCHEDULES

OBJECTIVE_WEIGHTS = ("next_token_weight", "teacher_weight", "feature_weight")

# Medusa-2 (Cai et al. 2024, section 2.2.2): the base learns at a quarter of the heads' rate, heads count a fifth.
JOINT: dict[str, Any] = {"base_weight": 1.0, "base_learning_rate": 5e-4, "heads_weight": 0.2}


# For runs that are shorter than a paper's warm-up, with the objective of the family's paper.
QUICK: dict[str, Any] = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {},
    "warmup_steps": 0.03,
    "weight_decay": 0.0,
    "adam_beta2": 0.95,
    "max_grad_norm": 1.0,
    "max_grad_value": None,
    "num_train_epochs": 3,
}
QUICK_WIDTH = 1024  # hidden size up to which that learning rate suits; beyond, it falls with the square root


@dataclass
class DraftHeadTrainingArguments(TrainingArguments):
    """Training arguments with the weights of the objectives; `for_family` sets them as a family's paper does.

    Args:
        next_token_weight: weight of the cross-entropy with the tokens of the text (Medusa's objective).
        teacher_weight: weight of the cross-entropy with the base's distribution (Hydra's objective).
        feature_weight: weight of the distance to the base's hidden states (EAGLE's objective, beside the teacher's).
        feature_noise: hidden states are read with uniform noise on them of this width, in training only (EAGLE).
        head_decay: head k (counted from 1) counts ``head_decay ** k``; 1.0 counts all the same.
        heads_weight: weight of all heads' losses.
        heads_schedule: "constant", or rising with the steps along a "linear" or "sine" curve from 0 to that weight.
        base_weight: weight of the base's own loss; above 0 the base is trained too (Medusa-2).
        base_learning_rate: peak learning rate of the base's weights; `learning_rate` is that of the heads.
        base_objective: what a base learns: the "text", or "itself", that is its distribution without adapters.
        max_grad_value: clip every gradient to this magnitude (EAGLE).
        recipe: "paper", or "quick" for runs that are shorter than a paper's warm-up, which is what `hours` means; None:
            as "paper", but fresh heads whose own projections would exceed a third of the base share its lm_head.
        hours: stop after this time; epochs are chosen to fit into it, and the learning rate follows its schedule over
            it, if the steps take longer.
        lora_rank: of the adapters through which a base learns; 0 for all its weights.
        max_length: tokens of a row, at most; default: 2048, or the base's positions if they are fewer.
        packing: join whole texts to full rows.
        streaming: read the data while training, shuffled within a buffer; `max_steps` must be given.
        split: of a data set.
        chat_template: text of a Jinja template that replaces the tokenizer's, and is saved with the heads.
        held_out_rows: rows to evaluate on; default: a tenth of them, at most 64.
        answer_tokens: of the base's answers from which the expected tokens per step are computed.
        answer_temperature: at which it samples them; 0 is greedy. The tree is calibrated at the same temperature.
        calibrate_tree: at the end, measure which tree is fastest here at batch size 1, and save it with the heads.
    """

    next_token_weight: float = 1.0
    teacher_weight: float = 0.0
    feature_weight: float = 0.0
    feature_noise: float = 0.0
    head_decay: float = 1.0
    heads_weight: float = 1.0
    heads_schedule: str = "constant"
    base_weight: float = 0.0
    base_learning_rate: float = 5e-4
    base_objective: str = "text"
    max_grad_value: float | None = None
    recipe: str | None = None
    hours: float | None = None
    lora_rank: int = 32
    max_length: int | None = None
    packing: bool = False
    streaming: bool = False
    split: str = "train"
    chat_template: str | None = None
    held_out_rows: int | None = None
    answer_tokens: int = 128
    answer_temperature: float = 0.0
    calibrate_tree: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not torch.accelerator.is_available():  # torch would say at every pass that there is nothing to pin for
            self.dataloader_pin_memory = False
        for name in (*OBJECTIVE_WEIGHTS, "feature_noise", "heads_weight", "base_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 or more, 0 leaves it out.")
        if not any(getattr(self, name) for name in OBJECTIVE_WEIGHTS):
            raise ValueError("{}, {} and {} are all 0: nothing to learn, set one above 0.".format(*OBJECTIVE_WEIGHTS))
        counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        for name in ("head_decay", "base_learning_rate", "max_grad_value", "hours", "num_train_epochs", *counts):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}: expected a number above 0.")
        for name, known in (
            ("heads_schedule", SCHEDULES),
            ("base_objective", ("text", "itself")),
            ("recipe", (None, "paper", "quick")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: expected one of {', '.join(map(repr, filter(None, known)))}."
                )

    @classmethod
    def for_family(cls, family: str, output_dir: str, **arguments: Any) -> "DraftHeadTrainingArguments":
        """The recipe of a family's paper, or the quick one where it is asked for or the hours are limited.

        Args:
            family: a name in `modeling.families.FAMILIES`.
            output_dir: where checkpoints go.
            arguments: values that replace the recipe's.

        Raises:
            TypeError: there is no such argument.
            ValueError: no such family.
        """
        known = {each.name for each in fields(cls) if each.init}
        if unknown := sorted(set(arguments) - known):
            raise TypeError(
                f"{unknown[0]!r} is no training argument: {_meant(unknown[0], known)} A field of the heads' config is "
                f"given in fields={{{unknown[0]!r}: ...}}."
            )
        recipe = arguments.get("recipe") or ("quick" if arguments.get("hours") else None)
        quick = QUICK if recipe == "quick" else {}
        return cls(output_dir=output_dir, **{**find_family(family).recipe, **quick, **arguments, "recipe": recipe})


def sort_options(family: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by name into config fields of a family and training arguments; a ValueError for any other name."""
    own = find_family(family).model_class.config_class.heads_fields()
    known = {field.name for field in fields(DraftHeadTrainingArguments)}
    if unknown := sorted(set(options) - own - known):
        raise ValueError(
            f"{unknown[0]!r} is neither a config field of {family} ({', '.join(sorted(own))}) nor a training argument: "
            + _meant(unknown[0], own | known)
        )
    if "output_dir" in options:
        raise ValueError("output_dir is the folder of the heads: give --output.")
    of_config = {name: value for name, value in options.items() if name in own}
    arguments = {name: value for name, value in options.items() if name not in own}
    refuse_wrong_types(arguments)
    return of_config, arguments


def _meant(name: str, known: set[str]) -> str:
    near = get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else "check its spelling."


def refuse_wrong_types(arguments: Mapping[str, Any]) -> None:
    """Refuse values that are no numbers, or no yes or no, where the training arguments ask for such."""
    hints = get_type_hints(DraftHeadTrainingArguments)
    for name, value in arguments.items():
        hint = hints.get(name)
        kinds = set(get_args(hint)) or {hint}
        if value is None or not kinds - {NoneType} <= {int, float, bool}:
            continue  # text and objects are checked where they are used
        found = type(value)
        if found in kinds or (found is int and float in kinds):
            continue
        expected = "a number" if float in kinds else "a whole number" if int in kinds else "true or false"
        raise ValueError(f"{name} is {value!r}: expected {expected}.")
