"""From a base and some text to trained heads in a folder: what `hf-drafthead train` does.

fresh heads (or trained ones) -> read data -> check the data -> train -> save heads, summary
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
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.data.rows import without_format
from hf_drafthead.data.sources import files_of
from hf_drafthead.generation.settings import DEFAULT_TREE
from hf_drafthead.generation.state import guessed_among
from hf_drafthead.generation.tree import DraftTree
from hf_drafthead.modeling.adapters import merge_adapters
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.base_model import last_layer, load_tokenizer
from hf_drafthead.modeling.families import find_family, fresh_heads
from hf_drafthead.modeling.loading import read_heads_config
from hf_drafthead.training import distill, examples, record
from hf_drafthead.training.arguments import JOINT, OBJECTIVE_WEIGHTS, QUICK_WIDTH, DraftHeadTrainingArguments
from hf_drafthead.training.callbacks import Clock, agreed, duration, show_progress
from hf_drafthead.training.examples import PreparedData
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from hf_drafthead.training.forecast import Forecast, forecast
from hf_drafthead.training.trainer import DraftHeadTrainer, add_lora, naming_a_quantized_base
from hf_drafthead.trees.calibrate import Bar, calibrate, no_bar

if TYPE_CHECKING:
    from datasets import Dataset

logger = logging.get_logger(__name__)

FORETOLD_PROMPTS = 32
EVALUATIONS = 0.1  # of the time, at most, unless it is said how often to evaluate
LORA_RANK = DraftHeadTrainingArguments.lora_rank
FEW_STEPS = 100  # in which heads learn little
# In the quick recipe: of the labels, what the tokens cover among which heads choose; and how many these are.
COVERAGE, LEAST_CHOICES, MOST_CHOICES = 0.99, 8192, 16_384
OBJECTIVE = (*OBJECTIVE_WEIGHTS, "feature_noise", "head_decay")
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
    data: "str | os.PathLike | Dataset | PreparedData | None",
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
    bar: Bar = no_bar,
    **arguments: Any,
) -> Trained:
    """Train draft heads and save them.

    Without data the base writes the text itself first, into `own.jsonl` in the output folder: questions and its answers
    to them (Magpie), or plain texts where its tokenizer has no chat template. A limit of hours is for both, half of it
    for writing.

    Args:
        base: id or path of a causal LM.
        family: a name in `modeling.families.FAMILIES`.
        data: what `read_rows` reads, or a data set with such rows, of which the first are held out; or rows that are
            ready; None: text that the base writes.
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
        bar: shows how much of the text is written, see `write_own_text`.
        arguments: of `DraftHeadTrainingArguments`: how the data is read, and what is different from the recipe.

    Raises:
        OSError, ValueError: base, data or arguments that do not fit.
        FloatingPointError: the loss became NaN or infinite.
    """
    output = Path(output)
    if not dry_run:
        record.check_output(output, resume)
    if isinstance(data, (str, os.PathLike)) and data and Path(data).resolve() in output.resolve().parents:
        raise ValueError(f"the output {str(output)!r} lies in the folder of the data: give a folder outside of it.")
    if chats is not None and data is not None:
        raise ValueError("a number of chats (--synthesize) is for a training without data: leave one of them out.")
    # the Trainer makes its folder
    with tempfile.TemporaryDirectory() if dry_run else nullcontext(output) as place:
        load, fields = load or {}, fields or {}
        settings = _settings(family, data, Path(place), joint, load, arguments)
        say = (tell or logger.warning) if settings.process_index == 0 else lambda line: None
        run = _Run(
            str(base), family, data, settings, arguments, say, bar, resume, dry_run, chats, heads, fields, joint, load
        )
        run.prepare()
        return Trained(run.model, {"forecast": run.expected and vars(run.expected)}) if dry_run else run.train()


@dataclasses.dataclass
class _Run:
    """One training: what `train_heads` was asked for. Call `prepare`, and then `train`."""

    base: str
    family: str
    data: Any  # from `prepare` on the rows that are ready
    settings: DraftHeadTrainingArguments
    arguments: dict[str, Any]
    say: Tell
    bar: Bar
    resume: bool
    dry_run: bool
    chats: int | None
    heads: str | os.PathLike | None
    fields: dict[str, Any]
    joint: bool
    load: dict[str, Any]
    expected: Forecast | None = None

    def prepare(self) -> None:
        """Load base and heads, read the data or let the base write it, and estimate what the training will take."""
        settings, first = self.settings, self.settings.process_index == 0
        self.output = Path(settings.output_dir)
        set_seed(settings.seed)
        # what its tokenizer says is asked before anything large is loaded
        kind = distill.kind_of_text(self._tokenizer()) if self.data is None else None
        self.model, self.tokenizer = self._loaded(), self._tokenizer()
        self.clock = Clock(self.output / "clock.json", settings.hours)
        if not self.resume:
            self.clock.before = 0.0
        if kind is not None:
            self.data = self._own_text(kind)
        self.data = self._rows()
        self.about: dict[str, Any] = {"family": self.family, "base": self.base, "joint": self.joint}
        if self.heads is None:
            few = (settings.recipe == "quick" and self.family != "draft-model") or self.model.config.wants_fewer_tokens
            few = few and "draft_vocab_size" not in self.fields
            self.about["draft_vocab_coverage"] = choose_tokens(self.model, self.data.rows, few, self.say)
        choices = guessed_among(self.model)[1]
        if choices < (least := DraftTree.from_name(DEFAULT_TREE).max_rank + 1):
            raise ValueError(f"the heads choose among {choices} tokens: give a draft_vocab_size of at least {least}.")
        if first and not self.dry_run:
            self.output.mkdir(parents=True, exist_ok=True)
            record.keep_settings(self.output, self.output / record.RUN, self._identity(), self.resume)
        self.trainer = self._trainer()
        if first:
            self.expected = self._expected()
        settings.num_train_epochs = agreed(settings.num_train_epochs, settings)
        settings.eval_steps = settings.eval_steps and agreed(settings.eval_steps, settings)

    def train(self) -> Trained:
        checkpoint = record.whole_checkpoint(self.output) if self.resume else None
        if checkpoint is not None and self.expected is not None:
            self.say(f"resuming from step {checkpoint.name.rpartition('-')[2]} of {self.expected.steps}")
        self.trainer.resume(checkpoint)
        summary = {**self.about, **self._summary()}
        self._save(summary)
        return Trained(self.model, summary, [*self.trainer.state.log_history])

    def _tokenizer(self) -> Any:
        tokenizer = load_tokenizer(self.base, self.load.get("gguf_file"))
        tokenizer.chat_template = self.settings.chat_template or tokenizer.chat_template
        return tokenizer

    def _loaded(self) -> Any:
        family = find_family(self.family)
        if self.heads is None:
            unshared = getattr(family.model_class.config_class, "share_lm_head", None) is False
            paper = {"share_lm_head": False} if self.settings.recipe == "paper" and unshared else {}
            return fresh_heads(self.family, self.base, **{**paper, **self.fields}, **self.load)
        if self.fields:
            names = ", ".join(sorted(self.fields))
            raise ValueError(f"{names} cannot be set for trained heads: leave them out, or train fresh heads.")
        stored = read_heads_config(str(self.heads))
        commit = stored.base_model_revision if self.base == stored.base_model_name_or_path else None
        load = {"base_model": self.base, "base_revision": commit, **self.load}
        model: Any = family.model_class.from_pretrained(self.heads, **load)
        if (saved := model.config.family) != self.family:
            what = f"the heads in {str(self.heads)!r} are {saved!r} heads, not {self.family!r} ones"
            raise ValueError(f"{what}: give --family {saved}.")
        model.generation_config.__dict__.pop("calibration", None)  # which measured the heads as they were
        return model

    def _place(self) -> None:
        """Put the model where it is trained, as the Trainer does later."""
        is_placed = hasattr(self.model.base, "hf_quantizer") or hasattr(self.model.base, "hf_device_map")
        if not (is_placed or _sharded()):
            self.model.to(self.settings.device)

    def _own_text(self, kind: str) -> Any:
        """The file of what the base writes, or rows like that where nothing is to be written."""
        settings, model, file = self.settings, self.model, self.output / distill.FILE
        if settings.world_size > 1:
            raise ValueError("several processes cannot write a text: write it first with distill, and give it as data.")
        if self.dry_run:
            count = self.chats or distill.OWN_CHATS
            length = distill.ASSUMED_LENGTH
            self.say(f"the base would write {kind} first: {count:,} rows of {length} tokens are assumed")
            return distill.rows_to_assume(model, count)
        if not self.resume:
            self._place()
            writer: Any = model.base if self.heads is None else model
            training, limits = model.training, (self.chats, settings.hours, settings.max_length)
            seconds = distill.write_own_text(writer, self.tokenizer, file, *limits, self.say, self.bar)
            model.train(training)
            self.clock.preceded_by(seconds)
            set_seed(settings.seed)
        if self.clock.limit is not None and self.clock.limit <= 0:
            raise ValueError(f"writing took all of the hours: give more of them, or the text as data (--data {file}).")
        return file

    def _rows(self) -> PreparedData:
        settings, data = self.settings, self.data
        settings.max_length = settings.max_length or min(examples.USUAL_LENGTH, examples.longest_text_of(self.model))
        if not isinstance(data, PreparedData):
            from hf_drafthead.training.data import read_data  # which needs `datasets`

            data = read_data(self.model, self.tokenizer, data, settings)
            self.say(str(data.report))
        data = dataclasses.replace(data, rows=without_format(data.rows), held_out=without_format(data.held_out))
        if data.report is None:  # rows that others made
            for rows in (data.rows, data.held_out):
                examples.check_rows(rows, self.model.config.get_text_config().vocab_size)
        ahead = self.model.config.num_draft_heads + 1
        longest = max((len(data.held_out[row]["input_ids"]) for row in range(len(data.held_out))), default=0)
        if longest <= ahead:
            what = f"rows of {longest} tokens have no label {ahead} tokens ahead"
            raise ValueError(f"{what}: give longer rows, or train fewer heads.")
        return data

    def _identity(self) -> dict[str, Any]:
        """What must stay the same when a training is resumed."""
        config = self.model.config
        values = {name: getattr(config, name) for name in sorted(config.heads_fields())}
        return {
            "family": self.family,
            "config": {name: value for name, value in values.items() if isinstance(value, (int, float, str, list))},
            "base": record.base_fingerprint(self.model.base),
            "data": self.data.sha256,
            "joint": self.joint,
            **{name: getattr(self.settings, name) for name in ("max_length", "seed")},
            "optim": OptimizerNames(self.settings.optim).value,
            "lora_rank": self.settings.lora_rank if self.joint else None,
            "held_out_rows": len(self.data.held_out),
            "chat_template": hashlib.sha256(repr(self.tokenizer.chat_template).encode()).hexdigest(),
        }

    def _prompts(self) -> list[Tensor]:
        """Of the held-out rows, for the base's own answers."""
        longest = examples.longest_text_of(self.model) - self.settings.answer_tokens
        return examples.own_prompts(self.data.held_out, FORETOLD_PROMPTS, longest)

    def _trainer(self) -> DraftHeadTrainer:
        model, settings, foretold = self.model, self.settings, None
        if settings.recipe == "quick" and "learning_rate" not in self.arguments:
            settings.learning_rate *= min(1.0, (QUICK_WIDTH / model.config.get_text_config().hidden_size) ** 0.5)
        if self.joint and settings.lora_rank:
            add_lora(model, settings.lora_rank)
        if prompts := self._prompts():
            size = 8 if settings.device.type == "cpu" else len(prompts)
            how: dict[str, Any] = {"base_changes": self.joint, "temperature": settings.answer_temperature}
            foretold = ExpectedTokensPerStep(prompts, settings.answer_tokens, batch_size=size, **how)
        data: dict[str, Any] = {"train_dataset": self.data.rows, "eval_dataset": self.data.held_out}
        data |= {"data_collator": examples.collate, "expected_tokens_per_step": foretold}
        trainer = DraftHeadTrainer(model, settings, clock=self.clock, **data)
        show_progress(trainer)
        return trainer

    def _expected(self) -> Forecast:
        """What the training will take, told with remarks on it."""
        chosen = {"eval_strategy", "eval_steps", "load_best_model_at_end"} & set(self.arguments)
        expected = forecast(self.trainer, self.data, None if chosen else EVALUATIONS)
        for line in (str(expected), *remarks(expected, self.settings)):
            self.say(line)
        return expected

    def _summary(self) -> dict[str, Any]:
        """What `training_summary.json` says of the training, after a last evaluation if one is missing."""
        settings, state, model = self.settings, self.trainer.state, self.model
        hours = self.clock.hours
        evaluated = [entry for entry in state.log_history if "eval_loss" in entry]
        best = settings.load_best_model_at_end and state.best_model_checkpoint
        step = int(best.rpartition("-")[2]) if best else state.global_step  # of the heads as they are now
        metrics = next((entry for entry in reversed(evaluated) if entry["step"] == step), None)
        metrics = metrics or self.trainer.evaluate()
        model.eval()
        model.drafter.to(last_layer(model.base)[1])  # in the type that they are loaded in
        same = ("seed", "recipe", "learning_rate", "weight_decay", "max_length", "answer_temperature")
        return {
            **record.provenance(),
            "base_revision": model.config.base_model_revision,
            "data": self.data.source,
            "data_sha256": self.data.sha256,
            "data_report": self.data.report and vars(self.data.report),
            **{name: getattr(settings, name) for name in same},
            "steps": state.global_step,
            "best_step": step if best else None,
            "epochs": round(state.epoch or 0.0, 3),
            "batch_size": settings.train_batch_size * settings.gradient_accumulation_steps * settings.world_size,
            "objective": {name: getattr(settings, name) for name in OBJECTIVE},
            "schedule": SchedulerType(settings.lr_scheduler_type).value,
            "warmup": settings.warmup_steps,
            "dtype": str(model.base.dtype).removeprefix("torch."),
            "lora_rank": settings.lora_rank if settings.base_weight else None,
            "held_out": {name.removeprefix("eval_"): metrics[name] for name in metrics if name.startswith("eval_")},
            "tokens_per_step": metrics.get("eval_tokens_per_step"),
            "train_loss": record.recent_loss(state.log_history),
            "hours": round(hours, 4),
        }

    def _save(self, summary: dict[str, Any]) -> None:
        trainer, model, settings, output = self.trainer, self.model, self.settings, self.output
        gathered = trainer.accelerator.get_state_dict(trainer.model_wrapped) if trainer.is_fsdp_enabled else None
        if not trainer.is_world_process_zero():
            return
        if self.joint and settings.lora_rank:
            merge_adapters(model.base)  # exact then refers to the merged base
        with naming_a_quantized_base(model):
            record.save_whole(model, self.tokenizer, output, state_dict=gathered)
        model.name_or_path = str(output)  # a push finds tokenizer and summary there
        record.write_whole(output / record.SUMMARY, json.dumps(summary, indent=2, default=str) + "\n")
        if not settings.calibrate_tree:
            return
        saved = f"the heads are saved in {output}"
        self.say(f"{saved}; now trees are timed, and the fastest is stored with them (Ctrl-C ends that)")
        how: dict[str, Any] = {"new_tokens": settings.answer_tokens, "temperature": settings.answer_temperature}
        try:
            calibrate(model, self._prompts(), bar=self.bar, **how)
        except KeyboardInterrupt:
            logger.warning("the calibration was interrupted: no tree is stored with the heads.")
        except (ValueError, Unsupported) as reason:
            logger.warning(f"no tree was calibrated: {reason}")
        else:
            model.generation_config.save_pretrained(output)


