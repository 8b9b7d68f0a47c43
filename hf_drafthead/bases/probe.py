"""Can this base verify a tree? Found out by running it."""

from __future__ import annotations

import contextlib

import torch
from transformers import PreTrainedModel

from hf_drafthead.bases.errors import Unsupported, out_of_memory
from hf_drafthead.bases.generators import refusing_draws
from hf_drafthead.bases.hooks import input_device, of_a_hook
from hf_drafthead.bases.mixers import UnknownMixer, mixers_of
from hf_drafthead.bases.mixers.layer import Mixer
from hf_drafthead.bases.output_layer import OutputLayer, probe_tokens, splits
from hf_drafthead.bases.reader import BaseReader
from hf_drafthead.bases.releases import CACHE, DynamicCache, cache_argument, can_load, keep_picklable, untested
from hf_drafthead.bases.topology import Topology

# Largest difference between a node and a plain forward over its path, relative to the largest logit. Eager attention
# takes its softmax in float32, whatever the dtype.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
PROBE_TOLERANCE_HALF = 5e-2

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# What configs call layers that keep a state, or a state and keys, or nothing.
STATELESS_TYPES = {"moe", "mlp"}  # for which some releases have a layer in the cache all the same
STATE_TYPES = {"linear_attention", "conv", "mamba", "hybrid", *STATELESS_TYPES}
# Fields of configs whose attention chooses keys by score: the nodes of a tree would compete with each other.
CHOOSES_KEYS = ("index_topk", "index_topk_blocks")


@torch.no_grad()
def probe(base: PreTrainedModel, reads: tuple[int | str, ...], tries: bool = True) -> BaseReader:
    """How a base is read, found out by running; Unsupported if it does not honour a tree (`try_tree`)."""
    config = base.config.get_text_config(decoder=True)
    with refusing_draws(input_device(base)):
        mixers = _mixers(base, config)
        windows = attention_windows(config, states=bool(mixers))
        try:
            output = OutputLayer(base)
            reader = BaseReader(base, windows, splits(base, output), reads, output, mixers)
        except Exception as error:
            if out_of_memory(error):
                raise refusal("the base cannot verify a tree", error) from error
            raise
    if tries:
        try_tree(reader)
    return reader


@torch.no_grad()
def try_tree(reader: BaseReader, again: bool = False) -> None:
    """Compare two sibling nodes with two plain forwards over their paths (Unsupported where they differ, or the base
    crashes).

    Two rows, with the siblings swapped, for some models take the cache's memory to be laid out in a way that only holds
    for one. Where layers keep a state, also compare the token behind a commit, of other nodes in each row. Where a
    forward over a whole text is off, compare with decoding token by token, for some models attend both ways in the
    first forward of a text.
    """
    base, mixers = reader.base, reader.mixers
    past, root, left, right = probe_tokens(base).split((13, 1, 1, 1))
    device = past.device
    try:
        with refusing_draws(device):
            plain = [_decoded(base, past, (root, node), bool(mixers)) for node in (left, right)]
            if not all(expected.isfinite().any() for expected in plain):
                raise Unsupported("the base's logits are not numbers", lasting=False)
            cache = reader.cache(2, capacity=16, nodes=3)
            reader(True, **{"input_ids": past.expand(2, -1), CACHE: cache, "use_cache": True})
            cache.count(len(past))
            topology = Topology.of_numbers((0, 0, 0), device)
            nodes = torch.stack([torch.cat([root, left, right]), torch.cat([root, right, left])])
            logits, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
            pairs = [(logits[row, node], plain[row != node - 1]) for row, node in ((0, 1), (0, 2), (1, 2), (1, 1))]
            if mixers:  # what a commit folded in shows in the next token
                path, alone = torch.tensor([[0, 1], [0, 1]], device=device), Topology.of_numbers((0,), device)
                cache.keep(path, torch.tensor([2, 1], device=device))
                after, _ = reader.nodes(right.expand(2, 1), alone, cache, cache.lengths[:, None], None)
                pasts = ((root, left, right), (root, right))
                pairs += [(after[row, 0], _decoded(base, past, tokens, True)) for row, tokens in enumerate(pasts)]
    except Unsupported:
        raise
    except Exception as error:  # whatever a model raises on a tree, its own decoding still works
        if not again and of_a_hook(error, base, try_tree, reader, True):
            raise
        raise refusal("the base cannot verify a tree", error) from error
    finally:
        keep_picklable(base)
    actual, expected = (torch.stack(logits) for logits in zip(*pairs))
    said = off_by(base, actual, expected)
    if said and not mixers:
        # where it does not take its cache so, what was found out stands
        with contextlib.suppress(Exception), refusing_draws(device):
            plain = [_decoded(base, past, (root, node), True) for node in (left, right)]
            said = off_by(base, actual, torch.stack(plain * 2)) and said
    if said:
        if getattr(base, "is_quantized", False):
            raise Unsupported(f"the quantized base rounds too differently, or ignores tree masks ({said}){untested()}")
        raise Unsupported(f"the base does not honour tree masks ({said}){untested()}")


