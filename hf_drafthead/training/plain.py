"""The heads' loss for a Trainer that knows nothing of draft heads: `model(..., labels=...)` in training mode.

Shapes: B rows, T positions, V vocabulary.
"""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from hf_drafthead.generation.reader import BaseReader, splits
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.families import find_family
from hf_drafthead.training.heads_loss import HeadsLoss, Objective
from hf_drafthead.training.lora import adapter_layers
from hf_drafthead.training.objectives import IGNORED

logger = logging.get_logger(__name__)

_SPLITS: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()  # found out by running, once a base


def heads_output(
    model: DraftHeadPreTrainedModel,
    input_ids: Tensor | None,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **rest: Any,
) -> CausalLMOutput:
    """The loss of the family's recipe; the base is read only.

    Args:
        model: in training mode.
        input_ids: (B, T).
        labels: (B, T) as for a causal language model, -100 where nothing is to be learnt.
        attention_mask: (B, T) if rows are padded.
        position_ids: (B, T), those of whole rows.
        num_items_in_batch: labels in all batches of an optimizer step, as the Trainer counts them.
        rest: refused where the heads could not heed it.

    Returns:
        The loss, and the base's logits (B, T, V).

    Raises:
        ValueError: inputs that the heads cannot learn from, or adapters of the base that are to be trained.
    """
    if input_ids is None or rest.get("past_key_values") is not None:
        raise ValueError("heads learn from whole texts: give input_ids, and no inputs_embeds or past_key_values.")
    if position_ids is not None and bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError(
            "position_ids begin anew within a row: heads would read one text behind the other as one; turn off packing "
            "(packing=False, padding_free=False)."
        )
    if any(parameter.requires_grad for _, layer in adapter_layers(model.base) for parameter in layer.parameters()):
        raise ValueError(
            "the base has adapters that are to be trained, but labels train the heads only: freeze them "
            "(model.base.requires_grad_(False)), or train base and heads together with `hf-drafthead train --joint`."
        )
    if next(model.drafter.parameters()).dtype.itemsize < 4:
        logger.warning_once(
            "the heads are in half precision, in which small updates are lost: call model.drafter.float() before the "
            "Trainer is made; they are computed in bfloat16 all the same."
        )
    if model.base not in _SPLITS:
        _SPLITS[model.base] = splits(model.base)
    recipe = find_family(model.config.family).recipe
    weights = (recipe.get(name, 0.0) for name in ("next_token_weight", "teacher_weight", "feature_weight"))
    loss_of = HeadsLoss(
        Objective(*weights),
        head_decay=recipe.get("head_decay", 1.0),
        feature_noise=recipe.get("feature_noise", 0.0),
        reader=BaseReader(model.base, {}, _SPLITS[model.base], model.drafter.reads),
    )
    inputs = {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}
    inputs = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    reading = loss_of.read(model, inputs)
    loss, _ = loss_of.of_reading(model, inputs, reading)
    if num_items_in_batch is not None:  # the Trainer adds up the losses of a step, which are to be means over all of it
        loss = loss * (labels[..., 1:] != IGNORED).sum() / num_items_in_batch
    with torch.no_grad():
        return CausalLMOutput(loss=loss, logits=loss_of.reader.logits(reading.scores))
