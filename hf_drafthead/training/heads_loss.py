"""The loss of all heads on one batch: one forward of the base, logits only at labelled positions, a chunk at a time.

A chunk's logits, their loss and its gradient are computed together: no logits are kept for the backward pass, and the
base's distribution is computed once per position, whatever the number of heads.

`shift` is how far ahead a head guesses: its logits at position t are for the token at t + shift. The base's own lm_head
has shift 1, head i (0-based) has 2 + i.

Where each place that guesses begin at costs a pass of its own (`Drafter.starts_at_anchors`), some places of a text are
sampled, the anchors. From an anchor on, a head counts as far as all labels before its own are there; and as in the
trainers of block drafters (DFlash, DSpark) all heads share one mean, in which head k weighs `head_decay ** k`.

Shapes: B rows, T positions, A anchors of a row, N labelled positions or B A anchors, M of a chunk, S of a head's state,
F*H features, V vocabulary, D draft vocabulary (V without one), K heads.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_drafthead.bases.reader import BaseReader, Reading
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.drafter import Drafter

IGNORED = -100  # label without a loss, as everywhere in transformers
RANKS = 5  # top-1 and top-5 accuracies are logged
Batch = tuple[Mapping[str, Tensor], Reading, Tensor, Tensor]  # inputs, reading, labels (B, T), places (N,) of some
CHUNK = 1 << 22  # most logits that exist at a time on a CPU; GPUs are slow at many small products: 32 times as many


@dataclass(frozen=True)
class HeadsLoss:
    """The loss and its weights.

    next_token, teacher, feature: weights of the cross-entropy with the text's tokens (Medusa, section 2.1.1), of that
    with the base's own distribution (Hydra, section 3.1), and of `feature_loss`; distance: of the L1 distance to that
    distribution; confidence: of the cross-entropy of the acceptance that a drafter foretells with the one that follows
    of this distance, 1 - L1 / 2 (both DSpark); anchors: places of a text that guesses begin at, at most; head_decay:
    head k, counted from 1, counts `head_decay ** k` (Medusa, section 2.2.1); feature_noise: width of the uniform noise
    on the hidden states that the heads read; reader: reads the base, default: the output projection of the last hidden
    state gives the logits; base: weight of the base's own loss, 0 where it is not trained (Medusa-1).
    """

    next_token: float = 0.0
    teacher: float = 0.0
    feature: float = 0.0
    distance: float = 0.0
    confidence: float = 0.0
    anchors: int = 512
    head_decay: float = 1.0
    feature_noise: float = 0.0
    reader: BaseReader | None = None
    base: float = 0.0

    def __call__(
        self,
        model: DraftHeadPreTrainedModel,
        inputs: Mapping[str, Tensor],
        totals: Tensor | None = None,
        heads_weight: float = 1.0,
        count: bool = True,
        reading: Reading | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The base's loss, if it is trained, plus the weighted sum of the objectives over all heads; and how often each
        head gave each rank to the label, a LongTensor (K, RANKS + 1), zeros without `count`.

        `inputs` holds `input_ids` and `labels` (B, T), an `attention_mask` (B, T) if rows are padded on the left,
        which are moved to the left (on the right nothing sees the padding); perhaps `label_positions` (N,), where in
        the flattened labels there is one, which spares the host a wait for the device, and `anchors` (B, A) in rows
        that begin with their text, -1 for none. `totals` (1 + K,) is by how many labels the base's and each head's loss
        is divided, by default those of the batch.
        """
        if reading is None:
            inputs = padded_on_the_right(inputs)
            reading = self.read(model, inputs)
        like = next(model.drafter.parameters())
        device = like.device  # of a base on several devices the heads are on the last
        labels = inputs["labels"].to(device)
        places = inputs.get("label_positions")
        places = label_positions(labels) if places is None else places.to(device)
        inputs = self.with_anchors(model, inputs)
        batch = inputs, reading, labels, places
        totals = (self.totals(model, inputs) if totals is None else totals).to(device).clamp(min=1)
        # Float32 heads on a base in half precision compute in bfloat16, whose range holds any gradient.
        half = like.dtype == torch.float32 and reading.features.dtype.itemsize == 2
        other = half and reading.features.dtype != torch.bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=other):
            loss = labels.new_zeros((), dtype=torch.float32)
            if self.base:
                loss = loss + self.base * self._base_loss(model, batch) / totals[0]
            with computed_in(model.drafter, torch.bfloat16) if half else contextlib.nullcontext():
                decay = torch.tensor([self.head_decay ** (1 + head) for head in range(len(totals) - 1)])
                decay = decay.to(device, non_blocking=True)
                # of one label: its head's part of all heads' mean, or of its own
                shares = decay / ((decay * totals[1:]).sum() if "anchors" in inputs else totals[1:])
                heads, counts = self._of_heads(model, batch, heads_weight * shares, count)
        return (loss + heads).to(inputs["labels"].device), counts

    def with_anchors(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The inputs with anchors (B, A), where the drafter wants some: others in every call in training mode."""
        if not model.drafter.starts_at_anchors or "anchors" in inputs:
            return inputs
        inputs, seed = padded_on_the_right(inputs), None if model.training else torch.Generator().manual_seed(0)
        return {**inputs, "anchors": sample_anchors(inputs["labels"], self.anchors, seed)}

    def totals(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor]) -> Tensor:
        """How many labels the base and each head have in a batch: (1 + K,)."""
        heads, labels = model.config.num_draft_heads, padded_on_the_right(inputs)["labels"]
        if "anchors" not in inputs:
            return torch.stack([labelled(labels, 1 + head).sum() for head in range(1 + heads)])
        behind = _behind_anchors(model.drafter, labels, inputs["anchors"].to(labels), heads)
        counts = [(targets != IGNORED).sum() for targets, _ in behind]
        return torch.stack([labelled(labels, 1).sum(), *counts])

    def _of_heads(
        self, model: DraftHeadPreTrainedModel, batch: Batch, scale: Tensor, count: bool
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum over heads, of which head k's losses weigh scale[k]."""
        inputs, reading, labels, places = batch
        drafter, text = model.drafter, (inputs["input_ids"], inputs.get("attention_mask"))
        features = drafter.placed(reading.features)
        if self.feature_noise and drafter.training:
            features = features + self.feature_noise * (torch.rand_like(features) - 0.5)
        anchors = inputs["anchors"].to(labels) if "anchors" in inputs else None
        if anchors is None:
            states, label_tokens = drafter.head_states(features, *text), labels.flatten()[places]
            shifts = [places - 2 - head for head in range(len(states))]  # where the guesses are made of
            rows = [state.flatten(0, 1).index_select(0, at.clamp(min=0)) for state, at in zip(states, shifts)]
            # those from before the text are none
            valid = [places % labels.shape[1] >= 2 + head for head in range(len(states))]
            targets, sources = [label_tokens] * len(states), [places - 1] * len(states)
        else:
            states = drafter.head_states(features, *text, anchors.clamp(min=0))  # type: ignore[call-arg]
            rows, pairs = [s.flatten(0, 1) for s in states], _behind_anchors(drafter, labels, anchors, len(states))
            targets, sources = [pair[0].flatten() for pair in pairs], [pair[1].flatten() for pair in pairs]
            valid = [head_targets != IGNORED for head_targets in targets]
        if drafter.draft_tokens is not None:
            vocabulary = model.config.get_text_config().vocab_size
            targets = [draft_targets(drafter.draft_tokens, head_targets, vocabulary) for head_targets in targets]
        weights = [
            (in_text & (head_targets != IGNORED)).float() * head_scale
            for in_text, head_targets, head_scale in zip(valid, targets, scale)
        ]
        loss = features.new_zeros((), dtype=torch.float32)
        if self.feature:
            hidden = reading.hidden.flatten(0, 1).detach()
            for head_rows, source, weight in zip(rows, sources, weights):
                features_there = hidden.index_select(0, source)  # states may have more behind as many numbers
                guessed = head_rows[:, : features_there.shape[1]]
                loss = loss + self.feature * (feature_loss(guessed, features_there) * weight).sum()
        size, choice = self._chunk(drafter.choices, places.device), drafter.choice_loss
        plan = Plan(self, drafter.unary_logits, targets, weights, size, valid if count else None, choice=choice)
        if self.confidence and drafter.confidence_logits(rows[0][:1]) is not None:
            plan = plan._replace(foretold=drafter.confidence_logits)
        if self.teacher or self.distance or plan.foretold is not None:
            plan = plan._replace(teachers=self._teachers(model, reading.scores.flatten(0, 1).detach(), sources))
        parameters = _learning(drafter, model.base.get_output_embeddings())
        projected, counts = ProjectedLoss.apply(plan, len(rows), *rows, *parameters)
        return loss + projected, counts

    def read(self, model: DraftHeadPreTrainedModel, inputs: Mapping[str, Tensor]) -> Reading:
        """Run the base over a batch, with gradients where it is trained."""
        base, was_training = model.base, model.base.training
        learns = bool(self.base)
        if was_training and not learns:
            base.eval()  # no dropout in a base that is not trained
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            reading = self._reader(model).read_texts(inputs["input_ids"], inputs.get("attention_mask"))
        if was_training and not learns:
            base.train()
        return reading

    def _reader(self, model: DraftHeadPreTrainedModel) -> BaseReader:
        return self.reader or BaseReader(model.base, {}, True, model.drafter.reads, model.drafter.output)

    def _base_loss(self, model: DraftHeadPreTrainedModel, batch: Batch) -> Tensor:
        """Cross-entropy with the text, summed."""
        inputs, reading, labels, places = batch
        reader = self._reader(model)
        plan = Plan(
            HeadsLoss(next_token=1.0),
            logits=lambda head, scores: reader.logits(scores),
            targets=[labels.flatten()[places]],
            weights=[torch.ones_like(places, dtype=torch.float32)],
            size=self._chunk(model.config.get_text_config().vocab_size, places.device),
        )
        rows = reading.scores.to(places.device).flatten(0, 1).index_select(0, places - 1)
        return ProjectedLoss.apply(plan, 1, rows, *_learning(model.base.get_output_embeddings()))[0]

    def _teachers(
        self, model: DraftHeadPreTrainedModel, scores: Tensor, sources: Sequence[Tensor]
    ) -> Callable[[int, slice], Tensor]:
        """From a head and a chunk to the base's distribution (M, D) there, by its scores (B T, ...) and per head (N,)
        where in them its labels are predicted; the same tensor where heads share them."""
        drafter, reader = model.drafter, self._reader(model)
        last: dict[tuple[int, int], Tensor] = {}  # which the heads at the same labels share

        @torch.no_grad()
        def teachers(head: int, chunk: slice) -> Tensor:
            key = (id(sources[head]), chunk.start)
            if key not in last:
                last.clear()
                chunk_scores = scores.index_select(0, sources[head][chunk].to(scores.device))
                if drafter.draft_tokens is None:
                    logits = reader.logits(chunk_scores)
                elif reader.split:
                    logits = drafter.base_logits(chunk_scores)
                else:
                    logits = chunk_scores[:, drafter.draft_tokens]
                last[key] = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
            return last[key]

        return teachers

    def _chunk(self, vocabulary: int, device: torch.device) -> int:
        return max((CHUNK if device.type == "cpu" else 32 * CHUNK) // vocabulary, 1)


class Plan(NamedTuple):
    """What `ProjectedLoss` computes.

    objectives: whose weights count; logits: (head, states (M, S)) to logits (M, D); targets: per head (N,) among the D,
    or IGNORED; weights: per head (N,) of every position's loss; size: positions of a chunk; kept: per head (N,) at
    which positions ranks are counted, None for no counting; teachers: from a head and a chunk to the base's
    distribution (M, D); foretold: from states (M, S) to logits (M,) of acceptance; choice: from states, logits and the
    base's tokens, or the text's, to a loss (M,) that is added.
    """

    objectives: HeadsLoss
    logits: Callable[[int, Tensor], Tensor]
    targets: Sequence[Tensor]
    weights: Sequence[Tensor]
    size: int
    kept: Sequence[Tensor] | None = None
    teachers: Callable[[int, slice], Tensor] | None = None
    foretold: Callable[[Tensor], Tensor | None] | None = None
    choice: Callable[[Tensor, Tensor, Tensor], Tensor | None] | None = None

    def loss(self, head: int, chunk: slice, states: Tensor) -> tuple[Tensor, Tensor]:
        """The weighted sum of a head's losses over a chunk of its states (M, S), and its logits (M, D) there."""
        targets, logits, of = self.targets[head][chunk], self.logits(head, states), self.objectives
        teachers = None if self.teachers is None else self.teachers(head, chunk)
        shares = logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        hard = shares.gather(1, targets.clamp(min=0).unsqueeze(1)).squeeze(1)
        lost, best = -of.next_token * hard * (targets != IGNORED), targets
        if teachers is not None:
            teachers = teachers.to(shares.dtype)
            best = teachers.argmax(-1).where(targets != IGNORED, IGNORED)
            if of.teacher:
                lost = lost - of.teacher * (teachers * shares).sum(-1)
            if of.distance or self.foretold is not None:
                distance = (shares.exp() - teachers).abs().sum(-1)
                lost = lost + of.distance * distance
            sure = None if self.foretold is None else self.foretold(states)
            if sure is not None:
                accepted = (1 - distance / 2).detach().to(torch.float32)
                entropy = F.binary_cross_entropy_with_logits(sure.float(), accepted, reduction="none")
                lost = lost + of.confidence * entropy
        choice = None if self.choice is None else self.choice(states, logits, best)
        lost = lost if choice is None else lost + choice
        return (self.weights[head][chunk].to(lost.dtype) * lost).sum().float(), logits


class ProjectedLoss(torch.autograd.Function):
    """The sum of all heads' weighted losses, and how often each rank was given to a label, of the heads' states (N, S)
    and the parameters that learn. Gradients are computed in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, heads: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        states, parameters = tensors[:heads], tensors[heads:]
        learns, first = any(ctx.needs_input_grad[2:]), plan.targets[0]
        loss = first.new_zeros((), dtype=torch.float32)
        counts = first.new_zeros(heads, RANKS + 1)
        to_states: list[list[Tensor]] = [[] for _ in range(heads)]
        to_parameters: list[Tensor | None] = [None] * len(parameters)
        for start in range(0, len(first), plan.size):
            chunk = slice(start, start + plan.size)
            for head in range(heads):
                part = states[head][chunk].detach().requires_grad_(learns and states[head].requires_grad)
                with torch.set_grad_enabled(learns):
                    lost, logits = plan.loss(head, chunk, part)
                if plan.kept is not None:
                    counts[head] += rank_counts(
                        logits.detach(), plan.targets[head][chunk], RANKS, plan.kept[head][chunk]
                    )
                loss = loss + lost.detach()
                if not lost.requires_grad:
                    continue
                wanted = [tensor for tensor in (part, *parameters) if tensor.requires_grad]
                computed = iter(torch.autograd.grad(lost, wanted, allow_unused=True))
                if part.requires_grad:
                    to_states[head].append(next(computed))
                for index, of_chunk in enumerate(computed):
                    if of_chunk is not None:
                        total = to_parameters[index]
                        to_parameters[index] = of_chunk.float() if total is None else total.add_(of_chunk)
        ctx.gradients = [
            *(torch.cat(parts) if parts else None for parts in to_states),
            *(None if total is None else total.to(weight.dtype) for total, weight in zip(to_parameters, parameters)),
        ]
        ctx.mark_non_differentiable(counts)
        return loss, counts

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return (
            None,
            None,
            *(None if gradient is None else gradient * outer[0].to(gradient.dtype) for gradient in ctx.gradients),
        )


def _learning(*modules: nn.Module) -> list[Tensor]:
    """What learns of some modules: parameters, or what stands for them while they are computed in another type."""
    if not torch.is_grad_enabled():
        return []
    return [tensor for module in modules for tensor in module.parameters() if tensor.requires_grad]


@contextlib.contextmanager
def computed_in(drafter: Drafter, dtype: torch.dtype) -> Iterator[None]:
    """The drafter with weights of another type, through which its own ones learn: one conversion each per step."""
    masters = []
    for module in drafter.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dtype == torch.float32:
                masters.append((module, name, parameter))
                module._parameters[name] = parameter.to(dtype)  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, name, parameter in masters:
            module._parameters[name] = parameter


def padded_on_the_right(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A batch whose rows begin with their text: not every base takes its positions from the mask."""
    mask = inputs.get("attention_mask")
    if mask is None:
        return inputs
    columns = torch.arange(mask.shape[1], device=mask.device)
    order = (columns + (mask.cumsum(1) == 0).sum(1, keepdim=True)) % len(columns)
    moved = {name: inputs[name].gather(1, order.to(inputs[name].device)) for name in ("input_ids", "labels")}
    rest = {name: value for name, value in inputs.items() if name != "label_positions"}  # of the labels as they were
    return {**rest, **moved, "attention_mask": mask.gather(1, order)}


def labelled(labels: Tensor, shift: int) -> Tensor:
    """Which positions t of (B, T) have a label at t + shift; none in rows of at most `shift` tokens."""
    if labels.shape[1] <= shift:
        return torch.zeros_like(labels, dtype=torch.bool)
    return F.pad(labels[:, shift:] != IGNORED, (0, shift))


def label_positions(labels: Tensor) -> Tensor:
    """Where in the flattened labels (B, T) there is one that the base predicts, (N,); the host waits for the device."""
    return F.pad(labels[:, 1:] != IGNORED, (1, 0)).flatten().nonzero().flatten()


def sample_anchors(labels: Tensor, most: int, generator: torch.Generator | None = None) -> Tensor:
    """Positions (B, A) of labels (B, T) from which the token after next is one, ascending, some of them by chance; rows
    that have fewer end in -1."""
    fitting = labelled(labels, 2)
    count = max(min(most, int(fitting.sum(1).max())), 1)  # here the host waits
    chance = torch.rand(labels.shape, generator=generator).to(labels.device)
    chosen = chance.where(fitting, -1.0).topk(count, dim=1)
    places = chosen.indices.where(chosen.values >= 0, labels.shape[1]).sort(dim=1).values
    return places.where(places < labels.shape[1], -1)


def anchored(labels: Tensor, anchors: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """Each head's labels behind anchors, (B, A), and where in the flattened labels the base predicts them; a label that
    is missing ends the row of guesses, as in DeepSpec's trainer."""
    width, is_label, per_head = labels.shape[1], anchors >= 0, []
    first = torch.arange(len(labels), device=labels.device)[:, None] * width
    for head in range(heads):
        places = anchors + 2 + head
        inside = places.clamp(min=0, max=width - 1)
        targets = labels.gather(1, inside)
        is_label = is_label & (places < width) & (targets != IGNORED)
        per_head.append((targets.where(is_label, IGNORED), first + (inside - 1).clamp(min=0)))
    return per_head


def _behind_anchors(drafter: Drafter, labels: Tensor, anchors: Tensor, heads: int) -> list[tuple[Tensor, Tensor]]:
    """As `anchored`, of the anchors alone that each head guesses behind."""
    pairs, drawn = anchored(labels, anchors, heads), drafter.drawn(anchors.shape[1])
    return pairs if drawn is None else [(there[:, some], at[:, some]) for (there, at), some in zip(pairs, drawn)]


def feature_loss(states: Tensor, hidden: Tensor) -> Tensor:
    """Smooth L1 distance (M,), averaged over H, of states (M, H) to the base's hidden states (M, H): EAGLE's regression
    loss, Hydra's reconstruction loss."""
    return F.smooth_l1_loss(states.float(), hidden.float(), reduction="none").mean(-1)


def rank_counts(logits: Tensor, targets: Tensor, ranks: int, counted: Tensor | None = None) -> Tensor:
    """How often the label was a head's best guess, its second best, and so on: LongTensor (ranks + 1,), whose last
    entry counts labels at none of the ranks; of logits (M, V) and targets (M,), at the positions `counted` (M,)."""
    rank = (~(logits <= logits.gather(1, targets.clamp(min=0)[:, None]))).sum(1).clamp(max=ranks)
    rank = rank.where(targets != IGNORED, ranks)
    rank = rank if counted is None else rank.where(counted, -1)
    return (rank[:, None] == torch.arange(ranks + 1, device=rank.device)).sum(0)


def draft_targets(draft_tokens: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    """Targets (M,) among the draft tokens (D,), IGNORED where the token id in `targets` (M,) is none of them: a token
    that a drafter cannot guess has no loss, as in EAGLE-3's trainer; `vocabulary` is V, of the base."""
    places = torch.full((vocabulary,), IGNORED, device=targets.device)
    places[draft_tokens] = torch.arange(len(draft_tokens), device=places.device)
    return places[targets.clamp(min=0)].where(targets != IGNORED, IGNORED)
