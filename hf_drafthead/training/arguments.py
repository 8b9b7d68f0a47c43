"""Training arguments for draft heads, and the values in each family's paper."""

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from types import NoneType
from typing import Any, get_args, get_type_hints

import torch
from transformers import TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_drafthead.data.texts import one_line
from hf_drafthead.modeling.families import find_family, find_recipe

OBJECTIVE_WEIGHTS = ("next_token_weight", "teacher_weight", "feature_weight", "distance_weight")

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
# What the Trainer of heads cannot honour, by the reason; another value than transformers' own is refused.
_OF_PREDICTIONS: tuple[str, ...] = ("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object")
_OF_PREDICTIONS += ("eval_accumulation_steps", "include_for_metrics", "batch_eval_metrics")
_OF_PUBLISHING = ("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push")
_PUBLISH = "the heads are published when they are ready, with `hf-drafthead push` or model.push_to_hub"
_ROWS = ("label_names", "remove_unused_columns", "length_column_name")
WITHOUT_EFFECT: dict[str, str] = {
    "label_smoothing_factor": "the heads' own objectives take its place",
    "average_tokens_across_devices": "the loss is always the mean over the labels of all processes",
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), "its kernels are for the loss of a base"),
    "use_cache": "training reads whole texts",
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), "evaluations use the type of the training"),
    **dict.fromkeys(_OF_PREDICTIONS, "evaluations keep no predictions, they count how often each head is right"),
    **dict.fromkeys(_ROWS, "of a row, `input_ids` and `labels` are read"),
    "parallelism_config": "several GPUs train by data parallelism or FSDP (`accelerate launch`)",
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), "it is for the example scripts of transformers"),
    "local_rank": "`accelerate launch` sets it",
    "resume_from_checkpoint": "resume with --resume (resume=True)",
    **dict.fromkeys((*_OF_PUBLISHING, "hub_revision"), _PUBLISH),
}
# those that need another one
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")  # two names of one thing
NEEDED: dict[str, tuple[str, ...]] = {
    "neftune_noise_alpha": ("base_weight",),  # a base that is not trained is read without noise
    "base_learning_rate": ("base_weight",),
    "gradient_checkpointing_kwargs": CHECKPOINTING,
    "activation_checkpointing_kwargs": CHECKPOINTING,
}
# what `metric_for_best_model` may name: the figures of an evaluation
METRICS = re.compile(r"(eval_)?(loss|tokens_per_step|head\d+_top[15]|runtime|samples_per_second|steps_per_second)")

QUICK_WIDTH = 1024  # hidden size up to which that learning rate suits; beyond, it falls with the square root


@dataclass
class DraftHeadTrainingArguments(TrainingArguments):
    """Training arguments with the weights of the objectives; `for_family` sets them as a family's paper does.

    Args:
        next_token_weight: weight of the cross-entropy with the tokens of the text (Medusa's objective).
        teacher_weight: weight of the cross-entropy with the base's distribution (Hydra's objective).
        feature_weight: weight of the distance to the base's hidden states (EAGLE's objective, beside the teacher's).
        distance_weight: weight of the L1 distance to the base's distribution (DSpark's objective, beside the text's).
        confidence_weight: weight of the loss of a head that foretells acceptance, where there is one (DSpark).
        num_anchors: places of a text at which blocks begin, sampled anew in every step (DFlash, DSpark).
        feature_noise: hidden states are read with uniform noise on them of this width, in training only (EAGLE).
        head_decay: head k (counted from 1) counts ``head_decay ** k``; 1.0 counts all the same.
        heads_weight: weight of all heads' losses.
        base_weight: weight of the base's own loss; above 0 the base is trained too (Medusa-2).
        base_learning_rate: peak learning rate of the base's weights; `learning_rate` is that of the heads.
        max_grad_value: clip every gradient to this magnitude (EAGLE).
        recipe: "paper", or "quick" for runs that are shorter than a paper's warm-up, which is what `hours` means; None:
            as "paper", but fresh heads whose own projections would exceed a third of the base share its lm_head.
        hours: stop after this time; epochs are chosen to fit into it, and the learning rate follows its schedule over
            it, if the steps take longer. A tenth as long, at most, trees are timed at the end.
        lora_rank: of the adapters through which a base learns; 0 for all its weights.
        max_length: tokens of a row, at most; default: 2048, or the base's positions if they are fewer.
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
    distance_weight: float = 0.0
    confidence_weight: float = 1.0
    num_anchors: int = 512
    feature_noise: float = 0.0
    head_decay: float = 1.0
    heads_weight: float = 1.0
    base_weight: float = 0.0
    base_learning_rate: float = 5e-4
    max_grad_value: float | None = None
    recipe: str | None = None
    hours: float | None = None
    lora_rank: int = 32
    max_length: int | None = None
    split: str = "train"
    chat_template: str | None = None
    held_out_rows: int | None = None
    answer_tokens: int = 128
    answer_temperature: float = 0.0
    calibrate_tree: bool = False

    def __post_init__(self) -> None:
        refuse_without_effect(self)
        super().__post_init__()
        refuse_missing_reporters(self.report_to)
        if not torch.accelerator.is_available():  # torch would say at every pass that there is nothing to pin for
            self.dataloader_pin_memory = False
        for name in (*OBJECTIVE_WEIGHTS, "confidence_weight", "feature_noise", "heads_weight", "base_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: expected 0 or more, 0 leaves it out.")
        if not any(getattr(self, name) for name in OBJECTIVE_WEIGHTS):
            *names, last = OBJECTIVE_WEIGHTS
            raise ValueError(f"{', '.join(names)} and {last} are all 0: nothing to learn, set one above 0.")
        counts = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        positive = ("head_decay", "num_anchors", "base_learning_rate", "max_grad_value", "hours", "num_train_epochs")
        for name in (*positive, *counts, "learning_rate", "max_steps"):
            value = getattr(self, name)
            if value is not None and not value > 0 and (name, value) != ("max_steps", -1):  # as many as the epochs have
                raise ValueError(f"{name} is {value}: expected a number above 0.")
        if self.recipe not in (None, "paper", "quick"):
            raise ValueError(f"recipe is {self.recipe!r}: expected one of 'paper', 'quick'.")

    @classmethod
    def for_family(cls, family: str, output_dir: str, **arguments: Any) -> "DraftHeadTrainingArguments":
        """The recipe of a family's paper, or the quick one where it is asked for or the hours are limited, with
        `arguments` in the place of the recipe's. A ValueError for what is no family."""
        recipe = arguments.get("recipe") or ("quick" if arguments.get("hours") else None)
        quick = QUICK if recipe == "quick" else {}
        return cls(output_dir=output_dir, **{**find_recipe(family), **quick, **arguments, "recipe": recipe})


