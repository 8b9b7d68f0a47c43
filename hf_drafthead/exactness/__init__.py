"""The same bits, drafted or not, alone or among others: `exact(model)`.

A product of another number of rows may take another kernel, attention over other slots or lengths adds in another
order, and a state may be folded in by chunks or token by token: in half precision, and in the bits of scores, each
shows. Where a base is exact no module gives a token other bits because of what is beside it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_drafthead.exactness.modules import BEFORE, make_exact, restore
from hf_drafthead.exactness.products import Inexact
from hf_drafthead.exactness.trial import try_ways

Model = TypeVar("Model", bound=PreTrainedModel)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def exact(model: Model, on: bool = True) -> Model:
    """Let a model give every token the same bits, whatever is beside it: drafted or not, alone or in any batch.

    From then on `model.generate(**kw)` returns what `model.base.generate(**kw)` returns, in tokens and in scores, in
    bfloat16 and float16 too. The base is tried, and what was tried are this machine, number of threads and dtype: call
    it again after a change of one of these, or of the base.

    Args:
        model: with draft heads, or any causal language model of transformers; its base is changed in place.
        on: whether it is to be exact; False undoes it.

    Returns:
        the model.

    Raises:
        Inexact: (a ValueError) something about the base cannot be made exact; it names the module, and the base is as
            it was.
    """
    base: Any = getattr(model, "base", model)
    restore(base)
    if not on:
        return model
    if base.dtype not in DTYPES:
        raise Inexact(f"a base in {base.dtype} is not made exact: load it in one of {', '.join(map(str, DTYPES))}.")
    if getattr(base, "is_quantized", False):
        raise Inexact("the kernels of a quantized base are not made exact: load it unquantized, in bfloat16.")
    training = [module for module in base.modules() if module.training]
    base.eval()  # dropout would differ
    try:
        make_exact(base)
        try_ways(base)
        return model
    except BaseException as error:
        restore(base)
        if isinstance(error, Inexact):
            raise Inexact(f"this {type(base).__name__} cannot be made exact: {error}.") from error
        raise
    finally:
        for module in training:
            module.training = True


def is_exact(model: Any) -> bool:
    """Whether a model's base is exact."""
    return BEFORE in vars(getattr(model, "base", model))


__all__ = ["Inexact", "exact", "is_exact"]
