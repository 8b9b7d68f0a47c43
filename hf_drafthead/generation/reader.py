"""How a base is read: over a prompt, over the nodes of a step, over whole texts; and the probe whether trees can go.

The tree enters through public arguments alone: `position_ids` (past length + depth), a 4-D additive `attention_mask`
(one per layer type where the base has several) and a `Cache`. Some models ignore one of them, some crash; hence
`probe`.

Shapes: B rows, N nodes, T positions of a text, R = 1 or B, H hidden, F feature layers, V vocabulary, M any number.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_drafthead.generation.memory import out_of_memory
from hf_drafthead.generation.slots import SlotCache, padded, slot_mask
from hf_drafthead.generation.tree import DraftTree, Topology

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Largest difference between a node and a plain forward over its path, relative to the largest logit. Eager attention
# takes its softmax in float32, whatever the dtype.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
PROBE_TOLERANCE_HALF = 5e-2
# Fields of configs whose attention chooses keys by score: the nodes of a tree would compete with each other.
CHOOSES_KEYS = ("index_topk", "index_topk_blocks")


class Unsupported(Exception):
    """The tree cannot go here; the text is the reason, fit for the end of a sentence.

    lasting: whether it holds for later calls too, until something about the base changes.
    """

    def __init__(self, reason: str, lasting: bool = True):
        super().__init__(reason)
        self.lasting = lasting


@dataclass(frozen=True)
class Reading:
    """What the base says about whole texts.

    features: (B, T, F*H) for a drafter to read; hidden: (B, T, H) after the final norm; scores: (B, T, V) logits, or
    (B, T, H) again where `BaseReader.logits` makes logits of them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True)
