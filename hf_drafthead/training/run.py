"""From a base and some text to trained heads in a folder: what `hf-drafthead train` does.

fresh heads (or trained ones) -> read data -> check the data -> train -> save heads, summary, picture
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import set_seed
from transformers.trainer_utils import SchedulerType
from transformers.utils import logging

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.data.rows import without_format
from hf_drafthead.data.sources import files_of
from hf_drafthead.data.texts import one_line
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import draft_vocabulary
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
from hf_drafthead.training.own_text import (
    ASSUMED_LENGTH,
    FILE,
    OWN_CHATS,
    Bar,
    kind_of_text,
    rows_to_assume,
    write_own_text,
)
from hf_drafthead.training.trainer import DraftHeadTrainer, add_lora, merge_lora, naming_a_quantized_base
from hf_drafthead.trees.calibrate import calibrate
from hf_drafthead.trees.timing import training_advice

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.get_logger(__name__)

FORETOLD_PROMPTS = 32
EVALUATIONS = 0.1  # of the time, at most, unless it is said how often to evaluate
CALIBRATION = 0.1  # of the hours, at most, that trees are timed after the training
LORA_RANK = DraftHeadTrainingArguments.lora_rank
OF_READING = ("packing", "streaming", "split")
FEW_STEPS = 100  # in which heads learn little
# In the quick recipe: of the labels, what the tokens cover among which heads choose; and how many these are.
COVERAGE, LEAST_CHOICES, MOST_CHOICES = 0.99, 8192, 16_384
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
    data: "str | os.PathLike | Dataset | IterableDataset | PreparedData | None",
    output: str | os.PathLike,
    *,
    chats: int | None = None,
    heads: str | os.PathLike | None = None,
    fields: dict[str, Any] | None = None,
    joint: bool = False,
    resume: bool = False,
    dry_run: bool = False,
    load: dict[str, Any] | None = None,
    tell: Tell | None = None,
    bar: Bar | None = None,
    **arguments: Any,
) -> Trained:
    """Train draft heads and save them.

    Without data the base writes the text itself first, into `own.jsonl` in the output folder: questions and its answers
    to them (Magpie), or plain texts where its tokenizer has no chat template. A limit of hours is for both, half of it
    for writing.

    Args:
        base: id or path of a causal LM.
        family: a name in `modeling.families.FAMILIES`.
        data: what `read_rows` reads, or a data set with such rows, whose first ones are held out (an `IterableDataset`
            is streamed); or rows that are ready; None: text that the base writes.
        chats: to write where there is no data; by default 2,000, or as many as half of the hours is enough for.
        output: folder for checkpoints, and for the heads at the end; with `joint` for the base as well.
        heads: train these trained heads further instead of fresh ones.
        fields: config fields of fresh heads (`num_draft_heads`, ...).
        joint: train the base too (Medusa-2).
        resume: resume from the last complete checkpoint in `output`.
        dry_run: stop before the training; the summary is the estimate, and nothing is left in `output`. Without data
            nothing is written: rows of 256 tokens are assumed.
        load: arguments for loading base or heads (`dtype`, `device_map`, `quantization_config`, ...).
        tell: called with a report on the data, an estimate of what the training will take and remarks on it, before it
            begins, in one process only; by default they are logged.
        bar: shows how much of the text is written, see `own_text`.
        arguments: of `DraftHeadTrainingArguments`: how the data is read, and what is different from the recipe.

    Raises:
        OSError, ValueError: base, data or arguments that do not fit.
        FloatingPointError: the loss became NaN or infinite.
    """
    output = Path(output)
    if not dry_run:
        record.check_output(output, resume)
    if isinstance(data, (str, os.PathLike)) and Path(data).resolve() in output.resolve().parents:
        raise ValueError(f"the output {str(output)!r} lies in the folder of the data: give a folder outside of it.")
    if chats is not None and data is not None:
        raise ValueError("a number of chats (--synthesize) is for a training without data: leave one of them out.")
    # the Trainer makes its folder
    with tempfile.TemporaryDirectory() if dry_run else nullcontext(output) as place:
        settings = _settings(family, data, Path(place), joint, load or {}, arguments)
        say = (tell or logger.warning) if settings.process_index == 0 else lambda line: None
        heads_source = HeadsToTrain(str(base), family, heads, fields or {}, load or {}, joint)
        training = _prepare(heads_source, data, chats, settings, arguments, resume, dry_run, say, bar)
        if dry_run:
            return Trained(training.model, {"forecast": training.expected and vars(training.expected)})
        return _run(training, resume, say, bar)


@dataclasses.dataclass(frozen=True)
class HeadsToTrain:
    """Which heads are trained: see the arguments of `train_heads`."""

    base: str
    family: str
    heads: str | os.PathLike | None
    fields: dict[str, Any]
    load: dict[str, Any]
    joint: bool


@dataclasses.dataclass(frozen=True)
class Training:
    """A training that is ready to begin."""

    model: DraftHeadPreTrainedModel
    tokenizer: Any
    data: PreparedData
    trainer: DraftHeadTrainer
    about: dict[str, Any]
    expected: Forecast | None


def _prepare(
    source: HeadsToTrain,
    data: Any,
    chats: int | None,
    settings: DraftHeadTrainingArguments,
    arguments: dict[str, Any],
    resume: bool,
    dry_run: bool,
    say: Tell,
    bar: Bar | None,
) -> Training:
    """Load base and heads once, read the data or let the base write it, and estimate what the training will take."""
    output, first = Path(settings.output_dir), settings.process_index == 0
    set_seed(settings.seed)
    kind = None
    if data is None:  # what its tokenizer says is asked before anything large is loaded
        try:
            kind = kind_of_text(_tokenizer(source, settings))
        except OSError as error:
            raise OSError(
                f"no tokenizer could be read at {source.base!r} ({one_line(error)}): give the folder or id of the base."
            ) from error
    model = _model(source, settings)
    tokenizer = _tokenizer(source, settings)
    clock = _clock(settings, arguments)
    if resume:
        clock.resume()
    if kind is not None and dry_run:
        count = chats or OWN_CHATS
        say(f"the base would write {kind} first: {count:,} rows of {ASSUMED_LENGTH} tokens are assumed")
        data = rows_to_assume(model, count)
    elif kind is not None:
        data = output / FILE
        if not resume:
            _place(model, settings)
            writer: Any = model.base if source.heads is None else model
            training = model.training
            seconds = write_own_text(writer, tokenizer, data, chats, settings.hours, settings.max_length, say, bar)
            model.train(training)
            clock.preceded_by(agreed(seconds, settings), first)
            set_seed(settings.seed)
        if clock.limit is not None and clock.limit <= 0:
            raise ValueError(f"writing took all of the hours: give more of them, or the text as data (--data {data}).")
    prepared = _prepared(model, tokenizer, data, settings, say)
    about: dict[str, Any] = {"family": source.family, "base": source.base, "joint": source.joint}
    if source.heads is None:
        fewer = (settings.recipe == "quick" and source.family != "draft-model") or model.config.wants_fewer_tokens
        if fewer and "draft_vocab_size" not in source.fields:
            choose_among_fewer(model, prepared.rows, say)
        about["draft_vocab_coverage"] = examples.choose_vocabulary(model, prepared.rows)
    choices = draft_vocabulary(model.base, model.drafter)
    if choices < (least := DraftTree.from_name(DEFAULT_TREE).max_rank + 1):
        raise ValueError(f"the heads choose among {choices} tokens: give a draft_vocab_size of at least {least}.")
    about["likeness"] = _likeness(model, prepared, settings) if first and not (kind and dry_run) else None
    if first and not dry_run:
        record.check_run(output, _identity(model, tokenizer, prepared, about, settings), resume)
    trainer = _trainer(model, prepared, settings, source.joint, arguments, clock)
    expected = _expected(trainer, prepared, say) if first else None
    settings.num_train_epochs = agreed(settings.num_train_epochs, settings)
    return Training(model, tokenizer, prepared, trainer, about, expected)


def _tokenizer(source: HeadsToTrain, settings: DraftHeadTrainingArguments) -> Any:
    """The base's, with the chat template that was given."""
    tokenizer = load_tokenizer(source.base, source.load.get("gguf_file"))
    tokenizer.chat_template = settings.chat_template or tokenizer.chat_template
    return tokenizer


