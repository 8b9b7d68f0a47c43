"""From a base and some text to trained heads in a folder: what `hf-drafthead train` does.

fresh heads (or trained ones) -> read data -> look at the data -> train -> save heads, summary, picture
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import AutoTokenizer, set_seed
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from hf_drafthead.data.rows import data_hash
from hf_drafthead.data.sources import read_rows, stream_hash, uniform
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import last_layer
from hf_drafthead.training.arguments import JOINT, JOINT_MEDUSA, WEIGHTS, DraftHeadTrainingArguments, recipe
from hf_drafthead.training.clock import Clock
from hf_drafthead.training.data import DataReport, PaddingCollator, tokenize_rows
from hf_drafthead.training.families import CLASSES, fresh_heads
from hf_drafthead.training.foretelling import Foretelling
from hf_drafthead.training.likeness import Likeness, likeness
from hf_drafthead.training.lora import add_lora, merge_lora
from hf_drafthead.training.objectives import IGNORED
from hf_drafthead.training.plots import plot_training
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

logger = logging.get_logger(__name__)

FORETOLD_PROMPTS = 32
USUAL_LENGTH = 2048  # tokens of a row, as in the papers
SHUFFLED = 4096  # rows of a stream that are shuffled among each other
PICTURE = "training.png"


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """Rows of tokens that are ready to learn from.

    rows: each with `input_ids` and `labels` (T,), -100 where nothing is to be learnt, and if the base's last hidden
    states are known, `features` (T, H); held_out: rows to evaluate on; source: what they were made from, for the
    training summary; sha256: of that; report: what became of it.
    """

    rows: Any
    held_out: Any
    source: str
    sha256: str
    report: DataReport | None = None


@dataclasses.dataclass(frozen=True)
class Trained:
    """What came of a training: the model (in eval mode) and what `training_summary.json` says of it."""

    model: DraftHeadPreTrainedModel
    summary: dict[str, Any]


def train_heads(
    base: str | os.PathLike,
    family: str,
    data: str | os.PathLike | Dataset | IterableDataset | PreparedData,
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
    held_out_rows: int = 64,
    answer_tokens: int = 128,
    resume: bool = False,
    load: dict[str, Any] | None = None,
    **arguments: Any,
) -> Trained:
    """Train draft heads and save them.

    Args:
        base: id or path of a causal LM.
        family: one of "medusa", "hydra", "hydra++", "amphista", "amphista-alpha", "eagle".
        data: what `read_rows` reads, or a data set with such rows, whose first ones are held out (an `IterableDataset`
            is streamed); or rows that are ready (`max_length` to `held_out_rows` are about reading).
        output: folder for checkpoints, and for the heads at the end; with `joint` for the base as well.
        heads: go on from these trained heads instead of fresh ones.
        fields: config fields of fresh heads (`num_draft_heads`, ...).
        joint: train the base too (Medusa-2).
        lora_rank: of the adapters through which a base learns; 0 for all its weights.
        max_length: tokens of a row, at most; default: 2048, or the base's positions if they are fewer.
        packing: fill rows up with whole texts, one behind the other.
        streaming: read the data while training, in an order that is shuffled a window at a time; `max_steps` must be
            given.
        split: of a data set.
        chat_template: text of a Jinja template that takes the place of the tokenizer's, and is saved with the heads.
        held_out_rows: rows to evaluate on.
        answer_tokens: of the base's answers on which the speed is foretold.
        resume: go on from the last whole checkpoint in `output`.
        load: arguments for loading base or heads (`dtype`, `device_map`, `quantization_config`, ...).
        arguments: training arguments other than the recipe's.

    Raises:
        OSError, ValueError: base, data or arguments that do not fit.
        FloatingPointError: the loss became NaN or infinite.
    """
    output = Path(output)
    _refuse_contradictions(joint, lora_rank, load or {}, arguments)
    if _sharded():  # every process looks at the base before it is sharded
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    together = (JOINT_MEDUSA if family == "medusa" else JOINT) if joint else {}
    streaming = streaming or isinstance(data, IterableDataset)
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
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    if not isinstance(data, PreparedData):
        seed = settings.seed if settings.data_seed is None else settings.data_seed
        data = _read(model, tokenizer, data, max_length, packing, streaming, split, held_out_rows, seed)
        if data.report is not None and settings.process_index == 0:
            tell = logger.warning if data.report.refused else logger.info
            tell(str(data.report))
    _refuse_short_rows(model, data.held_out)
    run = {
        "family": family,
        "config": _own_fields(model),
        "base": fingerprint(model.base),
        "data": data.sha256,
        "joint": joint,
    }
    if settings.process_index == 0:
        check_run(output, run, resume)
    collator = PaddingCollator(tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0)
    looks = None
    if settings.process_index == 0:
        placed = hasattr(model.base, "hf_quantizer") or hasattr(model.base, "hf_device_map")
        if not (placed or _sharded()):
            model.to(settings.device)  # as the Trainer does next
        looks = _look(model, data.held_out, collator, settings.per_device_eval_batch_size)
    if joint and lora_rank:
        add_lora(model, lora_rank)
    prompts = own_prompts(data.held_out, FORETOLD_PROMPTS, _positions(model) - answer_tokens)
    clock = Clock(output / "clock.json")
    trainer = DraftHeadTrainer(
        model,
        settings,
        train_dataset=data.rows,
        eval_dataset=data.held_out,
        data_collator=collator,
        callbacks=[clock],
        foretelling=Foretelling(prompts, answer_tokens, base_changes=joint) if prompts else None,
    )
    checkpoint = whole_checkpoint(output) if resume else None
    if resume and checkpoint is None:
        raise ValueError(f"{str(output)!r} holds no whole checkpoint to go on from: leave --resume out.")
    trainer.go_on(checkpoint)
    hours = clock.hours
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    done = bool(evaluated) and evaluated[-1]["step"] == trainer.state.global_step
    metrics = evaluated[-1] if done else trainer.evaluate()
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
        "epochs": round(trainer.state.epoch or 0.0, 3),
        "batch_size": settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size,
        "learning_rate": settings.learning_rate,
        "objective": {name: getattr(settings, name) for name in (*WEIGHTS, "feature_noise", "head_decay")},
        "schedule": str(settings.lr_scheduler_type),
        "warmup": settings.warmup_steps,
        "weight_decay": settings.weight_decay,
        "max_length": max_length or _most_tokens(model),
        "packing": packing,
        "dtype": str(model.base.dtype).removeprefix("torch."),
        "lora_rank": lora_rank if joint else None,
        "held_out": {name.removeprefix("eval_"): value for name, value in metrics.items() if name.startswith("eval_")},
        "tokens_per_step": metrics.get("eval_tokens_per_step"),
        "train_loss": recent_loss(trainer.state.log_history),
        "hours": round(hours, 4),
    }
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if trainer.is_world_process_zero():
        if joint and lora_rank:
            merge_lora(model)
        save_whole(model, tokenizer, output, include_base=joint, state_dict=gathered)
        model.name_or_path = str(output)  # a push finds there what belongs to these heads
        write_whole(output / SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")
        plot_training(trainer.state.log_history, output / PICTURE)
    return Trained(model, summary)


def sort_options(family: str, options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options by name into config fields of a family and training arguments.

    Raises:
        ValueError: an unknown family, or a name that is neither.
    """
    recipe(family)
    config_fields = {field.name for field in dataclasses.fields(CLASSES[family].config_class)}
    own = config_fields - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    known = {field.name for field in dataclasses.fields(DraftHeadTrainingArguments)}
    if unknown := sorted(set(options) - own - known):
        raise ValueError(
            f"{unknown[0]!r} is neither a config field of {family} ({', '.join(sorted(own))}) nor a training argument: "
            "check its spelling."
        )
    fields = {name: value for name, value in options.items() if name in own}
    return fields, {name: value for name, value in options.items() if name not in own}


