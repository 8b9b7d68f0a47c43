"""EAGLE's bias of fc, moved into embeddings of the head's own: for engines that drop the bias.

fc reads [e; h], so W_e e + W_h h + b = W_e (e + d) + W_h h with W_e d = b: the same d is added to every embedding.
"""

import torch
from torch import Tensor

from hf_drafthead.formats.base_tensors import read_base_tensor
from hf_drafthead.formats.heads import INPUT
from hf_drafthead.formats.layout import Own, refuse

ROWS = 4096
TOLERANCE = 0.01  # of the bias's largest entry


def folded_embeddings(own: Own, target: str) -> tuple[Tensor, str]:
    """The embeddings to store with the head, and a note that says how exact they are.

    Returns:
        (V, H) in the type of the head's weights.

    Raises:
        ValueError: the base's embeddings are not on this machine, or the sums, rounded to that type, change the bias
            by more than a hundredth.
    """
    embeddings = read_base_tensor(own, INPUT, target)
    weight, bias = own.tensors["fc.weight"], own.tensors["fc.bias"].double()
    reads_embedding = weight[:, : weight.shape[0]].double()
    try:
        shift = torch.linalg.solve(reads_embedding, bias)
    except torch.linalg.LinAlgError:
        refuse(own, target, "the half of fc that reads embeddings is singular", "train a head with fc_bias=False")
    condition = torch.linalg.cond(reads_embedding, p=1).item()
    pieces, residual = [], 0.0
    for rows in embeddings.split(ROWS):
        exact = rows.double() + shift
        stored = exact.to(weight.dtype)
        # what fc makes of the stored row, against what it makes of the row and the bias
        off = (stored.double() - rows.double()) @ reads_embedding.T - bias
        residual = max(residual, off.abs().max().item())
        pieces.append(stored)
    largest = bias.abs().max().item()
    found = (
        f"the bias of fc is off by up to {residual:.1e} in {str(weight.dtype).removeprefix('torch.')}, its largest "
        f"entry being {largest:.1e} (condition of fc's left half {condition:.1e})"
    )
    if residual > TOLERANCE * largest:
        refuse(own, target, f"folded into embeddings, {found}", "train a head with fc_bias=False")
    return torch.cat(pieces), f"folded into {INPUT} of its own, {found}."
