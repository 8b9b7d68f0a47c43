"""How a base is read: over a prompt, over the nodes of a step, over whole texts; and the probe whether trees can go.

The tree enters through public arguments alone: `position_ids` (past length + depth), a 4-D additive `attention_mask`
(one per layer type where the base has several) and a `Cache`. Some models ignore one of them, some crash; hence
`probe`.

Shapes: B rows, N nodes, T positions of a text, R = 1 or B, H hidden, F feature layers, V vocabulary, M any number.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from hf_drafthead.generation.mixers import UnknownMixer, called, mixers_of
from hf_drafthead.generation.mixers.layer import Mixer, TreeTables
from hf_drafthead.generation.releases import (
    CACHE,
    INPUTS_OF_A_STEP,
    cache_argument,
    keep_picklable,
    next_inputs,
    untested,
    with_cache,
)
from hf_drafthead.generation.slots import (
    SlotCache,
    WrittenKeys,
    key_layers,
    out_of_memory,
    padded,
    slot_mask,
    writing_layers,
)
from hf_drafthead.generation.tree import DraftTree, Topology

KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# What configs call layers that keep a state, or a state and keys, or nothing; masks of those that keep a state.
STATELESS_TYPES = {"moe", "mlp"}  # for which some releases have a layer in the cache all the same
STATE_TYPES = {"linear_attention", "conv", "mamba", "hybrid", *STATELESS_TYPES}
MOST_READ_ON = 64  # tokens that a forward reads behind the ends of rows, where states are kept
STATE_MASKS = {"linear_attention": None, "conv": None}
# Largest difference between a node and a plain forward over its path, relative to the largest logit. Eager attention
# takes its softmax in float32, whatever the dtype.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4}
PROBE_TOLERANCE_HALF = 5e-2
# Fields of configs whose attention chooses keys by score: the nodes of a tree would compete with each other.
CHOOSES_KEYS = ("index_topk", "index_topk_blocks")


LIBRARIES = ("transformers.", "accelerate.", "peft.")  # whose hooks treat every position alike


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

    features: (B, T, F*H) for a drafter to read, and behind them keys and values where it reads some; hidden: (B, T, H)
    after the final norm; scores: (B, T, V) logits, or (B, T, H) again where `BaseReader.logits` makes logits of them.
    """

    features: torch.Tensor
    hidden: torch.Tensor
    scores: torch.Tensor