def refuse_without_effect(arguments: DraftHeadTrainingArguments) -> None:
    """Refuse arguments that nothing would honour, before the Trainer changes any; a ValueError that says why."""
    changed = {
        field.name
        for field in fields(arguments)
        if field.init
        and getattr(arguments, field.name)
        != (field.default if field.default_factory is MISSING else field.default_factory())
    }
    for name in WITHOUT_EFFECT:
        if name in changed:
            value = "a value" if "token" in name else repr(getattr(arguments, name))
            raise ValueError(f"{name} is {value}, which has no effect on heads ({WITHOUT_EFFECT[name]}): leave it out.")
    for name, needed in NEEDED.items():
        if name in changed and not any(getattr(arguments, other, None) for other in needed):
            advice = "train the base too (--joint)" if "base_weight" in needed else f"set {needed[0]}"
            raise ValueError(f"{name} has no effect without {needed[0]}: {advice}, or leave it out.")
    best = arguments.metric_for_best_model
    if best is not None and not METRICS.fullmatch(best):
        expected = "expected loss, tokens_per_step, or how often a head is right (head0_top1, head0_top5, ...)"
        raise ValueError(f"metric_for_best_model is {best!r}: {expected}.")


def refuse_missing_reporters(names: list[str]) -> None:
    """Refuse to report to what is not installed, before anything is loaded."""
    for name in names:
        try:
            # one that is refused halfway must not do what it does at its end
            type(name, (INTEGRATION_TO_CALLBACK[name],), {"__del__": lambda self: None})()
        except KeyError:
            reporters = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise ValueError(f"report_to is {name!r}: expected none, all, or one of {reporters}.") from None
        except (ImportError, RuntimeError, ValueError) as error:
            raise ValueError(f"report_to is {name!r} ({one_line(error)}): install it, or leave it out.") from error


def sort_options(family: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by name into config fields of a family and training arguments; a ValueError for any other name."""
    heads_fields = find_family(family).model_class.config_class.heads_fields()
    argument_names = {field.name for field in fields(DraftHeadTrainingArguments)}
    if unknown := sorted(set(options) - heads_fields - argument_names):
        near = get_close_matches(unknown[0], sorted(heads_fields | argument_names), n=1)
        raise ValueError(
            f"{unknown[0]!r} is neither a config field of {family} ({', '.join(sorted(heads_fields))}) nor a "
            f"training argument: {f'did you mean {near[0]}?' if near else 'check its spelling, or leave it out.'}"
        )
    of_config = {name: value for name, value in options.items() if name in heads_fields}
    arguments = {name: value for name, value in options.items() if name not in heads_fields}
    refuse_wrong_types(arguments)
    return of_config, arguments


def refuse_wrong_types(arguments: Mapping[str, Any]) -> None:
    """Refuse values that are no numbers, or no yes or no, where the training arguments ask for such."""
    hints = get_type_hints(DraftHeadTrainingArguments)
    for name, value in arguments.items():
        hint = hints.get(name)
        kinds = set(get_args(hint)) or {hint}
        if value is None or not kinds - {NoneType} <= {int, float, bool}:
            continue  # text and objects are checked where they are used
        value_type = type(value)
        if value_type in kinds or (value_type is int and float in kinds):
            continue
        expected = "a number" if float in kinds else "a whole number" if int in kinds else "true or false"
        raise ValueError(f"{name} is {value!r}: expected {expected}.")
