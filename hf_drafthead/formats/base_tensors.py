"""Tensors of a base that layouts hold a copy of: where they are read, and whether two are the same.

Shapes: V vocabulary, H hidden.
"""

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_drafthead.formats.layout import Loss, SavedHeads
from hf_drafthead.modeling.files import read_tensors

INPUT, OUTPUT = "input embeddings", "lm_head"
ENDS = {INPUT: ("embed_tokens.weight", "wte.weight", "embed_in.weight"), OUTPUT: ("lm_head.weight", "embed_out.weight")}
ROWS_AT_ONCE = 4096


def base_tensor(base: str | nn.Module | Mapping[str, Tensor], which: str, revision: str | None = None) -> Tensor | None:
    """The base's input embeddings or lm_head (V, H) as plain numbers, if they are on this machine; else None."""
    if isinstance(base, nn.Module):
        model: Any = base
        weight = (model.get_input_embeddings() if which == INPUT else model.get_output_embeddings()).weight
        plain = weight.is_floating_point() and weight.dtype.itemsize >= 2 and not weight.is_meta
        return weight.detach() if plain else None
    if isinstance(base, str):
        hub = {} if os.path.isdir(base) else {"local_files_only": True, "revision": revision or "main"}
        try:
            base = read_tensors(base, hub)
        except OSError:
            return None
    for kind in (which, INPUT) if which == OUTPUT else (which,):  # a tied lm_head is not stored
        names = [name for name in base if name.endswith(ENDS[kind])]
        if len(names) == 1 and base[names[0]].is_floating_point():
            return base[names[0]]
    return None


def read_base_tensor(saved: SavedHeads, which: str) -> Tensor:
    """A tensor of the base of heads that are to be written with it; Loss if the base is not on this machine."""
    tensor = base_tensor(saved.base_model or saved.base or {}, which)
    if tensor is None:
        what = f"the target holds the {which} of the base, and the weights of {saved.base!r} are not on this machine"
        raise Loss(what, "download the base first (`hf download`)")
    return tensor


def same_values(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, as far as the coarser of their types can tell."""
    if one.shape != other.shape:
        return False
    pairs = zip(one.split(ROWS_AT_ONCE), other.split(ROWS_AT_ONCE), strict=True)
    if one.dtype == other.dtype:
        return all(torch.equal(a, b.to(a.device)) for a, b in pairs)
    rounding = max(torch.finfo(one.dtype).eps, torch.finfo(other.dtype).eps)
    smallest = 2.0**-24  # the spacing of float16 around zero, where it rounds more coarsely than bfloat16
    return all(torch.allclose(a.float(), b.to(a.device).float(), rtol=rounding, atol=smallest) for a, b in pairs)
