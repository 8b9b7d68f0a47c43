"""The Hugging Face Trainer for draft heads: the base is run once per batch, every head learns from it.

Shapes: B rows, T positions, K heads.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerState
from transformers.modeling_outputs import CausalLMOutput
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.modeling.adapters import add_adapter
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.families import find_recipe
from hf_drafthead.training.arguments import CHECKPOINTING, DraftHeadTrainingArguments
from hf_drafthead.training.callbacks import CheckGradients, Clock
from hf_drafthead.training.expected_tokens_per_step import ExpectedTokensPerStep
from hf_drafthead.training.heads_loss import RANKS, HeadsLoss
from hf_drafthead.training.record import refuse_weights_alone, writing

logger = logging.get_logger(__name__)

LOSSES = ("next_token", "teacher", "feature", "distance", "confidence")  # weights of `HeadsLoss`


class DraftHeadTrainer(Trainer):
    """Trains the drafter of a draft-head model, and with `base_weight` above 0 its base as well.

    Batches hold ``input_ids`` (B, T), ``labels`` (B, T) with ``-100`` at positions without a loss, and an
    ``attention_mask`` (B, T) if rows are padded. Every head's loss is the mean over its labels in all batches of a
    step, accumulated ones and those of other processes included. Evaluations give ``eval_head{i}_top1`` and
    ``eval_head{i}_top5``, the share of labels that are among a head's best guesses. The heads have float32 weights
    during and after training; on a base in half precision they compute in bfloat16.

    Args:
        model: a draft-head model with its base attached. Of a base that is trained too, its adapters (`add_lora`) are
            trained if there are any, else all its weights.
        args: training arguments, with the weights of the objectives.
        expected_tokens_per_step: computes ``eval_tokens_per_step``, the expected tokens per step.
        clock: by default one whose limit are the `hours`; with a limit the learning rate follows its schedule over that
            time, if the steps take longer.
        kwargs: as for ``transformers.Trainer``.

    Raises:
        ValueError: arguments that do not fit the heads.
    """

    args: DraftHeadTrainingArguments

    def __init__(
        self,
        model: DraftHeadPreTrainedModel,
        args: DraftHeadTrainingArguments,
        *,
        expected_tokens_per_step: ExpectedTokensPerStep | None = None,
        clock: Clock | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DraftHeadTrainingArguments):
            raise TypeError(f"args is a {type(args).__name__}: give DraftHeadTrainingArguments(...), or use a Trainer.")
        recomputed = any(getattr(args, name, False) for name in CHECKPOINTING)
        layers = any(hasattr(module, "gradient_checkpointing") for module in model.drafter.modules())
        if recomputed and not args.base_weight and not layers:
            what = f"{model.config.family} heads, which have no decoder layers"
            raise ValueError(f"activation checkpointing has no effect on {what}: leave gradient_checkpointing out.")
        adapters = adapter_layers(model.base)
        heads_size, base_size = model.config.own_layer.hidden_size, model.config.width
        if args.feature_weight and heads_size != base_size:
            raise ValueError(
                f"feature_weight is {args.feature_weight}, but the heads' states have size {heads_size} and the "
                f"base's hidden states {base_size}: set it to 0, they cannot be alike."
            )
        model.drafter.float().requires_grad_(True)  # small updates are lost in half precision
        if not (args.base_weight and adapters):  # with adapters, peft has already set what is trained
            model.base.requires_grad_(bool(args.base_weight))
        if args.n_gpu > 1:
            logger.warning("One process trains on one GPU: start one per GPU with `accelerate launch`.")
            args._n_gpu = 1
        # if it were sharded as one unit, the drafter would be complete inside its `forward` only, which is not used
        model._no_split_modules.discard(type(model.drafter).__name__)
        self.clock = clock or Clock(Path(args.output_dir) / "clock.json", args.hours)
        if clock is None:
            self.clock.before = 0.0  # which `train_heads` alone spends before a training
        super().__init__(model, args, **kwargs)
        self.add_callback(self.clock)
        if self.is_fsdp_enabled:  # heads are small: a checkpoint holds them in one file, as without sharding
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.model_accepts_loss_kwargs = True  # the loss is divided by the labels of the whole step
        self.expected_tokens_per_step = expected_tokens_per_step
        self.heads_loss = loss_of(model, vars(args), base=args.base_weight)
        self._counts: Any = 0
        self.add_callback(CheckGradients())

    def resume(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the start; a training that was finished is only loaded."""
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            most, epochs = self.args.max_steps, self.args.num_train_epochs
            if state.global_step >= most if most > 0 else (state.epoch or 0) >= epochs:
                self.state = state
                self._load_from_checkpoint(str(checkpoint))
                return
            refuse_weights_alone(checkpoint)
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """The loss, over the labels (1 + K,) of the step; in evaluation counts the ranks that heads gave to them."""
        # through `forward`, the only method that wrapped models have
        how = {"heads_weight": self.args.heads_weight, "count": not model.training}
        totals = num_items_in_batch if model.training else None
        loss, counts = model(training_loss=self.heads_loss, inputs=inputs, totals=totals, **how)
        if totals is not None:
            loss = loss * self.accelerator.num_processes  # whose gradients are averaged
        self._counts = self._counts + counts
        return (loss, {}) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """The batches of one step, and the number of labels of base and heads in them, over all processes."""
        batches = list(itertools.islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        model = self.accelerator.unwrap_model(self.model)
        batches = [self.heads_loss.with_anchors(model, batch) for batch in batches]
        counts = torch.stack([self.heads_loss.totals(model, batch) for batch in batches]).sum(0).to(device)
        return batches, self.accelerator.reduce(counts).clamp(min=1)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As the Trainer's, with the base's weights in groups of their own learning rate."""
        optimizer = super().create_optimizer(*args, **kwargs)
        base = {id(parameter) for parameter in self.accelerator.unwrap_model(self.model).base.parameters()}
        for group in list(optimizer.param_groups):
            of_base = [parameter for parameter in group["params"] if id(parameter) in base]
            if of_base:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in base]
                optimizer.add_param_group({**group, "params": of_base, "lr": self.args.base_learning_rate})
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """As the Trainer's, but where there is a limit of time the schedule is at its end when that is over."""
        scheduler: Any = super().create_scheduler(num_training_steps, optimizer)
        if self.clock.limit and hasattr(scheduler, "lr_lambdas"):

            def timed(steps: Any) -> Any:
                return lambda step: steps(max(step, int(self.clock.share(self.args) * num_training_steps)))

            scheduler.lr_lambdas = [timed(steps) for steps in scheduler.lr_lambdas]
        return scheduler

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the Trainer's, without a trace in the random numbers: how often it evaluates depends on the time."""
        with torch.random.fork_rng(devices=[self.args.device] if self.args.device.type == "cuda" else []):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, with the heads' accuracies and the expected tokens per step among the metrics."""
        self._counts = 0
        output = super().evaluation_loop(*args, **kwargs)
        metrics: dict[str, float | None] = dict(self._accuracies())
        prefix = kwargs.get("metric_key_prefix", "eval")
        expected = None if self.is_fsdp_enabled else self.expected_tokens_per_step  # a sharded base cannot generate
        if expected is not None:
            metrics["tokens_per_step"] = expected(self.accelerator.unwrap_model(self.model))
        output.metrics.update({f"{prefix}_{name}": value for name, value in metrics.items()})
        return output

    def _accuracies(self) -> Iterable[tuple[str, float]]:
        """Top-1 and top-5 accuracy of each head by the counts (K, RANKS + 1) of an evaluation, over all processes."""
        if isinstance(self._counts, int):
            raise ValueError("no held-out row was read: hold out as many as make a batch, or no dataloader_drop_last.")
        counts = self.accelerator.reduce(self._counts.to(self.args.device))
        for head, ranks in enumerate(counts.tolist()):
            total = max(sum(ranks), 1)
            yield f"head{head}_top1", ranks[0] / total
            yield f"head{head}_top5", sum(ranks[:RANKS]) / total

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        with naming_a_quantized_base(self.accelerator.unwrap_model(self.model)):
            super()._save(output_dir, state_dict)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with writing(self.args.output_dir):
            super()._save_checkpoint(model, trial)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """None: a checkpoint holds the heads only, so it is expected that the base's tensors are missing."""


@contextmanager
def naming_a_quantized_base(model: Any) -> Iterator[None]:
    """Save heads with the name of a base that was quantized for their training, and not with a copy of it."""
    quantizer, name = getattr(model.base, "hf_quantizer", None), model.config.base_model_name_or_path
    if quantizer is None or quantizer.pre_quantized or not name:
        yield
        return
    model.save_pretrained = functools.partial(model.save_pretrained, include_base=False, base_model=name)
    try:
        yield
    finally:
        del model.save_pretrained


def add_lora(model: DraftHeadPreTrainedModel, rank: int = 32, alpha: int = 16, dropout: float = 0.05) -> None:
    """Put adapters on all linear layers of the base but its lm_head, whose outputs are scaled by alpha / rank; the
    defaults are the published ones. A ValueError for a rank below 1, or where adapters are there already."""
    if rank < 1:
        raise ValueError(f"the rank of the adapters is {rank}: expected at least 1, or train the base without them.")
    if adapter_layers(model.base):
        raise ValueError("the base has adapters already: merge them first (merge_and_unload).")
    from peft import LoraConfig

    config = LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    add_adapter(model.base, config)


def adapter_layers(base: Any) -> list[Any]:
    """Every layer of the base that has an adapter; asked of what it can do, for PEFT need not be imported."""
    return [module for module in base.modules() if hasattr(module, "get_base_layer")]


def heads_output(
    model: DraftHeadPreTrainedModel,
    input_ids: Tensor | None,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **rest: Any,
) -> CausalLMOutput:
    """The loss of the family's recipe, of a model in training mode; the base is read without gradients.

    `input_ids`, `labels`, `attention_mask` (B, T) as for a causal LM, `position_ids` (B, T) of rows that are one
    text each. A ValueError of inputs that the heads cannot learn from, or of a base that is to be trained.
    """
    others = sorted(name for name, value in rest.items() if value is not None and not isinstance(value, (bool, int)))
    if input_ids is None or others:
        raise ValueError(f"heads learn from whole texts: give input_ids, and no {', '.join(others) or 'other inputs'}.")
    if position_ids is not None and bool((position_ids.diff(dim=-1) < 0).any()):
        advice = "turn off packing (packing=False, padding_free=False)"
        raise ValueError(f"position_ids restart within a row, which heads would read as one text: {advice}.")
    if any(parameter.requires_grad for parameter in model.base.parameters()):
        raise ValueError(
            "the base has weights or adapters that are to be trained, but labels train the heads only: freeze them "
            "(model.base.requires_grad_(False)), or train base and heads together with `hf-drafthead train --joint`."
        )
    settings = recipe_of(model)
    if next(model.drafter.parameters()).dtype.itemsize < 4:
        logger.warning_once(
            "the heads are in half precision, in which small updates are lost: call model.drafter.float() before the "
            "Trainer is made; they are computed in bfloat16 all the same."
        )
    inputs = {"input_ids": input_ids, "labels": labels}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    loss, _ = loss_of(model, settings)(model, inputs, heads_weight=settings["heads_weight"], count=False)
    return CausalLMOutput(loss=loss)


def recipe_of(model: DraftHeadPreTrainedModel) -> dict[str, Any]:
    """The training arguments of the family's paper, with the defaults of what it does not say."""
    defaults = {field.name: field.default for field in dataclasses.fields(DraftHeadTrainingArguments)}
    return {**defaults, **find_recipe(model.config.family)}


def loss_of(model: DraftHeadPreTrainedModel, settings: Mapping[str, Any], **of_base: Any) -> HeadsLoss:
    """The loss that training arguments describe."""
    weights = {name: settings[f"{name}_weight"] for name in LOSSES}
    others = {"anchors": settings["num_anchors"], **{name: settings[name] for name in ("head_decay", "feature_noise")}}
    reader = BaseReader.of_texts(model.base, model.drafter.reads, model.drafter.output)
    return HeadsLoss(**weights, **others, reader=reader, **of_base)
