"""From a base and some text to trained heads in a folder: what `hf-drafthead train` does.

fresh heads (or trained ones) -> read data -> check the data -> train -> save heads, summary, picture
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import set_seed
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from hf_drafthead.data.rows import without_format
from hf_drafthead.data.sources import files_of
from hf_drafthead.generation.drafting import draft_vocabulary
from hf_drafthead.generation.reader import Unsupported
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import last_layer
from hf_drafthead.modeling.families import find_family, fresh_heads
from hf_drafthead.modeling.gguf_files import load_tokenizer
from hf_drafthead.training import examples, record
from hf_drafthead.training.arguments import JOINT, OBJECTIVE_WEIGHTS, QUICK_WIDTH, DraftHeadTrainingArguments
from hf_drafthead.training.callbacks import Clock, agreed, duration, show_progress
from hf_drafthead.training.examples import PreparedData
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from hf_drafthead.training.forecast import Forecast, forecast
from hf_drafthead.training.trainer import DraftHeadTrainer, add_lora, merge_lora
from hf_drafthead.trees.calibrate import calibrate

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)

FORETOLD_PROMPTS = 32
EVALUATIONS = 0.1  # of the time, at most, unless it is said how often to evaluate
LORA_RANK = DraftHeadTrainingArguments.lora_rank
OF_READING = ("packing", "streaming", "split")
FEW_STEPS = 100  # in which heads learn little
FEW_TOKENS = 8192  # that hold most of a text; in the quick recipe heads choose among no fewer
PICTURE = "training.png"
Tell = Callable[[str], object]


@dataclasses.dataclass(frozen=True)
class Trained:
    """The result of a training.

    model: in eval mode; summary: the content of `training_summary.json`; history: the Trainer's logs.
    """

    model: DraftHeadPreTrainedModel
    summary: dict[str, Any]
    history: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def train_heads(
    base: str | os.PathLike,
    family: str,
    data: "str | os.PathLike | Dataset | IterableDataset | PreparedData",
    output: str | os.PathLike,
    *,
    heads: str | os.PathLike | None = None,
    fields: dict[str, Any] | None = None,
    joint: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    load: dict[str, Any] | None = None,
    tell: Tell | None = None,
    **arguments: Any,
) -> Trained:
    """Train draft heads and save them.

    Args:
        base: id or path of a causal LM.
        family: a name in `modeling.families.FAMILIES`.
        data: what `read_rows` reads, or a data set with such rows, whose first ones are held out (an `IterableDataset`
            is streamed); or rows that are ready.
        output: folder for checkpoints, and for the heads at the end; with `joint` for the base as well.
        heads: train these trained heads further instead of fresh ones.
        fields: config fields of fresh heads (`num_draft_heads`, ...).
        joint: train the base too (Medusa-2).
        resume: resume from the last complete checkpoint in `output`.
        dry_run: stop before the training; the summary is the estimate, and no file is left in `output`.
        load: arguments for loading base or heads (`dtype`, `device_map`, `quantization_config`, ...).
        tell: called with a report on the data, an estimate of what the training will take and remarks on it, before it
            begins, in one process only; by default they are logged.
        arguments: of `DraftHeadTrainingArguments`: how the data is read, and what is different from the recipe.

    Raises:
        OSError, ValueError: base, data or arguments that do not fit.
        FloatingPointError: the loss became NaN or infinite.
    """
    output, fields, load = Path(output), fields or {}, load or {}
    if not dry_run:
        record.check_output(output, resume)
    if isinstance(data, (str, os.PathLike)) and Path(data).resolve() in output.resolve().parents:
        raise ValueError(f"the output {str(output)!r} lies in the folder of the data: give a folder outside of it.")
    settings = _settings(family, data, output, joint, load, arguments)
    first = settings.process_index == 0
    say = (tell or logger.warning) if first else lambda line: None
    set_seed(settings.seed)
    model, tokenizer = _model(base, family, heads, fields, load, settings, say)
    prepared = _prepared(model, tokenizer, data, settings, say)
    about = {"family": family, "base": str(base), "joint": joint}
    about["draft_vocab_coverage"] = examples.choose_vocabulary(model, prepared.rows) if heads is None else None
    about["likeness"] = _likeness(model, prepared, settings) if first else None
    if first and not dry_run:
        record.check_run(output, _identity(model, tokenizer, prepared, about, settings), resume)
    trainer = _trainer(model, prepared, settings, joint, arguments)
    expected = _expected(trainer, prepared, say) if first else None
    settings.num_train_epochs = agreed(settings.num_train_epochs, settings)
    if dry_run:
        with suppress(OSError):  # the Trainer makes the folder; one that holds something stays
            output.rmdir()
        return Trained(model, {"forecast": None if expected is None else vars(expected)})
    checkpoint = record.whole_checkpoint(output) if resume else None
    if checkpoint is not None and expected is not None:
        say(f"resuming from step {checkpoint.name.rpartition('-')[2]} of {expected.steps}")
    trainer.resume(checkpoint)
    summary = {**about, **_summary(trainer, prepared)}
    _save(trainer, tokenizer, prepared, summary)
    return Trained(model, summary, [*trainer.state.log_history])


def _settings(
    family: str, data: Any, output: Path, joint: bool, load: dict[str, Any], arguments: dict[str, Any]
) -> DraftHeadTrainingArguments:
    """The training arguments: the family's recipe, defaults, and what was asked for."""
    _refuse_contradictions(data, joint, load, arguments)
    if _sharded():  # every process runs the base before it is sharded
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not isinstance(data, (str, os.PathLike, PreparedData)) and not hasattr(data, "__len__"):
        arguments["streaming"] = True  # an IterableDataset
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 0.1,
        "save_steps": 0.1,
        "save_total_limit": 2,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # which waits for the device in every step
        "report_to": "tensorboard" if find_spec("tensorboard") else "none",
    }
    if arguments.get("streaming"):
        if "max_steps" not in arguments:
            raise ValueError(
                "with streaming the length of an epoch is not known: give the steps with --set max_steps=N."
            )
        # rows of a stream have different lengths: every process makes its own batches
        defaults["accelerator_config"] = {"dispatch_batches": False}
    together = {**JOINT, **find_family(family).joint_recipe} if joint else {}
    return DraftHeadTrainingArguments.for_family(family, str(output), **{**together, **defaults, **arguments})