def _settings(
    family: str, data: Any, output: Path, joint: bool, load: dict[str, Any], arguments: dict[str, Any]
) -> DraftHeadTrainingArguments:
    """The training arguments: the family's recipe, defaults, and what was asked for."""
    _refuse_contradictions(data, joint, load, arguments)
    if _sharded():  # every process runs the base before it is sharded
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
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
    together = {**JOINT, **find_family(family).joint_recipe} if joint else {}
    return DraftHeadTrainingArguments.for_family(family, str(output), **{**together, **defaults, **arguments})


def choose_tokens(model: DraftHeadPreTrainedModel, rows: Any, fewer: bool, tell: Tell) -> float | None:
    """Let fresh heads choose among the tokens that the text holds most: as many as their config says, or with `fewer`,
    on a base of many tokens, as cover the text; returns their share of all labels, None where they have all tokens."""
    known_tokens = model.config.known_tokens or 0
    size, fewer = model.config.draft_vocab_size or known_tokens, fewer and known_tokens > 2 * MOST_CHOICES
    if size >= known_tokens and not fewer:
        return None
    counts = examples.label_frequencies(rows, known_tokens)
    cumulated = counts.sort(descending=True).values.cumsum(0)
    covering = min(max(int((cumulated < COVERAGE * cumulated[-1]).sum()) + 1, LEAST_CHOICES), MOST_CHOICES)
    if fewer and covering < size:
        size = covering
        _rebuild(model, size)
        tell(
            f"the heads choose among the {size:,} tokens that the text holds most, of the base's {known_tokens:,} "
            f"(draft_vocab_size={known_tokens} for all of them)."
        )
    tokens, share = examples.frequent_tokens(counts, size)
    model.drafter.choose_vocabulary(tokens.sort().values)
    return share


