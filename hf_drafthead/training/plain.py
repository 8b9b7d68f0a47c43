"""The heads' loss for a Trainer that does not know draft heads: `model(..., labels=...)` in training mode.

Shapes: B rows, T positions.
"""

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.utils import logging

from hf_drafthead.generation.reader import BaseReader
from hf_drafthead.modeling.base import DraftHeadPreTrainedModel
from hf_drafthead.modeling.families import find_family
from hf_drafthead.training.arguments import WEIGHTS
from hf_drafthead.training.heads_loss import HeadsLoss, Objective
from hf_drafthead.training.lora import adapter_layers

logger = logging.get_logger(__name__)


def heads_output(
    model: DraftHeadPreTrainedModel,
    input_ids: Tensor | None,
    labels: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    **rest: Any,
) -> CausalLMOutput:
    """The loss of the family's recipe; the base is read without gradients.

    Args:
        model: in training mode.
        input_ids: (B, T).
        labels: (B, T) as for a causal LM, -100 at positions without a loss.
        attention_mask: (B, T) if rows are padded.
        position_ids: (B, T) of rows that are one text each.
        rest: other inputs; tensors among them are refused.

    Raises:
        ValueError: inputs that the heads cannot learn from, or adapters of the base that are to be trained.
    """
    others = sorted(name for name, value in rest.items() if value is not None and not isinstance(value, (bool, int)))
    if input_ids is None or others:
        raise ValueError(f"heads learn from whole texts: give input_ids, and no {', '.join(others) or 'other inputs'}.")
    if position_ids is not None and bool((position_ids.diff(dim=-1) < 0).any()):
        raise ValueError(
            "position_ids restart within a row, so that the heads would read several texts as one: turn off packing "
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
    recipe = find_family(model.config.family).recipe
    loss_of = HeadsLoss(
        Objective(*(recipe.get(name, float(name == "next_token_weight")) for name in WEIGHTS)),
        head_decay=recipe.get("head_decay", 1.0),
        feature_noise=recipe.get("feature_noise", 0.0),
        reader=BaseReader.of_texts(model.base, model.drafter.reads, model.drafter.output),
    )
    inputs = {"input_ids": input_ids, "labels": labels}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    return CausalLMOutput(loss=loss_of(model, inputs, heads_weight=recipe.get("heads_weight", 1.0))[0])