def _model(
    base: str | os.PathLike,
    family: str,
    heads: str | os.PathLike | None,
    fields: dict[str, Any],
    load: dict[str, Any],
    settings: DraftHeadTrainingArguments,
    tell: Tell,
) -> tuple[Any, Any]:
    """Fresh heads, or trained ones, in training mode on their base; and its tokenizer."""
    if heads is None:
        model: Any = fresh_heads(family, base, **fields, **load)
        if settings.recipe != "paper" and "share_lm_head" not in fields:
            share_large_projections(model, tell)
        if settings.recipe == "quick" and "draft_vocab_size" not in fields and family != "draft-model":
            choose_among_fewer(model, tell)
    elif fields:
        raise ValueError(
            f"{', '.join(sorted(fields))} cannot be set for trained heads, whose config is fixed: leave them "
            "out, or train fresh heads."
        )
    else:
        model = find_family(family).model_class.from_pretrained(heads, base_model=base, **load)
        if (saved := model.config.family) != family:
            raise ValueError(
                f"the heads in {str(heads)!r} are {saved!r} heads, not {family!r} ones: give --family {saved}."
            )
    tokenizer = load_tokenizer(base, load.get("gguf_file"))
    tokenizer.chat_template = settings.chat_template or tokenizer.chat_template
    choices = draft_vocabulary(model.base, model.drafter)
    if choices < (least := DraftTree.from_name(DEFAULT_TREE).max_rank + 1):
        raise ValueError(f"the heads choose among {choices} tokens: give a draft_vocab_size of at least {least}.")
    return model, tokenizer


