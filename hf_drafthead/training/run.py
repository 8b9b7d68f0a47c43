"""From a base and some text to trained heads in a folder: what `hf-drafthead train` does.

fresh heads (or trained ones) -> read data -> check the data -> train -> save heads, summary, picture
"""

import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import set_seed
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from hf_drafthead.generation.reader import Unsupported
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import last_layer
from hf_drafthead.modeling.families import find_family, fresh_heads
from hf_drafthead.modeling.gguf_files import load_tokenizer
from hf_drafthead.training.arguments import JOINT, WEIGHTS, DraftHeadTrainingArguments
from hf_drafthead.training.clock import Clock
from hf_drafthead.training.examples import (
    PaddingCollator,
    PreparedData,
    choose_vocabulary,
    look_at,
    most_tokens,
    own_prompts,
    padding_token,
    positions_of,
    refuse_short_rows,
)
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from hf_drafthead.training.forecast import forecast
from hf_drafthead.training.lora import add_lora, merge_lora
from hf_drafthead.training.plots import plot_training
from hf_drafthead.training.progress import show_progress
from hf_drafthead.training.record import (
    SUMMARY,
    check_run,
    fingerprint,
    provenance,
    recent_loss,
    save_whole,
    write_whole,
)
from hf_drafthead.training.trainer import DraftHeadTrainer, whole_checkpoint
from hf_drafthead.trees.calibrate import calibrate

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)