def _run(training: Training, resume: bool, say: Tell, bar: Bar | None) -> Trained:
    """Train, evaluate and save."""
    trainer, expected = training.trainer, training.expected
    checkpoint = record.whole_checkpoint(Path(trainer.args.output_dir)) if resume else None
    if checkpoint is not None and expected is not None:
        say(f"resuming from step {checkpoint.name.rpartition('-')[2]} of {expected.steps}")
    trainer.resume(checkpoint)
    summary = {**training.about, **_summary(trainer, training.data)}
    _save(trainer, training.tokenizer, training.data, summary, say, bar)
    return Trained(training.model, summary, [*trainer.state.log_history])


def _settings(
    family: str, data: Any, output: Path, joint: bool, load: dict[str, Any], arguments: dict[str, Any]
) -> DraftHeadTrainingArguments:
    """The training arguments: the family's recipe, defaults, and what was asked for."""
    _refuse_contradictions(data, joint, load, arguments)
    if _sharded():  # every process runs the base before it is sharded
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if not (data is None or isinstance(data, (str, os.PathLike, PreparedData)) or hasattr(data, "__len__")):
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


def _model(source: HeadsToTrain, settings: DraftHeadTrainingArguments) -> Any:
    """Fresh heads, or trained ones, on their base."""
    family = find_family(source.family)
    if source.heads is None:
        unshared = getattr(family.model_class.config_class, "share_lm_head", None) is False
        paper = {"share_lm_head": False} if settings.recipe == "paper" and unshared else {}
        return fresh_heads(source.family, source.base, **{**paper, **source.fields}, **source.load)
    if source.fields:
        raise ValueError(
            f"{', '.join(sorted(source.fields))} cannot be set for trained heads, whose config is fixed: leave them "
            "out, or train fresh heads."
        )
    model: Any = family.model_class.from_pretrained(source.heads, base_model=source.base, **source.load)
    if (saved := model.config.family) != source.family:
        raise ValueError(
            f"the heads in {str(source.heads)!r} are {saved!r} heads, not {source.family!r} ones: give --family "
            f"{saved}."
        )
    return model