def share_large_projections(model: DraftHeadPreTrainedModel, tell: Tell) -> None:
    """Let fresh heads share the base's lm_head where projections of their own would exceed a third of the base."""
    config: Any = model.config
    own = getattr(model.drafter, "projections", None)
    if own is None or any(getattr(config, name, None) for name in ("share_lm_head", "lm_head_rank", "lm_head_bias")):
        return
    size, base = (sum(one.numel() for one in module.parameters()) for module in (own, model.base))
    if 3 * size <= base:
        return
    _rebuild(model, share_lm_head=True)
    tell(
        f"the heads share the base's lm_head: projections of their own would have {size:,} parameters, the base has "
        f"{base:,} (share_lm_head=false or the recipe paper gives them their own)."
    )


def choose_among_fewer(model: DraftHeadPreTrainedModel, tell: Tell) -> None:
    """Let fresh heads choose among a quarter of the base's tokens, where it has so many that these are enough."""
    known = model.config.known_tokens or 0
    few = known // 4
    if few < FEW_TOKENS or (model.config.draft_vocab_size or known) <= few:
        return
    _rebuild(model, draft_vocab_size=few)
    tell(
        f"the heads choose among the {few:,} tokens that the text holds most, of the base's {known:,} "
        f"(draft_vocab_size={known} for all of them)."
    )


def _rebuild(model: Any, **fields: Any) -> None:
    """Fresh heads with other config fields in the place of fresh heads."""
    training = model.training
    for name, value in fields.items():
        setattr(model.config, name, value)
    model.drafter = model.drafter_class(model.config)
    model._attach(model.base)
    model.drafter.copy_from_base()
    model.drafter.train(training)


def _prepared(
    model: DraftHeadPreTrainedModel, tokenizer: Any, data: Any, settings: DraftHeadTrainingArguments, tell: Tell
) -> PreparedData:
    """The data as rows of token ids."""
    settings.max_length = settings.max_length or min(examples.USUAL_LENGTH, examples.longest_text_of(model))
    if not isinstance(data, PreparedData):
        from hf_drafthead.training.data import read_data  # which needs `datasets`

        data = read_data(model, tokenizer, data, settings)
        tell(str(data.report))
    data = dataclasses.replace(data, rows=without_format(data.rows), held_out=without_format(data.held_out))
    examples.refuse_short_rows(model, data.held_out)
    return data


def _likeness(
    model: DraftHeadPreTrainedModel, data: PreparedData, settings: DraftHeadTrainingArguments
) -> dict[str, float] | None:
    """How well the base predicts the held-out rows."""
    placed = hasattr(model.base, "hf_quantizer") or hasattr(model.base, "hf_device_map")
    if not (placed or _sharded()):
        model.to(settings.device)  # as the Trainer does next
    return examples.likeness(model.base.eval(), data.held_out, settings.per_device_eval_batch_size)


def _prompts(model: DraftHeadPreTrainedModel, data: PreparedData, settings: DraftHeadTrainingArguments) -> list[Tensor]:
    """Of the held-out rows, for the base's own answers."""
    return examples.own_prompts(
        data.held_out, FORETOLD_PROMPTS, examples.longest_text_of(model) - settings.answer_tokens
    )