def _rebuild(model: Any, draft_vocab_size: int) -> None:
    """Fresh heads of another vocabulary in the place of fresh heads; those that were loaded keep their weights."""
    training, before = model.training, model.drafter
    model.config.draft_vocab_size = draft_vocab_size
    model.drafter = model.drafter_class(model.config)
    model.attach(model.base)
    model.drafter.copy_from_base()
    if before.loaded:
        shapes = {name: tensor.shape for name, tensor in model.drafter.state_dict().items()}
        weights = {name: tensor for name, tensor in before.state_dict().items() if shapes.get(name) == tensor.shape}
        model.drafter.load_state_dict(weights, strict=False)
        model.drafter.loaded = True
    model.drafter.train(training)


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


def _refuse_contradictions(data: Any, joint: bool, load: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse combinations that would fail only at the end of the training."""
    if joint and load.get("quantization_config") is not None:
        raise ValueError("a quantized base cannot be trained with its heads: drop --joint, or the quantization.")
    if joint and _sharded():
        raise ValueError("a base that is sharded (FSDP) cannot be trained along with its heads here: drop --joint.")
    if "base_weight" in arguments and not joint:
        raise ValueError("base_weight is for a base that is trained along with its heads: add --joint, or drop it.")
    if not joint and arguments.get("lora_rank", LORA_RANK) != LORA_RANK:
        raise ValueError("lora_rank is for a base that is trained along with its heads: add --joint, or drop it.")
    if "output_dir" in arguments:
        raise ValueError("output_dir is the folder of the heads: give it as output (--output).")
    if arguments.get("split", "train") != "train":
        if isinstance(data, PreparedData) or isinstance(data, (str, os.PathLike)) and files_of(data):
            raise ValueError(f"split is {arguments['split']!r}, but the data has no splits: leave --split out.")


def _sharded() -> bool:
    """Whether `accelerate launch` shards the model over the processes (FSDP)."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true")