@dataclass(frozen=True, eq=False)
class BaseReader:
    """How to run one base and read logits and features from it.

    base: the causal LM; windows: attention window (None = all) by layer type; split: whether the logits are what
    `output` makes of the decoder's last hidden state, so that the decoder can be run alone; reads: what the drafter
    reads, the layers of hidden states, -1 being the last after the final norm, and types of attention, of each of which
    it reads the last layer's keys and values; mixers: of the layers that keep a state, by number, see `SlotCache`;
    more: other inputs of every forward behind the prompt, by name, each with the axis on which it has an entry per
    token (None: it has none); refused: why no tree can stand behind a prompt with some inputs, by their names, where
    that was tried.
    """

    base: PreTrainedModel
    windows: dict[str, int | None]
    split: bool
    reads: tuple[int | str, ...]
    output: OutputLayer
    mixers: dict[int, tuple[Mixer, int]] = field(default_factory=dict)
    more: Mapping[str, tuple[Any, int | None]] = field(default_factory=dict)
    refused: dict[tuple[str, ...], str] = field(default_factory=dict)
    # looked up once, which a compiler must not do
    cache_name: str = field(init=False)  # that the forward has for it
    states: tuple[int, ...] = field(init=False)  # of `reads`, the layers whose hidden states are read
    keys: list[int] = field(init=False)  # and those whose keys and values are

    def __post_init__(self) -> None:
        module, kinds = self.output.decoder if self.split else self.base, kinds_of(self.reads)
        config = self.base.config.get_text_config(decoder=True)
        object.__setattr__(self, "cache_name", cache_argument(module.forward) or CACHE)
        object.__setattr__(self, "states", tuple(layer for layer in self.reads if isinstance(layer, int)))
        object.__setattr__(self, "keys", key_layers(config, kinds) if kinds else [])

    @classmethod
    def of_texts(
        cls, base: PreTrainedModel, reads: tuple[int | str, ...] = (-1,), output: OutputLayer | None = None
    ) -> BaseReader:
        """A reader of whole texts, for which a base need not be able to verify trees."""
        output = output or OutputLayer(base)
        return cls(base, {}, splits(base, output), reads, output)

    def cache(self, batch_size: int, capacity: int, nodes: int) -> SlotCache:
        """An empty cache of this base."""
        layers = writing_layers(self.base.config.get_text_config(decoder=True))
        return SlotCache(batch_size, layers, capacity, nodes, self.mixers)

    def __call__(self, last_only: bool, **inputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (B, 1 or length, V) and features (B, length, F*H) of a forward with the base's own arguments."""
        inputs.pop("logits_to_keep", None)
        reading = self.read(with_cache(self.cache_name, inputs))
        return self.logits(reading.scores[:, -1:] if last_only else reading.scores), reading.features

    def read_texts(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Reading:
        """Read whole texts (B, T), padded where the mask (B, T) is 0."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": bool(self.keys)}
        if self.keys:
            inputs[self.cache_name] = WrittenKeys(self.base.config.get_text_config(decoder=True), self.keys)
        reading = self.read(inputs)
        if self.collects:
            keep_picklable(self.base)
        return reading

    @property
    def collects(self) -> bool:
        """Whether other hidden states are read than the last, which transformers collects by hooks that stay."""
        return not self.split or self.states not in ((-1,), ())

    def logits(self, scores: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) from the scores of a `Reading`."""
        return self.output(scores) if self.split else scores

    def read(self, inputs: dict) -> Reading:
        """A forward with the base's own arguments."""
        last_layer_only = self.states in ((-1,), ())
        if self.split:
            wanted = {} if last_layer_only else {"output_hidden_states": True}
            outputs = self.output.decoder(**inputs, **wanted, return_dict=True)
            hidden = scores = outputs.last_hidden_state
        else:
            outputs = self.base(**inputs, output_hidden_states=True, return_dict=True)
            hidden, scores = outputs.hidden_states[-1], outputs.logits
        features = hidden if last_layer_only else self.features(outputs.hidden_states, hidden)
        return Reading(self.with_keys(features, inputs) if self.keys else features, hidden, scores)

    def features(self, hidden_states: tuple[torch.Tensor, ...], last: torch.Tensor) -> torch.Tensor:
        """(B, T, F*H) what the drafter reads of a forward's hidden states, of which the last (B, T, H) is normed."""
        states = [one_stream(hidden_states[layer], last).to(last.device) for layer in self.states or (-1,)]
        return torch.cat(states, dim=-1)

    def with_keys(self, features: torch.Tensor, inputs: dict) -> torch.Tensor:
        """Features (B, T, F*H) of a forward, and behind them the keys and values that it has written."""
        cache = inputs[self.cache_name]
        return append_keys(features, (cache.written(layer, features.shape[1]) for layer in self.keys))

    def known(self, features: torch.Tensor, cache: SlotCache, count: int) -> torch.Tensor:
        """Features of a prompt with what is read of `count` past positions in front that no forward has run over.

        Of these there are keys and values, and no hidden states: zeros.
        """
        wide = sum(part.shape[1] * part.shape[3] for layer in self.keys for part in cache.between(layer, 0, 1))
        nothing = features.new_zeros(len(features), count, features.shape[2] - wide)
        past = (cache.between(layer, cache.nodes, cache.nodes + count) for layer in self.keys)
        return torch.cat([append_keys(nothing, past), features], dim=1)

    @property
    def vocabulary(self) -> int:
        """V."""
        return int(self.base.config.get_text_config(decoder=True).vocab_size)

    def rewrite(
        self,
        tokens: torch.Tensor,
        cache: SlotCache,
        start: int,
        position_shift: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> None:
        """One forward over tokens (B, T) of all rows, which become the past from position `start` on."""
        if self.mixers:
            self._read_on(tokens, cache, start, position_shift, visible)
            return
        cache.append()
        cache.extent, stop = start, start + tokens.shape[1]
        positions = torch.arange(start, stop, device=tokens.device) + position_shift
        mask = None if visible is None else padded(visible, stop)
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        self.read({**inputs, **self._more(tokens.shape[1]), "use_cache": True})

    def _read_on(
        self,
        tokens: torch.Tensor,
        cache: SlotCache,
        start: int,
        position_shift: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> None:
        """As `rewrite`, from the end of each row's own past on: a state cannot go back to an earlier position."""
        total = tokens.shape[1]
        count = min(total, MOST_READ_ON)
        tree = DraftTree([(0,) * depth for depth in range(1, count)]) if count > 1 else DraftTree.root_alone()
        chain = tree.topology(tokens.device)
        order = torch.arange(count, device=tokens.device)
        for _ in range(0, total, count):
            read = cache.lengths[:, None] - start
            positions = (read + order).clamp(max=total - 1)
            places = positions + start + position_shift
            self.nodes(tokens.gather(1, positions), chain, cache, places, visible)
            cache.keep(order.expand_as(positions), (total - read[:, 0]).clamp(0, count))

    def nodes(
        self,
        tokens: torch.Tensor,
        topology: Topology,
        cache: SlotCache,
        positions: torch.Tensor,
        visible: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward over the nodes of a step: logits (B, N, V) and features (B, N, F*H).

        A root alone behind rows of one length is a plain step of the base.

        Args:
            tokens: (B, N), node 0 the root.
            topology: how the nodes hang together.
            cache: the past; the nodes' states are written before it.
            positions: (B, N) position ids.
            visible: (B, S) bool, which past slots hold no padding; None = all.
        """
        if tokens.shape[1] == 1 and cache.even and (cache.rows == 1 or not self.mixers):  # rows that ended stand still
            cache.append()
            mask: Any = None if visible is None else padded(visible, cache.extent + 1)
        else:
            cache.place(tokens.shape[1])
            past, dtype, depths = (cache.lengths, cache.seen_extent), self.base.dtype, topology.depths
            masks = {
                kind: slot_mask(topology.ancestors, *past, dtype, visible=visible, window=window, depths=depths)
                for kind, window in self.windows.items()
            }
            mask = next(iter(masks.values())) if len(masks) == 1 else masks
        inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions, self.cache_name: cache}
        inputs |= {"use_cache": True, **(self._more(tokens.shape[1]) if self.more else {})}
        reading = self._read_tree(inputs, cache, topology) if self.mixers and cache.placed else self.read(inputs)
        return self.output(reading.scores) if self.split else reading.scores, reading.features

    def _read_tree(self, inputs: dict[str, Any], cache: SlotCache, topology: Topology) -> Reading:
        """As `read`, over nodes that layers which keep a state follow by their ancestors, and by no mask."""
        mask = inputs["attention_mask"]
        masks = mask if isinstance(mask, dict) else dict.fromkeys(self.windows, mask)
        cache.tree = TreeTables(topology.parents, topology.ancestors)
        try:
            return self.read({**inputs, "attention_mask": {**masks, **STATE_MASKS} if masks else None})
        finally:
            cache.tree = None

    def _more(self, count: int) -> dict[str, Any]:
        """The other inputs of a forward over so many tokens."""
        return {
            name: value
            if axis is None
            else value.expand(*value.shape[:axis], count, *value.shape[axis + 1 :]).contiguous()
            for name, (value, axis) in self.more.items()
        }


def kinds_of(reads: tuple[int | str, ...]) -> list[str]:
    """Of what a drafter reads, the types of attention whose keys and values it reads."""
    return [read for read in reads if isinstance(read, str)]


def append_keys(features: torch.Tensor, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Features (B, T, F*H), and behind them keys and values (B, G, T, E), flat."""
    flat = (part.transpose(1, 2).flatten(2).to(features.device) for pair in pairs for part in pair)
    return torch.cat([features, *flat], dim=-1)


def one_stream(states: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Hidden states in the shape (B, T, H) of `like`.

    Some bases, such as Gemma 3n, have several streams between their layers: it is their mean, which these bases take
    before the final norm.
    """
    if states.dim() == like.dim():
        return states
    extra = next(at for at in range(states.dim()) if states.shape[:at] + states.shape[at + 1 :] == like.shape)
    return states.mean(extra)


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


def circumstances(base: PreTrainedModel) -> tuple[Hashable, ...]:
    """What the answer of `probe` depends on and a user may change between two calls: forwards and hooks of all modules,
    and what torch computes by where no guard of a compiler looks at it."""
    device, backends = _device(base).type, torch.backends.cuda
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    attention = (backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled(), backends.math_sdp_enabled())
    computed = (base.dtype, autocast, attention, backends.cudnn_sdp_enabled(), torch.get_float32_matmul_precision())
    return base.config._attn_implementation, base.config._experts_implementation, *computed, *forwards(base)


def forwards(base: PreTrainedModel) -> Iterator[Hashable]:
    """Of every module what runs when it is called, but for what libraries have put there."""
    every_module = torch.nn.modules.module
    yield from (*every_module._global_forward_hooks.values(), None, *every_module._global_forward_pre_hooks.values())
    for module in base.modules():
        forward = module.__dict__.get("forward")
        if forward is None or hasattr(forward, "is_traced_once"):
            forward = type(module).forward
        yield forward
        yield from called(module) if hasattr(module, "layer_idx") else ()  # which may be replaced in a mixer's module
        if module._forward_hooks or module._forward_pre_hooks:
            yield from hooks_of(module)


def hooks_of(module: nn.Module) -> list[tuple[int, Any]]:
    """The hooks of a module that are the user's own, and their numbers, which are not given twice."""
    hooks = (*module._forward_hooks.items(), *module._forward_pre_hooks.items())
    return [(number, hook) for number, hook in hooks if not getattr(hook, "__module__", "").startswith(LIBRARIES)]


def is_hooked(base: PreTrainedModel) -> bool:
    """Whether hooks or forwards of the user's own may do something else today than when the base was probed."""
    every_module = torch.nn.modules.module
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return True
    for module in base.modules():
        forward = module.__dict__.get("forward")
        replaced = forward is not None and not (hasattr(module, "_hf_hook") or hasattr(forward, "is_traced_once"))
        if replaced or ((module._forward_hooks or module._forward_pre_hooks) and hooks_of(module)):
            return True
    return False


def of_a_hook(error: Exception, base: PreTrainedModel, run: Callable[..., Any], *arguments: Any) -> bool:
    """Whether an error of a function that runs the base came of a hook of the user's: called again it raises none.

    One that is raised again is raised in the base's own decoding, too, or comes of the tree.
    """
    with contextlib.suppress(Exception):
        if is_hooked(base) and not out_of_memory(error):
            run(*arguments)
            return True
    return False


@torch.no_grad()
def probe(base: PreTrainedModel, reads: tuple[int | str, ...]) -> BaseReader:
    """Find out by running whether this base honours a tree (`try_tree`), and how its logits are read.

    Raises:
        Unsupported: the base crashes on a tree, answers differently, or has attention layers unknown here.
    """
    config = base.config.get_text_config(decoder=True)
    mixers = _mixers(base, config)
    windows = attention_windows(config, states=bool(mixers))
    try:
        output = OutputLayer(base)
        reader = BaseReader(base, windows, splits(base, output), reads, output, mixers)
    except Exception as error:
        if out_of_memory(error):
            raise _refused("the base cannot verify a tree", error) from error
        raise
    try_tree(reader)
    return reader


@torch.no_grad()
def try_tree(reader: BaseReader, again: bool = False) -> None:
    """Compare two sibling nodes with two plain forwards over their paths.

    Two rows, with the siblings swapped, for some models take the cache's memory to be laid out in a way that only holds
    for one. Where layers keep a state, also compare the token behind a commit, of other nodes in each row. Where a
    forward over a whole text is off, compare with decoding token by token, for some models attend both ways in the
    first forward of a text.

    Raises:
        Unsupported: the base crashes on a tree, or answers differently.
    """
    base, mixers = reader.base, reader.mixers
    past, root, left, right = probe_tokens(base).split((13, 1, 1, 1))
    device = past.device
    try:
        plain = [_decoded(base, past, (root, node), bool(mixers)) for node in (left, right)]
        if not all(expected.isfinite().any() for expected in plain):
            raise Unsupported("the base's logits are not numbers", lasting=False)
        cache = reader.cache(2, capacity=16, nodes=3)
        reader(True, **{"input_ids": past.expand(2, -1), CACHE: cache, "use_cache": True})
        cache.count(len(past))
        topology = DraftTree([(0,), (1,)]).topology(device)
        nodes = torch.stack([torch.cat([root, left, right]), torch.cat([root, right, left])])
        logits, _ = reader.nodes(nodes, topology, cache, cache.lengths[:, None] + topology.depths, None)
        pairs = [(logits[row, node], plain[row != node - 1]) for row, node in ((0, 1), (0, 2), (1, 2), (1, 1))]
        if mixers:  # what a commit folded in shows in the next token
            kept, alone = torch.tensor([[0, 1], [0, 1]], device=device), DraftTree.root_alone().topology(device)
            cache.keep(kept, torch.tensor([2, 1], device=device))
            after, _ = reader.nodes(right.expand(2, 1), alone, cache, cache.lengths[:, None], None)
            pasts = ((root, left, right), (root, right))
            pairs += [(after[row, 0], _decoded(base, past, tokens, True)) for row, tokens in enumerate(pasts)]
    except Unsupported:
        raise
    except Exception as error:  # whatever a model raises on a tree, its own decoding still works
        if not again and of_a_hook(error, base, try_tree, reader, True):
            raise
        raise _refused("the base cannot verify a tree", error) from error
    finally:
        keep_picklable(base)
    found, expected = (torch.stack(logits) for logits in zip(*pairs))
    said = _difference(base, found, expected)
    if said and not mixers:
        with contextlib.suppress(Exception):  # it does not take its cache so: what was found out stands
            plain = [_decoded(base, past, (root, node), True) for node in (left, right)]
            said = _difference(base, found, torch.stack(plain * 2)) and said
    if said:
        if getattr(base, "is_quantized", False):
            raise Unsupported(f"the quantized base rounds too differently, or ignores tree masks ({said}){untested()}")
        raise Unsupported(f"the base does not honour tree masks ({said}){untested()}")


def _mixers(base: PreTrainedModel, config) -> dict[int, tuple[Mixer, int]]:
    """The mixers of a base's layers that keep a state, and how many states each has.

    Raises:
        Unsupported: one of them has no tree form.
    """
    layers, kinds = DynamicCache(config=config).layers, dict(enumerate(getattr(config, "layer_types", None) or ()))
    states = {
        number: layer.number_of_states
        for number, layer in enumerate(layers)
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


def _refused(reason: str, error: Exception) -> Unsupported:
    said = f"{reason} ({type(error).__name__}: {error})".splitlines()[0]
    return Unsupported(said + untested(), lasting=not out_of_memory(error))


def _difference(base: PreTrainedModel, logits: torch.Tensor, expected: torch.Tensor) -> str | None:
    """By how much logits of nodes (B, n, V) are off what plain forwards give, where it is more than rounding."""
    # under autocast a base of any dtype computes in half precision
    exact = not torch.is_autocast_enabled(expected.device.type)
    tolerance = PROBE_TOLERANCE.get(base.dtype, PROBE_TOLERANCE_HALF) if exact else PROBE_TOLERANCE_HALF
    off = (logits - expected).abs().amax(-1) / expected.abs().amax(-1)
    if bool((off <= tolerance).all()):  # never of what is not a number
        return None
    return f"a node's logits are off by {off.max():.1e}, and {tolerance:.0e} is allowed"


@dataclass(frozen=True)
class PromptInputs:
    """What the base has prepared for a prompt of a call, and how its rows lie in the cache.

    input_ids: (B, P); arguments: of the prompt's forward; call: the inputs of the call, without the cache;
    position_shift, visible: as the steps have them.
    """

    input_ids: torch.Tensor
    arguments: dict[str, Any]
    call: dict[str, Any]
    position_shift: torch.Tensor
    visible: torch.Tensor | None

    @property
    def unusual(self) -> tuple[str, ...]:
        """Names of the inputs that a step does not make by itself; positions of several axes are such."""
        prepared = {name for each in (self.arguments, self.call) for name, value in each.items() if value is not None}
        positions = self.arguments.get("position_ids")
        several = {"position_ids"} if positions is not None and positions.dim() > 2 else set()
        return tuple(sorted(prepared - INPUTS_OF_A_STEP | several))

    @property
    def ends_on_several_places(self) -> bool:
        """Whether a row ends in an image, where its axes (time, height, width, the last three) have come to differ."""
        positions = self.arguments.get("position_ids")
        if positions is None or positions.dim() < 3:
            return False
        last = positions[-3:, :, -1]
        return bool((last != last[-1]).any())


@torch.no_grad()
def read_and_try(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache
) -> tuple[torch.Tensor, torch.Tensor, BaseReader]:
    """Read a prompt with unusual inputs by a forward of the base's own, and try whether a tree can stand behind it.

    Returns:
        logits at the last position, features at all of them (B, T, F*H), and how the steps read the base.

    Raises:
        Unsupported: the base crashes, or answers differently.
    """
    said = f"with the model input {', '.join(prompt.unusual)} the base"
    if prompt.unusual in reader.refused:
        raise Unsupported(reader.refused[prompt.unusual])
    if prompt.ends_on_several_places:  # as other prompts with these inputs do not
        raise Unsupported("a row of the prompt ends where its positions have several axes that differ", lasting=False)
    try:
        outputs = reader.base(**prompt.arguments, output_hidden_states=True, return_dict=True)
        features = reader.features(outputs.hidden_states, outputs.hidden_states[-1])
        features = reader.with_keys(features, {reader.cache_name: cache}) if reader.keys else features
    except Exception as error:  # the base's own decoding works, or says what is wrong with the prompt
        if of_a_hook(error, reader.base, lambda: reader.base(**prompt.arguments)):
            raise
        raise Unsupported(str(_refused(f"{said} cannot read the prompt", error)), lasting=False) from error
    cache.count(features.shape[1])
    try:
        steps, off = _try_steps(reader, prompt, cache, outputs)
        if off is not None:
            raise Unsupported(f"{said} does not honour tree masks ({off}){untested()}")
    except Exception as error:
        if of_a_hook(error, reader.base, _try_steps, reader, prompt, cache, outputs):
            raise
        refusal = error if isinstance(error, Unsupported) else _refused(f"{said} cannot verify a tree", error)
        if refusal.lasting and not is_hooked(reader.base):
            reader.refused[prompt.unusual] = str(refusal)
        raise refusal from error.__cause__
    return outputs.logits[:, -1:], features, steps


def _try_steps(
    reader: BaseReader, prompt: PromptInputs, cache: SlotCache, outputs: Any
) -> tuple[BaseReader, str | None]:
    """Compare two sibling nodes with the base's own steps over their paths.

    The nodes are given what the base itself would hand to a later step. All is behind the past of the cache, which
    stays as it is.

    Returns:
        how the steps read the base, and by how much they are off, if they are.
    """
    base, extent, lengths, inputs = reader.base, cache.extent, cache.lengths, {**prompt.call, CACHE: cache}
    tokens = probe_tokens(base)[-3:].to(prompt.input_ids.device).expand(len(lengths), -1)  # (B, 3) root, left, right
    text = torch.cat([prompt.input_ids, tokens], dim=1)
    first, behind_root = next_inputs(base, text[:, :-2], outputs, inputs, 1)
    before = cache.states()
    cache.append()
    root = base(**first, return_dict=True)
    cache.count(1)
    behind = cache.states()
    plain = [root.logits[:, -1]]
    for node in tokens[:, 1:].split(1, dim=1):  # the right one takes the place of the left one in the cache
        second, _ = next_inputs(base, torch.cat([text[:, :-2], node], dim=1), root, behind_root, 1)
        plain.append(base(**second, return_dict=True).logits[:, -1])
        cache.put_back(behind)
    cache.put_back(before)
    cache.extent, cache.lengths = extent, lengths
    third, _ = next_inputs(base, text, outputs, inputs, 3)
    more = {name: (first[name], _token_axis(name, *values)) for name, *values in _others(first, second, third)}
    steps = replace(reader, split=reader.split and not more, more=more)
    topology = DraftTree([(0,), (1,)]).topology(lengths.device)
    positions = lengths[:, None] + topology.depths + prompt.position_shift
    logits, _ = steps.nodes(tokens, topology, cache, positions, prompt.visible)
    cache.append()
    return steps, _difference(base, logits, torch.stack(plain, dim=1))


def _others(*arguments: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """What forwards are given beyond that which a step makes by itself: the name, and the value of each."""
    names = {name for each in arguments for name, value in each.items() if value is not None} - INPUTS_OF_A_STEP
    return ((name, *(each.get(name) for each in arguments)) for name in sorted(names))


def _token_axis(name: str, first: Any, second: Any, three: Any) -> int | None:
    """On which axis an input has an entry per token, of two steps of one token and one of three; None: on none.

    Raises:
        Unsupported: what it holds depends on the step.
    """
    if not all(isinstance(value, torch.Tensor) for value in (first, second, three)):
        if first is second is three or (type(first) in (bool, int, float, str) and first == second == three):
            return None
    elif first.dim() == three.dim() and torch.equal(first, second):
        axes = [axis for axis, (one, several) in enumerate(zip(first.shape, three.shape)) if one != several]
        if not axes and torch.equal(first, three):
            return None
        if len(axes) == 1 and first.shape[axes[0]] == 1:  # what three tokens have is that of one, or of the last three
            return axes[0]
    raise Unsupported(f"the model input {name} depends on the step, and the nodes of a tree are of several")


def probe_tokens(base: PreTrainedModel) -> torch.Tensor:
    """16 different tokens where the base reads them."""
    vocabulary = base.config.get_text_config(decoder=True).vocab_size
    return torch.arange(3, 3 + 16, device=_device(base)).remainder(vocabulary)


def special_tokens(base: PreTrainedModel) -> torch.Tensor:
    """The tokens that stand for what is no text, of a base that reads more than that."""
    config, text = base.config, base.config.get_text_config(decoder=True)
    fields = vars(config).items() if config is not text else ()
    ids = {value for name, value in fields if name.endswith(("_token_id", "_token_index")) and type(value) is int}
    return torch.tensor([value for value in sorted(ids) if 0 <= value < text.vocab_size], device=_device(base))


def _device(base: PreTrainedModel) -> torch.device:
    """Where the base reads tokens; where it is offloaded its hooks take them from anywhere."""
    device = base.get_input_embeddings().weight.device
    return torch.device("cpu") if device.type == "meta" else device


def watched(base: PreTrainedModel, decoder: nn.Module | None = None) -> bool:
    """Whether hooks or a forward of the user's own would be passed by where the base's decoder is run alone."""
    decoder = base.get_decoder() if decoder is None else decoder
    for _, module in base.named_modules():  # a module comes before those that it holds
        if module is decoder:
            return False
        replaced = "forward" in module.__dict__ and not hasattr(module, "_hf_hook")  # accelerate replaces it as well
        if replaced or module._forward_hooks or module._forward_pre_hooks:
            return True
    return False


class OutputLayer:
    """What a base makes of its decoder's last hidden state (..., W): logits (..., V); found out by running it.

    Most bases apply their lm_head and nothing else. Where others scale or cap, their own `forward` is run, on a decoder
    that hands on the states that it is given.

    Attributes:
        head: the base's lm_head.
        decoder: the part of the base that gives the states; that around its decoder where this reads some tokens, such
            as those of images, in a way of its own.
        known: whether it was found; if not, the lm_head alone is taken for it.
        width: W; None where the decoder cannot be run.
    """

    def __init__(self, base: PreTrainedModel):
        self.base, self.head = base, base.get_output_embeddings()
        self._around: nn.Module | None = None  # a copy of the base, its parts shared, with such a decoder
        self._behind: nn.Module | None = None  # the same with a lm_head that does so, too
        self.decoder: Any = None
        self.width: int | None = None
        training = [module for module in base.modules() if module.training]
        base.eval()  # dropout would hide it
        try:
            self.known = self._find()
        except Exception as error:  # its decoder is none, it has no memory yet, or it needs what is not there
            if out_of_memory(error) or of_a_hook(error, base, self._find):
                raise
            self.known = False
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def _find(self) -> bool:
        """Compare the base's logits with what comes of its decoder's states."""
        tokens = probe_tokens(self.base)[None, :4]
        logits = self.base(tokens, use_cache=False).logits
        self.decoder = self.base.get_decoder()
        states = self.decoder(tokens, use_cache=False).last_hidden_state
        self.width = states.shape[-1]
        for around in _without_decoder(self.base):
            try:
                found = _close(self._of_forward(around, states), logits)
            except Exception as error:  # another place of the decoder may do
                if out_of_memory(error) or of_a_hook(error, self.base, self._of_forward, around, states):
                    raise
                continue
            if found:
                # what cannot be seen in the states of a few tokens shows in others: a cap only in large logits
                wide = torch.linspace(-1, 1, states.shape[-1]).to(states) * states.new_tensor([[1.0], [100.0]])
                whole, alone = self._of_forward(around, wide[None]), self.head(wide[None])
                if whole.dtype != alone.dtype or not torch.equal(whole, alone):
                    path = next(name for name, module in around.named_modules() if module is self.head)
                    self._around, self._behind = around, with_part(around, path.split("."), _Passed)
                return self._find_decoder()
        return _close(self.head(states), logits) and self._find_decoder()

    def _find_decoder(self) -> bool:
        """Take the decoder, or the part around it, with which the tokens that have a meaning for the base agree."""
        tokens = special_tokens(self.base)
        if not len(tokens):
            return True
        try:
            logits = self.base(tokens[None], use_cache=False).logits
        except Exception as error:  # it does not read them without an image
            if out_of_memory(error) or of_a_hook(error, self.base, self.base, tokens[None]):
                raise
            return True
        for part in (self.decoder, self.base.base_model):
            if _close(self(part(tokens[None], use_cache=False).last_hidden_state), logits):
                self.decoder = part
                return True
        return False

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Logits (..., V) of states (..., W)."""
        return self.head(states) if self._around is None else self._of_forward(self._around, states)

    @property
    def is_head(self) -> bool:
        """Whether the logits are what the lm_head makes of the states, and nothing else."""
        return self._around is None

    def behind(self, products: torch.Tensor) -> torch.Tensor:
        """Logits (..., D) from products of a lm_head (..., D), which may have rows of some tokens alone."""
        return products if self._behind is None else self._of_forward(self._behind, products)

    @torch.no_grad()
    def scale(self) -> float:
        """By what the lm_head's own products are best multiplied to be nearest to the base's logits, on its states."""
        if self._around is None:
            return 1.0
        states = self.base.get_decoder()(probe_tokens(self.base)[None], use_cache=False).last_hidden_state
        products, logits = self.head(states).double(), self(states).double()
        kept = logits.isfinite()
        return float((products * logits)[kept].sum() / (products * products)[kept].sum())

    def _of_forward(self, around: nn.Module, states: torch.Tensor) -> torch.Tensor:
        texts = states.reshape(1, -1, states.shape[-1]) if states.dim() != 3 else states
        logits = type(self.base).forward(around, inputs_embeds=texts, use_cache=False, return_dict=True).logits
        return logits.reshape(*states.shape[:-1], logits.shape[-1])


class _Passed(nn.Module):
    """In the place of another module: it hands on what it is given, and has what that one has."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.__dict__["replaced"] = module  # past nn.Module's bookkeeping

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["replaced"], name)

    def forward(self, states: torch.Tensor, *args, **kwargs) -> Any:
        return states


class _GivenStates(_Passed):
    """In the place of a decoder, whose output is what it is given as embeddings."""

    def forward(self, *args, **kwargs) -> _DecoderOutput:
        return _DecoderOutput(kwargs["inputs_embeds"])


class _DecoderOutput:
    """The last hidden state, whatever it is asked by; every other field is None."""

    def __init__(self, states: torch.Tensor):
        self.last_hidden_state = states

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, key: Any) -> torch.Tensor | None:
        return self.last_hidden_state if key in (0, "last_hidden_state") else None


def _without_decoder(base: PreTrainedModel) -> list[nn.Module]:
    """Copies of a base that share all its parts but the decoder: in them its part that holds the embeddings hands on
    what it is given, or only the decoder within that part does."""
    embeddings, decoder = base.get_input_embeddings(), base.get_decoder()
    paths = []
    for inner in (embeddings, decoder):
        name = next((name for name, module in base.named_modules() if module is inner), "")
        if name:
            paths.append(name.split(".")[:1] if inner is embeddings else name.split("."))

    return [with_part(base, path, _GivenStates) for path in paths]


def with_part(module: nn.Module, path: list[str], kind: Callable[[Any], nn.Module]) -> nn.Module:
    """A copy of a module that shares all its parts but the one at the path, which `kind` makes of the module's own."""
    if not path:
        return kind(module)
    shared = copy.copy(module)
    shared.__dict__ = {**module.__dict__, "_modules": dict(module._modules)}
    shared._modules[path[0]] = with_part(module._modules[path[0]], path[1:], kind)  # type: ignore[arg-type]
    return shared


def splits(base: PreTrainedModel, output: OutputLayer) -> bool:
    """Whether `output` makes the base's logits of the decoder's last hidden state; no if it is `watched`."""
    return output.known and not watched(base, output.decoder)


def _close(found: torch.Tensor, logits: torch.Tensor) -> bool:
    smallest = 1e-5 * logits.abs().max().item()
    return found.shape == logits.shape and torch.allclose(found.to(logits), logits, rtol=1e-3, atol=smallest)