def own_prompts(rows: Sequence[dict[str, Any]], count: int, longest: int) -> list[Tensor]:
    """What comes before the first answer of some rows; of a row that is all text, its first quarter.

    Args:
        rows: with `input_ids` and `labels`.
        count: of prompts, at most.
        longest: tokens of a prompt; longer ones are left out.
    """
    prompts = []
    for row in rows:
        ids, labels = torch.as_tensor(row["input_ids"]), torch.as_tensor(row["labels"])
        answered = (labels != IGNORED).nonzero().flatten()
        first = int(answered[0]) if len(answered) else 0
        first = first or len(ids) // 4
        if 0 < first <= longest:
            prompts.append(ids[:first])
    return prompts[:count]


def _model(
    base: str | os.PathLike, family: str, heads: str | os.PathLike | None, fields: dict[str, Any], load: dict[str, Any]
) -> DraftHeadPreTrainedModel:
    """Fresh heads, or trained ones, in training mode on their base."""
    if heads is None:
        return fresh_heads(family, base, **fields, **load)
    if fields:
        raise ValueError(f"{', '.join(sorted(fields))} cannot be chosen for trained heads: they are as they are.")
    trained: Any = CLASSES[family].from_pretrained(heads, base_model=base, **load)
    if (found := trained.config.family) != family:
        raise ValueError(
            f"the heads in {str(heads)!r} are {found!r} heads, not {family!r} ones: give --family {found}."
        )
    return trained