def attention_windows(config, states: bool = False) -> dict[str, int | None]:
    """The attention window of each layer type of a text config, Unsupported for types whose mask is not known here.

    states: whether layers may keep a state instead.
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


def _mixers(base: PreTrainedModel, config) -> dict[int, tuple[Mixer, int]]:
    """The mixers of layers that keep a state, and how many states each has; Unsupported if one has no tree form."""
    prepared, kinds = DynamicCache(config=config), dict(enumerate(getattr(config, "layer_types", None) or ()))
    if not can_load(prepared):
        raise Unsupported(f"a cache of type {type(prepared).__name__} cannot be compacted")
    states = {
        number: layer.number_of_states
        for number, layer in enumerate(prepared.layers)
        if hasattr(layer, "conv_states") and kinds.get(number) not in STATELESS_TYPES
    }
    try:
        mixers = mixers_of(base.get_decoder()) if states else {}
    except UnknownMixer as unknown:
        raise Unsupported(f"the base folds its past into a state that cannot follow a tree: {unknown}") from None
    if missing := sorted(set(states) - set(mixers)):
        named = [module for module in base.get_decoder().modules() if getattr(module, "layer_idx", None) == missing[0]]
        name = type(named[-1]).__name__ if named else f"that of layer {missing[0]}"
        raise Unsupported(f"the base keeps a state by a mixer that is not known, {name}")
    return {number: (mixer, states.get(number, 1)) for number, mixer in mixers.items()}


def _decoded(base: PreTrainedModel, past: torch.Tensor, tokens: tuple[torch.Tensor, ...], single: bool) -> torch.Tensor:
    """Logits (V,) at the last token behind a past, of one forward or (`single`) of one for each of these tokens."""
    if not single:
        return base(torch.cat([past, *tokens])[None], use_cache=False).logits[0, -1]
    cache, positions = DynamicCache(config=base.config), torch.arange(len(past) + len(tokens), device=past.device)[None]
    name = cache_argument(base.forward) or CACHE
    for part, places in zip((past, *tokens), positions.split([len(past), *[1] * len(tokens)], dim=1)):
        logits = base(part[None], **{name: cache}, position_ids=places, use_cache=True).logits[0, -1]
    return logits


def refusal(reason: str, error: Exception) -> Unsupported:
    said = f"{reason} ({type(error).__name__}: {error})".splitlines()[0]
    return Unsupported(said + untested(), lasting=not out_of_memory(error))


def off_by(base: PreTrainedModel, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
    """By how much logits of nodes (B, n, V) are off what plain forwards give, where it is more than rounding."""
    # under autocast a base of any dtype computes in half precision
    exact = not torch.is_autocast_enabled(expected.device.type)
    tolerance = PROBE_TOLERANCE.get(base.dtype, PROBE_TOLERANCE_HALF) if exact else PROBE_TOLERANCE_HALF
    off = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
    if bool((off <= tolerance).all()):  # never of what is not a number
        return None
    return f"a node's logits are off by {off.max():.1e}, and {tolerance:.0e} is allowed"