FORETOLD_PROMPTS = 32
EVALUATIONS = 0.1  # of the time, at most, unless it is said how often to evaluate
PICTURE = "training.png"


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
    lora_rank: int = 32,
    max_length: int | None = None,
    packing: bool = False,
    streaming: bool = False,
    split: str = "train",
    chat_template: str | None = None,
    held_out_rows: int | None = None,
    answer_tokens: int = 128,
    answer_temperature: float = 0.0,
    resume: bool = False,
    dry_run: bool = False,
    calibrate_tree: bool = False,
    load: dict[str, Any] | None = None,
    tell: Callable[[str], object] | None = None,
    **arguments: Any,
) -> Trained:
    """Train draft heads and save them.

    Args:
        base: id or path of a causal LM.
        family: a name in `modeling.families.FAMILIES`.
        data: what `read_rows` reads, or a data set with such rows, whose first ones are held out (an `IterableDataset`
            is streamed); or rows that are ready (`max_length` to `held_out_rows` are about reading).
        output: folder for checkpoints, and for the heads at the end; with `joint` for the base as well.
        heads: train these trained heads further instead of fresh ones.
        fields: config fields of fresh heads (`num_draft_heads`, ...).
        joint: train the base too (Medusa-2).
        lora_rank: of the adapters through which a base learns; 0 for all its weights.
        max_length: tokens of a row, at most; default: 2048, or the base's positions if they are fewer.
        packing: join whole texts to full rows.
        streaming: read the data while training, shuffled within a buffer; `max_steps` must be given.
        split: of a data set.
        chat_template: text of a Jinja template that replaces the tokenizer's, and is saved with the heads.
        held_out_rows: rows to evaluate on; default: a tenth of them, at most 64.
        answer_tokens: of the base's answers from which the expected tokens per step are computed.
        answer_temperature: at which it samples them; 0 is greedy. The tree is calibrated at the same temperature.
        resume: resume from the last complete checkpoint in `output`.
        dry_run: stop before the training; the summary is the estimate, and no file is left in `output`.
        calibrate_tree: at the end, measure which tree is fastest here at batch size 1, and save it with the heads.
        load: arguments for loading base or heads (`dtype`, `device_map`, `quantization_config`, ...).
        tell: called with a report on the data and an estimate of what the training will take, before it begins, in one
            process only; by default both are logged.
        arguments: training arguments other than the recipe's.

    Raises:
        OSError, ValueError: base, data or arguments that do not fit.
        FloatingPointError: the loss became NaN or infinite.
    """
    output = Path(output)
    _refuse_contradictions(joint, lora_rank, load or {}, arguments)
    if _sharded():  # every process runs the base before it is sharded
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    together = {**JOINT, **find_family(family).joint_recipe} if joint else {}
    if not isinstance(data, (str, os.PathLike, PreparedData)):
        streaming = streaming or not hasattr(data, "__len__")  # an IterableDataset
    settings = DraftHeadTrainingArguments.for_family(
        family, str(output), **{**together, **_defaults(streaming, arguments), **arguments}
    )
    if 0 < settings.max_steps <= settings.get_warmup_steps(settings.max_steps):
        logger.warning(
            f"the learning rate rises for {settings.get_warmup_steps(settings.max_steps)} steps, but the training has "
            f"{settings.max_steps}: it will not reach {settings.learning_rate:g}; set warmup_steps lower."
        )
    set_seed(settings.seed)
    model = _model(base, family, heads, fields or {}, load or {})
    tokenizer = load_tokenizer(base, (load or {}).get("gguf_file"))
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    if not isinstance(data, PreparedData):
        from hf_drafthead.training.prepare import read_data  # which needs `datasets`

        seed = settings.seed if settings.data_seed is None else settings.data_seed
        data = read_data(model, tokenizer, data, max_length, packing, streaming, split, held_out_rows, seed)
        if data.report is not None and settings.process_index == 0:
            (tell or (logger.warning if data.report.refused else logger.info))(str(data.report))
    refuse_short_rows(model, data.held_out)
    coverage = choose_vocabulary(model, data.rows) if heads is None else None
    run = {
        "family": family,
        "config": _own_fields(model),
        "base": fingerprint(model.base),
        "data": data.sha256,
        "joint": joint,
    }
    if settings.process_index == 0 and not dry_run:
        check_run(output, run, resume)
    collator = PaddingCollator(padding_token(model, tokenizer))
    looks = None
    if settings.process_index == 0:
        placed = hasattr(model.base, "hf_quantizer") or hasattr(model.base, "hf_device_map")
        if not (placed or _sharded()):
            model.to(settings.device)  # as the Trainer does next
        looks = look_at(model, data.held_out, collator, settings.per_device_eval_batch_size)
    if joint and lora_rank:
        add_lora(model, lora_rank)
    prompts = own_prompts(data.held_out, FORETOLD_PROMPTS, positions_of(model) - answer_tokens)
    expected_tokens_per_step = None
    if prompts:
        expected_tokens_per_step = ExpectedTokensPerStep(
            prompts,
            answer_tokens,
            batch_size=8 if settings.device.type == "cpu" else len(prompts),
            base_changes=joint,
            temperature=answer_temperature,
        )
    chosen = {"eval_strategy", "eval_steps", "load_best_model_at_end"} & set(arguments)
    clock = Clock(output / "clock.json", settings.hours, None if chosen else EVALUATIONS)
    trainer = DraftHeadTrainer(
        model,
        settings,
        train_dataset=data.rows,
        eval_dataset=data.held_out,
        data_collator=collator,
        expected_tokens_per_step=expected_tokens_per_step,
        clock=clock,
    )
    show_progress(trainer)
    expected = forecast(trainer, data, collator) if settings.process_index == 0 else None
    if expected is not None:
        (tell or logger.info)(str(expected))
    if dry_run:
        with suppress(OSError):  # the Trainer makes the folder; one that holds something stays
            output.rmdir()
        return Trained(model, {"forecast": None if expected is None else expected.to_json()})
    checkpoint = whole_checkpoint(output) if resume else None
    if resume and checkpoint is None:
        raise ValueError(f"{str(output)!r} holds no complete checkpoint to resume from: leave --resume out.")
    trainer.resume(checkpoint)
    hours = clock.hours
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    best = settings.load_best_model_at_end and trainer.state.best_model_checkpoint
    step = int(best.rpartition("-")[2]) if best else trainer.state.global_step  # of the heads as they are now
    metrics = next((entry for entry in reversed(evaluated) if entry["step"] == step), None) or trainer.evaluate()
    model.eval()
    model.drafter.to(last_layer(model.base)[1])  # in the type that they are loaded in
    summary = {
        **provenance(),
        "family": family,
        "base": str(base),
        "base_revision": model.config.base_model_revision,
        "data": data.source,
        "data_sha256": data.sha256,
        "data_report": data.report and data.report.to_json(),
        "likeness": None if looks is None else vars(looks),
        "seed": settings.seed,
        "joint": joint,
        "steps": trainer.state.global_step,
        "best_step": step if best else None,
        "epochs": round(trainer.state.epoch or 0.0, 3),
        "batch_size": settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size,
        "learning_rate": settings.learning_rate,
        "objective": {name: getattr(settings, name) for name in (*WEIGHTS, "feature_noise", "head_decay")},
        "schedule": SchedulerType(settings.lr_scheduler_type).value,
        "warmup": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_length": max_length or most_tokens(model),
        "packing": packing,
        "draft_vocab_coverage": coverage,
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "lora_rank": lora_rank if joint else None,
        "held_out": {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")},
        "tokens_per_step": metrics.get("eval_tokens_per_step"),
        "answer_temperature": answer_temperature,
        "train_loss": recent_loss(trainer.state.log_history),
        "hours": round(hours, 4),
    }
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        if joint and lora_rank:
            merge_lora(model)
        save_whole(model, tokenizer, output, include_base=joint, state_dict=gathered)
        model.name_or_path = str(output)  # a push finds tokenizer and summary there
        write_whole(output / SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")
        if find_spec("matplotlib"):
            plot_training(trainer.state.log_history, output / PICTURE)
        if calibrate_tree:
            _calibrate(model, prompts, answer_tokens, answer_temperature, output)
    return Trained(model, summary, [*trainer.state.log_history])


def _model(
    base: str | os.PathLike, family: str, heads: str | os.PathLike | None, fields: dict[str, Any], load: dict[str, Any]
) -> DraftHeadPreTrainedModel:
    """Fresh heads, or trained ones, in training mode on their base."""
    if heads is None:
        return fresh_heads(family, base, **fields, **load)
    if fields:
        raise ValueError(
            f"{', '.join(sorted(fields))} cannot be set for trained heads, whose config is fixed: leave them "
            "out, or train fresh heads."
        )
    trained: Any = find_family(family).model_class.from_pretrained(heads, base_model=base, **load)
    if (found := trained.config.family) != family:
        raise ValueError(
            f"the heads in {str(heads)!r} are {found!r} heads, not {family!r} ones: give --family {found}."
        )
    return trained


def _calibrate(
    model: DraftHeadPreTrainedModel, prompts: Sequence[Tensor], new_tokens: int, temperature: float, output: Path
) -> None:
    """Save the fastest tree beside the heads, which are saved already; a warning where none is found."""
    try:
        calibrate(model, prompts, new_tokens=new_tokens, temperature=temperature)
    except (ValueError, Unsupported) as reason:
        logger.warning(f"no tree was calibrated: {reason}")
    else:
        model.generation_config.save_pretrained(output)


def _refuse_contradictions(joint: bool, lora_rank: int, load: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse combinations that would fail only at the end of the training."""
    if joint and load.get("quantization_config") is not None:
        raise ValueError("a quantized base cannot be trained with its heads: drop --joint, or the quantization.")
    if joint and _sharded():
        raise ValueError("a base that is sharded (FSDP) cannot be trained along with its heads here: drop --joint.")
    for name in ("base_weight", "base_objective"):
        if name in arguments and not joint:
            raise ValueError(f"{name} is for a base that is trained along with its heads: add --joint, or drop it.")
    if arguments.get("base_objective") == "itself" and not lora_rank:
        raise ValueError("base_objective=itself trains adapters of the base: give a --lora-rank above 0.")


def _sharded() -> bool:
    """Whether `accelerate launch` shards the model over the processes (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")


def _own_fields(model: DraftHeadPreTrainedModel) -> dict[str, Any]:
    """The family's fields of a config that are plain values."""
    values = {name: getattr(model.config, name) for name in sorted(model.config.heads_fields())}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, list))}


def _defaults(streaming: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """Default training arguments: about ten evaluations and checkpoints, logs to tensorboard where it is installed."""
    if streaming and "max_steps" not in arguments:
        raise ValueError("with streaming the length of an epoch is not known: give the steps with --set max_steps=N.")
    return {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 0.1,
        "save_steps": 0.1,
        "save_total_limit": 2,
        "logging_steps": 10,
        "logging_nan_inf_filter": False,  # which waits for the device in every step
        "report_to": "tensorboard" if find_spec("tensorboard") else "none",
        # rows of a stream have different lengths: every process makes its own batches
        **({"accelerator_config": {"dispatch_batches": False}} if streaming else {}),
    }