def _read(
    model: DraftHeadPreTrainedModel,
    tokenizer: Any,
    data: str | os.PathLike | Dataset | IterableDataset,
    max_length: int | None,
    packing: bool,
    streaming: bool,
    split: str,
    held_out_rows: int,
    seed: int,
) -> PreparedData:
    """What `data` names or holds, as tokens."""
    if isinstance(data, (Dataset, IterableDataset)):
        raw, source = uniform(data), getattr(data.info, "dataset_name", None) or f"a {type(data).__name__}"
        if streaming and isinstance(raw, Dataset):
            raw = raw.to_iterable_dataset()
    else:
        source = os.fspath(data)
        raw = read_rows(source, streaming=streaming, split=split)
    first = list(islice(iter(raw), held_out_rows + 1))
    if len(first) <= held_out_rows:
        raise ValueError(
            f"the data holds {len(first)} rows, of which {held_out_rows} are to be held out: give more data, or hold "
            "out fewer with --held-out-rows."
        )
    limits: dict[str, Any] = {"max_length": max_length or _most_tokens(model), "positions": _positions(model)}
    chosen = Dataset.from_list(first[:held_out_rows], features=raw.features)
    held_out, _ = tokenize_rows(chosen, tokenizer, **limits)
    rows, report = tokenize_rows(raw.skip(held_out_rows), tokenizer, packing=packing, **limits)
    if isinstance(rows, IterableDataset):
        rows = rows.shuffle(seed=seed, buffer_size=SHUFFLED)
        return PreparedData(rows, held_out, source, stream_hash(source, first), report)
    return PreparedData(rows, held_out, source, data_hash(raw), report)


def _refuse_contradictions(joint: bool, lora_rank: int, load: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse what would be found out only when the training is over."""
    if joint and load.get("quantization_config") is not None:
        raise ValueError("a quantized base cannot be trained with its heads: drop --joint, or the quantization.")
    if joint and _sharded():
        raise ValueError("a base that is sharded (FSDP) cannot be trained along with its heads here: drop --joint.")
    for name in ("base_weight", "base_objective"):
        if name in arguments and not joint:
            raise ValueError(f"{name} is for a base that is trained along with its heads: add --joint, or drop it.")
    if arguments.get("base_objective") == "itself" and not lora_rank:
        raise ValueError("a base learns from itself through adapters: give a --lora-rank above 0.")


def _sharded() -> bool:
    """Whether `accelerate launch` shards the model over the processes (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")


def _refuse_short_rows(model: DraftHeadPreTrainedModel, rows: Any) -> None:
    """Refuse data in which the last head never has anything to guess."""
    ahead = model.config.num_draft_heads + 1
    longest = max(len(rows[row]["input_ids"]) for row in range(len(rows)))
    if longest <= ahead:
        raise ValueError(
            f"rows of {longest} tokens have no label {ahead} tokens ahead: give longer rows, or train fewer heads."
        )


def _look(
    model: DraftHeadPreTrainedModel, held_out: Any, collator: PaddingCollator, batch_size: int
) -> Likeness | None:
    """Warn about data that the base would not have written."""

    def batches() -> Iterator[dict[str, Tensor]]:
        for first in range(0, len(held_out), batch_size):
            yield collator([held_out[row] for row in range(first, min(first + batch_size, len(held_out)))])

    looks = likeness(model.base.eval(), batches())
    if looks is not None and (warning := looks.warning()):
        logger.warning(warning)
    return looks


def _most_tokens(model: DraftHeadPreTrainedModel) -> int:
    """Of a row, where nobody says otherwise."""
    return min(USUAL_LENGTH, _positions(model))


def _positions(model: DraftHeadPreTrainedModel) -> int:
    return getattr(model.base.config.get_text_config(), "max_position_embeddings", None) or 2048


def _own_fields(model: DraftHeadPreTrainedModel) -> dict[str, Any]:
    """The family's fields of a config that are plain values."""
    own = {field.name for field in dataclasses.fields(model.config)}
    shared = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    about_the_base = {"base_config", "base_model_name_or_path", "base_model_revision", "base_included"}
    values = {name: getattr(model.config, name) for name in sorted(own - shared - about_the_base)}
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str, list))}


def _defaults(streaming: bool, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a training does if nobody says otherwise: evaluates and saves some ten times, logs to what is installed."""
    if streaming and "max_steps" not in arguments:
        raise ValueError("with streaming nobody knows how long an epoch is: say how many steps with --max-steps.")
    return {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "eval_strategy": "steps",
        "eval_steps": 0.1,
        "save_steps": 0.1,
        "save_total_limit": 2,
        "logging_steps": 10,
        "report_to": "tensorboard" if find_spec("tensorboard") else "none",
        # rows of a stream have many lengths: every process makes its own batches
        **({"accelerator_config": {"dispatch_batches": False}} if streaming else {}),
    }