class BaseReader:
    """How to run one base and read logits and features from it.

    base: the causal LM; windows: attention window (None = all) by layer type; split: whether the logits are the output
    projection of the decoder's last hidden state, so that the decoder can be run alone; reads: the layers whose hidden
    states the drafter reads, -1 being the last after the final norm.
    """

    base: PreTrainedModel
    windows: dict[str, int | None]
    split: bool
    reads: tuple[int, ...] = (-1,)

    @classmethod
    def of_texts(cls, base: PreTrainedModel, reads: tuple[int, ...] = (-1,)) -> BaseReader:
        """A reader of whole texts, for which a base need not be able to verify trees."""
        return cls(base, {}, splits(base), reads)

    def __call__(self, last_only: bool, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1 or length, V) and features (B, length, F*H) of a forward with the base's own arguments."""
        inputs.pop("logits_to_keep", None)
        reading = self.read(inputs)
        return self.logits(reading.scores[:, -1:] if last_only else reading.scores), reading.features

    def texts(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Reading:
        """Read whole texts (B, T), padded where the mask (B, T) is 0."""
        return self.read({"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False})

    def logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) from the scores of a `Reading`."""
        return self.base.get_output_embeddings()(scores) if self.split else scores

    def read(self, inputs: dict) -> Reading:
        """A forward with the base's own arguments."""
        last_layer_only = self.reads in ((-1,), ())
        if self.split:
            wanted = {} if last_layer_only else {"output_hidden_states": True}
            outputs = self.base.get_decoder()(**inputs, **wanted, return_dict=True)
            hidden = scores = outputs.last_hidden_state
        else:
            outputs = self.base(**inputs, output_hidden_states=True, return_dict=True)
            hidden, scores = outputs.hidden_states[-1], outputs.logits
        if last_layer_only:
            return Reading(hidden, hidden, scores)
        features = torch.cat([outputs.hidden_states[layer].to(hidden.device) for layer in self.reads], dim=-1)
        return Reading(features, hidden, scores)

    def behind(
        self, tokens: torch.Tensor, cache: SlotCache, position_shift: torch.Tensor, visible: torch.Tensor | None
    ) -> None:
        """One forward over a token (B, 1) of each row, whose keys and values come behind the past and do not count."""
        topology = DraftTree.root_alone().topology(tokens.device)
        self.nodes(tokens, topology, cache, cache.lengths[:, None] + position_shift, visible)
        cache.keep(torch.zeros_like(tokens), torch.zeros_like(tokens[:, 0]))

    def nodes(
        self,
        tokens: torch.Tensor,
        topology: Topology,
        cache: SlotCache,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over the nodes of a step. A root alone behind rows of one length is a plain step of the base.

        Args:
            tokens: (B, N), node 0 the root.
            topology: how the nodes hang together.
            cache: the past; the nodes' states are written before it.
            positions: (B, N) position ids.
            visible: (B, S) bool, which past slots hold no padding; None = all.

        Returns:
            logits (B, N, V) and features (B, N, F*H).
        """
        if tokens.shape[1] == 1 and cache.even:
            cache.append()
            mask: Any = None if visible is None else padded(visible, cache.extent + 1)
        else:
            cache.place(tokens.shape[1])
            masks = {
                kind: slot_mask(
                    topology.ancestors,
                    cache.lengths,
                    cache.seen_extent,
                    self.base.dtype,
                    visible=visible,
                    window=window,
                    depths=topology.depths,
                )
                for kind, window in self.windows.items()
            }
            mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return self(
            False,
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )


def attention_windows(config) -> dict[str, int | None]:
    """The attention window of each layer type of a text config.

    Raises:
        Unsupported: a layer type whose mask is not known here.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
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


def circumstances(base: PreTrainedModel) -> tuple[Hashable, ...]:
    """What the answer of `probe` depends on and a user may change between two calls."""
    device = _device(base).type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return base.config._attn_implementation, base.dtype, autocast, watched(base)


@torch.no_grad()
def probe(base: PreTrainedModel, reads: tuple[int, ...]) -> BaseReader:
    """Find out by running whether this base honours a tree, and how its logits are read.

    Two sibling nodes are compared with two plain forwards over their paths. Two rows, with the siblings swapped, for
    some models take the cache's memory to be laid out in a way that only holds for one.

    Raises:
        Unsupported: the base crashes on a tree, answers differently, or has attention layers unknown here.
    """
    config = base.config.get_text_config(decoder=True)
    windows = attention_windows(config)
    past, root, left, right = _probe_tokens(base).split((13, 1, 1, 1))
    device = past.device
    tree = DraftTree([(0,), (1,)])
    try:
        plain = [base(torch.cat([past, root, node])[None], use_cache=False).logits[0, -1] for node in (left, right)]
        if not all(expected.isfinite().any() for expected in plain):
            raise Unsupported("the base's logits are not numbers", lasting=False)
        reader = BaseReader(base, windows, split=splits(base), reads=reads)
        cache = SlotCache(2, config.num_hidden_layers, capacity=16, nodes=3)
        reader(True, input_ids=past.expand(2, -1), past_key_values=cache, use_cache=True)
        cache.count(len(past))
        topology = tree.topology(device)
        nodes = torch.stack([torch.cat([root, left, right]), torch.cat([root, right, left])])
        logits, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
    except Unsupported:
        raise
    except Exception as error:  # whatever a model raises on a tree, its own decoding still works
        reason = f"the base cannot verify a tree ({type(error).__name__}: {error})".splitlines()[0]
        raise Unsupported(reason, lasting=not out_of_memory(error)) from error
    # under autocast a base of any dtype computes in half precision
    exact = not torch.is_autocast_enabled(device.type)
    tolerance = PROBE_TOLERANCE.get(base.dtype, PROBE_TOLERANCE_HALF) if exact else PROBE_TOLERANCE_HALF
    for row, node, expected in zip((0, 0, 1, 1), (1, 2, 2, 1), plain * 2):
        difference = (logits[row, node] - expected).abs().max() / expected.abs().max()
        if not difference <= tolerance:
            said = f"a node's logits are off by {difference:.1e}, and {tolerance:.0e} is allowed"
            if getattr(base, "is_quantized", False):
                raise Unsupported(f"the quantized base rounds too differently, or ignores tree masks ({said})")
            raise Unsupported(f"the base does not honour tree masks ({said})")
    return reader


def _probe_tokens(base: PreTrainedModel) -> torch.Tensor:
    """16 different tokens where the base reads them."""
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    return torch.arange(3, 3 + 16, device=_device(base)).remainder(vocabulary)


def _device(base: PreTrainedModel) -> torch.device:
    """Where the base reads tokens; where it is offloaded its hooks take them from anywhere."""
    device = base.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def watched(base: PreTrainedModel) -> bool:
    """Whether hooks or a forward of the user's own would be passed by where the base's decoder is run alone."""
    decoder = base.get_decoder()
    for _, module in base.named_modules():  # a module comes before those that it holds
        if module is decoder:
            return False
        replaced = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")  # accelerate replaces it as well
        if replaced or module._forward_hooks or module._forward_pre_hooks:
            return True
    return False


@torch.no_grad()
def splits(base: PreTrainedModel) -> bool:
    """Whether the output projection of the decoder's last hidden state is the base's logits; no if it is `watched`."""
    if watched(base):
        return False
    tokens = _probe_tokens(base)[None, :4]
    whole = base(tokens, use_cache=False).logits
    try:
        parts = base.get_output_embeddings()(base.get_decoder()(tokens, use_cache=False).last_hidden_state)
    except (AttributeError, RuntimeError, TypeError) as error:  # its decoder is none, or more lies between
        if out_of_memory(error):
            raise
        return False
    return torch.allclose(parts, whole, rtol=1e-3, atol=1e-5 * whole.abs().max().item())


def prefill_inputs(base: PreTrainedModel, input_ids: torch.Tensor, config, inputs: dict, past: Cache | None) -> dict:
    """The base's own arguments for the prompt; where a cache holds its beginning, only for the rest.

    As in transformers, `input_ids` may be the whole text or only its new part; the attention mask tells which.
    """
    known = past.get_seq_length() if past is not None else 0
    rest = None
    if inputs.get("inputs_embeds") is not None:
        rest = inputs["inputs_embeds"].shape[1] - known
    elif known:
        mask = inputs.get("attention_mask")
        seen = mask.shape[1] if mask is not None else getattr(config, "_mask_length", -1)
        rest = input_ids.shape[1] - known if seen == input_ids.shape[1] else None
    return base.prepare_inputs_for_generation(
        input_ids, next_sequence_length=rest, is_first_iteration=True, past_key_values=past, **inputs
    )
