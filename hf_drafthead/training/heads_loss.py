"""The loss of all heads on one batch: one forward of the base, logits only at labelled positions, a chunk at a time.

A chunk's logits, their loss and its gradient are computed together: no logits are kept for the backward pass, or
computed again in it, and the base's distribution is computed once per position, whatever the number of heads.

Shapes: B rows, T positions, N labelled positions, M of a chunk, H hidden, F feature layers, V vocabulary, D draft
vocabulary (V without one), K heads.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hf_drafthead.generation.reader import BaseReader, Reading
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.drafter import Drafter
from hf_drafthead.training.objectives import (
    IGNORED,
    draft_targets,
    feature_loss,
    head_weights,
    label_positions,
    labelled,
    rank_counts,
)

RANKS = 5  # top-1 and top-5 accuracies are logged
CHUNK = 1 << 22  # most logits that exist at a time on a CPU; GPUs are slow at many small products: 32 times as many
SCHEDULES = ("constant", "linear", "sine")


@dataclass(frozen=True)
class Objective:
    """Weights of the three objectives, see `objectives`."""

    next_token: float = 0.0
    teacher: float = 0.0
    feature: float = 0.0


@dataclass(frozen=True)
class HeadsLoss:
    """The loss and its weights.

    objective: of every head; head_decay: head k counts `head_decay ** k`; feature_noise: width of the uniform noise on
    the hidden states that the heads read; reader: reads the base, default: the output projection of
    the last hidden state gives the logits; base: weight of the base's own loss, 0 where it is not trained
    (Medusa-1); adapters_off: where given, the base learns its own distribution without adapters, else the text
    (Medusa-2, section 2.2.2).
    """

    objective: Objective
    head_decay: float = 1.0
    feature_noise: float = 0.0
    reader: BaseReader | None = None
    base: float = 0.0
    adapters_off: Callable[[], contextlib.AbstractContextManager] | None = None

    def __call__(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        totals: Tensor | None = None,
        heads_weight: float = 1.0,
        count: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """The base's loss, if it is trained, plus the weighted sum of the objectives over all heads.

        Args:
            model: in training mode for noise and dropout.
            inputs: `input_ids` (B, T), `labels` (B, T), `attention_mask` (B, T) if rows are padded on the left (on the
                right nothing sees the padding); `label_positions` (N,), where in the flattened labels there is one,
                which spares the host a wait for the device; `features` (B, T, H) if the base's last hidden states are
                known already, of use to heads that read no others.
            totals: (1 + K,) by how many labels the base's and each head's loss is divided; default: of this batch.
            heads_weight: of all heads' losses beside the base's.
            count: count the ranks of the labels.

        Returns:
            scalar loss, and LongTensor (K, RANKS + 1): how often each head gave each rank to the label; zeros if they
            are not counted.
        """
        return self.of_reading(model, inputs, self.read(model, inputs), totals, heads_weight, count)

    def of_reading(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        reading: Reading,
        totals: Tensor | None = None,
        heads_weight: float = 1.0,
        count: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """As above, from the base's outputs."""
        like = next(model.drafter.parameters())
        device = like.device  # of a base on several devices the heads are on the last
        labels = inputs["labels"].to(device)
        places = inputs.get("label_positions")
        places = label_positions(labels) if places is None else places.to(device)
        totals = (
            label_counts(labels, model.config.num_draft_heads).clamp(min=1) if totals is None else totals.to(device)
        )
        # Float32 heads on a base in half precision compute in bfloat16, whose range holds any gradient.
        half = like.dtype == torch.float32 and reading.features.dtype.itemsize == 2
        other = half and reading.features.dtype != torch.bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=other):
            loss = labels.new_zeros((), dtype=torch.float32)
            if self.base:
                loss = loss + self.base * self._base_loss(model, inputs, reading, labels, places) / totals[0]
            with computed_in(model.drafter, torch.bfloat16) if half else contextlib.nullcontext():
                scale = heads_weight / totals[1:]
                heads, counts = self._of_heads(model, inputs, reading, labels.flatten()[places], places, scale, count)
        return (loss + heads).to(inputs["labels"].device), counts

    def _of_heads(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        reading: Reading,
        targets: Tensor,
        places: Tensor,
        scale: Tensor,
        count: bool,
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum over heads; targets (N,) stand at places (N,), and head k's losses are weighed by scale."""
        drafter = model.drafter
        features = drafter.placed(reading.features)
        if self.feature_noise and drafter.training:
            features = features + self.feature_noise * (torch.rand_like(features) - 0.5)
        states = drafter.head_states(features, inputs["input_ids"], inputs.get("attention_mask"))
        length = inputs["labels"].shape[1]
        scale = scale * torch.tensor(head_weights(len(states), self.head_decay)).to(scale.device, non_blocking=True)
        kept = [places % length >= 2 + head for head in range(len(states))]  # others are guessed from before the text
        rows = [
            state.flatten(0, 1).index_select(0, (places - 2 - head).clamp(min=0)) for head, state in enumerate(states)
        ]
        learnt = None
        if drafter.draft_tokens is not None:
            targets = draft_targets(drafter.draft_tokens, targets, model.config.get_text_config().vocab_size)
            learnt = targets != IGNORED
        loss = features.new_zeros((), dtype=torch.float32)
        if self.objective.feature:
            hidden = reading.hidden.flatten(0, 1).index_select(0, places - 1).detach()
            for head, states_there in enumerate(rows):
                weights = _weights(kept[head], learnt) * scale[head]
                loss = loss + self.objective.feature * (feature_loss(states_there, hidden) * weights).sum()
        plan = Plan(
            logits=drafter.head_logits,
            targets=targets,
            weights=[_weights(one, learnt) * scale[head] for head, one in enumerate(kept)],
            kept=kept if count else None,
            next_token=self.objective.next_token,
            teacher=self.objective.teacher,
            size=self._chunk(drafter.choices, places.device),
        )
        if self.objective.teacher:
            scores = reading.scores.flatten(0, 1).index_select(0, places - 1).detach()
            plan = plan._replace(teachers=lambda chunk: self._teachers(model, scores[chunk]))
        projected, counts = projected_loss(plan, rows, _learning(drafter, model.base.get_output_embeddings()))
        return loss + projected, counts

    def read(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor], learn: bool = True) -> Reading:
        """Run the base over a batch, or take its hidden states as given; with gradients where it is trained."""
        if "features" in inputs and model.drafter.reads in ((-1,), ()):
            return Reading(inputs["features"], inputs["features"], inputs["features"])
        base, was_training = model.base, model.base.training
        learns = bool(self.base) and learn
        if was_training and not learns:
            base.eval()  # no dropout in a base that is not trained
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            reading = self._reader(model).texts(inputs["input_ids"], inputs.get("attention_mask"))
        if was_training and not learns:
            base.train()
        return reading

    def _reader(self, model: DraftHeadPreTrainedModel) -> BaseReader:
        return self.reader or BaseReader(model.base, {}, True, model.drafter.reads, model.drafter.output)

    def _base_loss(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        reading: Reading,
        labels: Tensor,
        places: Tensor,
    ) -> Tensor:
        """Cross-entropy with the text, or KL divergence from the base's distribution without adapters; summed."""
        reader, itself = self._reader(model), self.adapters_off is not None
        vocabulary = model.config.get_text_config().vocab_size
        rows = reading.scores.to(places.device).flatten(0, 1).index_select(0, places - 1)
        plan = Plan(
            logits=lambda head, scores: reader.logits(scores),
            targets=labels.flatten()[places],
            weights=[torch.ones_like(places, dtype=torch.float32)],
            next_token=float(not itself),
            teacher=float(itself),
            size=self._chunk(vocabulary, places.device),
        )
        if self.adapters_off is None:
            return projected_loss(plan, [rows], _learning(model.base.get_output_embeddings()))[0]
        with torch.no_grad(), self.adapters_off():
            before = self.read(model, inputs, learn=False).scores.flatten(0, 1).index_select(0, places - 1)

        def teachers(chunk: slice) -> Tensor:
            return reader.logits(before[chunk]).float().softmax(-1)  # type: ignore[no-any-return]

        plan = plan._replace(teachers=teachers, divergence=True)
        return projected_loss(plan, [rows], _learning(model.base.get_output_embeddings()))[0]

    def _teachers(self, model: DraftHeadPreTrainedModel, scores: Tensor) -> Tensor:
        """The base's distribution (M, D) from the scores of a `Reading`, over the draft vocabulary alone."""
        drafter, reader = model.drafter, self._reader(model)
        if drafter.draft_tokens is None:
            logits = reader.logits(scores)
        else:
            logits = drafter.base_logits(scores) if reader.split else scores[:, drafter.draft_tokens]
        return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

    def _chunk(self, vocabulary: int, device: torch.device) -> int:
        """How many positions' logits may exist at a time."""
        return max((CHUNK if device.type == "cpu" else 32 * CHUNK) // vocabulary, 1)


class Plan(NamedTuple):
    """What `projected_loss` computes.

    logits: (head, states (M, H)) to logits (M, D); targets: (N,) among the D, or IGNORED; weights: per head (N,) of
    every position's loss; size: positions of a chunk; kept: per head (N,) at which positions ranks are counted, None
    for no counting; next_token, teacher: weights of the objectives; teachers: from a chunk to the base's distribution
    (M, D); divergence: subtract the teachers' entropy.
    """

    logits: Callable[[int, Tensor], Tensor]
    targets: Tensor
    weights: Sequence[Tensor]
    size: int
    kept: Sequence[Tensor] | None = None
    next_token: float = 0.0
    teacher: float = 0.0
    teachers: Callable[[slice], Tensor] | None = None
    divergence: bool = False


def projected_loss(plan: Plan, states: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of all heads' weighted cross-entropies, with their gradients.

    Args:
        plan: see there.
        states: of each head (N, H), at the same labels.
        parameters: that `plan.logits` may use and that learn.

    Returns:
        scalar loss, and LongTensor (K, RANKS + 1): how often each rank was given to the label.
    """
    return _ProjectedLoss.apply(plan, len(states), *states, *parameters)


class _ProjectedLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, chunk by chunk, where the logits are at hand."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, heads: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        states, parameters = tensors[:heads], tensors[heads:]
        learns = any(ctx.needs_input_grad[2:])
        loss = plan.targets.new_zeros((), dtype=torch.float32)
        counts = plan.targets.new_zeros(heads, RANKS + 1)
        to_states: list[list[Tensor]] = [[] for _ in range(heads)]
        to_parameters: list[Tensor | None] = [None] * len(parameters)
        for start in range(0, len(plan.targets), plan.size):
            chunk = slice(start, start + plan.size)
            teachers = None if plan.teachers is None else plan.teachers(chunk)
            for head in range(heads):
                part = states[head][chunk].detach().requires_grad_(learns and states[head].requires_grad)
                with torch.set_grad_enabled(learns):
                    logits = plan.logits(head, part)
                if plan.kept is not None:
                    ranked = rank_counts(logits.detach(), plan.targets[chunk], RANKS, plan.kept[head][chunk])
                    counts[head] += ranked
                weights = plan.weights[head][chunk]
                lost, gradient = _cross_entropy(plan, logits.detach(), plan.targets[chunk], teachers, weights, learns)
                loss = loss + lost
                if gradient is None or not logits.requires_grad:
                    continue
                wanted = [tensor for tensor in (part, *parameters) if tensor.requires_grad]
                found = iter(torch.autograd.grad(logits, wanted, gradient, allow_unused=True))
                if part.requires_grad:
                    to_states[head].append(next(found))
                for index, there in enumerate(found):
                    if there is not None:
                        known = to_parameters[index]
                        to_parameters[index] = there.float() if known is None else known.add_(there)
        ctx.gradients = [
            *(torch.cat(parts) if parts else None for parts in to_states),
            *(None if found is None else found.to(one.dtype) for found, one in zip(to_parameters, parameters)),
        ]
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, None, *(None if found is None else found * outer[0].to(found.dtype) for found in ctx.gradients)


def _cross_entropy(
    plan: Plan, logits: Tensor, targets: Tensor, teachers: Tensor | None, weights: Tensor, learns: bool
) -> tuple[Tensor, Tensor | None]:
    """The weighted sum over a chunk, and its gradient by the logits (M, D)."""
    shares = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    places = targets.clamp(min=0).unsqueeze(1)
    hard = (plan.next_token * weights * (targets != IGNORED)).to(shares.dtype)
    lost = -(hard * shares.gather(1, places).squeeze(1)).sum()
    soft = None
    if teachers is not None:
        teachers = teachers.to(shares.dtype)
        soft = (plan.teacher * weights).to(shares.dtype)
        crossed = (teachers * shares).sum(-1)
        if plan.divergence:
            crossed = crossed + torch.special.entr(teachers).sum(-1)
        lost = lost - (soft * crossed).sum()
    if not learns:
        return lost.float(), None
    total = hard if soft is None else hard + soft
    gradient = shares.exp_().mul_(total.unsqueeze(1))
    if soft is not None and teachers is not None:
        gradient.addcmul_(teachers, soft.unsqueeze(1), value=-1)
    gradient.scatter_add_(1, places, -hard.unsqueeze(1))
    return lost.float(), gradient.to(logits.dtype)


def _weights(kept: Tensor, learnt: Tensor | None) -> Tensor:
    return (kept if learnt is None else kept & learnt).float()


def _learning(*modules: nn.Module) -> list[Tensor]:
    """What learns of some modules: parameters, or what stands for them while they are computed in another type."""
    return [tensor for module in modules for tensor in module.parameters() if tensor.requires_grad]


@contextlib.contextmanager
def computed_in(drafter: Drafter, dtype: torch.dtype) -> Iterator[None]:
    """The drafter with weights of another type, through which its own ones learn: one conversion each per step."""
    held = []
    for module in drafter.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32:
                held.append((module, name, parameter))
                module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in held:
            module._parameters[name] = parameter


def label_counts(labels: Tensor, heads: int) -> Tensor:
    """How many labels the base and each head have in a batch (B, T): (1 + K,)."""
    return torch.stack([labelled(labels, 1 + head).sum() for head in range(1 + heads)])


def heads_share(schedule: str, step: int, steps: int) -> float:
    """The share of the heads' weight that is applied at a step: 1, or rising to 1 along a line or a quarter sine.

    Args:
        schedule: "constant", "linear" or "sine".
        step: optimizer steps done.
        steps: of the whole training.
    """
    done = min(step / max(steps, 1), 1.0)
    return {"constant": 1.0, "linear": done, "sine": math.sin(math.pi / 2 * done)}[schedule]