def _trainer(
    model: DraftHeadPreTrainedModel,
    data: PreparedData,
    settings: DraftHeadTrainingArguments,
    joint: bool,
    arguments: dict[str, Any],
) -> DraftHeadTrainer:
    """The Trainer, ready to train."""
    if settings.recipe == "quick" and "learning_rate" not in arguments:
        settings.learning_rate *= min(1.0, (QUICK_WIDTH / model.config.get_text_config().hidden_size) ** 0.5)
    if joint and settings.lora_rank:
        add_lora(model, settings.lora_rank)
    expected_tokens_per_step = None
    if prompts := _prompts(model, data, settings):
        expected_tokens_per_step = ExpectedTokensPerStep(
            prompts,
            settings.answer_tokens,
            batch_size=8 if settings.device.type == "cpu" else len(prompts),
            base_changes=joint,
            temperature=settings.answer_temperature,
        )
    chosen = {"eval_strategy", "eval_steps", "load_best_model_at_end"} & set(arguments)
    trainer = DraftHeadTrainer(
        model,
        settings,
        train_dataset=data.rows,
        eval_dataset=data.held_out,
        data_collator=examples.collate,
        expected_tokens_per_step=expected_tokens_per_step,
        clock=Clock(Path(settings.output_dir) / "clock.json", settings.hours, None if chosen else EVALUATIONS),
    )
    show_progress(trainer)
    return trainer


def _expected(trainer: DraftHeadTrainer, data: PreparedData, tell: Tell) -> Forecast:
    """What the training will take, told with remarks on it."""
    expected = forecast(trainer, data)
    for line in (str(expected), *remarks(expected, trainer.args)):
        tell(line)
    return expected


def remarks(expected: Forecast, settings: DraftHeadTrainingArguments) -> list[str]:
    """What a user should know of a training before it begins."""
    lines = []
    rising = settings.get_warmup_steps(expected.steps)
    if 0 < expected.steps <= rising:
        lines.append(
            f"the learning rate rises for {rising} steps, but the training has {expected.steps}: it will not reach "
            f"{settings.learning_rate:g}; set warmup_steps lower, or take the quick recipe (--recipe quick)."
        )
    if settings.save_only_model and settings.save_strategy != "no":
        lines.append("checkpoints hold weights alone (save_only_model): the training cannot be resumed from them.")
    if settings.hours and expected.epoch and settings.num_train_epochs < 1:
        lines.append(
            f"one pass over the data takes about {duration(expected.epoch)}, the training has {settings.hours:g} h: "
            f"about {settings.num_train_epochs:.0%} of the rows are read; give more hours, or fewer and shorter rows."
        )
    if 0 < expected.steps < FEW_STEPS and expected.parameters > 10**6:
        lines.append(
            f"too few rows: {expected.steps} steps teach {expected.parameters:,} parameters little; give at least "
            f"{FEW_STEPS * expected.batch:,} rows in all epochs together."
        )
    return lines


