"""What a base's config says of its attention's windows, and of its table of positions."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_drafthead.bases.errors import Unsupported
from hf_drafthead.bases.releases import position_table

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# What configs call layers that keep a state, or a state and keys, or nothing.
STATELESS_TYPES = {"moe", "mlp"}  # for which some releases have a layer in the cache all the same
STATE_TYPES = {"linear_attention", "conv", "mamba", "hybrid", *STATELESS_TYPES}
# Fields of configs whose attention chooses keys by score: the nodes of a tree would compete with each other.
CHOOSES_KEYS = ("index_topk", "index_topk_blocks")


def attention_windows(config, states: bool = False) -> dict[str, int | None]:
    """The attention window of each layer type of a text config; states: whether layers may keep a state instead.

    Raises:
        Unsupported: a layer type whose mask is not known here.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if states:
        beside = {"full_attention"} if "hybrid" in kinds else set()  # these attend as well
        attend = (kinds & KNOWN_LAYER_TYPES) | beside
        if not kinds - STATE_TYPES - KNOWN_LAYER_TYPES and not attend:
            return {}
        kinds = (kinds - STATE_TYPES) | beside
    if unknown := sorted(kinds - KNOWN_LAYER_TYPES):
        raise Unsupported(f"the base has layers of type {', '.join(unknown)}")
    if chooses := [name for name in CHOOSES_KEYS if getattr(config, name, None) is not None]:
        raise Unsupported(f"the base's attention chooses keys by score ({', '.join(chooses)})")
    if getattr(config, "attention_chunk_size", None) is not None and "chunked_attention" not in kinds:
        raise Unsupported("the base attends in chunks")
    if not kinds:
        return {"full_attention": window}
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(kinds)}


def table_of_positions(base: Any) -> int | None:
    """How many positions a base has that embeds them by a table; None for others, which go on behind their window."""
    positions = position_table(base.config.get_text_config(decoder=True))
    tables = {module for module in base.modules() if isinstance(module, nn.Embedding)} - {base.get_input_embeddings()}
    sizes = range(positions or 0, (positions or 0) + 3)  # OPT's begins with two that stand for none
    return positions if any(table.num_embeddings in sizes for table in tables) else None
