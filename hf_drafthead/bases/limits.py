"""What a base's config says of its attention: windows, and the lengths at which it becomes another."""

from __future__ import annotations

from hf_drafthead.bases.errors import Unsupported

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


def check_length(config, longest: int, nodes: int = 0) -> None:
    """Refuse lengths at which the base computes positions in another way than at shorter ones.

    Args:
        config: text config of the base.
        longest: most positions that the text and a tree behind it can have.
        nodes: of the tree.

    Raises:
        Unsupported: the base's rotary scaling looks at the sequence length and `longest` reaches beyond it; or
            attention is divided into chunks, scaled or thinned out from a position on, which the nodes may reach.
    """
    keeps = getattr(config, "keep_window_size", None)  # of Doge: from there on it keeps the keys of the highest scores
    if keeps is not None and longest + nodes > keeps:
        raise Unsupported(f"the base's attention chooses keys by score beyond {keeps} positions")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        scaled = [config.floor_scale - 1] if getattr(config, "attn_temperature_tuning", False) else []
        limit = min([config.attention_chunk_size, *scaled])
        if longest + nodes > limit:
            raise Unsupported(f"the base attends in chunks, and the text may reach beyond the first {limit} positions")
    rope = getattr(config, "rope_parameters", None) or {}
    scalings = [rope] if "rope_type" in rope else [value for value in rope.values() if isinstance(value, dict)]
    for scaling in scalings:
        original: int = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
        if scaling.get("rope_type") in ("dynamic", "longrope") and longest > original:
            raise Unsupported(
                f"the base's {scaling['rope_type']} rotary scaling changes with the length beyond {original} positions"
            )


def position_table(config) -> int | None:
    """How many positions a base without rotary frequencies can embed; None where there is no such table."""
    if getattr(config, "rope_parameters", None):
        return None
    return getattr(config, "max_position_embeddings", None)