def choose_among_fewer(model: DraftHeadPreTrainedModel, rows: Any, tell: Tell) -> None:
    """Let fresh heads on a base of many tokens choose among those that cover the text."""
    known_tokens = model.config.known_tokens or 0
    if known_tokens <= 2 * MOST_CHOICES:
        return
    size = min(max(examples.tokens_to_cover(rows, known_tokens, COVERAGE), LEAST_CHOICES), MOST_CHOICES)
    if (model.config.draft_vocab_size or known_tokens) <= size:
        return
    _rebuild(model, draft_vocab_size=size)
    tell(
        f"the heads choose among the {size:,} tokens that the text holds most, of the base's {known_tokens:,} "
        f"(draft_vocab_size={known_tokens} for all of them)."
    )


def _rebuild(model: Any, **fields: Any) -> None:
    """Fresh heads with other config fields in the place of fresh heads; those that were loaded keep their weights."""
    training, before = model.training, model.drafter
    for name, value in fields.items():
        setattr(model.config, name, value)
    model.drafter = model.drafter_class(model.config)
    model.attach(model.base)
    model.drafter.copy_from_base()
    if before.loaded:
        shapes = {name: tensor.shape for name, tensor in model.drafter.state_dict().items()}
        weights = {name: tensor for name, tensor in before.state_dict().items() if shapes.get(name) == tensor.shape}
        model.drafter.load_state_dict(weights, strict=False)
        model.drafter.loaded = True
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
    _place(model, settings)
    return examples.likeness(model.base.eval(), data.held_out, settings.per_device_eval_batch_size)


def _place(model: DraftHeadPreTrainedModel, settings: DraftHeadTrainingArguments) -> None:
    """Put a model where it is trained, as the Trainer does later."""
    is_placed = hasattr(model.base, "hf_quantizer") or hasattr(model.base, "hf_device_map")
    if not (is_placed or _sharded()):
        model.to(settings.device)


def _clock(settings: DraftHeadTrainingArguments, arguments: dict[str, Any]) -> Clock:
    chosen = {"eval_strategy", "eval_steps", "load_best_model_at_end"} & set(arguments)
    return Clock(Path(settings.output_dir) / "clock.json", settings.hours, None if chosen else EVALUATIONS)


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
    clock: Clock,
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
    trainer = DraftHeadTrainer(
        model,
        settings,
        train_dataset=data.rows,
        eval_dataset=data.held_out,
        data_collator=examples.collate,
        expected_tokens_per_step=expected_tokens_per_step,
        clock=clock,
    )
    show_progress(trainer)
    return trainer


def _expected(trainer: DraftHeadTrainer, data: PreparedData, tell: Tell) -> Forecast:
    """What the training will take, told with remarks on it."""
    expected = forecast(trainer, data)
    advice = training_advice(trainer.model.base)
    for line in (str(expected), *remarks(expected, trainer.args), *([advice] if advice else [])):
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


def _save(
    trainer: DraftHeadTrainer, tokenizer: Any, data: PreparedData, summary: dict[str, Any], say: Tell, bar: Bar | None
) -> None:
    """Save heads, summary and picture, and the fastest tree if it is to be measured."""
    model, settings = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    output, joint = Path(settings.output_dir), summary["joint"]
    gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
    if not trainer.is_world_process_zero():
        return
    if joint and settings.lora_rank:
        merge_lora(model)
    with naming_a_quantized_base(model):
        record.save_whole(model, tokenizer, output, state_dict=gathered)
    model.name_or_path = str(output)  # a push finds tokenizer and summary there
    record.write_whole(output / record.SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")
    if find_spec("matplotlib"):
        record.plot_training(trainer.state.log_history, output / PICTURE)
    if not settings.calibrate_tree:
        return
    say(f"the heads are saved in {output}; now trees are timed, and the fastest is stored with them (Ctrl-C ends that)")
    try:
        calibrate(
            model,
            _prompts(model, data, settings),
            new_tokens=settings.answer_tokens,
            temperature=settings.answer_temperature,
            minutes=60 * CALIBRATION * settings.hours if settings.hours else None,
            bar=bar,
            notify=say,
        )
    except KeyboardInterrupt:
        logger.warning("the calibration was interrupted: the fastest tree so far is saved with the heads, if any.")
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