def _summary(trainer: DraftHeadTrainer, data: PreparedData) -> dict[str, Any]:
    """What `training_summary.json` says of the training, after a last evaluation if one is missing."""
    settings, state, model = trainer.args, trainer.state, trainer.accelerator.unwrap_model(trainer.model)
    hours = 0.0 if trainer.clock is None else trainer.clock.hours
    evaluated = [entry for entry in state.log_history if "eval_loss" in entry]
    best = settings.load_best_model_at_end and state.best_model_checkpoint
    step = int(best.rpartition("-")[2]) if best else state.global_step  # of the heads as they are now
    metrics = next((entry for entry in reversed(evaluated) if entry["step"] == step), None) or trainer.evaluate()
    model.eval()
    model.drafter.to(last_layer(model.base)[1])  # in the type that they are loaded in
    return {
        **record.provenance(),
        "base_revision": model.config.base_model_revision,
        "data": data.source,
        "data_sha256": data.sha256,
        "data_report": data.report and vars(data.report),
        "seed": settings.seed,
        "recipe": settings.recipe,
        "steps": state.global_step,
        "best_step": step if best else None,
        "epochs": round(state.epoch or 0.0, 3),
        "batch_size": settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size,
        "learning_rate": settings.learning_rate,
        "objective": {name: getattr(settings, name) for name in (*OBJECTIVE_WEIGHTS, "feature_noise", "head_decay")},
        "schedule": SchedulerType(settings.lr_scheduler_type).value,
        "warmup": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_length": settings.max_length,
        "packing": settings.packing,
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "lora_rank": settings.lora_rank if settings.base_weight else None,
        "held_out": {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")},
        "tokens_per_step": metrics.get("eval_tokens_per_step"),
        "answer_temperature": settings.answer_temperature,
        "train_loss": record.recent_loss(state.log_history),
        "hours": round(hours, 4),
    }


def _save(trainer: DraftHeadTrainer, tokenizer: Any, data: PreparedData, summary: dict[str, Any]) -> None:
    """Save heads, summary and picture, and the fastest tree if it is to be measured."""
    model, settings = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    output, joint = Path(settings.output_dir), summary["joint"]
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if not trainer.is_world_process_zero():
        return
    if joint and settings.lora_rank:
        merge_lora(model)
    record.save_whole(model, tokenizer, output, include_base=joint, state_dict=gathered)
    model.name_or_path = str(output)  # a push finds tokenizer and summary there
    record.write_whole(output / record.SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")
    if find_spec("matplotlib"):
        record.plot_training(trainer.state.log_history, output / PICTURE)
    if not settings.calibrate_tree:
        return
    try:
        calibrate(
            model,
            _prompts(model, data, settings),
            new_tokens=settings.answer_tokens,
            temperature=settings.answer_temperature,
        )
    except (ValueError, Unsupported) as reason:
        logger.warning(f"no tree was calibrated: {reason}")
    else:
        model.generation_config.save_pretrained(output)


def _refuse_contradictions(data: Any, joint: bool, load: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse combinations that would fail only at the end of the training."""
    if joint and load.get("quantization_config") is not None:
        raise ValueError("a quantized base cannot be trained with its heads: drop --joint, or the quantization.")
    if joint and _sharded():
        raise ValueError("a base that is sharded (FSDP) cannot be trained along with its heads here: drop --joint.")
    for name in ("base_weight", "base_objective"):
        if name in arguments and not joint:
            raise ValueError(f"{name} is for a base that is trained along with its heads: add --joint, or drop it.")
    if not joint and arguments.get("lora_rank", LORA_RANK) != LORA_RANK:
        raise ValueError("lora_rank is for a base that is trained along with its heads: add --joint, or drop it.")
    if "output_dir" in arguments:
        raise ValueError("output_dir is the folder of the heads: give it as output (--output).")
    if isinstance(data, PreparedData):
        for name in OF_READING:
            if name in arguments and arguments[name] not in (None, False, "train"):
                raise ValueError(f"{name} is for data that is read, but the rows are ready: leave it out.")
    if arguments.get("split", "train") != "train" and isinstance(data, (str, os.PathLike)) and files_of(Path(data)):
        raise ValueError(f"split is {arguments['split']!r}, but {str(data)!r} has no splits: leave --split out.")
    if arguments.get("base_objective") == "itself" and not arguments.get("lora_rank", 1):
        raise ValueError("base_objective=itself trains adapters of the base: give a --lora-rank above 0.")


def _sharded() -> bool:
    """Whether `accelerate launch` shards the model over the processes (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")


def _identity(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    data: PreparedData,
    about: dict[str, Any],
    settings: DraftHeadTrainingArguments,
) -> dict[str, Any]:
    """What must stay the same when a training is resumed."""
    same = ("max_length", "packing", "seed")
    values = {name: getattr(model.config, name) for name in sorted(model.config.heads_fields())}
    return {
        "family": about["family"],
        "config": {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, list))},
        "base": record.base_fingerprint(model.base),
        "data": data.sha256,
        "joint": about["joint"],
        **{name: getattr(settings, name) for name in same},
        "held_out_rows": len(data.held_out),
        "chat_template": hashlib.sha256(repr(tokenizer.chat_template).encode()).hexdigest(),
    }
